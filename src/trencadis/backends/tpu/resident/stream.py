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
from trencadis.backends.tpu.ragged.flat import TILE, fetch
from trencadis.backends.tpu.resident import align
from trencadis.backends.tpu.resident.align import Operand
from trencadis.backends.tpu.resident.sizes import CHUNK, PAIR
from trencadis.backends.tpu.resident.state import Ring, State
from trencadis.backends.tpu.resident.table import Table

IN_FLIGHT = 8  # copies
Put = Callable[[int, int, int, Value], None]  # of a pair of eight rows; the others are those of `align.Put`
CURSOR = ("entry", "lhs", "segment")  # which matrix is next, and which segment of it; "lhs" is 1 for lhs, 0 for rhs


class Stream:
    """The segments of both operands: copied from HBM as they are, then aligned."""

    NAMES = (
        *(f"{what}_{name}" for what in ("fetch", "align") for name in CURSOR),
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
        """The memory of both operands, by name; no one's chunk is read past the last segment."""
        sizes, packing = operands[0].sizes, operands[0].packing
        found = {
            "raw": pltpu.VMEM((sizes.raw * TILE + CHUNK * LANES * packing,), operands[0].dtype),
            "raw_sem": pltpu.SemaphoreType.DMA((IN_FLIGHT,)),
            "flying": pltpu.SMEM((IN_FLIGHT,), jnp.int32),  # entries of each copy
            "spread": align.spread_scratch(sizes),
            "carry": align.carry_scratch(sizes),
            "blocks": pltpu.VMEM((sizes.rhs + sizes.lhs + sizes.rows, LANES), jnp.int32),  # and for vectors of no one
        }
        if sizes.overlap:
            found["staged"] = align.staged_scratch(sizes)
        return found

    # -- which segment is next -----------------------------------------------------------------------------------------

    def _cursor(self, what: str) -> tuple[Index, Index, Index]:
        entry, lhs, segment = (self.state[f"{what}_{name}"] for name in CURSOR)
        return entry, lhs, segment

    def _of(self, lhs: Index, function: Callable[[Operand], Any]) -> Index:
        """A number of one of the operands, by which is the next."""
        rhs, left = (function(operand) for operand in self.operands)
        return jnp.where(lhs > i32(0), left, rhs)

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

    # -- copies --------------------------------------------------------------------------------------------------------

    def fetch(self) -> None:
        """Start the copies of the next segments for which there is room."""

        def step(go: Condition) -> Condition:
            del go
            entry, lhs, segment = self._cursor("fetch")
            there = segment < self._of(lhs, lambda x: x.fetched(self.table, entry))

            @pl.when(there)
            def start() -> None:
                place = self.raw.push(self._of(lhs, lambda x: x.room(self.table, entry)))
                number = self.state["fetch_number"]
                self._each(lhs, lambda x: self._start(x, entry, segment, place, number))
                self.state.add("fetch_number")

            count = self._of(lhs, lambda x: x.fetched(self.table, entry))
            self._advance("fetch", segment + i32(1) >= count)
            return self._can_fetch()

        lax.while_loop(lambda go: go, step, self._can_fetch())

    def _can_fetch(self) -> Condition:
        entry, lhs, _ = self._cursor("fetch")
        flying = self.state["fetch_number"] - self.state["align_number"] < i32(IN_FLIGHT)
        fits = self.raw.fits(self._of(lhs, lambda x: x.room(self.table, entry)))
        return (entry < self.table.entries) & flying & fits

    def _start(self, operand: Operand, entry: Index, segment: Index, place: Index, number: Index) -> None:
        first, count, _ = operand.window(self.table, entry, segment)

        def target(at: Index, entries: Index) -> Ref:
            return self.vmem["raw"].at[aligned_ds(place * i32(TILE) + at, entries, TILE)]

        flat, tail = self.hbm[operand.name], self.hbm[f"{operand.name}_tail"]
        slot = number & i32(IN_FLIGHT - 1)
        fetch(flat, tail, operand.length, first, count, target, self.vmem["raw_sem"].at[slot]).start()
        self.vmem["flying"][slot] = count

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
        room = [ring.fits(x.piece(self.table, entry)) for ring, x in zip(self.rings, self.operands, strict=True)]
        begun = (self.state["align_chunk"] > i32(0)) | jnp.logical_not(self._opens())
        return (entry < self.table.entries) & (begun | jnp.where(lhs > i32(0), room[1], room[0]))

    def _opens(self) -> Condition:
        """Whether the segment begins a piece of the room for blocks: a panel of a streamed operand, or a matrix."""
        _, lhs, segment = self._cursor("align")
        first = segment == i32(0)
        return (first | (lhs > i32(0))) if self.operands[1].streamed else first

    def has_rows(self) -> Condition:
        """Whether the next segment is not only padding."""
        entry, lhs, segment = self._cursor("align")
        return segment < self._of(lhs, lambda x: x.fetched(self.table, entry))

    def prepare(self) -> None:
        """Take room for the blocks of the next chunk, and wait for its rows."""
        entry, lhs, _ = self._cursor("align")

        @pl.when(self.state["align_chunk"] == i32(0))
        def first_chunk() -> None:
            @pl.when(self._opens())
            def take() -> None:
                for i, (ring, x) in enumerate(zip(self.rings, self.operands, strict=True)):

                    @pl.when(lhs == i32(i))
                    def _(ring: Ring = ring, x: Operand = x) -> None:
                        self.state["align_place"] = ring.push(x.piece(self.table, entry))

            pl.when(self.has_rows())(self._wait)

    def stager(self, real: Condition) -> Callable[[int], None]:
        """A function that aligns 16 rows of the next chunk and stages them; those of no one if not real."""
        return self.align(self.state["align_chunk"], real, self._staged)

    def align(self, chunk: Index, real: Condition, put: Put) -> Callable[[int], None]:
        """A function that aligns 16 rows of a chunk, by their number; those of no one if not real."""
        entry, lhs, segment = self._cursor("align")
        packing = self.operands[0].packing
        place = self.raw.front(self._of(lhs, lambda x: x.room(self.table, entry)))
        offset = self._of(lhs, lambda x: x.window(self.table, entry, segment)[2])
        stride = self._of(lhs, lambda x: x.field(self.table, "stride", entry))
        rows = self._of(lhs, lambda x: x.field(self.table, "rows", entry))
        at = place * i32(TILE) + offset + chunk * i32(CHUNK * LANES * packing)
        valid = rows - segment * i32(self.sizes.rows)
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
        entry, lhs, _ = self._cursor("align")
        packing, words = self.operands[0].packing, self.operands[0].words
        count = self._of(lhs, lambda x: x.vectors(self.table, entry))
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
        entry, lhs, segment = self._cursor("align")
        packing, words, piece = self.operands[0].packing, self.operands[0].words, self.state["align_place"]
        first = (chunk * i32(CHUNK) - i32(1)) * i32(packing)
        place = self._of(lhs, lambda x: x.place(self.table, entry, segment, piece))
        return first, place + first * i32(words), place

    def finish_staged(self) -> None:
        """Copy a chunk that was staged to its blocks, and go on to the next."""
        first, to, _ = self._chunk(self.state["align_chunk"])
        entry, lhs, _ = self._cursor("align")
        packing = self.operands[0].packing
        count = self._of(lhs, lambda x: x.vectors(self.table, entry)) - first
        vectors = (first < i32(0)).astype(jnp.int32), jnp.minimum(align.over(count, packing), i32(CHUNK))

        @pl.when(self.has_rows())
        def _() -> None:
            align.commit(self.operands[0], self.vmem["staged"], self.vmem["blocks"], to, vectors)

        self.finish()

    def finish(self) -> None:
        """Go on to the next chunk; what is past the end of a segment along k becomes zeros."""
        entry, lhs, segment = self._cursor("align")
        chunk, real = self.state["align_chunk"], self.has_rows()
        last = jnp.logical_not(real) | (chunk + i32(1) >= self._of(lhs, lambda x: x.chunks(self.table, entry)))
        self.state["align_chunk"] = jnp.where(last, i32(0), chunk + i32(1))

        @pl.when(last)
        def next_segment() -> None:
            _, _, place = self._chunk(i32(0))
            vectors = self._of(lhs, lambda x: x.vectors(self.table, entry))
            kept = self._of(lhs, lambda x: x.kept(self.table, entry))
            first = jnp.where(real, kept, i32(0))
            align.clear(self.vmem["blocks"], self.operands[0].words, place, first, vectors)

            @pl.when(real)
            def release() -> None:
                self.raw.pop(self._of(lhs, lambda x: x.room(self.table, entry)))
                self.state.add("align_number")

            count = self._of(lhs, lambda x: x.segments(self.table, entry))
            self._advance("align", segment + i32(1) >= count)
            self.fetch()

    def step(self) -> None:
        """Align what is left of a segment by itself."""
        self.prepare()
        entry, lhs, _ = self._cursor("align")
        chunks = self._of(lhs, lambda x: x.chunks(self.table, entry))

        def align_chunk(chunk: Index, none: None) -> None:
            pair = self.align(chunk, jnp.bool_(True), self._direct(chunk))
            for number in range(self.sizes.rows // PAIR):
                pair(number)

        end = jnp.where(self.has_rows(), chunks, i32(0))
        lax.fori_loop(self.state["align_chunk"], end, align_chunk, None)
        self.state["align_chunk"] = chunks - i32(1)
        self.finish()
