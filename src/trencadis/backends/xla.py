"""Loops of XLA operations, on any platform: a loop over groups, and inside it a few loops over row tiles.

    for each group that has rows:               rows: slice its weights once        contraction: start its sum
        for each tile height, tallest first:
            while that height is the cheapest:  a tile starts where the last one ended, so that a group of r rows
                slice, multiply, select, store  costs about r rows, whatever the sizes of other groups are

Every loop updates the carried result in place. On CPUs a gated activation, and rows that are gathered, are part of the
tiles (`gated_loops.py`). `docs/performance.md` has the measurements.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from trencadis.backends.gated_loops import gated_rows
from trencadis.backends.loops import (
    Layout,
    Tile,
    between,
    each_group,
    each_tile,
    if_,
    multiply,
    row_of,
    row_or_none,
    slice_of,
    tied,
    updated,
    while_below,
    zeros_of,
)
from trencadis.backends.prepare import from_bits, int4_as_int8, to_bits
from trencadis.core.decision import Plan, Refusal
from trencadis.core.dtypes import cast
from trencadis.core.epilogue import ALONG_K, Extras, add
from trencadis.core.problem import Form, Problem
from trencadis.core.schedule import RowTile
from trencadis.core.spans import Spans, spans
from trencadis.core.target import Target
from trencadis.core.tiling import Overrides, Tiling

Array = jax.Array

ROW_HEIGHTS = (1, 4, 16, 64, 256)
SUM_HEIGHTS = (8, 16, 32, 64, 128, 256)

_0 = np.int32(0)


def plan(problem: Problem, target: Target, overrides: Overrides) -> Plan | Refusal:
    """A plan for any problem on any target, or a refusal if its scales change along k; k and n are not tiled."""
    if problem.epilogue.along_k:
        return Refusal(backend="xla", reason=ALONG_K)
    if problem.gate is not None and target.platform != "cpu":
        return Refusal(backend="xla", reason="its products have kernels of their own, which loops have not")
    block_m = max(min(256, problem.m), 1)
    tiling = overrides.tilings.forward or Tiling(block_m, max(problem.k, 1), max(problem.n, 1))
    layout = _layout(int4_as_int8(problem), target, tiling.m)
    low, high = layout.heights[0], layout.heights[-1]
    because = f"loops over row tiles of {low} to {high} rows that start at each group's first row"
    because += "" if problem.gate is None else f"; {problem.gate} in each tile"
    return Plan(
        asked=problem, problem=problem, target=target, backend="xla", tiling=tiling, layout=layout, because=because
    )


def _layout(problem: Problem, target: Target, block_m: int) -> Layout:
    operand = _operand_dtype(problem, target)
    if problem.form is Form.CONTRACTION:
        return Layout(operand=operand, heights=tuple(_sum_heights(problem, block_m)))
    heights, min_rows = zip(*_row_heights(problem, block_m, operand)[::-1], strict=True)
    return Layout(operand=operand, heights=heights, min_rows=min_rows)


def run(plan: Plan, *operands: Array) -> Any:
    """The result of a plan's problem, or a list of them, computed by loops over groups and row tiles."""
    problem = int4_as_int8(plan.problem)
    lhs, rhs, group_sizes, first, *rest = operands
    # XLA would otherwise fold a constant operand, such as a broadcast, into every tile of the loops
    lhs, rhs = tied((lhs.astype(problem.lhs), rhs.astype(problem.rhs)))
    extras = Extras() if problem.gate is not None else problem.epilogue.split(tuple(rest))
    wanted = [(problem.out_shape, problem.out)] if problem.gate is None else problem.results
    outs = [zeros_of(shape, dtype, lhs, rhs, group_sizes, nth=i) for i, (shape, dtype) in enumerate(wanted)]
    outs = outs if extras.existing is None else [extras.existing]
    if problem.spans and problem.rows and 0 not in problem.out_shape:
        bounds, carried = spans(problem, group_sizes, first), [to_bits(x) for x in outs]
        if problem.gate is not None:
            found = _gated(problem, plan.layout, bounds, (lhs, rhs, *rest), carried)
        else:
            form = _rows if problem.form is Form.ROWS else _contraction
            found = [form(problem, plan.layout, lhs, rhs, bounds, extras, carried[0])]
        outs = [from_bits(x, dtype) for x, (_, dtype) in zip(found, wanted, strict=True)]
    return outs[0] if problem.gate is None else outs


def _gated(
    problem: Problem, layout: Layout, bounds: Spans, operands: tuple[Array, ...], outs: list[Array]
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


def _rows(problem: Problem, layout: Layout, lhs: Array, rhs: Array, bounds: Spans, extras: Extras, out: Array) -> Array:
    """out[r] += lhs[r] @ rhs[group of r]."""

    def compute(tile: Tile, sources: Sequence[Array], weights: Sequence[Array], out: Array) -> Array:
        acc = multiply(problem, layout, tile.of(sources[0]), weights[0])
        by_row = None if extras.by_row is None else tile.of(extras.by_row)[:, None]
        vectors = Extras(by_row, row_or_none(extras.by_column, tile.group), row_or_none(extras.bias, tile.group))
        acc = problem.epilogue.finish(acc, vectors, problem.out)
        return tile.stored(out, acc, problem.out, accumulate=problem.epilogue.accumulate)

    return each_tile(problem, layout, bounds, compute, [lhs], [rhs], out)


def _contraction(
    problem: Problem, layout: Layout, lhs: Array, rhs: Array, bounds: Spans, extras: Extras, out: Array,
    token: Array | None = None,
) -> Array:  # fmt: skip
    """out[i] += lhs[rows of i].T @ rhs[rows of i]: the product of the rows that full tiles leave over, plus those.

    Where rows of an operand are gathered, `token` says which they are.
    """
    dtype, heights, full = layout.operand, layout.heights, layout.heights[-1]
    gathered = None if problem.gather is None else problem.gather.operand

    def product(height: int, top: Array, end: Array) -> Array:  # [k, n]
        left, right, top = tied((lhs, rhs, top))
        row = jnp.minimum(top, np.int32(problem.rows - height))
        mine = between(row, height, top, end)  # [height, 1]; both sides, since 0 * NaN is NaN
        tile = Tile(row, row, height, mine[:, 0])
        right = jnp.where(mine, tile.of(right, token if gathered == "rhs" else None).astype(dtype), 0)
        if problem.transpose_lhs:
            left = jnp.where(mine.T, slice_of(left, (_0, row), (problem.k, height)).astype(dtype), 0)
        else:
            left = jnp.where(mine, tile.of(left, token if gathered == "lhs" else None).astype(dtype), 0)
            left = tied(left[None].transpose(0, 2, 1))[0]  # a batch of one reaches the dot in row-major order
        return lax.dot_general(
            left, right, (((1,), (0,)), ((), ())), precision=problem.precision, preferred_element_type=problem.acc
        )

    def group(i: Array, end: Array, state: tuple[Array, Any]) -> tuple[Array, Any]:
        top, (out, acc) = state
        tail = lax.rem(end - top - 1, np.int32(full)) + 1  # rows that full tiles leave over: 1 to full
        for shorter, height in zip((0, *heights), heights, strict=False):
            fits = (tail > shorter) & (tail <= height)
            acc = if_(fits, functools.partial(lambda h, zero: product(h, end - tail + zero, end), height), acc)
        if problem.rows > full:
            last = end - tail
            top, acc = while_below(last, lambda s: (s[0] + full, s[1] + product(full, s[0], last)), (top, acc))
        by_row = None if extras.by_row is None else row_of(extras.by_row, i).T
        result = problem.epilogue.finish(acc, Extras(by_row, row_or_none(extras.by_column, i)), problem.out)[None]
        if problem.epilogue.accumulate:
            result = add(from_bits(slice_of(out, (i, _0, _0), result.shape), problem.out), result)
        return end, (updated(out, to_bits(cast(result, problem.out)), (i, _0, _0)), acc)

    acc = jnp.zeros((problem.k, problem.n), problem.acc)
    return each_group(problem, bounds, group, (out, acc))[0]


# ---------------------------------------------------------------------------------------------------------------------
# Tiles


def _row_heights(problem: Problem, block_m: int, dtype: np.dtype[Any]) -> list[tuple[int, int]]:
    """The tile heights, tallest first, each with the least number of remaining rows for which it is the cheapest.

    Prices are in rows of arithmetic: h for the rows of a tile, and its overhead as measured on XLA:CPU. A single row is
    a matrix-vector product, which does not pack the weights; in bfloat16 XLA:CPU has none.
    """
    narrow = dtype == jnp.bfloat16
    overhead = 7 if narrow else 10 if problem.transpose_rhs else 1
    fixed = _fixed_rows(problem, narrow)
    heights = [max(h, 2) if narrow else h for h in ROW_HEIGHTS]
    heights = [h for h in heights if h <= min(block_m, problem.rows) and h < 4 * problem.m] or [
        min(block_m, problem.rows)
    ]
    heights, prices = _worth_a_loop({h: (h + overhead if h > 1 else 2.5) + fixed for h in heights})
    most = 2 * heights[-1]
    cost = [prices[0] * -(-rows // heights[0]) for rows in range(most)]
    steps = [(heights[0], 1)]
    for height, price in zip(heights[1:], prices[1:], strict=True):
        min_rows = next((rows for rows in range(most) if price <= cost[rows]), most)
        for rows in range(min_rows, most):
            cost[rows] = price + cost[max(0, rows - height)]
        steps.append((height, min_rows))
    return steps[::-1]


def _sum_heights(problem: Problem, block_m: int) -> list[int]:
    """The tile heights of a contraction, ascending; the rows left over by full tiles take the shortest that fits."""
    longest = min(problem.m, block_m)
    fixed = 16 + _fixed_rows(problem, narrow=False)  # the sum is written once, whatever the height
    return _worth_a_loop({h: h + fixed for h in (*SUM_HEIGHTS, longest) if h <= longest})[0]


def _fixed_rows(problem: Problem, narrow: bool) -> float:
    """What a tile costs before its first row, in rows of arithmetic: it weighs more if the weights are small."""
    return (2**18 if narrow else 2**17) / max(problem.k * problem.n, 1)


def _worth_a_loop(prices: dict[int, float]) -> tuple[list[int], list[float]]:
    """The heights, ascending, that save a quarter of the price of the next taller one, and their prices.

    Each height is a loop that XLA compiles. The tallest is always there.
    """
    kept: list[int] = []
    for height in sorted(prices, reverse=True):
        if not kept or prices[height] <= 0.75 * prices[kept[-1]]:
            kept.append(height)
    return kept[::-1], [prices[height] for height in kept[::-1]]


def row_tiles(problem: Problem, layout: Layout, start: int, end: int) -> list[RowTile]:
    """The row tiles of a group that owns the rows [start, end), as the loops of this backend compute them."""
    taken: list[tuple[int, int]] = []  # first row and height
    if 0 in problem.out_shape:
        return []
    if problem.form is Form.ROWS:
        top = start
        for height, min_rows in zip(layout.heights[::-1], layout.min_rows[::-1], strict=True):
            while end - top >= min_rows:
                taken.append((top, height))
                top += height
    elif start < end:
        heights = layout.heights
        last = end - (end - start - 1) % heights[-1] - 1
        taken = [(top, heights[-1]) for top in range(start, last, heights[-1])]
        taken.append((last, next(height for height in heights if height >= end - last)))
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
