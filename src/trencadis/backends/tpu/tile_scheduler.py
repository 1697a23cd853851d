"""The tile scheduler of both kernels: the order in which spans, column blocks and row tiles are computed.

    for each span (the rows of a group):       rows: empty spans are skipped; contraction: their result is zeros
        for each column block:                 rows: of n; contraction: of k and n
            for each row tile:                 its height depends on how many rows of the span are left

The scheduler reads group sizes from SMEM as it goes. So there is no metadata to compute before the kernel starts, as in
megablox, and none to store. Several cursors go through the same order at once: that of the arithmetic, and ahead of it
those that prefetch operands.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from trencadis.backends.tpu.indexing import Condition, Index, Ref, Slice, aligned_ds, i32
from trencadis.backends.tpu.layout import Layout
from trencadis.core.problem import Form, Problem
from trencadis.core.schedule import RowTile

Scalar = jax.Array  # i32[]


class Tile(NamedTuple):
    """One row tile of one column block of one span: the work of one iteration of the kernel's loop."""

    span: Scalar  # local group, counted over all batch entries
    start: Scalar  # the span has the rows [start, end)
    end: Scalar
    block: Scalar  # column block
    row: Scalar  # first row of the tile, a multiple of the sublane tile


class TileScheduler:
    """The order of tiles on one core, computed on scalars.

    `scalars` are references to SMEM: sizes i32[batch * groups], first i32[batch] (the first local group of each batch
    entry), and height_table i32[...]. `blocks` is the range of column blocks of this core.
    """

    def __init__(self, problem: Problem, layout: Layout, scalars: dict[str, Ref], blocks: tuple[Index, Index]) -> None:
        self.problem, self.layout = problem, layout
        self.sizes, self.first_group, self.height_table = (scalars[x] for x in ("sizes", "first", "height_table"))
        self.block_begin, self.block_end = blocks

    # -- properties of a tile ------------------------------------------------------------------------------------------

    def past_end(self, tile: Tile) -> Condition:
        """Whether a tile is past the last one, so that there is nothing to compute for it."""
        return tile.span >= i32(self.problem.spans)

    def rows_left(self, tile: Tile) -> Scalar:
        """The rows from the tile's first to the end of its span, in whole sublane tiles; 0 in an empty span."""
        return jnp.where(tile.end > tile.start, self.align_up(tile.end) - tile.row, i32(0))

    def height(self, tile: Tile) -> Scalar:
        """The height of a tile, which the table gives for the rows that are left of its span."""
        if len(self.layout.height_table) == 1:
            return i32(self.layout.block_m)
        most = i32(len(self.layout.height_table) - 1)
        return self.height_table[jnp.minimum(lax.div(self.rows_left(tile), i32(self.layout.sublane_tile)), most)]

    def rows(self, tile: Tile) -> Scalar:
        """The rows of a tile without those that lie past the last sublane tile of its span."""
        return jnp.minimum(self.height(tile), self.rows_left(tile))

    def is_last(self, tile: Tile) -> Condition:
        """Whether a tile is the last of its span in its column block."""
        return self.rows_left(tile) <= self.height(tile)

    def align_down(self, row: Scalar, unit: int = 0) -> Scalar:
        """The largest multiple of the unit that is at most `row`; the unit is by default the sublane tile."""
        return pl.multiple_of(row & i32(-(unit or self.layout.sublane_tile)), unit or self.layout.sublane_tile)

    def align_up(self, row: Scalar, unit: int = 0) -> Scalar:
        """The least multiple of the unit that is at least `row`; the unit is by default the sublane tile."""
        return self.align_down(row + i32((unit or self.layout.sublane_tile) - 1), unit)

    def dma_rows(self, tile: Tile) -> tuple[Slice, Slice]:
        """The rows of a tile that are copied: their slice of the operand in HBM, and that of the buffer in VMEM."""
        align = self.layout.dma_align
        base = tile.row - self.lead(tile)
        top = jnp.maximum(self.align_down(tile.start, align), base)
        bottom = tile.row + self.height(tile)
        if self.layout.moves_rows:
            bottom = self.align_up(bottom, align)
        size = jnp.minimum(self.align_up(tile.end, align), bottom) - top
        return aligned_ds(top, size, align), aligned_ds(top - base, size, align)

    def lead(self, tile: Tile) -> Scalar:
        """The rows above a tile that are copied with it, since a copy cannot start at the tile's first."""
        return tile.row & i32(self.layout.dma_align - 1) if self.layout.moves_rows else i32(0)

    # -- from tile to tile ---------------------------------------------------------------------------------------------

    def first_tile(self) -> Tile:
        """The first tile of this core."""
        return self._enter_span(i32(0), i32(0))

    def next_tile(self, tile: Tile) -> Tile:
        """The tile after this one: further down, in the next column block, or in the next span."""
        row = tile.row + self.height(tile)
        more = self.rows_left(tile) > self.height(tile)
        block = tile.block + i32(1)
        here = tile._replace(
            block=jnp.where(more, tile.block, block), row=jnp.where(more, row, self.align_down(tile.start))
        )
        leave = jnp.logical_not(more) & (block >= self.block_end)
        return lax.cond(leave, lambda: self._enter_span(tile.span + i32(1), tile.end), lambda: here)

    def _enter_span(self, span: Index, end: Index) -> Tile:
        """The first tile of a span, given where the span before ends; the rows form skips empty spans."""
        start, end = self._span_bounds(span, end)
        if self.problem.form is Form.ROWS:

            def empty(at: tuple[Scalar, Scalar, Scalar]) -> Condition:
                return (at[0] < i32(self.problem.spans)) & (at[1] >= at[2])

            def skip(at: tuple[Scalar, Scalar, Scalar]) -> tuple[Scalar, Scalar, Scalar]:
                return at[0] + i32(1), *self._span_bounds(at[0] + i32(1), at[2])

            span, start, end = lax.while_loop(empty, skip, (jnp.asarray(span, jnp.int32), start, end))
        span = jnp.asarray(span, jnp.int32)
        return Tile(span, start, end, jnp.asarray(self.block_begin, jnp.int32), self.align_down(start))

    def _span_bounds(self, span: Index, end: Index) -> tuple[Scalar, Scalar]:
        """The rows [start, end) of a span, given where the one before ends: spans of a batch entry are contiguous."""
        problem = self.problem
        entry, local = i32(0), span
        if problem.batch > 1:
            entry = jnp.minimum(lax.div(span, i32(problem.local_groups)), i32(problem.batch - 1))
            local = span - entry * i32(problem.local_groups)
        first = self.first_group[entry]
        # rows of the groups before the window: summed at the first span of a batch entry
        before = jnp.where(local == i32(0), jnp.clip(first, i32(0), i32(problem.groups)), i32(0))
        base = entry * i32(problem.m)
        start = jnp.where(local == i32(0), base, end)
        start = lax.fori_loop(i32(0), before, lambda i, row: self._group_end(entry, i, row), start)
        group = first + local
        known = (group >= i32(0)) & (group < i32(problem.groups)) & (span < i32(problem.spans))
        end = self._group_end(entry, jnp.clip(group, i32(0), i32(problem.groups - 1)), start)
        return start, jnp.where(known, end, start)

    def _group_end(self, entry: Index, group: Index, start: Scalar) -> Scalar:
        """The end of a group that starts at this row; a negative size counts as 0, and it stays inside the entry."""
        problem = self.problem
        size = jnp.clip(self.sizes[entry * i32(problem.groups) + group], i32(0), i32(problem.m))
        room = entry * i32(problem.m) + i32(problem.m) - start
        return start + jnp.minimum(size, room)


def row_tiles(problem: Problem, layout: Layout, start: int, end: int) -> list[RowTile]:
    """The row tiles of a group that owns the rows [start, end), as a `TileScheduler` of this layout computes them."""
    unit, table, tiles = layout.sublane_tile, layout.height_table, []
    row, bottom = start - start % unit, -(-end // unit) * unit
    while start < end and row < bottom:
        height = table[min((bottom - row) // unit, len(table) - 1)]
        computed = height
        if problem.form is Form.CONTRACTION:  # it multiplies whole short steps, and no more of them than it needs
            computed = -(-min(height, bottom - row) // layout.step_m) * layout.step_m
        tiles.append(RowTile(range(row, row + computed), range(max(row, start), min(row + height, end))))
        row += height
    return tiles
