"""Scales of low-precision weights that change along k, which consumers load from global memory, step by step.

A consumer holds 64 columns of the weights as the rows of operand A, so that a thread needs the scales of two of them.
How they are applied depends on whether the product of a value and its scale is a bfloat16 number:

    exact       e8m0 scales (mxfp4, mxfp8), e4m3 scales of 4-bit values (nvfp4)    operand A is multiplied by them
    otherwise   float32 scales per 64, 128, ... of k                               promotion: the sums of each block are

Either way nothing is rounded but the result.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import FragmentedArray, utils
from jax.experimental.pallas import mosaic_gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

from trencadis.backends.gpu.layout import WGMMA_M, Layout
from trencadis.backends.gpu.operand_scales import PAIR, ROW, Scales, of_step, quad_lane
from trencadis.backends.gpu.scales import in_operand
from trencadis.backends.gpu.tile_scheduler import Ref, Refs, Scalar, Tile, i32
from trencadis.core.interleave import LANES
from trencadis.core.problem import Problem

Value = Any  # an MLIR value: its type is generic or not, by the version of jaxlib
THREADS = 128  # of a warpgroup
WORD_BYTES = 4
SECTOR = 32  # bytes that a cache fetches at once


@dataclasses.dataclass(frozen=True)
class BlockScales:
    """The scales of the weights of a problem, per `length` of k and `across` of n."""

    problem: Problem
    layout: Layout

    @property
    def length(self) -> int:
        """The entries of k that share a scale."""
        return self.problem.epilogue.column_block[0]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the scales."""
        return self.problem.epilogue.column_scales

    @property
    def per_step(self) -> int:
        """The number of scales along k in one step of the mainloop, or in the part of it that is unpacked at once."""
        return -(-self.layout.unpacked_k // self.length)

    @property
    def packed(self) -> bool:
        """Whether scales are bytes, which operand A is multiplied by; promotion has float32."""
        return in_operand(self.problem)

    @property
    def chunk(self) -> int:
        """The bytes of scales of a step that each of the four lanes of a row loads and converts: two, or four."""
        return WORD_BYTES if self.per_step > LANES * PAIR else PAIR

    def of_operand(self, loaded: list[jax.Array]) -> Scales:
        """The scales of a step as factors of operand A, from what `load` gives."""
        (words,) = loaded
        return of_step(words, self.chunk, self.dtype, self.length, self.problem.rhs, self.problem.interleaved)

    def load(self, refs: Refs, tile: Tile, top: Scalar, step: Scalar) -> list[jax.Array]:
        """The scales of a step, or of a part that is unpacked at once, for the 64 columns from `top` of a tile on.

        They are bytes by lane, or float32 numbers [64].
        Global memory answers late: they are asked for well before they are used. Past the last step they repeat.
        """
        across = self.problem.epilogue.column_block[1]
        ref, height = refs["by_column"], WGMMA_M if across == 1 else 1
        first = lax.div(tile.column + top, i32(across))
        # the last tile may be wider than the result: what it computes there is not stored
        rows = ref.at[self._weights(tile), pl.ds(lax.min(first, i32(ref.shape[1] - height)), height)]
        start = lax.div(step * i32(self.layout.unpacked_k), i32(self.length))
        if self.packed:
            return [_load_bytes(rows, lax.div(start, i32(ref.dtype.itemsize)), self.chunk, shared=across > 1)]
        return _load(rows, start, self.per_step, shared=across > 1)

    def prefetch(self, refs: Refs, tile: Tile) -> None:
        """Fetch the scales of a tile into the L2 cache, long before consumers load them.

        From there they arrive within a step; global memory takes longer than that.
        """
        ref, across = refs["by_column"], self.problem.epilogue.column_block[1]
        height = min(-(-self.layout.block_n // across), ref.shape[1])
        first = lax.min(lax.div(tile.column, i32(across)), i32(ref.shape[1] - height))
        _prefetch(ref.at[self._weights(tile), pl.ds(first, height)])

    def _weights(self, tile: Tile) -> Scalar:
        """The index of the weights, and of their scales, that the group of a tile meets."""
        weights = self.problem.weights
        return tile.group if weights == self.problem.spans else lax.rem(tile.group, i32(weights))


def stored(problem: Problem, layout: Layout, scales: jax.Array) -> jax.Array:
    """Scales [g, k / length, n / across] as the kernel reads them: [g, n / across, k / length], float32 or bytes.

    Bytes are in integers of as many as a lane loads, if rows and steps are whole ones.
    """
    scales, pad = scales.mT, -problem.n % WGMMA_M if problem.epilogue.column_block[1] == 1 else 0
    if pad:
        scales = jnp.concatenate([scales, jnp.ones((scales.shape[0], pad, scales.shape[2]), scales.dtype)], axis=1)
    if not in_operand(problem):
        return scales.astype(jnp.float32)
    source = BlockScales(problem, layout)
    unit = math.gcd(scales.shape[2], source.chunk, source.per_step)
    scales = lax.bitcast_convert_type(scales, jnp.uint8)
    if unit == 1:
        return scales
    word = jnp.int16 if unit == 2 else jnp.int32
    return lax.bitcast_convert_type(scales.reshape(*scales.shape[:2], -1, unit), word)


def _prefetch(ref: Ref) -> None:
    """Fetch an array that is contiguous in global memory into the L2 cache; the threads of a warpgroup take turns."""
    size = math.prod(ref.shape) * ref.dtype.itemsize

    @mgpu.inline_mgpu(arg_types=(mgpu.RefType(),))
    def fetch(_: Any, scales: Value) -> None:
        i32, i64 = (ir.IntegerType.get_signless(width) for width in (32, 64))
        start = llvm.ptrtoint(i64, utils.memref_ptr(scales))
        thread = arith.remui(utils.thread_idx(), utils.c(THREADS, i32))
        for first in range(0, size, THREADS * SECTOR):
            at = arith.addi(arith.muli(thread, utils.c(SECTOR, i32)), utils.c(first, i32))
            text = f"{{ .reg .pred inside; setp.lt.u32 inside, $1, {size}; @inside prefetch.global.L2 [$0]; }}"
            address = arith.addi(start, arith.extui(i64, at))
            llvm.inline_asm(None, [address, at], text, "l,r", has_side_effects=True)

    fetch(ref)


def _numbers_at(scales: Value, row: Value, first: Value, count: int) -> list[Value]:
    """Two or four neighbouring float32 numbers of an array in global memory, aligned to as many."""
    i32, i64, f32 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64), ir.F32Type.get()
    length = ir.MemRefType(scales.type).shape[-1]
    at = arith.addi(arith.muli(arith.index_castui(i32, row), utils.c(length, i32)), first)
    offset = arith.muli(arith.extui(i64, at), utils.c(WORD_BYTES, i64))
    address = arith.addi(llvm.ptrtoint(i64, utils.memref_ptr(scales)), offset)
    names = ", ".join(f"${i}" for i in range(count))
    found: Value = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * count), [address], f"ld.global.nc.v{count}.b32 {{{names}}}, [${count}];",
        ",".join(["=f"] * count + ["l"]), has_side_effects=True,  # so that it stays a step ahead
    )  # fmt: skip
    return [llvm.extractvalue(f32, found, [i]) for i in range(count)]


def _word_at(scales: Value, row: Value, column: Value, unit: int) -> Value:
    """An integer of some bytes of an array in global memory, as a word.

    Loaded to a register of that size, it would be extended when the next step begins, and waited for before.
    """
    i32, i64 = (ir.IntegerType.get_signless(width) for width in (32, 64))
    length = ir.MemRefType(scales.type).shape[-1] * unit
    above = arith.muli(arith.index_castui(i64, row), utils.c(length, i64))
    before = arith.addi(above, arith.muli(arith.extui(i64, column), utils.c(unit, i64)))
    address = arith.addi(llvm.ptrtoint(i64, utils.memref_ptr(scales)), before)
    text = f"ld.global.nc.{'b32' if unit == WORD_BYTES else f'u{8 * unit}'} $0, [$1];"
    found: Value = llvm.inline_asm(i32, [address], text, "=r,l", has_side_effects=True)  # so that it stays ahead
    return found


def _load(ref: Ref, start: Scalar, count: int, shared: bool) -> list[jax.Array]:
    """Numbers [64] from global memory [64, all], or [1, all] if rows share them: `count` of them, from `start` on.

    Past the end the last one is repeated: values there are zero, and the scale of another column may be NaN.
    """
    struct = mgpu.ShapeDtypeStruct((WGMMA_M,), jnp.float32, layout=ROW)
    last = ref.shape[-1] - 1
    together = count in (2, 4) and ref.shape[-1] % count == 0  # by one instruction

    @mgpu.inline_mgpu(arg_types=(mgpu.RefType(), ROW), return_type=(struct,) * count)
    def numbers(_: Any, scales: Value, start: FragmentedArray) -> tuple[FragmentedArray, ...]:
        word = ir.IntegerType.get_signless(32)

        def of_row(row: Value, first: Value) -> list[Value]:
            if together:
                return _numbers_at(scales, row, arith.minui(first, utils.c(last + 1 - count, word)), count)
            return [_at(scales, row, arith.addi(first, utils.c(i, word)), last) for i in range(count)]

        return _rows(start, of_row, count, shared, signed=None)

    return list(numbers(ref, mgpu.layout_cast(lax.broadcast(start, (WGMMA_M,)), ROW)))


def _load_bytes(ref: Ref, start: Scalar, chunk: int, shared: bool) -> jax.Array:
    """Words [64] from global memory [64, all], or [1, all] if rows share them, where integers of some bytes start.

    Each of the four lanes of a row gets other bytes, as many as a chunk has. They are read at once, or in pieces if
    integers are smaller. Past the end the last integer is repeated, as by `_load`.
    """
    struct = mgpu.ShapeDtypeStruct((WGMMA_M,), jnp.int32, layout=ROW)
    last, unit = ref.shape[-1] - 1, ref.dtype.itemsize

    @mgpu.inline_mgpu(arg_types=(mgpu.RefType(), ROW), return_type=struct)
    def words(_: Any, scales: Value, start: FragmentedArray) -> FragmentedArray:
        word = ir.IntegerType.get_signless(32)
        offset = arith.muli(quad_lane(), utils.c(chunk // unit, word))

        def of_row(row: Value, first: Value) -> list[Value]:
            first, pieces = arith.addi(first, offset), []
            for i in range(chunk // unit):
                column = arith.minui(arith.addi(first, utils.c(i, word)), utils.c(last, word))
                pieces.append(arith.shli(_word_at(scales, row, column, unit), utils.c(8 * unit * i, word)))
            return [functools.reduce(arith.ori, pieces)]

        (found,) = _rows(start, of_row, 1, shared, signed=True)
        return found

    return words(ref, mgpu.layout_cast(lax.broadcast(start, (WGMMA_M,)), ROW))


def _at(scales: Value, row: Value, column: Value, last: int) -> Value:
    """The entry of an array in global memory at a column, or at the last one."""
    column = arith.minui(column, utils.c(last, ir.IntegerType.get_signless(32)))
    return memref.load(scales, [row, arith.index_castui(ir.IndexType.get(), column)])


def _rows(
    start: FragmentedArray, of_row: Callable[[Value, Value], list[Value]], count: int, shared: bool, signed: bool | None
) -> tuple[FragmentedArray, ...]:
    """Arrays [64] of what a function gives for a row and where to start in it; of row 0 if all share it."""
    layout = ROW.to_mgpu()
    shape = layout.registers_shape((WGMMA_M,))
    registers = [np.empty(shape, dtype=object) for _ in range(count)]
    for (row,), place in zip(layout.thread_idxs((WGMMA_M,)), np.ndindex(shape), strict=True):
        where: Value = utils.c(0, ir.IndexType.get()) if shared else row
        register: Value = start.registers[place]
        first = vector.extract(register, [], [0])
        for each, number in zip(registers, of_row(where, first), strict=True):
            each[place] = vector.broadcast(ir.VectorType.get((1,), number.type), number)
    return tuple(FragmentedArray(_registers=each, _layout=layout, _is_signed=signed) for each in registers)
