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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

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
WORD_BYTES = 4


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
    (operand,) = rs_parts(ref, dtype, ref.shape[1], scales)
    return operand


def rs_parts(ref: Ref, dtype: Any, k: int, scales: Scales | None = None) -> Iterator[Any]:
    """Yield `rs_operand` in parts of k entries, each of which is unpacked when it is asked for."""
    word = WORD // bits(ref.dtype)
    run = LANES * word
    loaded = mgpu.Layout.TILED(mgpu.Tiling(((64, run), (16, run), (8, run), (word,))), (-7,), (-3, -2), -1)
    held = mgpu.layout_cast(ref[...], loaded)
    for start in range(0, held.shape[1], k):
        part = held if k == held.shape[1] else held[:, start : start + k]
        yield _unpacked(part, loaded, jnp.dtype(dtype), scales, start // run)


def _unpacked(held: jax.Array, loaded: Any, dtype: np.dtype[Any], scales: Scales | None, first: int) -> Any:
    """What lanes have loaded as a register operand; its first run of k has this number in the step, and its scale."""
    run = LANES * WORD // bits(held.dtype)
    convert = _conversion(held.dtype, dtype)
    held = upcast(held, dtype) if convert is None else held
    result = mgpu.ShapeDtypeStruct(held.shape, dtype, layout=mgpu.Layout.WGMMA)
    given = [] if scales is None else scales.words

    @mgpu.inline_mgpu(arg_types=(loaded, *(ROW for _ in given)), return_type=result)
    def relabel(_: Any, words: FragmentedArray, *given: FragmentedArray) -> FragmentedArray:
        """The registers of each lane, taken for those of operand A."""
        target = mgpu.Layout.WGMMA.to_mgpu()
        registers = np.empty(target.registers_shape(words.shape), dtype=object)
        factor = None if scales is None else scales.factors(given, run)
        for (row, block, *rest), word in np.ndenumerate(words.registers):
            scale = None if factor is None else factor(first + block, rest)
            pairs = _pairs(word, convert, scale)
            for i, pair in enumerate(pairs):
                registers[(row, block * len(pairs) + i, *rest)] = pair
        return FragmentedArray(_registers=registers, _layout=target, _is_signed=None)

    return relabel(held, *given)


def keep(*operands: Any) -> None:
    """Keep register operands until here, as the compiler does not: a wgmma in flight still reads them."""

    @mgpu.inline_mgpu(arg_types=(mgpu.Layout.WGMMA,) * len(operands))
    def use(_: Any, *arrays: FragmentedArray) -> None:
        """Store them if the grid has more than 65534 rows of CTAs, which it never has."""
        i32 = ir.IntegerType.get_signless(32)
        words = [utils.bitcast(x, i32) for array in arrays for x in array.registers.flat]
        fours = (f"{{${i}, ${i + 1}, ${i + 2}, ${i + 3}}}" for i in range(0, len(words), 4))
        stores = "".join(f"st.volatile.shared.v4.b32 [zero], {four};" for four in fours)
        text = f"""{{
            .reg .pred few;
            .reg .b32 rows, zero;
            mov.u32 rows, %nctaid.y;
            setp.lt.u32 few, rows, 65535;
            mov.u32 zero, 0;
            @few bra kept;
            {stores}
            kept:
        }}"""
        llvm.inline_asm(None, words, text, ",".join("r" for _ in words), has_side_effects=True)

    use(*operands)


def _conversion(source: Any, dtype: np.dtype[Any]) -> Callable[[Value], list[Value]] | None:
    """How a lane's word of weights becomes pairs of 16-bit floats; None where Mosaic's own conversion is as good."""
    if source == jnp.int4:
        return functools.partial(_int4_to_floats, dtype=dtype)
    if bits(source) == 4:
        return functools.partial(_float4_to_floats, dtype=dtype)
    return _int8_to_float16 if source == jnp.int8 and dtype == jnp.float16 else None


def _pairs(word: Value, convert: Callable[[Value], list[Value]] | None, scale: Value | None) -> list[Value]:
    """The pairs of 16-bit floats in a lane's word, converted here or before, times a scale; only bfloat16 has one."""
    pairs = [utils.vector_slice(word, slice(i, i + 2)) for i in (0, 2)] if convert is None else convert(word)
    return pairs if scale is None else [_times(pair, scale) for pair in pairs]


@dataclasses.dataclass(frozen=True)
class Scales:
    """Scales that a register operand is multiplied by: words [64] of four bytes, for each step of the mainloop."""

    words: list[Any]
    dtype: np.dtype[Any]  # float8_e8m0fnu or float8_e4m3fn
    length: int  # entries of k that share a scale

    def factors(self, words: Sequence[FragmentedArray], run: int) -> Callable[[int, Sequence[int]], Value]:
        """A function that gives the scale, twice in a word, of the `run` entries of k in a block of registers."""
        i32, convert = ir.IntegerType.get_signless(32), SCALE_TO_BF16[self.dtype.name]
        of_lane = utils.c(0, i32)
        if self.length < run:  # a lane has a part of the run, and its own scale
            lane = arith.remui(utils.thread_idx(), utils.c(LANES, i32))
            of_lane = arith.divui(lane, utils.c(LANES * self.length // run, i32))
        known: dict[Any, Value] = {}

        def once(key: Any, make: Callable[[], Value]) -> Value:
            if key not in known:
                known[key] = make()
            return known[key]

        def factor(block: int, rest: Sequence[int]) -> Value:
            at = block * run // self.length
            # of the 16 rows of a warp, a thread has one of the first 8 and one of the others
            place = tuple(max(rest) if size == 2 else 0 for size in words[0].registers.shape)
            word = vector.extract(words[at // WORD_BYTES].registers[place], [], [0])
            nan = once(("nan", at // WORD_BYTES, place), lambda: convert.nan(word))
            return once((at, place), lambda: convert.number(word, at % WORD_BYTES, of_lane, nan))

        return factor


def upcast(x: jax.Array, dtype: Any) -> jax.Array:
    """Low-precision weights in a dtype that holds them; float8 becomes bfloat16 only by way of float16 and float32."""
    is_float = jnp.issubdtype(x.dtype, jnp.floating) and dtype != jnp.float16
    return (x.astype(jnp.float16).astype(jnp.float32) if is_float else x).astype(dtype)


def _int4_to_floats(word: Value, dtype: np.dtype[Any]) -> list[Value]:
    """Eight int4 as four pairs of 16-bit floats: bits i to i + 3 of both halves of a word, for i = 0, 4, 8, 12.

    With the bits of a power of two above them and their sign bit flipped they are the bfloat16 numbers 128 to 143, from
    which 136 is subtracted, or the float16 numbers 1024 to 1039, from which 1032 is.
    """
    i32, half = ir.IntegerType.get_signless(32), dtype == jnp.float16
    pair = ir.VectorType.get((2,), ir.F16Type.get() if half else ir.BF16Type.get())
    zero, kind = ("0x64086408", "f16x2") if half else ("0x43084308", "bf16x2")
    text = f"""{{
        .reg .b32 number, zero;
        lop3.b32 number, $1, 0x000F000F, {zero}, (0xF0 & 0xCC) ^ 0xAA;
        mov.b32 zero, {zero};
        sub.{kind} $0, number, zero;
    }}"""
    whole = utils.bitcast(word, i32)
    shifted = [whole, *(arith.shrui(whole, utils.c(by, i32)) for by in (4, 8, 12))]

    def convert(nibbles: Value) -> Value:
        numbers: Value = llvm.inline_asm(i32, [nibbles], text, "=r,r")
        return utils.bitcast(numbers, pair)

    return [convert(each) for each in shifted]


def _int8_to_float16(word: Value) -> list[Value]:
    """Four int8 as two pairs of float16: with their sign bit flipped they are the last bits of 1024 to 1279."""
    i32, pair = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), ir.F16Type.get())
    text = """{{
        .reg .b32 number, zero;
        xor.b32 number, $1, 0x80808080;
        mov.b32 zero, 0x64646464;
        prmt.b32 number, number, zero, {selector};
        mov.b32 zero, 0x64806480;
        sub.f16x2 $0, number, zero;
    }}"""
    whole = utils.bitcast(word, i32)

    def convert(selector: str) -> Value:
        numbers: Value = llvm.inline_asm(i32, [whole], text.format(selector=selector), "=r,r")
        return utils.bitcast(numbers, pair)

    return [convert(selector) for selector in ("0x4140", "0x4342")]


def _float4_to_floats(word: Value, dtype: np.dtype[Any]) -> list[Value]:
    """Eight float4_e2m1fn as four pairs of 16-bit floats: bits i to i + 3 of both halves of a word.

    Sign, exponent and mantissa are moved to their places in a bfloat16 number, which is too small by 2**126, or in a
    float16 number, which is too small by 2**14.
    """
    i32, half = ir.IntegerType.get_signless(32), dtype == jnp.float16
    pair = ir.VectorType.get((2,), ir.F16Type.get() if half else ir.BF16Type.get())
    whole = utils.bitcast(word, i32)

    def convert(up: int) -> Value:
        if half:
            return _moved(whole, up, up - 3, 0x0E000E00, 0x74007400, "f16x2")
        return _moved(whole, up, up - 6, 0x01C001C0, 0x7E807E80)

    return [utils.bitcast(convert(up), pair) for up in (12, 8, 4, 0)]


def _moved(word: Value, sign_up: int, up: int, magnitude: int, power: int, kind: str = "bf16x2") -> Value:
    """Two small floats in both halves of a word as 16-bit floats, of bfloat16 unless another kind is given.

    Their signs move up to the top, and the bits below up, or down, to where `magnitude` is set. A product by a `power`
    of two, in both halves, corrects the exponent. Each has a shift of its own: those to the left can be multiplications
    to the compiler, which have another pipe than shifts to the right and logical operations.
    """
    i32 = ir.IntegerType.get_signless(32)
    text = f"""{{
        .reg .b32 sign, number, power;
        shl.b32 sign, $1, {sign_up};
        and.b32 sign, sign, 0x80008000;
        {"shl" if up > 0 else "shr"}.b32 number, $1, {abs(up)};
        lop3.b32 number, number, {magnitude:#x}, sign, 0xEA;
        mov.b32 power, {power:#x};
        mul.{kind} $0, number, power;
    }}"""
    out: Value = llvm.inline_asm(i32, [word], text, "=r,r")
    return out


def _times(pair: Value, scale: Value) -> Value:
    """A pair of bfloat16 times a scale that stands in both halves of a word."""
    i32 = ir.IntegerType.get_signless(32)
    out: Value = llvm.inline_asm(i32, [utils.bitcast(pair, i32), scale], "mul.bf16x2 $0, $1, $2;", "=r,r,r")
    return utils.bitcast(out, pair.type)


class _Convert(NamedTuple):
    """How a scale, a byte of a word, becomes a bfloat16 number that stands in both halves of a word.

    `nan` tells whether any byte of the word is NaN; then all four numbers are, since all are of one column of weights.
    """

    nan: Callable[[Value], Value]  # of a word
    number: Callable[[Value, int, Value, Value], Value]  # of a word, a byte of it, the bytes to add for a lane, and nan


def _any_byte_is_255(word: Value) -> Value:
    """Whether a byte of a word is 255: its complement then has a byte 0, from which 1 cannot be subtracted."""
    i32 = ir.IntegerType.get_signless(32)
    less = arith.subi(arith.xori(word, utils.c(0xFFFFFFFF, i32)), utils.c(0x01010101, i32))
    found = arith.andi(arith.andi(less, word), utils.c(0x80808080, i32))
    return arith.cmpi(arith.CmpIPredicate.ne, found, utils.c(0, i32))


def _permuted(word: Value, selector: Value) -> Value:
    """The bytes of a word, or 0, that the nibbles of a selector name: 0 to 3, or 4."""
    i32 = ir.IntegerType.get_signless(32)
    out: Value = llvm.inline_asm(i32, [word, selector], "prmt.b32 $0, $1, 0, $2;", "=r,r,r")
    return out


def _e8m0_nan(word: Value) -> Value:
    i32 = ir.IntegerType.get_signless(32)
    return arith.select(_any_byte_is_255(word), utils.c(0x00400040, i32), utils.c(0, i32))


def _e8m0_to_bf16(word: Value, byte: int, of_lane: Value, nan: Value) -> Value:
    """A power of two: its byte is the exponent; 255 is NaN, and 2**-127, which float32 has no normal number for, 0."""
    i32 = ir.IntegerType.get_signless(32)
    selector = arith.addi(utils.c(0x4040 + 0x0101 * byte, i32), arith.muli(of_lane, utils.c(0x0101, i32)))
    return arith.addi(arith.muli(_permuted(word, selector), utils.c(128, i32)), nan)


def _e4m3_nan(word: Value) -> Value:
    i32 = ir.IntegerType.get_signless(32)
    found = _any_byte_is_255(arith.ori(word, utils.c(0x80808080, i32)))
    return arith.select(found, utils.c(0x7FC07FC0, i32), utils.c(0, i32))


def _e4m3_to_bf16(word: Value, byte: int, of_lane: Value, nan: Value) -> Value:
    """A float8_e4m3fn: its bits, moved to their places, make a number that is too small by 2**120; 127 is NaN."""
    i32 = ir.IntegerType.get_signless(32)
    selector = arith.addi(utils.c(0x0404 + 0x1010 * byte, i32), arith.muli(of_lane, utils.c(0x1010, i32)))
    return arith.ori(_moved(_permuted(word, selector), 0, -4, 0x07F007F0, 0x7B807B80), nan)


SCALE_TO_BF16 = {
    "float8_e8m0fnu": _Convert(_e8m0_nan, _e8m0_to_bf16),
    "float8_e4m3fn": _Convert(_e4m3_nan, _e4m3_to_bf16),
}
