"""The schedule as a thing to look at: which group works on which tile, and what it wastes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pathlib
import shutil
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trencadis import problem as what
from trencadis.looking import svg, terminal
from trencadis.visits import visits

NOTEBOOK_LIMIT = 20_000  # visits; a notebook shows the text of anything larger


class Cell(NamedTuple):
    """What one visit works on: the rows `[start, end)` of a tile that belong to its group."""

    group: int
    tile: int
    start: int
    end: int


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)  # no slots: it caches
class Mosaic:
    """A schedule: groups of rows laid over tiles. Prints as text, draws as SVG, and counts. Made by `show`.

    >>> mosaic = show([100, 150, 50], tile=128)
    >>> mosaic.visits, mosaic.tiles, mosaic.shared, mosaic.unowned, mosaic.waste
    (5, 3, (0, 1), 0, 0.53125)
    """

    sizes: tuple[int, ...]  # of all groups
    m: int
    tile: int  # rows of a tile
    first: int  # the local groups are [first, first + local_groups)
    local_groups: int
    pairs: tuple[tuple[int, int], ...]  # the visits (group, tile), in order

    @property
    def visits(self) -> int:
        """How many (group, tile) pairs are worked on."""
        return len(self.pairs)

    @property
    def tiles(self) -> int:
        """How many tiles cover the m rows."""
        return -(-self.m // self.tile)

    @property
    def owned(self) -> int:
        """Rows of the local groups."""
        return sum(self.sizes[self.first : self.first + self.local_groups])

    @property
    def unowned(self) -> int:
        """Rows of no local group."""
        return self.m - self.owned

    @property
    def computed(self) -> int:
        """Rows the visits compute: a whole tile for each."""
        return self.visits * self.tile

    @property
    def waste(self) -> float:
        """The share of the computed rows that do not belong to the group of their visit."""
        return 1 - self.owned / self.computed if self.visits else 0.0

    @functools.cached_property
    def ends(self) -> tuple[int, ...]:
        """The row after the last of each group."""
        return tuple(itertools.accumulate(self.sizes))

    @functools.cached_property
    def visits_per_tile(self) -> tuple[int, ...]:
        """For each tile, by how many groups it is visited."""
        count = Counter(tile for _, tile in self.pairs)
        return tuple(count[tile] for tile in range(self.tiles))

    @property
    def shared(self) -> tuple[int, ...]:
        """The tiles that several groups visit."""
        return tuple(tile for tile, count in enumerate(self.visits_per_tile) if count > 1)

    @property
    def empty(self) -> tuple[int, ...]:
        """The local groups without rows."""
        return tuple(g for g in range(self.first, self.first + self.local_groups) if self.sizes[g] == 0)

    def cells(self) -> Iterator[Cell]:
        """The visits with their rows."""
        for group, tile in self.pairs:
            end = self.ends[group]
            start = end - self.sizes[group]
            yield Cell(group, tile, max(start, tile * self.tile), min(end, (tile + 1) * self.tile))

    def text(self, width: int = 80) -> str:
        """The mosaic as plain text, no wider than `width` columns where that is possible."""
        return terminal.plain(terminal.layout(self, width))

    def svg(self) -> str:
        """The mosaic as an SVG document: a cell for each visit, a tile that groups share is broken."""
        return svg.draw(self)

    def save(self, path: str | pathlib.Path) -> pathlib.Path:
        """Write the SVG document to a file."""
        path = pathlib.Path(path)
        path.write_text(self.svg(), encoding="utf-8")
        return path

    def __str__(self) -> str:
        return self.text(shutil.get_terminal_size().columns)

    __repr__ = __str__

    def _repr_svg_(self) -> str | None:
        return self.svg() if self.visits <= NOTEBOOK_LIMIT else None

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        del console
        yield from terminal.coloured(terminal.layout(self, options.max_width))


def show(
    group_sizes: Any, tile: int, *, m: int | None = None, group_offset: Any = 0, num_groups: int | None = None
) -> Mosaic:
    """The schedule of a kernel over row tiles: who works where. Print it, or save it as a picture.

    Args:
      group_sizes: integers, one per group; a list or an array, known now.
      tile: rows of a tile.
      m: rows; by default the sum of the sizes. Rows past that sum belong to nobody.
      group_offset: the first of the local groups, as in `grouped_matmul`; rows of other groups count as unowned.
      num_groups: how many groups are local; by default all from group_offset on.

    Returns:
      A `Mosaic`.

    >>> show([3, 0, 5], tile=4)
    rows    0 1 2 3 │ 4 5 6 7
    group   0 0 0 2 │ 2 2 2 2
    visits  (0,0) (2,0) (2,1)
    total   3 visits, 2 tiles of 4 rows, 8 of 8 rows owned, 1 empty group, 33% waste
    >>> show([100, 150, 50], tile=128).svg()[:4]
    '<svg'
    """
    sizes = _checked_sizes(group_sizes)
    tile, m = _integer("tile", tile, at_least=1), sum(sizes) if m is None else _integer("m", m, at_least=0)
    if m >= 2**31:
        raise ValueError(f"m: want fewer than 2**31 rows; got {m}")
    what.check_sizes(np.asarray(sizes, np.int64), m)
    first = what.concrete(what.first_group(group_offset))
    if first is None:
        raise ValueError("group_offset: want a value known now; got a traced array")
    if not 0 <= int(first) <= len(sizes):
        raise ValueError(f"group_offset: want 0 to {len(sizes)}, the number of groups; got {int(first)}")
    rest = len(sizes) - int(first)
    local = rest if num_groups is None else _integer("num_groups", num_groups, at_least=0)
    if local > rest:
        raise ValueError(
            f"num_groups: want at most {rest}, the groups from group_offset = {int(first)} on; got {local}"
        )
    schedule = _schedule(jnp.asarray(sizes, jnp.int32), int(first), m=m, tile=tile, local=local)
    return Mosaic(sizes=sizes, m=m, tile=tile, first=int(first), local_groups=local, pairs=tuple(schedule.pairs()))


@functools.partial(jax.jit, static_argnames=("m", "tile", "local"))
def _schedule(sizes: jax.Array, first: Any, *, m: int, tile: int, local: int) -> Any:
    return visits(sizes, m, tile, first=first, local_groups=local)


def _checked_sizes(group_sizes: Any) -> tuple[int, ...]:
    """The sizes as Python integers, or an error."""
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


def _integer(name: str, value: Any, *, at_least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < at_least:
        raise ValueError(f"{name}: want {'a positive' if at_least else 'a nonnegative'} int; got {value!r}")
    return int(value)
