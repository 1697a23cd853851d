"""What a consumer multiplies at a time: blocks of 64, one below the other, by columns. Each is a branch of the kernel.

An instruction has 64 rows and a multiple of 8 columns. Rows of a tile are its rows; or, turned, its columns:

    plain, 256 x 192       turned, 192 x 256       a group of 75 rows takes
        columns                  rows              plain     2 blocks of 64
    64 ┌───────┐ consumer    64 ┌────┐ consumer    turned    5 units of 16
    64 │       │ 0           64 │    │ 0
    64 ├───────┤ consumer    64 ├────┤ consumer
    64 └───────┘ 1           64 └────┘ 1
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from trencadis.backends.gpu.layout import BLOCK, CONSUMERS, Layout
from trencadis.backends.gpu.walk import Tile, i32


class Shape(NamedTuple):
    """One product."""

    blocks: int  # of 64, one below the other
    columns: int


def shapes(layout: Layout, columns: int) -> Plain | Turned:
    """The products of a result of so many columns."""
    return (Turned if layout.turned else Plain)(layout, columns)


class Plain:
    """A tile has as many blocks of rows as it needs; the last column of tiles may be narrower."""

    def __init__(self, layout: Layout, columns: int) -> None:
        self.last = columns - layout.wide  # where the last column of tiles starts, if it is as wide as the others
        self.most = layout.tall // BLOCK // CONSUMERS
        heights = range(1, self.most + 1)
        self.all = [Shape(blocks, wide) for wide, blocks in itertools.product(layout.widths(columns), heights)]

    def blocks(self, tile: Tile) -> Any:
        """Blocks in the products of a tile."""
        return tile.units

    def branch(self, tile: Tile, mine: Any) -> Any:
        """Which of all shapes has so many blocks, in this tile."""
        narrow = (tile.across > i32(self.last)).astype(jnp.int32)
        return narrow * i32(self.most) + mine - i32(1)


class Turned:
    """A tile has as many units of rows as it needs, and the blocks that there are columns for."""

    def __init__(self, layout: Layout, columns: int) -> None:
        self.layout, self.columns = layout, columns
        self.most = layout.wide // BLOCK // CONSUMERS
        self.coarse = [rows for rows in layout.heights if rows % (2 * BLOCK) == 0 or rows == layout.tall]
        fewer = range(1, self.most) if columns % layout.wide else ()  # in the last column of tiles, by few branches
        self.all = [Shape(self.most, rows) for rows in layout.heights]
        self.all += [Shape(blocks, rows) for blocks in fewer for rows in self.coarse]

    def blocks(self, tile: Tile) -> Any:
        """Blocks in the products of a tile."""
        return lax.div(jnp.minimum(i32(self.columns) - tile.across, i32(self.layout.wide)), i32(BLOCK))

    def branch(self, tile: Tile, mine: Any) -> Any:
        """Which of all shapes has so many blocks, in this tile."""
        heights = self.layout.heights
        fewer = i32(len(heights)) + (mine - i32(1)) * i32(len(self.coarse)) + fit(self.layout, tile, self.coarse)
        return jnp.where(mine == i32(self.most), fit(self.layout, tile, heights), fewer)


def fit(layout: Layout, tile: Tile, heights: Sequence[int]) -> Any:
    """Which of some heights, the least first, is the least that a tile fits into."""
    rows = tile.units * i32(layout.unit)
    return sum(((rows > i32(height)).astype(jnp.int32) for height in heights[:-1]), i32(0))
