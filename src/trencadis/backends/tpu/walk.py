"""The way of a kernel through its work, as scalars: which span of rows, which block of the result, which tile of rows.

    for each span (a group's rows):            rows: empty ones are passed over; contraction: they have zeros to write
        for each block of columns:             rows: of n; contraction: of k and n
            for each tile of rows:             as tall as what is left of the span asks for

The group sizes are read where they lie, in scalar memory: there is no schedule to compute before the first copy can
start, and none to hold. Several walkers go the same way at once, the arithmetic behind and the copies ahead of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from trencadis.backends.tpu.columns import i32, span
from trencadis.backends.tpu.layout import Layout
from trencadis.core.problem import Form, Problem
from trencadis.core.schedule import RowTile

Scalar = jax.Array  # i32[]


class Place(NamedTuple):
    """One tile of one block of one span."""

    span: Scalar  # local group, of all batch entries
    start: Scalar  # the rows of the span
    end: Scalar
    block: Scalar
    row: Scalar  # the first row of the tile, aligned to slabs


class Walk:
    """The order of places. `scalars` are references to scalar memory.

    sizes i32[batch * groups], first i32[batch], and table i32[...], the height of a tile by the slabs that are left.
    """

    def __init__(self, problem: Problem, layout: Layout, scalars: dict[str, Any], blocks: tuple[Any, Any]) -> None:
        self.problem, self.layout = problem, layout
        self.sizes, self.first, self.table = (scalars[name] for name in ("sizes", "first", "table"))
        self.low, self.high = blocks  # of this core

    # -- what a place is -----------------------------------------------------------------------------------------------

    def over(self, place: Place) -> Any:
        """Whether the walk has passed its last place."""
        return place.span >= i32(self.problem.spans)

    def left(self, place: Place) -> Scalar:
        """Rows from the tile's first to the end of the span, in whole slabs; 0 in an empty span."""
        return jnp.where(place.end > place.start, self.ceil(place.end) - place.row, i32(0))

    def height(self, place: Place) -> Scalar:
        """How tall the tile is: what the table says of the slabs that are left."""
        if len(self.layout.table) == 1:
            return i32(self.layout.tallest)
        most = i32(len(self.layout.table) - 1)
        return self.table[jnp.minimum(lax.div(self.left(place), i32(self.layout.slab)), most)]

    def rows(self, place: Place) -> Scalar:
        """Rows of the tile that belong to the span's slabs."""
        return jnp.minimum(self.height(place), self.left(place))

    def last(self, place: Place) -> Any:
        """Whether the tile is the last of its span."""
        return self.left(place) <= self.height(place)

    def floor(self, row: Scalar, to: int = 0) -> Scalar:
        """The row at which the slab of this row begins."""
        return pl.multiple_of(row & i32(-(to or self.layout.slab)), to or self.layout.slab)

    def ceil(self, row: Scalar, to: int = 0) -> Scalar:
        """The first row at or after this one at which a slab begins."""
        return self.floor(row + i32((to or self.layout.slab) - 1), to)

    def copied(self, place: Place) -> tuple[Any, Any]:
        """The rows of a tile that are copied, where they lie in an operand and in the buffer of the tile."""
        grain = self.layout.grain
        top = jnp.maximum(self.floor(place.start, grain), place.row)
        size = jnp.minimum(self.ceil(place.end, grain), place.row + self.height(place)) - top
        return span(top, size, grain), span(top - place.row, size, grain)

    # -- from place to place -------------------------------------------------------------------------------------------

    def begin(self) -> Place:
        """The first place."""
        return self._enter(i32(0), i32(0))

    def after(self, place: Place) -> Place:
        """The next place."""
        row = place.row + self.height(place)
        more = self.left(place) > self.height(place)
        block = place.block + i32(1)
        here = place._replace(
            block=jnp.where(more, place.block, block), row=jnp.where(more, row, self.floor(place.start))
        )
        leave = jnp.logical_not(more) & (block >= self.high)
        return lax.cond(leave, lambda: self._enter(place.span + i32(1), place.end), lambda: here)

    def _enter(self, span: Any, end: Any) -> Place:
        """The first place of a span, the one before which ends at `end`; rows: or of the next that is not empty."""
        start, end = self._bounds(span, end)
        if self.problem.form is Form.ROWS:

            def empty(at: tuple[Any, Any, Any]) -> Any:
                return (at[0] < i32(self.problem.spans)) & (at[1] >= at[2])

            def skip(at: tuple[Any, Any, Any]) -> Any:
                return at[0] + i32(1), *self._bounds(at[0] + i32(1), at[2])

            span, start, end = lax.while_loop(empty, skip, (jnp.asarray(span, jnp.int32), start, end))
        span = jnp.asarray(span, jnp.int32)
        return Place(span, start, end, jnp.asarray(self.low, jnp.int32), self.floor(start))

    def _bounds(self, span: Any, end: Any) -> tuple[Scalar, Scalar]:
        """Where a span starts and ends; spans of one batch entry follow each other."""
        problem = self.problem
        entry, local = i32(0), span
        if problem.batch > 1:
            entry = jnp.minimum(lax.div(span, i32(problem.local_groups)), i32(problem.batch - 1))
            local = span - entry * i32(problem.local_groups)
        first = self.first[entry]
        # rows of the groups before the window: summed when an entry is entered
        before = jnp.where(local == i32(0), jnp.clip(first, i32(0), i32(problem.groups)), i32(0))
        base = entry * i32(problem.m)
        start = jnp.where(local == i32(0), base, end)
        start = lax.fori_loop(i32(0), before, lambda i, row: self._end(entry, i, row), start)
        group = first + local
        known = (group >= i32(0)) & (group < i32(problem.groups)) & (span < i32(problem.spans))
        end = self._end(entry, jnp.clip(group, i32(0), i32(problem.groups - 1)), start)
        return start, jnp.where(known, end, start)

    def _end(self, entry: Any, group: Any, start: Scalar) -> Scalar:
        """Where the group ends if it starts there: a negative size is 0, and nothing leaves its entry's rows."""
        problem = self.problem
        size = jnp.clip(self.sizes[entry * i32(problem.groups) + group], i32(0), i32(problem.m))
        room = entry * i32(problem.m) + i32(problem.m) - start
        return start + jnp.minimum(size, room)


def row_tiles(problem: Problem, layout: Layout, start: int, end: int) -> list[RowTile]:
    """The row tiles of a group that owns the rows [start, end), as a `Walk` of this layout takes them."""
    slab, table, tiles = layout.slab, layout.table, []
    row, bottom = start - start % slab, -(-end // slab) * slab
    while start < end and row < bottom:
        height = table[min((bottom - row) // slab, len(table) - 1)]
        computed = height
        if problem.form is Form.CONTRACTION:  # a sum takes whole short steps, and no more of them than it needs
            computed = -(-min(height, bottom - row) // layout.fine) * layout.fine
        tiles.append(RowTile(range(row, row + computed), range(max(row, start), min(row + height, end))))
        row += height
    return tiles
