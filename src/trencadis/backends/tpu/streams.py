"""Copies that run beside the arithmetic: operands in, a piece ahead of their use; results out, a chunk behind it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from trencadis.backends.tpu.columns import LANES, i32, span
from trencadis.backends.tpu.walk import Place, Walk


class Ahead(NamedTuple):
    """How far a stream has come."""

    place: Place  # to fetch for next
    slot: Any  # the buffer in use
    fresh: Any  # whether it was filled for the place where the arithmetic is
    done: Any = None  # whether it is done with when that place is left


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """An operand that passes through a few buffers. A piece is fetched once and stays while its key stays the same.

    A piece may come in parts, which are waited for and given back one by one, so that arithmetic need not wait for all
    of it, nor the copies for all of the arithmetic.
    """

    walk: Walk
    key: Callable[[Place], tuple[Any, ...]]  # what the piece depends on
    copy: Callable[[Place, Any, Any], Any]  # (place, slot, part) -> the copy of one part of a piece
    parts: Callable[[Place], Any]  # how many parts a piece has there; 0 if there is nothing to fetch
    slots: int = 2

    def start(self, place: Place, slot: Any, first: Any = 0) -> None:
        """Start to fetch the piece of a place, from its part `first` on, unless the walk is over."""
        count = jnp.where(self.walk.over(place), i32(0), self.parts(place))
        lax.fori_loop(i32(first), count, lambda part, none: self.copy(place, slot, part).start(), None)

    def wait(self, place: Place, ahead: Ahead, part: Any = 0) -> None:
        """Wait for one part of the piece of a place, if it is on its way."""

        @pl.when(ahead.fresh & (i32(part) < self.parts(place)))
        def _() -> None:
            self.copy(place, ahead.slot, i32(part)).wait()

    def free(self, ahead: Ahead, part: Any, now: Any = True) -> None:
        """One part of the piece was used for the last time if the piece is done with: fetch the same part ahead."""

        @pl.when(ahead.done & jnp.logical_not(self.walk.over(ahead.place)) & now)
        def _() -> None:
            @pl.when(i32(part) < self.parts(ahead.place))
            def _() -> None:
                self.copy(ahead.place, ahead.slot, i32(part)).start()

    def leave(self, ahead: Ahead, freed: Any = 0) -> Ahead:
        """Leave a place, with the first parts of its piece freed already: fetch the others, if it is done with."""

        @pl.when(ahead.done)
        def _() -> None:
            self.start(ahead.place, ahead.slot, freed)

        slot = jnp.where(ahead.slot == i32(self.slots - 1), i32(0), ahead.slot + i32(1))
        return Ahead(self.beyond(ahead.place, ahead.done), jnp.where(ahead.done, slot, ahead.slot), ahead.done)

    def same(self, a: Place, b: Place) -> Any:
        """Whether two places share a piece."""
        same = jnp.logical_not(self.walk.over(b))
        for x, y in zip(self.key(a), self.key(b), strict=True):
            same = same & (x == y)
        return same

    def beyond(self, place: Place, go: Any = True) -> Place:
        """The next place with another piece; the place itself where `go` is false."""

        def step(state: tuple[Place, Any]) -> tuple[Place, Any]:
            at = self.walk.after(state[0])
            return at, self.same(place, at)

        going = jnp.asarray(go) & jnp.logical_not(self.walk.over(place))
        return lax.while_loop(lambda state: state[1], step, (place, going))[0]


def begin(streams: Iterable[Stream], place: Place) -> tuple[Ahead, ...]:
    """Fill all buffers of every stream, the first of each before the second of any."""
    places = {stream: place for stream in streams}
    for slot in range(max(stream.slots for stream in places)):
        for stream in (stream for stream in places if slot < stream.slots):
            stream.start(places[stream], i32(slot))
            places[stream] = stream.beyond(places[stream])
    return tuple(Ahead(at, jnp.int32(0), jnp.bool_(True)) for at in places.values())


class Outbox:
    """The way out: a ring of buffers, on their way to HBM while another is filled.

    `to(where, rows, columns)` is the reference in HBM; where is None for a copy that is waited for, of which only the
    size counts. `sizes` are the rows and columns of a copy where they are always the same, else None: then the sizes of
    what is under way are remembered in scalar memory.
    """

    def __init__(self, vmem: dict[str, Any], sizes: tuple[int | None, int | None], to: Callable[..., Any]) -> None:
        self.buffer, self.semaphores, self.state = vmem["o"], vmem["o_sem"], vmem["o_state"]
        self.sizes, self.to = sizes, to
        self.slots = self.buffer.shape[0]

    @staticmethod
    def scratch(slots: int, rows: int, columns: int, dtype: Any) -> dict[str, Any]:
        """The buffers it needs."""
        return {
            "o": pltpu.VMEM((slots, rows, columns), dtype),
            "o_sem": pltpu.SemaphoreType.DMA((slots,)),
            "o_state": pltpu.SMEM((2 * slots + 1,), jnp.int32),
        }

    def open(self) -> None:
        """Nothing is under way yet."""
        for i in range(2 * self.slots + 1):
            self.state[i] = i32(0)

    def take(self) -> Any:
        """The buffer to fill next, once it is free."""
        slot = self.state[2 * self.slots]
        self._settle(slot)
        return slot

    def send(self, where: Any, rows: Any, columns: Any) -> None:
        """Send the first rows and columns of the buffer that was taken last."""
        slot = self.state[2 * self.slots]

        @pl.when(rows > 0)
        def _() -> None:
            self._copy(slot, where, rows, columns).start()

        self.state[slot] = jnp.asarray(rows, jnp.int32)
        self.state[slot + i32(self.slots)] = jnp.asarray(columns, jnp.int32)
        self.state[2 * self.slots] = jnp.where(slot == i32(self.slots - 1), i32(0), slot + i32(1))

    def close(self) -> None:
        """Wait for all that is under way."""
        for slot in range(self.slots):
            self._settle(i32(slot))

    def _settle(self, slot: Any) -> None:
        rows, columns = self.state[slot], self.state[slot + i32(self.slots)]

        @pl.when(rows > 0)
        def _() -> None:
            self._copy(slot, None, self.sizes[0] or rows, self.sizes[1] or columns).wait()

    def _copy(self, slot: Any, where: Any, rows: Any, columns: Any) -> Any:
        source = self.buffer.at[slot, span(0, rows, 8), span(0, columns, LANES)]
        return pltpu.make_async_copy(source, self.to(where, rows, columns), self.semaphores.at[slot])
