"""Loops of XLA operations, on any platform: a loop over groups, and inside it a few loops over row tiles.

    for each group that has rows:               rows: slice its weights once        contraction: start its sum
        for each tile height, tallest first:
            while that height is the cheapest:  a tile starts where the last one ended, so that a group of r rows
                slice, multiply, select, store  costs about r rows, whatever the sizes of other groups are

Every loop updates the carried result in place. There is no `lax.cond`: XLA:CPU would copy its operands, while a loop of
zero iterations costs nothing. XLA hoists operations that do not depend on the row or group out of a loop, and then they
run for every group, needed or not; hence the optimization barriers. `docs/performance.md` has the measurements.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

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

_slice = functools.partial(lax.dynamic_slice, allow_negative_indices=False)
_update = functools.partial(lax.dynamic_update_slice, allow_negative_indices=False)
_tie: Any = lax.optimization_barrier  # ties values together, so that none of them is hoisted alone; has no types
_0 = np.int32(0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The heights of row tiles, each with a loop of its own, and the dtype in which tiles are multiplied."""

    operand: np.dtype[Any]  # dtype that tiles are converted to before the dot
    heights: tuple[int, ...]  # rows of a tile, ascending
    min_rows: tuple[int, ...] = ()  # rows form: rows that must be left of the group for a tile of that height


def plan(problem: Problem, target: Target, overrides: Overrides) -> Plan | Refusal:
    """A plan for any problem on any target, or a refusal if its scales change along k; k and n are not tiled."""
    if problem.epilogue.along_k:
        return Refusal(backend="xla", reason=ALONG_K)
    block_m = max(min(256, problem.m), 1)
    tiling = overrides.tilings.forward or Tiling(block_m, max(problem.k, 1), max(problem.n, 1))
    layout = _layout(int4_as_int8(problem), target, tiling.m)
    low, high = layout.heights[0], layout.heights[-1]
    because = f"loops over row tiles of {low} to {high} rows that start at each group's first row"
    return Plan(
        asked=problem, problem=problem, target=target, backend="xla", tiling=tiling, layout=layout, because=because
    )


def _layout(problem: Problem, target: Target, block_m: int) -> Layout:
    operand = _operand_dtype(problem, target)
    if problem.form is Form.CONTRACTION:
        return Layout(operand=operand, heights=tuple(_sum_heights(problem, block_m)))
    heights, min_rows = zip(*_row_heights(problem, block_m, operand)[::-1], strict=True)
    return Layout(operand=operand, heights=heights, min_rows=min_rows)


def run(plan: Plan, *operands: Array) -> Array:
    """The result of a plan's problem, computed by loops over groups and row tiles."""
    problem = int4_as_int8(plan.problem)
    lhs, rhs, group_sizes, first, *rest = operands
    # XLA would otherwise fold a constant operand, such as a broadcast, into every tile of the loops
    lhs, rhs = _tie((lhs.astype(problem.lhs), rhs.astype(problem.rhs)))
    extras = problem.epilogue.split(tuple(rest))
    out = _zeros(problem, lhs, rhs) if extras.existing is None else extras.existing
    if problem.spans == 0 or problem.rows == 0 or 0 in problem.out_shape:
        return out
    bounds = spans(problem, group_sizes, first)
    carried = to_bits(out)
    form = _rows if problem.form is Form.ROWS else _contraction
    return from_bits(form(problem, plan.layout, lhs, rhs, bounds, extras, carried), problem.out)


def _zeros(problem: Problem, lhs: Array, rhs: Array) -> Array:
    """A result of zeros, made of an element of each operand in a way that XLA does not see through.

    It would keep one array of zeros for all products of a program, and copy it for each.
    """
    if not lhs.size or not rhs.size:
        return jnp.zeros(problem.out_shape, problem.out)
    a, b = (lax.bitcast_convert_type(x[(0,) * x.ndim].astype(jnp.float32), jnp.int32) for x in (lhs, rhs))
    zero = jnp.minimum(lax.shift_right_logical(a ^ b, np.int32(1)), _0)  # the least of 0 and a number that is not less
    return jnp.broadcast_to(zero.astype(problem.out), problem.out_shape)


# ---------------------------------------------------------------------------------------------------------------------
# The two forms


def _rows(problem: Problem, layout: Layout, lhs: Array, rhs: Array, bounds: Spans, extras: Extras, out: Array) -> Array:
    """out[r] += lhs[r] @ rhs[group of r]; the weights of a group are sliced once and serve all its tiles."""
    dtype = layout.operand
    contract = (((1,), (1 if problem.transpose_rhs else 0,)), ((), ()))

    def tile(height: int, i: Array, weight: Array, end: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        top, out = state
        source, weight, top = _tie((lhs, weight, top))
        row = jnp.minimum(top, np.int32(problem.rows - height))  # a tile stays inside the array: it may start earlier
        x = _slice(source, (row, _0), (height, problem.k)).astype(dtype)
        acc = lax.dot_general(x, weight, contract, precision=problem.precision, preferred_element_type=problem.acc)
        by_row = None if extras.by_row is None else _slice(extras.by_row, (row,), (height,))[:, None]
        vectors = Extras(by_row, _of(extras.by_column, i), _of(extras.bias, i))
        acc = problem.epilogue.finish(acc, vectors, problem.out)
        old = from_bits(_slice(out, (row, _0), (height, problem.n)), problem.out)  # [height, n]
        if problem.epilogue.accumulate:
            acc = add(old, acc)
        new = jnp.where(_between(row, height, top, end), cast(acc, problem.out), old)
        return top + height, _update(out, to_bits(new), (row, _0))

    def group(i: Array, end: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        top, out = state
        source, which, top = _tie((rhs, lax.rem(i, np.int32(problem.weights)), top))
        weight = _slice(source, (which, _0, _0), (1, *rhs.shape[1:]))[0].astype(dtype)  # [k, n] or [n, k]
        for height, min_rows in zip(layout.heights[::-1], layout.min_rows[::-1], strict=True):  # tallest first
            top, out = _while_below(end - (min_rows - 1), functools.partial(tile, height, i, weight, end), (top, out))
        return top, out

    return _each_group(problem, bounds, group, out)


def _contraction(
    problem: Problem, layout: Layout, lhs: Array, rhs: Array, bounds: Spans, extras: Extras, out: Array
) -> Array:
    """out[i] += lhs[rows of i].T @ rhs[rows of i]: the product of the rows that full tiles leave over, plus those."""
    dtype, heights, full = layout.operand, layout.heights, layout.heights[-1]

    def product(height: int, top: Array, end: Array) -> Array:  # [k, n]
        left, right, top = _tie((lhs, rhs, top))
        row = jnp.minimum(top, np.int32(problem.rows - height))
        mine = _between(row, height, top, end)  # [height, 1]; both sides, since 0 * NaN is NaN
        right = jnp.where(mine, _slice(right, (row, _0), (height, problem.n)).astype(dtype), 0)
        if problem.transpose_lhs:
            left = jnp.where(mine.T, _slice(left, (_0, row), (problem.k, height)).astype(dtype), 0)
        else:
            left = jnp.where(mine, _slice(left, (row, _0), (height, problem.k)).astype(dtype), 0)
            left = _tie(left[None].transpose(0, 2, 1))[0]  # a batch of one reaches the dot in row-major order
        return lax.dot_general(
            left, right, (((1,), (0,)), ((), ())), precision=problem.precision, preferred_element_type=problem.acc
        )

    def group(i: Array, end: Array, state: tuple[Array, Any]) -> tuple[Array, Any]:
        top, (out, acc) = state
        tail = lax.rem(end - top - 1, np.int32(full)) + 1  # rows that full tiles leave over: 1 to full
        for shorter, height in zip((0, *heights), heights, strict=False):
            fits = (tail > shorter) & (tail <= height)
            acc = _if(fits, functools.partial(lambda h, zero: product(h, end - tail + zero, end), height), acc)
        if problem.rows > full:
            last = end - tail
            top, acc = _while_below(last, lambda s: (s[0] + full, s[1] + product(full, s[0], last)), (top, acc))
        by_row = None if extras.by_row is None else _row(extras.by_row, i).T
        result = problem.epilogue.finish(acc, Extras(by_row, _of(extras.by_column, i)), problem.out)[None]
        if problem.epilogue.accumulate:
            result = add(from_bits(_slice(out, (i, _0, _0), result.shape), problem.out), result)
        return end, (_update(out, to_bits(cast(result, problem.out)), (i, _0, _0)), acc)

    acc = jnp.zeros((problem.k, problem.n), problem.acc)
    return _each_group(problem, bounds, group, (out, acc))[0]


# ---------------------------------------------------------------------------------------------------------------------
# Loops


def _each_group(problem: Problem, bounds: Spans, group: Any, carry: Any) -> Any:
    """The carry after `group(i, end, (first row, carry))` for each group i that has rows."""

    def visit(i: Array, carry: Any) -> Any:
        i = i.astype(jnp.int32)  # int64 where x64 is on
        end = _at(bounds.ends, i)
        return _while_below(end, functools.partial(group, i, end), (_at(bounds.starts, i), carry))[1]

    return lax.fori_loop(_0, np.int32(problem.spans), visit, carry)


def _while_below(limit: Array, body: Any, state: Any) -> Any:
    return lax.while_loop(lambda state: state[0] < limit, body, state)


def _if(condition: Array, body: Any, value: Array) -> Array:
    """`body(0)` if the condition holds, else `value`: a loop of one or no iteration.

    The body has to use the 0; otherwise XLA hoists it out of the loop, and it always runs.
    """
    return lax.fori_loop(_0, condition.astype(jnp.int32), lambda zero, _: body(zero), value)


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


def _between(row: Array, height: int, start: Array, end: Array) -> Array:
    """Whether each of `height` rows from `row` on lies in [start, end): bool[height, 1]."""
    index = row + lax.broadcasted_iota(jnp.int32, (height, 1), 0)
    return (index >= start) & (index < end)


def _of(x: Array | None, i: Array) -> Array | None:
    """Row i of an array [g, n] as [1, n]; None if there is no array."""
    return None if x is None else _row(x, i)


def _row(x: Array, i: Array) -> Array:
    return _slice(x, (i, _0), (1, x.shape[1]))


def _at(vector: Array, i: Array) -> Array:
    return _slice(vector, (i,), (1,))[0]


# ---------------------------------------------------------------------------------------------------------------------
# Dtypes


def _operand_dtype(problem: Problem, target: Target) -> np.dtype[Any]:
    """The dtype in which tiles are multiplied: their own if the machine has such products, else the accumulator's."""
    if problem.lhs != problem.rhs:
        return problem.acc
    if jnp.issubdtype(problem.lhs, jnp.integer):
        return problem.lhs if jnp.iinfo(problem.lhs).bits >= 8 else np.dtype(np.int8)
    return problem.lhs if target.multiplies(problem.lhs) else problem.acc
