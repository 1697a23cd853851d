"""What Pallas has no operation for, on blocks [64, n] in the registers of a warpgroup, as wgmma leaves them.

packed            16-bit numbers in pairs, so that the compiler converts two at a time
widened           the float32 numbers of pairs of bfloat16, by one instruction each
store_row_sums    sums over the 64 columns of a block of a swap-AB tile

A warp holds 16 columns of such a block. A thread has two of them, for the same pairs of rows as seven other threads:
they exchange halves of what they have until each holds the sums of other rows. Each warp stores its sums, and XLA adds
up those of all warps. Nothing is added in global memory, so that the order of all sums is fixed.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import FragmentedArray, utils
from jax.experimental.pallas import mosaic_gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

from trencadis.backends.gpu.layout import WGMMA_M
from trencadis.backends.gpu.operand_scales import ROW
from trencadis.backends.gpu.tile_scheduler import Ref, Scalar, i32
from trencadis.core.jax_compat import WIDENS_IN_PLACE

Value = Any  # an MLIR value: its type is generic or not, by the version of jaxlib
WARPS = 4  # of a warpgroup: each has 16 columns of a block
PAIR = 2  # neighbouring rows in a register
QUAD = 4  # lanes that hold other rows; lanes that are a multiple of this apart hold other columns


def packed(x: jax.Array, interpreted: bool) -> jax.Array:
    """The same 16-bit numbers. What follows unpacks them, instead of converting the numbers that they came from."""
    if interpreted:
        return x
    struct = mgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=mgpu.Layout.WGMMA)

    @mgpu.inline_mgpu(arg_types=(mgpu.Layout.WGMMA,), return_type=struct)
    def words(_: Any, x: FragmentedArray) -> FragmentedArray:
        word, registers = ir.IntegerType.get_signless(32), np.empty_like(x.registers)
        for at, pair in np.ndenumerate(x.registers):
            held: Value = llvm.inline_asm(word, [utils.bitcast(pair, word)], "mov.b32 $0, $1;", "=r,r")
            registers[at] = utils.bitcast(held, pair.type)
        return FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return words(x)


def widened(x: jax.Array, interpreted: bool) -> jax.Array:
    """The same 16-bit numbers as float32. Bits of bfloat16 move in place; the compiler would extract half of them."""
    if interpreted or x.dtype != jnp.bfloat16 or not WIDENS_IN_PLACE:
        return x.astype(jnp.float32)
    struct = mgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=mgpu.Layout.WGMMA)

    @mgpu.inline_mgpu(arg_types=(mgpu.Layout.WGMMA,), return_type=struct)
    def words(_: Any, x: FragmentedArray) -> FragmentedArray:
        word, number = ir.IntegerType.get_signless(32), ir.F32Type.get()
        registers = np.empty_like(x.registers)
        for at, pair in np.ndenumerate(x.registers):
            held = utils.bitcast(pair, word)
            low, high = arith.shli(held, utils.c(16, word)), arith.andi(held, utils.c(-(1 << 16), word))
            numbers = [arith.bitcast(number, each) for each in (low, high)]
            registers[at] = vector.from_elements(ir.VectorType.get((2,), number), numbers)
        return FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    return words(x)


def store_row_sums(
    out: Ref, products: jax.Array, place: tuple[Scalar, Scalar], valid: list[Scalar], interpreted: bool
) -> None:
    """Store the sums [4, rows] of products [64, rows] at a place of `out`.

    Only the rows from the first valid one to the last, exclusive, are stored.
    """
    rows = products.shape[1]
    if interpreted:
        sums = products.reshape(WARPS, -1, rows).sum(axis=1)

        def one(row: Scalar, _: None) -> None:
            here = out.at[pl.ds(place[0], WARPS), pl.ds(place[1] + row, 1)]
            here[...] = lax.dynamic_slice(sums, (i32(0), row), (WARPS, 1))

        lax.fori_loop(lax.max(valid[0], i32(0)), lax.min(valid[1], i32(rows)), one, None)
        return
    edges = [mgpu.layout_cast(lax.broadcast(edge, (WGMMA_M,)), ROW) for edge in valid]
    here = out.at[pl.ds(place[0], WARPS), pl.ds(place[1], rows)]
    store = mgpu.inline_mgpu(arg_types=(mgpu.RefType(), mgpu.Layout.WGMMA, ROW, ROW))(sums_of_warps)
    store(here, mgpu.layout_cast(products, mgpu.Layout.WGMMA), *edges)


def sums_of_warps(_: Any, out: Value, products: FragmentedArray, low: FragmentedArray, high: FragmentedArray) -> None:
    """Add up what lanes have of the same rows, and store it: [4, rows] in global memory, by four warps."""
    word, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
    thread = arith.remui(utils.thread_idx(), utils.c(128, word))
    lane, warp = arith.remui(thread, utils.c(32, word)), arith.divui(thread, utils.c(32, word))
    row = arith.muli(arith.remui(lane, utils.c(QUAD, word)), utils.c(PAIR, word))
    row, sums, spare = _exchanged(_of_thread(products), lane, row)
    first, last = (vector.extract(edge.registers.flat[0], [], [0]) for edge in (low, high))
    unique = arith.cmpi(arith.CmpIPredicate.eq, arith.andi(lane, utils.c(spare, word)), utils.c(0, word))
    for at, number in enumerate(sums):
        here = arith.addi(row, utils.c(at // PAIR * 8 + at % PAIR, word))
        inside = [
            arith.cmpi(arith.CmpIPredicate.sge, here, first), arith.cmpi(arith.CmpIPredicate.slt, here, last), unique,
        ]  # fmt: skip
        with utils.when(arith.andi(arith.andi(inside[0], inside[1]), inside[2])):
            memref.store(number, out, [arith.index_castui(index, each) for each in (warp, here)])


def _of_thread(products: FragmentedArray) -> list[Value]:
    """The sums of a thread's two columns, for each of its rows: pairs of neighbours, eight rows apart."""
    registers = products.registers
    pairs = registers.reshape(registers.shape[1], 2)  # blocks of eight rows, two columns
    totals = [arith.addf(*columns) for columns in pairs]
    return [vector.extract(total, [], [i]) for total in totals for i in range(PAIR)]


def _exchanged(numbers: list[Value], lane: Value, row: Value) -> tuple[Value, list[Value], int]:
    """The sums over the lanes that have the same rows: the first row of this lane, its sums, and spare bits of lanes.

    Half of the rows go to a partner as long as they can be halved. Then both have the sums: lanes with a spare bit set
    have the same as others.
    """
    word, spare = ir.IntegerType.get_signless(32), 0
    for distance in (16, 8, 4):
        if len(numbers) == PAIR:
            numbers = [arith.addf(each, utils.shfl_bfly(each, distance)) for each in numbers]
            spare |= distance
            continue
        half = len(numbers) // 2
        upper = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(lane, utils.c(distance, word)), utils.c(0, word))
        row = arith.addi(row, arith.select(upper, utils.c(half // PAIR * 8, word), utils.c(0, word)))
        kept = [arith.select(upper, b, a) for a, b in zip(numbers[:half], numbers[half:], strict=True)]
        sent = [arith.select(upper, a, b) for a, b in zip(numbers[:half], numbers[half:], strict=True)]
        numbers = [arith.addf(a, utils.shfl_bfly(b, distance)) for a, b in zip(kept, sent, strict=True)]
    return row, numbers, spare
