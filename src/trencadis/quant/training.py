"""Training with quantized operands: the forward and backward products of a layer that quantizes as it runs.

    forward     y = q @ r                                    q, r: x and kernel, quantized once
    d x         (d y * column scales of r) @ values of rᵀ    scales of r vary along this sum, so they are applied to d y
    d kernel    values of qᵀ @ (d y * row scales of q)       and likewise the scales of q

The gradient of quantization is the identity (straight-through estimator). Of x and kernel, the backward pass keeps only
the quantized q and r.

On a mesh with explicit axes each device quantizes what it multiplies. Scales that span several devices are found from
the largest magnitude on all of them. Only blocks that devices would cut in two are gathered.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AbstractMesh

from trencadis.core import arguments, unfused
from trencadis.core.activation import static_activation
from trencadis.core.alike import sharded_like
from trencadis.core.call import Options, Steps, sizes_and_window
from trencadis.core.epilogue import Epilogue
from trencadis.core.jax_compat import vary_alike
from trencadis.core.mesh import (
    Axes,
    Over,
    explicit_axes,
    explicit_mesh,
    mapped,
    partly_explicit,
    replicated,
    spec_of,
    with_automatic_axes,
)
from trencadis.core.partition import Partition, compute, dimensions, partition
from trencadis.core.problem import Problem
from trencadis.core.programs import run_once
from trencadis.core.spans import local_group, owned
from trencadis.core.tiling import Tilings, resolve
from trencadis.quant.calibrate import pmax_of_magnitudes
from trencadis.quant.product import contraction_product, rows_product
from trencadis.quant.recipe import Recipe
from trencadis.quant.scaled import Scaled

Array = jax.Array
Operand = Any  # an array or a Scaled


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedProduct:
    """The static description of a product that quantizes its operands: its problem, recipe and options."""

    asked: Problem  # of x and kernel as they came
    recipe: Recipe
    options: Options
    tilings: Tilings  # of its three products, in the m, k and n of the first

    def constant_along_k(self, name: str, scales: int) -> bool:
        """Whether scales of an operand, so many along k, do not change along k; on other devices they may differ."""
        return scales == 1 and (not self.options.over.k or self.recipe.spans(name, "k"))

    def tiled(self, tiling: Any) -> Options:
        """The options of one product, with its tiling."""
        return dataclasses.replace(self.options, tiling=tiling)


class Rows(NamedTuple):
    """Which group owns each row."""

    sizes: Array  # [groups]
    first: Array  # []
    group: Array  # i32[m]: the local group of each row; an arbitrary one for unowned rows
    mine: Array  # bool[m, 1]: whether a local group owns the row


def trained(
    recipe: Recipe, x: Array, w: Array, group_sizes: Any, dtype: Any,
    options: Options, steps: Steps = Steps(), *,
    transpose_rhs: bool = False, group_offset: Any = None, rows: Operand = None, weights: Operand = None,
) -> Array:  # fmt: skip
    """`grouped_matmul` of rows `[m, k]` and weights, both quantized by a recipe first, differentiable in both.

    What is quantized already is passed as `rows` or `weights`, beside the array that gets its gradient.
    """
    _check(recipe, x, w)
    options = dataclasses.replace(options, advise=False)  # weights are quantized for each call
    bias, _, activation = steps
    asked = arguments.rows_problem(
        x, w, group_sizes, dtype, transpose_rhs=transpose_rhs, precision=options.precision,
        epilogue=Epilogue(bias=None if bias is None else np.dtype(bias.dtype)),
    )  # fmt: skip
    static = None if activation is None else static_activation(activation, asked.sum, asked.out)
    after = sizes_and_window(asked, group_sizes, group_offset)
    mesh = explicit_mesh(x, w)
    if mesh is not None and rows is None and weights is None and (activation is None) == (static is None):
        operands = (x, w, *after, *(() if bias is None else (bias,)))
        asked = asked.replace(epilogue=dataclasses.replace(asked.epilogue, activation=static))
        part = _partition_of(recipe, asked, mesh, operands)
        over = Over() if partly_explicit(mesh) else Over(part.m, part.k, part.n, part.g)
        options = dataclasses.replace(options, out_sharding=None, over=over)
        return run_once(_on_mesh, (recipe, part, options, mesh), *operands)
    return _trained(recipe, (x, w, *after), asked=asked, options=options, steps=steps, given=(rows, weights))


def _trained(
    recipe: Recipe, operands: tuple[Array, ...], *, asked: Problem, options: Options, steps: Steps,
    given: tuple[Operand, Operand] = (None, None),
) -> Array:  # fmt: skip
    """The result of one device, which has all operands: x, w, the group sizes and the first group.

    Given are rows and weights that are quantized already, or None.
    """
    bias, _, activation = steps
    transpose_rhs = asked.transpose_rhs
    x, w, sizes, first = vary_alike(*map(replicated, operands))
    x, w = sharded_like(x, x), sharded_like(w, w)  # on automatic axes gradients are sharded like them
    bias = None if bias is None else replicated(bias)
    if 0 in (asked.m, asked.k, asked.n, asked.local_groups):
        recipe = Recipe()  # there is nothing to take a scale from
    kept = asked.out if bias is None and activation is None else np.dtype(np.float32)
    tilings = resolve(options.tiling, asked.m, asked.k, asked.n)
    product = QuantizedProduct(asked=asked.replace(out=kept), recipe=recipe, options=options, tilings=tilings)
    rows, (q, r), over = _whose(asked, sizes, first), given, options.over
    if recipe.lhs is None:
        q = x
    elif q is None:
        q = recipe.rows(lax.stop_gradient(jnp.where(rows.mine, x, 0)), over)  # unowned rows have no part in scales
    if recipe.rhs is None:
        r = w
    elif r is None:
        r = _transposed(recipe.weights(lax.stop_gradient(_transposed(w, transpose_rhs)), over), transpose_rhs)
    q, r = _once(x, q), _once(w, r)
    multiply = _straight if recipe.grad is None else _backward_quantized
    z = multiply(product, x, w, q, r, rows)
    if bias is not None:
        z = z + jnp.where(rows.mine, jnp.take(bias.astype(jnp.float32), rows.group, axis=0), 0)
    if activation is None:
        return z.astype(asked.out)
    return unfused.activate(asked, activation, z, sizes, first)


# ---------------------------------------------------------------------------------------------------------------------
# On a mesh with explicit axes


def _partition_of(recipe: Recipe, asked: Problem, mesh: AbstractMesh, operands: tuple[Array, ...]) -> Partition:
    """How a product is divided, from the types of its operands, so that no block of scales is cut in two."""
    units, lengths = recipe.units, {"m": asked.m, "k": asked.k, "n": asked.n, "g": asked.local_groups}

    def fitting(name: str, axes: Axes) -> Axes:
        parts = math.prod(mesh.shape[axis] for axis in axes)
        return axes if lengths.get(name, 0) // parts % units.get(name, 1) == 0 else ()

    specs = [
        tuple(map(fitting, names, spec_of(jax.typeof(x).sharding, mesh, x.ndim)))
        for x, names in zip(operands, dimensions(asked), strict=True)
    ]
    return partition(asked, specs, explicit_axes(mesh))


def _on_mesh(recipe: Recipe, part: Partition, options: Options, mesh: AbstractMesh, *operands: Array) -> Array:
    """The result on all devices, each of which has a part of the operands."""

    def multiply(problem: Problem, *operands: Array) -> Array:
        steps = Steps(bias=operands[4] if operands[4:] else None, activation=problem.epilogue.activation)
        return _trained(recipe, operands[:4], asked=problem, options=options, steps=steps)

    if partly_explicit(mesh):
        return with_automatic_axes(functools.partial(multiply, part.problem), mesh, part.result)(*operands)
    function = functools.partial(compute, part, multiply)
    return mapped(function, mesh, part.operands, part.result, dict(part.devices))(*operands)


def _check(recipe: Any, x: Array, w: Array) -> None:
    if not isinstance(recipe, Recipe):
        raise TypeError(f"quantization: want a quant.Recipe; got {type(recipe).__name__}")
    for name, each in (("x", x), ("kernel", w)):
        if not jnp.issubdtype(each.dtype, jnp.floating):
            raise TypeError(f"{name}: want a float dtype with quantization; got {each.dtype}")


def _whose(asked: Problem, sizes: Array, first: Array) -> Rows:
    return Rows(sizes[0], first[0], local_group(asked, sizes, first), owned(asked, sizes, first)[:, None])


def _transposed(x: Any, transposed: bool) -> Any:
    return x.mT if transposed else x


# ---------------------------------------------------------------------------------------------------------------------
# Quantized once, and a constant from there on


def _once(x: Array, q: Operand) -> Operand:
    """The quantized x as a constant to autodiff, which still records whether x is differentiated."""
    if not isinstance(q, Scaled):
        return q
    q = lax.stop_gradient(q)
    return dataclasses.replace(q, scale=_marked(*vary_alike(q.scale, x)))


@jax.custom_jvp
def _marked(scale: Array, x: Array) -> Array:
    return scale


@_marked.defjvp
def _marked_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    return _marked(*primals), tangents[0] + 0 * jnp.sum(tangents[1]).astype(tangents[0].dtype)  # 0 by way of x


@jax.custom_jvp
def _last(x: Array) -> Array:
    """x itself, whose derivative raises an error instead of the 0 that quantized products would give."""
    return x


@_last.defjvp
def _last_jvp(primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        "quantization: its gradients are products with quantized numbers, and have no derivative in these; "
        "want quantization=None where second derivatives are taken"
    )


def _constant(q: Operand) -> Operand:
    """The quantized operand as it enters a gradient: differentiating it once more is an error."""
    return dataclasses.replace(q, scale=_last(q.scale)) if isinstance(q, Scaled) else q


# ---------------------------------------------------------------------------------------------------------------------
# Gradients that are not quantized: tangents are products with constants, which the autodiff rules transpose


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _straight(product: QuantizedProduct, x: Array, w: Array, q: Operand, r: Operand, rows: Rows) -> Array:
    """The product of q and r, with the derivatives of the product of x and w."""
    return _multiplied(product, q, r, rows)


def _straight_jvp(product: QuantizedProduct, primals: Any, tangents: Any) -> tuple[Array, Array]:
    (_, _, q, r, rows), (d_x, d_w, *_) = primals, tangents
    out = _straight(product, *primals)
    multiply = jax.checkpoint(functools.partial(_multiplied, product))  # or the scale of each of its entries is kept
    found = [] if type(d_x) is SymbolicZero else [multiply(d_x, _constant(r), rows)]
    found += [] if type(d_w) is SymbolicZero else [multiply(_constant(q), d_w, rows)]
    return out, functools.reduce(jnp.add, found) if found else jnp.zeros_like(out)


_straight.defjvp(_straight_jvp, symbolic_zeros=True)


def _multiplied(product: QuantizedProduct, lhs: Operand, rhs: Operand, rows: Rows) -> Array:
    return rows_product(
        lhs, rhs, rows.sizes, product.asked.out, product.tiled(product.tilings),
        transpose_rhs=product.asked.transpose_rhs, group_offset=rows.first,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Gradients that are quantized: each of the two products quantizes the cotangent for itself


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _backward_quantized(product: QuantizedProduct, x: Array, w: Array, q: Operand, r: Operand, rows: Rows) -> Array:
    """The product of q and r, with gradients of x and w from a quantized cotangent; JAX refuses forward mode."""
    return _multiplied(product, q, r, rows)


def _forward(product: QuantizedProduct, x: Array, w: Array, q: Operand, r: Operand, rows: Rows) -> Any:
    return _multiplied(product, q, r, rows), (q, r, rows)


def _backward(product: QuantizedProduct, kept: tuple[Operand, Operand, Rows], ct: Array) -> Any:
    *operands, rows = kept
    q, r = (_constant(x) if isinstance(x, Scaled) else _last(x) for x in operands)
    ct = jnp.where(rows.mine, _last(ct).astype(jnp.float32), 0)
    return _d_rows(product, ct, r, rows), _d_weights(product, ct, q, rows), None, None, None


_backward_quantized.defvjp(_forward, _backward)


def _d_rows(product: QuantizedProduct, ct: Array, r: Operand, rows: Rows) -> Array:
    """ct [m, n] x r [g, k, n] -> [m, k]. Scales of r that do not change along k go to ct before it is quantized."""
    asked = product.asked
    axis = 2 if asked.transpose_rhs else 1  # k
    if isinstance(r, Scaled) and product.constant_along_k("rhs", r.scale.shape[axis]):
        by_group = jnp.squeeze(r.scales(), axis)  # [g or 1, n]
        each = by_group if by_group.shape[0] == 1 else jnp.take(by_group, rows.group, axis=0)
        ct, r = jnp.where(rows.mine, ct * each, 0), _bare(r)
    tile = product.tilings.d_lhs and product.tilings.d_lhs.swapped()  # k and n change places
    return rows_product(
        product.recipe.gradient(ct, product.options.over), r, rows.sizes, asked.lhs, product.tiled(tile),
        transpose_rhs=not asked.transpose_rhs, group_offset=rows.first,
    )  # fmt: skip


def _d_weights(product: QuantizedProduct, ct: Array, q: Operand, rows: Rows) -> Array:
    """q [m, k] x ct [m, n] -> [g, k, n]. Scales of q that do not change along k go to ct before it is quantized."""
    asked, transposed = product.asked, product.asked.transpose_rhs
    if isinstance(q, Scaled) and product.constant_along_k("lhs", q.scale.shape[1]):
        ct, q = jnp.where(rows.mine, ct * q.scales(), 0), _bare(q)
    y, scale = _by_column(product, ct, rows)
    lhs: Operand
    rhs: Operand
    lhs, rhs = (y, q) if transposed else (q, y)
    tile = product.tilings.d_rhs and (product.tilings.d_rhs.swapped() if transposed else product.tilings.d_rhs)
    out = contraction_product(
        lhs, rhs, rows.sizes, jnp.float32, product.tiled(tile),
        transpose_lhs=True, window=(rows.first, asked.local_groups),
    )  # fmt: skip
    return (out * jnp.expand_dims(scale, 2 if transposed else 1)).astype(asked.rhs)


def _by_column(product: QuantizedProduct, y: Array, rows: Rows) -> tuple[Scaled, Array]:
    """Quantized rows [m, n], and their scales [g, n]: one for each column of each group.

    Such scales are factors of the sums over a group. Groups do not share them, so that neither a large row nor a NaN in
    one group changes another.
    """
    kind, axes = product.recipe.summed, product.options.over.m
    most = jax.ops.segment_max(jnp.abs(y), rows.group, product.asked.local_groups, indices_are_sorted=True)
    most = pmax_of_magnitudes(jnp.maximum(most, 0).astype(jnp.float32), axes)  # that of no rows is -inf
    scale = kind.scale_of(product.recipe.bound("grad", most))
    values = kind.rounded(y / jnp.take(scale, rows.group, axis=0))
    return Scaled(values, jnp.ones((1, 1), jnp.float32), kind.name, values.shape), scale


def _bare(x: Scaled) -> Scaled:
    """The stored values with a scale of 1."""
    return Scaled(x.values, jnp.ones([1] * x.ndim, jnp.float32), x.format, x.shape)
