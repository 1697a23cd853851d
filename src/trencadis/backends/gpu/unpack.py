"""Weights of int4 as 8-bit numbers, which tensor cores multiply with 8-bit rows: by tables of bytes.

A word has eight 4-bit numbers. `prmt` takes four bytes out of a table of eight, by the low three bits of four of them.
There is one such table for numbers without the upper bit and one for those with it, and that bit chooses between both.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import FragmentedArray, utils
from jax.experimental.pallas import mosaic_gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from trencadis.backends.gpu.tile_scheduler import Ref

# operands are the word and the two tables, of two words each; results are the bytes of its lower and its upper half
TEXT = """{
    .reg .b32 low, high, shifted, none, all, mask;
    and.b32 low, $2, 0x77777777;
    shr.b32 high, low, 16;
    shl.b32 shifted, $2, 4;
    prmt.b32 none, $3, $4, low;
    prmt.b32 all, $5, $6, low;
    prmt.b32 mask, shifted, $2, 0xD9C8;
    lop3.b32 $0, mask, all, none, 0xCA;
    prmt.b32 none, $3, $4, high;
    prmt.b32 all, $5, $6, high;
    prmt.b32 mask, shifted, $2, 0xFBEA;
    lop3.b32 $1, mask, all, none, 0xCA;
}"""

# the same for four numbers, in the lower half of a word
QUAD = """{
    .reg .b32 low, shifted, none, all, mask;
    and.b32 low, $1, 0x7777;
    shl.b32 shifted, $1, 4;
    prmt.b32 none, $2, $3, low;
    prmt.b32 all, $4, $5, low;
    prmt.b32 mask, shifted, $1, 0xD9C8;
    lop3.b32 $0, mask, all, none, 0xCA;
}"""


def table(dtype: Any) -> list[int]:
    """The four words with the bytes of an 8-bit dtype that hold all numbers of int4, in the order of their bits."""
    values = ((np.arange(16) ^ 8) - 8).astype(dtype)
    return [int(word) for word in np.frombuffer(values.tobytes(), np.uint32)]


def unpacked(x: jax.Array, dtype: Any, layout: Any) -> jax.Array:
    """Weights of int4, eight to a lane along the last axis, in an 8-bit dtype that holds their values."""
    words = table(dtype)
    result = mgpu.ShapeDtypeStruct(x.shape, jnp.dtype(dtype), layout=layout)

    @mgpu.inline_mgpu(arg_types=(layout,), return_type=result)
    def convert(_: Any, packed: FragmentedArray) -> FragmentedArray:
        i32 = ir.IntegerType.get_signless(32)
        pair, bytes_ = ir.VectorType.get((2,), i32), ir.VectorType.get((8,), utils.dtype_to_ir_type(jnp.dtype(dtype)))
        both = llvm.StructType.get_literal([i32, i32])
        tables = [utils.c(word, i32) for word in words]
        registers = np.empty(packed.registers.shape, dtype=object)
        for at, register in np.ndenumerate(packed.registers):
            out: Any = llvm.inline_asm(both, [utils.bitcast(register, i32), *tables], TEXT, "=&r,=&r,r,r,r,r,r")
            halves = [llvm.extractvalue(i32, out, [i]) for i in (0, 1)]
            registers[at] = utils.bitcast(vector.from_elements(pair, halves), bytes_)
        signed = True if jnp.issubdtype(dtype, jnp.integer) else None
        return FragmentedArray(_registers=registers, _layout=packed.layout, _is_signed=signed)

    return convert(x)


def rs_unpacked(ref: Ref, dtype: Any) -> Any:
    """Weights of int4 [64, block_k] in shared memory as a register operand of an 8-bit dtype that holds their values.

    A lane of it has four neighbours along k, which are half a word.
    """
    layout = mgpu.Layout.WGMMA_8BIT
    held = mgpu.layout_cast(ref[...], layout)
    result = mgpu.ShapeDtypeStruct(held.shape, jnp.dtype(dtype), layout=layout)

    @mgpu.inline_mgpu(arg_types=(layout,), return_type=result)
    def convert(_: Any, packed: FragmentedArray) -> FragmentedArray:
        i16, i32 = (ir.IntegerType.get_signless(width) for width in (16, 32))
        bytes_ = ir.VectorType.get((4,), utils.dtype_to_ir_type(jnp.dtype(dtype)))
        tables = [utils.c(word, i32) for word in table(dtype)]
        registers = np.empty(packed.registers.shape, dtype=object)
        for at, register in np.ndenumerate(packed.registers):
            word = arith.extui(i32, utils.bitcast(register, i16))
            out: Any = llvm.inline_asm(i32, [word, *tables], QUAD, "=r,r,r,r,r,r")
            registers[at] = utils.bitcast(out, bytes_)
        signed = True if jnp.issubdtype(dtype, jnp.integer) else None
        return FragmentedArray(_registers=registers, _layout=packed.layout, _is_signed=signed)

    return convert(held)
