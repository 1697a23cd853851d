"""Loops over groups and row tiles in XLA operations, which update the results that they carry in place.

There is no `lax.cond`: XLA:CPU would copy its operands, while a loop of zero iterations costs nothing. XLA hoists
operations that do not depend on the row or group out of a loop, and then they run for every group, needed or not; hence
the optimization barriers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
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
from trencadis.core.spans import Bounds

Array = jax.Array

slice_of = functools.partial(lax.dynamic_slice, allow_negative_indices=False)
updated = functools.partial(lax.dynamic_update_slice, allow_negative_indices=False)
tied: Any = lax.optimization_barrier  # ties values together, so that none of them is hoisted alone; has no types
_0 = np.int32(0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The heights of row tiles, each with a loop of its own, and how tiles are multiplied."""

    operand: np.dtype[Any]  # dtype that tiles are converted to before the dot
    heights: tuple[int, ...]  # rows of a tile, ascending
    min_rows: tuple[int, ...]  # rows that must be left of the group for a tile of that height
    flipped: int = 0  # rows form: the tallest tile that is multiplied as (weights @ rowsᵀ)ᵀ


class Tile(NamedTuple):
    """Consecutive rows, some of which belong to one group."""

    group: Array
    row: Array  # the first, unless less than `height` rows follow: then the last ones of the array are meant
    height: int
    mine: Array | None  # which of its rows belong to the group, bool[height]; None: all of them

    def of(self, x: Array, token: Array | None = None) -> Array:
        """These rows of an array, or those of the tokens that `token` has for them."""
        if token is None:
            return slice_of(x, (self.row, *[_0] * (x.ndim - 1)), (self.height, *x.shape[1:]))
        return x.at[self.of(token)].get(mode="promise_in_bounds", wrap_negative_indices=False)

    def masked(self, new: Array, old: Array | None = None, axis: int = 0) -> Array:
        """New rows where they belong to the group, and old ones, or zeros, elsewhere; rows are indices of this axis."""
        if self.mine is None:
            return new
        mine = lax.broadcast_in_dim(self.mine, new.shape, (axis,))
        return lax.select(mine, new, lax.full_like(new, 0) if old is None else old)

    def stored(self, out: Array, new: Array, dtype: Any, *, accumulate: bool = False) -> Array:
        """The array `out`, or its bits, with new rows of this dtype where they belong to the group."""
        old = from_bits(self.of(out), dtype)
        new = cast(add(old, new) if accumulate else new, dtype)
        return updated(out, to_bits(self.masked(new, old)), (self.row, *[_0] * (out.ndim - 1)))


class GroupRows(NamedTuple):
    """The rows [start, end) of a group."""

    group: Array
    start: Array
    end: Array


def tile_at(problem: Problem, rows: GroupRows, height: int, *, whole: bool = False) -> Tile:
    """The tile at the start of these rows; `whole`: there are enough of them for all of it."""
    if whole:
        return Tile(rows.group, rows.start, height, None)
    return Tile(rows.group, rows.start, height, inside(problem.rows, height, rows.start, rows.end))


def each_tile(
    problem: Problem,
    layout: Layout,
    bounds: Bounds,
    compute: Any,
    sources: list[Array],
    weights: list[Array],
    carry: Any,
) -> Any:
    """The carry after `compute(tile, sources, weights of its group, carry)` for each row tile of each group.

    The weights of a group are sliced once and serve all its tiles.
    """

    def group(rows: GroupRows, carry: Any) -> Any:
        which = rows.group
        if problem.weights < problem.spans:
            which = lax.rem(which, np.int32(problem.weights))
        given, which = unconverted(weights, which)
        mine = [slice_of(w, (which, _0, _0), (1, *w.shape[1:]))[0].astype(layout.operand) for w in given]

        def step(tile: Tile, carry: Any) -> Any:
            given, row = unconverted(sources, tile.row)
            return compute(tile._replace(row=row), given, mine, carry)

        return tiles_of_group(problem, layout, rows, step, carry)

    return each_group(problem, bounds, group, carry)


def tiles_of_group(problem: Problem, layout: Layout, rows: GroupRows, step: Any, carry: Any, first: Any = None) -> Any:
    """The carry after `step(tile, carry)` for each tile of a group, the tallest first; `first` is the step of that."""

    def body(height: int, min_rows: int, step: Any, state: tuple[Array, Any]) -> tuple[Array, Any]:
        top, carry = state
        tile = tile_at(problem, rows._replace(start=top), height, whole=min_rows == height)
        return top + height, step(tile, carry)

    top = rows.start
    for height, min_rows in zip(layout.heights[::-1], layout.min_rows[::-1], strict=True):
        limit = rows.end - np.int32(min_rows - 1) if min_rows > 1 else rows.end
        each = functools.partial(body, height, min_rows)
        if first is not None:  # at most once, since then the next row is another one
            once = jnp.minimum(limit, rows.start + 1)
            top, carry = while_below(once, functools.partial(each, first), (top, carry))
        top, carry = while_below(limit, functools.partial(each, step), (top, carry))
    return carry


def each_group(problem: Problem, bounds: Bounds, group: Any, carry: Any) -> Any:
    """The carry after `group(rows, carry)` for the rows of each group that has some."""
    if bounds.starts is not None:
        return _each_listed(problem, bounds.starts, bounds.ends, group, carry)
    ends, last = bounds.ends, np.int32(problem.rows)

    def combined(x: tuple[Array, Array], y: tuple[Array, Array]) -> tuple[Array, Array]:
        return x[0] + y[0], lax.min(x[1], y[1])

    def body(state: tuple[Array, Any]) -> tuple[Array, Any]:  # the group of a row is the first that ends after it
        row, carry = state
        later = ends > row
        before, after = (~later).astype(np.int32), lax.select(later, ends, lax.full_like(ends, last))
        index, end = lax.reduce((before, after), (_0, last), combined, (0,))  # one kernel for both
        return end, group(GroupRows(index, row, end), carry)

    return while_below(lax.min(ends[-1], last), body, (bounds.first, carry))[1]


def _each_listed(problem: Problem, starts: Array, ends: Array, group: Any, carry: Any) -> Any:
    """The same from a list of the groups that have rows, which takes longer to compile, and no time for each group."""
    index = np.arange(problem.spans, dtype=np.int32)
    busy = ends > starts
    order = lax.sort(jnp.where(busy, index, np.int32(problem.spans)))  # groups with rows come first
    table = jnp.stack([index, starts, ends], axis=1)  # [spans, 3]
    table = table.at[order].get(mode="clip", wrap_negative_indices=False)

    def body(state: tuple[Array, Any]) -> tuple[Array, Any]:
        visit, carry = state
        rows = GroupRows(*(slice_of(table, (visit, np.int32(column)), (1, 1))[0, 0] for column in range(3)))
        return visit + 1, group(rows, carry)

    return while_below(jnp.sum(busy, dtype=jnp.int32), body, (_0, carry))[1]


def while_below(limit: Array, body: Any, state: Any) -> Any:
    """The state after `body` while its first value, a row, is below the limit."""
    return lax.while_loop(lambda state: state[0] < limit, body, state)


def unconverted(arrays: Sequence[Array], row: Array) -> tuple[list[Array], Array]:
    """The arrays and a row, tied to each other where XLA would convert all of a narrow array before a loop."""
    if all(x.dtype.itemsize >= 4 for x in arrays):
        return list(arrays), row
    tied_arrays, row = tied((list(arrays), row))
    return tied_arrays, row


def multiply(problem: Problem, layout: Layout, x: Array, weight: Array) -> Array:
    """Rows of lhs times the weights [k, n] or [n, k] of a group, in the dtype of the accumulator."""
    x = x.astype(layout.operand)
    if 1 < x.shape[0] <= layout.flipped:
        return tied(dot(problem, weight, transposed(x))).T
    return dot(problem, x, weight, 1 if problem.transpose_rhs else 0)


def dot(problem: Problem, x: Array, y: Array, contracted: int = 0) -> Array:
    """The product of two matrices in the dtype of the accumulator; `contracted` is the dimension of y to sum over."""
    contract = (((1,), (contracted,)), ((), ()))
    return lax.dot_general(x, y, contract, precision=problem.precision, preferred_element_type=problem.acc)


def transposed(x: Array) -> Array:
    """The matrix transposed in memory; as a batch of one behind a barrier, no dot absorbs the transposition."""
    return tied(x)[None].transpose(0, 2, 1)[0]


def zeros_of(shape: tuple[int, ...], dtype: Any, *operands: Array, nth: int = 0) -> Array:
    """The nth zeros of a product. XLA would keep one array of zeros for all of a program, and copy it for each.

    As flat arrays, the smaller operand first, so that products of transposed shapes are filled by the same kernel.
    """
    if not all(x.size for x in operands):
        return jnp.zeros(shape, dtype)
    flat = tied([x.reshape(-1) for x in sorted(operands, key=lambda x: x.size)])
    return tied(lax.broadcast(hidden_zero(*flat, nth=nth, dtype=dtype), (math.prod(shape),))).reshape(shape)


def inside(rows: int, height: int, start: Array, end: Array) -> Array:
    """Which rows of a slice of `height` rows at `start`, which begins earlier to stay inside, are in [start, end)."""
    row = lax.min(start, np.int32(rows - height)) + lax.iota(np.int32, height)
    return (row >= start) & (row < end)


def row_of(x: Array, i: Array) -> Array:
    """Row i of an array [g, n] as [1, n]."""
    return slice_of(x, (i, _0), (1, x.shape[1]))


def row_or_none(x: Array | None, i: Array) -> Array | None:
    """The same; None if there is no array."""
    return None if x is None else row_of(x, i)
