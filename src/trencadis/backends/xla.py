"""Loops of XLA operations, on any platform: a loop over groups, and inside it a few loops over row tiles.

    for each group that has rows:               rows: slice its weights once        contraction: start its sum
        for each tile height, tallest first:
            while that height is the cheapest:  a tile starts where the last one ended, so that a group of r rows
                slice, multiply, select, store  costs about r rows, whatever the sizes of other groups are

Every loop updates the carried result in place. On CPUs a gated activation, and rows that are gathered, are part of the
tiles (`gated_loops.py`). `docs/performance/cpu.md` has the measurements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trencadis.backends.gated_loops import gated_rows
from trencadis.backends.loops import (
    GroupRows,
    Layout,
    Tile,
    dot,
    each_group,
    each_tile,
    multiply,
    row_of,
    row_or_none,
    slice_of,
    tied,
    tiles_of_group,
    transposed,
    unconverted,
    updated,
    zeros_of,
)
from trencadis.backends.prepare import from_bits, int4_as_int8, to_bits
from trencadis.core.decision import Plan, Refusal
from trencadis.core.dtypes import cast
from trencadis.core.epilogue import ALONG_K, Extras, add
from trencadis.core.problem import Form, Problem
from trencadis.core.schedule import RowTile
from trencadis.core.spans import Bounds, bounds_of
from trencadis.core.target import Target
from trencadis.core.tiling import Overrides, Tiling

Array = jax.Array

# the heights of row tiles, by the least number of rows that a group has on average
ROWS = {0: (1, 4, 32), 4: (4, 16), 48: (16, 128), 512: (16, 256)}
COSTLY_ROWS = {0: (1, 8), 4: (4, 16, 64), 48: (16, 64, 256)}  # where a short tile costs much more per row
SUMS = {0: (8, 32), 12: (16, 32), 64: (16, 64), 128: (16, 128)}
NARROW_SUMS = SUMS | {256: (32, 256)}
FLIPPED = 32  # the tallest tile of float32 rows that is transposed instead of transposed weights
FAR = 2**23  # bytes of a matrix from which on short tiles wait for the memory

_0 = np.int32(0)


def plan(problem: Problem, target: Target, overrides: Overrides) -> Plan | Refusal:
    """A plan for any problem on any target, or a refusal if its scales change along k; k and n are not tiled."""
    if problem.epilogue.along_k:
        return Refusal(backend="xla", reason=ALONG_K)
    if problem.gate is not None and target.platform != "cpu":
        return Refusal(backend="xla", reason="loops of the xla backend apply a gated activation on CPUs alone")
    asked = overrides.tilings.forward
    layout = _layout(int4_as_int8(problem), target, asked.m if asked else 256)
    low, high = layout.heights[0], layout.heights[-1]
    tiling = asked or Tiling(high, max(problem.k, 1), max(problem.n, 1))
    heights = f"{high}" if low == high else f"{low} to {high}"
    because = f"loops over row tiles of {heights} rows that start at each group's first row"
    because += "" if problem.gate is None else f"; {problem.gate} in each tile"
    return Plan(
        asked=problem, problem=problem, target=target, backend="xla", tiling=tiling, layout=layout, because=because
    )


def _layout(problem: Problem, target: Target, block_m: int) -> Layout:
    operand = _operand_dtype(problem, target)
    if problem.form is Form.CONTRACTION:
        return _sum_layout(problem, block_m, operand)
    flipped = FLIPPED if problem.transpose_rhs and operand == np.float32 and target.platform == "cpu" else 0
    return _row_layout(problem, block_m, operand, flipped)


def run(plan: Plan, *operands: Array) -> Any:
    """The result of a plan's problem, or a list of them, computed by loops over groups and row tiles."""
    problem = int4_as_int8(plan.problem)
    lhs, rhs, group_sizes, first, *rest = operands
    # XLA would otherwise fold a constant operand, such as a broadcast, into every tile of the loops
    lhs, rhs = tied((lhs.astype(problem.lhs), rhs.astype(problem.rhs)))
    extras = Extras() if problem.gate is not None else problem.epilogue.split(tuple(rest))
    wanted = [(problem.out_shape, problem.out)] if problem.gate is None else problem.results
    outs = [zeros_of(shape, dtype, lhs, rhs, nth=i) for i, (shape, dtype) in enumerate(wanted)]
    outs = outs if extras.existing is None else [extras.existing]
    if problem.spans and problem.rows and 0 not in problem.out_shape:
        bounds = bounds_of(problem, group_sizes, first)
        carried = [to_bits(x) for x in outs]
        if problem.gate is not None:
            found = _gated(problem, plan.layout, bounds, (lhs, rhs, *rest), carried)
        else:
            form = _rows if problem.form is Form.ROWS else _contraction
            found = [form(problem, plan.layout, lhs, rhs, bounds, extras, carried[0])]
        outs = [from_bits(x, dtype) for x, (_, dtype) in zip(found, wanted, strict=True)]
    return outs[0] if problem.gate is None else outs


def _gated(
    problem: Problem, layout: Layout, bounds: Bounds, operands: tuple[Array, ...], outs: list[Array]
) -> list[Array]:
    """The results of a problem with a gated activation, stored into `outs`."""
    token = None if problem.gather is None else operands[-2]
    operands = operands if problem.gather is None else operands[:-2]
    if problem.form is Form.ROWS:
        return gated_rows(problem, layout, bounds, operands, token, outs)
    lhs, *rhs = operands
    pairs = zip(rhs, outs, strict=True)
    return [_contraction(problem, layout, lhs, each, bounds, Extras(), out, token) for each, out in pairs]


# ---------------------------------------------------------------------------------------------------------------------
# The two forms


def _rows(
    problem: Problem, layout: Layout, lhs: Array, rhs: Array, bounds: Bounds, extras: Extras, out: Array
) -> Array:
    """out[r] += lhs[r] @ rhs[group of r]."""

    def compute(tile: Tile, sources: Sequence[Array], weights: Sequence[Array], out: Array) -> Array:
        x = tile.of(sources[0]).astype(layout.operand)
        x = tile.masked(x) if tile.height < layout.heights[-1] else x  # so that XLA shares the fusion with contractions
        acc = multiply(problem, layout, x, weights[0])
        by_row = None if extras.by_row is None else tile.of(extras.by_row)[:, None]
        vectors = Extras(by_row, row_or_none(extras.by_column, tile.group), row_or_none(extras.bias, tile.group))
        acc = problem.epilogue.finish(acc, vectors, problem.out)
        return tile.stored(out, acc, problem.out, accumulate=problem.epilogue.accumulate)

    return each_tile(problem, layout, bounds, compute, [lhs], [rhs], out)


def _contraction(
    problem: Problem, layout: Layout, lhs: Array, rhs: Array, bounds: Bounds, extras: Extras, out: Array,
    token: Array | None = None,
) -> Array:  # fmt: skip
    """out[i] += lhs[rows of i].T @ rhs[rows of i], tile by tile, in place if `out` has the dtype of the sum.

    Where rows of an operand are gathered, `token` says which they are.
    """
    gathered = None if problem.gather is None else problem.gather.operand

    def product(tile: Tile) -> Array:  # [k, n]; rows of others are 0 on both sides, since 0 * NaN is NaN
        (left, right), row = unconverted((lhs, rhs), tile.row)
        tile = tile._replace(row=row)
        right = tile.masked(tile.of(right, token if gathered == "rhs" else None).astype(layout.operand))
        if problem.transpose_lhs:
            left = slice_of(left, (_0, row), (problem.k, tile.height)).astype(layout.operand)
            left = tile.masked(left, axis=1)
        else:
            left = tile.of(left, token if gathered == "lhs" else None).astype(layout.operand)
            left = transposed(tile.masked(left))
        return dot(problem, left, right)

    def added(tile: Tile, out: Array) -> Array:
        old = slice_of(out, (tile.group, _0, _0), (1, problem.k, problem.n))
        return updated(out, old + product(tile)[None], (tile.group, _0, _0))

    def in_place(rows: GroupRows, out: Array) -> Array:
        return tiles_of_group(problem, layout, rows, added, out)

    def apart(rows: GroupRows, state: tuple[Array, Array]) -> tuple[Array, Array]:
        out, acc = state
        acc = tiles_of_group(
            problem, layout, rows, lambda tile, acc: acc + product(tile), acc, lambda tile, acc: product(tile)
        )
        by_row = None if extras.by_row is None else row_of(extras.by_row, rows.group).T
        vectors = Extras(by_row, row_or_none(extras.by_column, rows.group))
        result = problem.epilogue.finish(acc, vectors, problem.out)[None]
        if problem.epilogue.accumulate:
            result = add(from_bits(slice_of(out, (rows.group, _0, _0), result.shape), problem.out), result)
        return updated(out, to_bits(cast(result, problem.out)), (rows.group, _0, _0)), acc

    if problem.out == problem.acc and not problem.epilogue.scaled:
        return each_group(problem, bounds, in_place, out)
    return each_group(problem, bounds, apart, (out, jnp.zeros((problem.k, problem.n), problem.acc)))[0]


# ---------------------------------------------------------------------------------------------------------------------
# Tiles


def _row_layout(problem: Problem, block_m: int, operand: np.dtype[Any], flipped: int) -> Layout:
    """The tile heights of the rows form, those for the rows that a group has on average.

    Prices are in rows of arithmetic: h for the rows of a tile, and its overhead as measured on XLA:CPU. A single row is
    a matrix-vector product, which does not pack the weights; in bfloat16 XLA:CPU has none.
    """
    narrow = operand == jnp.bfloat16
    far = problem.k * problem.n * operand.itemsize > FAR and not flipped
    costly = narrow or far or (problem.transpose_rhs and not flipped)
    heights = _by_mean(problem, COSTLY_ROWS if costly else ROWS)
    if costly:
        overhead = 7.0 if narrow else 10.0
    else:
        overhead = 0.5 if heights[-1] < 128 else 3.0  # the threads of a dot wait for each other at the end of each tile
    fixed = (2**18 if narrow else 2**17 if flipped else 2**14) / max(problem.k * problem.n, 1)

    def price(height: int) -> float:
        return fixed + (2.5 if height == 1 else height + overhead)

    heights = tuple(max(height, 2) if narrow else height for height in heights)
    heights, min_rows = _worth_a_loop({height: price(height) for height in _within(problem, block_m, heights)})
    return Layout(operand=operand, heights=heights, min_rows=min_rows, flipped=flipped)


def _sum_layout(problem: Problem, block_m: int, operand: np.dtype[Any]) -> Layout:
    """The tile heights of a contraction, those for the rows that a group has on average; tiles are added to a sum.

    Tall tiles of float32 are full, and then slice the operands by the same kernels as those of the rows form.
    """
    fixed = 7 + 2**15 / max(problem.k * problem.n, 1)
    narrow = operand.itemsize < 4
    wanted = _within(problem, block_m, _by_mean(problem, NARROW_SUMS if narrow else SUMS))
    heights, min_rows = _worth_a_loop({height: height + fixed for height in wanted}, 0.85 if narrow else 0.6)
    return Layout(operand=operand, heights=heights, min_rows=min_rows)


def _by_mean(problem: Problem, table: Mapping[int, tuple[int, ...]]) -> tuple[int, ...]:
    """The entry of a table for the number of rows that a group has on average."""
    mean = problem.m // max(problem.groups, 1)
    return table[max(least for least in table if least <= mean)]


def _within(problem: Problem, block_m: int, heights: Sequence[int]) -> list[int]:
    """The heights, ascending, with the tallest that a tile may have in place of taller ones."""
    return sorted({min(height, block_m, max(problem.m, 1)) for height in heights})


def _worth_a_loop(prices: dict[int, float], filled: float = 0.85) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The heights, ascending, that save a quarter of the price of the next taller one, and from how many rows on.

    Each height is a loop that XLA compiles. The tallest is always there. A tile that saves little unless the group
    fills it, or more than this part of it, is only used where it is full: then its rows need no mask.
    """
    kept: list[int] = []
    for height in sorted(prices, reverse=True):
        if not kept or prices[height] <= 0.75 * prices[kept[-1]]:
            kept.append(height)
    heights = [h for h in kept[::-1] if h == kept[-1] or prices[h] <= prices[kept[-1]] * h / kept[-1]]
    rows = np.arange(2 * heights[-1])
    cost = prices[heights[0]] * -(-rows // heights[0])  # of so many rows in tiles of the heights so far
    min_rows = [1]
    for height in heights[1:]:
        least = int(np.argmax(cost >= prices[height]))
        min_rows.append(height if least > filled * height else least)
        full, rest = np.divmod(rows, height)
        cost = prices[height] * (full + (rest >= min_rows[-1])) + np.where(rest < min_rows[-1], cost[rest], 0)
    return tuple(heights), tuple(min_rows)


def row_tiles(problem: Problem, layout: Layout, start: int, end: int) -> list[RowTile]:
    """The row tiles of a group that owns the rows [start, end), as the loops of this backend compute them."""
    if 0 in problem.out_shape or start >= end:
        return []
    top, taken = start, []  # first row and height of each tile
    for height, min_rows in zip(layout.heights[::-1], layout.min_rows[::-1], strict=True):
        while end - top >= min_rows:
            taken.append((top, height))
            top += height
    tiles = []
    for top, height in taken:
        row = min(top, problem.rows - height)  # a tile stays inside the array: it may start earlier
        tiles.append(RowTile(range(row, row + height), range(top, min(top + height, end))))
    return tiles


# ---------------------------------------------------------------------------------------------------------------------
# Dtypes


def _operand_dtype(problem: Problem, target: Target) -> np.dtype[Any]:
    """The dtype in which tiles are multiplied: their own if the machine has such products, else the accumulator's."""
    if problem.lhs != problem.rhs:
        return problem.acc
    if jnp.issubdtype(problem.lhs, jnp.integer):
        return problem.lhs if jnp.iinfo(problem.lhs).bits >= 8 else np.dtype(np.int8)
    return problem.lhs if target.multiplies(problem.lhs) else problem.acc
