"""Row tiles as a thing to look at: which rows a backend computes for which group, and what it wastes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
import numpy.typing as npt

from trencadis.core import arguments
from trencadis.core.schedule import RowTile
from trencadis.viz import mosaic_svg, mosaic_text
from trencadis.viz.picture import Picture
from trencadis.viz.terminal import Line, counted

NOTEBOOK_LIMIT = 20_000  # tiles; a notebook shows the text of anything larger


class Tile(NamedTuple):
    """A tile of rows that is computed for one group."""

    group: int
    rows: range  # all rows that are computed
    owned: range  # those of them that belong to the group


class Rows(NamedTuple):
    """The checked arguments of `show` that say which rows belong to which group."""

    sizes: tuple[int, ...]  # of all groups
    m: int
    first: int  # the local groups are [first, first + local_groups)
    local_groups: int


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)  # no slots: it caches
class Mosaic(Picture):
    """Groups of rows and the tiles that cover them. Prints as text, draws as SVG, and counts. Made by `show`.

    >>> picture = mosaic([3, 0, 5], lambda start, end: [RowTile(range(start, start + 8), range(start, end))])
    >>> picture.heights, picture.owned, picture.computed, picture.waste
    ((8, 8), 8, 16, 0.5)
    """

    sizes: tuple[int, ...]  # of all groups
    m: int
    first: int  # the local groups are [first, first + local_groups)
    local_groups: int
    cells: tuple[Tile, ...]  # in the order of their rows
    note: str  # what was drawn: the backend, its target and the problem

    @property
    def local(self) -> range:
        """The groups whose rows are computed."""
        return range(self.first, self.first + self.local_groups)

    @property
    def heights(self) -> tuple[int, ...]:
        """The number of rows that are computed in each tile."""
        return tuple(len(tile.rows) for tile in self.cells)

    @property
    def heights_count(self) -> dict[int, int]:
        """How many tiles there are of each height, the tallest first."""
        return dict(sorted(Counter(self.heights).items(), reverse=True))

    @property
    def heights_range(self) -> str:
        """The least and the largest height of a tile in words, such as "8 to 64 rows"."""
        low, high = min(self.heights, default=0), max(self.heights, default=0)
        return counted(high, "row") if low == high else f"{low} to {counted(high, 'row')}"

    @property
    def owned(self) -> int:
        """The number of rows that belong to local groups."""
        return sum(self.sizes[group] for group in self.local)

    @property
    def unowned(self) -> int:
        """The number of rows that belong to no local group."""
        return self.m - self.owned

    @property
    def computed(self) -> int:
        """The number of rows that are computed, over all tiles."""
        return sum(self.heights)

    @property
    def waste(self) -> float:
        """The share of the computed rows that do not belong to the group of their tile."""
        return 1 - self.owned / self.computed if self.computed else 0.0

    @functools.cached_property
    def ends(self) -> tuple[int, ...]:
        """The row after the last row of each group."""
        return tuple(itertools.accumulate(self.sizes))

    @property
    def empty(self) -> tuple[int, ...]:
        """The local groups that have no rows."""
        return tuple(group for group in self.local if self.sizes[group] == 0)

    def lines(self, width: int) -> list[Line]:
        """The lines of the text, with the colours of groups."""
        return mosaic_text.layout(self, width)

    def svg(self) -> str:
        """The picture as an SVG document: one piece for each tile, as wide as the tile has rows."""
        return mosaic_svg.draw(self)

    @property
    def huge(self) -> bool:
        """Whether there are too many tiles for a notebook, which then shows the text."""
        return len(self.cells) > NOTEBOOK_LIMIT


def mosaic(
    group_sizes: npt.ArrayLike,
    row_tiles: Callable[[int, int], Sequence[RowTile]],
    *,
    note: str = "",
    m: int | None = None,
    group_offset: npt.ArrayLike | None = None,
    num_groups: int | None = None,
) -> Mosaic:
    """The picture of groups that a function cuts into tiles, given the first row of a group and the row after its last.

    >>> mosaic([3, 0, 5], lambda start, end: [RowTile(range(start, end), range(start, end))]).heights
    (3, 5)
    """
    rows = checked_rows(group_sizes, m, group_offset, num_groups)
    return Mosaic(**rows._asdict(), cells=cells(rows, row_tiles), note=note)


def cells(rows: Rows, row_tiles: Callable[[int, int], Sequence[RowTile]]) -> tuple[Tile, ...]:
    """The tiles of all local groups that have rows, in order."""
    bounds = list(itertools.accumulate(rows.sizes, initial=0))
    local = range(rows.first, rows.first + rows.local_groups)
    return tuple(
        Tile(group, tile.rows, tile.owned)
        for group in local
        if rows.sizes[group]
        for tile in row_tiles(bounds[group], bounds[group + 1])
    )


# ---------------------------------------------------------------------------------------------------------------------
# Arguments


def checked_rows(
    group_sizes: npt.ArrayLike, m: int | None, group_offset: npt.ArrayLike | None, num_groups: int | None
) -> Rows:
    """The arguments of `show` that describe rows and groups as Python integers, or an error that names one.

    >>> checked_rows([3, 0, 5], None, 1, None)
    Rows(sizes=(3, 0, 5), m=8, first=1, local_groups=2)
    """
    sizes = checked_sizes(group_sizes)
    m = sum(sizes) if m is None else checked_int("m", m)
    if m >= 2**31:
        raise ValueError(f"m: want fewer than 2**31 rows; got {m}")
    arguments.check_sizes(np.asarray(sizes, np.int64), m)
    first = known_first(group_offset, len(sizes))
    rest = len(sizes) - first
    local = rest if num_groups is None else checked_int("num_groups", num_groups)
    if local > rest:
        raise ValueError(f"num_groups: want at most {rest}, the groups from group_offset = {first} on; got {local}")
    return Rows(sizes, m, first, local)


def known_first(group_offset: npt.ArrayLike | None, groups: int) -> int:
    """The first of the local groups as a Python integer, or an error."""
    first = arguments.concrete(arguments.first_group(group_offset))
    if first is None:
        raise ValueError("group_offset: want a value known now; got a traced array")
    if not 0 <= int(first) <= groups:
        raise ValueError(f"group_offset: want 0 to {groups}, the number of groups; got {int(first)}")
    return int(first)


def checked_sizes(group_sizes: npt.ArrayLike) -> tuple[int, ...]:
    """The group sizes as Python integers, or an error."""
    if isinstance(group_sizes, jax.core.Tracer):
        raise ValueError("group_sizes: want values known now; got a traced array")
    try:
        sizes = np.asarray(group_sizes)
    except (TypeError, ValueError):
        raise TypeError(f"group_sizes: want integers, one per group; got {group_sizes!r}") from None
    if sizes.ndim != 1:
        raise ValueError(f"group_sizes: want 1 dimension [g]; got {sizes.ndim}, shape {sizes.shape}")
    if sizes.size and not np.issubdtype(sizes.dtype, np.integer):
        raise TypeError(f"group_sizes: want integers; got dtype {sizes.dtype}")
    if sizes.size and sizes.min() < 0:
        raise ValueError(f"group_sizes: sizes must be >= 0; group {int(sizes.argmin())} has {int(sizes.min())}")
    return tuple(int(size) for size in sizes)


def checked_int(name: str, value: object, *, at_least: int = 0) -> int:
    """The value as a Python integer that is at least 0, or at least 1; or an error that names the argument."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < at_least:
        raise ValueError(f"{name}: want {'a positive' if at_least else 'a nonnegative'} int; got {value!r}")
    return int(value)
