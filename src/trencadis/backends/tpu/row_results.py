"""The results of the rows form on their way to HBM: their ring of buffers, boundary tiles, and unowned rows.

A row tile starts at a multiple of the sublane tile: the first sublane tile of a group may begin with rows of the group
before, and its last may end with rows of the next one. Such a boundary tile is kept in VMEM until the later group has
filled its part, so that each sublane tile of a result is written once.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from trencadis.backends.prepare import round_up
from trencadis.backends.tpu import gating
from trencadis.backends.tpu.indexing import LANES, BlockedAxis, Dma, Index, Ref, Value, aligned_ds, i32
from trencadis.backends.tpu.layout import Layout
from trencadis.backends.tpu.pipeline import Cursor, OutputRing, start_all, wait_for_all
from trencadis.backends.tpu.tile_scheduler import Tile, TileScheduler
from trencadis.core.problem import Problem

ZERO_ROWS = 256  # rows of the block of zeros that is copied to unowned rows

Place = tuple[Index, Index, Index]  # of a chunk of the results: its first row, column block and chunk


def results(problem: Problem, layout: Layout) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes and dtypes of the results that the kernel writes, by name."""
    rows = round_up(problem.rows, layout.sublane_tile)
    found = gating.results(problem, layout).items()
    cut = {problem.n: layout.columns} if layout.cut else {}
    return {
        name: jax.ShapeDtypeStruct((rows, cut.get(each.axis.total, each.axis.total)), each.dtype)
        for name, each in found
    }


def scratch(problem: Problem, layout: Layout) -> dict[str, Any]:
    """The scratch shapes of the results, by name."""
    buffers: dict[str, Any] = OutputRing.scratch(layout.out_buffers)
    for name, (axis, dtype) in gating.results(problem, layout).items():
        buffers[name] = pltpu.VMEM((layout.out_buffers, layout.block_m, axis.chunk), dtype)
        buffers[f"{name}_boundary"] = pltpu.VMEM((axis.num_chunks, layout.sublane_tile, axis.chunk), dtype)
    buffers["boundary_sem"] = pltpu.SemaphoreType.DMA
    if not problem.epilogue.accumulate:
        buffers["zeros"] = pltpu.VMEM((min(ZERO_ROWS, layout.block_m), layout.chunk), problem.out)
        buffers["zeros_sem"] = pltpu.SemaphoreType.DMA
        buffers["zeros_sent"] = pltpu.SMEM((2,), jnp.int32)  # copies in flight: of ZERO_ROWS, of one sublane tile
    return buffers


class RowResults:
    """The results inside a kernel of the rows form; `hbm` and `vmem` are its references by name.

    Unowned rows of row_sums are not written: XLA does not read them.
    """

    def __init__(
        self, problem: Problem, layout: Layout, scheduler: TileScheduler, hbm: dict[str, Ref], vmem: dict[str, Ref]
    ) -> None:
        self.problem, self.layout, self.scheduler, self.hbm, self.vmem = problem, layout, scheduler, hbm, vmem
        self.n = BlockedAxis(problem.n, layout.block_n, layout.chunk)
        self.axes = {name: each.axis for name, each in gating.results(problem, layout).items()}
        self.ring = OutputRing(vmem, (None, self.n.uniform_chunk), self._copies)

    def place(self, name: str, row: Index, column: Index, rows: Index, columns: Index) -> Ref:
        """A part of a result in HBM."""
        return self.hbm[name].at[aligned_ds(row, rows, self.layout.sublane_tile), aligned_ds(column, columns, LANES)]

    def _copies(self, slot: Index, where: Place | None, rows: Index, columns: Index) -> list[Dma]:
        found = []
        for name, axis in self.axes.items():
            size = axis.uniform_chunk or columns
            row, start = (0, 0) if where is None else (where[0], axis.chunk_range(*where[1:])[0])
            source = self.vmem[name].at[slot, aligned_ds(0, rows, 8), aligned_ds(0, size, LANES)]
            target = self.place(name, row, start, rows, size)
            found.append(pltpu.make_async_copy(source, target, self.vmem["ring_sem"].at[slot]))
        return found

    def start(self) -> None:
        """Initialize the output ring and the block of zeros before the first tile."""
        self.ring.reset()
        if "zeros" in self.vmem:
            self.vmem["zeros"][...] = jnp.zeros_like(self.vmem["zeros"])
            for i in range(2):
                self.vmem["zeros_sent"][i] = i32(0)

    def write_back(self, tile: Tile, prev_end: Index, chunk: Index, slot: Index, cursors: dict[str, Cursor]) -> None:
        """Complete the boundary tiles of the chunk that was computed into a buffer of the ring, and copy it to HBM."""
        scheduler = self.scheduler
        for name in self.axes:
            self._merge_boundaries(name, tile, prev_end, chunk, slot, cursors)
        done = jnp.where(scheduler.is_last(tile), scheduler.align_down(tile.end) - tile.row, scheduler.height(tile))
        self.ring.write_back((tile.row, tile.block, chunk), done, self.n.chunk_range(tile.block, chunk)[1])

    def _merge_boundaries(
        self, name: str, tile: Tile, prev_end: Index, chunk: Index, slot: Index, cursors: dict[str, Cursor]
    ) -> None:
        """Restore the rows of earlier groups in the first sublane tile, and keep the last one if it is not full."""
        scheduler, unit, out = self.scheduler, self.layout.sublane_tile, self.vmem[name]
        boundary = self.vmem[f"{name}_boundary"].at[self.axes[name].chunk_index(tile.block, chunk)]
        index = lax.broadcasted_iota(jnp.int32, boundary.shape, 0)

        def unowned(offset: Index) -> Value:  # what unowned rows hold
            if "existing" not in self.vmem:
                return jnp.zeros(boundary.shape, boundary.dtype)
            return self.vmem["existing"][cursors["matrices"].slot, chunk, aligned_ds(offset, unit, unit), :]

        @pl.when(tile.row < tile.start)
        def _() -> None:
            head = slice(0, unit)
            earlier = jnp.where(index < prev_end - tile.row, boundary[...], unowned(0))
            out[slot, head, :] = jnp.where(index < tile.start - tile.row, earlier, out[slot, head, :])

        @pl.when(scheduler.is_last(tile) & (scheduler.align_down(tile.end) < tile.end))
        def _() -> None:
            offset = scheduler.align_down(tile.end) - tile.row
            tail = out[slot, aligned_ds(offset, unit, unit), :]
            boundary[...] = jnp.where(index < tile.end - tile.row - offset, tail, unowned(offset))

    # -- unowned rows --------------------------------------------------------------------------------------------------

    def write_unowned(self, prev_end: Index, top: Index, block: Index, chunk: Index) -> None:
        """Write one chunk of the rows between two spans: the boundary tile of the first, then zeros up to `top`."""
        scheduler = self.scheduler
        boundary, low = scheduler.align_down(prev_end), scheduler.align_up(prev_end)

        @pl.when((boundary < prev_end) & (boundary < top))
        def _() -> None:
            copies = [self._dma_boundary(name, boundary, block, chunk) for name in self.axes]
            start_all(copies)
            wait_for_all(copies)

        if "zeros" not in self.vmem:  # these rows of existing_out are in place already
            return
        for name in self.axes:
            if name != "row_sums":
                self._write_zeros(name, low, top, block, chunk)

    def _dma_boundary(self, name: str, row: Index, block: Index, chunk: Index) -> Dma:
        axis = self.axes[name]
        column, columns = axis.chunk_range(block, chunk)
        return pltpu.make_async_copy(
            self.vmem[f"{name}_boundary"].at[axis.chunk_index(block, chunk), :, aligned_ds(0, columns, LANES)],
            self.place(name, row, column, self.layout.sublane_tile, columns),
            self.vmem["boundary_sem"],
        )

    def _write_zeros(self, name: str, low: Index, top: Index, block: Index, chunk: Index) -> None:
        """Start to copy zeros to the rows [low, top) of one chunk of a result."""
        column, columns = self.n.chunk_range(block, chunk)
        height, sent = self.vmem["zeros"].shape[0], self.vmem["zeros_sent"]

        def send(row: Index) -> Index:
            self._dma_zeros(name, row, column, height, columns).start()
            return row + i32(height)

        rest = lax.while_loop(lambda row: row + i32(height) <= top, send, low)
        sent[0] = sent[0] + lax.div(jnp.maximum(top - low, i32(0)), i32(height)) * self._units(columns)

        @pl.when(rest < top)
        def _() -> None:
            self._dma_zeros(name, rest, column, top - rest, columns).start()
            sent[1] = sent[1] + lax.div(top - rest, i32(self.layout.sublane_tile)) * self._units(columns)

    def _units(self, columns: Index) -> Index:
        """The width of a copy of zeros in the unit in which `finish` waits for them: a chunk, or 128 columns."""
        return i32(1) if self.n.uniform_chunk else lax.div(columns, i32(LANES))

    def _dma_zeros(self, name: str, row: Index, column: Index, rows: Index, columns: Index) -> Dma:
        source = self.vmem["zeros"].at[aligned_ds(0, rows, self.layout.sublane_tile), aligned_ds(0, columns, LANES)]
        return pltpu.make_async_copy(source, self.place(name, row, column, rows, columns), self.vmem["zeros_sem"])

    def finish(self, prev_end: Index) -> None:
        """Write the unowned rows after the last span, and wait for all copies in flight."""
        scheduler = self.scheduler
        bottom = scheduler.align_up(i32(self.problem.rows))

        def write_block(b: Index, none: None) -> None:
            def write_chunk(chunk: Index, none: None) -> None:
                self.write_unowned(prev_end, bottom, b, chunk)

            lax.fori_loop(i32(0), self.n.chunks_in(b), write_chunk, None)

        lax.fori_loop(scheduler.block_begin, scheduler.block_end, write_block, None)
        self.ring.drain()
        if "zeros" in self.vmem:
            columns, name = self.n.uniform_chunk or LANES, next(iter(self.axes))
            for i, rows in enumerate((self.vmem["zeros"].shape[0], self.layout.sublane_tile)):
                wait = self._dma_zeros(name, 0, 0, rows, columns).wait
                lax.fori_loop(i32(0), self.vmem["zeros_sent"][i], lambda i, none, wait=wait: wait(), None)
