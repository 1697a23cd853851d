"""The persistent tile scheduler: spans of rows, and the tiles of the result that belong to each.

    tiles of a span, in the order they run              CTAs that run at one time hold neighbouring tiles: those of an
        0  3  6 │ 18 ...                                L2 rasterization group go down `raster_group` tiles, then to
        1  4  7 │                                       the next column, so that what one CTA brings into L2 serves
        2  5  8 │                                       the others

Rows: the spans of a batch entry are the rows before the window, those of each local group, and the rows after it.
Contraction: the spans are the local groups, and each has all tiles of its matrix, empty or not.

Group sizes are read in the kernel, span by span, while earlier tiles are being computed: no schedule is computed ahead
of the kernel, and none is stored.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from trencadis.backends.gpu.layout import ROW_ALIGN, Layout
from trencadis.core.problem import Form, Problem
from trencadis.core.schedule import RowTile

Scalar = jax.Array  # i32[]
Ref = Any  # a Pallas reference to global memory, shared memory, accumulators or barriers; Pallas has no type for it
Refs = dict[str, Ref]  # all references of a kernel, by name


def i32(x: int) -> Any:
    """A constant that stays 32 bits wide whatever the x64 setting; of numpy, which is traced fast."""
    return np.int32(x)


def align_down(row: Any, to: int) -> Any:
    """The last multiple of `to`, a power of two, that is not past a row: an i32[] or a constant."""
    aligned = row & i32(-to)
    return aligned if isinstance(aligned, np.integer) else pl.multiple_of(aligned, to)


class Span(NamedTuple):
    """The rows of one group, or the unowned rows before or after the window, and the place of its tiles."""

    number: Scalar  # of all spans of all batch entries
    start: Scalar  # its rows are [start, end)
    end: Scalar
    tiles_before: Scalar  # tiles of all spans before it
    tiles: Scalar  # its own tiles


class Tile(NamedTuple):
    """One tile of the result, as the scheduler publishes it to all warpgroups."""

    steps: Scalar  # of the mainloop; 0: the tile is zero; negative: there are no more tiles
    group: Scalar  # local group, counted over all batch entries; of a second result, those of the first come before
    start: Scalar  # the rows of its span are [start, end)
    end: Scalar
    row: Scalar  # its first row: of the result (rows form), of one matrix (contraction)
    column: Scalar  # its first column
    units: Scalar  # its height in units of `Layout.m_unit` rows
    valid_from: Scalar  # its rows [valid_from, valid_to), counted from `row`, belong to the span and are stored
    valid_to: Scalar


class TileScheduler:
    """The order of tiles; `sizes` i32[batch * groups] and `first_group` i32[batch] are references to global memory."""

    def __init__(self, problem: Problem, layout: Layout, sizes: Ref, first_group: Ref) -> None:
        self.problem, self.layout, self.sizes, self.first_group = problem, layout, sizes, first_group
        self.rows_form = problem.form is Form.ROWS
        self.entry_spans = problem.local_groups + 2 * self.rows_form  # spans of a batch entry
        self.spans = problem.batch * self.entry_spans
        self.tiles_of_result = -(-problem.n // layout.block_n)  # across one result
        self.tiles_across = self.tiles_of_result * (2 if layout.two_results else 1)
        self.step_align = _step_align(problem, layout)

    # -- from span to span ---------------------------------------------------------------------------------------------

    @property
    def before(self) -> Span:
        """An empty span before the first one, to start from."""
        return Span(*map(i32, (-1, 0, 0, 0, 0)))

    def advance(self, span: Span, index: Scalar) -> Span:
        """The span of a tile that belongs to this span or to a later one."""

        def past(here: Span) -> Any:
            return (here.number < i32(self.spans)) & (index >= here.tiles_before + here.tiles)

        def step(here: Span) -> Span:
            return self._enter(here.number + i32(1), here.end, here.tiles_before + here.tiles)

        return lax.while_loop(past, step, span)

    def _enter(self, number: Scalar, end: Scalar, tiles_before: Scalar) -> Span:
        """The span of this number, if the one before it ends at row `end`."""
        problem = self.problem
        last = i32(problem.batch - 1)
        entry = lax.min(lax.div(number, i32(self.entry_spans)), last) if problem.batch > 1 else i32(0)
        at = number - entry * i32(self.entry_spans)
        base = entry * i32(problem.m)
        first = self.first_group[entry]
        # the rows of groups before the window: summed once, in the first span of an entry
        skipped = lax.select(at == i32(0), lax.clamp(i32(0), first, i32(problem.groups)), i32(0))
        window = lax.select(at == i32(0), base, end)
        window = lax.fori_loop(i32(0), skipped, lambda i, row: self._end(entry, i, row), window)
        local = at - i32(self.rows_form)
        group = first + local
        known = (group >= i32(0)) & (group < i32(problem.groups)) & self._is_local(local)
        after = self._end(entry, lax.clamp(i32(0), group, i32(problem.groups - 1)), window)
        start, end = window, lax.select(known, after, window)
        if self.rows_form:  # unowned rows before the window and after it
            start = lax.select(at == i32(0), base, start)
            end = lax.select(at == i32(self.entry_spans - 1), base + i32(problem.m), end)
        span = Span(number, start, end, tiles_before, i32(0))
        tiles = self._tiles_down(span) * i32(self.tiles_across)
        if problem.epilogue.accumulate:  # unowned rows and empty groups keep the value of existing_out
            tiles = lax.select(known & (end > start), tiles, i32(0))
        return span._replace(tiles=tiles)

    def _is_local(self, local: Scalar) -> Any:
        """Whether a group, counted from the start of the window, is inside the window."""
        return (local >= i32(0)) & (local < i32(self.problem.local_groups))

    def _end(self, entry: Scalar, group: Scalar, start: Scalar) -> Scalar:
        """The end of a group that starts at a row: a negative size counts as 0, and no group leaves its entry."""
        size = lax.max(self.sizes[entry * i32(self.problem.groups) + group], i32(0))
        left = (entry + i32(1)) * i32(self.problem.m) - start
        return start + lax.min(size, left)

    # -- from span to tile ---------------------------------------------------------------------------------------------

    def tile(self, span: Span, index: Scalar) -> Tile:
        """The tile of this index, which must be one of the span's; past the last span, one with negative steps."""
        group, across = i32(self.layout.raster_group), i32(self.tiles_across)
        at = index - span.tiles_before
        units, tiles_down = self._units(span), self._tiles_down(span)
        above = lax.div(at, group * across) * group  # tiles of a column in the rasterization groups above
        at = at - above * across
        height = lax.max(lax.min(group, tiles_down - above), i32(1))
        column = lax.div(at, height)
        down = above + at - column * height
        each = lax.div(units, lax.max(tiles_down, i32(1)))  # units of a tile; the first few have one more
        more = units - each * tiles_down
        own = each + (down < more).astype(jnp.int32)
        start, end = self._result_rows(span)
        row = align_down(start, ROW_ALIGN) + (down * each + lax.min(down, more)) * i32(self.layout.m_unit)
        entry = lax.div(span.number, i32(self.entry_spans)) if self.problem.batch > 1 else i32(0)
        local = span.number - entry * i32(self.entry_spans) - i32(self.rows_form)
        steps = lax.select(self._is_local(local), self._steps(span), i32(0))
        if self.layout.two_results:
            second = (column >= i32(self.tiles_of_result)).astype(jnp.int32)
            column, local = column - second * i32(self.tiles_of_result), local + second * i32(self.spans)
        return Tile(
            steps=lax.select(span.number < i32(self.spans), steps, i32(-1)),
            group=entry * i32(self.problem.local_groups) + local,
            start=span.start,
            end=span.end,
            row=row,
            column=column * i32(self.layout.block_n),
            units=own,
            valid_from=start - row,
            valid_to=lax.min(end - row, own * i32(self.layout.m_unit)),
        )

    def part_step(self, tile: Tile, step: Scalar) -> tuple[Scalar, Scalar, Scalar]:
        """The index of the parts of operands that a step multiplies, its step within these, and the steps of each."""
        count = len(self.layout.products)
        if count == 1:
            return i32(0), step, tile.steps
        each = lax.div(tile.steps, i32(count))
        index = sum(((step >= each * i32(i)).astype(jnp.int32) for i in range(1, count)), i32(0))
        return index, step - index * each, each

    def step_row(self, tile: Tile, step: Scalar) -> Scalar:
        """The first row of a step over rows, in a contraction."""
        first = align_down(tile.start, self.step_align)
        return pl.multiple_of(first + step * i32(self.layout.block_k), self.step_align)

    def _steps(self, span: Span) -> Scalar:
        """The mainloop steps of a tile of the span, which are those of each product of parts, or of each of a pair."""
        block_k, times = self.layout.block_k, 2 if self.layout.pairs else len(self.layout.products)
        if self.rows_form:
            return i32(-(-self.problem.k // block_k) * times + self.layout.epilogue_steps)
        rows = span.end - align_down(span.start, self.step_align)
        return lax.select(span.end > span.start, lax.div(rows + i32(block_k - 1), i32(block_k)) * i32(times), i32(0))

    def _result_rows(self, span: Span) -> tuple[Scalar, Scalar]:
        """The first and the last row, exclusive, of the result that a span has: its own, or all k of a matrix."""
        return (span.start, span.end) if self.rows_form else (i32(0), i32(self.problem.k))

    def _units(self, span: Span) -> Scalar:
        """The units of rows of a span in one column of tiles."""
        start, end = self._result_rows(span)
        unit = self.layout.m_unit
        units = lax.div(end - align_down(start, ROW_ALIGN) + i32(unit - 1), i32(unit))
        return lax.select(end > start, units, i32(0))

    def _tiles_down(self, span: Span) -> Scalar:
        """The tiles of a span in one column."""
        most = self.layout.block_m // self.layout.m_unit
        return lax.div(self._units(span) + i32(most - 1), i32(most))


def row_tiles(problem: Problem, layout: Layout, start: int, end: int) -> list[RowTile]:
    """The row tiles of a group that owns the rows [start, end), as a `TileScheduler` of this layout cuts them.

    In the contraction form they are the steps of the group's sum.
    """
    if end <= start:
        return []
    if problem.form is Form.CONTRACTION:
        align, step = _step_align(problem, layout), layout.block_k
        tops = range(start - start % align, end, step)
        return [RowTile(range(top, top + step), range(max(top, start), min(top + step, end))) for top in tops]
    top, unit, tiles = start - start % ROW_ALIGN, layout.m_unit, []
    units = -(-(end - top) // unit)
    count = -(-units // (layout.block_m // unit))
    for i in range(count):  # cut evenly: the first few tiles have one unit more
        stop = top + unit * (units // count + (i < units % count))
        height = next(h for h in layout.heights if h >= stop - top) if layout.swap_ab else stop - top
        tiles.append(RowTile(range(top, top + height), range(max(top, start), min(stop, end))))
        top = stop
    return tiles


def _step_align(problem: Problem, layout: Layout) -> int:
    """The rows of which the first row of a step over rows is a multiple, in a contraction."""
    return layout.block_k if problem.transpose_lhs or layout.k_major else ROW_ALIGN
