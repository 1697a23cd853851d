"""Collectives over a manual mesh axis: gathers of tokens and weights, and sums, also in a fixed order.

The order in which `lax.psum` and `lax.psum_scatter` add floats depends on how devices are divided among processes.
Ordered sums move the terms instead and add them on one device, in the order of the shards.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from trencadis.core.dtypes import accumulator, bits
from trencadis.core.jax_compat import vary_over
from trencadis.core.linear import linear
from trencadis.core.spread import spread
from trencadis.quant.scaled import Scaled

Axis: TypeAlias = str | tuple[str, ...]  # a mesh axis, or several that count as one


def names_of(axis: Axis) -> tuple[str, ...]:
    """The names of a mesh axis, or of several."""
    return (axis,) if isinstance(axis, str) else tuple(axis)


def size_of(axis: Axis) -> int:
    """How many shards a mesh axis has, inside of `jax.shard_map`."""
    try:
        return int(lax.axis_size(axis))
    except NameError:
        raise ValueError(
            f"axis: want a mesh axis of the jax.shard_map that this is called in; got {axis!r}, which none has"
        ) from None


def ordered_psum(x: Array, axis: Axis) -> Array:
    """The same as `lax.psum` of an array that varies over axis, but the shards are added in their order, in float32.

    Bitwise equal however the devices are divided among processes. It moves as many bytes as a gather of all shards.

    >>> import jax
    >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> spec = jax.sharding.PartitionSpec
    >>> total = jax.shard_map(lambda x: ordered_psum(x, "data"), mesh=mesh, in_specs=spec("data"), out_specs=spec())
    >>> total(jnp.arange(3.0))
    Array([0., 1., 2.], dtype=float32)
    """

    def add(_: tuple[()], x: Array) -> Array:
        return _sum(lax.all_gather(x, axis, to="invarying"))

    def vary(_: tuple[()], ct: Array) -> Array:
        return ordered_pvary(ct, axis)

    return linear(add, vary, (), vary_over(x, names_of(axis)))


def ordered_pvary(x: Array, axis: Axis) -> Array:
    """The same array, marked as varying over axis; its gradient is an `ordered_psum`, for parameters on all shards.

    >>> import jax
    >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> spec = jax.sharding.PartitionSpec
    >>> def loss(w, x): return jax.lax.psum(jnp.sum(ordered_pvary(w, "data") * x), "data")
    >>> mapped = jax.shard_map(loss, mesh=mesh, in_specs=(spec(), spec("data")), out_specs=spec())
    >>> jax.grad(mapped)(jnp.ones(3), jnp.arange(3.0))
    Array([0., 1., 2.], dtype=float32)
    """
    return spread(x, names_of(axis), ordered_psum)


def gather(x: Array, axis: Axis, *, ordered: bool) -> Array:
    """The rows of all shards, `[t, ...]` to `[shards * t, ...]`; its gradient is a `reduce_scatter`."""
    if not ordered or not jnp.issubdtype(x.dtype, jnp.floating):
        return lax.all_gather(x, axis, tiled=True)
    return linear(lambda _, x: _gather(x, axis), lambda _, ct: _ordered_scatter(ct, axis), (), x)


def reduce_scatter(x: Array, axis: Axis, *, ordered: bool) -> Array:
    """The sum over shards of `[shards * t, ...]`, of which each shard gets its own rows; its gradient is a `gather`."""
    if not ordered:
        return lax.psum_scatter(x, axis, tiled=True)
    return linear(lambda _, x: _ordered_scatter(x, axis), lambda _, ct: _gather(ct, axis), (), x)


def _gather(x: Array, axis: Axis) -> Array:
    return lax.all_gather(x, axis, tiled=True)


def _ordered_scatter(x: Array, axis: Axis) -> Array:
    return _sum(swap_blocks(x, axis).reshape(lax.axis_size(axis), -1, *x.shape[1:]))


def _sum(parts: Array) -> Array:
    """The sum over the first axis, one after the other, in float32."""
    return jnp.sum(parts.astype(accumulator(parts.dtype, jnp.float32)), axis=0).astype(parts.dtype)


def swap_blocks(x: Array, axis: Axis) -> Array:
    """Block q of `[shards * s, ...]` goes to shard q, where it becomes the block of the shard that it comes from."""
    return lax.all_to_all(x, axis, split_axis=0, concat_axis=0, tiled=True)


# ---------------------------------------------------------------------------------------------------------------------
# Weights


def gather_weights(w: Any, axis: Axis, dim: int = 1, *, ordered: bool = False) -> Any:
    """The whole of weights that are sharded over a mesh axis along `dim`, as fully sharded data parallelism has them.

    The gradient of an array is summed over the shards and scattered to them. A `quant.Scaled` moves as the bytes that
    it is stored in, scales beside values, and has no gradient; scales of blocks as long as the whole axis are on every
    shard already. Passes None on.

    >>> import jax
    >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> spec = jax.sharding.PartitionSpec(None, "data")
    >>> whole = jax.shard_map(lambda w: gather_weights(w, "data"), mesh=mesh, in_specs=spec, out_specs=spec)
    >>> whole(jnp.ones((2, 4, 3))).shape
    (2, 4, 3)
    """
    shards = size_of(axis)
    if w is None:
        return None
    if not isinstance(w, Scaled):
        return jnp.moveaxis(gather(jnp.moveaxis(w, dim, 0), axis, ordered=ordered), 0, dim)
    (values, scale, total, zeros), static = w.tree_flatten()
    dim = dim % values.ndim
    at = {values.ndim - 2: values.ndim - 1, values.ndim - 1: values.ndim - 2}.get(dim, dim) if w.transposed else dim
    shared = w.block[dim] >= w.shape[dim] * shards
    scale, zeros = (x if x is None or shared else _gather_bytes(x, axis, at) for x in (scale, zeros))
    return Scaled.tree_unflatten(static, (_gather_bytes(values, axis, at), scale, total, zeros))


def _gather_bytes(x: Array, axis: Axis, dim: int) -> Array:
    """A gather along `dim` of an array of any dtype, which collectives may not know."""
    moved = jnp.moveaxis(x, dim, 0)
    return jnp.moveaxis(from_bytes(lax.all_gather(to_bytes(moved), axis, tiled=True), moved), 0, dim)


def to_bytes(x: Array) -> Array:
    """Narrow numbers as bytes: those of 8 bits as they are, pairs of 4 bits along the last axis in one byte."""
    if bits(x.dtype) == 8:
        return lax.bitcast_convert_type(x, jnp.uint8)
    if bits(x.dtype) == 4 and x.shape[-1] % 2 == 0:
        return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 2), jnp.uint8)
    return x


def from_bytes(x: Array, like: Array) -> Array:
    """What `to_bytes` was given, moved: numbers of the dtype and the row length of `like`."""
    if x.dtype == like.dtype:
        return x
    return lax.bitcast_convert_type(x, like.dtype).reshape(*x.shape[:-1], like.shape[-1])
