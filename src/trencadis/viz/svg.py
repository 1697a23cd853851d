"""The mosaic as a picture, written as SVG text with nothing but the standard library.

Tiles lie in reading order and the rows of a tile from left to right. A tile that one group visits is whole; one that
several visit is broken between them; rows nobody owns are hatched. Below stand the sizes, which are also the legend.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING

from trencadis.viz.elements import FAINT, LINE, MARGIN, WIDTH, count, dashed, label, num, page, quad, shape, text
from trencadis.viz.palette import colour

if TYPE_CHECKING:
    from trencadis.viz.mosaic import Cell, Mosaic

SHAPES = ((64, 8, 60.0), (400, 16, 33.0), (800, 32, 24.0), (2560, 64, 16.0))  # up to so many tiles: columns, height
FINEST = (128, 11.0)
ONE_LINE = 12  # tiles that fit in one line
TOOLTIPS = 4096  # visits; more than that and the file is better small
BARS_TOP, BARS_HEIGHT = 34.0, 84.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Grid:
    """Where tiles lie."""

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
        """Where a row of a tile starts."""
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


def draw(mosaic: Mosaic) -> str:
    """The SVG document."""
    grid, bottom = _lay(mosaic)
    parts = [*_head(mosaic), *_axes(mosaic, grid), *_tiles(mosaic, grid), *_labels(mosaic, grid)]
    key, bottom = _key(mosaic, bottom)
    bars, bottom = _bars(mosaic, bottom)
    height = bottom + MARGIN * 0.75
    return page(_title(mosaic), height, [*parts, *key, *bars])


def _lay(mosaic: Mosaic) -> tuple[_Grid, float]:
    """The grid, and where it ends."""
    tiles = mosaic.tiles
    top, left = 118.0, MARGIN
    if tiles <= ONE_LINE:
        columns, height = max(tiles, 1), 104.0
    else:
        columns, height = next(((c, h) for most, c, h in SHAPES if tiles <= most), FINEST)
        top, left = 96.0, MARGIN + 14 + 7 * len(str(mosaic.m))
    pitch = (WIDTH - left - MARGIN) / columns
    if tiles <= ONE_LINE:  # a few tiles need not fill the width
        pitch = min(pitch, 464.0)
    gap = min(max(pitch * 0.06, 1.0), 8.0)
    grid = _Grid(columns=columns, left=left, top=top, pitch=pitch, height=height, gap=gap, rows=mosaic.tile)
    lines = -(-tiles // columns)
    under = 26.0 if tiles <= ONE_LINE else 8.0
    return grid, top + lines * (height + gap) + (under if tiles else 0.0)


# ---------------------------------------------------------------------------------------------------------------------
# Words


def _title(mosaic: Mosaic) -> str:
    window = f", of which {mosaic.local_groups:,} local," if mosaic.local_groups != len(mosaic.sizes) else ""
    return f"{count(len(mosaic.sizes), 'group')}{window} over {count(mosaic.m, 'row')} in tiles of {mosaic.tile:,}"


def _head(mosaic: Mosaic) -> Iterator[str]:
    yield text(MARGIN, 46, _title(mosaic), 23, weight=600)
    facts = [count(mosaic.visits, "visit"), count(mosaic.tiles, "tile"), f"{len(mosaic.shared):,} shared"]
    facts += [f"{count(mosaic.owned, 'row')} owned"] + ([f"{mosaic.unowned:,} unowned"] if mosaic.unowned else [])
    facts += [f"{mosaic.waste:.0%} waste"]
    yield text(MARGIN, 73, "  ·  ".join(facts), 15, faint=True)


def _axes(mosaic: Mosaic, grid: _Grid) -> Iterator[str]:
    """Row numbers: before each line, or under the one line there is."""
    if mosaic.tiles > ONE_LINE:
        for tile in range(0, mosaic.tiles, grid.columns):
            y = grid.corner(tile)[1] + grid.height / 2 + 4
            yield text(grid.left - 10, y, f"{tile * mosaic.tile}", min(11, grid.height * 0.9), anchor="end", faint=True)
        return
    each = grid.width / mosaic.tile >= 16  # room for the number of every row
    for tile in range(mosaic.tiles):
        x, y = grid.corner(tile)
        yield text(x + grid.width / 2, y - 9, f"tile {tile}", 12, anchor="middle", faint=True)
        below = y + grid.height + 17
        if not each:
            yield text(x, below, f"{tile * mosaic.tile}", 12, faint=True)
            continue
        for row in range(tile * mosaic.tile, min((tile + 1) * mosaic.tile, mosaic.m)):
            middle = grid.x(tile, row) + grid.width / mosaic.tile / 2
            yield text(middle, below, f"{row}", 12, anchor="middle", faint=True)


def _key(mosaic: Mosaic, top: float) -> tuple[list[str], float]:
    """What a whole, a broken, a hatched and a dashed tile are, as far as they occur."""
    occur = {
        ("whole", "a tile of one group"): 1 in mosaic.visits_per_tile,
        ("broken", "a tile that groups share: a visit for each"): bool(mosaic.shared),
        ("unowned", "rows of no local group"): mosaic.unowned > 0,
        ("past", "past the last row"): mosaic.m % mosaic.tile > 0,
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
        yield shape("key", quad(*box), 'fill="url(#trencadis-unowned)"')
    elif kind == "whole":
        yield shape("faint", quad(*box), grey)
    else:
        yield shape("faint", quad(x, y, 11, 16, (0, 2.5), (2, 0)), grey)
        yield shape("faint", quad(x + 13, y, 15, 16, (2.5, 0), (0, 2)), grey)


# ---------------------------------------------------------------------------------------------------------------------
# Tiles


def _tiles(mosaic: Mosaic, grid: _Grid) -> Iterator[str]:
    """For each tile its pieces from left to right: cells of visits, rows of nobody, rows past the last."""
    by_tile = {tile: list(cells) for tile, cells in itertools.groupby(mosaic.cells(), key=lambda cell: cell.tile)}
    for tile in range(mosaic.tiles):
        low, high = tile * mosaic.tile, min((tile + 1) * mosaic.tile, mosaic.m)
        pieces: list[tuple[int, int, Cell | None]] = []
        at = low
        for cell in by_tile.get(tile, []):
            if at < cell.start:
                pieces.append((at, cell.start, None))
            pieces.append((cell.start, cell.end, cell))
            at = cell.end
        if at < high:
            pieces.append((at, high, None))
        yield from _pieces(mosaic, grid, tile, pieces)
        if high < low + mosaic.tile:
            x, end = grid.x(tile, high), grid.x(tile, low + mosaic.tile)
            yield dashed(x + grid.gap / 3, grid.corner(tile)[1], end - x - grid.gap / 3, grid.height)


def _pieces(mosaic: Mosaic, grid: _Grid, tile: int, pieces: list[tuple[int, int, Cell | None]]) -> Iterator[str]:
    """The pieces of one tile. Neighbours meet at a slanted cut, which halves the joint between them."""
    y, joint = grid.corner(tile)[1], min(grid.gap * 0.5, 3.0)
    widths = _visible([(end - start) / grid.rows * grid.width for start, end, _ in pieces], joint)
    edges = list(itertools.accumulate(widths, initial=grid.corner(tile)[0]))
    slants = [0.0]
    for i, (a, b) in enumerate(itertools.pairwise(widths)):
        slants.append(min(grid.height * 0.13, 0.4 * a, 0.4 * b) * (1 if (tile + i) % 2 else -1))
    slants.append(0.0)
    for i, (start, end, cell) in enumerate(pieces):
        first, last = i == 0, i == len(pieces) - 1
        x = edges[i] + (0 if first else joint / 2)
        wide = max(widths[i] - joint / 2 * (2 - first - last), 0.5)
        full = end == (tile + 1) * mosaic.tile
        radii = (grid.radius if first else 0.0, grid.radius if last and full else 0.0)
        path = quad(x, y, wide, grid.height, (slants[i], slants[i + 1]), radii)
        if cell is None:
            yield shape("unowned", path, 'fill="url(#trencadis-unowned)"')
            continue
        tip = f"group {cell.group}, tile {tile}, rows {start} to {end - 1}" if mosaic.visits <= TOOLTIPS else None
        yield shape("visit", path, f'fill="{colour(cell.group)}"', tip)
        if not grid.fine:
            yield from label(cell.group, x, y, wide, grid.height, 7.0)


def _labels(mosaic: Mosaic, grid: _Grid) -> Iterator[str]:
    """On tiles too small for a number: one for all neighbours of a group in a line that have room for it together."""
    if not grid.fine:
        return
    for (group, _), run in itertools.groupby(mosaic.cells(), key=lambda cell: (cell.group, cell.tile // grid.columns)):
        cells = list(run)
        x = grid.x(cells[0].tile, cells[0].start)
        wide = grid.x(cells[-1].tile, cells[-1].end) - x
        yield from label(group, x, grid.corner(cells[0].tile)[1], wide, grid.height, 6.0)


def _visible(widths: list[float], joint: float) -> list[float]:
    """The widths with slivers made wide enough to be seen, at the cost of the widest piece."""
    least = 2.0 + joint
    if len(widths) < 2 or sum(widths) < 3 * least * len(widths):
        return widths
    wider = [max(width, least) for width in widths]
    wider[wider.index(max(wider))] -= sum(wider) - sum(widths)
    return wider


# ---------------------------------------------------------------------------------------------------------------------
# Sizes


def _bars(mosaic: Mosaic, top: float) -> tuple[list[str], float]:
    """One bar for each group, in its colour."""
    groups = len(mosaic.sizes)
    if not groups:
        return [], top
    base = top + BARS_TOP + BARS_HEIGHT + 10
    pitch = min((WIDTH - 2 * MARGIN) / groups, 76.0)
    wide = pitch * (0.82 if pitch > 6 else 0.9 if pitch > 2 else 1.0)
    most = max(*mosaic.sizes, 1)
    power = 0.5 if most > 12 * statistics.median([size for size in mosaic.sizes if size] or [1]) else 1.0
    scale = "size of each group" + (" (heights by the square root)" if power < 1 else "")
    parts = [text(MARGIN, top + BARS_TOP - 2, scale, 13, faint=True)]
    values = pitch > 7.4 * len(str(most))  # room for the size above each bar
    for group, size in enumerate(mosaic.sizes):
        x, tall = MARGIN + group * pitch, (size / most) ** power * (BARS_HEIGHT - 12)
        local = mosaic.first <= group < mosaic.first + mosaic.local_groups
        if size:
            box = f'x="{num(x)}" y="{num(base - max(tall, 1))}" width="{num(wide)}" height="{num(max(tall, 1))}"'
            parts.append(f'<rect class="size" {box} fill="{colour(group)}"{"" if local else _DIM}/>')
        if values:
            parts.append(text(x + wide / 2, base - tall - 5, f"{size}", 12, anchor="middle", faint=True))
    parts.append(f'<path class="line" d="M{MARGIN:g} {num(base + 0.5)}h{num(groups * pitch)}" stroke="{LINE}"/>')
    if not values:
        parts.append(text(WIDTH - MARGIN, top + BARS_TOP - 2, f"largest {most:,}", 13, anchor="end", faint=True))
    step = next(s for s in _steps() if s * pitch >= 8 * len(str(groups - 1)) + 10 or s >= groups)
    for group in range(0, groups, step):
        parts.append(text(MARGIN + group * pitch + wide / 2, base + 17, f"{group}", 12, anchor="middle"))
    bottom = base + 22
    if mosaic.empty:
        named = ", ".join(map(str, mosaic.empty[:24])) + (", …" if len(mosaic.empty) > 24 else "")
        bottom += 22
        parts.append(
            text(
                MARGIN, bottom, f"{len(mosaic.empty):,} of {mosaic.local_groups:,} empty: group {named}", 13, faint=True
            )
        )
    return parts, bottom


_DIM = ' opacity="0.25"'


def _steps() -> Iterator[int]:
    for power in itertools.count():
        yield from (10**power, 2 * 10**power, 5 * 10**power)
