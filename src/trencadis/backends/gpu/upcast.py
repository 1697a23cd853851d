"""Low-precision weights as a register (RS) operand of wgmma, which sums over k in another order.

Four lanes of a warp hold a row of operand A, and wgmma expects two neighbours along k in each lane, the next two in the
next lane. A lane that loads a word of weights gets a longer run of neighbours instead. Nothing is exchanged between
lanes: a word is upcast in the lane that loaded it. Either weights are stored interleaved (`core/interleave.py`), so
that it holds the pairs of that lane, or `permute_k` permutes the columns of lhs to match:

    int4, 32 of k        word of lane 0     0  1  2  3  4  5  6  7      upcast by shifts, so that 0 and 4 make a pair
    pairs of operand A   lanes 0, 1, 2, 3   0 4 | 8 12 | 16 20 | 24 28    1 5 | 9 13 | ...    2 6 | ...    3 7 | ...
    8 bits, 16 of k      lanes 0, 1, 2, 3   0 2 | 4 6  |  8 10 | 12 14    1 3 | 5 7  | ...
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import FragmentedArray, utils
from jax.experimental.pallas import mosaic_gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, scf

from trencadis.backends.gpu.operand_scales import ROW, Factor, Factors, Scales
from trencadis.backends.gpu.tile_scheduler import Ref
from trencadis.backends.gpu.unpack import rs_unpacked
from trencadis.core.dtypes import bits
from trencadis.core.interleave import FLOAT4, FLOAT4_MOVES, LANES, WORD, Move, deinterleave_columns

Value = Any  # an MLIR value: its type is generic or not, by the version of jaxlib
Conversion = Callable[[Value], list[Value]]  # of a lane's word to pairs of 16-bit floats

# the same as FLOAT4_MOVES, of weights that are not interleaved: pair p is bits 4 p to 4 p + 3 of both halves
FLOAT4_NEIGHBOURS = tuple(((12 - 4 * p, 0x8000), ((6 - 4 * p) % WORD, 0x01C0)) for p in range(4))


@functools.partial(jax.jit, static_argnums=1)
def permute_k(x: jax.Array, weights: Any) -> jax.Array:
    """x [m, k] with its columns in the order of k that weights of this dtype, as they lie, have as a register operand.

    It is the inverse of the order in which interleaved weights are stored.
    """
    return deinterleave_columns(x, weights)


def rs_operand(ref: Ref, dtype: Any, interleaved: bool, scales: Scales | None) -> Any:
    """Weights [64, block_k] in shared memory as a register operand of this dtype.

    Its order of k is that of lhs if the weights are interleaved, and that of `permute_k` if not; of 8 bits, that of lhs
    if they are in order. With scales, the operand is the product of both, perhaps too small by `operand_excess`: exact,
    since the caller sees to that.
    """
    if jnp.dtype(dtype).itemsize == 1:
        return rs_unpacked(ref, dtype)
    (operand,) = rs_parts(ref, dtype, ref.shape[1], interleaved, scales)
    return operand


def rs_parts(ref: Ref, dtype: Any, k: int, interleaved: bool, scales: Scales | None) -> Iterator[Any]:
    """Yield `rs_operand` in parts of k entries, each of which is unpacked when it is asked for."""
    word = WORD // bits(ref.dtype)
    run = LANES * word
    loaded = mgpu.Layout.TILED(mgpu.Tiling(((64, run), (16, run), (8, run), (word,))), (-7,), (-3, -2), -1)
    held = mgpu.layout_cast(ref[...], loaded)
    convert = _conversion(np.dtype(held.dtype), jnp.dtype(dtype), interleaved)
    for start in range(0, held.shape[1], k):
        part = held if k == held.shape[1] else held[:, start : start + k]
        yield _unpacked(part, loaded, convert, jnp.dtype(dtype), scales, start // run)


def _unpacked(
    held: jax.Array, loaded: Any, convert: Conversion, dtype: np.dtype[Any], scales: Scales | None, first: int
) -> Any:
    """What lanes have loaded as a register operand; its first run of k has this number in the step, and its scale."""
    values, run = held.dtype, LANES * WORD // bits(held.dtype)
    result = mgpu.ShapeDtypeStruct(held.shape, dtype, layout=mgpu.Layout.WGMMA)
    given = [] if scales is None else scales.words

    @mgpu.inline_mgpu(arg_types=(loaded, *(ROW for _ in given)), return_type=result)
    def relabel(_: Any, words: FragmentedArray, *given: FragmentedArray) -> FragmentedArray:
        """The registers of each lane, taken for those of operand A."""
        target = mgpu.Layout.WGMMA.to_mgpu()
        registers = np.empty(target.registers_shape(words.shape), dtype=object)
        i32, count = ir.IntegerType.get_signless(32), run // (2 * LANES)
        # as integers: LLVM would take vectors of 4-bit numbers apart where they go into a branch
        loads = [(at, utils.bitcast(x, i32)) for at, x in np.ndenumerate(words.registers)]

        def unpack(large: bool) -> list[Value]:
            factors = _excess_of(values, dtype) if scales is None else scales.factors(given, run, large)
            return [
                functools.reduce(_times, factors(first + block, rest, i), pair)
                for (_, block, *rest), word in loads
                for i, pair in enumerate(convert(word))
            ]

        pairs = iter(_either(None if scales is None else scales.large(given), unpack, count * len(loads)))
        for (row, block, *rest), _word in loads:
            for i in range(count):
                registers[(row, block * count + i, *rest)] = next(pairs)
        return FragmentedArray(_registers=registers, _layout=target, _is_signed=None)

    return relabel(held, *given)


def _either(condition: Value | None, make: Callable[[bool], list[Value]], count: int) -> list[Value]:
    """The pairs that `make` computes if a condition of a warp holds, or those if not; None is one that never holds."""
    if condition is None:
        return make(False)
    i32, pair = ir.IntegerType.get_signless(32), ir.VectorType.get((2,), ir.BF16Type.get())
    if_else: Any = scf.IfOp  # its type is that of the generated class, which it replaces
    branch = if_else(condition, [i32] * count, has_else=True)
    for block, holds in ((branch.then_block, True), (branch.else_block, False)):
        with ir.InsertionPoint(block):
            scf.yield_([utils.bitcast(x, i32) for x in make(holds)])
    return [utils.bitcast(x, pair) for x in branch.results]


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


def _conversion(source: np.dtype[Any], dtype: np.dtype[Any], interleaved: bool) -> Conversion:
    """How a lane's word of weights becomes pairs of 16-bit floats, each from the same bits of both halves."""
    half = dtype == jnp.float16
    if bits(source) == 4 and source != jnp.int4:
        moves = FLOAT4_MOVES if interleaved else FLOAT4_NEIGHBOURS
        return functools.partial(_pairs, [float4_to_floats(each, half) for each in moves], half)
    if jnp.issubdtype(source, jnp.floating):
        return functools.partial(_float8_to_floats, kind=source.name[7:11], half=half)
    convert = int4_to_floats if bits(source) == 4 else int8_to_floats
    return functools.partial(_pairs, [convert(by, half) for by in range(0, WORD // 2, bits(source))], half)


def _pairs(texts: Sequence[str], half: bool, word: Value) -> list[Value]:
    """The pairs of bfloat16 or float16 that some instructions make of a word, one each."""
    i32 = ir.IntegerType.get_signless(32)
    found: list[Value] = [llvm.inline_asm(i32, [word], text, "=r,r") for text in texts]
    return [utils.bitcast(x, _pair_type(half)) for x in found]


def _pair_type(half: bool) -> ir.Type:
    return ir.VectorType.get((2,), ir.F16Type.get() if half else ir.BF16Type.get())


def _excess_of(values: np.dtype[Any], dtype: np.dtype[Any]) -> Factors:
    """The factors of values that no scale is multiplied into: none, or the power of two by which they are too small."""
    if values.name != FLOAT4:
        return lambda *_: []
    power = utils.c(0x74007400 if dtype == jnp.float16 else 0x7E807E80, ir.IntegerType.get_signless(32))
    return lambda *_: [(power, "low")]


def upcast(x: jax.Array, dtype: Any) -> jax.Array:
    """Low-precision weights in a dtype that holds them; float8 becomes bfloat16 only by way of float16 and float32."""
    is_float = jnp.issubdtype(x.dtype, jnp.floating) and dtype != jnp.float16
    return (x.astype(jnp.float16).astype(jnp.float32) if is_float else x).astype(dtype)


def int4_to_floats(by: int, half: bool) -> str:
    """The instructions that make a pair of bfloat16, or of float16, of the int4 at bits `by` of both halves of a word.

    With the bits of a power of two above them and their sign bit flipped they are the bfloat16 numbers 128 to 143, from
    which 136 is subtracted, or the float16 numbers 1024 to 1039, from which 1032 is.
    """
    zero, kind = ("0x64086408", "f16x2") if half else ("0x43084308", "bf16x2")
    return f"""{{
        .reg .b32 number, zero;
        shr.b32 number, $1, {by};
        lop3.b32 number, number, 0x000F000F, {zero}, 0x6A;
        mov.b32 zero, {zero};
        sub.{kind} $0, number, zero;
    }}"""


def int8_to_floats(by: int, half: bool) -> str:
    """The instructions that make a pair of bfloat16, or of float16, of the int8 at bits `by` of both halves of a word.

    In float16 it is as for int4: 1024 to 1279, minus 1152. A bfloat16 number has a bit less: without their sign bit
    they are the numbers 128 to 255, from which 128 is subtracted, or 256 where that bit is set.
    """
    if half:
        return f"""{{
            .reg .b32 number, zero;
            shr.b32 number, $1, {by};
            lop3.b32 number, number, 0x00FF00FF, 0x64806480, 0x6A;
            mov.b32 zero, 0x64806480;
            sub.f16x2 $0, number, zero;
        }}"""
    return f"""{{
        .reg .b32 number, low, sign;
        shr.b32 number, $1, {by};
        lop3.b32 low, number, 0x007F007F, 0x43004300, 0xEA;
        lop3.b32 sign, number, 0x00800080, 0x43004300, 0xEA;
        sub.bf16x2 $0, low, sign;
    }}"""


def _float8_to_floats(word: Value, kind: str, half: bool) -> list[Value]:
    """Four float8_e4m3fn or float8_e5m2, as the kind says, as two pairs: bytes 0 and 2, 1 and 3."""
    i32 = ir.IntegerType.get_signless(32)
    both = llvm.StructType.get_literal([i32, i32])
    found: Value = llvm.inline_asm(both, [word], float8_to_floats(kind, half), "=&r,=r,r")
    return [utils.bitcast(llvm.extractvalue(i32, found, [i]), _pair_type(half)) for i in range(2)]


def float8_to_floats(kind: str, half: bool) -> str:
    """The instructions that make two pairs of bfloat16, or of float16, of four float8 in a word.

    They become bfloat16 only by way of float16 and float32.
    """
    if half:
        pairs = "mov.b32 $0, {a, c}; mov.b32 $1, {b, d};"
    else:
        wide = " ".join(f"cvt.f32.f16 {x}_wide, {x};" for x in "abcd")
        pairs = f"{wide} cvt.rn.bf16x2.f32 $0, c_wide, a_wide; cvt.rn.bf16x2.f32 $1, d_wide, b_wide;"
    return f"""{{
        .reg .b16 low, high, a, b, c, d;
        .reg .b32 first, second;
        .reg .f32 a_wide, b_wide, c_wide, d_wide;
        mov.b32 {{low, high}}, $2;
        cvt.rn.f16x2.{kind}x2 first, low;
        cvt.rn.f16x2.{kind}x2 second, high;
        mov.b32 {{a, b}}, first;
        mov.b32 {{c, d}}, second;
        {pairs}
    }}"""


def float4_to_floats(moves: Sequence[Move], half: bool) -> str:
    """The instructions that make a pair of bfloat16, or of float16, of two float4_e2m1fn in a word.

    Sign, exponent and mantissa are moved to their places, where they make a number that is too small.
    """
    if half:  # all but the sign is three bits further up
        apart = [each for by, keep in moves for each in ((by, keep & 0x8000), (by + 3, (keep & 0x01C0) << 3))]
        moves = [(by % WORD, keep) for by, keep in apart if keep]
    lines = ["mov.b32 number, 0;"]
    for by, keep in moves:
        lines += [_rotation(by, keep), f"lop3.b32 number, moved, {keep << 16 | keep:#x}, number, 0xEA;"]
    return f"{{ .reg .b32 moved, number; {' '.join(lines)} mov.b32 $0, number; }}"


def _rotation(by: int, keep: int) -> str:
    """The instruction that rotates a word to the left, as far as the bits to keep of both halves can tell.

    Shifts to the left can be multiplications to the compiler, which have another pipe than shifts to the right,
    rotations and logical operations.
    """
    if keep >> by << by == keep:
        return f"shl.b32 moved, $1, {by};"
    return f"shf.l.wrap.b32 moved, $1, $1, {by};"


def _times(pair: Value, factor: Factor) -> Value:
    """A pair of 16-bit floats times a number that stands in a half of a word, which the instruction chooses."""
    word, half = factor
    i32, kind = ir.IntegerType.get_signless(32), ir.VectorType(pair.type).element_type
    text = f"""{{
        .reg .b16 low, high;
        .reg .b32 both;
        mov.b32 {{low, high}}, $2;
        mov.b32 both, {{{half}, {half}}};
        mul.{"f16x2" if isinstance(kind, ir.F16Type) else "bf16x2"} $0, $1, both;
    }}"""
    out: Value = llvm.inline_asm(i32, [utils.bitcast(pair, i32), word], text, "=r,r,r")
    return utils.bitcast(out, pair.type)
