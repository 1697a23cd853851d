"""The kernel that writes the results: the rows of blocks become rows of a flat buffer, after the epilogue.

The flat buffer is written in windows. A window starts as zeros or as the existing values. The vectors of each row that
reaches into it are rotated to where they belong, and only the lanes of the row are stored. So rows do not wait for one
another, whatever their length is, and what no group owns stays as it is. Vectors of a row are in as many blocks; those
of eight rows are loaded block by block and transposed.

The result is `alpha * product + bias + beta * existing`, in float32, and it is rounded once.
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
from trencadis.backends.tpu.ragged.blocks import BLOCK, Room
from trencadis.backends.tpu.ragged.flat import TILE, fetch, store, tail_of, whole
from trencadis.backends.tpu.ragged.loop import GroupTable, Neighbours, call, run_tiles
from trencadis.core.dtypes import cast

FIELDS = ("start", "stride", "rows", "columns", "first", "lanes", "owned")  # of a group in the table
UNROLLED = 32  # rows that are written at a time
CONVERTED = 128 * LANES  # entries that are converted at a time
BUFFERS = 2
CHUNK = 8  # vectors of a row that are written at a time
COMPUTED, EMPTY_SUM = 1, 2  # in the field "owned": there is a product, or a sum of no terms; 0: there is nothing
FAR = np.int32(2**31 - 1)


class Piece(NamedTuple):
    """A row of blocks of one group in one window of the flat buffer; the group may lie past the window."""

    window: Index
    group: Index
    row_block: Index


@dataclasses.dataclass(frozen=True, slots=True)
class Pieces(GroupTable):
    """The pieces of all windows, in order."""

    fields = FIELDS
    window: int
    length: int

    def past_end(self, piece: Piece) -> Condition:
        """Whether a piece is past the last window."""
        return piece.window >= i32(-(-self.length // self.window))

    def bounds(self, piece: Piece) -> tuple[Index, Index]:
        """Where the rows of a row of blocks start and end in the flat buffer; far away if there is no such group."""
        stride, row = self.field("stride", piece.group), piece.row_block * i32(BLOCK)
        start = self.field("start", piece.group) + row * stride
        rows = jnp.minimum(self.field("rows", piece.group) - row, i32(BLOCK))
        there = piece.group < i32(self.groups)
        return jnp.where(there, start, FAR), jnp.where(there, start + rows * stride, FAR)

    def touches(self, piece: Piece) -> Condition:
        """Whether the rows of a piece reach into its window."""
        start, end = self.bounds(piece)
        low = piece.window * i32(self.window)
        return (start < low + i32(self.window)) & (end > low)

    def first_tile(self) -> Piece:
        """The first row of blocks of the first group that owns anything, in the first window."""
        return self._enter(jnp.int32(0), jnp.int32(0))

    def next_tile(self, piece: Piece) -> Piece:
        """The piece after this one: of the next row of blocks, or in the next window."""
        start, end = self.bounds(piece)
        top = (piece.window + i32(1)) * i32(self.window)
        done = (start < top) & (end <= top)  # these rows are complete

        def following() -> Piece:
            row_block = piece.row_block + i32(1)
            more = row_block * i32(BLOCK) < self.field("rows", piece.group)
            here = Piece(piece.window, piece.group, row_block)
            found = lax.cond(more, lambda: here, lambda: self._enter(piece.window, piece.group + i32(1)))
            later = self.bounds(found)[0] >= top
            return found._replace(window=piece.window + later.astype(jnp.int32))

        return lax.cond(done, following, lambda: piece._replace(window=piece.window + i32(1)))

    def _enter(self, window: Index, group: Index) -> Piece:
        return Piece(window, self.first_where(lambda group: self.field("owned", group) > i32(0), group), jnp.int32(0))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Collector:
    """The kernel of one result: its length, dtype and number of groups, its blocks, and the steps of its epilogue."""

    length: int
    dtype: np.dtype[Any]
    groups: int
    room: Room
    window: int  # entries, a multiple of 1024
    accumulate: bool = False
    alpha: bool = False
    beta: bool = False
    bias: int = 0  # columns of a bias; 0: there is none

    @property
    def slab(self) -> int:
        """The rows of a buffer for a row of blocks, and for what is read past them."""
        return (round_up(self.room.lanes, CHUNK) + 1) * BLOCK

    @property
    def bias_rows(self) -> int:
        """The vectors of a group's bias in memory."""
        return round_up(-(-self.bias // LANES), CHUNK)

    def scratch(self) -> dict[str, Any]:
        """The scratch shapes of the kernel, by name."""
        vectors = self.window // LANES
        buffers: dict[str, Any] = {
            "blocks": pltpu.VMEM((BUFFERS * self.slab, LANES), jnp.float32),
            "blocks_sem": pltpu.SemaphoreType.DMA((BUFFERS,)),
            "new": pltpu.VMEM((vectors + 4 * CHUNK, LANES), jnp.float32),
            "result": pltpu.VMEM((BUFFERS * self.window,), self.dtype),
            **OutputRing.scratch(BUFFERS),
        }
        if self.accumulate:
            buffers["existing"] = pltpu.VMEM((BUFFERS * self.window,), self.dtype)
            buffers["existing_sem"] = pltpu.SemaphoreType.DMA((BUFFERS,))
            buffers["old"] = pltpu.VMEM((vectors + 4 * CHUNK, LANES), jnp.float32)
        if self.bias:
            buffers["bias_row"] = pltpu.VMEM((BUFFERS * self.bias_rows, LANES), jnp.float32)
            buffers["bias_sem"] = pltpu.SemaphoreType.DMA((BUFFERS,))
        return buffers

    def run(self, blocks: jax.Array, table: jax.Array, extras: dict[str, jax.Array], **options: Any) -> jax.Array:
        """The flat result; `extras` are, by name, existing, alpha f32[g], bias f32[g, n] and beta f32[g], as given."""
        operands = {"table": table.reshape(-1), "blocks": blocks}
        if self.alpha or self.beta:
            ones = jnp.ones((self.groups,), jnp.float32)
            operands["numbers"] = jnp.concatenate([extras.get(name, ones) for name in ("alpha", "beta")])
        if self.bias:
            padded = jnp.pad(extras["bias"], ((0, 0), (0, self.bias_rows * LANES - self.bias)))
            operands["bias"] = padded.reshape(-1, LANES)
        results = {"out": jax.ShapeDtypeStruct((self.length,), self.dtype)}
        results["out_tail"] = jax.ShapeDtypeStruct((TILE,), self.dtype)
        aliases = {}
        if self.accumulate:
            operands |= {"existing": extras["existing"], "existing_tail": tail_of(extras["existing"])}
            aliases = {"existing": "out"}
        moved = 4 * blocks.size + self.length * self.dtype.itemsize * (1 + self.accumulate)
        found = call(
            self._kernel, operands, results, self.scratch(), name="trencadis_collect", aliases=aliases,
            cost=pl.CostEstimate(flops=0, bytes_accessed=moved, transcendentals=0), options=options,
        )  # fmt: skip
        main = whole(self.length)
        tail = lax.slice(found["out_tail"], (0,), (self.length - main,))
        return lax.dynamic_update_slice(found["out"], tail, (np.int32(main),)) if main < self.length else found["out"]

    def _kernel(self, hbm: dict[str, Ref], vmem: dict[str, Ref]) -> None:
        pieces = Pieces(hbm["table"], self.groups, self.window, self.length)
        prefetchers = self._prefetchers(pieces, hbm, vmem)

        ring = OutputRing(
            vmem, (None, LANES), lambda slot, where, rows, columns: [self._send(hbm, vmem, slot, where, rows)]
        )
        ring.reset()

        def compute(here: Neighbours, cursors: dict[str, Cursor]) -> None:
            piece = here.tile
            for name, each in prefetchers.items():
                each.wait(piece, cursors[name])
            opens = here.is_first | (here.previous.window != piece.window)
            pl.when(opens)(lambda: self._open(vmem, cursors))
            pl.when(pieces.touches(piece))(lambda: self._rows(pieces, piece, hbm, vmem, cursors))

            @pl.when(here.following.window != piece.window)
            def _() -> None:
                self._convert(vmem, ring.acquire())
                low = piece.window * i32(self.window)
                ring.write_back(low, jnp.minimum(i32(self.window), i32(round_up(self.length, TILE)) - low), i32(LANES))

        run_tiles(pieces, prefetchers, compute)
        ring.drain()

    def _send(self, hbm: dict[str, Ref], vmem: dict[str, Ref], slot: Index, where: Index | None, count: Index) -> Dma:
        """The copy of a window to HBM; to wait for it, where it is matters only for the last one."""
        first = where
        if first is None:
            last = (-(-self.length // self.window) - 1) * self.window
            first = jnp.where(count == i32(self.window), i32(0), i32(last))

        def source(at: Index, entries: Index) -> Ref:
            return vmem["result"].at[aligned_ds(slot * i32(self.window) + at, entries, TILE)]

        semaphore = vmem["ring_sem"].at[slot]
        return store(hbm["out"], hbm["out_tail"], self.length, first, count, source, semaphore)

    def _prefetchers(self, pieces: Pieces, hbm: dict[str, Ref], vmem: dict[str, Ref]) -> dict[str, Prefetcher]:
        """What is prefetched, by name: rows of blocks, existing values, and a bias."""

        def blocks(piece: Piece, slot: Index, chunk: Index) -> list[Dma]:
            del chunk
            lanes = pieces.field("lanes", piece.group)
            first = (pieces.field("first", piece.group) + piece.row_block * lanes) * i32(BLOCK)
            rows = lanes * i32(BLOCK)
            target = vmem["blocks"].at[aligned_ds(slot * i32(self.slab), rows, BLOCK)]
            source = hbm["blocks"].at[aligned_ds(first, rows, BLOCK)]
            return [pltpu.make_async_copy(source, target, vmem["blocks_sem"].at[slot])]

        def computed(piece: Piece) -> Index:
            there = (piece.group < i32(self.groups)) & (pieces.field("owned", piece.group) == i32(COMPUTED))
            return there.astype(jnp.int32)

        def existing(piece: Piece, slot: Index, chunk: Index) -> list[Any]:
            del chunk
            low = piece.window * i32(self.window)
            count = jnp.minimum(i32(self.window), i32(round_up(self.length, TILE)) - low)

            def target(at: Index, entries: Index) -> Ref:
                return vmem["existing"].at[aligned_ds(slot * i32(self.window) + at, entries, TILE)]

            flat, semaphore = (hbm["out"], hbm["existing_tail"]), vmem["existing_sem"].at[slot]
            return [fetch(*flat, self.length, low, count, target, semaphore)]

        def bias(piece: Piece, slot: Index, chunk: Index) -> list[Dma]:
            del chunk
            source = hbm["bias"].at[aligned_ds(piece.group * i32(self.bias_rows), self.bias_rows, CHUNK)]
            target = vmem["bias_row"].at[aligned_ds(slot * i32(self.bias_rows), self.bias_rows, CHUNK)]
            return [pltpu.make_async_copy(source, target, vmem["bias_sem"].at[slot])]

        found = {"blocks": Prefetcher(pieces, lambda piece: tuple(piece[1:]), blocks, computed, BUFFERS)}
        if self.accumulate:
            found["existing"] = Prefetcher(pieces, lambda piece: piece[:1], existing, lambda piece: i32(1), BUFFERS)
        if self.bias:

            def one(piece: Piece) -> Index:
                return (piece.group < i32(self.groups)).astype(jnp.int32)

            found["bias"] = Prefetcher(pieces, lambda piece: piece[1:2], bias, one, BUFFERS)
        return found

    # -- arithmetic ----------------------------------------------------------------------------------------------------

    def _open(self, vmem: dict[str, Ref], cursors: dict[str, Cursor]) -> None:
        """Fill a window with zeros, or with the existing values."""

        def some(i: Index, none: None) -> None:
            rows = aligned_ds(i * i32(CONVERTED // LANES) + i32(CHUNK), CONVERTED // LANES, CHUNK)
            if not self.accumulate:
                vmem["new"][rows, :] = jnp.zeros((CONVERTED // LANES, LANES), jnp.float32)
                return
            first = cursors["existing"].slot * i32(self.window) + i * i32(CONVERTED)
            old = vmem["existing"][aligned_ds(first, CONVERTED, CONVERTED)].reshape(-1, LANES).astype(jnp.float32)
            vmem["old"][rows, :] = old
            vmem["new"][rows, :] = old

        lax.fori_loop(i32(0), i32(self.window // CONVERTED), some, None)

    def _convert(self, vmem: dict[str, Ref], slot: Index) -> None:
        """Round a window to the dtype of the result."""

        def some(i: Index, none: None) -> None:
            rows = aligned_ds(i * i32(CONVERTED // LANES) + i32(CHUNK), CONVERTED // LANES, CHUNK)
            first = slot * i32(self.window) + i * i32(CONVERTED)
            rounded = cast(vmem["new"][rows, :], self.dtype)
            vmem["result"][aligned_ds(first, CONVERTED, CONVERTED)] = rounded.reshape(CONVERTED)

        lax.fori_loop(i32(0), i32(self.window // CONVERTED), some, None)

    def _rows(
        self, pieces: Pieces, piece: Piece, hbm: dict[str, Ref], vmem: dict[str, Ref], cursors: dict[str, Cursor]
    ) -> None:
        """Write those rows of a piece that reach into its window."""
        group, columns, stride = piece.group, *(pieces.field(name, piece.group) for name in ("columns", "stride"))
        start = pieces.bounds(piece)[0] - piece.window * i32(self.window)
        rows = jnp.minimum(pieces.field("rows", group) - piece.row_block * i32(BLOCK), i32(BLOCK))
        first = lax.div(jnp.maximum(-start, i32(0)), stride) & i32(-8)
        last = jnp.minimum(lax.div(jnp.maximum(i32(self.window) - start, i32(0)) + stride - i32(1), stride), rows)
        chunks = lax.div(columns + i32(CHUNK * LANES - 1), i32(CHUNK * LANES))
        numbers = {
            name: hbm["numbers"][i32(i * self.groups) + group]
            for i, (name, on) in enumerate((("alpha", self.alpha), ("beta", self.beta))) if on
        }  # fmt: skip
        numbers["computed"] = pieces.field("owned", group) == i32(COMPUTED)
        count = lax.div(jnp.maximum(last - first, i32(0)) + i32(UNROLLED - 1), i32(UNROLLED))

        def some(i: Index, none: None) -> None:
            def chunk(c: Index, none: None) -> None:
                for r in range(0, UNROLLED, 8):
                    top = pl.multiple_of(first + i * i32(UNROLLED) + i32(r), 8)
                    values = self._scaled(vmem, cursors, numbers, top, c * i32(CHUNK))
                    for j in range(8):
                        row = top + i32(j)
                        end = jnp.where(row < last, columns, i32(0)) - c * i32(CHUNK * LANES)
                        at = start + jnp.minimum(row, rows) * stride + c * i32(CHUNK * LANES)
                        self._write(vmem, numbers, values[j], at, end)

            lax.fori_loop(i32(0), chunks, chunk, None)

        lax.fori_loop(i32(0), count, some, None)

    def _scaled(
        self, vmem: dict[str, Ref], cursors: dict[str, Cursor], numbers: dict[str, Any], row: Index, vector: Index
    ) -> Value:
        """Some vectors of eight rows of the product, times alpha and with the bias: f32[rows, vectors, 128]."""
        first = cursors["blocks"].slot * i32(self.slab) + vector * i32(BLOCK) + row
        found = [vmem["blocks"][aligned_ds(first + i32(v * BLOCK), 8, 8), :] for v in range(CHUNK)]
        rows = jnp.swapaxes(jnp.stack([jnp.where(numbers["computed"], x, jnp.float32(0)) for x in found]), 0, 1)
        if self.alpha:
            rows = rows * numbers["alpha"]
        if self.bias:
            first = cursors["bias"].slot * i32(self.bias_rows) + vector
            rows = rows + vmem["bias_row"][aligned_ds(first, CHUNK, CHUNK), :][None]
        return rows

    def _write(self, vmem: dict[str, Ref], numbers: dict[str, Any], value: Value, at: Index, end: Index) -> None:
        """Write some vectors of a row, of which `end` entries are there, to the window from its entry `at` on.

        Each vector goes to two of the window: its first lanes to the end of one, the others to the start of the next.
        """
        lane, sublane = (lax.broadcasted_iota(jnp.int32, (CHUNK, LANES), axis) for axis in (1, 0))
        p = at & i32(LANES - 1)
        value = pltpu.roll(value, p, 1)
        column = sublane * i32(LANES) + lane - p
        for later in (0, 1):
            place = jnp.clip((at >> i32(7)) + i32(later), i32(-CHUNK), i32(self.window // LANES)) + i32(CHUNK)
            here = (lane < p) if later else (lane >= p)
            here = here & (column < end - i32(later * LANES))
            total = value
            if self.accumulate:
                old = vmem["old"][pl.ds(place, CHUNK), :]
                if self.beta:
                    old = jnp.where(numbers["beta"] != 0, old * numbers["beta"], jnp.float32(0))
                total = total + old
            pltpu.store(vmem["new"].at[pl.ds(place, CHUNK), :], total, mask=here)
