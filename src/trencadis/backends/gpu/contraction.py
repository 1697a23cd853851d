"""The mainloop of the contraction form: a tile is a part of one group's matrix, and the sum runs over its rows.

Steps start at multiples of a few rows, so that the first and the last step of a group also hold rows of its neighbours.
The mask warpgroup zeroes these in both operands, since zero times whatever they hold need not be zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mgpu

from trencadis.backends.gpu.layout import ROW_ALIGN, WGMMA_M, Layout, swizzle_elements
from trencadis.backends.gpu.parts import OPERANDS, from_part
from trencadis.backends.gpu.rows import Gathered, operand_a, operand_b, swizzled
from trencadis.backends.gpu.tile_scheduler import Ref, Refs, Scalar, Tile, TileScheduler, i32
from trencadis.core.problem import Problem

MASK_ROWS = 64  # rows of a K-major stage that are masked at a time

STAGED = ("smem_lhs", "smem_rhs")  # the stages of operands A and B


@dataclasses.dataclass(frozen=True)
class ContractionMainloop:
    """The loads of each step, the mask of its rows, and the operands of its wgmma."""

    problem: Problem
    layout: Layout

    copies = 2  # of a step

    @property
    def k_major(self) -> tuple[bool, bool]:
        """Whether lhs is stored [k, rows], and whether rhs is stored [n, rows]: rows are the K of this GEMM."""
        return self.problem.transpose_lhs or self.layout.k_major, self.layout.k_major

    def scratch(self) -> dict[str, Any]:
        """The stages of both operands in shared memory."""
        problem, cut = self.problem, self.layout
        lhs, rhs = (
            (columns, cut.block_k) if k_major else (cut.block_k, columns)
            for columns, k_major in zip((cut.block_m, cut.block_n), self.k_major, strict=True)
        )
        return {
            "smem_lhs": mgpu.SMEM((cut.stages, *lhs), problem.lhs, transforms=swizzled(problem.lhs, cut.swizzle)),
            "smem_rhs": mgpu.SMEM((cut.stages, *rhs), problem.rhs, transforms=swizzled(problem.rhs, cut.swizzle)),
        }

    def load(self, refs: Refs, scheduler: TileScheduler, tile: Tile, step: Scalar, stage: Scalar) -> None:
        """Start the TMA copies of one step: rows of both operands."""
        for name in OPERANDS:
            self._load(name, refs, scheduler, tile, step, stage)

    def _load(self, name: str, refs: Refs, scheduler: TileScheduler, tile: Tile, step: Scalar, stage: Scalar) -> None:
        """Start the TMA copy of rows of one operand; of rhs, that of the result to which the tile belongs."""
        cut, full = self.layout, refs["full"].at[stage]
        part, step, _ = scheduler.part_step(tile, step)
        rows, columns = pl.ds(scheduler.step_row(tile, step), cut.block_k), self._columns(name, tile)
        place = (columns, rows) if self.k_major[OPERANDS.index(name)] else (rows, columns)

        def copy(source: Ref) -> None:
            mgpu.copy_gmem_to_smem(source.at[place], refs[f"smem_{name}"].at[stage], full)

        if cut.two_results and name == "rhs":
            lax.cond(tile.group < i32(self.problem.spans), lambda: copy(refs["rhs"]), lambda: copy(refs["up"]))
        else:
            from_part(name, refs, cut, part, copy)

    def _columns(self, name: str, tile: Tile) -> Any:
        """The columns of an operand that a tile reads."""
        if name == "lhs":
            return pl.ds(pl.multiple_of(tile.row, WGMMA_M), self.layout.block_m)
        return pl.ds(pl.multiple_of(tile.column, self.layout.block_n), self.layout.block_n)

    def load_beside(self, refs: Refs, scheduler: TileScheduler, tile: Tile, step: Scalar, stage: Scalar) -> None:
        """Start the TMA copy of what a step reads beside gathered rows: the other operand."""
        for name in OPERANDS:
            if name != self._gathered:
                self._load(name, refs, scheduler, tile, step, stage)

    @property
    def _gathered(self) -> str:
        """The operand whose rows are gathered."""
        return "" if self.problem.gather is None else self.problem.gather.operand

    def gathered(self, refs: Refs, tile: Tile, step: Scalar, stage: Scalar) -> Gathered:
        """Where the gathered rows of a step are, and where they go to: as many blocks of columns as the tile has."""
        name, source = self._gathered, refs[self._gathered]
        start, blocks = self._columns(name, tile).start, tile.units
        if name == "rhs":
            blocks = lax.div(i32(source.shape[1]) - start, i32(WGMMA_M))
        return Gathered(source, start, refs[f"smem_{name}"].at[stage], blocks)

    def operands(self, refs: Refs, stages: tuple[Scalar, Scalar], mine: Any, n: int) -> tuple[Any, Any]:
        """Operands A and B of a consumer: its rows of the matrix by the columns of the tile."""
        (lhs, rhs), (lhs_k_major, rhs_k_major) = (refs[name] for name in STAGED), self.k_major
        return operand_a(lhs, stages[0], mine, lhs_k_major), operand_b(rhs, stages[1], n, rhs_k_major)

    def may_need_mask(self, scheduler: TileScheduler, tile: Tile, step: Scalar) -> Any:
        """Whether a step may hold rows of other groups, as the first and the last of a sum may."""
        _, step, steps = scheduler.part_step(tile, step)
        return (step == i32(0)) | (step == steps - i32(1))

    def mask(self, refs: Refs, scheduler: TileScheduler, tile: Tile, step: Scalar, stage: Scalar) -> None:
        """Zero the rows of a stage that belong to other groups, in both operands."""
        block_k, row = i32(self.layout.block_k), scheduler.step_row(tile, scheduler.part_step(tile, step)[1])
        low, high = lax.max(tile.start - row, i32(0)), lax.min(tile.end - row, block_k)

        @pl.when((low > 0) | (high < block_k))
        def _() -> None:
            operands = list(zip((refs[name] for name in STAGED), self.k_major, strict=True))
            _mask_rows([ref for ref, k_major in operands if not k_major], stage, low, high)
            for ref in (ref for ref, k_major in operands if k_major):
                _mask_columns(ref, stage, low, high)
            mgpu.commit_smem()


def _registers(dtype: Any, run: int) -> Any:
    """The register layout of rows of a stage that are cut into runs of columns: 8 bytes to a lane."""
    rows = 256 // (run * dtype.itemsize)  # of a warp
    tiles = mgpu.Tiling(((4 * rows, run), (rows, run), (8 // dtype.itemsize,)))
    return mgpu.Layout.TILED(tiles, (-5,), (-3, -2), -1)


def _mask_rows(operands: list[Ref], stage: Scalar, low: Scalar, high: Scalar) -> None:
    """Zero the rows of a stage [block_k, columns] outside of [low, high), eight at a time; most are not touched."""
    eight, block_k = i32(ROW_ALIGN), i32(operands[0].shape[1] if operands else 0)
    above, below = lax.div(low, eight), lax.div(high + i32(ROW_ALIGN - 1), eight)  # eights [above, below) have own rows

    def each(mask: Callable[[Ref, Any, Any], None], i: Scalar) -> None:
        for stages in operands:
            layout = _registers(stages.dtype, swizzle_elements(stages.dtype))
            zeros = mgpu.layout_cast(jnp.zeros((ROW_ALIGN, stages.shape[2]), stages.dtype), layout)
            mask(stages.at[stage, pl.ds(pl.multiple_of(i * eight, ROW_ALIGN), ROW_ALIGN)], zeros, layout)

    def zero(i: Scalar, _: None) -> None:
        def mask(rows: Ref, zeros: Any, _: Any) -> None:
            rows[...] = zeros

        each(mask, lax.select(i < above, i, below + i - above))

    def zero_around(i: Scalar, _: None) -> None:
        edge = lax.select(i == i32(0), low, high)
        at = lax.div(edge, eight)

        def mask(rows: Ref, zeros: Any, layout: Any) -> None:
            row = mgpu.layout_cast(lax.broadcasted_iota(jnp.int32, zeros.shape, 0), layout) + at * eight
            rows[...] = lax.select((row >= low) & (row < high), mgpu.layout_cast(rows[...], layout), zeros)

        pl.when(edge > at * eight)(lambda: each(mask, at))

    if operands:
        lax.fori_loop(i32(0), i32(2), zero_around, None)
        lax.fori_loop(i32(0), above + lax.div(block_k, eight) - below, zero, None)


def _mask_columns(stages: Ref, stage: Scalar, low: Scalar, high: Scalar) -> None:
    """Zero the columns of a K-major stage [rows, block_k] outside of [low, high)."""
    _, height, columns = stages.shape
    layout, shape = _registers(stages.dtype, columns), (MASK_ROWS, columns)
    at = mgpu.layout_cast(lax.broadcasted_iota(jnp.int32, shape, 1), layout)
    # -1, all bits set, in the group's columns, and 0 elsewhere. A comparison would be lowered to a select of 8-bit
    # numbers, one by one; a bitwise and clears a word at a time.
    own = lax.shift_right_arithmetic((low - i32(1) - at) & (at - high), jnp.full(shape, 31, jnp.int32))
    bitwise = stages.dtype.itemsize == 1  # Mosaic has no arithmetic on 8-bit floats in registers
    mask = own.astype(jnp.int8) if bitwise else own < 0

    def some(i: Scalar, _: None) -> None:
        rows = stages.at[stage, pl.ds(pl.multiple_of(i * i32(MASK_ROWS), MASK_ROWS), MASK_ROWS)]
        held = mgpu.layout_cast(rows[...], layout)
        if bitwise:
            rows[...] = lax.bitcast_convert_type(lax.bitcast_convert_type(held, jnp.int8) & mask, stages.dtype)
        else:
            rows[...] = lax.select(mask, held, mgpu.layout_cast(jnp.zeros(shape, stages.dtype), layout))

    lax.fori_loop(i32(0), i32(height // MASK_ROWS), some, None)
