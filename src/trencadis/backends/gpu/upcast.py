"""Low-precision weights as a register (RS) operand of wgmma, which sums over k in another order.

Four lanes of a warp hold a row of operand A, and wgmma expects two neighbours along k in each lane, the next two in the
next lane. A lane that loads a word of weights gets a longer run of neighbours instead. Nothing is exchanged between
lanes: a word is upcast in the lane that loaded it. Either weights are stored interleaved (`core/interleave.py`), so
that it holds the pairs of that lane, or `permute_k` permutes the columns of lhs to match:

    int4, 32 of k        word of lane 0     0  1  2  3  4  5  6  7      upcast by shifts, so that 0 and 4 make a pair
    pairs of operand A   lanes 0, 1, 2, 3   0 4 | 8 12 | 16 20 | 24 28    1 5 | 9 13 | ...    2 6 | ...    3 7 | ...
    8 bits, 16 of k      lanes 0, 1, 2, 3   0 1 | 4 5  |  8  9 | 12 13    2 3 | 6 7  | ...
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
from jaxlib.mlir.dialects import arith, llvm, scf

from trencadis.backends.gpu.operand_scales import ROW, Factors, Scales
from trencadis.backends.gpu.tile_scheduler import Ref
from trencadis.core.dtypes import bits
from trencadis.core.interleave import FLOAT4, FLOAT4_MOVES, LANES, WORD, Move, deinterleave_columns

Value = Any  # an MLIR value: its type is generic or not, by the version of jaxlib
Conversion = Callable[[Value], list[Value]]  # of a lane's word to pairs of 16-bit floats

# the same as FLOAT4_MOVES, of weights that are not interleaved: pair p is bits 4 p to 4 p + 3 of both halves
FLOAT4_NEIGHBOURS = tuple(((12 - 4 * p, 0x8000), ((6 - 4 * p) % WORD, 0x01C0)) for p in range(4))


def permute_k(x: jax.Array, weights: Any) -> jax.Array:
    """x [m, k] with its columns in the order of k that weights of this dtype, as they lie, have as a register operand.

    It is the inverse of the order in which interleaved weights are stored.
    """
    return deinterleave_columns(x, weights)


def rs_operand(ref: Ref, dtype: Any, interleaved: bool = False, scales: Scales | None = None) -> Any:
    """Weights [64, block_k] in shared memory as a register operand of this dtype.

    Its order of k is that of lhs if the weights are interleaved, and that of `permute_k` if not. With scales, the
    operand is the product of both, perhaps too small by `operand_excess`: exact, since the caller sees to that.
    """
    (operand,) = rs_parts(ref, dtype, ref.shape[1], interleaved, scales)
    return operand


def rs_parts(ref: Ref, dtype: Any, k: int, interleaved: bool, scales: Scales | None = None) -> Iterator[Any]:
    """Yield `rs_operand` in parts of k entries, each of which is unpacked when it is asked for."""
    word = WORD // bits(ref.dtype)
    run = LANES * word
    loaded = mgpu.Layout.TILED(mgpu.Tiling(((64, run), (16, run), (8, run), (word,))), (-7,), (-3, -2), -1)
    held = mgpu.layout_cast(ref[...], loaded)
    convert = _conversion(held.dtype, jnp.dtype(dtype), interleaved)
    for start in range(0, held.shape[1], k):
        part = held if k == held.shape[1] else held[:, start : start + k]
        yield _unpacked(part, loaded, convert, jnp.dtype(dtype), scales, start // run)


def _unpacked(
    held: jax.Array, loaded: Any, convert: Conversion | None, dtype: np.dtype[Any], scales: Scales | None, first: int
) -> Any:
    """What lanes have loaded as a register operand; its first run of k has this number in the step, and its scale."""
    values, run = held.dtype, LANES * WORD // bits(held.dtype)
    held = upcast(held, dtype) if convert is None else held
    result = mgpu.ShapeDtypeStruct(held.shape, dtype, layout=mgpu.Layout.WGMMA)
    given = [] if scales is None else scales.words

    @mgpu.inline_mgpu(arg_types=(loaded, *(ROW for _ in given)), return_type=result)
    def relabel(_: Any, words: FragmentedArray, *given: FragmentedArray) -> FragmentedArray:
        """The registers of each lane, taken for those of operand A."""
        target = mgpu.Layout.WGMMA.to_mgpu()
        registers = np.empty(target.registers_shape(words.shape), dtype=object)
        i32, count = ir.IntegerType.get_signless(32), run // (2 * LANES)
        # as integers: LLVM would take vectors of 4-bit numbers apart where they go into a branch
        loads = [(at, x if convert is None else utils.bitcast(x, i32)) for at, x in np.ndenumerate(words.registers)]

        def unpack(large: bool) -> list[Value]:
            factors = _excess_of(values, dtype) if scales is None else scales.factors(given, run, large)
            return [
                functools.reduce(_times, factors(first + block, rest, i), pair)
                for (_, block, *rest), word in loads
                for i, pair in enumerate(_pairs(word, convert))
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


def _conversion(source: Any, dtype: np.dtype[Any], interleaved: bool) -> Conversion | None:
    """How a lane's word of weights becomes pairs of 16-bit floats; None where Mosaic's own conversion is as good."""
    if source == jnp.int4:
        return functools.partial(_int4_to_floats, dtype=dtype)
    if bits(source) == 4:
        return functools.partial(_float4_to_floats, dtype=dtype, interleaved=interleaved)
    return _int8_to_float16 if source == jnp.int8 and dtype == jnp.float16 else None


def _pairs(word: Value, convert: Conversion | None) -> list[Value]:
    """The pairs of 16-bit floats in a lane's word, converted here or before."""
    return [utils.vector_slice(word, slice(i, i + 2)) for i in (0, 2)] if convert is None else convert(word)


def _excess_of(values: np.dtype[Any], dtype: np.dtype[Any]) -> Factors:
    """The factors of values that no scale is multiplied into: none, or the power of two by which they are too small."""
    if values.name != FLOAT4:
        return lambda *_: []
    power = utils.c(0x74007400 if dtype == jnp.float16 else 0x7E807E80, ir.IntegerType.get_signless(32))
    return lambda *_: [power]


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
    shifted = [word, *(arith.shrui(word, utils.c(by, i32)) for by in (4, 8, 12))]

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

    def convert(selector: str) -> Value:
        numbers: Value = llvm.inline_asm(i32, [word], text.format(selector=selector), "=r,r")
        return utils.bitcast(numbers, pair)

    return [convert(selector) for selector in ("0x4140", "0x4342")]


def _float4_to_floats(word: Value, dtype: np.dtype[Any], interleaved: bool) -> list[Value]:
    """Eight float4_e2m1fn as four pairs of 16-bit floats that are too small by 2**126, or by 2**14 in float16."""
    i32, half = ir.IntegerType.get_signless(32), dtype == jnp.float16
    pair = ir.VectorType.get((2,), ir.F16Type.get() if half else ir.BF16Type.get())

    def convert(moves: Sequence[Move]) -> Value:
        numbers: Value = llvm.inline_asm(i32, [word], float4_to_floats(moves, half), "=r,r")
        return utils.bitcast(numbers, pair)

    return [convert(moves) for moves in (FLOAT4_MOVES if interleaved else FLOAT4_NEIGHBOURS)]


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

    Those to the left can be multiplications to the compiler, which have another pipe than shifts to the right, rotations
    and logical operations.
    """
    if not keep >> by << by == keep:
        return f"shf.l.wrap.b32 moved, $1, $1, {by};"
    return f"shl.b32 moved, $1, {by};"


def _times(pair: Value, scale: Value) -> Value:
    """A pair of 16-bit floats times a number that stands in both halves of a word."""
    i32, kind = ir.IntegerType.get_signless(32), ir.VectorType(pair.type).element_type
    text = f"mul.{'f16x2' if isinstance(kind, ir.F16Type) else 'bf16x2'} $0, $1, $2;"
    out: Value = llvm.inline_asm(i32, [utils.bitcast(pair, i32), scale], text, "=r,r,r")
    return utils.bitcast(out, pair.type)
