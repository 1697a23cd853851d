"""Scales that a register operand is multiplied by: bytes of words, as bfloat16 numbers, two to a register.

Values that are 4-bit floats arrive too small by 2**126. Their scales make up for that, so that one product does both:

    e8m0    2**s times 2**126    a bfloat16 number if s <= 1. If any scale of a warp is 2 or more, there are two factors
    e4m3    s times 2**118       the sums are too small by 2**8, for which they are multiplied at the end

The four lanes that hold a row of operand A need all of its scales. Each loads and converts two or four of them, and
they take pairs of scales from each other.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.experimental.mosaic.gpu import FragmentedArray, utils
from jax.experimental.pallas import mosaic_gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from trencadis.core.interleave import FLOAT4, LANES

Value = Any  # an MLIR value: its type is generic or not, by the version of jaxlib
Factor = tuple[Value, str]  # a word, and which half of it is meant: "low" or "high"
Factors = Callable[[int, Sequence[int], int], list[Factor]]  # of a block of registers, its place, and a pair of it

ROW = mgpu.Layout.WGMMA.reduce(1)  # a number for each row of operand A or of the accumulators
PAIR = 2  # bytes of a word that are converted together
POWER = 126  # 4-bit floats arrive too small by 2**126
PAIRS_APART = 8  # entries of k between the pairs of a lane


@dataclasses.dataclass(frozen=True)
class Scales:
    """The scales of a register operand in a step of the mainloop: arrays [64], with other words in other lanes."""

    loaded: Any  # two or four bytes
    pairs: list[Any]  # the same as bfloat16 numbers, two to a word
    dtype: np.dtype[Any]  # float8_e8m0fnu or float8_e4m3fn
    length: int  # entries of k that share a scale
    values: np.dtype[Any]
    interleaved: bool  # a lane has pairs of the whole run; else neighbours

    @property
    def words(self) -> list[Any]:
        """All arrays, in the order in which `large` and `factors` get their registers."""
        return [self.loaded, *self.pairs]

    @property
    def split(self) -> bool:
        """Whether a scale may be too large for one factor."""
        return self.values.name == FLOAT4 and self.dtype.name == "float8_e8m0fnu"

    def large(self, words: Sequence[FragmentedArray]) -> Value | None:
        """Whether any scale of a warp is 2 or more, or NaN; None where that makes no difference."""
        if not self.split:
            return None
        together = functools.reduce(arith.ori, (vector.extract(x, [], [0]) for x in words[0].registers.flat))
        text = """{
            .reg .pred large, any;
            .reg .b32 top;
            and.b32 top, $1, 0x80808080;
            setp.ne.u32 large, top, 0;
            vote.sync.any.pred any, large, 0xFFFFFFFF;
            selp.u32 $0, 1, 0, any;
        }"""
        return arith.cmpi(arith.CmpIPredicate.ne, _asm(text, together), _const(0))

    def factors(self, words: Sequence[FragmentedArray], run: int, large: bool) -> Factors:
        """A function that gives the factors of a pair in a block of `run` entries of k."""
        pairs, of_lane = words[1:], None
        if self.length < run and not self.interleaved:  # a lane has a half of the run, and its scale
            of_lane = arith.divui(quad_lane(), _const(LANES * self.length // run))

        @functools.cache
        def taken(index: int, place: tuple[int, ...]) -> Value:
            """Two scales, which the lane that has them gives to all lanes of a row."""
            return _from_lane(pairs[index % len(pairs)].registers[place], index // len(pairs))

        @functools.cache
        def factors_of(index: int, place: tuple[int, ...]) -> list[Value]:
            """Words whose halves are the factors of two scales: neighbours, or every other one from that of a lane."""
            word = taken(index, place)
            if of_lane is not None:
                word = _halves(word, taken(index + 1, place), of_lane)
            return [_asm(text, word) for text in split_powers()] if self.split and large else [word]

        def factors(block: int, rest: Sequence[int], pair: int) -> list[Factor]:
            at = (block * run + (PAIRS_APART * pair if self.interleaved else 0)) // self.length
            # of the 16 rows of a warp, a thread has one of the first 8 and one of the others
            place = tuple(max(rest) if size == 2 else 0 for size in pairs[0].registers.shape)
            apart = 1 if of_lane is None else PAIR
            index = at // (PAIR * apart) * apart
            return [(word, ("low", "high")[at // apart % PAIR]) for word in factors_of(index, place)]

        return factors


def of_step(
    loaded: Any, chunk: int, dtype: np.dtype[Any], length: int, values: np.dtype[Any], interleaved: bool
) -> Scales:
    """The scales of a step, of which each lane has loaded a chunk of two or four bytes: these are converted here."""
    struct = mgpu.ShapeDtypeStruct(loaded.shape, loaded.dtype, layout=ROW)
    small = values.name == FLOAT4

    @mgpu.inline_mgpu(arg_types=(ROW,), return_type=(struct,) * (chunk // PAIR))
    def convert(_: Any, words: FragmentedArray) -> tuple[FragmentedArray, ...]:
        return tuple(_converted(words, which, dtype, small) for which in range(chunk // PAIR))

    return Scales(loaded, list(convert(loaded)), dtype, length, values, interleaved)


def _converted(words: FragmentedArray, which: int, dtype: np.dtype[Any], small: bool) -> FragmentedArray:
    """The two scales in one half of each word, as bfloat16 numbers."""
    registers = np.empty_like(words.registers)
    for place, register in np.ndenumerate(words.registers):
        word = vector.extract(register, [], [0])
        if dtype.name == "float8_e4m3fn":
            numbers = _asm(e4m3_to_bf16(("low", "high")[which], small), word)
        else:
            exponents = _asm(f"prmt.b32 $0, $1, 0, {0x4140 + 0x0202 * which:#x};", word)
            numbers = _asm(powers_of_two(POWER if small else 0), exponents)
        registers[place] = vector.broadcast(ir.VectorType.get((1,), numbers.type), numbers)
    return FragmentedArray(_registers=registers, _layout=words.layout, _is_signed=words.is_signed)


def quad_lane() -> Value:
    """Which of the four lanes that hold a row of operand A this thread is."""
    return arith.remui(utils.thread_idx(), _const(LANES))


def _from_lane(register: Value, lane: int) -> Value:
    """The word that one of the four lanes of a row has."""
    text = f"shfl.sync.idx.b32 $0, $1, {lane}, 0x1C1F, 0xFFFFFFFF;"
    return _asm(text, vector.extract(register, [], [0]), has_side_effects=True)  # all lanes take part


def _halves(first: Value, second: Value, upper: Value) -> Value:
    """The lower halves of two words, or the upper ones."""
    chosen = arith.addi(_const(0x5410), arith.muli(upper, _const(0x2222)))
    i32 = ir.IntegerType.get_signless(32)
    out: Value = llvm.inline_asm(i32, [first, second, chosen], "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r")
    return out


def _const(x: int) -> Value:
    return utils.c(x, ir.IntegerType.get_signless(32))


def _asm(text: str, word: Value, has_side_effects: bool = False) -> Value:
    """The word that some instructions make of another one."""
    i32 = ir.IntegerType.get_signless(32)
    out: Value = llvm.inline_asm(i32, [word], text, "=r,r", has_side_effects=has_side_effects)
    return out


def powers_of_two(up: int) -> str:
    """The instructions that make bfloat16 numbers of e8m0 scales in both halves of a word, times 2**up.

    2**-127 has no exponent: it is 0x0040. 255, which would be an infinity, is NaN.
    """
    if up:
        return f"mad.lo.u32 $0, $1, 128, {up * 0x00800080:#x};"
    return """{
        .reg .b32 number, least, over;
        shl.b32 number, $1, 7;
        mov.b32 least, 0x00400040;
        max.u16x2 number, number, least;
        add.u32 over, $1, 0x00010001;
        and.b32 over, over, 0x01000100;
        shr.b32 over, over, 2;
        or.b32 $0, number, over;
    }"""


def split_powers() -> list[str]:
    """The instructions for two factors instead of e8m0 scales times 2**126, which may be too large for bfloat16.

    A scale of 128 or more has its top bit set: of that, 128 stays in the first factor. The rest, or NaN, is the second.
    """
    parts = f"""
        .reg .b32 exponent, upper, rest, number;
        sub.u32 exponent, $1, {POWER * 0x00800080:#x};
        shr.b32 exponent, exponent, 7;
        shr.b32 upper, exponent, 7;
        and.b32 upper, upper, 0x00010001;
        mul.lo.u32 upper, upper, 127;
        and.b32 rest, exponent, upper;"""
    first = f"""
        sub.u32 number, exponent, rest;
        mad.lo.u32 $0, number, 128, {POWER * 0x00800080:#x};"""
    second = """
        mad.lo.u32 number, rest, 128, 0x3F803F80;
        add.u32 rest, exponent, 0x00010001;
        and.b32 rest, rest, 0x01000100;
        shr.b32 rest, rest, 2;
        mul.lo.u32 rest, rest, 0x1FF;
        or.b32 $0, number, rest;"""
    return [f"{{{parts}{last}\n    }}" for last in (first, second)]


def e4m3_to_bf16(half: str, small: bool) -> str:
    """The instructions that make bfloat16 numbers of the two float8_e4m3fn scales in the low or high half of a word.

    They are multiplied by 2**118 for small values. NaN stays NaN.
    """
    scaled = "mov.b32 power, 0x7A807A80; mul.bf16x2 numbers, numbers, power;" if small else ""
    return f"""{{
        .reg .b16 low, high;
        .reg .b32 numbers, power;
        .reg .f32 first, second;
        mov.b32 {{low, high}}, $1;
        cvt.rn.f16x2.e4m3x2 numbers, {half};
        mov.b32 {{low, high}}, numbers;
        cvt.f32.f16 first, low;
        cvt.f32.f16 second, high;
        cvt.rn.bf16x2.f32 numbers, second, first;
        {scaled}
        mov.b32 $0, numbers;
    }}"""
