"""A fixed raster as a thing to look at: tiles of equal height, each visited by every group that has rows in it."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter

import numpy.typing as npt

from trencadis.core.schedule import RowTile
from trencadis.viz import raster_svg, raster_text
from trencadis.viz.mosaic import Mosaic, cells, checked_int, checked_rows
from trencadis.viz.terminal import Line

NOTE = "a fixed-raster schedule, as in megablox; not the tiles of our kernels"


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)  # no slots: it caches
class Raster(Mosaic):
    """Groups of rows over a fixed raster of tiles, as megablox schedules them. Made by `show` with a `tile`.

    >>> picture = raster([100, 150, 50], tile=128)
    >>> picture.visits, picture.tiles, picture.shared, picture.unowned, picture.waste
    (5, 3, (0, 1), 0, 0.53125)
    """

    tile: int  # rows of a tile

    @property
    def visits(self) -> int:
        """The number of (group, tile) pairs that are computed."""
        return len(self.cells)

    @property
    def tiles(self) -> int:
        """The number of tiles that cover the m rows."""
        return -(-self.m // self.tile)

    @functools.cached_property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """The visits as pairs (group, tile), in order."""
        return tuple((cell.group, cell.rows.start // self.tile) for cell in self.cells)

    @functools.cached_property
    def visits_per_tile(self) -> tuple[int, ...]:
        """The number of groups that visit each tile."""
        count = Counter(tile for _, tile in self.pairs)
        return tuple(count[tile] for tile in range(self.tiles))

    @property
    def shared(self) -> tuple[int, ...]:
        """The tiles that several groups visit."""
        return tuple(tile for tile, count in enumerate(self.visits_per_tile) if count > 1)

    def lines(self, width: int) -> list[Line]:
        """The lines of the text, with the colours of groups."""
        return raster_text.layout(self, width)

    def svg(self) -> str:
        """The picture as an SVG document: a cell for each visit; a tile that groups share is broken."""
        return raster_svg.draw(self)


def raster(
    group_sizes: npt.ArrayLike,
    tile: int,
    *,
    m: int | None = None,
    group_offset: npt.ArrayLike | None = None,
    num_groups: int | None = None,
) -> Raster:
    """The picture of a fixed raster of tiles; arguments as in `show`.

    >>> raster([3, 0, 5], tile=4).pairs
    ((0, 0), (2, 0), (2, 1))
    """
    height = checked_int("tile", tile, at_least=1)
    rows = checked_rows(group_sizes, m, group_offset, num_groups)

    def visited(start: int, end: int) -> list[RowTile]:
        tops = range(start - start % height, end, height)
        return [RowTile(range(top, top + height), range(max(top, start), min(top + height, end))) for top in tops]

    return Raster(**rows._asdict(), cells=cells(rows, visited), note=NOTE, tile=height)
