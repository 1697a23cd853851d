"""Loops over groups and row tiles in XLA operations, which update the results that they carry in place.

There is no `lax.cond`: XLA:CPU would copy its operands, while a loop of zero iterations costs nothing. XLA hoists
operations that do not depend on the row or group out of a loop, and then they run for every group, needed or not; hence
the optimization barriers.
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
from trencadis.core.dtypes import cast
from trencadis.core.epilogue import add
from trencadis.core.order import hidden_zero
from trencadis.core.problem import Problem
from trencadis.core.spans import Spans

Array = jax.Array

slice_of = functools.partial(lax.dynamic_slice, allow_negative_indices=False)
updated = functools.partial(lax.dynamic_update_slice, allow_negative_indices=False)
tied: Any = lax.optimization_barrier  # ties values together, so that none of them is hoisted alone; has no types
_0 = np.int32(0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The heights of row tiles, each with a loop of its own, and the dtype in which tiles are multiplied."""

    operand: np.dtype[Any]  # dtype that tiles are converted to before the dot
    heights: tuple[int, ...]  # rows of a tile, ascending
    min_rows: tuple[int, ...] = ()  # rows form: rows that must be left of the group for a tile of that height


class Tile(NamedTuple):
    """Consecutive rows, some of which belong to one group."""

    group: Array
    row: Array  # the first
    height: int
    mine: Array  # bool[height]

    def of(self, x: Array, token: Array | None = None) -> Array:
        """These rows of an array, or those of the tokens that `token` has for them."""
        if token is None:
            return slice_of(x, (self.row, *[_0] * (x.ndim - 1)), (self.height, *x.shape[1:]))
        return x.at[self.of(token)].get(mode="promise_in_bounds", wrap_negative_indices=False)

    def stored(self, out: Array, new: Array, dtype: Any, *, accumulate: bool = False) -> Array:
        """The array `out`, or its bits, with new rows of this dtype where they belong to the group."""
        old = from_bits(self.of(out), dtype)
        new = cast(add(old, new) if accumulate else new, dtype)
        mine = self.mine.reshape(-1, *[1] * (out.ndim - 1))
        return updated(out, to_bits(jnp.where(mine, new, old)), (self.row, *[_0] * (out.ndim - 1)))


def each_tile(
    problem: Problem,
    layout: Layout,
    bounds: Spans,
    compute: Any,
    sources: list[Array],
    weights: list[Array],
    carry: Any,
) -> Any:
    """The carry after `compute(tile, sources, weights of its group, carry)` for each row tile of each group.

    The weights of a group are sliced once and serve all its tiles.
    """

    def tile(height: int, i: Array, weights: list[Array], end: Array, state: tuple[Array, Any]) -> tuple[Array, Any]:
        top, carry = state
        given, weights, top = tied((sources, weights, top))
        row = jnp.minimum(top, np.int32(problem.rows - height))  # a tile stays inside the array: it may start earlier
        found = Tile(i, row, height, between(row, height, top, end)[:, 0])
        return top + height, compute(found, given, weights, carry)

    def group(i: Array, end: Array, state: tuple[Array, Any]) -> tuple[Array, Any]:
        top, carry = state
        given, which, top = tied((weights, lax.rem(i, np.int32(problem.weights)), top))
        mine = [slice_of(w, (which, _0, _0), (1, *w.shape[1:]))[0].astype(layout.operand) for w in given]
        for height, min_rows in zip(layout.heights[::-1], layout.min_rows[::-1], strict=True):  # tallest first
            step = functools.partial(tile, height, i, mine, end)
            top, carry = while_below(end - (min_rows - 1), step, (top, carry))
        return top, carry

    return each_group(problem, bounds, group, carry)


def multiply(problem: Problem, layout: Layout, x: Array, weight: Array) -> Array:
    """Rows of lhs times the weights [k, n] or [n, k] of a group, in the dtype of the accumulator."""
    contract = (((1,), (1 if problem.transpose_rhs else 0,)), ((), ()))
    x = x.astype(layout.operand)
    return lax.dot_general(x, weight, contract, precision=problem.precision, preferred_element_type=problem.acc)


def each_group(problem: Problem, bounds: Spans, group: Any, carry: Any) -> Any:
    """The carry after `group(i, end, (first row, carry))` for each group i that has rows."""

    def visit(i: Array, carry: Any) -> Any:
        i = i.astype(jnp.int32)  # int64 where x64 is on
        end = _entry(bounds.ends, i)
        return while_below(end, functools.partial(group, i, end), (_entry(bounds.starts, i), carry))[1]

    return lax.fori_loop(_0, np.int32(problem.spans), visit, carry)


def while_below(limit: Array, body: Any, state: Any) -> Any:
    """The state after `body` while its first value, a row, is below the limit."""
    return lax.while_loop(lambda state: state[0] < limit, body, state)


def if_(condition: Array, body: Any, value: Array) -> Array:
    """`body(0)` if the condition holds, else `value`: a loop of one or no iteration.

    The body has to use the 0; otherwise XLA hoists it out of the loop, and it always runs.
    """
    return lax.fori_loop(_0, condition.astype(jnp.int32), lambda zero, _: body(zero), value)


def zeros_of(shape: tuple[int, ...], dtype: Any, *operands: Array, nth: int = 0) -> Array:
    """The nth zeros of a product. XLA would keep one array of zeros for all of a program, and copy it for each."""
    if not all(x.size for x in operands):
        return jnp.zeros(shape, dtype)
    return jnp.broadcast_to(hidden_zero(*operands, nth=nth).astype(dtype), shape)


def between(row: Array, height: int, start: Array, end: Array) -> Array:
    """Whether each of `height` rows from `row` on lies in [start, end): bool[height, 1]."""
    index = row + lax.broadcasted_iota(jnp.int32, (height, 1), 0)
    return (index >= start) & (index < end)


def row_of(x: Array, i: Array) -> Array:
    """Row i of an array [g, n] as [1, n]."""
    return slice_of(x, (i, _0), (1, x.shape[1]))


def row_or_none(x: Array | None, i: Array) -> Array | None:
    """The same; None if there is no array."""
    return None if x is None else row_of(x, i)


def _entry(vector: Array, i: Array) -> Array:
    return slice_of(vector, (i,), (1,))[0]
