"""Loads of rows that are gathered by token, by all threads of the producer: TMA on Hopper has no gather.

    tokens      of the rows that a thread copies: one of each unit of 16 rows, in registers for all steps of a tile;
                steps of a contraction have rows of their own, and those of the next step are read ahead
    a step      the other operand by TMA; then each thread copies 16 bytes of each of its rows, in a contraction of each
                block of 64 columns, by `cp.async`, to where TMA would

The producer does not wait for these copies: they arrive at a barrier of their own (`arrivals`).
"""

from __future__ import annotations

import functools
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

from trencadis.backends.gpu import arrivals, tile_queue
from trencadis.backends.gpu.contraction import ContractionMainloop
from trencadis.backends.gpu.gated import PullbackMainloop
from trencadis.backends.gpu.layout import ROW_ALIGN, SWAP_AB_UNIT, SWIZZLE, WGMMA_M
from trencadis.backends.gpu.operand_scales import ROW
from trencadis.backends.gpu.rows import Gathered, RowsMainloop, swizzled
from trencadis.backends.gpu.tile_scheduler import Ref, Refs, Scalar, Tile, TileScheduler, i32

Mainloop = RowsMainloop | ContractionMainloop
Value = Any  # an MLIR value: its type is generic or not, by the version of jaxlib
THREADS = 128  # of the producer
CHUNK = 16  # bytes that a thread copies at a time
CHUNKS = SWIZZLE // CHUNK  # of a row of a block of columns; threads that copy a row
ATOM = ROW_ALIGN * SWIZZLE  # bytes of 8 rows of a block, which lie together in shared memory
UNIT_ATOMS = SWAP_AB_UNIT // ROW_ALIGN  # of a unit of rows
assert THREADS // CHUNKS == SWAP_AB_UNIT  # all threads together copy the rows of a unit


def load_gathered(mainloop: Mainloop, refs: Refs, scheduler: TileScheduler, tile: Tile, done: Scalar) -> None:
    """Producer: start the copies of all steps of a tile, each as soon as its stage is empty."""
    layout, sums = mainloop.layout, tile.steps - i32(mainloop.layout.epilogue_steps)

    def stage(i: Scalar) -> Scalar:
        at = tile_queue.slot(done + i, layout.stages)
        pl.when(done + i >= i32(layout.stages))(lambda: mgpu.barrier_wait(refs["empty"].at[at]))
        return at

    def load(tokens: jax.Array | None, i: Scalar) -> None:
        at = stage(i)
        mainloop.load_beside(refs, scheduler, tile, i, at)
        rows = mainloop.gathered(refs, tile, i, at)
        if tokens is None:
            _interpreted_copies(mainloop, refs["token"], rows, _first_row(mainloop, scheduler, tile, i))
        else:
            _start_copies(rows, tokens, by_unit=not _by_step(mainloop))
            arrivals.arrive(refs, layout, done + i)
        mgpu.barrier_arrive(refs["full"].at[at])

    def read(i: Scalar) -> jax.Array:
        row = _first_row(mainloop, scheduler, tile, i)
        if _by_step(mainloop):
            return _tokens(refs["token"], row, layout.block_k)
        return _tokens(refs["token"], row, layout.block_m, _stride(refs["lhs"]))

    def load_z(mainloop: PullbackMainloop, i: Scalar) -> None:
        mainloop.load_z(refs, tile, i - sums, stage(i))
        arrivals.arrive(refs, layout, done + i)  # each stage has a phase for each of its steps

    def step(i: Scalar, tokens: jax.Array | None) -> jax.Array | None:
        if isinstance(mainloop, PullbackMainloop):
            # not in a loop of its own: the compiler would unroll it, and then no longer see that stages are uniform
            lax.cond(i < sums, functools.partial(load, tokens), functools.partial(load_z, mainloop), i)
        else:
            load(tokens, i)
        return read(i + i32(1)) if tokens is not None and _by_step(mainloop) else tokens

    def all_steps() -> None:
        lax.fori_loop(i32(0), tile.steps, step, None if layout.interpreted else read(i32(0)))

    pl.when(tile.steps > 0)(all_steps)


def _by_step(mainloop: Mainloop) -> bool:
    """Whether each step has rows of its own, as in a contraction; or all steps of a tile have the same."""
    return isinstance(mainloop, ContractionMainloop)


def _first_row(mainloop: Mainloop, scheduler: TileScheduler, tile: Tile, step: Scalar) -> Scalar:
    """The first of the rows that a step gathers."""
    return scheduler.step_row(tile, step) if _by_step(mainloop) else tile.row


def _stride(source: Ref) -> int:
    """The bytes from a row of an array to the next."""
    return int(source.shape[1] * source.dtype.itemsize)


def _tokens(token: Ref, row: Scalar, rows: int, factor: int = 1) -> jax.Array:
    """The tokens, times a factor, of the rows that each thread copies, from a row on: one of each unit.

    Behind the last row they repeat: the product of such a row is not stored, or the row is masked.
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
        mul.lo.u32 $0, row, {factor};
    }}"""

    @mgpu.inline_mgpu(arg_types=(mgpu.RefType(), ROW), return_type=struct)
    def read(_: Any, token: Value, first: FragmentedArray) -> FragmentedArray:
        word, held = ir.IntegerType.get_signless(32), layout.to_mgpu()
        registers = np.empty(held.registers_shape((units * THREADS,)), dtype=object)
        own = arith.addi(_scalar(first), _row_and_chunk()[0])
        for unit, at in enumerate(np.ndindex(registers.shape)):
            row = arith.addi(own, utils.c(unit * SWAP_AB_UNIT, word))
            found: Value = llvm.inline_asm(word, [row, _address(token)], text, "=r,r,l", has_side_effects=True)
            registers[at] = vector.broadcast(ir.VectorType.get((1,), word), found)
        return FragmentedArray(_registers=registers, _layout=held, _is_signed=True)

    return read(token, _spread(row))


def _start_copies(rows: Gathered, tokens: jax.Array, *, by_unit: bool) -> None:
    """Start the copies of a step.

    by_unit: of the units of rows that a tile has, at tokens times the stride; else of its blocks of columns, at tokens.
    """
    units, blocks = tokens.shape[0] // THREADS, rows.staged.shape[1] // WGMMA_M
    layout, transforms = mgpu.Layout.WG_STRIDED(tokens.shape, vec_size=1), swizzled(rows.source.dtype)
    stride = 1 if by_unit else _stride(rows.source)
    lines = [".reg .pred inside;", ".reg .b64 here;"]
    for unit in range(units):
        lines.append(f"mad.wide.u32 here, ${3 + unit}, {stride}, $0;")
        for block in range(blocks):
            target = f"[$1 + {(unit * blocks * UNIT_ATOMS + block) * ATOM}]"
            lines.append(f"setp.gt.s32 inside, $2, {unit if by_unit else block};")
            lines.append(f"@inside cp.async.cg.shared.global {target}, [here + {block * SWIZZLE}], {CHUNK};")
    text = "\n".join(["{", *lines, "}"])

    @mgpu.inline_mgpu(arg_types=(mgpu.RefType(), mgpu.RefType(transforms), layout, ROW))
    def start(_: Any, source: Value, staged: Value, tokens: FragmentedArray, inside: FragmentedArray) -> None:
        word, long = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        row, chunk = _row_and_chunk()
        first = arith.addi(_address(source), arith.extui(long, arith.muli(chunk, utils.c(CHUNK, word))))
        atom, line = arith.divui(row, utils.c(ROW_ALIGN, word)), arith.remui(row, utils.c(ROW_ALIGN, word))
        place = [(atom, blocks * ATOM), (line, SWIZZLE), (arith.xori(chunk, line), CHUNK)]
        target = llvm.ptrtoint(word, utils.memref_ptr(staged))
        for number, size in place:
            target = arith.addi(target, arith.muli(number, utils.c(size, word)))
        own = [vector.extract(each, [], [0]) for each in tokens.registers.flat]
        kinds = ",".join(["l", "r", "r", *["r"] * units, "~{memory}"])
        llvm.inline_asm(None, [first, target, _scalar(inside), *own], text, kinds, has_side_effects=True)

    start(rows.source.at[:, pl.ds(rows.column, WGMMA_M)], rows.staged, tokens, _spread(rows.inside))


def _interpreted_copies(mainloop: Mainloop, token: Ref, rows: Gathered, first: Scalar) -> None:
    """The copies of a step in the interpreter, which has no inline PTX."""
    height, columns = rows.staged.shape
    by_step = _by_step(mainloop)

    def copy(row: Scalar, _: None) -> None:
        here = pl.ds(token[lax.min(first + row, i32(token.shape[0] - 1))], 1)

        def block(i: Scalar, _: None) -> None:
            source = rows.source.at[here, pl.ds(rows.column + i * i32(WGMMA_M), WGMMA_M)]
            rows.staged.at[pl.ds(row, 1), pl.ds(i * i32(WGMMA_M), WGMMA_M)][...] = source[...]

        blocks = i32(columns // WGMMA_M)
        lax.fori_loop(i32(0), lax.min(rows.inside, blocks) if by_step else blocks, block, None)

    lax.fori_loop(i32(0), i32(height) if by_step else rows.inside * i32(SWAP_AB_UNIT), copy, None)
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
