"""Columns of k or n in blocks, and blocks in chunks; the last of each may be smaller."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

LANES = 128


def i32(x: Any) -> Any:
    """A Python int as int32 whatever the x64 setting; traced scalars are that already."""
    return np.int32(x) if isinstance(x, int) else x


def span(start: Any, size: Any, unit: int) -> Any:
    """A slice whose start and size, where they are traced, are multiples of the unit."""
    if not isinstance(start, int):
        start = pl.multiple_of(start, unit)
    if not isinstance(size, int):
        size = pl.multiple_of(size, unit)
    return pl.ds(start, size)


@dataclasses.dataclass(frozen=True, slots=True)
class Columns:
    """An axis cut up. A total that is no multiple of 128 is one chunk; then, and where all is even, sizes are ints."""

    total: int
    block: int
    chunk: int

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return -(-self.total // self.block)

    @property
    def per_block(self) -> int:
        """Chunks of a whole block."""
        return self.block // self.chunk

    @property
    def chunks(self) -> int:
        """How many chunks there are."""
        return -(-self.total // self.chunk)

    @property
    def even(self) -> int | None:
        """The size of every chunk, if all have the same."""
        return self.chunk if self.total % self.chunk == 0 else None

    def count(self, block: Any) -> Any:
        """Chunks of this block."""
        if self.total % self.block == 0:
            return i32(self.per_block)
        return jnp.minimum(i32(self.per_block), i32(self.chunks) - block * i32(self.per_block))

    def of_block(self, block: Any) -> tuple[Any, Any]:
        """First column and number of columns of a block."""
        return self._cut(block, self.block)

    def of_chunk(self, block: Any, part: Any) -> tuple[Any, Any]:
        """First column and number of columns of a chunk of a block."""
        return self._cut(self.index(block, part), self.chunk)

    def index(self, block: Any, part: Any) -> Any:
        """The number of a chunk among all."""
        return 0 if self.chunks == 1 else block * i32(self.per_block) + part

    def _cut(self, index: Any, size: int) -> tuple[Any, Any]:
        if self.total <= size:
            return 0, self.total
        at = index * i32(size)
        return at, size if self.total % size == 0 else jnp.minimum(i32(size), i32(self.total) - at)
