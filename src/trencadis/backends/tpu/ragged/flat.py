"""Copies of parts of a flat buffer of any length; copies start and end at multiples of 1024 entries.

What follows the last multiple of 1024, the tail, is an array of its own, which XLA cuts off or puts back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from trencadis.backends.tpu.indexing import Index, Ref, aligned_ds, i32

TILE = 1024  # entries


def whole(length: int) -> int:
    """The entries of a flat buffer before its tail."""
    return length // TILE * TILE


def tail_of(x: jax.Array) -> jax.Array:
    """The tail of a flat buffer, as an array of 1024 entries that end in zeros."""
    tail = lax.slice(x, (whole(x.shape[0]),), x.shape)
    return jnp.pad(tail, (0, TILE - tail.shape[0]))


class FlatCopy:
    """A copy of the entries [first, first + count) of a flat buffer to or from VMEM; it has start() and wait().

    `copy` makes the copy of a part of the buffer, or of the tail, given its place in VMEM; `first` and `count` are
    multiples of 1024.
    """

    def __init__(self, length: int, first: Index, count: Index, copy: Callable[[Ref, Index, Index], Any],
                 flat: Ref, tail: Ref) -> None:  # fmt: skip
        self.length, self.first, self.copy, self.flat, self.tail = length, first, copy, flat, tail
        self.count: Index = count
        self.main: Index = jnp.clip(i32(whole(length)) - first, i32(0), count)

    def start(self) -> None:
        """Start the copies of both parts, without waiting for them."""
        self._each("start")

    def wait(self) -> None:
        """Wait until both parts have been copied."""
        self._each("wait")

    def _each(self, what: str) -> None:
        if self.length >= TILE:

            @pl.when(self.main > i32(0))
            def copy_main() -> None:
                part = self.flat.at[aligned_ds(self.first, self.main, TILE)]
                getattr(self.copy(part, i32(0), self.main), what)()

        if self.length % TILE:

            @pl.when(self.main < self.count)
            def copy_tail() -> None:
                getattr(self.copy(self.tail, self.main, TILE), what)()


def fetch(
    flat: Ref, tail: Ref, length: int, first: Index, count: Index, target: Callable[..., Ref], sem: Ref
) -> FlatCopy:
    """The copy of entries to VMEM, where `target(start, size)` is a part of the buffer."""
    return FlatCopy(
        length, first, count, lambda part, at, size: pltpu.make_async_copy(part, target(at, size), sem), flat, tail
    )


def store(
    flat: Ref, tail: Ref, length: int, first: Index, count: Index, source: Callable[..., Ref], sem: Ref
) -> FlatCopy:
    """The copy of entries from VMEM, where `source(start, size)` is a part of the buffer."""
    return FlatCopy(
        length, first, count, lambda part, at, size: pltpu.make_async_copy(source(at, size), part, sem), flat, tail
    )
