"""The consumer warpgroups: each takes a share of a tile's blocks, multiplies over all steps, and stores the result."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mgpu

from trencadis.backends.gpu import arrivals, short_sums, tile_queue
from trencadis.backends.gpu.block_scales import BlockScales
from trencadis.backends.gpu.contraction import ContractionMainloop
from trencadis.backends.gpu.gated import store_for
from trencadis.backends.gpu.layout import REWRITE_STAGES, WGMMA_M, Layout
from trencadis.backends.gpu.mma_shapes import MmaShape, MmaShapes, mma_shapes
from trencadis.backends.gpu.operand_scales import Scales
from trencadis.backends.gpu.rows import PART, RowsMainloop
from trencadis.backends.gpu.scales import (
    column_scales_by_step,
    in_operand,
    promoted_part,
    shared_by_tile,
    steps_in_parts,
)
from trencadis.backends.gpu.store import Store, Sums, part_of
from trencadis.backends.gpu.tile_scheduler import Ref, Refs, Scalar, Tile, TileScheduler, i32
from trencadis.backends.gpu.upcast import keep
from trencadis.core.problem import Problem

Mainloop = RowsMainloop | ContractionMainloop


@dataclasses.dataclass(frozen=True)
class Consumer:
    """One of the warpgroups that multiply."""

    problem: Problem
    layout: Layout
    mainloop: Mainloop
    refs: Refs
    scheduler: TileScheduler
    warpgroup: Scalar  # which of the consumers of a CTA
    pipeline: Scalar | None = None  # which of the pipelines of a CTA, if there are several

    def consume(self, tile: Tile, done: Scalar) -> None:
        """Compute and store its share of the blocks of a tile; `done` steps came before it."""
        shapes = mma_shapes(self.problem, self.layout)
        blocks, share = shapes.blocks(tile), shapes.share(tile)
        number = self.warpgroup if self.pipeline is None else lax.rem(self.warpgroup, i32(self.layout.consumers))
        first = number * share
        top = pl.multiple_of(first * i32(WGMMA_M), WGMMA_M)
        mine = lax.min(blocks - first, share)
        compute = functools.partial(self._compute, tile, done, top, mine, shapes)
        if not shapes.may_skip:
            compute()
            return
        lax.cond(mine > 0, compute, functools.partial(self._skip, tile, done))

    def _compute(self, tile: Tile, done: Scalar, top: Scalar, mine: Scalar, shapes: MmaShapes) -> None:
        """Multiply and store its blocks, from row `top` of the product on.

        Only the products have a branch for each shape: what they return is padded to the largest, and stored by the
        same code.
        """
        store = store_for(self.problem, self.layout, self.refs, self.warpgroup, done)
        subtiles = store.subtiles(top, shapes.largest)
        store.prefetch(tile, subtiles)
        rows = sorted({0, *(shape.blocks * WGMMA_M for shape in shapes.all), *[2 * WGMMA_M] * self.layout.gated})
        if self.layout.promoted:  # promoted sums come block by block
            rows = list(range(0, rows[-1] + 1, WGMMA_M))
        columns = sorted({0, *(shape.n for shape in shapes.all)})

        def product(shape: MmaShape) -> list[list[jax.Array]]:
            return _cut(self._product(tile, done, top, shape, store), rows, columns)

        branches = [functools.partial(product, shape) for shape in shapes.all]
        parts = lax.switch(shapes.branch(tile, mine), branches)
        store.store(tile, subtiles, Sums(parts, rows, columns), mine)

    def _product(self, tile: Tile, done: Scalar, top: Scalar, shape: MmaShape, store: Store) -> list[jax.Array]:
        """The sums of its blocks of a tile, as arrays [..., n] one below the other."""
        if self.layout.promoted and self.layout.upcast and not self.layout.upcast_in_smem:
            return [self._upcast_promoted_sums(tile, done, top, shape)]
        if self.layout.promoted:
            return self._promoted_sums(tile, done, top, shape, store)
        summed = functools.partial(self._sums, tile, done, top, shape)
        acc = mgpu.ACC((shape.blocks * WGMMA_M, shape.n), self.problem.acc)
        return pl.run_scoped(summed, *(acc,) * (2 if self.layout.gated else 1))

    def _sums(self, tile: Tile, done: Scalar, top: Scalar, shape: MmaShape, *accs: Ref) -> list[jax.Array]:
        """The sums of a tile [blocks * 64, n], accumulated by wgmma over all steps; with gate and up, those of both."""
        source = BlockScales(self.problem, self.layout) if in_operand(self.problem) else None

        def step(i: Scalar, words: list[jax.Array]) -> list[jax.Array]:
            at = self._wait(tile, done, i)
            if source is not None and self.layout.part_k:
                words = self._multiply_in_turn(accs[0], tile, at, top, shape, (source, words, i))
                self._release(done, i)
                return words
            scales = None if source is None else source.of_operand(words)
            words = [] if source is None else source.load(self.refs, tile, top, i + i32(1))
            if scales is None or self.layout.block_m < WGMMA_M:  # parts take more instructions, which limit few rows
                mgpu.wgmma(accs[0], *self._operands(at, top, shape.blocks, shape.n, scales))
                if self.layout.gated:
                    mgpu.wgmma(accs[1], *self._operands(at, top, shape.blocks, shape.n, weights="smem_up"))
                # Another consumer multiplies meanwhile: the sooner the stage is released, the better. And the compiler
                # does not know that a wgmma in flight still reads its register operand, and would reuse the registers.
                mgpu.wgmma_wait(0)
            else:
                self._multiply_parts(accs[0], at, top, shape, scales)
            self._release(done, i)
            return words

        first = [] if source is None else source.load(self.refs, tile, top, i32(0))
        lax.fori_loop(i32(0), tile.steps - i32(self.layout.epilogue_steps), step, first)
        return [acc[...] for acc in accs]

    def _multiply_in_turn(
        self, acc: Ref, tile: Tile, at: tuple[Scalar, Scalar], top: Scalar, shape: MmaShape,
        scales: tuple[BlockScales, list[jax.Array], Scalar],
    ) -> list[jax.Array]:  # fmt: skip
        """Multiply a step by weights times scales, one part after the other.

        Scales are a source, what was loaded of them for the first part, and the step. Returns what was loaded for the
        first part of the next step.
        """
        assert isinstance(self.mainloop, RowsMainloop)
        mainloop, length, (source, words, step) = self.mainloop, self.layout.part_k, scales
        parts = self.layout.block_k // length

        def part(i: Scalar, words: list[jax.Array]) -> list[jax.Array]:
            factors = source.of_operand(words)
            words = source.load(self.refs, tile, top, step * i32(parts) + i + i32(1))
            k = pl.ds(pl.multiple_of(i * i32(length), length), length)
            mgpu.wgmma(acc, *mainloop.part(self.refs, at, pl.ds(top, shape.blocks * WGMMA_M), shape.n, k, factors))
            mgpu.wgmma_wait(0)
            return words

        return lax.fori_loop(i32(0), i32(parts), part, words)

    def _multiply_parts(
        self, acc: Ref, at: tuple[Scalar, Scalar], top: Scalar, shape: MmaShape, scales: Scales
    ) -> None:
        """Multiply a step by weights that are a register operand times scales, which takes long to unpack.

        A part of them is unpacked while the one before it is multiplied. Registers of a part are free once its product
        is done, which the compiler does not know.
        """
        assert isinstance(self.mainloop, RowsMainloop)
        flying: list[Any] = []
        parts = self.mainloop.parts(self.refs, at, pl.ds(top, shape.blocks * WGMMA_M), shape.n, scales)
        for _ in range(self.layout.block_k // PART):
            if len(flying) == 2:
                mgpu.wgmma_wait(1)
                keep(flying.pop(0))
            a, b = next(parts)
            mgpu.wgmma(acc, a, b)
            flying.append(a)
        mgpu.wgmma_wait(0)
        keep(*flying)

    def _promoted_sums(self, tile: Tile, done: Scalar, top: Scalar, shape: MmaShape, store: Store) -> list[jax.Array]:
        """The sums of a tile, as blocks [64, n], where scales change along k.

        The product of each step is scaled and added to float32 sums in other registers (promotion).
        """
        assert isinstance(self.mainloop, RowsMainloop)
        mainloop, (length, _) = self.mainloop, self.problem.epilogue.column_block
        of_tile, of_step = shared_by_tile(self.problem), column_scales_by_step(self.problem)
        if of_tile:
            store.wait_vectors(tile)

        parts = self.layout.block_k // promoted_part(self.problem) if steps_in_parts(self.problem) else 1

        def product(at: tuple[Scalar, Scalar], row: int) -> jax.Array:
            def run(acc: Ref) -> jax.Array:
                mgpu.wgmma(acc, *self._operands(at, top + i32(row), 1, shape.n))
                mgpu.wgmma_wait(0)
                return acc[...].astype(jnp.float32)

            return pl.run_scoped(run, mgpu.ACC((WGMMA_M, shape.n), self.problem.acc))

        def step(i: Scalar, sums: list[jax.Array]) -> list[jax.Array]:
            at = self._wait(tile, done, i)
            rows = range(0, shape.blocks * WGMMA_M, WGMMA_M)
            each = self.refs["smem_by_column"][self.warpgroup, mainloop.scale_of(i, length)] if of_tile else None
            if parts > 1:
                for block, row in enumerate(rows):
                    own: list[Any] = [self._row_scales(at[0], part, top + i32(row), each) for part in range(parts)]
                    a, b = mainloop.in_smem(self.refs, at, pl.ds(top + i32(row), WGMMA_M), shape.n)
                    sums[block] = short_sums.promoted(sums[block], a, b, own, self.layout)
                self._release(done, i)
                return sums
            scales = [self._row_scales(at[0], 0, top + i32(row), each) for row in rows]
            columns = self.refs["smem_column_scales"][at[0], pl.ds(0, shape.n)] if of_step else None
            for block, (row, scale) in enumerate(zip(rows, scales, strict=True)):
                acc = product(at, row)
                if block == shape.blocks - 1:
                    self._release(done, i)
                sums[block] = sums[block] + _scaled(acc, scale, columns)
            return sums

        zeros = [jnp.zeros((WGMMA_M, shape.n), jnp.float32) for _ in range(shape.blocks)]
        return lax.fori_loop(i32(0), tile.steps, step, zeros)

    def _row_scales(self, stage: Scalar, part: int, row: Scalar, factor: Scalar | None) -> jax.Array | None:
        """The scales of 64 rows in a part of a step, times a factor that they share, [64]; None without either."""
        if not self.problem.epilogue.row_block:
            return None if factor is None else lax.broadcast(factor, (WGMMA_M,))
        scales = self.refs["smem_row_scales"][stage, part, pl.ds(row, WGMMA_M)]
        return scales if factor is None else scales * factor

    def _upcast_promoted_sums(self, tile: Tile, done: Scalar, top: Scalar, shape: MmaShape) -> jax.Array:
        """The sums [64, n] of a tile whose weights are operand A, where scales change along k.

        Those of weights have one number for each row of operand A, those of rows one for each column of the sums.
        """
        assert isinstance(self.mainloop, RowsMainloop)
        mainloop, row_block, exact = self.mainloop, self.problem.epilogue.row_block, in_operand(self.problem)
        source = BlockScales(self.problem, self.layout) if self.problem.epilogue.column_block[0] else None
        length = min(promoted_part(self.problem), self.layout.block_k)

        def product(a: Any, b: Ref, acc: Ref) -> jax.Array:
            mgpu.wgmma(acc, a, b)
            mgpu.wgmma_wait(0)
            return acc[...].astype(jnp.float32)

        def step(i: Scalar, sums: jax.Array) -> jax.Array:
            scales = [] if source is None else source.load(self.refs, tile, top, i)  # there before the product is
            at = self._wait(tile, done, i)
            factors = source.of_operand(scales) if source is not None and exact else None
            weights, _ = self._operands(at, top, 1, shape.n, factors)
            of_rows = self.refs["smem_row_scales"] if row_block else None
            for k in range(0, self.layout.block_k, length):
                a = weights if length == self.layout.block_k else weights[:, k : k + length]
                b = mainloop.lhs_part(self.refs, at[0], shape.n, pl.ds(k, length))
                multiply = functools.partial(product, a, b)
                acc = pl.run_scoped(multiply, mgpu.ACC((WGMMA_M, shape.n), self.problem.acc))
                rows = None if of_rows is None else of_rows[at[0], k // row_block, pl.ds(0, shape.n)]
                columns = None if source is None or exact else scales[k // source.length]
                sums = sums + _scaled(acc, columns, rows)
            self._release(done, i)
            return sums

        return lax.fori_loop(i32(0), tile.steps, step, jnp.zeros((WGMMA_M, shape.n), jnp.float32))

    def _skip(self, tile: Tile, done: Scalar) -> None:
        """Release all stages of a tile that has no blocks for this consumer."""

        def step(i: Scalar, _: None) -> None:
            self._wait(tile, done, i)
            self._release(done, i)

        lax.fori_loop(i32(0), tile.steps, step, None)

    def _operands(
        self, at: tuple[Scalar, Scalar], top: Scalar, blocks: int, n: int, scales: Scales | None = None,
        weights: str = "smem_rhs",
    ) -> tuple[Ref, Ref]:  # fmt: skip
        """Operands A and B of a wgmma over some blocks from row `top` on, in the stages of lhs and rhs."""
        mine = pl.ds(top, blocks * WGMMA_M)
        if isinstance(self.mainloop, ContractionMainloop):
            return self.mainloop.operands(self.refs, at, mine, n)
        return self.mainloop.operands(self.refs, at, mine, n, scales, weights)

    def _wait(self, tile: Tile, done: Scalar, i: Scalar) -> tuple[Scalar, Scalar]:
        """Wait until step i of a tile is in shared memory; returns the stages of lhs and rhs that hold it."""
        refs, at = self.refs, tile_queue.slot(done + i, self.layout.stages, self.pipeline)
        mgpu.barrier_wait(refs["full"].at[at])
        if self.problem.gather is not None:
            arrivals.wait(refs, self.layout, done + i)
        if isinstance(self.mainloop, ContractionMainloop):
            may_need_mask = self.mainloop.may_need_mask(self.scheduler, tile, i)
            pl.when(may_need_mask)(lambda: mgpu.barrier_wait(refs["masked"].at[at]))
        if not self.layout.rewrites:
            return at, at
        to = tile_queue.slot(done + i, REWRITE_STAGES)
        mgpu.barrier_wait(refs["rewritten"].at[to])
        return at, to

    def _release(self, done: Scalar, i: Scalar) -> None:
        """Tell the producer, and the rewrite warpgroup, that this consumer has read step i of a tile."""
        mgpu.barrier_arrive(self.refs["empty"].at[tile_queue.slot(done + i, self.layout.stages, self.pipeline)])
        if self.layout.rewrites:
            mgpu.barrier_arrive(self.refs["rewritten_empty"].at[tile_queue.slot(done + i, REWRITE_STAGES)])


def _scaled(acc: jax.Array, down: jax.Array | None, across: jax.Array | None) -> jax.Array:
    """Sums [64, n] times a scale for each of their rows, and one for each of their columns."""
    for axis, scales in enumerate((down, across)):
        acc = acc if scales is None else acc * lax.broadcast_in_dim(scales, acc.shape, (axis,))
    return acc


def _cut(sums: list[jax.Array], rows: Sequence[int], columns: Sequence[int]) -> list[list[jax.Array]]:
    """Sums that are below each other, cut at these rows and columns; zeros where a larger product has more of them."""
    height, n = sums[0].shape

    def part(top: int, bottom: int, left: int, right: int) -> jax.Array:
        at, top = divmod(top, height)
        bottom -= at * height
        if at >= len(sums) or left >= n:
            return jnp.zeros((bottom - top, right - left), sums[0].dtype)
        return part_of(sums[at], top, bottom, left, right)

    return [[part(*down, *across) for across in itertools.pairwise(columns)] for down in itertools.pairwise(rows)]
