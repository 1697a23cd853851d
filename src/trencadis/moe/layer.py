"""The experts of an MoE layer: gather, gate and up, activation, down, weighted sum, with a backward pass of its own.

    rows    [m, d]    x by token, m = t * k                      sorted by expert
    z       [m, f]    rows @ w_gate, rows @ w_up                 kept for the backward pass
    h       [m, f]    activation(z_gate, z_up)
    y       [m, d]    h @ w_down
    out     [t, d]    sum over k of weight * y                   a gather by token

    d y     [m, d]    d out by token                             without the weights, which are applied to d h
    d h     [m, f]    d y @ w_downᵀ
    d weight          sum over f of d h * h                      so that y is not needed
    d z     [m, f]    pullback of the activation at z, of weight * d h
    d w               (weight * h)ᵀ d y, rowsᵀ d z_gate, rowsᵀ d z_up
    d x     [t, d]    sum over k of d z_gate @ w_gateᵀ + d z_up @ w_upᵀ

rows and h are computed again in the backward pass: one is a gather and the other elementwise. Neither rows nor d y are
stored where the kernels of products gather them by token.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from trencadis.core import arguments, gated
from trencadis.core.activation import Activation
from trencadis.core.alike import sharded_like
from trencadis.core.call import Options, Steps, overrides_of, sizes_and_window
from trencadis.core.dtypes import accumulator
from trencadis.core.epilogue import Epilogue, Gate, Gather
from trencadis.core.linear import with_backward
from trencadis.core.mesh import explicit_mesh, resharded_like, sharding_of
from trencadis.core.order import after
from trencadis.core.spans import clamp_first, offsets
from trencadis.moe.permutation import (
    Owned,
    Permutation,
    assignments_of,
    owned_mask,
    permute,
    rows_of,
    rows_of_tokens,
    sum_rows,
    weighted_sum,
)
from trencadis.quant.product import contraction_product, rows_product
from trencadis.quant.recipe import Recipe
from trencadis.quant.scaled import Scaled
from trencadis.quant.training import trained

Save: TypeAlias = Literal["least", "fast", "inputs"]
SAVE: tuple[Save, ...] = ("least", "fast", "inputs")


class Experts(NamedTuple):
    """The parameters of the experts: arrays, quantized arrays, or None where there is none."""

    gate: Any = None  # [e, d, f]
    up: Any = None  # [e, d, f]
    down: Any = None  # [e, f, d]
    bias_gate: Any = None  # [e, f]
    bias_up: Any = None  # [e, f]
    bias_down: Any = None  # [e, d]


class Indices(NamedTuple):
    """What a layer is not differentiated in: the order of the rows, the window of experts, quantized weights."""

    permutation: Permutation
    first: Array  # i32[]: the expert whose weights are the first
    frozen: Experts  # the quantized ones


class Inputs(NamedTuple):
    """What a layer is differentiated in."""

    x: Array  # [t, d]
    weights: Array  # f32[t, k]
    experts: Experts  # those that are arrays


class Rows(NamedTuple):
    """Rows of tokens, sorted by expert; where they are not there, products gather them."""

    tokens: Array  # [t, d]
    rows: Array | None  # [m, d]


class Kept(NamedTuple):
    """What the forward pass keeps for the backward pass; what is not here is computed again."""

    z: tuple[Array, ...]  # the pre-activations [m, f] of gate and up
    rows: Array | None = None  # [m, d]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The static description of a layer."""

    activation: Activation  # of gate and up, or of up alone
    dtype: np.dtype[Any]  # of x, the pre-activations and the result
    gated: bool
    traced: bool = False  # the activation closes over traced values, which no kernel can
    save: Save = "least"
    options: Options = Options()

    @property
    def wide(self) -> np.dtype[Any]:
        """The dtype in which elementwise functions and sums are computed."""
        return accumulator(self.dtype, np.float32)

    def apply(self, z: tuple[Array, ...]) -> Array:
        """The activation of pre-activations [m, f], in the wide dtype."""
        return jax.vmap(jax.vmap(self.activation))(*(resharded_like(each.astype(self.wide), z[0]) for each in z))


def run(layer: Layer, indices: Indices, inputs: Inputs) -> Array:
    """The result [t, d] of the layer, with its own backward pass."""
    return with_backward(
        functools.partial(value, layer), functools.partial(_forward, layer), functools.partial(_backward, layer)
    )(indices, inputs)


def value(layer: Layer, indices: Indices, inputs: Inputs) -> Array:
    """The result [t, d] of the layer, as a composition of functions that are differentiable by themselves."""
    experts = _merged(indices.frozen, inputs.experts)
    h, _ = _activations(layer, indices, experts, Rows(inputs.x, None), keep=False)
    y = _product(layer, indices, h, experts.down, experts.bias_down)
    return weighted_sum(y, inputs.weights, indices.permutation, _window(indices, experts, y.shape[0]))


def quantized(layer: Layer, recipe: Recipe, indices: Indices, inputs: Inputs) -> Array:
    """The result of the layer whose products quantize their operands by a recipe; rows once for both gate and up."""
    experts = inputs.experts
    sizes, first = indices.permutation.sizes, indices.first
    multiply = functools.partial(trained, recipe, options=layer.options, group_offset=first)
    rows = permute(inputs.x, indices.permutation)  # where they are quantized before, only their gradient is of use
    narrow = _quantized_rows(layer, recipe, indices, inputs)
    first_two = [(experts.gate, experts.bias_gate)] * layer.gated + [(experts.up, experts.bias_up)]
    z = tuple(multiply(rows, w, sizes, layer.dtype, steps=Steps(bias=bias), rows=narrow) for w, bias in first_two)
    h = layer.apply(z).astype(layer.dtype)
    over = layer.options.over
    down = dataclasses.replace(layer.options, over=over._replace(k=over.n, n=()))
    y = multiply(h, experts.down, sizes, layer.dtype, options=down, steps=Steps(bias=experts.bias_down))
    return weighted_sum(y, inputs.weights, indices.permutation, _window(indices, experts, y.shape[0]))


def _quantized_rows(layer: Layer, recipe: Recipe, indices: Indices, inputs: Inputs) -> Scaled | None:
    """The rows, quantized before they are gathered: there are k times fewer tokens, and narrower rows to move.

    None where a recipe has no format for rows, or scales that some of the rows share.
    """
    x, permutation = jax.lax.stop_gradient(inputs.x), indices.permutation
    if not isinstance(recipe, Recipe) or recipe.lhs is None or explicit_mesh(*jax.tree.leaves(inputs)) is not None:
        return None
    tokens, m = x.shape[0], permutation.token.shape[0]
    low, high = _owned_rows(indices, inputs.experts, m)
    rows = permutation.inverse.reshape(tokens, -1)
    here = jnp.any((rows >= low) & (rows < high), axis=1, keepdims=True)  # other tokens have no part in scales
    q = recipe.rows(jnp.where(here, x, 0), layer.options.over)
    assert isinstance(q, Scaled)
    if q.block[0] not in (1, tokens):
        return None
    whole = q.scale.shape[0] == 1 < tokens
    scale = q.scale if whole else permute(q.scale, permutation)
    return Scaled(permute(q.values, permutation), scale, q.format, (m if whole else 1, q.block[1]), q.total)


def _forward(layer: Layer, indices: Indices, inputs: Inputs) -> tuple[Array, Kept]:
    experts = _merged(indices.frozen, inputs.experts)
    rows = permute(inputs.x, indices.permutation) if layer.save == "fast" else None
    h, z = _activations(layer, indices, experts, Rows(inputs.x, rows), keep=layer.save != "inputs")
    y = _product(layer, indices, h, experts.down, experts.bias_down)
    out = weighted_sum(y, inputs.weights, indices.permutation, _window(indices, experts, y.shape[0]))
    return out, Kept(z, rows=rows)


def _backward(layer: Layer, indices: Indices, inputs: Inputs, kept: Kept, ct: Array) -> Inputs:
    permutation, experts = indices.permutation, _merged(indices.frozen, inputs.experts)
    gathers = _one_kernel(layer, experts) and explicit_mesh(inputs.x, *jax.tree.leaves(experts)) is None
    x, d_y = Rows(inputs.x, kept.rows), Rows(ct, None)
    if not gathers:
        x = Rows(inputs.x, _rows(indices, x))
    if not gathers or experts.bias_down is not None:
        d_y = Rows(ct, _rows(indices, d_y))
    z = kept.z or _activations(layer, indices, experts, x, keep=True)[1]
    weight = rows_of(inputs.weights, permutation).astype(layer.wide)  # [m]
    d_z, weighted, d_weight = _pullback(layer, indices, experts, d_y, z, weight)
    if experts.bias_down is not None:  # d y by the bias of its expert: a product with [e, d, 1]
        of_bias = _product(layer, indices, _rows(indices, d_y), experts.bias_down[:, :, None])[:, 0]
        d_weight = d_weight + of_bias.astype(d_weight.dtype)
    d_experts = _d_experts(layer, indices, inputs.experts, (x, weighted, weight[:, None]), (d_z, d_y), gathers=gathers)
    # on CPUs d rows take the memory of arrays that only d experts need
    late = permutation._replace(sizes=after(permutation.sizes, *jax.tree.leaves(d_experts)))
    d_rows = _d_rows(layer, indices._replace(permutation=late), experts, d_z)
    return Inputs(
        x=sum_rows(d_rows, permutation, ct.shape[0], _window(indices, experts, d_rows.shape[0])),
        weights=assignments_of(d_weight, permutation, ct.shape[0]).astype(inputs.weights.dtype),
        experts=d_experts,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Products


def _rows(indices: Indices, x: Rows) -> Array:
    """The rows [m, d], gathered if they are not there."""
    return permute(x.tokens, indices.permutation) if x.rows is None else x.rows


def _gathered(indices: Indices, x: Rows, operand: str = "lhs") -> tuple[Gather | None, Array, Any]:
    """How a product gets rows: how it gathers them, if they are not there, its operand, and its indices."""
    if x.rows is not None:
        return None, x.rows, ()
    return Gather(x.tokens.shape[0], rows_of_tokens, operand), x.tokens, indices.permutation[:2]


def _activations(
    layer: Layer, indices: Indices, experts: Experts, x: Rows, *, keep: bool
) -> tuple[Array, tuple[Array, ...]]:
    """The activations [m, f], and with keep the pre-activations of gate and up, or of up alone."""
    if _one_kernel(layer, experts):
        bias_gate, bias_up = _alike(experts.bias_gate, experts.bias_up)
        gather, lhs, by = _gathered(indices, x)
        gate = Gate(activation=layer.activation, keep=keep, gather=gather)
        rest = (experts.up, *(() if bias_up is None else (bias_up,)), *by)
        h, *kept = _gated(layer, indices, gate, lhs, experts.gate, bias_gate, rest)
        return h, tuple(kept)
    rows = _rows(indices, x)
    pairs = ((experts.gate, experts.bias_gate), (experts.up, experts.bias_up))[not layer.gated :]
    z = tuple(_product(layer, indices, rows, w, bias) for w, bias in pairs)
    return layer.apply(z).astype(layer.dtype), z if keep else ()


def _pullback(
    layer: Layer, indices: Indices, experts: Experts, d_y: Rows, z: tuple[Array, ...], weight: Array
) -> tuple[tuple[Array, ...], Array, Array]:
    """The gradients of the pre-activations, the activations times weight, and the gradient [m] of weight."""
    if _one_kernel(layer, experts):
        gather, lhs, by = _gathered(indices, d_y)
        gate = Gate(activation=layer.activation, pullback=True, gather=gather)
        d_gate, d_up, weighted, d_weight = _gated(
            layer, indices, gate, lhs, experts.down, None, (*z, weight, *by), transposed=True
        )
        return (d_gate, d_up), weighted, d_weight
    d_h = _product(layer, indices, _rows(indices, d_y), experts.down, transposed=True).astype(layer.wide)
    h, pullback = jax.vjp(lambda *z: layer.apply(z), *z)
    d_h, factor = resharded_like(d_h, h), weight.astype(layer.wide)[:, None]
    d_weight = jnp.sum(jnp.where(_owned(indices, experts, d_h.shape[0]), d_h * h, 0), axis=1)
    d_z = tuple(each.astype(layer.dtype) for each in pullback(factor * d_h))
    return d_z, (factor * h).astype(layer.dtype), d_weight


def _alike(*biases: Array | None) -> list[Array | None]:
    """The biases in one dtype, zeros where one is not there; None of each if there are none."""
    given = [bias for bias in biases if bias is not None]
    if not given:
        return list(biases)
    shape, dtype = given[0].shape, functools.reduce(accumulator, {bias.dtype for bias in given})
    return [jnp.zeros(shape, dtype) if bias is None else bias.astype(dtype) for bias in biases]


def _one_kernel(layer: Layer, experts: Experts) -> bool:
    """Whether gate and up can be one problem: two arrays of one dtype."""
    arrays = not any(isinstance(w, Scaled) for w in experts[:3])
    return layer.gated and not layer.traced and arrays and experts.gate.dtype == experts.up.dtype


def _gated(
    layer: Layer, indices: Indices, gate: Gate, lhs: Array, rhs: Array, bias: Array | None, rest: tuple[Array, ...],
    *, transposed: bool = False,
) -> list[Array]:  # fmt: skip
    """The results of a product with a gated activation, or with its pullback; rest are the operands of the gate."""
    epilogue = Epilogue(bias=None if bias is None else np.dtype(bias.dtype))
    problem = arguments.rows_problem(
        lhs, rhs, indices.permutation.sizes, layer.dtype, transpose_rhs=transposed, epilogue=epilogue, precision=None
    ).replace(gate=gate, m=indices.permutation.token.shape[0])
    after = sizes_and_window(problem, indices.permutation.sizes, indices.first)
    biases = () if bias is None else (bias,)
    return gated.run(problem, overrides_of(problem, layer.options), lhs, rhs, *after, *biases, *rest)


def _product(
    layer: Layer, indices: Indices, rows: Array, w: Any, bias: Array | None = None, *,
    transposed: bool = False, existing: Array | None = None,
) -> Array:  # fmt: skip
    """Rows times the weights of their experts, or the transposed ones, in the dtype of the layer."""
    return rows_product(
        rows, w, indices.permutation.sizes, layer.dtype, layer.options, Steps(bias=bias, existing_out=existing),
        transpose_rhs=transposed, group_offset=indices.first,
    )  # fmt: skip


def _d_rows(layer: Layer, indices: Indices, experts: Experts, d_z: tuple[Array, ...]) -> Array:
    """The gradient [m, d] of the rows, from those of the pre-activations."""
    if _one_kernel(layer, experts):
        rest = (d_z[1], experts.up)
        (total,) = _gated(layer, indices, Gate(activation=None), d_z[0], experts.gate, None, rest, transposed=True)
        return total
    total = _product(layer, indices, d_z[-1], experts.up, transposed=True)
    return _product(layer, indices, d_z[0], experts.gate, transposed=True, existing=total) if layer.gated else total


def _d_experts(
    layer: Layer, indices: Indices, experts: Experts, lhs: tuple[Rows, Array, Array],
    gradients: tuple[tuple[Array, ...], Rows], *, gathers: bool,
) -> Experts:  # fmt: skip
    """The gradients of the parameters that are arrays: sums over the rows of each expert."""
    (x, weighted, weight), (d_z, d_y) = lhs, gradients
    d_gate, d_up = d_z[0] if layer.gated else None, d_z[-1]
    ones = jnp.ones(weight.shape, d_up.dtype)  # exact in any dtype, and products of two dtypes take longer

    def contracted(param: Array | None, lhs: Array | None, rhs: Array | None) -> Array | None:
        if param is None or lhs is None or rhs is None:
            return None
        whole = param if param.ndim == 3 else param[:, None, :]
        out = contraction_product(
            lhs, rhs, indices.permutation.sizes, param.dtype,
            dataclasses.replace(layer.options, out_sharding=sharding_of(whole)),
            transpose_lhs=True, window=(indices.first, param.shape[0]),
        )  # fmt: skip
        return sharded_like(out.reshape(param.shape), param)

    gate: Array | None
    up: Array | None
    down: Array | None
    if gathers:
        gate, up, down = _d_matrices(layer, indices, experts, (x, weighted), (d_z, d_y))
    else:
        gate, up = (contracted(*each) for each in ((experts.gate, x.rows, d_gate), (experts.up, x.rows, d_up)))
        down = contracted(experts.down, weighted, d_y.rows)
    return Experts(
        gate=gate,
        up=up,
        down=down,
        bias_gate=contracted(experts.bias_gate, ones, d_gate),
        bias_up=contracted(experts.bias_up, ones, d_up),
        bias_down=contracted(experts.bias_down, weight, d_y.rows),
    )


def _d_matrices(
    layer: Layer, indices: Indices, experts: Experts, lhs: tuple[Rows, Array], rhs: tuple[tuple[Array, ...], Rows]
) -> list[Array]:
    """The gradients of gate, up and down, all of which are arrays, by products that gather rows."""
    (x, weighted), (d_z, d_y) = lhs, rhs
    contracted = functools.partial(_contraction, layer, indices)
    gather, tokens, by = _gathered(indices, x)
    found = contracted(Gate(activation=None, pair=True, gather=gather), experts.gate, tokens, *d_z, *by)
    gather, tokens, by = _gathered(indices, d_y, "rhs")
    found += contracted(Gate(activation=None, gather=gather), experts.down, weighted, tokens, *by)
    return [sharded_like(out, param) for out, param in zip(found, experts[:3], strict=True)]


def _contraction(
    layer: Layer, indices: Indices, gate: Gate, like: Array, lhs: Array, rhs: Array, *rest: Array
) -> list[Array]:
    """The gradients of one or two arrays of weights of the shape and dtype of `like`: sums over rows."""
    m, sizes = indices.permutation.token.shape[0], indices.permutation.sizes
    x, y = (jax.ShapeDtypeStruct((m, each.shape[1]), each.dtype) for each in (lhs, rhs))
    problem = arguments.contraction_problem(
        x, y, sizes, like.dtype, transpose_lhs=False, local=like.shape[0], precision=None
    ).replace(gate=gate)
    after = sizes_and_window(problem, sizes, indices.first)
    return gated.run(problem, overrides_of(problem, layer.options), lhs, rhs, *after, *rest)


def _owned(indices: Indices, experts: Experts, rows: int) -> Array:
    """The mask [m, 1] of the rows whose expert is here."""
    return owned_mask(rows, _owned_rows(indices, experts, rows))


def _window(indices: Indices, experts: Experts, rows: int) -> Owned:
    """The rows whose expert is here, so that no sum reads others, which are 0; None if all experts are."""
    here = experts.down.shape[0] >= indices.permutation.sizes.shape[0]
    return None if here else _owned_rows(indices, experts, rows)


def _owned_rows(indices: Indices, experts: Experts, rows: int) -> tuple[Array, Array]:
    """The first of the rows whose expert is here, and the end of them."""
    sizes = indices.permutation.sizes
    ends = offsets(sizes, rows)
    first = clamp_first(indices.first, sizes.shape[0], experts.down.shape[0])
    low, high = ends[jnp.clip(jnp.stack([first, first + experts.down.shape[0]]), 0, sizes.shape[0])]
    return low, high


def _merged(frozen: Experts, experts: Experts) -> Experts:
    """All parameters: those that are quantized, and those that are arrays."""
    return Experts(*(a if a is not None else b for a, b in zip(frozen, experts, strict=True)))
