"""The matrix products that a consumer warpgroup issues: blocks of 64 rows by n columns. Each is a branch of the kernel.

A wgmma instruction has M = 64 and as N a multiple of 8. The rows of a tile are its M; with swap-AB they are its N:

    normal, 256 x 192       swap-AB, 192 x 256      a group of 75 rows takes
        columns                  rows               normal    2 blocks of 64
    64 ┌───────┐ consumer    64 ┌────┐ consumer     swap-AB   5 units of 16
    64 │       │ 0           64 │    │ 0
    64 ├───────┤ consumer    64 ├────┤ consumer
    64 └───────┘ 1           64 └────┘ 1
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from trencadis.backends.gpu.layout import WGMMA_M, Layout
from trencadis.backends.gpu.tile_scheduler import Scalar, Tile, i32


class MmaShape(NamedTuple):
    """The shape of one consumer's product: `blocks` wgmma of 64 x n, one below the other."""

    blocks: int
    n: int


def mma_shapes(layout: Layout, columns: int) -> Normal | SwapAB:
    """The products of a layout in a result of this many columns."""
    return SwapAB(layout, columns) if layout.swap_ab else Normal(layout, columns)


class Normal:
    """The products of tiles with as many blocks of rows as they need; the last column of tiles may be narrower."""

    def __init__(self, layout: Layout, columns: int) -> None:
        self.last = columns - layout.block_n  # where the last column of tiles starts, if it is as wide as the others
        self.most = layout.block_m // WGMMA_M // layout.consumers
        heights = range(1, self.most + 1)
        self.all = [MmaShape(blocks, n) for n, blocks in itertools.product(layout.widths(columns), heights)]

    def blocks(self, tile: Tile) -> Scalar:
        """The blocks of 64 in the products of a tile, for all consumers together."""
        return tile.units

    def branch(self, tile: Tile, blocks: Scalar) -> Scalar:
        """The index in `all` of the product of a consumer that has this many blocks of a tile."""
        narrow = (tile.column > i32(self.last)).astype(jnp.int32)
        return narrow * i32(self.most) + blocks - i32(1)


class SwapAB:
    """The products of tiles with as many units of rows as they need, and the blocks that there are columns for."""

    def __init__(self, layout: Layout, columns: int) -> None:
        self.layout, self.columns = layout, columns
        self.most = layout.block_n // WGMMA_M // layout.consumers
        self.coarse = [rows for rows in layout.heights if rows % (2 * WGMMA_M) == 0 or rows == layout.block_m]
        fewer = range(1, self.most) if columns % layout.block_n else ()  # in the last column of tiles, by few branches
        self.all = [MmaShape(self.most, rows) for rows in layout.heights]
        self.all += [MmaShape(blocks, rows) for blocks in fewer for rows in self.coarse]

    def blocks(self, tile: Tile) -> Scalar:
        """The blocks of 64 in the products of a tile, for all consumers together."""
        return lax.div(jnp.minimum(i32(self.columns) - tile.column, i32(self.layout.block_n)), i32(WGMMA_M))

    def branch(self, tile: Tile, blocks: Scalar) -> Scalar:
        """The index in `all` of the product of a consumer that has this many blocks of a tile."""
        heights = self.layout.heights
        fewer = i32(len(heights)) + (blocks - i32(1)) * i32(len(self.coarse)) + fit(self.layout, tile, self.coarse)
        return jnp.where(blocks == i32(self.most), fit(self.layout, tile, heights), fewer)


def fit(layout: Layout, tile: Tile, heights: Sequence[int]) -> Scalar:
    """The index of the least of some heights, in ascending order, that a tile fits into."""
    rows = tile.units * i32(layout.m_unit)
    return sum(((rows > i32(height)).astype(jnp.int32) for height in heights[:-1]), i32(0))
