"""Sums over 32 or 64 of k of float8 operands in shared memory, each of which is promoted while the next is computed.

Pallas multiplies whole swizzle rows, which are 128 bytes long, and waits for a product before it gives its sums.
Shorter swizzle rows would ask L2 for as few bytes at a time. So the instructions are our own here: products over a part
of a swizzle row, whose descriptors start within it and which do not add to zeros, and a wait for all but the last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import FragmentedArray, utils
from jax.experimental.pallas import mosaic_gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, vector

from trencadis.backends.gpu.layout import ROW_ALIGN, SHORT_PART, SWIZZLE, WGMMA_M, Layout
from trencadis.backends.gpu.operand_scales import ROW
from trencadis.backends.gpu.tile_scheduler import Ref
from trencadis.core.jax_compat import transpose_ref

Value = Any  # an MLIR value: its type is generic or not, by the version of jaxlib
# bits of a matrix descriptor: the type of the swizzle, the bytes between atoms of 8 rows (in units of 16, as all
# addresses and offsets are), a field that K-major operands ignore, and the bits that an address has
SWIZZLES = {SWIZZLE: 1 << 62, SWIZZLE // 2: 2 << 62}
STRIDE = (ROW_ALIGN * SWIZZLE >> 4) << 32
IGNORED = 1 << 16
ADDRESS = 0x3FFF


def promoted(sums: jax.Array, a: Ref, b: Ref, scales: Sequence[jax.Array], layout: Layout) -> jax.Array:
    """Sums [64, n] plus those of each part of k of a [64, 128] times b [n, 128], times the scales [64] of that part."""
    n, part = sums.shape[1], SWIZZLE // len(scales)
    if layout.interpreted:
        for i, each in enumerate(scales):
            sums = sums + _product(a, b, pl.ds(i * part, part)) * lax.broadcast_in_dim(each, sums.shape, (0,))
        return sums
    struct = mgpu.ShapeDtypeStruct(sums.shape, jnp.float32, layout=mgpu.Layout.WGMMA)
    operand = mgpu.RefType((mgpu.TilingTransform((ROW_ALIGN, layout.swizzle)), mgpu.SwizzleTransform(layout.swizzle)))
    text = product_text(n, layout.swizzle, part, a.dtype.name[7:11])

    @mgpu.inline_mgpu(arg_types=(mgpu.Layout.WGMMA, operand, operand, *[ROW] * len(scales)), return_type=struct)
    def run(_: Any, sums: FragmentedArray, a: Value, b: Value, *scales: FragmentedArray) -> FragmentedArray:
        registers, first = sums.registers.copy(), [_descriptor(x, layout.swizzle) for x in (a, b)]
        flying: list[Value] = []
        for i in range(len(scales) + 1):
            last, flying = flying, []
            if i < len(scales):
                at = _long(offset(i * part, layout.swizzle))
                flying = _started(text, [arith.addi(x, at) for x in first], n // 2)
            if i:
                _promote(registers, _waited(last, 1 if flying else 0), scales[i - 1])
        return FragmentedArray(_registers=registers, _layout=sums.layout, _is_signed=None)

    return run(mgpu.layout_cast(sums, mgpu.Layout.WGMMA), a, b, *(mgpu.layout_cast(x, ROW) for x in scales))


def _product(a: Ref, b: Ref, k: Any) -> jax.Array:
    """The sums of a part, by the instructions that the interpreter has."""

    def run(acc: Ref) -> jax.Array:
        mgpu.wgmma(acc, a.at[:, k], transpose_ref(b.at[:, k]))
        mgpu.wgmma_wait(0)
        return acc[...]

    return pl.run_scoped(run, mgpu.ACC((a.shape[0], b.shape[0]), jnp.float32))


def offset(k: int, swizzle: int) -> int:
    """What the entry of k at which a product begins adds to a descriptor: atoms of 8 swizzle rows are in order of k."""
    return (k // swizzle * ROW_ALIGN * swizzle + k % swizzle) >> 4


def product_text(n: int, swizzle: int, part: int, kind: str) -> str:
    """The instructions that start the product of a part: $0, $1, ... are its sums, then come both descriptors."""
    sums = ", ".join(f"${i}" for i in range(n // 2))
    shape = f"m{WGMMA_M}n{n}k{SHORT_PART}.f32.{kind}.{kind}"
    lines = [".reg .pred more;", ".reg .b64 a, b;", f"mov.b64 a, ${n // 2};", f"mov.b64 b, ${n // 2 + 1};"]
    lines += ["setp.ne.b32 more, 0, 0;", "wgmma.fence.sync.aligned;"]
    for k in range(0, part, SHORT_PART):
        if k:
            by = offset(k, swizzle)
            lines += ["setp.eq.b32 more, 0, 0;", f"add.u64 a, a, {by};", f"add.u64 b, b, {by};"]
        lines.append(f"wgmma.mma_async.sync.aligned.{shape} {{{sums}}}, a, b, more, 1, 1;")
    return "\n".join(["{", *lines, "wgmma.commit_group.sync.aligned;", "}"])


def _started(text: str, descriptors: list[Value], count: int) -> list[Value]:
    """The sums of a product that was started."""
    number = ir.F32Type.get()
    constraints = ",".join(["=f"] * count + ["l", "l"])
    both = llvm.StructType.get_literal([number] * count)
    found: Value = llvm.inline_asm(both, descriptors, text, constraints, has_side_effects=True)
    return [llvm.extractvalue(number, found, [i]) for i in range(count)]


def _waited(sums: list[Value], flying: int) -> list[Value]:
    """The same sums, when all products but so many are done: nothing reads them before."""
    number, count = ir.F32Type.get(), len(sums)
    constraints = ",".join(["=f"] * count + [str(i) for i in range(count)])
    both, text = llvm.StructType.get_literal([number] * count), f"wgmma.wait_group.sync.aligned {flying};"
    found: Value = llvm.inline_asm(both, sums, text, constraints, has_side_effects=True)
    return [llvm.extractvalue(number, found, [i]) for i in range(count)]


def _promote(registers: np.ndarray, sums: list[Value], scales: FragmentedArray) -> None:
    """Add the sums of a part, in the order of wgmma, times scales of their rows, to those in registers.

    A thread has pairs of neighbours in two rows, eight apart, of every eight columns.
    """
    rows = [vector.extract(x, [], [0]) for x in scales.registers.flat]
    assert 2 * registers.size == len(sums) and len(rows) == 2
    for i in range(registers.size):
        held: Value = registers.flat[i]
        pair = [math.fma(sums[2 * i + j], rows[i % 2], vector.extract(held, [], [j])) for j in (0, 1)]
        registers.flat[i] = vector.from_elements(held.type, pair)


def _descriptor(operand: Value, swizzle: int) -> Value:
    """The descriptor of an operand in shared memory."""
    short, long = (ir.IntegerType.get_signless(width) for width in (32, 64))
    address = arith.extui(long, llvm.ptrtoint(short, utils.memref_ptr(operand)))
    bits = arith.andi(arith.shrui(address, _long(4)), _long(ADDRESS))
    return arith.ori(bits, _long(SWIZZLES[swizzle] | STRIDE | IGNORED))


def _long(x: int) -> Value:
    return utils.c(x - (1 << 64) * (x >> 63), ir.IntegerType.get_signless(64))  # MLIR takes signed numbers
