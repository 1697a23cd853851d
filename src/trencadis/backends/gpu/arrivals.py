"""Barriers at which the `cp.async` copies of gathered rows arrive by themselves: one for each stage, in shared memory.

The barriers of Pallas are for TMA copies and for threads that arrive. A thread arrives for its `cp.async` copies, once
all that it has started are there, by an instruction of its own. So these barriers are words of shared memory, and all
that is done with them is PTX. A stage has a phase for each of its steps.

wgmma reads shared memory by another proxy than `cp.async` writes it: a fence follows the wait.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import FragmentedArray, utils
from jax.experimental.pallas import mosaic_gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from trencadis.backends.gpu import tile_queue
from trencadis.backends.gpu.layout import WGMMA_M, Layout
from trencadis.backends.gpu.operand_scales import ROW
from trencadis.backends.gpu.tile_scheduler import Ref, Refs, Scalar, i32

Value = Any  # an MLIR value: its type is generic or not, by the version of jaxlib
THREADS = 128  # of the producer, each of which arrives
WORDS = 2  # of 32 bits, of a barrier

INIT = """{
    .reg .pred first;
    .reg .b32 thread;
    mov.u32 thread, %tid.x;
    and.b32 thread, thread, 127;
    setp.eq.u32 first, thread, 0;
    @first mbarrier.init.shared::cta.b64 [$0], 128;
}"""
ARRIVE = "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];"
WAIT = """{
    .reg .pred there;
    again:
    mbarrier.try_wait.parity.shared::cta.b64 there, [$0], $1;
    @there bra done;
    bra again;
    done:
    fence.proxy.async.shared::cta;
}"""


def scratch(layout: Layout) -> dict[str, Any]:
    """The shared memory of the barriers."""
    return {"arrivals": mgpu.SMEM((layout.stages, WORDS), jnp.int32)}


def start(refs: Refs, layout: Layout) -> None:
    """Producer: initialize the barriers. Others see that when they read the first tile that it publishes."""
    if layout.interpreted:
        return
    for stage in range(layout.stages):
        _run(INIT, refs["arrivals"].at[stage])
    mgpu.commit_smem()


def arrive(refs: Refs, layout: Layout, step: Scalar) -> None:
    """Producer: let the copies that its threads have started arrive for a step, counted over all tiles."""
    if not layout.interpreted:
        _run(ARRIVE, refs["arrivals"].at[tile_queue.slot(step, layout.stages)])


def wait(refs: Refs, layout: Layout, step: Scalar) -> None:
    """Wait until the copies of a step are there, and make them visible to wgmma."""
    if not layout.interpreted:
        phase = lax.div(step, i32(layout.stages)) & i32(1)
        _run(WAIT, refs["arrivals"].at[tile_queue.slot(step, layout.stages)], phase)


def _run(text: str, barrier: Ref, *numbers: Scalar) -> None:
    """Run an instruction on a barrier, in every thread of a warpgroup."""

    @mgpu.inline_mgpu(arg_types=(mgpu.RefType(), *(ROW,) * len(numbers)))
    def run(_: Any, barrier: Value, *numbers: FragmentedArray) -> None:
        word = ir.IntegerType.get_signless(32)
        address = llvm.ptrtoint(word, utils.memref_ptr(barrier))
        given = [vector.extract(each.registers.flat[0], [], [0]) for each in numbers]
        kinds = ",".join(["r"] * (1 + len(given)) + ["~{memory}"])
        llvm.inline_asm(None, [address, *given], text, kinds, has_side_effects=True)

    spread: list[jax.Array] = [mgpu.layout_cast(lax.broadcast(each, (WGMMA_M,)), ROW) for each in numbers]
    run(barrier, *spread)
