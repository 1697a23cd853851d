"""Loads of rows that are gathered by token, by all threads of the producer: TMA on Hopper has no gather.

    offsets     of the tokens of a tile's rows: each thread has those of 12 rows in registers, for all steps of the tile
    a step      weights by TMA; then each thread copies 16 bytes of each of its rows, by `cp.async`, to where TMA would
    the next    its copies are started before the producer waits for those of this step and arrives at their barrier,
                so that two steps are on their way

wgmma reads shared memory by another proxy than `cp.async` writes it: a fence stands between.
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
from jaxlib.mlir.dialects import arith, llvm, vector

from trencadis.backends.gpu import tile_queue
from trencadis.backends.gpu.layout import ROW_ALIGN, SWAP_AB_UNIT, SWIZZLE, WGMMA_M
from trencadis.backends.gpu.operand_scales import ROW
from trencadis.backends.gpu.rows import RowsMainloop, swizzled
from trencadis.backends.gpu.tile_scheduler import Ref, Refs, Scalar, Tile, i32

Value = Any  # an MLIR value: its type is generic or not, by the version of jaxlib
THREADS = 128  # of the producer
CHUNK = 16  # bytes that a thread copies at a time
CHUNKS = SWIZZLE // CHUNK  # of a row in a step; threads that copy a row
assert THREADS // CHUNKS == SWAP_AB_UNIT  # all threads together copy the rows of a unit


def load_gathered(mainloop: RowsMainloop, refs: Refs, tile: Tile, done: Scalar) -> None:
    """Producer: start the copies of all steps of a tile, each as soon as its stage is empty, and wait for rows."""
    layout, full, token = mainloop.layout, refs["full"], refs["token"]
    stride = refs["lhs"].shape[1] * mainloop.problem.lhs.itemsize

    def stage(i: Scalar) -> Scalar:
        return tile_queue.slot(done + i, layout.stages)

    def all_steps() -> None:
        offsets = None if layout.interpreted else _offsets(token, tile.row, layout.block_m, stride)

        def step(i: Scalar, _: None) -> None:
            at = stage(i)
            pl.when(done + i >= i32(layout.stages))(lambda: mgpu.barrier_wait(refs["empty"].at[at]))
            mainloop.load_weights(refs, tile, i32(0), i, at)
            if offsets is None:
                _interpreted_copies(mainloop, refs, tile, i, at)
            else:
                place = refs["lhs"].at[:, mainloop.columns(i)], refs["smem_lhs"].at[at]
                _start_copies(*place, offsets, tile.units, swizzled(mainloop.problem.lhs, layout.swizzle))
            pl.when(i > 0)(lambda: arrive(i - i32(1), 1))

        def arrive(i: Scalar, later: int) -> None:
            if offsets is not None:
                _wait_for_copies(later)
            mgpu.barrier_arrive(full.at[stage(i)])

        lax.fori_loop(i32(0), tile.steps, step, None)
        arrive(tile.steps - i32(1), 0)

    pl.when(tile.steps > 0)(all_steps)


def _offsets(token: Ref, row: Scalar, rows: int, stride: int) -> jax.Array:
    """The offsets in bytes, from the first row of lhs, of the rows that each thread copies: one of each unit.

    Behind the last row they repeat: the product of such a row is not stored.
    """
    units, last = rows // SWAP_AB_UNIT, token.shape[0] - 1
    layout = mgpu.Layout.WG_STRIDED((units * THREADS,), vec_size=1)
    struct = mgpu.ShapeDtypeStruct((units * THREADS,), jnp.int32, layout=layout)
    text = f"""{{
        .reg .b32 row;
        .reg .b64 here;
        min.s32 row, $1, {last};
        mad.wide.s32 here, row, 4, $2;
        ld.global.nc.b32 row, [here];
        mul.lo.u32 $0, row, {stride};
    }}"""

    @mgpu.inline_mgpu(arg_types=(mgpu.RefType(), ROW), return_type=struct)
    def read(_: Any, token: Value, first: FragmentedArray) -> FragmentedArray:
        word, held = ir.IntegerType.get_signless(32), layout.to_mgpu()
        registers = np.empty(held.registers_shape((units * THREADS,)), dtype=object)
        own = arith.addi(_scalar(first), _row_and_chunk()[0])
        for unit, at in enumerate(np.ndindex(registers.shape)):
            row = arith.addi(own, utils.c(unit * SWAP_AB_UNIT, word))
            offset: Value = llvm.inline_asm(word, [row, _address(token)], text, "=r,r,l", has_side_effects=True)
            registers[at] = vector.broadcast(ir.VectorType.get((1,), word), offset)
        return FragmentedArray(_registers=registers, _layout=held, _is_signed=True)

    return read(token, _spread(row))


def _start_copies(lhs: Ref, staged: Ref, offsets: jax.Array, units: Scalar, transforms: tuple[Any, Any]) -> None:
    """Start the copies of a step, of as many units as a tile has, as one group: columns lhs [:, 64] to a stage."""
    most = offsets.shape[0] // THREADS
    layout = mgpu.Layout.WG_STRIDED(offsets.shape, vec_size=1)
    lines = [".reg .pred inside;", ".reg .b64 here;"]
    for unit in range(most):
        target = f"[$1 + {unit * SWAP_AB_UNIT * SWIZZLE}]"
        lines += [f"setp.gt.s32 inside, $2, {unit};", f"cvt.u64.u32 here, ${3 + unit};", "add.s64 here, here, $0;"]
        lines += [f"@inside cp.async.cg.shared.global {target}, [here], {CHUNK};"]
    text = "\n".join(["{", *lines, "cp.async.commit_group;", "}"])

    @mgpu.inline_mgpu(arg_types=(mgpu.RefType(), mgpu.RefType(transforms), layout, ROW))
    def start(_: Any, lhs: Value, staged: Value, offsets: FragmentedArray, units: FragmentedArray) -> None:
        word, long = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        row, chunk = _row_and_chunk()
        source = arith.addi(_address(lhs), arith.extui(long, arith.muli(chunk, utils.c(CHUNK, word))))
        swizzled = arith.xori(chunk, arith.andi(row, utils.c(ROW_ALIGN - 1, word)))
        inside = arith.addi(arith.muli(row, utils.c(SWIZZLE, word)), arith.muli(swizzled, utils.c(CHUNK, word)))
        target = arith.addi(llvm.ptrtoint(word, utils.memref_ptr(staged)), inside)
        own = [vector.extract(each, [], [0]) for each in offsets.registers.flat]
        kinds = ",".join(["l", "r", "r", *["r"] * most, "~{memory}"])
        llvm.inline_asm(None, [source, target, _scalar(units), *own], text, kinds, has_side_effects=True)

    start(lhs, staged, offsets, _spread(units))


def _wait_for_copies(later: int) -> None:
    """Wait until a thread's copies have arrived, but for the last groups, and make them visible to wgmma."""
    text = f"cp.async.wait_group {later}; fence.proxy.async.shared::cta;"

    @mgpu.inline_mgpu()
    def wait(_: Any) -> None:
        llvm.inline_asm(None, [], text, "~{memory}", has_side_effects=True)

    wait()


def _interpreted_copies(mainloop: RowsMainloop, refs: Refs, tile: Tile, step: Scalar, stage: Scalar) -> None:
    """The copies of a step in the interpreter, which has no inline PTX."""

    def copy(row: Scalar, _: None) -> None:
        token = refs["token"][lax.min(tile.row + row, i32(refs["token"].shape[0] - 1))]
        here = refs["lhs"].at[pl.ds(token, 1), mainloop.columns(step)]
        refs["smem_lhs"].at[stage, pl.ds(row, 1)][...] = here[...]

    lax.fori_loop(i32(0), tile.units * i32(SWAP_AB_UNIT), copy, None)
    mgpu.commit_smem()


def _row_and_chunk() -> tuple[Value, Value]:
    """Which row of a unit, and which 16 bytes of it, the thread that runs this copies."""
    word = ir.IntegerType.get_signless(32)
    thread = arith.remui(utils.thread_idx(), utils.c(THREADS, word))
    return arith.divui(thread, utils.c(CHUNKS, word)), arith.remui(thread, utils.c(CHUNKS, word))


def _address(ref: Value) -> Value:
    """Where a reference to global memory starts."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(64), utils.memref_ptr(ref))


def _spread(x: Scalar) -> jax.Array:
    """A scalar as an array in registers, which inlined code takes."""
    return mgpu.layout_cast(lax.broadcast(x, (WGMMA_M,)), ROW)


def _scalar(x: FragmentedArray) -> Value:
    """The scalar that `_spread` got."""
    return vector.extract(x.registers.flat[0], [], [0])
