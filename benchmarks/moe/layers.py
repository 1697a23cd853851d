"""The layer as it is called: ours, and as a composition of grouped matmuls by `grouped_matmul` or `lax.ragged_dot`.

All of them compute the router's product, a softmax over all experts and the k best, and return the result [t, d] and
the chosen experts [t, k]. `step` gives the gradients in the tokens, the router and the weights of the experts, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import trencadis as tr
from benchmarks.moe.shapes import FORWARD, WEIGHTS, MoeShape
from benchmarks.peers import DTYPES
from trencadis import moe
from trencadis.quant import quantize


class Params(NamedTuple):
    """What a step is differentiated in, as our layer takes it; biases are None where there are none."""

    x: Any  # [t, d]
    router: Any  # [d, e]
    gate: Any  # [e, d, f]
    up: Any  # [e, d, f]
    down: Any  # [e, f, d]
    bias_gate: Any = None  # [e, f]
    bias_up: Any = None  # [e, f]
    bias_down: Any = None  # [e, d]


class Joined(NamedTuple):
    """The same with gate and up as one array, as compositions take it."""

    x: Any
    router: Any
    gate_up: Any  # [e, d, 2f]
    down: Any
    bias_gate_up: Any = None  # [e, 2f]
    bias_down: Any = None


class Operands(NamedTuple):
    """The arrays of one layer, and those of its parts: rows sorted by expert, and how they are sorted."""

    params: Params
    joined: Joined
    ct: Any  # [t, d]: the cotangent of the result
    rows: Any  # [m, d]
    h: Any  # [m, f]
    z: Any  # [m, 2f]
    logits: Any  # f32[t, e]
    routing: moe.Routing
    permutation: moe.Permutation


Layer = Callable[[MoeShape, Any], tuple[jax.Array, jax.Array]]


def operands(shape: MoeShape) -> Operands:
    """Normal data, scaled so that every activation has about the variance 1; to be jitted."""
    params = _params(shape)
    dtype, m, f = DTYPES[shape.dtype], shape.m, shape.f
    keys = jax.random.split(jax.random.key(shape.seed + 1), 3)
    ct, h, z = (
        jax.random.normal(key, size, dtype)
        for key, size in zip(keys, ((shape.t, shape.d), (m, f), (m, 2 * f)), strict=True)
    )
    logits = (params.x @ params.router).astype(jnp.float32)
    routing = moe.route(logits, shape.k)
    permutation = moe.sort_by_expert(routing.experts, shape.e)
    rows = jnp.take(params.x, permutation.token, axis=0)
    return Operands(_quantized(shape, params), joined(shape, params), ct, rows, h, z, logits, routing, permutation)


def _params(shape: MoeShape) -> Params:
    t, d, f, e = shape.t, shape.d, shape.f, shape.e
    sizes = [(t, d), (d, e), (e, d, f), (e, d, f), (e, f, d)]
    sizes += [(e, f), (e, f), (e, d)] if shape.biases else []
    keys = jax.random.split(jax.random.key(shape.seed), len(sizes))
    scales = (1.0, d**-0.5, d**-0.5, d**-0.5, f**-0.5, 1.0, 1.0, 1.0)
    dtype = DTYPES[shape.dtype]
    made = (
        jax.random.normal(key, size, dtype) * jnp.asarray(scale, dtype)
        for key, size, scale in zip(keys, sizes, scales, strict=False)
    )
    return Params(*made)


def _quantized(shape: MoeShape, params: Params) -> Params:
    """The parameters with the experts in the format of the layer; `quantize` stores them as products read them."""
    how = WEIGHTS[shape.weights] if shape.weights else None
    if how is None:
        return params
    return params._replace(**{name: quantize(getattr(params, name), *how) for name in ("gate", "up", "down")})


def joined(shape: MoeShape, params: Params) -> Joined:
    """The parameters with gate and up side by side; quantized after that, where they are."""
    biases = (params.bias_gate, params.bias_up)
    bias = None if biases[0] is None else jnp.concatenate(biases, axis=-1)
    gate_up: Any = jnp.concatenate([params.gate, params.up], axis=-1)
    down = params.down
    how = WEIGHTS[shape.weights] if shape.weights else None
    if how is not None:
        gate_up, down = quantize(gate_up, *how), quantize(down, *how)
    return Joined(params.x, params.router, gate_up, down, bias, params.bias_down)


# ---------------------------------------------------------------------------------------------------------------------
# Layers


def ours(shape: MoeShape, p: Params) -> tuple[jax.Array, jax.Array]:
    """The layer of trencadis with default settings."""
    routing = moe.route((p.x @ p.router).astype(jnp.float32), shape.k)
    out = tr.moe_mlp(
        p.x, routing, p.gate, p.up, p.down, activation=moe.swiglu(*shape.swiglu),
        bias_gate=p.bias_gate, bias_up=p.bias_up, bias_down=p.bias_down,
    )  # fmt: skip
    return out, routing.experts


def composition(multiply: Callable[..., jax.Array], shape: MoeShape, p: Joined) -> tuple[jax.Array, jax.Array]:
    """What users write around a grouped matmul: argsort, take, two products, take; gradients by plain autodiff."""
    t, k, d = shape.t, shape.k, shape.d
    scores = jax.nn.softmax((p.x @ p.router).astype(jnp.float32))
    weights, experts = lax.top_k(scores, k)
    weights = weights / weights.sum(axis=-1, keepdims=True)
    ids = experts.reshape(-1)
    order = jnp.argsort(ids)
    sizes = jnp.bincount(ids, length=shape.e).astype(jnp.int32)
    z = multiply(jnp.take(p.x, order // k, axis=0), p.gate_up, sizes)
    if p.bias_gate_up is not None:
        z = z + jnp.take(p.bias_gate_up, ids[order], axis=0)
    gate, up = jnp.split(z, 2, axis=-1)
    y = multiply(moe.swiglu(*shape.swiglu)(gate, up), p.down, sizes)
    if p.bias_down is not None:
        y = y + jnp.take(p.bias_down, ids[order], axis=0)
    by_token = jnp.take(y, jnp.argsort(order), axis=0).reshape(t, k, d)
    return (by_token * weights[:, :, None]).sum(axis=1).astype(p.x.dtype), experts


def _grouped_matmul(rows: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    return tr.grouped_matmul(rows, w, sizes, rows.dtype)


def _ragged_dot(rows: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    return lax.ragged_dot(rows, w, sizes, preferred_element_type=rows.dtype)


composed: Layer = functools.partial(composition, _grouped_matmul)
ragged_dot: Layer = functools.partial(composition, _ragged_dot)
LAYERS: dict[str, Layer] = {"ours": ours, "composed": composed, "ragged_dot": ragged_dot}


def call(name: str, shape: MoeShape, which: str) -> tuple[Any, Callable[[Operands], tuple[Any, ...]]]:
    """The jitted pass of a layer, and what it takes of the operands.

    A forward pass gives the result and the experts, and a step the gradients as a third.
    """
    layer = functools.partial(LAYERS[name], shape)
    mine = "params" if name == "ours" else "joined"

    def step(params: Any, ct: jax.Array) -> Any:
        out, pullback, experts = jax.vjp(layer, params, has_aux=True)
        return out, experts, *pullback(ct)

    if which == FORWARD:
        return jax.jit(layer), lambda x: (getattr(x, mine),)
    return jax.jit(step), lambda x: (getattr(x, mine), x.ct)
