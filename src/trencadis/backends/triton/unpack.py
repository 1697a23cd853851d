"""Bytes of weights to bfloat16 or float16 in PTX: four bytes of a register to two registers of two numbers each.

The same numbers as `weights.numbers`, at one to four instructions each. Exponent and fraction of a float go to where
the wider one has them, and a product corrects the bias of the exponent. An integer becomes the fraction of a power of
two, which is subtracted.
"""

from __future__ import annotations

from typing import NamedTuple

from trencadis.core.interleave import FLOAT4, FLOAT4_MOVES

BELOW = "0x4140", "0x4342"  # for prmt: bytes 0 and 1, or 2 and 3, each below a byte of another register
ABOVE = "0x1404", "0x3424"  # likewise, each above


class _Float(NamedTuple):
    """How a float moves: its bits are right-shifted from the top of 16, and multiplied by a power of two."""

    shift: int
    mask: int  # of exponent and fraction, after the shift
    power: int  # the bits of the power of two
    overflow: int = 0  # what, added to the bits of NaN or Inf, sets the bit `carry`, and to those of no number
    carry: int = 0
    times: int = 0  # what makes that bit an exponent of ones


FLOATS = {
    ("float4_e2m1fn", "bfloat16"): _Float(6, 0x01C0, 0x7E80),
    ("float4_e2m1fn", "float16"): _Float(3, 0x0E00, 0x7400),
    ("float8_e4m3fn", "bfloat16"): _Float(4, 0x07F0, 0x7B80, 0x0010, 0x0800, 15),
    ("float8_e4m3fn", "float16"): _Float(1, 0x3F80, 0x5C00, 0x0080, 0x4000, 1),
    ("float8_e5m2", "bfloat16"): _Float(3, 0x0FE0, 0x7780, 0x0080, 0x1000, 7),
}


# the byte of a power of two above a fraction of 7 bits (or 10 in float16), and what is subtracted then
INTEGERS = {
    ("int4", "bfloat16"): ("0x43434343", 0xC308),
    ("int4", "float16"): ("0x64646464", 0xE408),
    ("int8", "float16"): ("0x64646464", 0xE480),
}


def product(rows: str) -> str:
    """The PTX of a product of two numbers with two others."""
    return f"{{ .reg .b32 zero; mov.b32 zero, 0x80008000; {_fma(rows)} $0, $1, $2, zero; }}"


def unpack(values: str, rows: str, high: bool = False) -> str:
    """The PTX of four numbers of the dtype of rows, from bytes; of 4-bit values the low ones, or the high ones."""
    if values == "int8" and rows == "bfloat16":
        body = _int8()
    elif values.startswith("int"):
        body = _integers(values, rows, high)
    else:
        body = _floats(values, rows, high)
    lines = [*body, "mov.b32 $0, r0", "mov.b32 $1, r1"]  # results last: they may have the register of the bytes
    return "{ .reg .b32 w, t, u, c, by, plus, r0, r1; " + "; ".join(lines) + "; }"


def unpack_words(values: str, rows: str) -> str:
    """The PTX of the two or four pairs of the dtype of rows that a word of interleaved weights holds.

    The word is the last operand. It is read after the first pair is written, so that no pair may have its register.
    """
    # here, since only these need what runs on Hopper alone
    from trencadis.backends.gpu import upcast

    half = rows == "float16"
    if values.startswith("float8"):
        return upcast.float8_to_floats(values[7:11], half)
    if values == FLOAT4:
        texts = [upcast.float4_to_floats(moves, half) for moves in FLOAT4_MOVES]
        texts = [f"{{ {text} {_power(rows)} }}" for text in texts]
    else:
        convert = upcast.int4_to_floats if values == "int4" else upcast.int8_to_floats
        texts = [convert(by, half) for by in range(0, 16, 4 if values == "int4" else 8)]
    return "".join(text.replace("$1", f"${len(texts)}").replace("$0", f"${i}") for i, text in enumerate(texts))


def _power(rows: str) -> str:
    """The PTX that multiplies a pair of 4-bit floats by the power of two by which they are too small."""
    by, plus = _twice(FLOATS[FLOAT4, rows].power), "0x80008000"
    return f".reg .b32 by, plus; mov.b32 by, {by}; mov.b32 plus, {plus}; {_fma(rows)} $0, $0, by, plus;"


def _integers(values: str, rows: str, high: bool) -> list[str]:
    """An integer with its sign bit inverted is the integer plus 8 or 128: the fraction of a power of two."""
    above, minus = INTEGERS[values, rows]
    body = [f"shr.b32 w, $2, {4 if high else 0}"]
    body += ["and.b32 w, w, 0x0F0F0F0F"] if values == "int4" else []
    body += [f"xor.b32 w, w, {'0x08080808' if values == 'int4' else '0x80808080'}", f"mov.b32 c, {above}"]
    body += [f"mov.b32 by, {_twice(0x3F80 if rows == 'bfloat16' else 0x3C00)}", f"mov.b32 plus, {_twice(minus)}"]
    for i, order in enumerate(BELOW):
        body += [f"prmt.b32 t, w, c, {order}", f"{_fma(rows)} r{i}, t, by, plus"]
    return body


def _int8() -> list[str]:
    """128 plus the low 7 bits, minus 128 or, for a negative number, 256: bfloat16 has no room for 8 bits."""
    body = ["and.b32 w, $2, 0x7F7F7F7F", "and.b32 u, $2, 0x80808080", "mov.b32 c, 0x43434343"]
    body += [f"mov.b32 by, {_twice(0xBF80)}"]
    for i, order in enumerate(BELOW):
        body += [f"prmt.b32 t, w, c, {order}", f"prmt.b32 plus, u, c, {order}", f"fma.rn.bf16x2 r{i}, plus, by, t"]
    return body


def _floats(values: str, rows: str, high: bool) -> list[str]:
    """A float, from the upper half of 16 bits, or the upper quarter, down to its place."""
    body = [f"shl.b32 w, $2, {4 if values == 'float4_e2m1fn' and not high else 0}", "mov.b32 c, 0"]
    if (values, rows) not in FLOATS:  # float8_e5m2 is the upper half of a float16
        return body + [f"prmt.b32 r{i}, w, c, {order}" for i, order in enumerate(ABOVE)]
    how = FLOATS[values, rows]
    body += [f"mov.b32 by, {_twice(how.power)}", "mov.b32 plus, 0x80008000"]
    for i, order in enumerate(ABOVE):
        body += [f"prmt.b32 t, w, c, {order}", f"shr.b32 u, t, {how.shift}", f"and.b32 u, u, {_twice(how.mask)}"]
        if how.carry:
            body += [f"add.u32 r{i}, u, {_twice(how.overflow)}", f"and.b32 r{i}, r{i}, {_twice(how.carry)}"]
            body += [f"mad.lo.u32 u, r{i}, {how.times}, u"]
        body += ["and.b32 t, t, 0x80008000", "or.b32 t, t, u", f"{_fma(rows)} r{i}, t, by, plus"]
    return body


def _fma(rows: str) -> str:
    return f"fma.rn.{'bf16x2' if rows == 'bfloat16' else 'f16x2'}"


def _twice(bits: int) -> str:
    return f"0x{bits:04X}{bits:04X}"
