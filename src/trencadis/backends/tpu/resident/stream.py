"""The operands on their way to VMEM, in the order in which products need them: rhs of an entry, then its lhs.

Copies of later segments are under way while one is aligned, as far as there is room, and blocks of later entries are
there while products of an earlier one are computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from trencadis.backends.tpu.indexing import LANES, Condition, Index, Ref, Value, aligned_ds, i32
from trencadis.backends.tpu.ragged.flat import TILE, FlatCopy, fetch
from trencadis.backends.tpu.resident import align
from trencadis.backends.tpu.resident.align import Operand
from trencadis.backends.tpu.resident.sizes import CHUNK, PAIR
from trencadis.backends.tpu.resident.state import Ring, State
from trencadis.backends.tpu.resident.table import MATRIX, Table

IN_FLIGHT = 8  # copies
Put = Callable[[int, int, int, Value], None]  # of a pair of eight rows; the others are those of `align.Put`
CURSOR = ("entry", "lhs", "segment")  # which matrix is next, and which segment of it; "lhs" is 1 for lhs, 0 for rhs
NUMBERS = {  # of the matrix that is next, which are kept in the state
    "fetch": (*MATRIX, "fetched", "room"),
    "align": (*MATRIX, "fetched", "room", "segments", "chunks", "vectors", "kept", "piece", "apart"),
}


class Stream:
    """The segments of both operands: copied from HBM as they are, then aligned."""

    NAMES = (
        *(f"{what}_{name}" for what, names in NUMBERS.items() for name in (*CURSOR, *names)),
        "fetch_number", "align_number", "align_chunk", "align_place",
        *Ring.names("raw"), *Ring.names("lhs"), *Ring.names("rhs"),
    )  # fmt: skip

    def __init__(
        self, operands: tuple[Operand, Operand], table: Table, state: State, hbm: dict[str, Ref], vmem: dict[str, Ref]
    ) -> None:
        self.operands, self.table, self.state, self.hbm, self.vmem = operands, table, state, hbm, vmem
        self.sizes = operands[0].sizes
        self.raw = Ring(state, "raw", self.sizes.raw)
        self.rings = tuple(Ring(state, each.name, getattr(self.sizes, each.name)) for each in operands)

    @staticmethod
    def scratch(operands: tuple[Operand, Operand]) -> dict[str, Any]:
        """The memory of both operands, by name; a chunk that is not used is read past the last segment."""
        sizes, packing = operands[0].sizes, operands[0].packing
        found = {
            "raw": pltpu.VMEM((sizes.raw * TILE + CHUNK * LANES * packing,), operands[0].dtype),
            "raw_sem": pltpu.SemaphoreType.DMA((IN_FLIGHT,)),
            "flying": pltpu.SMEM((IN_FLIGHT,), jnp.int32),  # entries of each copy
            "spread": align.spread_scratch(sizes),
            "carry": align.carry_scratch(sizes),
            "blocks": pltpu.VMEM((sizes.rhs + sizes.lhs + sizes.rows, LANES), jnp.int32),  # and for unused vectors
        }
        if sizes.overlap:
            found["staged"] = align.staged_scratch(sizes)
        return found

    # -- which segment is next -----------------------------------------------------------------------------------------

    def _cursor(self, what: str) -> tuple[Index, Index, Index]:
        entry, lhs, segment = (self.state[f"{what}_{name}"] for name in CURSOR)
        return entry, lhs, segment

    def start(self) -> None:
        """Begin with the first entry of this core."""
        for what in NUMBERS:
            self.state[f"{what}_entry"] = self.table.first
            self._read(what)
        self.fetch()

    def _read(self, what: str) -> None:
        """Read the numbers of the matrix that is next."""
        entry, lhs, _ = self._cursor(what)
        for name in NUMBERS[what]:
            rhs, left = (operand.number(self.table, name, entry) for operand in self.operands)
            self.state[f"{what}_{name}"] = jnp.where(lhs > i32(0), left, rhs)

    def _each(self, lhs: Index, function: Callable[[Operand], None]) -> None:
        """Do something for the operand that is the next."""
        for i, operand in enumerate(self.operands):
            pl.when(lhs == i32(i))(functools.partial(function, operand))

    def _advance(self, what: str, last: Condition) -> None:
        """Go on to the next segment; after the last one of a matrix, to the next matrix."""
        entry, lhs, segment = self._cursor(what)
        self.state[f"{what}_segment"] = jnp.where(last, i32(0), segment + i32(1))
        self.state[f"{what}_entry"] = jnp.where(last, entry + lhs, entry)
        self.state[f"{what}_lhs"] = jnp.where(last, i32(1) - lhs, lhs)
        # a loop, since of a condition the compiler would issue all instructions in either case
        lax.fori_loop(i32(0), last.astype(jnp.int32), lambda i, none: self._read(what), None)

    # -- copies --------------------------------------------------------------------------------------------------------

    def fetch(self) -> None:
        """Start the copies of the next segments for which there is room."""

        def step(go: Condition) -> Condition:
            del go
            _, lhs, segment = self._cursor("fetch")
            count = self.state["fetch_fetched"]

            @pl.when(segment < count)
            def start() -> None:
                place, window = self.raw.push(self.state["fetch_room"]), self._window(segment)
                slot = self.state["fetch_number"] & i32(IN_FLIGHT - 1)
                self._each(lhs, lambda x: self._copy(x, window, place, slot).start())
                self.vmem["flying"][slot] = window[1]
                self.state.add("fetch_number")

            self._advance("fetch", segment + i32(1) >= count)
            return self._can_fetch()

        lax.while_loop(lambda go: go, step, self._can_fetch())

    def _can_fetch(self) -> Condition:
        flying = self.state["fetch_number"] - self.state["align_number"] < i32(IN_FLIGHT)
        fits = self.raw.fits(self.state["fetch_room"])
        return (self.state["fetch_entry"] < self.table.end) & flying & fits

    def _window(self, segment: Index) -> tuple[Index, Index]:
        """The entries that hold a segment that is fetched: the first, and how many."""
        first, stride, all_rows, columns = (self.state[f"fetch_{name}"] for name in MATRIX)
        row = segment * i32(self.sizes.rows)
        rows = jnp.clip(all_rows - row, i32(1), i32(self.sizes.rows))
        start = first + row * stride
        end = start + (rows - i32(1)) * stride + columns
        first = start & i32(-TILE)
        count = (end - first + i32(TILE - 1)) & i32(-TILE)
        return pl.multiple_of(first, TILE), pl.multiple_of(count, TILE)

    def _copy(self, operand: Operand, window: tuple[Index, Index], place: Index, slot: Index) -> FlatCopy:
        def target(at: Index, entries: Index) -> Ref:
            return self.vmem["raw"].at[aligned_ds(place * i32(TILE) + at, entries, TILE)]

        flat, tail = self.hbm[operand.name], self.hbm[f"{operand.name}_tail"]
        return fetch(flat, tail, operand.length, *window, target, self.vmem["raw_sem"].at[slot])

    def _wait(self) -> None:
        """Wait for the oldest copy: all of its parts count for one semaphore, so only their size matters."""
        slot = self.state["align_number"] & i32(IN_FLIGHT - 1)
        part = self.vmem["raw"].at[aligned_ds(i32(0), self.vmem["flying"][slot], TILE)]
        pltpu.make_async_copy(part, part, self.vmem["raw_sem"].at[slot]).wait()

    # -- alignment -----------------------------------------------------------------------------------------------------

    def aligned(self, entry: Index, panel: Index) -> Condition:
        """Whether the operands of a panel of an entry are aligned."""
        at, lhs, segment = self._cursor("align")
        if not self.operands[1].streamed:
            return at > entry
        return (at > entry) | ((at == entry) & (lhs > i32(0)) & (segment > panel))

    def ready(self) -> Condition:
        """Whether there is another chunk, and room for its blocks."""
        entry, lhs, _ = self._cursor("align")
        room = [ring.fits(self.state["align_piece"]) for ring in self.rings]
        begun = (self.state["align_chunk"] > i32(0)) | jnp.logical_not(self._opens())
        return (entry < self.table.end) & (begun | jnp.where(lhs > i32(0), room[1], room[0]))

    def _opens(self) -> Condition:
        """Whether the segment begins a piece of the room for blocks: a panel of a streamed operand, or a matrix."""
        _, lhs, segment = self._cursor("align")
        first = segment == i32(0)
        return (first | (lhs > i32(0))) if self.operands[1].streamed else first

    def has_rows(self) -> Condition:
        """Whether the next segment is not only padding."""
        return self.state["align_segment"] < self.state["align_fetched"]

    def prepare(self) -> None:
        """Take room for the blocks of the next chunk, and wait for its rows."""

        def take(ring: Ring) -> None:
            self.state["align_place"] = ring.push(self.state["align_piece"])

        @pl.when(self.state["align_chunk"] == i32(0))
        def first_chunk() -> None:
            for i, ring in enumerate(self.rings):
                pl.when(self._opens() & (self.state["align_lhs"] == i32(i)))(functools.partial(take, ring))
            pl.when(self.has_rows())(self._wait)

    def stager(self, real: Condition) -> Callable[[int], None]:
        """A function that aligns 16 rows of the next chunk and stages them; unused rows if not real."""
        return self.align(self.state["align_chunk"], real, self._staged)

    def align(self, chunk: Index, real: Condition, put: Put) -> Callable[[int], None]:
        """A function that aligns 16 rows of a chunk, by their number; unused rows if not real."""
        packing, segment = self.operands[0].packing, self.state["align_segment"]
        start, stride, rows, _ = (self.state[f"align_{name}"] for name in MATRIX)
        first = segment * i32(self.sizes.rows)
        offset = (start + first * stride) & i32(TILE - 1)
        at = self.raw.front(self.state["align_room"]) * i32(TILE) + offset + chunk * i32(CHUNK * LANES * packing)
        valid = rows - first
        at, stride = jnp.where(real, at, i32(self.sizes.raw * TILE)), jnp.where(real, stride, i32(0))

        def pair(number: int) -> None:
            first = at + i32(number * PAIR) * stride
            align.align_pair(self.vmem, packing, number, (first, stride, valid), functools.partial(put, number))

        return pair

    def _staged(self, pair: int, vector: int, half: int, words: Value) -> None:
        self.vmem["staged"][2 * vector + half, pl.ds(pair * CHUNK, CHUNK), :] = words

    def _direct(self, chunk: Index) -> Put:
        """A function that stores what is aligned of a chunk where it belongs."""
        first, place, _ = self._chunk(chunk)
        packing, words, count = self.operands[0].packing, self.operands[0].words, self.state["align_vectors"]
        targets = []
        for v in range(0, CHUNK * packing, packing):
            there = (first + i32(v) >= i32(0)) & (first + i32(v) < count)
            targets.append(jnp.where(there, place + i32(v * words), i32(self.sizes.rhs + self.sizes.lhs)))

        even: dict[int, Value] = {}

        def store(vector: int, row: int, value: Value) -> None:
            self.vmem["blocks"][aligned_ds(targets[vector] + i32(row), CHUNK, CHUNK), :] = value

        def put(pair: int, vector: int, half: int, value: Value) -> None:
            if packing == 1:
                store(vector, pair * PAIR + half * CHUNK, value)
            elif half == 0:
                even[vector] = value
            else:
                for i, words_of_two in enumerate(align.paired(even.pop(vector), value)):
                    store(vector, i * words + pair * CHUNK, words_of_two)

        return put

    def _chunk(self, chunk: Index) -> tuple[Index, Index, Index]:
        """The first vector of a chunk, where it belongs, and where its segment is."""
        _, lhs, segment = self._cursor("align")
        packing, words = self.operands[0].packing, self.operands[0].words
        first = (chunk * i32(CHUNK) - i32(1)) * i32(packing)
        base = jnp.where(lhs > i32(0), *(i32(operand.base) for operand in reversed(self.operands)))
        place = base + self.state["align_place"] + segment * self.state["align_apart"]
        return first, place + first * i32(words), place

    def finish_staged(self) -> None:
        """Copy a chunk that was staged to its blocks, and go on to the next."""
        first, to, _ = self._chunk(self.state["align_chunk"])
        packing, count = self.operands[0].packing, self.state["align_vectors"] - first
        vectors = (first < i32(0)).astype(jnp.int32), jnp.minimum(align.over(count, packing), i32(CHUNK))

        @pl.when(self.has_rows())
        def commit() -> None:
            align.commit(self.operands[0], self.vmem["staged"], self.vmem["blocks"], to, vectors)

        self.finish()

    def finish(self) -> None:
        """Go on to the next chunk; what is past the end of a segment along k becomes zeros."""
        state = self.state
        chunk, real = state["align_chunk"], self.has_rows()
        last = jnp.logical_not(real) | (chunk + i32(1) >= state["align_chunks"])
        state["align_chunk"] = jnp.where(last, i32(0), chunk + i32(1))

        @pl.when(last)
        def next_segment() -> None:
            _, _, place = self._chunk(i32(0))
            first = jnp.where(real, state["align_kept"], i32(0))
            align.clear(self.vmem["blocks"], self.operands[0].words, place, first, state["align_vectors"])

            @pl.when(real)
            def release() -> None:
                self.raw.pop(state["align_room"])
                state.add("align_number")

            self._advance("align", state["align_segment"] + i32(1) >= state["align_segments"])
            self.fetch()

    def step(self) -> None:
        """Align what is left of a segment by itself."""
        self.prepare()
        chunks = self.state["align_chunks"]

        def align_chunk(chunk: Index, none: None) -> None:
            pair = self.align(chunk, jnp.bool_(True), self._direct(chunk))
            for number in range(self.sizes.rows // PAIR):
                pair(number)

        end = jnp.where(self.has_rows(), chunks, i32(0))
        lax.fori_loop(self.state["align_chunk"], end, align_chunk, None)
        self.state["align_chunk"] = chunks - i32(1)
        self.finish()
