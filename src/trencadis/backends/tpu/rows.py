"""The body of the rows form: out[r] = lhs[r] @ rhs[group of r]. A group's weights stay in VMEM for all of its rows.

A row tile starts at a multiple of the sublane tile: the first sublane tile of a group may begin with rows of the group
before, and its last may end with rows of the next one. Rows do not mix in a product, so nothing is masked on input. On
output, a boundary tile (a sublane tile that two groups share) is kept in VMEM until the later group has filled its
part, so that each sublane tile of the result is written once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from trencadis.backends.tpu import epilogue_vectors
from trencadis.backends.tpu.epilogue_vectors import EpilogueVectors, column_vectors, lane_vector_of
from trencadis.backends.tpu.indexing import LANES, BlockedAxis, Dma, Index, Ref, Value, aligned_ds, i32
from trencadis.backends.tpu.layout import Layout
from trencadis.backends.tpu.pipeline import Cursor, OutputRing, Prefetcher
from trencadis.backends.tpu.products import multiply
from trencadis.backends.tpu.tile_scheduler import Tile, TileScheduler
from trencadis.core.dtypes import cast
from trencadis.core.epilogue import Extras, add
from trencadis.core.problem import Problem

ONCE_PER_TILE = {"lhs", "by_row"}  # operands that are fetched whole for a row tile; all others come in chunks of n
ZERO_ROWS = 256  # rows of the block of zeros that is copied to unowned rows


def scratch(problem: Problem, layout: Layout) -> dict[str, Any]:
    """The scratch shapes of the kernel, by name."""
    chunks, chunk, rows = layout.chunks, layout.chunk, layout.block_m
    weights = (chunk, problem.k) if problem.transpose_rhs else (problem.k, chunk)
    buffers = {
        "lhs": pltpu.VMEM((layout.lhs_buffers, rows, problem.k), problem.lhs),
        "lhs_sem": pltpu.SemaphoreType.DMA((layout.lhs_buffers,)),
        "rhs": pltpu.VMEM((2, chunks, *weights), problem.rhs),
        "rhs_sem": pltpu.SemaphoreType.DMA((2, chunks)),
        **OutputRing.scratch(layout.out_buffers, rows, chunk, problem.out),
        "boundary": pltpu.VMEM((-(-problem.n // chunk), layout.sublane_tile, chunk), problem.out),
        "boundary_sem": pltpu.SemaphoreType.DMA,
        **epilogue_vectors.scratch(problem, layout),
    }
    if problem.epilogue.accumulate:
        buffers["existing"] = pltpu.VMEM((2, chunks, rows, chunk), problem.out)
        buffers["existing_sem"] = pltpu.SemaphoreType.DMA((2, chunks))
    else:
        buffers["zeros"] = pltpu.VMEM((min(ZERO_ROWS, rows), chunk), problem.out)
        buffers["zeros_sem"] = pltpu.SemaphoreType.DMA
        buffers["zeros_sent"] = pltpu.SMEM((2,), jnp.int32)  # copies in flight: of ZERO_ROWS, of one sublane tile
    return buffers


class RowsBody:
    """The body of the rows form; `hbm` and `vmem` are the kernel's references by name."""

    def __init__(
        self, problem: Problem, layout: Layout, scheduler: TileScheduler, hbm: dict[str, Ref], vmem: dict[str, Ref]
    ) -> None:
        self.problem, self.layout, self.scheduler, self.hbm, self.vmem = problem, layout, scheduler, hbm, vmem
        self.n = BlockedAxis(problem.n, layout.block_n, layout.chunk)
        self.vectors = EpilogueVectors(problem, layout, self.n, hbm, vmem)
        sizes = None, self.n.uniform_chunk
        self.ring = OutputRing(vmem, sizes, lambda where, *size: self._out(*(where or (0, 0)), *size))

    def _out(self, row: Index, column: Index, rows: Index, columns: Index) -> Ref:
        return self.hbm["out"].at[aligned_ds(row, rows, self.layout.sublane_tile), aligned_ds(column, columns, LANES)]

    # -- copies from HBM -----------------------------------------------------------------------------------------------

    def prefetchers(self) -> dict[str, Prefetcher]:
        """The operands that are prefetched, by name; all but lhs and its scales in chunks of n."""
        scheduler, steps = self.scheduler, self.problem.epilogue

        def chunks(tile: Tile) -> Index:
            return self.n.chunks_in(tile.block)

        def weights(tile: Tile) -> tuple[Index, ...]:
            return tile.span, tile.block

        def per_tile(dma: Callable[[Tile, Index, Index], Dma]) -> Prefetcher:
            return Prefetcher(
                scheduler, lambda tile: (tile.span, tile.row), dma, lambda tile: i32(1), self.layout.lhs_buffers
            )

        found = {"lhs": per_tile(self._dma_lhs), "rhs": Prefetcher(scheduler, weights, self._dma_rhs, chunks)}
        if steps.by_row:
            found["by_row"] = per_tile(lambda tile, slot, chunk: self.vectors.dma_rows(lane_vector_of(tile.row), slot))
        for name in column_vectors(self.problem):
            found[name] = Prefetcher(scheduler, weights, functools.partial(self._dma_columns, name), chunks)
        if steps.accumulate:
            found["existing"] = Prefetcher(
                scheduler, lambda tile: (tile.span, tile.block, tile.row), self._dma_existing, chunks
            )
        return found

    def _dma_lhs(self, tile: Tile, slot: Index, chunk: Index) -> Dma:
        del chunk
        rows, inside = self.scheduler.dma_rows(tile)
        return pltpu.make_async_copy(
            self.hbm["lhs"].at[rows, :], self.vmem["lhs"].at[slot, inside, :], self.vmem["lhs_sem"].at[slot]
        )

    def _dma_rhs(self, tile: Tile, slot: Index, chunk: Index) -> Dma:
        start, size = self.n.chunk_range(tile.block, chunk)
        columns, inside = aligned_ds(start, size, LANES), aligned_ds(0, size, LANES)
        which, target = lax.rem(tile.span, i32(self.problem.weights)), self.vmem["rhs"].at[slot, chunk]
        if self.problem.transpose_rhs:
            source, target = self.hbm["rhs"].at[which, columns, :], target.at[inside, :]
        else:
            source, target = self.hbm["rhs"].at[which, :, columns], target.at[:, inside]
        return pltpu.make_async_copy(source, target, self.vmem["rhs_sem"].at[slot, chunk])

    def _dma_columns(self, name: str, tile: Tile, slot: Index, chunk: Index) -> Dma:
        which = lax.rem(tile.span, i32(self.problem.weights))
        return self.vectors.dma_columns(name, which, tile.block, slot, chunk)

    def _dma_existing(self, tile: Tile, slot: Index, chunk: Index) -> Dma:
        start, size = self.n.chunk_range(tile.block, chunk)
        rows = self.scheduler.rows(tile)
        unit = self.layout.sublane_tile
        return pltpu.make_async_copy(
            self._out(tile.row, start, rows, size),  # existing_out is aliased to the result
            self.vmem["existing"].at[slot, chunk, aligned_ds(0, rows, unit), aligned_ds(0, size, LANES)],
            self.vmem["existing_sem"].at[slot, chunk],
        )

    # -- arithmetic ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Initialize the output ring and the block of zeros before the first tile."""
        self.ring.reset()
        if "zeros" in self.vmem:
            self.vmem["zeros"][...] = jnp.zeros_like(self.vmem["zeros"])
            for i in range(2):
                self.vmem["zeros_sent"][i] = i32(0)

    def compute(
        self, tile: Tile, prev_end: Index, prefetchers: dict[str, Prefetcher], cursors: dict[str, Cursor]
    ) -> dict[str, Index]:
        """Multiply one row tile by one column block of weights; `prev_end` is where the rows of the last span ended."""
        scheduler = self.scheduler
        for name in (name for name in prefetchers if name in ONCE_PER_TILE):
            prefetchers[name].wait(tile, cursors[name])
        if "by_row" in prefetchers:
            pl.when(cursors["by_row"].is_new)(lambda: self.vectors.transpose_rows(cursors["by_row"].slot))
        height, chunks = scheduler.height(tile), self.n.chunks_in(tile.block)

        def compute_chunk(chunk: Index, none: None) -> None:
            for name in (name for name in prefetchers if name not in ONCE_PER_TILE):
                prefetchers[name].wait(tile, cursors[name], chunk)

            @pl.when(tile.row == scheduler.align_down(tile.start))
            def _() -> None:
                self._write_unowned(prev_end, scheduler.align_down(tile.start), tile.block, chunk)

            slot = self.ring.acquire()
            for h in self.layout.heights:

                @pl.when(height == i32(h))
                def _(h: int = h) -> None:
                    self._multiply(h, tile, chunk, slot, cursors)

            prefetchers["rhs"].release(cursors["rhs"], chunk)
            # copies are served in order: those that the next products wait for are started before the result's
            prefetchers["lhs"].release(cursors["lhs"], 0, chunk == chunks - i32(1))
            self._merge_boundaries(tile, prev_end, chunk, slot, cursors)
            done = jnp.where(scheduler.is_last(tile), scheduler.align_down(tile.end) - tile.row, height)
            start, columns = self.n.chunk_range(tile.block, chunk)
            self.ring.write_back((tile.row, start), done, columns)

        lax.fori_loop(i32(0), chunks, compute_chunk, None)
        return {"rhs": chunks, "lhs": 1}

    def _multiply(self, h: int, tile: Tile, chunk: Index, slot: Index, cursors: dict[str, Cursor]) -> None:
        problem, vmem = self.problem, self.vmem
        x = vmem["lhs"][cursors["lhs"].slot, :h, :]  # [h, k]
        w = vmem["rhs"][cursors["rhs"].slot, chunk]  # [k, chunk] or [chunk, k]
        acc = multiply(problem, self.layout.chip, x, w, (1, 1 if problem.transpose_rhs else 0))  # [h, chunk]
        by_row = self.vectors.rows(tile.row & i32(LANES - 1), h, self.layout.sublane_tile)
        by_column = (self.vectors.columns(name, cursors, chunk) for name in ("by_column", "bias"))
        result = problem.epilogue.finish(acc, Extras(by_row, *by_column), problem.out)
        if problem.epilogue.accumulate:
            result = add(vmem["existing"][cursors["existing"].slot, chunk, :h, :], result)
        vmem["out"][slot, :h, :] = cast(result, problem.out)

    def _merge_boundaries(
        self, tile: Tile, prev_end: Index, chunk: Index, slot: Index, cursors: dict[str, Cursor]
    ) -> None:
        """Restore the rows of earlier groups in the first sublane tile, and keep the last one if it is not full."""
        scheduler, unit, out = self.scheduler, self.layout.sublane_tile, self.vmem["out"]
        boundary = self.vmem["boundary"].at[self.n.chunk_index(tile.block, chunk)]
        index = lax.broadcasted_iota(jnp.int32, (unit, self.layout.chunk), 0)

        def unowned(offset: Index) -> Value:  # what unowned rows hold
            if "existing" not in self.vmem:
                return jnp.zeros((unit, self.layout.chunk), self.problem.out)
            return self.vmem["existing"][cursors["existing"].slot, chunk, aligned_ds(offset, unit, unit), :]

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

    def _write_unowned(self, prev_end: Index, top: Index, block: Index, chunk: Index) -> None:
        """Write one chunk of the rows between two spans: the boundary tile of the first, then zeros up to `top`."""
        scheduler, unit = self.scheduler, self.layout.sublane_tile
        column, columns = self.n.chunk_range(block, chunk)
        boundary, low = scheduler.align_down(prev_end), scheduler.align_up(prev_end)

        @pl.when((boundary < prev_end) & (boundary < top))
        def _() -> None:
            copy = pltpu.make_async_copy(
                self.vmem["boundary"].at[self.n.chunk_index(block, chunk), :, aligned_ds(0, columns, LANES)],
                self._out(boundary, column, unit, columns),
                self.vmem["boundary_sem"],
            )
            copy.start()
            copy.wait()

        if "zeros" not in self.vmem:  # these rows of existing_out are in place already
            return
        height, sent = self.vmem["zeros"].shape[0], self.vmem["zeros_sent"]

        def send(row: Index) -> Index:
            self._dma_zeros(row, column, height, columns).start()
            return row + i32(height)

        rest = lax.while_loop(lambda row: row + i32(height) <= top, send, low)
        sent[0] = sent[0] + lax.div(jnp.maximum(top - low, i32(0)), i32(height)) * self._units(columns)

        @pl.when(rest < top)
        def _() -> None:
            self._dma_zeros(rest, column, top - rest, columns).start()
            sent[1] = sent[1] + lax.div(top - rest, i32(unit)) * self._units(columns)

    def _units(self, columns: Index) -> Index:
        """The width of a copy of zeros in the unit in which `finish` waits for them: a chunk, or 128 columns."""
        return i32(1) if self.n.uniform_chunk else lax.div(columns, i32(LANES))

    def _dma_zeros(self, row: Index, column: Index, rows: Index, columns: Index) -> Dma:
        source = self.vmem["zeros"].at[aligned_ds(0, rows, self.layout.sublane_tile), aligned_ds(0, columns, LANES)]
        return pltpu.make_async_copy(source, self._out(row, column, rows, columns), self.vmem["zeros_sem"])

    def finish(self, prev_end: Index) -> None:
        """Write the unowned rows after the last span, and wait for all copies in flight."""
        scheduler = self.scheduler
        bottom = scheduler.align_up(i32(self.problem.rows))

        def write_block(b: Index, none: None) -> None:
            def write_chunk(chunk: Index, none: None) -> None:
                self._write_unowned(prev_end, bottom, b, chunk)

            lax.fori_loop(i32(0), self.n.chunks_in(b), write_chunk, None)

        lax.fori_loop(scheduler.block_begin, scheduler.block_end, write_block, None)
        self.ring.drain()
        if "zeros" in self.vmem:
            columns = self.n.uniform_chunk or LANES
            for i, rows in enumerate((self.vmem["zeros"].shape[0], self.layout.sublane_tile)):
                wait = self._dma_zeros(0, 0, rows, columns).wait
                lax.fori_loop(i32(0), self.vmem["zeros_sent"][i], lambda i, none, wait=wait: wait(), None)
