"""The general grouped GEMM in XLA's own operations, on any platform.

Unrolled: one product for each group, of exactly its size. It needs sizes that are known at trace time, and few groups.

Tiled: loops over groups, and over tiles of n, m and k. A tile that reaches past its group holds whatever is stored
there; so what is read is masked, and what is written is merged with what was there.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from trencadis.backends.prepare import from_bits, to_bits
from trencadis.core.decision import Plan
from trencadis.core.dtypes import cast
from trencadis.core.problem import cdiv
from trencadis.core.target import Target
from trencadis.core.tiling import Overrides, Tiling
from trencadis.gemm.by_group import finish
from trencadis.gemm.problem import Buffer, Dim, GemmProblem, Groups, Packing, Shape

Array = jax.Array
Pair = tuple[Any, Any]

TILE = 128  # the longest side of a tile
UNROLLED_GROUPS = 64  # groups that may have a product of their own; these take some 25 ms to compile


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the groups are multiplied: one product each, or in tiles of one size."""

    unrolled: bool
    serial: bool = False  # unrolled: one product after the other, each in a loop of its own


def plan(problem: GemmProblem, target: Target, overrides: Overrides = Overrides()) -> Plan:
    """The plan of a problem on a target: unrolled if sizes are known and groups are few, else in tiles."""
    asked: Any = problem  # a plan's problem is any that has an epilogue; this one has none
    tile = Tiling(*(_tile_length(dim) for dim in (problem.m, problem.k, problem.n)))
    few = problem.groups <= UNROLLED_GROUPS
    if problem.known is not None and few:
        products = sum(0 not in sizes for sizes in zip(*problem.known[3:], strict=True))
        because = (
            f"{products} products of the sizes of their groups, which are known at trace time; "
            f"{problem.groups} groups, of at most {UNROLLED_GROUPS}"
        )
        # XLA:CPU would slice all groups out of their buffers before it multiplies any, through fresh memory instead of
        # the cache; a loop around each product prevents that
        layout = Layout(unrolled=True, serial=target.platform == "cpu")
    else:
        layout = Layout(unrolled=False)
        why = "whose sizes are run-time operands" if few else f"more than the {UNROLLED_GROUPS} that are unrolled"
        because = f"loops over tiles of {tile.m} x {tile.k} x {tile.n} (m, k, n) of {problem.groups} groups, {why}"
    return Plan(asked=asked, problem=asked, target=target, backend="xla", tiling=tile, layout=layout, because=because)


def _tile_length(dim: Dim) -> int:
    """The length of a tile along a dimension; a dimension that is not ragged is cut evenly."""
    count = 1 if dim.ragged else -(-dim.size // TILE)
    return max(min(TILE, -(-dim.size // max(count, 1))), 1)


def run(plan: Plan, lhs: Array, rhs: Array, *rest: Array) -> Array:
    """The result of a plan's problem, from lhs, rhs, the six arrays i32[g] of `Groups`, and those of `Extras`."""
    problem = plan.problem
    assert isinstance(problem, GemmProblem)
    if problem.scaled:
        out, groups = dataclasses.replace(problem.out, dtype=problem.sum), Groups(*rest[:6])
        plain: Any = problem.replace(accumulate=False, alpha=False, bias=False, beta=False, wide=None, out=out)
        product = run(dataclasses.replace(plan, problem=plain), lhs, rhs, *groups)
        return finish(problem, product, groups, problem.extras(rest[6:]))
    out = rest[6] if problem.accumulate else jnp.zeros(problem.out.shape, problem.out.dtype)
    if problem.empty:
        return out
    if plan.layout.unrolled:
        return _unrolled(problem, lhs, rhs, out, serial=plan.layout.serial)
    return _tiled(problem, plan.tiling, (lhs, rhs, out), Groups(*rest[:6]))


# ---------------------------------------------------------------------------------------------------------------------
# Unrolled: one product for each group


def _unrolled(problem: GemmProblem, lhs: Array, rhs: Array, out: Array, *, serial: bool) -> Array:
    assert problem.known is not None
    lhs, rhs, out = (to_bits(x) for x in (lhs, rhs, out))
    once = lax.optimization_barrier(jnp.int32(1))  # XLA would inline a loop that it knows to run once
    for group in map(Groups._make, zip(*problem.known, strict=True)):
        if 0 not in (group.m, group.k, group.n):
            product = functools.partial(_product, problem, lhs, rhs, group)
            out = lax.fori_loop(0, once, product, out) if serial else product(np.int32(0), out)
    return from_bits(out, problem.out.dtype)


def _product(problem: GemmProblem, lhs: Array, rhs: Array, group: Groups, zero: Any, out: Array) -> Array:
    """The result with the product of one group in it; `zero` is a loop index, which keeps the slices in the loop."""
    axes = int(not problem.lhs.transposed), int(problem.rhs.transposed)
    x = _matrix(problem.lhs, lhs, group.lhs + zero, (group.m, group.k))
    y = _matrix(problem.rhs, rhs, group.rhs + zero, (group.k, group.n))
    if x.dtype != y.dtype:
        x, y = x.astype(problem.acc), y.astype(problem.acc)
    if problem.out.transposed:  # not the sum: XLA:CPU has no code for some small bfloat16 products that it flips itself
        x, y, axes = y, x, axes[::-1]
    contract = (((axes[0],), (axes[1],)), ((), ()))
    acc = lax.dot_general(x, y, contract, precision=problem.precision, preferred_element_type=problem.acc)
    if problem.accumulate:
        acc = cast(acc, problem.sum) + cast(
            _matrix(problem.out, out, group.out + zero, (group.m, group.n)), problem.sum
        )
    new = to_bits(cast(acc, problem.out.dtype))
    start, shape = _region(problem.out, group.out + zero, (group.m, group.n))
    return lax.dynamic_update_slice(out, new.reshape(shape), start)


def _matrix(buffer: Buffer, x: Array, start: Any, sizes: tuple[int, int]) -> Array:
    """The matrix of one group, in the order in which it is stored."""
    found = lax.dynamic_slice(x, *_region(buffer, start, sizes))
    return from_bits(found.reshape(_stored(buffer, sizes)), buffer.dtype)


def _region(buffer: Buffer, start: Any, sizes: tuple[int, int]) -> tuple[tuple[Any, ...], Shape]:
    """Where the matrix of one group starts in the array, and the shape that it has there."""
    rows, columns = _stored(buffer, sizes)
    match buffer.packing:
        case Packing.FLAT:
            return (start,), (rows * columns,)
        case Packing.STACKED:
            return (start, 0, 0), (1, rows, columns)
        case Packing.CONCATENATED:
            return (0, start) if buffer.group_axis else (start, 0), (rows, columns)


# ---------------------------------------------------------------------------------------------------------------------
# Tiled: loops over groups and tiles


class Tiles(NamedTuple):
    """One of lhs, rhs and out in a loop over tiles."""

    buffer: Buffer
    dims: tuple[Dim, Dim]
    tile: tuple[int, int]
    starts: Array  # i32[g]


def _tiled(problem: GemmProblem, tile: Tiling, arrays: tuple[Array, Array, Array], groups: Groups) -> Array:
    buffers, shapes = (problem.lhs, problem.rhs, problem.out), ((tile.m, tile.k), (tile.k, tile.n), (tile.m, tile.n))
    a, b, c = map(Tiles, buffers, problem.dims, shapes, groups[:3])
    lhs, rhs, out = (to_bits(_padded(tiles, x)) for tiles, x in zip((a, b, c), arrays, strict=True))

    def group(i: Array, out: Array) -> Array:
        m, k, n = (sizes[i] for sizes in groups[3:])

        def column(t: Array, out: Array) -> Array:
            across = t * np.int32(tile.n)

            def row(t: Array, out: Array) -> Array:
                down = t * np.int32(tile.m)

                def step(t: Array, acc: Array) -> Array:
                    depth = t * np.int32(tile.k)
                    x = _load(a, lhs, i, (down, depth), (m, k))
                    y = _load(b, rhs, i, (depth, across), (k, n))
                    if x.dtype != y.dtype:
                        x, y = x.astype(problem.acc), y.astype(problem.acc)
                    return acc + lax.dot(x, y, precision=problem.precision, preferred_element_type=problem.acc)

                acc = lax.fori_loop(0, cdiv(k, tile.k), step, jnp.zeros((tile.m, tile.n), problem.acc))
                if problem.accumulate:
                    acc = cast(acc, problem.sum) + cast(_load(c, out, i, (down, across), (m, n)), problem.sum)
                return _store(c, out, i, (down, across), (m, n), cast(acc, problem.out.dtype))

            return lax.fori_loop(0, cdiv(m, tile.m), row, out)

        return lax.fori_loop(0, cdiv(n, tile.n), column, out)

    out = from_bits(lax.fori_loop(0, problem.groups, group, out), problem.out.dtype)
    return lax.slice(out, (0,) * out.ndim, problem.out.shape)


def _stored(buffer: Buffer, pair: Pair) -> Pair:
    """What belongs to the first dimension and to the second, in the order in which they are stored."""
    return pair[::-1] if buffer.transposed else pair


def _padded(tiles: Tiles, x: Array) -> Array:
    """The array with room after its entries, so that no tile leaves it."""
    pairs = list(zip(*(_stored(tiles.buffer, pair) for pair in (tiles.dims, tiles.tile)), strict=True))
    match tiles.buffer.packing:
        case Packing.FLAT:
            more = [pairs[1][1]]
        case Packing.CONCATENATED:
            more = [tile if dim.ragged else -dim.size % tile for dim, tile in pairs]
        case Packing.STACKED:
            more = [0, *(-dim.size % tile for dim, tile in pairs)]
    return jnp.pad(x, [(0, extra) for extra in more])


def _mask(tile: tuple[int, int], at: Pair, sizes: Pair) -> Array:
    """Which entries of a tile belong to the group: bool[tile]."""
    rows, columns = (lax.broadcasted_iota(jnp.int32, tile, axis) for axis in (0, 1))
    return (rows < sizes[0] - at[0]) & (columns < sizes[1] - at[1])


def _tile_start(tiles: Tiles, i: Array, at: Pair) -> tuple[Array, ...]:
    """Where a tile starts in an array that is not flat."""
    if tiles.buffer.packing is Packing.STACKED:
        return (tiles.starts[i], *at)
    ragged = _stored(tiles.buffer, tiles.buffer.ragged)
    return tuple(a + tiles.starts[i] if on else a for a, on in zip(at, ragged, strict=True))


def _load(tiles: Tiles, x: Array, i: Array, at: Pair, sizes: Pair) -> Array:
    """A tile [first dimension, second dimension] of group i, 0 where it reaches past the group."""
    tile, at, sizes = (_stored(tiles.buffer, pair) for pair in (tiles.tile, at, sizes))
    if tiles.buffer.packing is Packing.FLAT:
        starts = tiles.starts[i] + (at[0] + jnp.arange(tile[0], dtype=jnp.int32)) * sizes[1] + at[1]
        starts = jnp.minimum(starts, np.int32(tiles.buffer.shape[0]))
        found = jax.vmap(lambda start: lax.dynamic_slice(x, (start,), (tile[1],)))(starts)
    else:
        found = lax.dynamic_slice(x, _tile_start(tiles, i, at), (1,) * (x.ndim - 2) + tile).reshape(tile)
    found = jnp.where(_mask(tile, at, sizes), found, jnp.zeros_like(found))
    found = from_bits(found, tiles.buffer.dtype)
    return found.T if tiles.buffer.transposed else found


def _store(tiles: Tiles, x: Array, i: Array, at: Pair, sizes: Pair, new: Array) -> Array:
    """The array with a tile of group i written into it; entries past the group keep their value."""
    tile, at, sizes = (_stored(tiles.buffer, pair) for pair in (tiles.tile, at, sizes))
    new = to_bits(new.T if tiles.buffer.transposed else new)
    mask = _mask(tile, at, sizes)
    if tiles.buffer.packing is not Packing.FLAT:
        start, shape = _tile_start(tiles, i, at), (1,) * (x.ndim - 2) + tile
        old = lax.dynamic_slice(x, start, shape)
        return lax.dynamic_update_slice(x, jnp.where(mask.reshape(shape), new.reshape(shape), old), start)

    def row(r: Array, x: Array) -> Array:
        start = tiles.starts[i] + (at[0] + r) * sizes[1] + at[1]
        old = lax.dynamic_slice(x, (start,), (tile[1],))
        inside, values = (lax.dynamic_slice(y, (r, np.int32(0)), (1, tile[1]))[0] for y in (mask, new))
        return lax.dynamic_update_slice(x, jnp.where(inside, values, old), (start,))

    return lax.fori_loop(0, jnp.clip(sizes[0] - at[0], 0, tile[0]), row, x)
