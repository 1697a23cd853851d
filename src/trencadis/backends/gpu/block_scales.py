"""Scales of low-precision weights that change along k, which consumers load from global memory, step by step.

A consumer holds 64 columns of the weights as the rows of operand A, so that a thread needs the scales of two of them.
How they are applied depends on whether the product of a value and its scale is a bfloat16 number:

    exact       e8m0 scales (mxfp4, mxfp8), e4m3 scales of 4-bit values (nvfp4)    operand A is multiplied by them
    otherwise   float32 scales per 64, 128, ... of k                               promotion: the sums of each block are

Either way nothing is rounded but the result.
"""

from __future__ import annotations

import dataclasses
import math
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
from trencadis.backends.gpu.operand_scales import ROW, WORD_BYTES, Scales, converted, quad_lane
from trencadis.backends.gpu.scales import in_operand
from trencadis.backends.gpu.tile_scheduler import Ref, Refs, Scalar, Tile, i32
from trencadis.core.interleave import LANES
from trencadis.core.problem import Problem

Value = Any  # an MLIR value: its type is generic or not, by the version of jaxlib
THREADS = 128  # of a warpgroup
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
        """The number of scales along k in one step of the mainloop."""
        return -(-self.layout.block_k // self.length)

    @property
    def packed(self) -> bool:
        """Whether scales are bytes, four to a word, that operand A is multiplied by; promotion has float32."""
        return in_operand(self.problem)

    @property
    def by_lane(self) -> bool:
        """Whether each of the four lanes of a row loads one word of scales, and converts it for the others."""
        return self.packed and self.dtype == jnp.float8_e4m3fn

    def of_operand(self, words: list[jax.Array]) -> Scales:
        """The scales of a step as factors of operand A, from the words that `load` gives."""
        words = converted(*words, self.problem.rhs) if self.by_lane else words
        return Scales(words, self.dtype, self.length, self.problem.rhs, self.problem.interleaved)

    def load(self, refs: Refs, tile: Tile, top: Scalar, step: Scalar) -> list[jax.Array]:
        """The scales of a step for the 64 columns from `top` of a tile on: words or float32 numbers [64].

        Global memory answers late: they are asked for well before they are used. Past the last step they repeat.
        """
        across = self.problem.epilogue.column_block[1]
        ref, height = refs["by_column"], WGMMA_M if across == 1 else 1
        first = lax.div(tile.column + top, i32(across))
        # the last tile may be wider than the result: what it computes there is not stored
        rows = ref.at[self._weights(tile), pl.ds(lax.min(first, i32(ref.shape[1] - height)), height)]
        start = lax.div(step * i32(self.layout.block_k), i32(self.length))
        count = self.per_step
        if self.packed:
            count, start = -(-count // WORD_BYTES), lax.div(start, i32(ref.dtype.itemsize))
        assert not self.by_lane or count <= LANES
        return _load(rows, start, 1 if self.by_lane else count, shared=across > 1, by_lane=self.by_lane)

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


def stored(problem: Problem, scales: jax.Array) -> jax.Array:
    """Scales [g, k / length, n / across] as the kernel reads them: [g, n / across, k / length], float32 or words."""
    scales, pad = scales.mT, -problem.n % WGMMA_M if problem.epilogue.column_block[1] == 1 else 0
    if pad:
        scales = jnp.concatenate([scales, jnp.ones((scales.shape[0], pad, scales.shape[2]), scales.dtype)], axis=1)
    if not in_operand(problem):
        return scales.astype(jnp.float32)
    scales = lax.bitcast_convert_type(scales, jnp.uint8)
    unit = math.gcd(scales.shape[2], WORD_BYTES)
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


def _words_at(scales: Value, row: Value, first: Value, count: int) -> list[Value]:
    """Two or four neighbouring words of an array in global memory, aligned to as many."""
    i32, i64 = (ir.IntegerType.get_signless(width) for width in (32, 64))
    length = ir.MemRefType(scales.type).shape[-1]
    at = arith.addi(arith.muli(arith.index_castui(i32, row), utils.c(length, i32)), first)
    offset = arith.muli(arith.extui(i64, at), utils.c(WORD_BYTES, i64))
    address = arith.addi(llvm.ptrtoint(i64, utils.memref_ptr(scales)), offset)
    names = ", ".join(f"${i}" for i in range(count))
    found: Value = llvm.inline_asm(
        llvm.StructType.get_literal([i32] * count), [address], f"ld.global.nc.v{count}.b32 {{{names}}}, [${count}];",
        ",".join(["=r"] * count + ["l"]), has_side_effects=True,  # so that it stays a step ahead
    )  # fmt: skip
    return [llvm.extractvalue(i32, found, [i]) for i in range(count)]


def _load(ref: Ref, start: Scalar, count: int, shared: bool, by_lane: bool) -> list[jax.Array]:
    """Words [64] from global memory [64, all], or [1, all] if rows share them: `count` of them, from `start` on.

    A word is read at once, or in halves or bytes where rows are not aligned to words. By lane, each of the four lanes
    of a row reads the word of its number.

    Past the end the last one is repeated: values there are zero, and the scale of another column may be NaN.
    """
    dtype = jnp.float32 if ref.dtype == jnp.float32 else jnp.int32
    unit = ref.dtype.itemsize
    struct = mgpu.ShapeDtypeStruct((WGMMA_M,), dtype, layout=ROW)
    last, signed = ref.shape[-1] - 1, None if dtype == jnp.float32 else True
    together = unit == WORD_BYTES and count in (2, 4) and ref.shape[-1] % count == 0  # by one instruction

    @mgpu.inline_mgpu(arg_types=(mgpu.RefType(), ROW), return_type=(struct,) * count)
    def words(_: Any, scales: Value, start: FragmentedArray) -> tuple[FragmentedArray, ...]:
        layout, index, word = ROW.to_mgpu(), ir.IndexType.get(), ir.IntegerType.get_signless(32)
        shape = layout.registers_shape((WGMMA_M,))
        registers = [np.empty(shape, dtype=object) for _ in range(count)]
        rows = layout.thread_idxs((WGMMA_M,))

        def at(row: Value, first: Value, offset: int) -> Value:
            column = arith.minui(arith.addi(first, utils.c(offset, word)), utils.c(last, word))
            return memref.load(scales, [row, arith.index_castui(index, column)])

        def gathered(row: Value, first: Value, which: int) -> Value:
            if unit == WORD_BYTES:
                return at(row, first, which)
            pieces = WORD_BYTES // unit
            parts = [arith.extui(word, at(row, first, pieces * which + i)) for i in range(pieces)]
            for i, part in enumerate(parts[1:], 1):
                parts[0] = arith.ori(parts[0], arith.shli(part, utils.c(8 * unit * i, word)))
            return parts[0]

        for (row,), place in zip(rows, np.ndindex(shape), strict=True):
            where = utils.c(0, index) if shared else row
            register: Value = start.registers[place]
            first = vector.extract(register, [], [0])
            if by_lane:
                first = arith.addi(first, arith.muli(quad_lane(), utils.c(WORD_BYTES // unit, word)))
            if together:
                numbers = _words_at(scales, where, arith.minui(first, utils.c(last + 1 - count, word)), count)
            else:
                numbers = [gathered(where, first, which) for which in range(count)]
            for each, number in zip(registers, numbers, strict=True):
                number = utils.bitcast(number, ir.F32Type.get()) if together and signed is None else number
                each[place] = vector.broadcast(ir.VectorType.get((1,), number.type), number)
        return tuple(FragmentedArray(_registers=each, _layout=layout, _is_signed=signed) for each in registers)

    return list(words(ref, mgpu.layout_cast(lax.broadcast(start, (WGMMA_M,)), ROW)))
