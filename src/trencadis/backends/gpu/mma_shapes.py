"""The matrix products that a consumer warpgroup issues: blocks of 64 rows by n columns. Each is a branch of the kernel.

A wgmma instruction has M = 64 and as N a multiple of 8. The rows of a tile are its M; with swap-AB they are its N:

    normal, 256 x 192       swap-AB, 192 x 256      a group of 75 rows takes
        columns                  rows               normal    2 blocks of 64
    64 ┌───────┐ consumer    64 ┌────┐ consumer     swap-AB   5 units of 16
    64 │       │ 0           64 │    │ 0
    64 ├───────┤ consumer    64 ├────┤ consumer
    64 └───────┘ 1           64 └────┘ 1

Every branch takes time to compile. There is one only for products that occur, and where it saves enough arithmetic.
"""

from __future__ import annotations

import abc
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jax import lax

from trencadis.backends.gpu.layout import WGMMA_M, Layout
from trencadis.backends.gpu.tile_scheduler import Scalar, Tile, i32
from trencadis.core.problem import Form, Problem

NARROW_GAIN = 50  # a narrower last column of tiles is worth its branches if it saves 1/50 of all products


class MmaShape(NamedTuple):
    """The shape of one consumer's product: `blocks` wgmma of 64 x n, one below the other."""

    blocks: int
    n: int


class MmaShapes(abc.ABC):
    """The products of a layout: what `Normal` and `SwapAB` have in common."""

    def __init__(self, layout: Layout, all: list[MmaShape], may_skip: bool) -> None:
        self.layout = layout
        self.all = all
        self.may_skip = may_skip  # whether a consumer may have no block of a tile
        self.largest = MmaShape(max(shape.blocks for shape in all), max(shape.n for shape in all))

    @abc.abstractmethod
    def blocks(self, tile: Tile) -> Scalar:
        """The blocks of 64 in the products of a tile, for all consumers together."""

    def share(self, tile: Tile) -> Scalar:
        """The blocks of a tile that each consumer has, as long as there are any left."""
        return lax.div(self.blocks(tile) + i32(self.layout.consumers - 1), i32(self.layout.consumers))

    @abc.abstractmethod
    def branch(self, tile: Tile, blocks: Scalar) -> Scalar:
        """The index in `all` of the product of a consumer that has this many blocks of a tile."""


def mma_shapes(problem: Problem, layout: Layout) -> MmaShapes:
    """The products of a problem's tiles."""
    return SwapAB(problem, layout) if layout.swap_ab else Normal(problem, layout)


def widths(problem: Problem, layout: Layout) -> list[int]:
    """The widths of the tiles that are multiplied: block_n, and what is left for the last column if that is narrower.

    Where it saves too little, the last column is as wide as the others. What is outside of the result is not stored.
    """
    rest = problem.n % layout.block_n
    worth = (layout.block_n - rest) * NARROW_GAIN > problem.n
    return [layout.block_n] * (problem.n >= layout.block_n or not worth) + [rest] * (rest > 0 and worth)


class Normal(MmaShapes):
    """The products of tiles with as many blocks of rows as they need; the last column of tiles may be narrower."""

    def __init__(self, problem: Problem, layout: Layout) -> None:
        shares = _shares(layout, _row_blocks(problem, layout))
        self.heights, self.widths = sorted(shares - {0}), widths(problem, layout)
        products = [MmaShape(blocks, n) for n, blocks in itertools.product(self.widths, self.heights)]
        super().__init__(layout, products, 0 in shares)
        self.last = problem.n - layout.block_n  # where the last column of tiles starts, if it is as wide as the others

    def blocks(self, tile: Tile) -> Scalar:
        return tile.units

    def branch(self, tile: Tile, blocks: Scalar) -> Scalar:
        row = _index(blocks, self.heights)
        if len(self.widths) == 1:
            return row
        return lax.select(tile.column > i32(self.last), row + i32(len(self.heights)), row)


class SwapAB(MmaShapes):
    """The products of tiles with as many units of rows as they need, and the blocks that there are columns for."""

    def __init__(self, problem: Problem, layout: Layout) -> None:
        self.most = layout.block_n // WGMMA_M // layout.consumers
        self.coarse = [rows for rows in layout.heights if rows % (2 * WGMMA_M) == 0 or rows == layout.block_m]
        found = widths(problem, layout)
        shares = _shares(layout, (width // WGMMA_M for width in found))
        self.fewer = sorted(shares - {0, self.most})  # in the last column of tiles, by few branches
        products = [MmaShape(self.most, rows) for rows in layout.heights if self.most in shares]
        products += [MmaShape(blocks, rows) for blocks in self.fewer for rows in self.coarse]
        super().__init__(layout, products, 0 in shares)
        self.columns = problem.n if found[-1] < layout.block_n else None  # None: all tiles are equally wide

    def blocks(self, tile: Tile) -> Scalar:
        most = i32(self.layout.block_n)
        columns = most if self.columns is None else lax.min(i32(self.columns) - tile.column, most)
        return lax.div(columns, i32(WGMMA_M))

    def branch(self, tile: Tile, blocks: Scalar) -> Scalar:
        heights = self.layout.heights if self.all[0].blocks == self.most else []
        row = fit(self.layout, tile, heights)
        if not self.fewer:
            return row
        fewer = i32(len(heights)) + _index(blocks, self.fewer) * i32(len(self.coarse))
        return lax.select(blocks == i32(self.most), row, fewer + fit(self.layout, tile, self.coarse))


def fit(layout: Layout, tile: Tile, heights: Sequence[int]) -> Scalar:
    """The index of the least of some heights, in ascending order, that a tile fits into."""
    return _index(tile.units * i32(layout.m_unit), heights)


def _index(x: Scalar, ascending: Sequence[int]) -> Scalar:
    """The index of the least of some numbers that is not less than x."""
    return sum((lax.convert_element_type(x > i32(number), "int32") for number in ascending[:-1]), i32(0))


def _shares(layout: Layout, blocks: Iterable[int]) -> set[int]:
    """The blocks that a consumer may have of a tile, if tiles may have these numbers of blocks."""
    found = set()
    for count in blocks:
        share = -(-count // layout.consumers)
        found |= {max(min(count - at * share, share), 0) for at in range(layout.consumers)}
    return found


def _row_blocks(problem: Problem, layout: Layout) -> set[int]:
    """The heights, in blocks of 64 rows, that tiles may have; in a contraction they follow from k."""
    most = layout.block_m // WGMMA_M
    if problem.form is Form.ROWS:
        return set(range(1, most + 1))
    blocks = -(-problem.k // WGMMA_M)
    tiles = -(-blocks // most)
    return {blocks // tiles, -(-blocks // tiles)}
