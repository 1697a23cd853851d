"""The body of the contraction form: out[i] = lhs[rows of i].T @ rhs[rows of i]. Accumulators stay in VMEM.

The accumulator of a column block is updated in steps along the rows. Rows of other groups, in the first and last
sublane tile of a span, and the rows that pad the last step are set to zero in VMEM, in both operands, before they are
multiplied; all other rows are multiplied as they arrived. The last step adds its product to the accumulator, applies
the epilogue and rounds, so that the finished sum does not go through VMEM once more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from trencadis.backends.tpu import epilogue_vectors
from trencadis.backends.tpu.epilogue_vectors import EpilogueVectors, column_vectors
from trencadis.backends.tpu.indexing import LANES, BlockedAxis, Dma, Index, Ref, Slice, Value, aligned_ds, i32
from trencadis.backends.tpu.layout import Layout
from trencadis.backends.tpu.pipeline import Cursor, OutputRing, Prefetcher
from trencadis.backends.tpu.products import multiply, rescaled
from trencadis.backends.tpu.realign import load_rows, native_rows
from trencadis.backends.tpu.tile_scheduler import Tile, TileScheduler
from trencadis.core.dtypes import cast
from trencadis.core.epilogue import Extras, add
from trencadis.core.problem import Problem


def scratch(problem: Problem, layout: Layout) -> dict[str, Any]:
    """The scratch shapes of the kernel, by name."""
    chunks, chunk, rows, block_k = layout.chunks, layout.chunk, layout.buffer_rows, layout.block_k
    lhs_tile = (block_k, rows) if problem.transpose_lhs else (rows, block_k)
    buffers = {
        "lhs": pltpu.VMEM((layout.lhs_buffers, *lhs_tile), problem.lhs),
        "lhs_sem": pltpu.SemaphoreType.DMA((layout.lhs_buffers,)),
        "rhs": pltpu.VMEM((2, chunks, rows, chunk), problem.rhs),
        "rhs_sem": pltpu.SemaphoreType.DMA((2, chunks)),
        "acc": pltpu.VMEM((chunks, block_k, chunk), problem.acc),
        "out": pltpu.VMEM((layout.out_buffers, block_k, chunk), problem.out),
        **OutputRing.scratch(layout.out_buffers),
        **epilogue_vectors.scratch(problem, layout),
    }
    if problem.epilogue.accumulate:
        buffers["existing"] = pltpu.VMEM((2, chunks, block_k, chunk), problem.out)
        buffers["existing_sem"] = pltpu.SemaphoreType.DMA((2, chunks))
    return buffers


def results(problem: Problem, layout: Layout) -> dict[str, jax.ShapeDtypeStruct]:
    """The shape and dtype of the result that the kernel writes."""
    del layout
    return {"out": jax.ShapeDtypeStruct(problem.out_shape, problem.out)}


class ContractionBody:
    """The body of the contraction form; `hbm` and `vmem` are the kernel's references by name."""

    def __init__(
        self, problem: Problem, layout: Layout, scheduler: TileScheduler, hbm: dict[str, Ref], vmem: dict[str, Ref]
    ) -> None:
        self.problem, self.layout, self.scheduler, self.hbm, self.vmem = problem, layout, scheduler, hbm, vmem
        self.k = BlockedAxis(problem.k, layout.block_k, layout.block_k)
        self.n = BlockedAxis(problem.n, layout.block_n, layout.chunk)
        self.vectors = EpilogueVectors(problem, layout, self.n, hbm, vmem)
        self.ring = OutputRing(vmem, (self.k.uniform_chunk, self.n.uniform_chunk), self._copies)

    def _copies(self, slot: Index, where: tuple[Index, Index, Index] | None, rows: Index, columns: Index) -> list[Dma]:
        source = self.vmem["out"].at[slot, aligned_ds(0, rows, LANES), aligned_ds(0, columns, LANES)]
        which, row, column = where or (0, 0, 0)
        target = self._out(which, row, column, rows, columns)
        return [pltpu.make_async_copy(source, target, self.vmem["ring_sem"].at[slot])]

    def _out(self, which: Index, row: Index, column: Index, rows: Index, columns: Index) -> Ref:
        return self.hbm["out"].at[which, aligned_ds(row, rows, LANES), aligned_ds(column, columns, LANES)]

    def _block_ids(self, tile: Tile) -> tuple[Index, Index]:
        """The block of k and the block of n in which a tile lies."""
        if self.k.num_blocks == 1:
            return i32(0), tile.block
        if self.n.num_blocks == 1:
            return tile.block, i32(0)
        inner = i32((self.n if self.layout.k_outer else self.k).num_blocks)
        outer_id, inner_id = lax.div(tile.block, inner), lax.rem(tile.block, inner)
        return (outer_id, inner_id) if self.layout.k_outer else (inner_id, outer_id)

    # -- copies from HBM -----------------------------------------------------------------------------------------------

    def prefetchers(self) -> dict[str, Prefetcher]:
        """The operands that are prefetched, by name; those along n in chunks."""
        scheduler = self.scheduler

        def unless_empty(tile: Tile, chunks: Index) -> Index:  # an empty span has nothing to fetch
            return jnp.where(scheduler.rows_left(tile) > 0, chunks, i32(0))

        def one(dma: Callable[[Tile, Index, Index], Dma]) -> Callable[[Tile, Index, Index], list[Dma]]:
            return lambda *where: [dma(*where)]

        found = {
            "lhs": Prefetcher(
                scheduler,
                lambda tile: (tile.span, tile.row, self._block_ids(tile)[0]),
                one(self._dma_lhs),
                lambda tile: unless_empty(tile, i32(1)),
                self.layout.lhs_buffers,
            ),
            "rhs": Prefetcher(
                scheduler,
                lambda tile: (tile.span, tile.row, self._block_ids(tile)[1]),
                one(self._dma_rhs),
                lambda tile: unless_empty(tile, self.n.chunks_in(self._block_ids(tile)[1])),
            ),
        }
        if self.problem.epilogue.by_row:
            found["by_row"] = Prefetcher(
                scheduler,
                lambda tile: (tile.span, self._block_ids(tile)[0]),
                one(self._dma_row_scales),
                lambda tile: unless_empty(tile, i32(1)),
                self.layout.lhs_buffers,
            )
        for name in column_vectors(self.problem):
            found[name] = Prefetcher(
                scheduler,
                lambda tile: (tile.span, self._block_ids(tile)[1]),
                one(functools.partial(self._dma_columns, name)),
                lambda tile: unless_empty(tile, self.n.chunks_in(self._block_ids(tile)[1])),
            )
        if self.problem.epilogue.accumulate:
            found["existing"] = Prefetcher(
                scheduler,
                lambda tile: (tile.span, tile.block),
                one(self._dma_existing),
                lambda tile: self.n.chunks_in(self._block_ids(tile)[1]),
            )
        return found

    def _dma_lhs(self, tile: Tile, slot: Index, chunk: Index) -> Dma:
        del chunk
        rows, inside = self.scheduler.dma_rows(tile)
        start, size = self.k.block_range(self._block_ids(tile)[0])
        columns, first = aligned_ds(start, size, LANES), aligned_ds(0, size, LANES)
        if self.problem.transpose_lhs:
            source, target = self.hbm["lhs"].at[columns, rows], self.vmem["lhs"].at[slot, first, inside]
        else:
            source, target = self.hbm["lhs"].at[rows, columns], self.vmem["lhs"].at[slot, inside, first]
        return pltpu.make_async_copy(source, target, self.vmem["lhs_sem"].at[slot])

    def _dma_rhs(self, tile: Tile, slot: Index, chunk: Index) -> Dma:
        rows, inside = self.scheduler.dma_rows(tile)
        start, size = self.n.chunk_range(self._block_ids(tile)[1], chunk)
        return pltpu.make_async_copy(
            self.hbm["rhs"].at[rows, aligned_ds(start, size, LANES)],
            self.vmem["rhs"].at[slot, chunk, inside, aligned_ds(0, size, LANES)],
            self.vmem["rhs_sem"].at[slot, chunk],
        )

    def _dma_row_scales(self, tile: Tile, slot: Index, chunk: Index) -> Dma:
        del chunk
        block = tile.span * i32(self.k.num_blocks) + self._block_ids(tile)[0]
        return self.vectors.dma_rows(block * i32(self.vectors.lane_vectors), slot)

    def _dma_columns(self, name: str, tile: Tile, slot: Index, chunk: Index) -> Dma:
        return self.vectors.dma_columns(name, tile.span, self._block_ids(tile)[1], slot, chunk)

    def _dma_existing(self, tile: Tile, slot: Index, chunk: Index) -> Dma:
        kb, nb = self._block_ids(tile)
        (row, rows), (column, columns) = self.k.block_range(kb), self.n.chunk_range(nb, chunk)
        return pltpu.make_async_copy(
            self._out(tile.span, row, column, rows, columns),  # existing_out is aliased to the result
            self.vmem["existing"].at[slot, chunk, aligned_ds(0, rows, LANES), aligned_ds(0, columns, LANES)],
            self.vmem["existing_sem"].at[slot, chunk],
        )

    # -- arithmetic ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Initialize the output ring before the first tile."""
        self.ring.reset()

    def compute(
        self, tile: Tile, prev_end: Index, prefetchers: dict[str, Prefetcher], cursors: dict[str, Cursor]
    ) -> dict[str, Index]:
        """Add the products of one row tile to the accumulator of its column block, and finish it at the last tile."""
        del prev_end
        kb, nb = self._block_ids(tile)
        chunks = self.n.chunks_in(nb)
        some = self.scheduler.rows_left(tile) > 0
        x = self.vmem["lhs"].at[cursors["lhs"].slot]
        prefetchers["lhs"].wait(tile, cursors["lhs"])

        @pl.when(cursors["lhs"].is_new & some)
        def _() -> None:
            self._mask(tile, x, 1 if self.problem.transpose_lhs else 0)

        def compute_chunk(chunk: Index, none: None) -> None:
            y = self.vmem["rhs"].at[cursors["rhs"].slot, chunk]
            for name in (name for name in prefetchers if name != "lhs"):
                prefetchers[name].wait(tile, cursors[name], chunk)

            @pl.when(cursors["rhs"].is_new & some)
            def _() -> None:
                self._mask(tile, y, 0)

            self._accumulate(tile, chunk, x, y)

            @pl.when(self.scheduler.is_last(tile))
            def _() -> None:
                self._last_step(tile, chunk, x, y, cursors)

            prefetchers["rhs"].release(cursors["rhs"], chunk)
            # copies are served in order: those that the next products wait for are started before the result's
            prefetchers["lhs"].release(cursors["lhs"], 0, chunk == chunks - i32(1))

            @pl.when(self.scheduler.is_last(tile))
            def _() -> None:
                (row, rows), (column, columns) = self.k.block_range(kb), self.n.chunk_range(nb, chunk)
                self.ring.write_back((tile.span, row, column), rows, columns)

        lax.fori_loop(i32(0), chunks, compute_chunk, None)
        return {"rhs": chunks, "lhs": 1}

    def _step_counts(self, tile: Tile) -> tuple[Index, Index]:
        """The short steps of a tile in all, and the long steps that come before the last step of its span."""
        shift = i32(self.layout.step_m.bit_length() - 1)
        steps = (self.scheduler.rows(tile) + i32(self.layout.step_m - 1)) >> shift
        is_last = self.scheduler.is_last(tile)
        return steps, jnp.where(is_last, (jnp.maximum(steps, i32(1)) - i32(1)) >> i32(1), steps >> i32(1))

    def _mask(self, tile: Tile, buffer: Ref, axis: int) -> None:
        """Set the rows in the steps of a tile that are not in its span to zero; they lie along `axis`."""
        lead = self.scheduler.lead(tile)
        unit = max(self.layout.sublane_tile, native_rows(buffer.dtype.itemsize))

        def at(row: Index) -> tuple[Slice, Slice]:
            rows = aligned_ds(row, unit, unit)
            return (slice(None), rows) if axis else (rows, slice(None))

        def keep(row: Index, low: Index, high: Index) -> None:
            old = buffer[at(row)]
            index = lax.broadcasted_iota(jnp.int32, old.shape, axis)
            buffer[at(row)] = jnp.where((index >= low) & (index < high), old, jnp.zeros_like(old))

        @pl.when(tile.row < tile.start)
        def _() -> None:
            first = lead & i32(-unit)
            keep(first, lead + tile.start - tile.row - first, i32(unit))

        @pl.when(self.scheduler.is_last(tile))
        def _() -> None:
            rows = lead + tile.end - tile.row
            end = rows & i32(-unit)
            bottom = lead + self._step_counts(tile)[0] * i32(self.layout.step_m)

            @pl.when(end < rows)
            def _() -> None:
                keep(end, i32(0), rows - end)

            def clear(row: Index) -> Index:
                buffer[at(row)] = jnp.zeros_like(buffer[at(row)])
                return row + i32(unit)

            lax.while_loop(lambda row: row < bottom, clear, (rows + i32(unit - 1)) & i32(-unit))

    def _product(self, tile: Tile, x: Ref, y: Ref, row: Index, size: int, *, finished: bool = False) -> Value:
        """The product [block_k, chunk] of `size` rows of a tile, from `row` on; `finished` if it is the sum."""
        rows = aligned_ds(row, size, self.layout.step_m)
        if self.layout.moves_rows:
            left, right = (load_rows(each, row, size, self.scheduler.lead(tile)) for each in (x, y))
        else:
            left, right = x[:, rows] if self.problem.transpose_lhs else x[rows, :], y[rows, :]
        axes = (1 if self.problem.transpose_lhs else 0, 0)
        return multiply(self.problem, self.layout.chip, left, right, axes, finished=finished)

    def _accumulate(self, tile: Tile, chunk: Index, x: Ref, y: Ref) -> None:
        """Take the long steps of a tile that come before the last step of its span."""
        size, acc = 2 * self.layout.step_m, self.vmem["acc"].at[chunk]
        count = self._step_counts(tile)[1]
        first = (tile.row == self.scheduler.align_down(tile.start)) & (count > 0)

        @pl.when(first)
        def _() -> None:
            acc[...] = self._product(tile, x, y, 0, size)

        def step(i: Index, none: None) -> None:
            acc[...] += self._product(tile, x, y, i * i32(size), size)

        lax.fori_loop(first.astype(jnp.int32), count, step, None)

    def _last_step(self, tile: Tile, chunk: Index, x: Ref, y: Ref, cursors: dict[str, Cursor]) -> None:
        """Take the last step of a span, long or short, and put the finished result into the output ring."""
        slot, acc, problem, step_m = self.ring.acquire(), self.vmem["acc"].at[chunk], self.problem, self.layout.step_m
        steps, before = self._step_counts(tile)
        left = steps - i32(2) * before
        only = (tile.row == self.scheduler.align_down(tile.start)) & (before == 0)

        def transpose_scales() -> None:  # in the basic block of the product, which hides it
            if "by_row" in self.vmem:
                self.vectors.transpose_rows(cursors["by_row"].slot)

        def scaled(total: Value) -> Value:
            by_row = self.vectors.rows(0, self.layout.block_k, LANES)
            slot = cursors["by_column"].slot if "by_column" in cursors else None
            by_column = self.vectors.columns("by_column", slot, chunk)
            total = rescaled(problem, self.layout.chip, total)
            return problem.epilogue.finish(total, Extras(by_row, by_column), problem.out)

        def store(result: Value) -> None:
            if problem.epilogue.accumulate:
                old = self.vmem["existing"][cursors["existing"].slot, chunk]
                result = add(old, result)
            self.vmem["out"][slot] = cast(result, problem.out)

        for short in (1, 2):  # short steps in the last step

            @pl.when((left == i32(short)) & only)
            def _(short: int = short) -> None:
                transpose_scales()
                store(scaled(self._product(tile, x, y, 0, short * step_m, finished=True)))

            @pl.when((left == i32(short)) & jnp.logical_not(only))
            def _(short: int = short) -> None:
                transpose_scales()
                store(scaled(acc[...] + self._product(tile, x, y, before * i32(2 * step_m), short * step_m)))

        @pl.when(left == i32(0))  # an empty span; its scales may hold anything
        def _() -> None:
            store(jnp.zeros(acc.shape, problem.acc))

    def finish(self, prev_end: Index) -> None:
        """Wait for all copies of the result that are in flight."""
        del prev_end
        self.ring.drain()
