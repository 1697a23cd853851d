"""The mainloop of the rows form: a tile is rows of one group, and the sum runs over k.

Rows of other groups may be loaded and multiplied with it; they are not stored.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mgpu

from trencadis.backends.gpu.block_scales import BlockScales
from trencadis.backends.gpu.layout import (
    REWRITE_STAGES,
    ROW_ALIGN,
    SWIZZLE,
    WGMMA_M,
    Layout,
    swizzle_elements,
)
from trencadis.backends.gpu.mma_shapes import fit
from trencadis.backends.gpu.operand_scales import Scales
from trencadis.backends.gpu.parts import from_part
from trencadis.backends.gpu.scales import column_scales_by_step, needs_upcast, row_scales_of_step
from trencadis.backends.gpu.tile_scheduler import Ref, Refs, Scalar, Tile, TileScheduler, i32
from trencadis.backends.gpu.transpose import transpose_bytes
from trencadis.backends.gpu.unpack import unpacked
from trencadis.backends.gpu.upcast import rs_operand, rs_parts, upcast
from trencadis.core.dtypes import bits
from trencadis.core.jax_compat import transpose_ref
from trencadis.core.problem import Problem

PART = 64  # entries of k that are unpacked at once, of weights that are multiplied by scales: a swizzle row of lhs


def swizzled(dtype: Any, swizzle: int = SWIZZLE) -> tuple[Any, Any]:
    """The transforms of an operand in shared memory, tiled and swizzled as wgmma reads it."""
    return mgpu.TilingTransform((ROW_ALIGN, swizzle_elements(dtype, swizzle))), mgpu.SwizzleTransform(swizzle)


def operand_b(stages: Ref, stage: Scalar, n: int, k_major: bool) -> Ref:
    """The first n columns of a stage of operand B as [block_k, n]; it is [block_k, columns] or K-major.

    A stage and a part of it are taken by one index: lowering checks each against the transforms of shared memory.
    """
    if stages.shape[1 if k_major else 2] == n:
        b = stages.at[stage]
    else:
        b = stages.at[stage, pl.ds(0, n)] if k_major else stages.at[stage, :, pl.ds(0, n)]
    return transpose_ref(b) if k_major else b


def operand_a(stages: Ref, stage: Scalar, rows: Any, k_major: bool) -> Ref:
    """Some rows of a stage of operand A as [rows, block_k]; it is [block_k, rows] unless it is K-major."""
    return stages.at[stage, rows] if k_major else transpose_ref(stages.at[stage, :, rows])


class Gathered(NamedTuple):
    """Rows of a step that are gathered: blocks of columns, each of a swizzle row, and the stage they are copied to."""

    source: Ref  # [tokens, columns], in global memory
    column: Scalar  # the first one
    staged: Ref  # [rows, columns]
    inside: Scalar  # units of rows that the tile has; in a contraction, blocks of columns


@dataclasses.dataclass(frozen=True)
class RowsMainloop:
    """The loads of each step, the operands of its wgmma, and the upcast of weights in between."""

    problem: Problem
    layout: Layout

    def scratch(self) -> dict[str, Any]:
        """The stages of both operands; where weights are rewritten in shared memory, also those of the raw weights."""
        problem, cut = self.problem, self.layout
        rhs = (cut.block_n, cut.block_k) if problem.transpose_rhs else (cut.block_k, cut.block_n)
        stages = cut.stages * cut.pipelines
        lhs = (stages, cut.block_m, cut.block_k)
        memory = {"smem_lhs": mgpu.SMEM(lhs, problem.lhs, transforms=swizzled(problem.lhs, cut.swizzle))}
        swizzle = self.weights_swizzle if cut.upcast or cut.transpose_in_smem else cut.swizzle
        name = "smem_weights" if cut.rewrites else "smem_rhs"
        memory[name] = mgpu.SMEM((stages, *rhs), problem.rhs, transforms=swizzled(problem.rhs, swizzle))
        if cut.gated:
            memory["smem_up"] = memory["smem_rhs"]
        if problem.epilogue.row_block:
            memory["smem_row_scales"] = mgpu.SMEM((stages, self.row_scales, cut.block_m), jnp.float32)
        if column_scales_by_step(problem):
            memory["smem_column_scales"] = mgpu.SMEM((stages, cut.block_n), jnp.float32)
        if cut.upcast_in_smem:
            transforms = swizzled(problem.lhs, cut.swizzle)
            memory["smem_rhs"] = mgpu.SMEM((REWRITE_STAGES, *rhs), problem.lhs, transforms=transforms)
        if cut.transpose_in_smem:
            transforms = swizzled(problem.rhs, self.transposed_swizzle)
            memory["smem_rhs"] = mgpu.SMEM((REWRITE_STAGES, *rhs[::-1]), problem.rhs, transforms=transforms)
        return memory

    @property
    def rewritten(self) -> np.dtype[Any]:
        """The dtype of weights that are rewritten in shared memory."""
        return self.problem.rhs if self.layout.transpose_in_smem else self.problem.lhs

    @property
    def weights_run(self) -> int:
        """The elements in a swizzle row of low-precision weights: it divides their tile, their array and 128 bytes."""
        k_major = self.problem.transpose_rhs
        stage, whole = (self.layout.block_k, self.problem.k) if k_major else (self.layout.block_n, self.problem.n)
        return math.gcd(stage, whole, swizzle_elements(self.problem.rhs))

    @property
    def weights_swizzle(self) -> int:
        """The bytes of that swizzle row."""
        return self.weights_run * bits(self.problem.rhs) // 8

    @property
    def transposed_swizzle(self) -> int:
        """The bytes of a swizzle row of weights that were transposed: as for lhs, unless they are upcast next."""
        return self.layout.block_k if self.layout.upcast else self.layout.swizzle

    def load(self, refs: Refs, scheduler: TileScheduler, tile: Tile, step: Scalar, stage: Scalar) -> None:
        """Start the TMA copies of one step: as many rows of lhs as the tile has, and the weights of its columns."""
        problem, cut = self.problem, self.layout
        part, step, _ = scheduler.part_step(tile, step)
        k, n, full = self.columns(step), self._n(tile), refs["full"].at[stage]
        self.load_weights(refs, tile, part, step, stage)
        if problem.epilogue.row_block:
            rows_of_tile = pl.ds(pl.multiple_of(tile.row, ROW_ALIGN), cut.block_m)
            first = self.scale_of(step, problem.epilogue.row_block)
            scales = refs["by_row"].at[pl.ds(first, self.row_scales), rows_of_tile]
            mgpu.copy_gmem_to_smem(scales, refs["smem_row_scales"].at[stage], full)
        if column_scales_by_step(problem):
            scales = refs["by_column"].at[tile.group, self.scale_of(step, problem.epilogue.column_block[0]), n]
            mgpu.copy_gmem_to_smem(scales, refs["smem_column_scales"].at[stage], full)
        from_part("lhs", refs, cut, part, lambda lhs: self.load_rows(refs, tile, k, stage, {"smem_lhs": lhs}))

    def prefetch(self, refs: Refs, tile: Tile) -> None:
        """Fetch what consumers load from global memory themselves, the scales of weights along k, into the L2 cache."""
        if needs_upcast(self.problem) and self.problem.epilogue.column_block[0]:
            BlockScales(self.problem, self.layout).prefetch(refs, tile)

    def columns(self, step: Scalar) -> Any:
        """The entries of k of a step."""
        return pl.ds(pl.multiple_of(step * i32(self.layout.block_k), self.layout.block_k), self.layout.block_k)

    def _n(self, tile: Tile) -> Any:
        """The columns of a tile."""
        return pl.ds(pl.multiple_of(tile.column, self.layout.block_n), self.layout.block_n)

    def load_weights(self, refs: Refs, tile: Tile, part: Scalar, step: Scalar, stage: Scalar) -> None:
        """Start the TMA copies of the weights of one step, of the part that is multiplied at this index."""
        problem, cut, full = self.problem, self.layout, refs["full"].at[stage]
        k, n = self.columns(step), self._n(tile)
        group = tile.group if problem.weights == problem.spans else lax.rem(tile.group, i32(problem.weights))
        place = (group, n, k) if problem.transpose_rhs else (group, k, n)
        staged = refs["smem_weights" if cut.rewrites else "smem_rhs"].at[stage]
        from_part("rhs", refs, cut, part, lambda rhs: mgpu.copy_gmem_to_smem(rhs.at[place], staged, full))
        if cut.gated:
            mgpu.copy_gmem_to_smem(refs["up"].at[place], refs["smem_up"].at[stage], full)

    def load_beside(self, refs: Refs, scheduler: TileScheduler, tile: Tile, step: Scalar, stage: Scalar) -> None:
        """Start the TMA copies of what a step reads beside gathered rows: weights."""
        self.load_weights(refs, tile, i32(0), step, stage)

    def gathered(self, refs: Refs, tile: Tile, step: Scalar, stage: Scalar) -> Gathered:
        """Where the gathered rows of a step are, and where they go to: a block of columns of all rows of a tile."""
        return Gathered(refs["lhs"], self.columns(step).start, refs["smem_lhs"].at[stage], tile.units)

    def load_rows(self, refs: Refs, tile: Tile, columns: Any, stage: Scalar, sources: Refs) -> None:
        """Start the copies of some columns of as many rows as a tile has, from each source to where it is staged."""

        def rows(height: int) -> None:
            place = pl.ds(pl.multiple_of(tile.row, ROW_ALIGN), height), columns
            for name, source in sources.items():
                staged = refs[name].at[stage, pl.ds(0, height)]
                mgpu.copy_gmem_to_smem(source.at[place], staged, refs["full"].at[stage])

        # the shape of a copy is static: one branch for each height
        heights = self.copy_heights
        lax.switch(fit(self.layout, tile, heights), [functools.partial(rows, height) for height in heights])

    @property
    def copy_heights(self) -> list[int]:
        """The heights, in rows, of the copies of a tile."""
        return self.layout.heights

    def scale_of(self, step: Scalar, length: int) -> Scalar:
        """The index along k of the first scale of a step, where a scale has this length."""
        return step if length == self.layout.block_k else lax.div(step * i32(self.layout.block_k), i32(length))

    @property
    def row_scales(self) -> int:
        """The number of scales along k of a row in one step."""
        return row_scales_of_step(self.problem, self.layout.block_k)

    @property
    def copies(self) -> int:
        """The number of copies of a step."""
        scales = bool(self.problem.epilogue.row_block) + column_scales_by_step(self.problem)
        return 2 + scales + self.layout.gated

    def operands(
        self, refs: Refs, stages: tuple[Scalar, Scalar], mine: Any, n: int, scales: Scales | None = None,
        weights: str = "smem_rhs",
    ) -> tuple[Any, Any]:  # fmt: skip
        """Operands A and B of a consumer: its rows by the columns of the tile; swap-AB, its columns by the rows.

        Weights that are a register operand may be multiplied by scales.
        """
        k_major = self.problem.transpose_rhs or self.layout.transpose_in_smem
        (lhs, lhs_at), (rhs, rhs_at) = zip((refs["smem_lhs"], refs[weights]), stages, strict=True)
        if self.layout.upcast and not self.layout.upcast_in_smem:
            a = rs_operand(rhs.at[rhs_at, mine], self.problem.lhs, self.problem.interleaved, scales)
            return a, operand_b(lhs, lhs_at, n, True)
        if self.layout.swap_ab:
            return operand_a(rhs, rhs_at, mine, k_major), operand_b(lhs, lhs_at, n, True)
        return operand_a(lhs, lhs_at, mine, True), operand_b(rhs, rhs_at, n, k_major)

    def in_smem(self, refs: Refs, stages: tuple[Scalar, Scalar], mine: Any, n: int) -> tuple[Ref, Ref]:
        """Some rows of a tile, and the weights of its first n columns, both K-major, in shared memory."""
        return refs["smem_lhs"].at[stages[0], mine], refs["smem_rhs"].at[stages[1], pl.ds(0, n)]

    def part(
        self, refs: Refs, stages: tuple[Scalar, Scalar], mine: Any, n: int, k: Any, scales: Scales
    ) -> tuple[Any, Any]:
        """Operands A and B of a part of a step: weights times scales as a register operand, and rows."""
        held = refs["smem_rhs"].at[stages[1], mine, k]
        weights = rs_operand(held, self.problem.lhs, self.problem.interleaved, scales)
        return weights, self.lhs_part(refs, stages[0], n, k)

    def parts(
        self, refs: Refs, stages: tuple[Scalar, Scalar], mine: Any, n: int, scales: Scales
    ) -> Iterator[tuple[Any, Any]]:
        """Yield operands A and B of the parts of a step: weights times scales as a register operand, and rows."""
        held = refs["smem_rhs"].at[stages[1], mine]
        weights = rs_parts(held, self.problem.lhs, PART, self.problem.interleaved, scales)
        for i, part in enumerate(weights):
            yield part, self.lhs_part(refs, stages[0], n, pl.ds(i * PART, PART))

    def lhs_part(self, refs: Refs, stage: Scalar, n: int, k: Any) -> Ref:
        """Operand B of a product over a part of a step: the rows of a tile, K-major."""
        return transpose_ref(refs["smem_lhs"].at[stage, pl.ds(0, n), k])

    def rewrite(self, refs: Refs, stage: Scalar, to: Scalar) -> None:
        """Transpose the weights of a stage, or upcast them to the dtype of lhs, which is exact, into buffer `to`."""
        weights, out = refs["smem_weights"].at[stage], refs["smem_rhs"].at[to]
        if self.layout.transpose_in_smem:
            transpose_bytes(weights, out, self.weights_swizzle, self.transposed_swizzle)
        else:
            self._upcast(weights, out)
        mgpu.commit_smem()

    def _upcast(self, weights: Ref, out: Ref) -> None:
        """Write weights in the dtype of lhs, which is of 16 bits, or of 8 for weights of 4."""
        rows = 256 // self.weights_run
        tiles = mgpu.Tiling(((4 * rows, self.weights_run), (rows, self.weights_run), (8,)))  # 8 numbers to a lane
        layout = mgpu.Layout.TILED(tiles, (-5,), (-3, -2), -1)
        for top in range(0, out.shape[0], WGMMA_M):
            some = pl.ds(top, WGMMA_M)
            held = mgpu.layout_cast(weights.at[some][...], layout)
            eight = out.dtype.itemsize == 1
            out.at[some][...] = unpacked(held, out.dtype, layout) if eight else upcast(held, out.dtype)
