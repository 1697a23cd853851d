"""What a kernel holds in VMEM, and in which pieces: from a problem, a tiling and a chip to the sizes of every buffer."""

from __future__ import annotations

import dataclasses

from trencadis.problem import Form, Problem

@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The sizes of a kernel. Rows are those of the operands; k and n those of the problem, padded if need be."""

    slab: int  # rows that are stored together: a result is merged and written in whole slabs
    grain: int  # rows that a copy can start and end at
    heights: tuple[int, ...]  # rows of a tile, ascending
    deep: int  # columns of k in a block
    wide: int  # columns of n in a block
    chunk: int  # columns of n that are multiplied at a time
    fine: int = 0  # contraction: rows of the last step of a sum; the others take twice as many where they can
    k_outside: bool = True  # contraction: whether blocks of k change less often than blocks of n
    out_slots: int = 4  # chunks of the result that may be on their way out
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


def up(x: int, unit: int) -> int:
    """The next multiple of the unit."""
    return -(-x // unit) * unit
