"""The static sizes of the kernel: of a product, of what is copied at a time, and of the buffers in VMEM."""

from __future__ import annotations

import dataclasses

from trencadis.backends.prepare import round_up
from trencadis.backends.tpu.indexing import LANES
from trencadis.backends.tpu.ragged.flat import TILE

COLUMNS = 2 * LANES  # n of a product
CHUNK = 8  # vectors of 128 words of a row that are copied at a time: those of a vector register
WIDE = 2  # chunks of a row of the result that are written at a time
CLAMPED = 32  # rows of a slot after which their place is compared with the end of the buffer
PAIR = 16  # rows that are aligned together; of 16-bit entries, two of them share their words


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What the kernel computes and copies at a time, and the room in its buffers."""

    rows: int  # of a panel of the result, and of an operand that are aligned at a time
    depth: int  # k of a product
    products: int  # in a basic block
    longest: int  # entries of a row
    strip: int  # entries of the result that are collected at a time
    raw: int  # tiles of 1024 entries of each operand, as they come from HBM
    lhs: int  # rows of words of aligned blocks
    rhs: int
    sums: int  # vectors of `rows` sums
    slot_rows: int  # of a strip that are written at a time
    cores: int = 1  # TensorCores, each of which has some of the entries
    row_slots: int = 2  # parts of a strip that are written while products are computed
    converted: int = 64  # vector registers of the result that are rounded at a time
    overlap: bool = True  # operands are aligned while products are computed

    @property
    def pitch(self) -> int:
        """From one vector of sums of a panel to the next: odd, so that a register holds eight of them of one row."""
        return self.rows + 1

    @property
    def spare(self) -> int:
        """The rows of 128 float32 numbers for a strip; what no strip has is written after them."""
        return round_up(self.strip, 2 * TILE) // LANES + (WIDE + 1) * PAIR

    @property
    def flat_rows(self) -> int:
        """The rows of 128 float32 numbers of a buffer for a strip, and for what is written past it."""
        past = -(-CLAMPED * self.longest // LANES) + (WIDE + 1) * CHUNK
        return self.spare + round_up(max(past, PAIR * self.converted), 2 * PAIR)
