"""Low-precision weights as a register (RS) operand of wgmma, which sums over k in another order.

Four lanes of a warp hold a row of operand A, and wgmma expects two neighbours along k in each lane, the next two in the
next lane. A lane that loads a word of weights gets a longer run of neighbours instead. Nothing is exchanged between
lanes: a word is upcast in the lane that loaded it, and `permute_k` permutes the columns of lhs to match.

    int4, 32 of k        word of lane 0     0  1  2  3  4  5  6  7      upcast by shifts, so that 0 and 4 make a pair
    pairs of operand A   lanes 0, 1, 2, 3   0 4 | 8 12 | 16 20 | 24 28    1 5 | 9 13 | ...    2 6 | ...    3 7 | ...
    8 bits, 16 of k      lanes 0, 1, 2, 3   0 1 | 4 5  |  8  9 | 12 13    2 3 | 6 7  | ...
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import FragmentedArray, utils
from jax.experimental.pallas import mosaic_gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from trencadis.backends.gpu.tile_scheduler import Ref
from trencadis.core.dtypes import bits

Value = Any  # an MLIR value: its type is generic or not, by the version of jaxlib
LANES = 4  # lanes of a warp that hold a row of operand A
WORD = 32  # bits that a lane loads at once


@functools.partial(jax.jit, static_argnums=1)
def permute_k(x: jax.Array, weights: Any) -> jax.Array:
    """x [m, k] with its columns in the order of k that a register operand of this weight dtype has."""
    m, k = x.shape
    word = WORD // bits(weights)
    if bits(weights) == 4:
        return x.reshape(m, k // (LANES * word), LANES, 2, word // 2).transpose(0, 1, 4, 2, 3).reshape(m, k)
    return x.reshape(m, k // (LANES * word), LANES, word // 2, 2).transpose(0, 1, 3, 2, 4).reshape(m, k)


def rs_operand(ref: Ref, dtype: Any) -> Any:
    """Weights [64, block_k] in shared memory as a register operand of this dtype, in the order of `permute_k`."""
    word = WORD // bits(ref.dtype)
    run = LANES * word
    loaded = mgpu.Layout.TILED(mgpu.Tiling(((64, run), (16, run), (8, run), (word,))), (-7,), (-3, -2), -1)
    held = mgpu.layout_cast(ref[...], loaded)
    by_shifts = bits(ref.dtype) == 4
    held = held if by_shifts else upcast(held, dtype)
    result = mgpu.ShapeDtypeStruct(held.shape, jnp.dtype(dtype), layout=mgpu.Layout.WGMMA)

    @mgpu.inline_mgpu(arg_types=(loaded,), return_type=result)
    def relabel(_: Any, words: FragmentedArray) -> FragmentedArray:
        """The registers of each lane, taken for those of operand A."""
        target = mgpu.Layout.WGMMA.to_mgpu()
        registers = np.empty(target.registers_shape(words.shape), dtype=object)
        for (row, block, *rest), held in np.ndenumerate(words.registers):
            pairs = _int4_to_bf16(held) if by_shifts else [utils.vector_slice(held, slice(i, i + 2)) for i in (0, 2)]
            for i, pair in enumerate(pairs):
                registers[(row, block * len(pairs) + i, *rest)] = pair
        return FragmentedArray(_registers=registers, _layout=target, _is_signed=None)

    return relabel(held)


def upcast(x: jax.Array, dtype: Any) -> jax.Array:
    """Low-precision weights in a dtype that holds them; float8 becomes bfloat16 only by way of float16 and float32."""
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    return (x.astype(jnp.float16).astype(jnp.float32) if is_float else x).astype(dtype)


def _int4_to_bf16(word: Value) -> list[Value]:
    """Eight int4 as four pairs of bfloat16: bits i to i + 3 of both halves of a word, for i = 0, 4, 8, 12.

    With 0x43 above them and their sign bit flipped they are the bfloat16 numbers 128 to 143, from which 136 is
    subtracted.
    """
    i32, pair = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), ir.BF16Type.get())
    text = """{
        .reg .b32 number, zero;
        lop3.b32 number, $1, 0x000F000F, 0x43084308, (0xF0 & 0xCC) ^ 0xAA;
        mov.b32 zero, 0x43084308;
        sub.bf16x2 $0, number, zero;
    }"""
    whole = utils.bitcast(word, i32)
    shifted = [whole, *(arith.shrui(whole, utils.c(by, i32)) for by in (4, 8, 12))]

    def convert(nibbles: Value) -> Value:
        numbers: Value = llvm.inline_asm(i32, [nibbles], text, "=r,r")
        return utils.bitcast(numbers, pair)

    return [convert(each) for each in shifted]
