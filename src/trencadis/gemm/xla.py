"""Any grouped GEMM in XLA's own operations, on any platform: loops over groups, and over tiles of m, n and k.

A tile that reaches past its group holds what lies behind it: what is read is masked, what is written is merged.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from trencadis.backends.prepare import from_bits, to_bits
from trencadis.core.dtypes import cast
from trencadis.gemm.problem import Dim, Gemm, Kind, Store, kind

Array = jax.Array

TILE = 128


class Side(NamedTuple):
    """A tensor and where its groups are."""

    store: Store
    dims: tuple[Dim, Dim]
    tile: tuple[int, int]
    base: Array  # i32[g]: its place in a stack, its first row, or its first entry in a flat buffer


def run(
    gemm: Gemm, lhs: Array, rhs: Array, bases: tuple[Array, Array, Array], sizes: tuple[Array, Array, Array]
) -> Array:
    """The result; bases of the groups in lhs, rhs and out, and sizes m, k and n of each, all i32[g]."""
    m, k, n = gemm.m, gemm.k, gemm.n
    tm, tk, tn = (_length(dim) for dim in (m, k, n))
    a, b, c = (
        Side(store, dims, tile, base)
        for store, dims, tile, base in zip(
            (gemm.lhs, gemm.rhs, gemm.out), gemm.pairs, ((tm, tk), (tk, tn), (tm, tn)), bases, strict=True
        )
    )
    out = jnp.zeros(gemm.out.shape, gemm.out.dtype)
    if 0 in (gemm.groups, *gemm.lhs.shape, *gemm.rhs.shape, *gemm.out.shape):
        return out
    lhs, rhs, out = (to_bits(_padded(side, x)) for side, x in zip((a, b, c), (lhs, rhs, out), strict=True))

    def group(i: Array, out: Array) -> Array:
        size_m, size_k, size_n = (size[i] for size in sizes)

        def column(t: Array, out: Array) -> Array:
            across = t * np.int32(tn)

            def row(t: Array, out: Array) -> Array:
                down = t * np.int32(tm)

                def step(t: Array, acc: Array) -> Array:
                    depth = t * np.int32(tk)
                    x = _load(a, lhs, i, (down, depth), (size_m, size_k))
                    y = _load(b, rhs, i, (depth, across), (size_k, size_n))
                    kinds = {"precision": gemm.precision, "preferred_element_type": gemm.acc}
                    if x.dtype != y.dtype:
                        x, y = x.astype(gemm.acc), y.astype(gemm.acc)
                    return acc + lax.dot(x, y, **kinds)

                acc = lax.fori_loop(0, _tiles(size_k, tk), step, jnp.zeros((tm, tn), gemm.acc))
                return _store(c, out, i, (down, across), (size_m, size_n), cast(acc, gemm.out.dtype))

            return lax.fori_loop(0, _tiles(size_m, tm), row, out)

        return lax.fori_loop(0, _tiles(size_n, tn), column, out)

    out = from_bits(lax.fori_loop(0, gemm.groups, group, out), gemm.out.dtype)
    return lax.slice(out, (0,) * out.ndim, gemm.out.shape)


def _length(dim: Dim) -> int:
    """Of a tile along a dimension; one that is the same in all groups is cut evenly."""
    count = 1 if dim.ragged else -(-dim.size // TILE)
    return max(min(TILE, -(-dim.size // max(count, 1))), 1)


def _tiles(size: Array, tile: int) -> Array:
    return (size + np.int32(tile - 1)) // np.int32(tile)


def _stored(side: Side, pair: tuple[Any, Any]) -> tuple[Any, Any]:
    """A pair of (first dimension, second) in the order of memory."""
    return pair[::-1] if side.store.turned else pair


def _padded(side: Side, x: Array) -> Array:
    """With room behind, so that no tile leaves the array."""
    dims, tile = _stored(side, side.dims), _stored(side, side.tile)
    match kind(*side.dims):
        case Kind.FLAT:
            more = [tile[1]]
        case Kind.ROWS:
            more = [t if dim.ragged else -dim.size % t for dim, t in zip(dims, tile, strict=True)]
        case Kind.STACK:
            more = [0, *(-dim.size % t for dim, t in zip(dims, tile, strict=True))]
    return jnp.pad(x, [(0, extra) for extra in more])


def _mask(tile: tuple[int, int], at: tuple[Array, Array], sizes: tuple[Array, Array]) -> Array:
    """Which entries of a tile are the group's: bool[tile]."""
    rows, columns = (lax.broadcasted_iota(jnp.int32, tile, axis) for axis in (0, 1))
    return (rows < sizes[0] - at[0]) & (columns < sizes[1] - at[1])


def _start(side: Side, i: Array, at: tuple[Array, Array]) -> tuple[Array, ...]:
    """Where a tile starts in an array that is not flat."""
    if kind(*side.dims) is Kind.STACK:
        return (side.base[i], *at)
    return tuple(a + side.base[i] if dim.ragged else a for a, dim in zip(at, _stored(side, side.dims), strict=True))


def _load(side: Side, x: Array, i: Array, at: tuple[Array, Array], sizes: tuple[Array, Array]) -> Array:
    """A tile [first dimension, second], zero where it is not the group's."""
    tile, at, sizes = _stored(side, side.tile), _stored(side, at), _stored(side, sizes)
    if kind(*side.dims) is Kind.FLAT:
        starts = side.base[i] + (at[0] + jnp.arange(tile[0], dtype=jnp.int32)) * sizes[1] + at[1]
        starts = jnp.minimum(starts, np.int32(side.store.shape[0]))
        found = jax.vmap(lambda start: lax.dynamic_slice(x, (start,), (tile[1],)))(starts)
    else:
        found = lax.dynamic_slice(x, _start(side, i, at), (1,) * (x.ndim - 2) + tile).reshape(tile)
    found = jnp.where(_mask(tile, at, sizes), found, jnp.zeros_like(found))
    found = from_bits(found, side.store.dtype)
    return found.T if side.store.turned else found


def _store(side: Side, x: Array, i: Array, at: tuple[Array, Array], sizes: tuple[Array, Array], new: Array) -> Array:
    """The array with a tile put in; what is not the group's stays."""
    tile, at, sizes = _stored(side, side.tile), _stored(side, at), _stored(side, sizes)
    new = to_bits(new.T if side.store.turned else new)
    mask = _mask(tile, at, sizes)
    if kind(*side.dims) is not Kind.FLAT:
        start, shape = _start(side, i, at), (1,) * (x.ndim - 2) + tile
        old = lax.dynamic_slice(x, start, shape)
        return lax.dynamic_update_slice(x, jnp.where(mask.reshape(shape), new.reshape(shape), old), start)

    def row(r: Array, x: Array) -> Array:
        start = side.base[i] + (at[0] + r) * sizes[1] + at[1]
        old = lax.dynamic_slice(x, (start,), (tile[1],))
        mine, values = (lax.dynamic_slice(y, (r, np.int32(0)), (1, tile[1]))[0] for y in (mask, new))
        return lax.dynamic_update_slice(x, jnp.where(mine, values, old), (start,))

    return lax.fori_loop(0, jnp.clip(sizes[0] - at[0], 0, tile[0]), row, x)
