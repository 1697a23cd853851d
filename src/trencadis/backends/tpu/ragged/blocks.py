"""Blocks of 128 x 128 entries: how matrices of any size are stored in them, and how much room that takes.

A matrix is padded with zeros to multiples of a granule, of 128 or 256, in both dimensions. Its blocks follow one
another in the order of rows of blocks. An array of blocks has rows of 128 lanes: a block of 32-bit numbers is 128 of
them, and a block of 16-bit numbers is 64 rows of 32-bit words, each of which holds an entry of an even row and, in its
upper half, that of the odd row below it. This is how a TPU stores 16-bit numbers, too.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from trencadis.backends.prepare import round_up
from trencadis.backends.tpu.indexing import LANES

BLOCK = LANES  # rows and columns of a block


def word_rows(dtype: np.dtype[Any]) -> int:
    """The rows of 32-bit words of a block."""
    return BLOCK * dtype.itemsize // 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """An array of blocks: how many it has room for, the granule of its matrices, and the longest row that it takes."""

    blocks: int
    granule: int
    longest: int  # entries of a row of a matrix, before it is padded

    @property
    def lanes(self) -> int:
        """The blocks of the longest row."""
        return round_up(self.longest, self.granule) // BLOCK
