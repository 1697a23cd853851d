"""How a kernel cuts its work: the tile of a result, the step of its sum, and what lies in shared memory meanwhile."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from trencadis.core.dtypes import bits

BLOCK = 64  # rows that one instruction multiplies
UNIT = 16  # columns of instructions by which turned tiles grow
GRAIN = 8  # a copy into shared memory starts at a multiple of so many rows
LINE = 128  # bytes of a row that lie together in shared memory, mostly
CONSUMERS = 2  # warpgroups that multiply
WIDENED = 2  # steps of weights in shared memory at once that are widened
TOLD = 4  # tiles that the other warpgroups are told of ahead


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The cut of one kernel."""

    tall: int  # rows of the tallest tile; a tile has as many blocks as it needs
    wide: int  # columns of a tile
    deep: int  # entries of the sum in one step
    stages: int  # steps in shared memory at once
    panel: int  # tiles that are taken downwards before the next column
    blocks: int  # thread blocks: one for each multiprocessor
    lines: int = LINE  # bytes of a row that lie together in a stage
    slots: int = 2  # buffers of a consumer on the way out
    split: str = ""  # the operand that comes as two bfloat16 arrays, of which it is the sum
    turned: bool = False  # rows of a tile are columns of instructions
    packed: bool = False  # weights have fewer bits than rows, and become as wide in registers
    widened: bool = False  # or in shared memory, by a warpgroup of its own
    flat: bool = False  # both operands are stored with the axis of the sum last
    claim: bool = False  # a block takes the next tile when it is done with one; otherwise every `blocks`-th is its own

    def replace(self, **changes: Any) -> Layout:
        """The same layout with some fields changed."""
        return dataclasses.replace(self, **changes)

    @property
    def unit(self) -> int:
        """Rows by which a tile grows."""
        return UNIT if self.turned else BLOCK

    @property
    def heights(self) -> list[int]:
        """Rows that are copied and multiplied for a tile: what it has, or more if that is less than half of a tall one.

        Each height is a branch of the kernel, to be compiled; and a group is cut evenly, so that most tiles are tall.
        """
        every = range(self.unit, self.tall + 1, self.unit)
        return [rows for rows in every if rows > self.tall // 2 or rows % BLOCK == 0 or self.tall < BLOCK]

    def widths(self, columns: int) -> list[int]:
        """How wide tiles are in a result of so many columns: as wide as this, and the last of them the rest."""
        rest = columns % self.wide
        return [self.wide, rest] if rest else [self.wide]

    def __str__(self) -> str:
        order = "claimed" if self.claim else "dealt"
        kind = " turned" * self.turned + " packed" * self.packed
        return f"{self.tall}x{self.wide}x{self.deep}{kind}, {self.stages} stages, {self.blocks} blocks, tiles {order}"


def line(dtype: np.dtype[Any], length: int = LINE) -> int:
    """Entries in a line of so many bytes."""
    return 8 * length // bits(dtype)
