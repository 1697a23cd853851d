"""Index arithmetic of the kernels: int32 scalars, aligned slices, and an axis cut into blocks and chunks."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

LANES = 128  # entries of the last axis in a vector register

Index = Any  # an int32 scalar inside a kernel: a traced i32[], an np.int32, or an int where it is static
Slice = Any  # what `pl.ds` gives
Ref = Any  # a Pallas reference to HBM, VMEM or SMEM, or to semaphores; Pallas has no public type for these
Value = Any  # an array inside a kernel: a tile that was loaded from a reference, or computed
Condition = Any  # a traced bool[]
Dma = Any  # what `pltpu.make_async_copy` gives: it has start() and wait()


def i32(x: Index) -> Index:
    """A Python int as np.int32, so that the x64 setting cannot widen it; traced scalars are int32 already."""
    return np.int32(x) if isinstance(x, int) else x


def aligned_ds(start: Index, size: Index, unit: int) -> Slice:
    """`pl.ds(start, size)`, with the hint that a traced start or size is a multiple of the unit."""
    if not isinstance(start, int):
        start = pl.multiple_of(start, unit)
    if not isinstance(size, int):
        size = pl.multiple_of(size, unit)
    return pl.ds(start, size)


@dataclasses.dataclass(frozen=True, slots=True)
class BlockedAxis:
    """The axis k or n cut into column blocks, and each of those into chunks; the last of each may be smaller.

    A length that is no multiple of 128 is one chunk. Then, and where all chunks are equal, sizes are static ints.
    """

    total: int
    block: int
    chunk: int

    @property
    def num_blocks(self) -> int:
        """The number of column blocks of the whole axis."""
        return -(-self.total // self.block)

    @property
    def chunks_per_block(self) -> int:
        """The number of chunks in a full column block."""
        return self.block // self.chunk

    @property
    def num_chunks(self) -> int:
        """The number of chunks of the whole axis."""
        return -(-self.total // self.chunk)

    @property
    def uniform_chunk(self) -> int | None:
        """The size of every chunk if all are equal, else None."""
        return self.chunk if self.total % self.chunk == 0 else None

    def chunks_in(self, block: Index) -> Index:
        """The number of chunks in this column block."""
        if self.total % self.block == 0:
            return i32(self.chunks_per_block)
        return jnp.minimum(i32(self.chunks_per_block), i32(self.num_chunks) - block * i32(self.chunks_per_block))

    def block_range(self, block: Index) -> tuple[Index, Index]:
        """The first column of a column block, and its number of columns."""
        return self._range(block, self.block)

    def chunk_range(self, block: Index, chunk: Index) -> tuple[Index, Index]:
        """The first column of a chunk of a column block, and its number of columns."""
        return self._range(self.chunk_index(block, chunk), self.chunk)

    def chunk_index(self, block: Index, chunk: Index) -> Index:
        """The position of a chunk of a column block among all chunks of the axis."""
        return 0 if self.num_chunks == 1 else block * i32(self.chunks_per_block) + chunk

    def _range(self, index: Index, size: int) -> tuple[Index, Index]:
        if self.total <= size:
            return 0, self.total
        start = index * i32(size)
        return start, size if self.total % size == 0 else jnp.minimum(i32(size), i32(self.total) - start)
