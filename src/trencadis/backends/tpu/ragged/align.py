"""The kernel that copies the rows of matrices in a flat buffer, which start anywhere, to blocks of 128 x 128.

A row that starts at lane p of a vector of 128 entries takes each of its vectors from two: lanes from p on of one, and
those before p of the next. They are merged, and rotated by p. The vectors of eight rows are then transposed, so that
rows of one block are together; a store with a stride would take a store for each row. Of 16-bit entries, two vectors of
a row are in the two halves of the words; they are paired with those of the row below first.

Columns and rows past the end of a matrix, up to whole granules, are zeros.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from trencadis.backends.prepare import round_up
from trencadis.backends.tpu.indexing import LANES, Condition, Dma, Index, Ref, Value, aligned_ds, i32
from trencadis.backends.tpu.pipeline import Cursor, OutputRing, Prefetcher
from trencadis.backends.tpu.ragged.blocks import BLOCK, Room, word_rows
from trencadis.backends.tpu.ragged.flat import TILE, fetch, tail_of
from trencadis.backends.tpu.ragged.loop import GroupTable, Neighbours, call, run_tiles

FIELDS = ("start", "stride", "rows", "columns", "first", "row_blocks", "lanes")  # of a group in the table
UNROLLED = 32  # rows that are copied at a time
BUFFERS = 2
LOW = np.int32(0xFFFF)


class Slab(NamedTuple):
    """A row of blocks of one group."""

    group: Index
    row_block: Index


@dataclasses.dataclass(frozen=True, slots=True)
class Slabs(GroupTable):
    """The rows of blocks of all groups, in order."""

    fields = FIELDS

    def past_end(self, slab: Slab) -> Condition:
        """Whether a slab is past the last one."""
        return slab.group >= i32(self.groups)

    def first_tile(self) -> Slab:
        """The first row of blocks of the first group that has any."""
        return self._enter(jnp.int32(0))

    def next_tile(self, slab: Slab) -> Slab:
        """The slab after this one: of the same group, or of the next that has any."""
        following = Slab(slab.group, slab.row_block + i32(1))
        more = following.row_block < self.field("row_blocks", slab.group)
        return lax.cond(more, lambda: following, lambda: self._enter(slab.group + i32(1)))

    def _enter(self, group: Index) -> Slab:
        return Slab(self.first_where(lambda group: self.field("row_blocks", group) > i32(0), group), jnp.int32(0))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Aligner:
    """The kernel of one flat buffer: its length, dtype and number of groups, and the room for its blocks."""

    length: int
    dtype: np.dtype[Any]
    groups: int
    room: Room

    @property
    def chunk(self) -> int:
        """The vectors of a row that are copied at a time: those of a vector register."""
        return 32 // self.dtype.itemsize

    @property
    def words(self) -> int:
        """The rows of 32-bit words of a block."""
        return word_rows(self.dtype)

    @property
    def window(self) -> int:
        """The entries of a buffer for the rows of a slab, and for what is read past them."""
        return round_up(BLOCK * self.room.longest + 2 * TILE, TILE) + (self.chunk + 2) * LANES * 2

    @property
    def slab(self) -> int:
        """The rows of 32-bit words of a buffer for the blocks of a slab."""
        return round_up(self.room.lanes, self.chunk) * self.words

    def scratch(self) -> dict[str, Any]:
        """The scratch shapes of the kernel, by name."""
        return {
            "rows": pltpu.VMEM((BUFFERS * round_up(self.window, TILE),), self.dtype),
            "rows_sem": pltpu.SemaphoreType.DMA((BUFFERS,)),
            "blocks": pltpu.VMEM((BUFFERS * self.slab, LANES), jnp.int32),
            **OutputRing.scratch(BUFFERS),
        }

    def run(self, flat: jax.Array, table: jax.Array, **options: Any) -> jax.Array:
        """The blocks of all groups, i32[rows of words, 128]."""
        shape = jax.ShapeDtypeStruct((self.room.blocks * self.words, LANES), jnp.int32)
        cost = pl.CostEstimate(flops=0, bytes_accessed=2 * self.length * self.dtype.itemsize, transcendentals=0)
        operands = {"table": table.reshape(-1), "flat": flat, "tail": tail_of(flat)}
        found = call(
            self._kernel, operands, {"out": shape}, self.scratch(), name="trencadis_align", cost=cost, options=options
        )
        return found["out"]

    def _kernel(self, hbm: dict[str, Ref], vmem: dict[str, Ref]) -> None:
        slabs = Slabs(hbm["table"], self.groups)
        size = vmem["rows"].shape[0] // BUFFERS

        def copies(slab: Slab, slot: Index, chunk: Index) -> list[Dma]:
            del chunk
            first, count, _ = self._window(slabs, slab)

            def target(at: Index, entries: Index) -> Ref:
                return vmem["rows"].at[aligned_ds(slot * i32(size) + at, entries, TILE)]

            return [fetch(hbm["flat"], hbm["tail"], self.length, first, count, target, vmem["rows_sem"].at[slot])]

        rows = Prefetcher(slabs, lambda slab: tuple(slab), copies, lambda slab: i32(1), BUFFERS)

        def send(slot: Index, where: Index | None, rows: Index, columns: Index) -> list[Dma]:
            del columns
            source = vmem["blocks"].at[aligned_ds(slot * i32(self.slab), rows, self.words)]
            target = hbm["out"].at[aligned_ds(i32(0) if where is None else where, rows, self.words)]
            return [pltpu.make_async_copy(source, target, vmem["ring_sem"].at[slot])]

        ring = OutputRing(vmem, (None, LANES), send)
        ring.reset()

        def compute(here: Neighbours, cursors: dict[str, Cursor]) -> None:
            slab = here.tile
            rows.wait(slab, cursors["rows"])
            slot = ring.acquire()
            self._slab(slabs, slab, vmem["rows"], cursors["rows"].slot * i32(size), vmem["blocks"], slot)
            lanes = slabs.field("lanes", slab.group)
            where = (slabs.field("first", slab.group) + slab.row_block * lanes) * i32(self.words)
            ring.write_back(where, lanes * i32(self.words), i32(LANES))

        run_tiles(slabs, {"rows": rows}, compute)
        ring.drain()

    def _window(self, slabs: Slabs, slab: Slab) -> tuple[Index, Index, Index]:
        """The entries that hold the rows of a slab: the first, how many, and where among them the first row starts."""
        stride, row = slabs.field("stride", slab.group), slab.row_block * i32(BLOCK)
        rows = jnp.clip(slabs.field("rows", slab.group) - row, i32(0), i32(BLOCK))
        start = slabs.field("start", slab.group) + jnp.where(rows > 0, row * stride, i32(0))
        end = jnp.where(rows > 0, start + (rows - i32(1)) * stride + slabs.field("columns", slab.group), start)
        first = start & i32(-TILE)
        count = jnp.where(rows > 0, (end - first + i32(TILE - 1)) & i32(-TILE), i32(0))
        return pl.multiple_of(first, TILE), pl.multiple_of(count, TILE), start - first

    def _slab(self, slabs: Slabs, slab: Slab, source: Ref, base: Index, target: Ref, slot: Index) -> None:
        """Copy the rows of a slab from the entries at `base` to blocks in a buffer."""
        sizes = slabs.field("stride", slab.group), slabs.field("columns", slab.group)
        lanes = slabs.field("lanes", slab.group)
        rows = slabs.field("rows", slab.group) - slab.row_block * i32(BLOCK)
        _, _, start = self._window(slabs, slab)
        chunks = lax.div(lanes + i32(self.chunk - 1), i32(self.chunk))
        to = slot * i32(self.slab)

        def some(i: Index, none: None) -> None:
            row = i * i32(UNROLLED)

            def chunk(c: Index, none: None) -> None:
                vector = c * i32(self.chunk)
                found = [
                    self._vectors(source, (base, start), vector, row + i32(r), rows, sizes) for r in range(UNROLLED)
                ]
                self._store(target, to + vector * i32(self.words), row, found)

            lax.fori_loop(i32(0), chunks, chunk, None)

        lax.fori_loop(i32(0), i32(BLOCK // UNROLLED), some, None)

    def _vectors(
        self,
        source: Ref,
        place: tuple[Index, Index],
        vector: Index,
        row: Index,
        rows: Index,
        sizes: tuple[Index, Index],
    ) -> Value:
        """Some vectors of a row, from `vector` on, as words i32[8, 128]; zeros past the end of the row.

        `place` is where the buffer starts, and in it the first row; `sizes` are from one row to the next, and of a row.
        """
        (base, start), (stride, columns) = place, sizes
        inside = row < rows
        at = start + jnp.where(inside, row, i32(0)) * stride
        q, p = (at >> i32(7)) + vector, at & i32(LANES - 1)
        end = jnp.where(inside, columns, i32(0)) - vector * i32(LANES)
        lane = lax.broadcasted_iota(jnp.int32, (8, LANES), 1)
        sublane = lax.broadcasted_iota(jnp.int32, (8, LANES), 0)
        back = (i32(LANES) - p) & i32(LANES - 1)
        if self.dtype.itemsize == 4:

            def load(q: Index) -> Value:
                entries = source[aligned_ds(base + q * i32(LANES), 8 * LANES, LANES)]
                return pltpu.bitcast(entries.reshape(8, LANES), jnp.int32)

            merged = jnp.where(lane >= p, load(q), load(q + i32(1)))
            return jnp.where(sublane * i32(LANES) + lane < end, pltpu.roll(merged, back, 1), i32(0))

        def load_pair(pair: Index) -> Value:  # 16 vectors, of which two are in each row of words
            entries = source[aligned_ds(base + pair * i32(2 * LANES), 16 * LANES, 2 * LANES)]
            return pltpu.bitcast(entries.reshape(16, LANES), jnp.int32)

        one, two = load_pair(q >> i32(1)), load_pair((q >> i32(1)) + i32(1))
        between = lax.shift_right_logical(one, i32(16)) | (two << i32(16))
        odd = (q & i32(1)) == i32(1)
        here, after = jnp.where(odd, between, one), jnp.where(odd, two, between)
        words = pltpu.roll(jnp.where(lane >= p, here, after), back, 1)
        column = sublane * i32(2 * LANES) + lane
        kept = jnp.where(column < end - i32(LANES), i32(-1), jnp.where(column < end, LOW, i32(0)))
        return words & kept

    def _store(self, target: Ref, to: Index, row: Index, found: list[Value]) -> None:
        """Store vectors of consecutive rows to the blocks of a chunk, which start at `to`."""
        if self.dtype.itemsize == 4:
            parts, pace, row = [found], 1, row
        else:
            pairs = list(zip(found[::2], found[1::2], strict=True))
            even = [(upper & LOW) | (lower << i32(16)) for upper, lower in pairs]
            odd = [lax.shift_right_logical(upper, i32(16)) | (lower & ~LOW) for upper, lower in pairs]
            parts, pace, row = [even, odd], 2, row >> i32(1)
        for first, part in enumerate(parts):
            for r in range(0, len(part), 8):
                rows = jnp.swapaxes(jnp.stack(part[r : r + 8]), 0, 1)  # [vectors, rows, 128]
                for v in range(8):
                    at = to + i32((v * pace + first) * self.words + r) + row
                    target[aligned_ds(at, 8, 8), :] = rows[v]
