"""Scales that a register operand is multiplied by: bytes of words, as bfloat16 numbers, two to a register.

Values that are 4-bit floats arrive too small by 2**126. Their scales make up for that, so that one product does both:

    e8m0    2**s times 2**126    a bfloat16 number if s <= 1. If any scale of a warp is 2 or more, there are two factors
    e4m3    s times 2**118       the sums are too small by 2**8, for which they are multiplied at the end
"""

from __future__ import annotations

import dataclasses
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
WORD_BYTES = 4
PAIRS_APART = 8  # entries of k between the pairs of a lane


@dataclasses.dataclass(frozen=True)
class Scales:
    """The scales of a register operand: words [64] of four bytes, for each step of the mainloop."""

    words: list[Any]
    dtype: np.dtype[Any]  # float8_e8m0fnu or float8_e4m3fn
    length: int  # entries of k that share a scale
    values: np.dtype[Any]
    interleaved: bool  # a lane has pairs of the whole run; else neighbours

    @property
    def small(self) -> bool:
        """Whether values arrive too small by 2**126."""
        return self.values.name == FLOAT4

    def large(self, words: Sequence[FragmentedArray]) -> Value | None:
        """Whether any scale of a warp is 2 or more, or NaN; None where that makes no difference."""
        if not self.small or self.dtype.name != "float8_e8m0fnu":
            return None
        i32 = ir.IntegerType.get_signless(32)
        together, *others = (vector.extract(x, [], [0]) for each in words for x in each.registers.flat)
        for word in others:
            together = arith.ori(together, word)
        text = """{
            .reg .pred large, any;
            .reg .b32 top;
            and.b32 top, $1, 0x80808080;
            setp.ne.u32 large, top, 0;
            vote.sync.any.pred any, large, 0xFFFFFFFF;
            selp.u32 $0, 1, 0, any;
        }"""
        anywhere: Value = llvm.inline_asm(i32, [together], text, "=r,r")
        return arith.cmpi(arith.CmpIPredicate.ne, anywhere, _const(0))

    def factors(self, words: Sequence[FragmentedArray], run: int, large: bool) -> Factors:
        """A function that gives the factors of a pair in a block of `run` entries of k."""
        apart, of_lane = 1, None
        if self.length < run and not self.interleaved:  # a lane has a part of the run, and its own scale
            apart = run // self.length
            of_lane = arith.divui(quad_lane(), _const(LANES // apart))
        known: dict[Any, list[Factor]] = {}

        def factors(block: int, rest: Sequence[int], pair: int) -> list[Value]:
            at = (block * run + (PAIRS_APART * pair if self.interleaved else 0)) // self.length
            # of the 16 rows of a warp, a thread has one of the first 8 and one of the others
            place = tuple(max(rest) if size == 2 else 0 for size in words[0].registers.shape)
            if (at, place) not in known:
                which, byte = divmod(at, WORD_BYTES)
                both = byte & ~apart, byte | apart  # two scales at once
                if self.dtype.name == "float8_e4m3fn":
                    numbers = _from_lane([_number(each, place) for each in words], which, both, of_lane)
                    found = [[(numbers, "low")], [(numbers, "high")]]
                else:
                    found = self._powers(_number(words[which], place), both, of_lane, large)
                for each, factor in zip(both, found, strict=True):
                    known[at - byte + each, place] = factor
            return known[at, place]

        return factors

    def _powers(self, word: Value, both: tuple[int, int], of_lane: Value | None, large: bool) -> list[list[Factor]]:
        """The factors for two e8m0 scales: bytes of a word, or those that are as many further as `of_lane` says."""
        exponents = _bytes_of(word, 0x4040 + both[0] + 0x100 * both[1], 0x0101, of_lane)
        if self.small and large:
            first, second = _split_powers(exponents, _nan(word))
            return [[(first, half), (second, half)] for half in ("low", "high")]
        powers = _asm(powers_of_two(126 if self.small else 0), exponents)
        powers = powers if self.small else arith.ori(powers, _nan(word))
        return [[(powers, "low")], [(powers, "high")]]


def converted(words: Any, values: np.dtype[Any]) -> list[Any]:
    """The e4m3 scales that each lane has in a word [64] as bfloat16 numbers: two words of two, for all lanes to take.

    Conversion takes five instructions for two scales, and the four lanes of a row need the same ones.
    """
    struct = mgpu.ShapeDtypeStruct(words.shape, words.dtype, layout=ROW)

    @mgpu.inline_mgpu(arg_types=(ROW,), return_type=(struct, struct))
    def convert(_: Any, words: FragmentedArray) -> tuple[FragmentedArray, ...]:
        return tuple(_converted(words, half, values.name == FLOAT4) for half in ("low", "high"))

    return list(convert(words))


def _converted(words: FragmentedArray, half: str, small: bool) -> FragmentedArray:
    """The scales in one half of each word, as bfloat16 numbers."""
    registers = np.empty_like(words.registers)
    for place in np.ndindex(registers.shape):
        numbers = _asm(e4m3_to_bf16(half, small), _number(words, place))
        registers[place] = vector.broadcast(ir.VectorType.get((1,), numbers.type), numbers)
    return FragmentedArray(_registers=registers, _layout=words.layout, _is_signed=words.is_signed)


def quad_lane() -> Value:
    """Which of the four lanes that hold a row of operand A this thread is."""
    return arith.remui(utils.thread_idx(), _const(LANES))


def _from_lane(words: Sequence[Value], lane: int, both: tuple[int, int], of_lane: Value | None) -> Value:
    """Two bfloat16 numbers of the four that a lane of this row has in two words; further ones as `of_lane` says."""
    if both[1] == both[0] + 1:
        return _asm(_shuffle(lane), words[both[0] // 2])
    taken = [_asm(_shuffle(lane), word) for word in words]
    chosen = _const(0x5410)  # the low halves
    if of_lane is not None:
        chosen = arith.addi(chosen, arith.muli(of_lane, _const(0x2222)))
    out: Value = llvm.inline_asm(
        ir.IntegerType.get_signless(32), [*taken, chosen], "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r"
    )
    return out


def _shuffle(lane: int) -> str:
    """The instruction that takes a word from one of the four lanes of a row."""
    return f"shfl.sync.idx.b32 $0, $1, {lane}, 0x1C1F, 0xFFFFFFFF;"


def _number(words: FragmentedArray, place: tuple[int, ...]) -> Value:
    """The word that a thread has at a place of its registers."""
    return vector.extract(words.registers[place], [], [0])


def _const(x: int) -> Value:
    return utils.c(x, ir.IntegerType.get_signless(32))


def _bytes_of(word: Value, selector: int, per_byte: int, of_lane: Value | None) -> Value:
    """The bytes of a word, or 0, that the nibbles of a selector name: 0 to 3, or 4; those of a lane are further on."""
    i32, chosen = ir.IntegerType.get_signless(32), _const(selector)
    if of_lane is not None:
        chosen = arith.addi(chosen, arith.muli(of_lane, _const(per_byte)))
    out: Value = llvm.inline_asm(i32, [word, chosen], "prmt.b32 $0, $1, 0, $2;", "=r,r,r")
    return out


def _nan(word: Value) -> Value:
    """NaN in both halves if any byte of a word is 255, else 0: all four are scales of one column of weights.

    The complement of such a byte is 0, from which 1 cannot be subtracted.
    """
    less = arith.subi(arith.xori(word, _const(0xFFFFFFFF)), _const(0x01010101))
    found = arith.andi(arith.andi(less, word), _const(0x80808080))
    return arith.select(arith.cmpi(arith.CmpIPredicate.ne, found, _const(0)), _const(0x7FC07FC0), _const(0))


def _asm(text: str, word: Value) -> Value:
    """The word that some instructions make of another one."""
    out: Value = llvm.inline_asm(ir.IntegerType.get_signless(32), [word], text, "=r,r")
    return out


def powers_of_two(up: int) -> str:
    """The instructions that make bfloat16 numbers of e8m0 scales in both halves of a word, times 2**up.

    2**-127 has no exponent: it is 0x0040.
    """
    if up:
        return f"mad.lo.u32 $0, $1, 128, {up * 0x00800080:#x};"
    return """{
        .reg .b32 number, least;
        shl.b32 number, $1, 7;
        mov.b32 least, 0x00400040;
        max.u16x2 $0, number, least;
    }"""


def _split_powers(exponents: Value, nan: Value) -> list[Value]:
    """Powers of two times 2**126, from e8m0 scales in both halves of a word, as two factors.

    They are up to 2**127, and the rest or NaN. A scale of 128 or more has its top bit set: of that, 128 stays in the
    first factor.
    """
    top = arith.andi(exponents, _const(0x00800080))
    large = arith.muli(arith.shrui(top, _const(7)), _const(0x7F))  # 127 where the top bit is set
    rest = arith.andi(exponents, large)
    first, second = arith.subi(exponents, rest), rest
    both = [arith.addi(first, _const(0x007E007E)), arith.addi(second, _const(0x007F007F))]
    first, second = (arith.muli(each, _const(128)) for each in both)
    return [first, arith.ori(second, nan)]


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
