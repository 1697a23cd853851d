"""A fixed raster as a picture, written as SVG text with nothing but the standard library.

Tiles lie in reading order and the rows of a tile from left to right. A tile that one group visits is whole; one that
several visit is broken between them; unowned rows are hatched. Below stand the sizes, which are also the legend.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from trencadis.viz.elements import FAINT, MARGIN, UNOWNED, WIDTH, count, dashed, label, page, quad, shape, text, visible
from trencadis.viz.mosaic_svg import FINEST, ONE_LINE, SHAPES, TOOLTIPS, bars, head, title
from trencadis.viz.palette import colour

if TYPE_CHECKING:
    from trencadis.viz.mosaic import Tile
    from trencadis.viz.raster import Raster


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Grid:
    """Where the tiles of a raster lie on the page."""

    columns: int
    left: float
    top: float
    pitch: float  # from a tile to the next one
    height: float
    gap: float
    rows: int  # of a tile

    def corner(self, tile: int) -> tuple[float, float]:
        line, column = divmod(tile, self.columns)
        return self.left + column * self.pitch, self.top + line * (self.height + self.gap)

    def x(self, tile: int, row: int) -> float:
        """The left edge of a row of a tile."""
        return self.corner(tile)[0] + (row - tile * self.rows) / self.rows * self.width

    @property
    def width(self) -> float:
        return self.pitch - self.gap

    @property
    def fine(self) -> bool:
        """Whether tiles are too small for a number each."""
        return self.columns > 32

    @property
    def radius(self) -> float:
        return min(self.height, self.width) * 0.1


def draw(raster: Raster) -> str:
    """The SVG document of a raster."""
    grid, bottom = _lay(raster)
    name = title(raster, f"tiles of {raster.tile:,}")
    facts = [count(raster.visits, "visit"), count(raster.tiles, "tile"), f"{len(raster.shared):,} shared"]
    parts = [
        *head(raster, name, facts, raster.note),
        *_axes(raster, grid),
        *_tiles(raster, grid),
        *_labels(raster, grid),
    ]
    legend, bottom = _key(raster, bottom)
    chart, bottom = bars(raster, bottom)
    return page(name, bottom + MARGIN * 0.75, [*parts, *legend, *chart])


def _lay(raster: Raster) -> tuple[_Grid, float]:
    """The grid of tiles, and where it ends."""
    tiles = raster.tiles
    top, left = 140.0, MARGIN
    if tiles <= ONE_LINE:
        columns, height = max(tiles, 1), 104.0
    else:
        columns, height = next(((c, h) for most, c, h in SHAPES if tiles <= most), FINEST)
        top, left = 118.0, MARGIN + 14 + 7 * len(str(raster.m))
    pitch = (WIDTH - left - MARGIN) / columns
    if tiles <= ONE_LINE:  # a few tiles need not fill the width
        pitch = min(pitch, 464.0)
    gap = min(max(pitch * 0.06, 1.0), 8.0)
    grid = _Grid(columns=columns, left=left, top=top, pitch=pitch, height=height, gap=gap, rows=raster.tile)
    lines = -(-tiles // columns)
    under = 26.0 if tiles <= ONE_LINE else 8.0
    return grid, top + lines * (height + gap) + (under if tiles else -22.0)


# ---------------------------------------------------------------------------------------------------------------------
# Words


def _axes(raster: Raster, grid: _Grid) -> Iterator[str]:
    """The row numbers before each line, or under the only line."""
    if raster.tiles > ONE_LINE:
        for tile in range(0, raster.tiles, grid.columns):
            y = grid.corner(tile)[1] + grid.height / 2 + 4
            yield text(grid.left - 10, y, f"{tile * raster.tile}", min(11, grid.height * 0.9), anchor="end", faint=True)
        return
    each = grid.width / raster.tile >= 16  # room for the number of every row
    for tile in range(raster.tiles):
        x, y = grid.corner(tile)
        yield text(x + grid.width / 2, y - 9, f"tile {tile}", 12, anchor="middle", faint=True)
        below = y + grid.height + 17
        if not each:
            yield text(x, below, f"{tile * raster.tile}", 12, faint=True)
            continue
        for row in range(tile * raster.tile, min((tile + 1) * raster.tile, raster.m)):
            middle = grid.x(tile, row) + grid.width / raster.tile / 2
            yield text(middle, below, f"{row}", 12, anchor="middle", faint=True)


def _key(raster: Raster, top: float) -> tuple[list[str], float]:
    """The legend of whole, broken, hatched and dashed tiles, as far as they occur; and where it ends."""
    occur = {
        ("whole", "a tile of one group"): 1 in raster.visits_per_tile,
        ("broken", "a tile that groups share: a visit for each"): bool(raster.shared),
        ("unowned", "rows of no local group"): raster.unowned > 0,
        ("past", "past the last row"): raster.m % raster.tile > 0,
    }
    parts, x, y = [], MARGIN, top + 10
    for kind, words in (entry for entry, present in occur.items() if present):
        parts += [*_swatch(kind, x, y), text(x + 36, y + 12.5, words, 13, faint=True)]
        x += 36 + 6.4 * len(words) + 26
    return parts, y + 16 if parts else top


def _swatch(kind: str, x: float, y: float) -> Iterator[str]:
    box, grey = (x, y, 28.0, 16.0), f'fill="{FAINT}"'
    if kind == "past":
        yield dashed(*box)
    elif kind == "unowned":
        yield shape("key", quad(*box), UNOWNED)
    elif kind == "whole":
        yield shape("faint", quad(*box), grey)
    else:
        yield shape("faint", quad(x, y, 11, 16, (0, 2.5), (2, 0)), grey)
        yield shape("faint", quad(x + 13, y, 15, 16, (2.5, 0), (0, 2)), grey)


# ---------------------------------------------------------------------------------------------------------------------
# Tiles


def _tiles(raster: Raster, grid: _Grid) -> Iterator[str]:
    """For each tile its pieces from left to right: cells of visits, unowned rows, and what is past the last row."""
    by_tile: dict[int, list[Tile]] = {}
    for cell in raster.cells:
        by_tile.setdefault(cell.rows.start // raster.tile, []).append(cell)
    for tile in range(raster.tiles):
        low, high = tile * raster.tile, min((tile + 1) * raster.tile, raster.m)
        pieces: list[tuple[int, int, Tile | None]] = []
        at = low
        for cell in by_tile.get(tile, []):
            if at < cell.owned.start:
                pieces.append((at, cell.owned.start, None))
            pieces.append((cell.owned.start, cell.owned.stop, cell))
            at = cell.owned.stop
        if at < high:
            pieces.append((at, high, None))
        yield from _pieces(raster, grid, tile, pieces)
        if high < low + raster.tile:
            x, end = grid.x(tile, high), grid.x(tile, low + raster.tile)
            yield dashed(x + grid.gap / 3, grid.corner(tile)[1], end - x - grid.gap / 3, grid.height)


def _pieces(raster: Raster, grid: _Grid, tile: int, pieces: list[tuple[int, int, Tile | None]]) -> Iterator[str]:
    """The pieces of one tile. Neighbours meet at a slanted cut, which halves the joint between them."""
    y, joint = grid.corner(tile)[1], min(grid.gap * 0.5, 3.0)
    widths = visible([(end - start) / grid.rows * grid.width for start, end, _ in pieces], joint)
    edges = list(itertools.accumulate(widths, initial=grid.corner(tile)[0]))
    slants = [0.0]
    for i, (a, b) in enumerate(itertools.pairwise(widths)):
        slants.append(min(grid.height * 0.13, 0.4 * a, 0.4 * b) * (1 if (tile + i) % 2 else -1))
    slants.append(0.0)
    for i, (start, end, cell) in enumerate(pieces):
        first, last = i == 0, i == len(pieces) - 1
        x = edges[i] + (0 if first else joint / 2)
        wide = max(widths[i] - joint / 2 * (2 - first - last), 0.5)
        full = end == (tile + 1) * raster.tile
        radii = (grid.radius if first else 0.0, grid.radius if last and full else 0.0)
        path = quad(x, y, wide, grid.height, (slants[i], slants[i + 1]), radii)
        if cell is None:
            yield shape("unowned", path, UNOWNED)
            continue
        tip = f"group {cell.group}, tile {tile}, rows {start} to {end - 1}" if raster.visits <= TOOLTIPS else None
        yield shape("visit", path, f'fill="{colour(cell.group)}"', tip)
        if not grid.fine:
            yield from label(cell.group, x, y, wide, grid.height, 7.0)


def _labels(raster: Raster, grid: _Grid) -> Iterator[str]:
    """On tiles too small for a number: one for all neighbours of a group in a line that have room for it together."""
    if not grid.fine:
        return
    at = zip(raster.pairs, raster.cells, strict=True)
    for (group, _), run in itertools.groupby(at, key=lambda pair: (pair[0][0], pair[0][1] // grid.columns)):
        visits = list(run)
        ((_, first), start), ((_, last), end) = visits[0], visits[-1]
        x = grid.x(first, start.owned.start)
        yield from label(group, x, grid.corner(first)[1], grid.x(last, end.owned.stop) - x, grid.height, 6.0)
