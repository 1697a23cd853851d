"""Low-precision weights as a register (RS) operand of wgmma, which sums over k in another order.

Four lanes of a warp hold a row of operand A, and wgmma expects two neighbours along k in each lane, the next two in the
next lane. A lane that loads a word of weights gets a longer run of neighbours instead. Nothing is exchanged between
lanes: a word is upcast in the lane that loaded it, and `permute_k` permutes the columns of lhs to match.

    int4, 32 of k        word of lane 0     0  1  2  3  4  5  6  7      upcast by shifts, so that 0 and 4 make a pair
    pairs of operand A   lanes 0, 1, 2, 3   0 4 | 8 12 | 16 20 | 24 28    1 5 | 9 13 | ...    2 6 | ...    3 7 | ...
    8 bits, 16 of k      lanes 0, 1, 2, 3   0 1 | 4 5  |  8  9 | 12 13    2 3 | 6 7  | ...
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import FragmentedArray, utils
from jax.experimental.pallas import mosaic_gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from trencadis.backends.gpu.tile_scheduler import Ref
from trencadis.core.dtypes import bits

Value = Any  # an MLIR value: its type is generic or not, by the version of jaxlib
ROW = mgpu.Layout.WGMMA.reduce(1)  # a number for each row of operand A or of the accumulators
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


def rs_operand(ref: Ref, dtype: Any, scales: Scales | None = None) -> Any:
    """Weights [64, block_k] in shared memory as a register operand of this dtype, in the order of `permute_k`.

    With scales, the operand is the product of both: exact, since the caller sees to that.
    """
    word = WORD // bits(ref.dtype)
    run = LANES * word
    loaded = mgpu.Layout.TILED(mgpu.Tiling(((64, run), (16, run), (8, run), (word,))), (-7,), (-3, -2), -1)
    held = mgpu.layout_cast(ref[...], loaded)
    by_shifts = bits(ref.dtype) == 4
    held = held if by_shifts else upcast(held, dtype)
    result = mgpu.ShapeDtypeStruct(held.shape, jnp.dtype(dtype), layout=mgpu.Layout.WGMMA)
    given = [] if scales is None else scales.words

    @mgpu.inline_mgpu(arg_types=(loaded, *(ROW for _ in given)), return_type=result)
    def relabel(_: Any, words: FragmentedArray, *given: FragmentedArray) -> FragmentedArray:
        """The registers of each lane, taken for those of operand A."""
        target = mgpu.Layout.WGMMA.to_mgpu()
        registers = np.empty(target.registers_shape(words.shape), dtype=object)
        factor = None if scales is None else scales.factors(given, run)
        for (row, block, *rest), held in np.ndenumerate(words.registers):
            scale = None if factor is None else factor(block, rest)
            for i, pair in enumerate(_pairs(held, by_shifts, scale)):
                registers[(row, block * (word // 2) + i, *rest)] = pair
        return FragmentedArray(_registers=registers, _layout=target, _is_signed=None)

    return relabel(held, *given)


def _pairs(word: Value, by_shifts: bool, scale: Value | None) -> list[Value]:
    """The pairs of bfloat16 in a lane's word: 4-bit integers, or 4-bit floats with their scale, or numbers upcast."""
    if by_shifts:
        return _int4_to_bf16(word) if scale is None else _float4_to_bf16(word, scale)
    pairs = [utils.vector_slice(word, slice(i, i + 2)) for i in (0, 2)]
    return pairs if scale is None else [_times(pair, scale) for pair in pairs]


@dataclasses.dataclass(frozen=True)
class Scales:
    """Scales that a register operand is multiplied by: words [64] of four bytes, for each step of the mainloop."""

    words: list[Any]
    dtype: np.dtype[Any]  # float8_e8m0fnu or float8_e4m3fn
    length: int  # entries of k that share a scale

    def factors(self, words: Sequence[FragmentedArray], run: int) -> Callable[[int, Sequence[int]], Value]:
        """A function that gives the scale, twice in a word, of the `run` entries of k in a block of registers."""
        word = ir.IntegerType.get_signless(32)
        of_lane = None
        if self.length < run:  # a lane's word has 1 / LANES of the run
            lane = arith.remui(utils.thread_idx(), utils.c(LANES, word))
            bytes_of_lane = arith.divui(lane, utils.c(LANES * self.length // run, word))
            of_lane = arith.muli(bytes_of_lane, utils.c(8, word))
        known: dict[Any, Value] = {}

        def factor(block: int, rest: Sequence[int]) -> Value:
            at = block * run // self.length
            key = (at, *rest)
            if key not in known:
                # of the 16 rows of a warp, a thread has one of the first 8 and one of the others
                place = tuple(max(rest) if size == 2 else 0 for size in words[0].registers.shape)
                held = vector.extract(words[at // 4].registers[place], [], [0])
                held = held if of_lane is None else arith.shrui(held, of_lane)
                byte = arith.andi(arith.shrui(held, utils.c(8 * (at % 4), word)), utils.c(255, word))
                known[key] = (_e8m0_to_bf16 if self.dtype.name == "float8_e8m0fnu" else _e4m3_to_bf16)(byte)
            return known[key]

        return factor


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


def _float4_to_bf16(word: Value, scale: Value) -> list[Value]:
    """Eight float4_e2m1fn, times their scale, as four pairs of bfloat16: bits i to i + 3 of both halves of a word.

    Sign, exponent and mantissa are moved to their places in a bfloat16 number, which is too small by 2**126.
    """
    i32, pair = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), ir.BF16Type.get())
    text = """{
        .reg .b32 sign, number, power;
        and.b32 sign, $1, 0x80008000;
        shr.b32 number, $1, 6;
        lop3.b32 number, number, 0x01C001C0, sign, 0xEA;
        mov.b32 power, 0x7E807E80;
        mul.bf16x2 number, number, power;
        mul.bf16x2 $0, number, $2;
    }"""
    whole = utils.bitcast(word, i32)
    shifted = [*(arith.shli(whole, utils.c(by, i32)) for by in (12, 8, 4)), whole]

    def convert(nibbles: Value) -> Value:
        numbers: Value = llvm.inline_asm(i32, [nibbles, scale], text, "=r,r,r")
        return utils.bitcast(numbers, pair)

    return [convert(each) for each in shifted]


def _times(pair: Value, scale: Value) -> Value:
    """A pair of bfloat16 times a scale that stands in both halves of a word."""
    i32 = ir.IntegerType.get_signless(32)
    out: Value = llvm.inline_asm(i32, [utils.bitcast(pair, i32), scale], "mul.bf16x2 $0, $1, $2;", "=r,r,r")
    return utils.bitcast(out, pair.type)


def _e8m0_to_bf16(byte: Value) -> Value:
    """A power of two as bfloat16, twice in a word: its exponent is the byte; 0 is 2**-127, and 255 is NaN."""
    i32 = ir.IntegerType.get_signless(32)
    number = arith.shli(byte, utils.c(7, i32))
    for special, value in ((0, 0x0040), (255, 0x7FC0)):
        found = arith.cmpi(arith.CmpIPredicate.eq, byte, utils.c(special, i32))
        number = arith.select(found, utils.c(value, i32), number)
    return arith.muli(number, utils.c(0x00010001, i32))


def _e4m3_to_bf16(byte: Value) -> Value:
    """A float8_e4m3fn as bfloat16, twice in a word: its bits in their places are too small by 2**120; 127 is NaN."""
    i32 = ir.IntegerType.get_signless(32)
    magnitude = arith.andi(byte, utils.c(127, i32))
    sign = arith.shli(arith.andi(byte, utils.c(128, i32)), utils.c(8, i32))
    number = arith.ori(arith.shli(magnitude, utils.c(4, i32)), sign)
    found = arith.cmpi(arith.CmpIPredicate.eq, magnitude, utils.c(127, i32))
    number = arith.select(found, utils.c(0x7FC0, i32), number)
    number = arith.muli(number, utils.c(0x00010001, i32))
    text = "{ .reg .b32 power; mov.b32 power, 0x7B807B80; mul.bf16x2 $0, $1, power; }"
    return llvm.inline_asm(i32, [number], text, "=r,r")
