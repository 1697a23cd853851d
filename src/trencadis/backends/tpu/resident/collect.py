"""How sums in VMEM become rows of the flat result: `alpha * product + bias + beta * existing`, rounded once.

A row's vectors are rotated by the lane at which it starts, and stored twice: their first lanes end one vector of the
flat buffer, the others start the next. Pieces of the flat result at the ends of a strip have entries of others: those
of the strip before are kept from it, and unowned entries from the existing values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from trencadis.backends.prepare import round_up
from trencadis.backends.tpu.indexing import LANES, Condition, Index, Ref, Value, aligned_ds, i32
from trencadis.backends.tpu.ragged.flat import TILE, FlatCopy, fetch, store
from trencadis.backends.tpu.resident import seam
from trencadis.backends.tpu.resident.epilogue import Epilogue
from trencadis.backends.tpu.resident.products import Products
from trencadis.backends.tpu.resident.sizes import CHUNK, CLAMPED, WIDE, Sizes
from trencadis.backends.tpu.resident.state import State
from trencadis.backends.tpu.resident.strips import PIECE, Strip, Strips
from trencadis.core.dtypes import cast

BUFFERS = 3  # for strips of the result: one is fetched, one converted, one written back
FILLED = 32 * PIECE  # entries that are filled with zeros at a time
ROWS = PIECE // LANES  # of float32 numbers of a piece
BATCH = 16  # pieces that are loaded before any of them is stored


class Collector:
    """The strip whose rows are written, and the one before, which is converted."""

    NAMES = (
        "row_entry", "row_number", "row_slot", "row_slots", "row_open",
        "convert_entry", "convert_number", "convert_slot", "convert_slots", "convert_open",
        "strips", "end",
    )  # fmt: skip

    def __init__(
        self, epilogue: Epilogue, products: Products, state: State, hbm: dict[str, Ref], vmem: dict[str, Ref]
    ) -> None:
        self.epilogue, self.products, self.state, self.hbm, self.vmem = epilogue, products, state, hbm, vmem
        self.sizes: Sizes = products.sizes
        self.table = products.table
        self.strips = Strips(self.table, self.sizes)

    @staticmethod
    def scratch(epilogue: Epilogue, sizes: Sizes) -> dict[str, Any]:
        """The memory of the strips, by name."""
        buffers: dict[str, Any] = {
            "flat": pltpu.VMEM((2 * sizes.flat_rows, LANES), jnp.float32),
            "result": pltpu.VMEM((BUFFERS * Collector.room(sizes),), epilogue.dtype),
            "result_sem": pltpu.SemaphoreType.DMA((BUFFERS,)),
            "written": pltpu.SMEM((2 * BUFFERS,), jnp.int32),  # the first entry of each buffer in flight, and how many
            "edges": pltpu.VMEM((3 * PIECE,), epilogue.dtype),  # existing values of both ends, and what is kept
        }
        if sizes.cores > 1:
            buffers["seam_sem"] = pltpu.SemaphoreType.DMA
        if epilogue.accumulate:
            buffers["existing_sem"] = pltpu.SemaphoreType.DMA((BUFFERS,))
        else:
            buffers["zeros"] = pltpu.VMEM((FILLED,), epilogue.dtype)
            buffers["zeros_sem"] = pltpu.SemaphoreType.DMA
        if epilogue.bias:
            buffers["bias"] = pltpu.VMEM((epilogue.bias_rows, LANES), jnp.float32)
            buffers["bias_sem"] = pltpu.SemaphoreType.DMA
        return buffers

    @staticmethod
    def room(sizes: Sizes) -> int:
        """The entries of a buffer for a strip of the result, and for what is converted past it."""
        return round_up(sizes.strip, PIECE) + (2 + sizes.converted) * PIECE

    # -- what is collected next ----------------------------------------------------------------------------------------

    def _strip(self, what: str) -> Strip:
        return Strip(self.state[f"{what}_entry"], self.state[f"{what}_number"])

    def rows_left(self) -> Index:
        """The slots of rows that can be written: none if the products of their panel are not complete."""
        strip, state = self._strip("row"), self.state
        complete = (strip.entry < state["entry"]) | (self.strips.panel(strip) < state["done"])
        return jnp.where((state["row_open"] > i32(0)) & complete, state["row_slots"] - state["row_slot"], i32(0))

    def converts_left(self) -> Index:
        """The slots that can be converted."""
        return self.state["convert_slots"] - self.state["convert_slot"]

    def _turns(self) -> Condition:
        """Whether both strips are complete."""
        rows = self.state["row_slot"] >= self.state["row_slots"]
        work = (self.state["row_open"] > i32(0)) | (self.state["convert_open"] > i32(0))
        return rows & (self.converts_left() <= i32(0)) & work

    def ready(self) -> Condition:
        """Whether something can be collected."""
        return (self.rows_left() > i32(0)) | (self.converts_left() > i32(0)) | self._turns()

    def finished(self) -> Condition:
        """Whether all strips are collected."""
        return (self.state["row_open"] == i32(0)) & (self.state["convert_open"] == i32(0))

    def start(self) -> None:
        """Begin to collect the first strip, with buffers that hold nothing yet."""
        for slot in range(BUFFERS):
            self.vmem["written"][i32(2 * slot + 1)] = i32(0)
        if not self.epilogue.accumulate:
            self.vmem["zeros"][...] = jnp.zeros((FILLED,), self.epilogue.dtype)
        table, state = self.table, self.state
        state["row_entry"] = table.first
        begin = seam.begin(table, self.epilogue.length)
        state["end"] = jnp.where(i32(table.core) > i32(0), begin, i32(0))
        pl.when(table.first < table.end)(self._open)

    def step(self) -> None:
        """Collect by itself what can be collected of both strips."""
        rows, converts = self.rows_left(), self.converts_left()

        def write(slot: Index, none: None) -> None:
            write_row = self.row_writer(slot, jnp.bool_(True))
            for row in range(self.sizes.slot_rows):
                write_row(row)

        def convert(slot: Index, none: None) -> None:
            convert_some = self.converter(slot, jnp.bool_(True))
            for first in range(0, self.sizes.converted, BATCH):
                convert_some(range(first, min(first + BATCH, self.sizes.converted)))

        lax.fori_loop(i32(0), rows, write, None)
        lax.fori_loop(i32(0), converts, convert, None)
        self.advance(rows, converts)

    def advance(self, rows: Index, converts: Index) -> None:
        """Count the slots that were written and converted, and go on to the next strips if both are complete."""
        state = self.state
        state.add("row_slot", rows)
        state.add("convert_slot", converts)
        strip = self._strip("row")
        complete = (rows > i32(0)) & (state["row_slot"] >= state["row_slots"])

        @pl.when(complete & self.strips.ends_panel(strip))
        def release() -> None:
            self.products.sums.pop(self.products.vectors(strip.entry))

        pl.when(self._turns())(self._turn)

    def _turn(self) -> None:
        """Finish the strip that was converted, and go on to convert the one whose rows were written."""
        state = self.state
        pl.when(state["convert_open"] > i32(0))(self._close)
        for name in ("open", "entry", "number"):
            state[f"convert_{name}"] = state[f"row_{name}"]
        state["convert_slot"] = state["convert_slots"] = i32(0)

        @pl.when(state["row_open"] > i32(0))
        def begin() -> None:
            strip = self._strip("row")
            state.add("strips")
            pieces = self.strips.pieces(strip)
            state["convert_slots"] = lax.div(pieces + i32(self.sizes.converted - 1), i32(self.sizes.converted))
            self._arrive(strip, pieces)
            after = self.strips.following(strip)
            state["row_entry"], state["row_number"] = after.entry, after.number
            state["row_open"] = state["row_slot"] = state["row_slots"] = i32(0)
            pl.when(after.entry < self.table.end)(self._open)

    def _open(self) -> None:
        """Begin to write the rows of the next strip: its existing values are fetched meanwhile."""
        state, strip = self.state, self._strip("row")
        rows, chunks = self.strips.slots(strip)
        state["row_open"], state["row_slots"] = i32(1), rows * chunks
        slot = self._buffer(state["strips"])
        self._wait_for_result(slot)
        if self.epilogue.accumulate:
            self._existing(strip, slot).start()
        if self.epilogue.bias:
            pl.when(strip.number == i32(0))(
                lambda: self.epilogue.fetch_bias(self.table, strip.entry, self.hbm, self.vmem)
            )

    def _buffer(self, number: Index) -> Index:
        return lax.rem(number, i32(BUFFERS))

    # -- copies --------------------------------------------------------------------------------------------------------

    def _span(self, strip: Strip) -> tuple[Index, Index]:
        """The pieces of a strip, as its first entry and how many; past the end of the flat result there are none."""
        first = self.strips.bounds(strip)[0] & i32(-PIECE)
        count = self.strips.pieces(strip) * i32(PIECE)
        left = i32(round_up(self.epilogue.length, TILE)) - first
        return pl.multiple_of(first, PIECE), pl.multiple_of(jnp.minimum(count, left), TILE)

    def _part(self, slot: Index, skipped: Index = 0) -> Any:
        first = slot * i32(Collector.room(self.sizes)) + i32(skipped)

        def part(at: Index, entries: Index) -> Ref:
            return self.vmem["result"].at[aligned_ds(first + at, entries, TILE)]

        return part

    def _existing(self, strip: Strip, slot: Index) -> FlatCopy:
        first, count = self._span(strip)
        flat, tail = self.hbm["out"], self.hbm["out_tail"]
        return fetch(
            flat, tail, self.epilogue.length, first, count, self._part(slot), self.vmem["existing_sem"].at[slot]
        )

    def _result(self, first: Index, count: Index, slot: Index, skipped: Index = 0) -> FlatCopy:
        flat, tail = self.hbm["out"], self.hbm["out_tail"]
        first, count = pl.multiple_of(first, PIECE), pl.multiple_of(count, TILE)
        part, sem = self._part(slot, skipped), self.vmem["result_sem"].at[slot]
        return store(flat, tail, self.epilogue.length, first, count, part, sem)

    def _wait_for_result(self, slot: Index) -> None:
        first, count = (self.vmem["written"][slot * i32(2) + i32(i)] for i in range(2))
        pl.when(count > i32(0))(lambda: self._result(first, count, slot).wait())
        self.vmem["written"][slot * i32(2) + i32(1)] = i32(0)

    def drain(self) -> None:
        """Wait for all copies in flight, and fill what follows the last strip."""
        for slot in range(BUFFERS):
            self._wait_for_result(i32(slot))
        self._fill(self.state["end"], seam.limit(self.table, self.epilogue.length))

    def _fill(self, end: Index, high: Index) -> None:
        """Write zeros to the pieces after those of a strip that ended there, up to those of the next."""
        if self.epilogue.accumulate:
            return
        low = (end + i32(PIECE - 1)) & i32(-PIECE)

        def part(at: Index, entries: Index) -> Ref:
            return self.vmem["zeros"].at[aligned_ds(at, entries, TILE)]

        def copy(i: Index) -> FlatCopy:
            first = pl.multiple_of(low + i * i32(FILLED), PIECE)
            count = pl.multiple_of(jnp.minimum(i32(FILLED), high - first), TILE)
            return store(
                self.hbm["out"], self.hbm["out_tail"], self.epilogue.length, first, count, part, self.vmem["zeros_sem"]
            )

        count = lax.div(jnp.maximum(high - low, i32(0)) + i32(FILLED - 1), i32(FILLED))
        lax.fori_loop(i32(0), count, lambda i, none: copy(i).start(), None)
        lax.fori_loop(i32(0), count, lambda i, none: copy(i).wait(), None)

    # -- rows ----------------------------------------------------------------------------------------------------------

    def row_writer(self, ahead: Index, real: Condition) -> Callable[[int], None]:
        """A function that writes a row of a slot, some slots ahead of the next, by its number in the slot.

        If the slot is not real, it writes to a place that is not read. Rows are written in their order, two chunks of
        each that share their address, those first that are at the end of rows: what is written past the end of a row is
        then overwritten by the next. If the chunks of a row are an odd number, the second is written twice.
        """
        sizes, strip = self.sizes, self._strip("row")
        n, slot = self.table.field("n", strip.entry), self.state["row_slot"] + ahead
        parts, _ = self.strips.slots(strip)
        across = lax.div(slot, parts)
        chunk = jnp.maximum(self.strips.chunks(strip) - i32(WIDE) - across * i32(WIDE), i32(0))
        row = (slot - across * parts) * i32(sizes.slot_rows)
        flat = lax.rem(self.state["strips"], i32(2)) * i32(sizes.flat_rows * LANES)
        last = flat + i32(sizes.spare * LANES)  # where rows go that the strip does not have
        at = flat + (self.strips.bounds(strip)[0] & i32(PIECE - 1)) + row * n + chunk * i32(CHUNK * LANES)
        at, n = jnp.where(real, at, last), jnp.where(real, n, i32(0))
        chunk = jnp.where(real, chunk, i32(0))
        inside = lax.rem(self.strips.first_row(strip), i32(sizes.rows)) + row
        vectors = self.products.sums.front(self.products.vectors(strip.entry)) + chunk * i32(CHUNK)
        first = jnp.where(real, vectors * i32(sizes.pitch) + inside, i32(0))
        sums = self.vmem["sums"].at[pl.ds(first, WIDE * CHUNK * sizes.pitch), :]
        scaling = functools.partial(self.epilogue.scaling, self.table, strip.entry, hbm=self.hbm, vmem=self.vmem)
        scales = [scaling(chunk + i32(i)) for i in range(WIDE)]
        place = at

        def write(row: int) -> None:
            nonlocal place
            if row % CLAMPED == 0:
                place = jnp.minimum(place, last)
            parts = [pl.ds(i * CHUNK * sizes.pitch + row, CHUNK, sizes.pitch) for i in range(WIDE)]
            self._write_row([scale(sums[part, :]) for scale, part in zip(scales, parts, strict=True)], place)
            place = place + n

        return write

    def _write_row(self, values: list[Value], at: Index) -> None:
        """Write some chunks of a row from the entry `at` of the flat buffer on."""
        lane = lax.broadcasted_iota(jnp.int32, (CHUNK, LANES), 1)
        first, row = jnp.full((CHUNK, LANES), at) & i32(LANES - 1), at >> i32(LANES.bit_length() - 1)
        here = lane >= first
        flat = self.vmem["flat"].at[pl.ds(row, len(values) * CHUNK + 1), :]
        for i, value in enumerate(values):
            rolled = pltpu.roll(value, at & i32(LANES - 1), 1)
            for later, mask in enumerate((here, jnp.logical_not(here))):
                pltpu.store(flat.at[pl.ds(i * CHUNK + later, CHUNK), :], rolled, mask=mask)

    # -- conversion ----------------------------------------------------------------------------------------------------

    def _places(self) -> tuple[Index, Index]:
        """Where the strip that is converted is in the buffer of float32, in rows, and in that of the result."""
        before = jnp.maximum(self.state["strips"] - i32(1), i32(0))
        flat = lax.rem(before, i32(2)) * i32(self.sizes.flat_rows)
        return flat, self._buffer(before) * i32(Collector.room(self.sizes))

    def converter(self, ahead: Index, real: Condition) -> Callable[[Iterable[int]], None]:
        """A function that converts some pieces of a slot, some slots ahead of the next; an unused slot if not real."""
        flat, result = self._places()
        first = (self.state["convert_slot"] + ahead) * i32(self.sizes.converted)
        spare = (
            i32(self.sizes.flat_rows // ROWS - self.sizes.converted),
            i32(Collector.room(self.sizes) // PIECE - self.sizes.converted),
        )
        places = [jnp.where(real, first, each) for each in spare]
        add = self.epilogue.adding(self.table, self.state["convert_entry"], self.hbm)
        rows = pl.multiple_of(flat + places[0] * i32(ROWS), ROWS)
        entries = pl.multiple_of(result + places[1] * i32(PIECE), PIECE)

        many = self.sizes.converted
        sums = self.vmem["flat"].at[aligned_ds(rows, many * ROWS, ROWS)]
        found = self.vmem["result"].at[aligned_ds(entries, many * PIECE, PIECE)]

        def total(piece: int) -> Value:
            value = sums[pl.ds(piece * ROWS, ROWS), :]
            return add(value, self._wide(found[pl.ds(piece * PIECE, PIECE)])) if self.epilogue.accumulate else value

        def convert(pieces: Iterable[int]) -> None:
            for piece, value in [(piece, self._narrow(total(piece))) for piece in pieces]:
                found[pl.ds(piece * PIECE, PIECE)] = value

        return convert

    def _wide(self, x: Value) -> Value:
        """A piece of the result as f32[16, 128]."""
        return x.reshape(ROWS, LANES).astype(jnp.float32)

    def _narrow(self, x: Value) -> Value:
        """f32[16, 128] as a piece of the result."""
        return cast(x, self.epilogue.dtype).reshape(PIECE)

    def _arrive(self, strip: Strip, pieces: Index) -> None:
        """Wait for the existing values of a strip, and keep those of its ends, which are converted with the others."""
        if not self.epilogue.accumulate:
            return
        _, result = self._places()
        self._existing(strip, self._buffer(self.state["strips"] - i32(1))).wait()
        for i, piece in enumerate((i32(0), pieces - i32(1))):
            where = aligned_ds(result + piece * i32(PIECE), PIECE, PIECE)
            self.vmem["edges"][pl.ds(i * PIECE, PIECE)] = self.vmem["result"][where]

    def _close(self) -> None:
        """Finish a strip: correct the pieces at its ends, and start to write it back.

        A last piece that the next strip reaches into is kept for it instead.
        """
        strip = self._strip("convert")
        (begin, end), pieces, (first, count) = self.strips.bounds(strip), self.strips.pieces(strip), self._span(strip)
        before = self.state["end"]
        shared = before > first
        self._fill(before, first)
        self._correct(strip, (i32(0), begin - first, end - first), shared)
        pl.when(pieces > i32(1))(lambda: self._correct(strip, (pieces - i32(1), begin - first, end - first), None))
        after = self.strips.following(strip)
        begins = self.table.field("start", after.entry)
        kept = (after.entry == strip.entry) | ((after.entry < self.table.end) & (begins < first + pieces * i32(PIECE)))
        kept = kept & ((end & i32(PIECE - 1)) > i32(0))
        flat, result = self._places()
        del flat
        where = aligned_ds(result + (pieces - i32(1)) * i32(PIECE), PIECE, PIECE)
        self.vmem["edges"][pl.ds(2 * PIECE, PIECE)] = self.vmem["result"][where]
        count = jnp.where(kept, (pieces - i32(1)) * i32(PIECE), count)
        slot = self._buffer(self.state["strips"] - i32(1))
        skipped = self._seam(first, count, where_first=result)
        first, count = first + skipped, jnp.maximum(count - skipped, i32(0))
        self.vmem["written"][slot * i32(2)], self.vmem["written"][slot * i32(2) + i32(1)] = first, count
        pl.when(count > i32(0))(lambda: self._result(first, count, slot, skipped).start())
        self.state["end"] = end

    def _seam(self, first: Index, count: Index, where_first: Index) -> Index:
        """Write a piece that the core before writes, too, to an array of its own; the entries that are done so."""
        if self.sizes.cores == 1:
            return i32(0)
        core = i32(self.table.core)
        shared = (
            (core > i32(0)) & (count > i32(0)) & (first == seam.begin(self.table, self.epilogue.length) & i32(-PIECE))
        )

        @pl.when(shared)
        def write() -> None:
            source = self.vmem["result"].at[aligned_ds(where_first, PIECE, PIECE)]
            target = self.hbm["seam"].at[aligned_ds(core * i32(PIECE), PIECE, PIECE)]
            copy = pltpu.make_async_copy(source, target, self.vmem["seam_sem"])
            copy.start()
            copy.wait()

        return jnp.where(shared, i32(PIECE), i32(0))

    def _correct(self, strip: Strip, place: tuple[Index, Index, Index], shared: Condition | None) -> None:
        """Convert a piece at an end of a strip, of which some entries belong to others.

        `place` is its number and where the strip begins and ends; `shared` says whether entries before it are those of
        the strip before. It is None for the last piece.
        """
        piece, begin, end = place
        flat, result = self._places()
        row, lane = (lax.broadcasted_iota(jnp.int32, (ROWS, LANES), axis) for axis in (0, 1))
        at = piece * i32(PIECE) + row * i32(LANES) + lane
        value = self.vmem["flat"][aligned_ds(flat + piece * i32(ROWS), ROWS, ROWS), :]
        existing = jnp.zeros((ROWS, LANES), jnp.float32)
        if self.epilogue.accumulate:
            existing = self._wide(self.vmem["edges"][pl.ds(0 if shared is not None else PIECE, PIECE)])
        value = self.epilogue.adding(self.table, strip.entry, self.hbm)(value, existing)
        value = jnp.where((at >= begin) & (at < end), value, existing)
        if shared is not None:
            kept = self._wide(self.vmem["edges"][pl.ds(2 * PIECE, PIECE)])
            value = jnp.where((at < begin) & shared, kept, value)
        self.vmem["result"][aligned_ds(result + piece * i32(PIECE), PIECE, PIECE)] = self._narrow(value)
