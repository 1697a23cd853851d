"""The schedule as a thing to look at: which group works on which tile, and what it wastes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trencadis.core import problem as what
from trencadis.core.schedule import visits
from trencadis.viz import svg, terminal
from trencadis.viz.picture import Picture

NOTEBOOK_LIMIT = 20_000  # visits; a notebook shows the text of anything larger


class Cell(NamedTuple):
    """What one visit works on: the rows `[start, end)` of a tile that belong to its group."""

    group: int
    tile: int
    start: int
    end: int


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)  # no slots: it caches
class Mosaic(Picture):
    """A schedule: groups of rows laid over tiles. Prints as text, draws as SVG, and counts. Made by `show`.

    >>> mosaic = schedule([100, 150, 50], tile=128)
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

    def lines(self, width: int) -> list[terminal.Line]:
        """The lines of the text, with the colours of groups."""
        return terminal.layout(self, width)

    def svg(self) -> str:
        """The mosaic as an SVG document: a cell for each visit, a tile that groups share is broken."""
        return svg.draw(self)

    @property
    def huge(self) -> bool:
        """Whether it is too much for a notebook, which then shows the text."""
        return self.visits > NOTEBOOK_LIMIT


def schedule(
    group_sizes: Any, tile: Any, *, m: int | None = None, group_offset: Any = None, num_groups: int | None = None
) -> Mosaic:
    """The mosaic of sizes and a tile; arguments as in `show`.

    >>> schedule([3, 0, 5], tile=4).pairs
    ((0, 0), (2, 0), (2, 1))
    """
    sizes = checked_sizes(group_sizes)
    tile, m = _integer("tile", tile, at_least=1), sum(sizes) if m is None else _integer("m", m, at_least=0)
    if m >= 2**31:
        raise ValueError(f"m: want fewer than 2**31 rows; got {m}")
    what.check_sizes(np.asarray(sizes, np.int64), m)
    first = known_first(group_offset, len(sizes))
    rest = len(sizes) - first
    local = rest if num_groups is None else _integer("num_groups", num_groups, at_least=0)
    if local > rest:
        raise ValueError(f"num_groups: want at most {rest}, the groups from group_offset = {first} on; got {local}")
    walk = _visits(jnp.asarray(sizes, jnp.int32), first, m=m, tile=tile, local=local)
    return Mosaic(sizes=sizes, m=m, tile=tile, first=first, local_groups=local, pairs=tuple(walk.pairs()))


@functools.partial(jax.jit, static_argnames=("m", "tile", "local"))
def _visits(sizes: jax.Array, first: Any, *, m: int, tile: int, local: int) -> Any:
    return visits(sizes, m, tile, first=first, local_groups=local)


def known_first(group_offset: Any, groups: int) -> int:
    """The first of the local groups as a Python integer, or an error."""
    first = what.concrete(what.first_group(group_offset))
    if first is None:
        raise ValueError("group_offset: want a value known now; got a traced array")
    if not 0 <= int(first) <= groups:
        raise ValueError(f"group_offset: want 0 to {groups}, the number of groups; got {int(first)}")
    return int(first)


def checked_sizes(group_sizes: Any) -> tuple[int, ...]:
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
