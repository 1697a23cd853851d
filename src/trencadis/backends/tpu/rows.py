"""The body of the rows form: out[r] = lhs[r] @ rhs[group of r]. A group's weights stay in VMEM for all of its rows.

A row tile starts at a multiple of the sublane tile, so that it may hold rows of other groups as well. Rows do not mix
in a product, so nothing is masked on input; `row_results` puts the rows of neighbours together on output. With a gated
activation (`gating`) there are two weights, or two more matrices to read, and several results.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from trencadis.backends.tpu import block_scales, epilogue_vectors, gating, row_results
from trencadis.backends.tpu.block_scales import BlockScales, as_held, held_weights
from trencadis.backends.tpu.epilogue_vectors import EpilogueVectors, column_vectors, lane_vector_of
from trencadis.backends.tpu.indexing import LANES, BlockedAxis, Dma, Index, Ref, Slice, Value, aligned_ds, i32
from trencadis.backends.tpu.layout import Layout
from trencadis.backends.tpu.pipeline import Cursor, Prefetcher
from trencadis.backends.tpu.products import multiply, rescaled
from trencadis.backends.tpu.realign import load_rows, native_rows
from trencadis.backends.tpu.row_results import RowResults, results
from trencadis.backends.tpu.tile_scheduler import Tile, TileScheduler
from trencadis.core.dtypes import cast
from trencadis.core.epilogue import Extras, add
from trencadis.core.problem import Problem

__all__ = ["RowsBody", "results", "scratch"]


def scratch(problem: Problem, layout: Layout) -> dict[str, Any]:
    """The scratch shapes of the kernel, by name."""
    chunks, chunk, rows = layout.chunks, layout.chunk, layout.block_m
    weights = (chunk, problem.k) if problem.transpose_rhs else (problem.k, chunk)
    buffers: dict[str, Any] = {
        "lhs": pltpu.VMEM((layout.lhs_buffers, layout.buffer_rows, problem.k), problem.lhs),
        "lhs_sem": pltpu.SemaphoreType.DMA((layout.lhs_buffers,)),
        **row_results.scratch(problem, layout),
        **epilogue_vectors.scratch(problem, layout),
        **block_scales.scratch(problem, layout),
    }
    for name in gating.weights(problem):
        buffers[name] = pltpu.VMEM((2, chunks, *weights), held_weights(problem))
    for name in gating.matrices(problem):
        buffers[name] = pltpu.VMEM((2, chunks, rows, chunk), problem.out)
    for name in (*gating.weights(problem), *gating.matrices(problem)):
        buffers[f"{name}_sem"] = pltpu.SemaphoreType.DMA((2, chunks))
    return buffers


class RowsBody:
    """The body of the rows form; `hbm` and `vmem` are the kernel's references by name."""

    def __init__(
        self, problem: Problem, layout: Layout, scheduler: TileScheduler, hbm: dict[str, Ref], vmem: dict[str, Ref]
    ) -> None:
        self.problem, self.layout, self.scheduler, self.hbm, self.vmem = problem, layout, scheduler, hbm, vmem
        self.n = BlockedAxis(problem.n, layout.block_n, layout.chunk)
        self.vectors = EpilogueVectors(problem, layout, self.n, hbm, vmem)
        self.block_scales = BlockScales(problem, layout, self.n, hbm, vmem)
        self.results = RowResults(problem, layout, scheduler, hbm, vmem)

    # -- copies from HBM -----------------------------------------------------------------------------------------------

    def prefetchers(self) -> dict[str, Prefetcher]:
        """What is prefetched together, by name; all but lhs and its scales in chunks of n."""
        scheduler = self.scheduler

        def chunks(tile: Tile) -> Index:
            return self.n.chunks_in(tile.block)

        def weights(tile: Tile) -> tuple[Index, ...]:
            return tile.span, tile.block

        def rows(tile: Tile) -> tuple[Index, ...]:
            return tile.span, tile.row

        found = {
            "lhs": Prefetcher(scheduler, rows, self._copies_of_rows, lambda tile: i32(1), self.layout.lhs_buffers),
            "rhs": Prefetcher(scheduler, weights, self._copies_of_weights, chunks),
        }
        if gating.matrices(self.problem):
            found["matrices"] = Prefetcher(
                scheduler, lambda tile: (*weights(tile), tile.row), self._copies_of_matrices, chunks
            )
        return found

    def _copies_of_rows(self, tile: Tile, slot: Index, chunk: Index) -> list[Dma]:
        """The copies of a row tile of lhs, and of its scales."""
        del chunk
        rows, inside = self.scheduler.dma_rows(tile)
        source, target = self.hbm["lhs"].at[rows, self._part_of_k()], self.vmem["lhs"].at[slot, inside, :]
        copies = [pltpu.make_async_copy(source, target, self.vmem["lhs_sem"].at[slot])]
        if "by_row" in self.vmem:
            copies.append(self.vectors.dma_rows(lane_vector_of(tile.row), slot))
        return copies

    def _copies_of_weights(self, tile: Tile, slot: Index, chunk: Index) -> list[Dma]:
        """The copies of a chunk of a group's weights, of its scales along k, and of the vectors along its columns."""
        copies = [self._dma_weights(name, tile, slot, chunk) for name in gating.weights(self.problem)]
        if block_scales.applies(self.problem):
            which = lax.rem(tile.span, i32(self.problem.weights))
            copies.append(self.block_scales.dma(which, tile.block, slot, chunk))
        return copies + [self._dma_columns(name, tile, slot, chunk) for name in column_vectors(self.problem)]

    def _copies_of_matrices(self, tile: Tile, slot: Index, chunk: Index) -> list[Dma]:
        """The copies of a chunk of the rows of operands that have the shape of the result."""
        return [self._dma_matrix(name, tile, slot, chunk) for name in gating.matrices(self.problem)]

    def _dma_weights(self, name: str, tile: Tile, slot: Index, chunk: Index) -> Dma:
        start, size = self.n.chunk_range(tile.block, chunk)
        unit = LANES
        if self.layout.cut and self.problem.transpose_rhs:  # columns are rows here, which no tile pads up to 128
            size = jnp.minimum(size, i32(self.layout.columns) - start)
            unit = native_rows(self.problem.rhs.itemsize)
        columns, inside = aligned_ds(start, size, unit), aligned_ds(0, size, unit)
        which, target = lax.rem(tile.span, i32(self.problem.weights)), self.vmem[name].at[slot, chunk]
        weights = as_held(self.hbm[name], held_weights(self.problem))
        if self.problem.transpose_rhs:
            source, target = weights.at[which, columns, self._part_of_k()], target.at[inside, :]
        else:
            source, target = weights.at[which, self._part_of_k(), columns], target.at[:, inside]
        return pltpu.make_async_copy(source, target, self.vmem[f"{name}_sem"].at[slot, chunk])

    def _part_of_k(self) -> Slice:
        """The columns of lhs, and of weights their entries of k, that the kernel multiplies: a part, or all of them."""
        if "k_start" not in self.hbm:
            return slice(None)
        return aligned_ds(self.hbm["k_start"][0], self.problem.k, LANES)

    def _dma_columns(self, name: str, tile: Tile, slot: Index, chunk: Index) -> Dma:
        which = lax.rem(tile.span, i32(self.problem.weights))
        return self.vectors.dma_columns(name, which, tile.block, slot, chunk)

    def _dma_matrix(self, name: str, tile: Tile, slot: Index, chunk: Index) -> Dma:
        start, size = self.n.chunk_range(tile.block, chunk)
        rows = self.scheduler.rows(tile)
        unit = self.layout.sublane_tile
        return pltpu.make_async_copy(
            # existing_out is aliased to the result
            self.results.place("out" if name == "existing" else name, tile.row, start, rows, size),
            self.vmem[name].at[slot, chunk, aligned_ds(0, rows, unit), aligned_ds(0, size, LANES)],
            self.vmem[f"{name}_sem"].at[slot, chunk],
        )

    # -- arithmetic ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Initialize the buffers of the results before the first tile."""
        self.results.start()

    def compute(
        self, tile: Tile, prev_end: Index, prefetchers: dict[str, Prefetcher], cursors: dict[str, Cursor]
    ) -> dict[str, Index]:
        """Multiply one row tile by one column block of weights; `prev_end` is where the rows of the last span ended."""
        scheduler = self.scheduler
        prefetchers["lhs"].wait(tile, cursors["lhs"])
        height, chunks = scheduler.height(tile), self.n.chunks_in(tile.block)

        def compute_chunk(chunk: Index, none: None) -> None:
            for name in (name for name in prefetchers if name != "lhs"):
                prefetchers[name].wait(tile, cursors[name], chunk)

            @pl.when(tile.row == scheduler.align_down(tile.start))
            def _() -> None:
                self.results.write_unowned(prev_end, scheduler.align_down(tile.start), tile.block, chunk)

            slot = self.results.ring.acquire()
            for h in self.layout.heights:

                @pl.when(height == i32(h))
                def _(h: int = h) -> None:
                    self._multiply(h, tile, chunk, slot, cursors)

            prefetchers["rhs"].release(cursors["rhs"], chunk)
            # copies are served in order: those that the next products wait for are started before the result's
            prefetchers["lhs"].release(cursors["lhs"], 0, chunk == chunks - i32(1))
            self.results.write_back(tile, prev_end, chunk, slot, cursors)

        lax.fori_loop(i32(0), chunks, compute_chunk, None)
        return {"rhs": chunks, "lhs": 1}

    def _multiply(self, h: int, tile: Tile, chunk: Index, slot: Index, cursors: dict[str, Cursor]) -> None:
        """Compute one chunk of the results of a row tile of height h into a buffer of the ring."""
        gate, vmem, slots = self.problem.gate, self.vmem, (cursors["rhs"].slot, chunk)
        x = vmem["lhs"].at[cursors["lhs"].slot]
        x = load_rows(x, 0, h, self.scheduler.lead(tile)) if self.layout.moves_rows else x[:h, :]  # [h, k]
        if "by_row" in vmem:  # in the basic block of the product, which hides it
            self.vectors.transpose_rows(cursors["lhs"].slot)
        by_row = self.vectors.rows(tile.row & i32(LANES - 1), h, self.layout.sublane_tile)
        rows = [vmem[name][cursors["matrices"].slot, chunk, :h, :] for name in gating.matrices(self.problem)]
        if gate is None:
            result = self._sum("rhs", "bias", x, by_row, slots)
            found = [add(rows[0], result) if rows else result]
        elif gate.pullback:
            d_h = self._sum("rhs", "bias", x, None, slots)
            found = gating.pulled_back(gate, d_h, rows, by_row, self._real_columns(h, tile, chunk))
        else:
            pairs = (("rhs", "bias"), ("rhs_up", "bias_up"))
            sums = [self._sum(*names, x, None, slots) for names in pairs]
            found = gating.activated(gate, self.problem.out, sums)
        for (name, (_, dtype)), value in zip(gating.results(self.problem, self.layout).items(), found, strict=True):
            vmem[name][slot, :h, :] = cast(value, dtype)

    def _sum(self, weights: str, bias: str, x: Value, by_row: Value | None, at: tuple[Index, Index]) -> Value:
        """The product [h, chunk] of rows x and the weights at (slot, chunk), after the steps of the epilogue."""
        problem = self.problem
        w = self.vmem[weights].at[at]  # [k, chunk] or [chunk, k]
        if block_scales.applies(problem):
            acc = self.block_scales.product(x, w, at)  # [h, chunk]
        else:
            acc = multiply(problem, self.layout.chip, x, w[...], (1, 1 if problem.transpose_rhs else 0))
            acc = rescaled(problem, self.layout.chip, acc)
        by_column = (self.vectors.columns(name, *at) for name in ("by_column", bias))
        return problem.epilogue.finish(acc, Extras(by_row, *by_column), problem.out)

    def _real_columns(self, h: int, tile: Tile, chunk: Index) -> Value | None:
        """The mask [h, chunk] of the columns that are not padding; None if there is none in any chunk."""
        columns = self.layout.columns or self.problem.n
        if columns % self.layout.chunk == 0:
            return None
        start, _ = self.n.chunk_range(tile.block, chunk)
        return lax.broadcasted_iota(jnp.int32, (h, self.layout.chunk), 1) < i32(columns) - start

    def finish(self, prev_end: Index) -> None:
        """Write the unowned rows after the last span, and wait for all copies in flight."""
        self.results.finish(prev_end)
