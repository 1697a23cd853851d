"""The scalars of the kernel between its loops, in SMEM: counters, and first-in-first-out buffers in VMEM."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from trencadis.backends.tpu.indexing import Condition, Index, Ref, i32


class State:
    """Integers by their names; all are 0 at first."""

    def __init__(self, ref: Ref, names: Iterable[str]) -> None:
        self._ref, self._at = ref, {name: i for i, name in enumerate(names)}
        for i in self._at.values():
            ref[i32(i)] = i32(0)

    @staticmethod
    def scratch(names: Iterable[str]) -> Any:
        """The memory for integers of these names."""
        return pltpu.SMEM((len(tuple(names)),), jnp.int32)

    def __getitem__(self, name: str) -> Index:
        return self._ref[i32(self._at[name])]

    def __setitem__(self, name: str, value: Index) -> None:
        self._ref[i32(self._at[name])] = jnp.asarray(value, jnp.int32)

    def add(self, name: str, value: Index = 1) -> None:
        """Increase an integer of the state by a value."""
        self[name] = self[name] + i32(value)


@dataclasses.dataclass(frozen=True, slots=True)
class Ring:
    """A buffer whose pieces are released in the order in which they were placed; none goes past its end.

    Whoever places them and whoever releases them both know their sizes, and keep a place of their own.
    """

    state: State
    name: str
    total: int

    @staticmethod
    def names(name: str) -> tuple[str, ...]:
        """The names of the integers of a ring."""
        return f"{name}_head", f"{name}_tail", f"{name}_used"

    def fits(self, size: Index) -> Condition:
        """Whether there is room for another piece."""
        gap = self._gap(self.state[f"{self.name}_head"], size)
        return self.state[f"{self.name}_used"] + gap + size <= i32(self.total)

    def push(self, size: Index) -> Index:
        """Where a new piece is."""
        return self._move("head", size, i32(1))

    def front(self, size: Index) -> Index:
        """Where the oldest piece is, which has this size."""
        return self._place(self.state[f"{self.name}_tail"], size)

    def pop(self, size: Index) -> None:
        """Release the oldest piece, which has this size, so that its place can be used again."""
        self._move("tail", size, i32(-1))

    def after(self, place: Index, size: Index) -> Index:
        """Where the piece is that follows another of the same size."""
        return self._place(place + size, size)

    def _move(self, end: str, size: Index, sign: Index) -> Index:
        at = self.state[f"{self.name}_{end}"]
        place = self._place(at, size)
        self.state.add(f"{self.name}_used", sign * (self._gap(at, size) + size))
        self.state[f"{self.name}_{end}"] = place + size
        return place

    def _place(self, at: Index, size: Index) -> Index:
        return jnp.where(at + size > i32(self.total), i32(0), at)

    def _gap(self, at: Index, size: Index) -> Index:
        return jnp.where(at + size > i32(self.total), i32(self.total) - at, i32(0))
