"""The layout of a TPU kernel: its block sizes, the heights of its row tiles, and how many buffers it has in VMEM."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from trencadis.core.devices import CHIPS, Chip
from trencadis.core.problem import Form, Problem


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The static parameters of a kernel beside its problem; k and n are those of the problem, padded if need be."""

    sublane_tile: int  # row tiles start at multiples of it: rows of a native (sublane, lane) tile, or less (`realign`)
    dma_align: int  # rows: a copy between HBM and VMEM starts and ends at a multiple of this
    heights: tuple[int, ...]  # rows of a row tile, ascending; each height is a branch of its own in the kernel
    height_table: tuple[int, ...]  # the height to take, by the sublane tiles left in the span; the last one beyond
    block_k: int  # columns of k in a column block
    block_n: int  # columns of n in a column block
    chunk: int  # columns of n that are multiplied at a time; a column block has one or more chunks
    step_m: int = 0  # contraction: rows of a short step of the accumulation; a long step has twice as many
    k_outer: bool = True  # contraction: loop over blocks of k outside of the loop over blocks of n
    lhs_buffers: int = 2  # VMEM buffers for row tiles of lhs; 2 is double buffering
    out_buffers: int = 4  # VMEM buffers for chunks of the result, which are written back asynchronously
    chip: Chip = CHIPS["v6e"]  # decides in which dtypes tiles are multiplied
    cores: int = 1  # TensorCores over which the column blocks are split
    weight_parts: int = 0  # bfloat16 parts of weights multiplied by their scales along k; 0: sums are (promotion)
    columns: int = 0  # columns of n that are not padding; 0: all of them
    cut: bool = False  # arrays in HBM have these columns alone, and copies reach into the padding of their last tiles

    @property
    def block_m(self) -> int:
        """The rows of the tallest row tile, for which buffers are allocated."""
        return self.heights[-1]

    @property
    def moves_rows(self) -> bool:
        """Whether row tiles start between the rows at which copies can, and are moved to their place when loaded."""
        return self.dma_align > self.sublane_tile

    @property
    def buffer_rows(self) -> int:
        """The rows of a VMEM buffer for row tiles."""
        if not self.moves_rows:
            return self.block_m
        return (-(-self.block_m // self.dma_align) + 1) * self.dma_align

    @property
    def chunks(self) -> int:
        """The number of chunks in a full column block."""
        return self.block_n // self.chunk

    def num_blocks(self, problem: Problem) -> int:
        """The number of column blocks that the kernel goes through for each span."""
        n_blocks = -(-problem.n // self.block_n)
        return n_blocks if problem.form is Form.ROWS else n_blocks * -(-problem.k // self.block_k)


def cheapest_heights(heights: tuple[int, ...], unit: int, price: Callable[[int], float]) -> tuple[int, ...]:
    """For each number of units left, the first tile height of the cheapest cover, given the price of each height.

    >>> cheapest_heights((32, 64), 16, lambda h: h + 8)
    (32, 32, 32, 64, 64, 32, 32, 64, 64)
    """
    if len(heights) == 1:
        return heights
    best, table = [0.0], [heights[0]]
    for left in range(1, 2 * heights[-1] // unit + 1):
        cost, height = min((price(h) + best[max(0, left - h // unit)], h) for h in heights)
        best.append(cost)
        table.append(height)
    return tuple(table)
