"""Exact work in XLA's own operations, on any platform: a loop over groups, and inside it a few loops over row tiles.

    for each group that has rows:               rows: slice its weights once        contraction: start its sum
        for each tile height, tallest first:
            while that height pays:             a tile starts where the last one ended, so a group of r rows costs
                slice, multiply, select, store  about r rows, whatever its neighbours do

Every loop runs in place on the carried result. There is no conditional: XLA:CPU copies the carry through one, while a
loop of no turns costs nothing. What a loop body does not tie to its own row or group, XLA hoists out of the loop, and
then it runs for every group, needed or not; hence the barriers. `docs/performance.md` has the measurements.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from trencadis.backends.prepare import from_bits, in_bytes, to_bits
from trencadis.core.decision import Plan, Refusal
from trencadis.core.dtypes import cast
from trencadis.core.epilogue import ALONG_K, Extras, add
from trencadis.core.problem import Form, Problem
from trencadis.core.schedule import RowTile
from trencadis.core.spans import Spans, spans
from trencadis.core.target import Target
from trencadis.core.tiling import Overrides, Tiling

Array = jax.Array

ROW_HEIGHTS = (1, 4, 8, 16, 64, 256)
SUM_HEIGHTS = (4, 8, 16, 32, 64, 96, 128, 192, 256)

_slice = functools.partial(lax.dynamic_slice, allow_negative_indices=False)
_update = functools.partial(lax.dynamic_update_slice, allow_negative_indices=False)
_tie = lax.optimization_barrier
_0 = np.int32(0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How rows are cut into tiles: the heights that are compiled, each a loop of its own, and the operands' dtype."""

    operand: np.dtype[Any]  # what a tile is converted to before the dot
    heights: tuple[int, ...]  # rows of a tile, ascending
    least: tuple[int, ...] = ()  # rows form: how many rows must be left for the tile of that height to be taken


def plan(problem: Problem, target: Target, overrides: Overrides) -> Plan | Refusal:
    """A plan for any problem on any target, but for scales that change along k; k and n are left to XLA's matmul."""
    if problem.epilogue.along_k:
        return Refusal(backend="xla", reason=ALONG_K)
    tallest = max(min(256, problem.m), 1)
    tiling = overrides.tilings.forward or Tiling(tallest, max(problem.k, 1), max(problem.n, 1))
    layout = _layout(in_bytes(problem), target, tiling.m)
    low, high = layout.heights[0], layout.heights[-1]
    because = f"loops over row tiles of {low} to {high} rows that start at each group's first row"
    return Plan(
        asked=problem, problem=problem, target=target, backend="xla", tiling=tiling, layout=layout, because=because
    )


def _layout(problem: Problem, target: Target, tallest: int) -> Layout:
    operand = _operand_dtype(problem, target)
    if problem.form is Form.CONTRACTION:
        return Layout(operand=operand, heights=tuple(_sum_heights(problem, tallest)))
    heights, least = zip(*_row_heights(problem, tallest, operand)[::-1], strict=True)
    return Layout(operand=operand, heights=heights, least=least)


def run(plan: Plan, *operands: Array) -> Array:
    """The result of a plan's problem, by loops over groups and row tiles."""
    problem = in_bytes(plan.problem)
    lhs, rhs, group_sizes, first, *extras = operands
    # XLA would otherwise fold a constant operand, such as a broadcast, into every tile of the loops
    lhs, rhs = _tie((lhs.astype(problem.lhs), rhs.astype(problem.rhs)))
    ends = problem.epilogue.split(tuple(extras))
    out = jnp.zeros(problem.out_shape, problem.out) if ends.existing is None else ends.existing
    if problem.spans == 0 or problem.rows == 0 or 0 in problem.out_shape:
        return out
    walk = spans(problem, group_sizes, first)
    carried = to_bits(out)
    form = _rows if problem.form is Form.ROWS else _contraction
    return from_bits(form(problem, plan.layout, lhs, rhs, walk, ends, carried), problem.out)


# ---------------------------------------------------------------------------------------------------------------------
# The two forms


def _rows(problem: Problem, layout: Layout, lhs: Array, rhs: Array, walk: Spans, ends: Extras, out: Array) -> Array:
    """out[r] += lhs[r] @ rhs[group of r]; the weights of a group are sliced once and serve all its tiles."""
    kind = layout.operand
    contract = (((1,), (1 if problem.transpose_rhs else 0,)), ((), ()))

    def tile(height: int, i: Array, weight: Array, end: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        top, out = state
        source, weight, top = _tie((lhs, weight, top))
        row = jnp.minimum(top, np.int32(problem.rows - height))  # a tile never leaves the array: it may begin earlier
        x = _slice(source, (row, _0), (height, problem.k)).astype(kind)
        acc = lax.dot_general(x, weight, contract, precision=problem.precision, preferred_element_type=problem.acc)
        down = None if ends.by_row is None else _slice(ends.by_row, (row,), (height,))[:, None]
        acc = problem.epilogue.finish(acc, Extras(down, _of(ends.by_column, i), _of(ends.bias, i)), problem.out)
        old = from_bits(_slice(out, (row, _0), (height, problem.n)), problem.out)  # [height, n]
        if problem.epilogue.accumulate:
            acc = add(old, acc)
        new = jnp.where(_between(row, height, top, end), cast(acc, problem.out), old)
        return top + height, _update(out, to_bits(new), (row, _0))

    def group(i: Array, end: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        top, out = state
        source, which, top = _tie((rhs, lax.rem(i, np.int32(problem.weights)), top))
        weight = _slice(source, (which, _0, _0), (1, *rhs.shape[1:]))[0].astype(kind)  # [k, n] or [n, k]
        for height, least in zip(layout.heights[::-1], layout.least[::-1], strict=True):  # tallest first
            top, out = _while_below(end - (least - 1), functools.partial(tile, height, i, weight, end), (top, out))
        return top, out

    return _each_group(problem, walk, group, out)


def _contraction(
    problem: Problem, layout: Layout, lhs: Array, rhs: Array, walk: Spans, ends: Extras, out: Array
) -> Array:
    """out[i] += lhs[rows of i].T @ rhs[rows of i]: one product for what is left over, then full tiles added to it."""
    kind, heights, full = layout.operand, layout.heights, layout.heights[-1]

    def product(height: int, top: Array, end: Array) -> Array:  # [k, n]
        left, right, top = _tie((lhs, rhs, top))
        row = jnp.minimum(top, np.int32(problem.rows - height))
        mine = _between(row, height, top, end)  # [height, 1]; both sides, since 0 * NaN is NaN
        right = jnp.where(mine, _slice(right, (row, _0), (height, problem.n)).astype(kind), 0)
        if problem.transpose_lhs:
            left = jnp.where(mine.T, _slice(left, (_0, row), (problem.k, height)).astype(kind), 0)
        else:
            left = jnp.where(mine, _slice(left, (row, _0), (height, problem.k)).astype(kind), 0)
            left = _tie(left[None].transpose(0, 2, 1))[0]  # a batch of one reaches the dot in row-major order
        return lax.dot_general(
            left, right, (((1,), (0,)), ((), ())), precision=problem.precision, preferred_element_type=problem.acc
        )

    def group(i: Array, end: Array, state: tuple[Array, Any]) -> tuple[Array, Any]:
        top, (out, acc) = state
        tail = lax.rem(end - top - 1, np.int32(full)) + 1  # rows that full tiles leave over: 1 to full
        for shorter, height in zip((0, *heights), heights, strict=False):
            fits = (tail > shorter) & (tail <= height)
            acc = _if(fits, functools.partial(lambda h, turn: product(h, end - tail + turn, end), height), acc)
        if problem.rows > full:
            last = end - tail
            top, acc = _while_below(last, lambda s: (s[0] + full, s[1] + product(full, s[0], last)), (top, acc))
        down = None if ends.by_row is None else _of(ends.by_row, i).T
        result = problem.epilogue.finish(acc, Extras(down, _of(ends.by_column, i)), problem.out)[None]
        if problem.epilogue.accumulate:
            result = add(from_bits(_slice(out, (i, _0, _0), result.shape), problem.out), result)
        return end, (_update(out, to_bits(cast(result, problem.out)), (i, _0, _0)), acc)

    acc = jnp.zeros((problem.k, problem.n), problem.acc)
    return _each_group(problem, walk, group, (out, acc))[0]


# ---------------------------------------------------------------------------------------------------------------------
# Loops


def _each_group(problem: Problem, walk: Spans, group: Any, carry: Any) -> Any:
    """`group(i, end, (first row, carry))` for each group that has rows."""

    def visit(i: Array, carry: Any) -> Any:
        i = i.astype(jnp.int32)  # int64 where x64 is on
        end = _at(walk.ends, i)
        return _while_below(end, functools.partial(group, i, end), (_at(walk.starts, i), carry))[1]

    return lax.fori_loop(_0, np.int32(problem.spans), visit, carry)


def _while_below(limit: Array, body: Any, state: Any) -> Any:
    return lax.while_loop(lambda state: state[0] < limit, body, state)


def _if(condition: Array, body: Any, value: Array) -> Array:
    """`body(0)` or `value`: a loop of one or no turn. The body has to use the 0, or it is hoisted and always runs."""
    return lax.fori_loop(_0, condition.astype(jnp.int32), lambda turn, _: body(turn), value)


# ---------------------------------------------------------------------------------------------------------------------
# Tiles


def _row_heights(problem: Problem, tallest: int, kind: Any) -> list[tuple[int, int]]:
    """Tile heights, tallest first, each with the least number of remaining rows for which it is the cheapest step.

    Prices are in rows of arithmetic: h for the rows, and what a visit costs beside them, as measured on XLA:CPU. A
    single row is a matrix-vector product, which does not pack the weights; in bfloat16 XLA has none.
    """
    narrow = kind == jnp.bfloat16
    visit = 7 if narrow else 10 if problem.transpose_rhs else 1
    small = (2**18 if narrow else 2**17) / max(problem.k * problem.n, 1)  # fixed costs weigh more on small weights
    heights = [max(h, 2) if narrow else h for h in ROW_HEIGHTS]
    heights = [h for h in heights if h <= min(tallest, problem.rows) and h < 4 * problem.m] or [
        min(tallest, problem.rows)
    ]
    prices = [(h + visit if h > 1 else 2.5) + small for h in heights]
    most = 2 * heights[-1]
    cost = [prices[0] * -(-rows // heights[0]) for rows in range(most)]
    steps = [(heights[0], 1)]
    for height, price in zip(heights[1:], prices[1:], strict=True):
        least = next((rows for rows in range(most) if price <= cost[rows]), most)
        for rows in range(least, most):
            cost[rows] = price + cost[max(0, rows - height)]
        steps.append((height, least))
    return steps[::-1]


def _sum_heights(problem: Problem, tallest: int) -> list[int]:
    """Tile heights of a contraction, shortest first; a group's remainder takes the shortest that holds it."""
    longest = min(problem.m, tallest)
    shorter = [h for h in SUM_HEIGHTS if h < longest]
    return [*shorter, longest]


def row_tiles(problem: Problem, layout: Layout, start: int, end: int) -> list[RowTile]:
    """The row tiles of a group that owns the rows [start, end), as the loops of this backend take them."""
    taken: list[tuple[int, int]] = []  # first row and height
    if 0 in problem.out_shape:
        return []
    if problem.form is Form.ROWS:
        top = start
        for height, least in zip(layout.heights[::-1], layout.least[::-1], strict=True):
            while end - top >= least:
                taken.append((top, height))
                top += height
    elif start < end:
        heights = layout.heights
        last = end - (end - start - 1) % heights[-1] - 1
        taken = [(top, heights[-1]) for top in range(start, last, heights[-1])]
        taken.append((last, next(height for height in heights if height >= end - last)))
    tiles = []
    for top, height in taken:
        row = min(top, problem.rows - height)  # a tile never leaves the array: it may begin earlier
        tiles.append(RowTile(range(row, row + height), range(top, min(top + height, end))))
    return tiles


def _between(row: Array, height: int, start: Array, end: Array) -> Array:
    """Which of the rows from `row` on lie in [start, end): bool[height, 1]."""
    index = row + lax.broadcasted_iota(jnp.int32, (height, 1), 0)
    return (index >= start) & (index < end)


def _of(x: Array | None, i: Array) -> Any:
    """The entry [1, n] of a group in an array [g, n]."""
    return None if x is None else _slice(x, (i, _0), (1, x.shape[1]))


def _at(vector: Array, i: Array) -> Array:
    return _slice(vector, (i,), (1,))[0]


# ---------------------------------------------------------------------------------------------------------------------
# Dtypes


def _operand_dtype(problem: Problem, target: Target) -> np.dtype[Any]:
    """The dtype of a tile in the dot: its own if the machine multiplies that natively, else the accumulator's."""
    if problem.lhs != problem.rhs:
        return problem.acc
    if jnp.issubdtype(problem.lhs, jnp.integer):
        return problem.lhs if jnp.iinfo(problem.lhs).bits >= 8 else np.dtype(np.int8)
    return problem.lhs if target.multiplies(problem.lhs) else problem.acc
