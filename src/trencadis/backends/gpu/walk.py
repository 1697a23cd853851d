"""The way of a kernel through its work: spans of rows, and the tiles of the result that belong to each.

    tiles of a span, in the order they are taken         the blocks that run at one time hold neighbours: `panel` tiles
        0  3  6 │ 18 ...                                 down, then the next column, so that what one of them brings
        1  4  7 │                                        into L2 serves the others
        2  5  8 │

Rows: the spans of a batch entry are the rows before the window, those of each local group, and the rows after it.
Contraction: the spans are the local groups, and each has all tiles of its matrix, empty or not.

The sizes are read where they lie, span by span, while the tiles before are being computed: there is no schedule to
compute ahead of the kernel, and none to hold.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from trencadis.backends.gpu.layout import GRAIN, Layout
from trencadis.core.problem import Form, Problem
from trencadis.core.schedule import RowTile

Scalar = jax.Array  # i32[]


def i32(x: int) -> Any:
    """A constant that stays 32 bits wide whatever the x64 setting."""
    return jnp.int32(x)


def aligned(row: Scalar, grain: int) -> Scalar:
    """The last row at or before this one at which a copy can start."""
    return pl.multiple_of(row & i32(-grain), grain)


class Place(NamedTuple):
    """One span of rows."""

    span: Scalar
    start: Scalar  # its rows
    end: Scalar
    before: Scalar  # tiles of the spans before it
    tiles: Scalar  # its own


class Tile(NamedTuple):
    """One tile of the result."""

    steps: Scalar  # of its sum; 0: it is zero; below: there is no tile any more
    group: Scalar  # local group, of all batch entries
    start: Scalar  # the rows of the span
    end: Scalar
    down: Scalar  # its first row: of the result (rows form), of one matrix (contraction)
    across: Scalar  # its first column
    units: Scalar  # its height: blocks of rows, or in turned tiles less
    low: Scalar  # its rows that are the span's, counted from `down`
    high: Scalar


class Walk:
    """The order of tiles; `sizes` i32[batch * groups] and `first` i32[batch] are references to global memory."""

    def __init__(self, problem: Problem, layout: Layout, sizes: Any, first: Any) -> None:
        self.problem, self.layout, self.sizes, self.first = problem, layout, sizes, first
        self.ragged = problem.form is Form.ROWS
        self.each = problem.local_groups + 2 * self.ragged  # spans of a batch entry
        self.spans = problem.batch * self.each
        self.columns = -(-problem.n // layout.wide)
        self.grain = layout.deep if problem.transpose_lhs or layout.flat else GRAIN  # where steps over rows start

    # -- from span to span ---------------------------------------------------------------------------------------------

    def begin(self, at: Scalar) -> Place:
        """The place of a tile, from the start."""
        return self.seek(self._enter(i32(0), i32(0), i32(0)), at)

    def seek(self, place: Place, at: Scalar) -> Place:
        """The place of a tile that lies ahead."""

        def past(here: Place) -> Any:
            return (here.span < i32(self.spans)) & (at >= here.before + here.tiles)

        def step(here: Place) -> Place:
            return self._enter(here.span + i32(1), here.end, here.before + here.tiles)

        return lax.while_loop(past, step, place)

    def _enter(self, span: Scalar, end: Scalar, before: Scalar) -> Place:
        """A span; the one before it ends at `end`."""
        problem = self.problem
        entry = jnp.minimum(lax.div(span, i32(self.each)), i32(problem.batch - 1)) if problem.batch > 1 else i32(0)
        at = span - entry * i32(self.each)
        base = entry * i32(problem.m)
        first = self.first[entry]
        # rows of the groups before the window: summed when an entry is entered
        skipped = jnp.where(at == i32(0), jnp.clip(first, i32(0), i32(problem.groups)), i32(0))
        window = jnp.where(at == i32(0), base, end)
        window = lax.fori_loop(i32(0), skipped, lambda i, row: self._end(entry, i, row), window)
        local = at - i32(self.ragged)
        group = first + local
        known = (group >= i32(0)) & (group < i32(problem.groups)) & self._local(local)
        after = self._end(entry, jnp.clip(group, i32(0), i32(problem.groups - 1)), window)
        start, end = window, jnp.where(known, after, window)
        if self.ragged:  # the rows before the window and after it
            start = jnp.where(at == i32(0), base, start)
            end = jnp.where(at == i32(self.each - 1), base + i32(problem.m), end)
        place = Place(span, start, end, before, i32(0))
        tiles = self._high(place) * i32(self.columns)
        if problem.epilogue.accumulate:  # what nobody owns, or has no rows, keeps its value
            tiles = jnp.where(known & (end > start), tiles, i32(0))
        return place._replace(tiles=tiles)

    def _local(self, local: Scalar) -> Any:
        return (local >= i32(0)) & (local < i32(self.problem.local_groups))

    def _end(self, entry: Any, group: Any, start: Scalar) -> Scalar:
        """Where the group ends if it starts there: a negative size is 0, and nothing leaves its entry's rows."""
        size = jnp.maximum(self.sizes[entry * i32(self.problem.groups) + group], i32(0))
        left = (entry + i32(1)) * i32(self.problem.m) - start
        return start + jnp.minimum(size, left)

    # -- from place to tile --------------------------------------------------------------------------------------------

    def tile(self, place: Place, at: Scalar) -> Tile:
        """What is to be done at a place."""
        panel, columns = i32(self.layout.panel), i32(self.columns)
        at = at - place.before
        total, high = self._units(place), self._high(place)
        passed = lax.div(at, panel * columns) * panel  # tiles in the panels above
        at = at - passed * columns
        height = jnp.maximum(jnp.minimum(panel, high - passed), i32(1))
        across = lax.div(at, height)
        down = passed + at - across * height
        each = lax.div(total, jnp.maximum(high, i32(1)))  # units of a tile; the first few have one more
        more = total - each * high
        units = each + (down < more).astype(jnp.int32)
        start, end = self._extent(place)
        top = aligned(start, GRAIN) + (down * each + jnp.minimum(down, more)) * i32(self.layout.unit)
        entry = lax.div(place.span, i32(self.each)) if self.problem.batch > 1 else i32(0)
        local = place.span - entry * i32(self.each) - i32(self.ragged)
        steps = jnp.where(self._local(local), self._steps(place), i32(0))
        return Tile(
            steps=jnp.where(place.span < i32(self.spans), steps, i32(-1)),
            group=entry * i32(self.problem.local_groups) + local,
            start=place.start,
            end=place.end,
            down=top,
            across=across * i32(self.layout.wide),
            units=units,
            low=start - top,
            high=jnp.minimum(end - top, units * i32(self.layout.unit)),
        )

    def half(self, tile: Tile, step: Scalar) -> tuple[Scalar, Scalar, Scalar]:
        """Of an operand that comes in two arrays: which one, the step of its sum, and how many those are."""
        if not self.layout.split:
            return i32(0), step, tile.steps
        each = lax.div(tile.steps, i32(2))
        second = (step >= each).astype(jnp.int32)
        return second, step - second * each, each

    def row(self, tile: Tile, step: Scalar) -> Scalar:
        """Contraction: the first row of a step."""
        return pl.multiple_of(aligned(tile.start, self.grain) + step * i32(self.layout.deep), self.grain)

    def _steps(self, place: Place) -> Scalar:
        deep, times = self.layout.deep, 2 if self.layout.split else 1
        if self.ragged:
            return i32(-(-self.problem.k // deep) * times)
        rows = place.end - aligned(place.start, self.grain)
        return jnp.where(place.end > place.start, lax.div(rows + i32(deep - 1), i32(deep)) * i32(times), i32(0))

    def _extent(self, place: Place) -> tuple[Scalar, Scalar]:
        """The rows of the result that are a span's."""
        return (place.start, place.end) if self.ragged else (i32(0), i32(self.problem.k))

    def _units(self, place: Place) -> Scalar:
        """Units of a span in one column of tiles."""
        start, end = self._extent(place)
        unit = self.layout.unit
        units = lax.div(end - aligned(start, GRAIN) + i32(unit - 1), i32(unit))
        return jnp.where(end > start, units, i32(0))

    def _high(self, place: Place) -> Scalar:
        """Tiles of a span in one column."""
        most = self.layout.tall // self.layout.unit
        return lax.div(self._units(place) + i32(most - 1), i32(most))


def row_tiles(problem: Problem, layout: Layout, start: int, end: int) -> list[RowTile]:
    """The row tiles of a group that owns the rows [start, end), as a `Walk` of this layout cuts them.

    In the contraction form they are the steps of the group's sum.
    """
    if end <= start:
        return []
    if problem.form is Form.CONTRACTION:
        grain, step = (layout.deep if problem.transpose_lhs or layout.flat else GRAIN), layout.deep
        tops = range(start - start % grain, end, step)
        return [RowTile(range(top, top + step), range(max(top, start), min(top + step, end))) for top in tops]
    top, unit, tiles = start - start % GRAIN, layout.unit, []
    units = -(-(end - top) // unit)
    count = -(-units // (layout.tall // unit))
    for i in range(count):  # cut evenly: the first few tiles have one unit more
        stop = top + unit * (units // count + (i < units % count))
        height = next(h for h in layout.heights if h >= stop - top)
        tiles.append(RowTile(range(top, top + height), range(max(top, start), min(stop, end))))
        top = stop
    return tiles
