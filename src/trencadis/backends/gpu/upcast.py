"""Weights of few bits as a factor in registers: a sum over k in another order.

Four lanes hold a row of a factor, and an instruction finds pairs of neighbours in them, the next pair in the next lane.
A lane that loads a word of weights gets one run of neighbours instead. Nothing is exchanged between lanes: a word is
unpacked where it is, and `ordered` brings the columns of the rows into the order in which weights lie in the lanes.

    int4, 32 of k        word of lane 0     0  1  2  3  4  5  6  7      unpacked by shifts, so that 0 and 4 make a pair
    pairs of the factor  lanes 0, 1, 2, 3   0 4 | 8 12 | 16 20 | 24 28    1 5 | 9 13 | ...    2 6 | ...    3 7 | ...
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

from trencadis.core.dtypes import bits

LANES = 4  # that hold a row
WORD = 32  # bits that a lane loads at once


@functools.partial(jax.jit, static_argnums=1)
def ordered(x: jax.Array, weights: Any) -> jax.Array:
    """Rows [m, k] with their columns in the order in which weights of this dtype are unpacked."""
    m, k = x.shape
    word = WORD // bits(weights)
    if bits(weights) == 4:
        return x.reshape(m, k // (LANES * word), LANES, 2, word // 2).transpose(0, 1, 4, 2, 3).reshape(m, k)
    return x.reshape(m, k // (LANES * word), LANES, word // 2, 2).transpose(0, 1, 3, 2, 4).reshape(m, k)


def factor(ref: Any, dtype: Any) -> Any:
    """Weights [64, deep] in shared memory as a factor of this dtype, in that order."""
    word = WORD // bits(ref.dtype)
    run = LANES * word
    loaded = mgpu.Layout.TILED(mgpu.Tiling(((64, run), (16, run), (8, run), (word,))), (-7,), (-3, -2), -1)
    held = mgpu.layout_cast(ref[...], loaded)
    by_shifts = bits(ref.dtype) == 4
    held = held if by_shifts else widened(held, dtype)
    result = mgpu.ShapeDtypeStruct(held.shape, jnp.dtype(dtype), layout=mgpu.Layout.WGMMA)

    @mgpu.inline_mgpu(arg_types=(loaded,), return_type=result)
    def named(_: Any, words: FragmentedArray) -> FragmentedArray:
        """What the lanes hold, as pairs of a factor."""
        target = mgpu.Layout.WGMMA.to_mgpu()
        registers = np.empty(target.registers_shape(words.shape), dtype=object)
        for (row, block, *rest), held in np.ndenumerate(words.registers):
            pairs = _shifted(held) if by_shifts else [utils.vector_slice(held, slice(i, i + 2)) for i in (0, 2)]
            for i, pair in enumerate(pairs):
                registers[(row, block * len(pairs) + i, *rest)] = pair
        return FragmentedArray(_registers=registers, _layout=target, _is_signed=None)

    return named(held)


def widened(x: Any, dtype: Any) -> Any:
    """Weights of few bits in a dtype that holds them. From a float of 8 bits there is no way to bfloat16 but this."""
    narrow = jnp.issubdtype(x.dtype, jnp.floating)
    return (x.astype(jnp.float16).astype(jnp.float32) if narrow else x).astype(dtype)


def _shifted(word: Any) -> list[Any]:
    """Eight int4 as four pairs of bfloat16: bits i, i + 1, i + 2, i + 3 of both halves of a word, for i = 0, 4, 8, 12.

    With 0x43 above them and their sign turned round they are the numbers 128 to 143.
    """
    i32, pair = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), ir.BF16Type.get())
    text = """{
        .reg .b32 number, zero;
        lop3.b32 number, $1, 0x000F000F, 0x43084308, (0xF0 & 0xCC) ^ 0xAA;
        mov.b32 zero, 0x43084308;
        sub.bf16x2 $0, number, zero;
    }"""
    whole = utils.bitcast(word, i32)
    shifted = [whole, *(arith.shrui(whole, arith.constant(i32, by)) for by in (4, 8, 12))]
    return [utils.bitcast(llvm.inline_asm(i32, [each], text, "=r,r"), pair) for each in shifted]
