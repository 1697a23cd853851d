"""What a kernel holds in VMEM, and in which pieces."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from trencadis.core.devices import CHIPS, Chip
from trencadis.core.problem import Form, Problem


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The sizes of a kernel. Rows are those of the operands; k and n those of the problem, padded if need be."""

    slab: int  # rows that are stored together: a result is merged and written in whole slabs
    grain: int  # rows that a copy can start and end at
    heights: tuple[int, ...]  # rows of a tile, ascending
    table: tuple[int, ...]  # the height of a tile by the slabs that are left of its span; the last for all beyond
    deep: int  # columns of k in a block
    wide: int  # columns of n in a block
    chunk: int  # columns of n that are multiplied at a time
    fine: int = 0  # contraction: rows of a short step of a sum; a long one has twice as many
    k_outside: bool = True  # contraction: whether blocks of k change less often than blocks of n
    x_slots: int = 2  # tiles of lhs that are held or on their way
    out_slots: int = 4  # chunks of the result that may be on their way out
    chip: Chip = CHIPS["v6e"]  # whose products are taken
    cores: int = 1

    @property
    def tallest(self) -> int:
        """Rows of a buffer."""
        return self.heights[-1]

    @property
    def chunks(self) -> int:
        """Chunks of a whole block."""
        return self.wide // self.chunk

    def blocks(self, problem: Problem) -> int:
        """Blocks of the result that each span goes through."""
        wide = -(-problem.n // self.wide)
        return wide if problem.form is Form.ROWS else wide * -(-problem.k // self.deep)


def heights_table(heights: tuple[int, ...], slab: int, price: Callable[[int], float]) -> tuple[int, ...]:
    """For each number of slabs the first height of the cheapest way to cover them, given what each height costs.

    >>> heights_table((32, 64), 16, lambda h: h + 8)
    (32, 32, 32, 64, 64, 32, 32, 64, 64)
    """
    if len(heights) == 1:
        return heights
    best, table = [0.0], [heights[0]]
    for left in range(1, 2 * heights[-1] // slab + 1):
        cost, height = min((price(h) + best[max(0, left - h // slab)], h) for h in heights)
        best.append(cost)
        table.append(height)
    return tuple(table)
