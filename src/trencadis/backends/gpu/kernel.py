"""The persistent, warp-specialized kernel of both forms: a producer, consumers, and at most one warpgroup between.

    producer    runs the tile scheduler and publishes its tiles; waits for an empty stage, starts the copies of a step,
                and where rows are gathered waits for them
    mask        contraction: zeroes the rows of other groups in the first and the last step of a sum
    rewrite     low-precision weights: upcasts them to the dtype of the rows, or transposes them, into other buffers
    consumers   two; three or four where weights are multiplied by scales. A share of the blocks of a tile each: wait
                for a full stage, issue wgmma, release it; then the epilogue, while the next tile is being copied

A CTA may have two pipelines of a producer and two consumers, which share nothing but the code and the SM.

Barriers of a stage: `full`, its copies have arrived; `masked`, other groups' rows are zero; `empty`, all have read it.
Barriers of rewritten weights: `rewritten`, they are there; `rewritten_empty`, the consumers have read them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mgpu

from trencadis.backends.gpu import arrivals, store, tile_queue
from trencadis.backends.gpu.consumer import Consumer, Mainloop
from trencadis.backends.gpu.contraction import ContractionMainloop
from trencadis.backends.gpu.gated import PairsMainloop, PullbackMainloop, approximates, results
from trencadis.backends.gpu.gather import load_gathered
from trencadis.backends.gpu.layout import CONSUMERS, REWRITE_STAGES, Layout
from trencadis.backends.gpu.rows import RowsMainloop
from trencadis.backends.gpu.tile_scheduler import Ref, Refs, Scalar, Tile, TileScheduler, i32
from trencadis.core.problem import Form, Problem

PARAMS = mgpu.CompilerParams(
    lowering_semantics=mgpu.LoweringSemantics.Warpgroup,
    reduction_scratch_bytes=0,
    unsafe_no_auto_barriers=True,  # all threads arrive at a barrier, and `commit_smem` is called where they must meet
)
# registers of a thread: of consumers, producer, and the warpgroup between. All of a CTA together have no more than it
# starts with, a multiple of 8 for each warpgroup: 512, 480 for five or six. Else those that want more wait forever.
REGISTERS = {"": (232, 40, 0), "mask": (224, 32, 32), "upcast": (168, 40, 136), "eight": (208, 40, 56)}
REGISTERS_OF_MORE_CONSUMERS = {3: (160, 32, 0), 4: (112, 32, 0)}
REGISTERS_OF_PIPELINES = 104, 32, 0  # two pipelines of two consumers


def call(problem: Problem, layout: Layout, operands: dict[str, Any], interpret: Any = None) -> list[jax.Array]:
    """Run the kernel; operands by name are sizes, first_group, lhs, rhs, and those of the epilogue."""
    existing = operands.pop("existing", None)
    mainloop = _mainloop(problem)(problem, layout)
    between = _between(mainloop)
    warpgroups = layout.consumers + 1 + bool(between)  # of a pipeline
    stages = layout.stages * layout.pipelines
    shared = {
        **mainloop.scratch(),
        **store.scratch(problem, layout),
        **tile_queue.scratch(warpgroups - 1, layout.pipelines),
        "full": mgpu.Barrier(num_arrivals=mainloop.copies, num_barriers=stages),
        "empty": mgpu.Barrier(num_arrivals=layout.consumers + bool(between), num_barriers=stages),
    }
    if problem.gather is not None:
        shared |= arrivals.scratch(layout)
    if between == "mask":
        shared["masked"] = mgpu.Barrier(num_barriers=layout.stages)
    if layout.rewrites:
        shared["rewritten"] = mgpu.Barrier(num_barriers=REWRITE_STAGES)
        shared["rewritten_empty"] = mgpu.Barrier(num_arrivals=layout.consumers, num_barriers=REWRITE_STAGES)
    # what the kernel reads and writes is a reference; what it only writes is a result
    inout = {"counter": jnp.zeros((1,), jnp.int32)} if layout.dynamic else {}
    inout |= {} if existing is None else {"out": existing}
    outs = {} if existing is not None else results(problem)
    names = [*operands, *inout, *outs]

    def body(*refs: Ref) -> None:
        given = dict(zip(names, refs, strict=True))
        run = functools.partial(_body, problem, layout, mainloop)
        pl.run_scoped(lambda **memory: run(given | memory), **shared, collective_axes="warpgroup")

    mesh = mgpu.Mesh(
        grid=(layout.num_ctas,),
        grid_names=("cta",),
        num_threads=warpgroups * layout.pipelines,
        thread_name="warpgroup",
    )
    kernel = pl.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(*each) for each in outs.values()],
        mesh=mesh,
        compiler_params=dataclasses.replace(
            PARAMS, approx_math=problem.gate is not None and approximates(problem.gate)
        ),
        interpret=interpret,
        name=f"trencadis_{_name(problem)}",
    )
    refs = {name: jax.new_ref(x, memory_space=mgpu.GMEM) for name, x in inout.items()}
    found = kernel(*operands.values(), *refs.values())
    return list(found) if existing is None else [jax.freeze(refs["out"])]


def _name(problem: Problem) -> str:
    """What a kernel is called in a profile: rows, contraction, sum, gated, or gated_pullback."""
    if problem.gate is None or problem.form is Form.CONTRACTION:
        return problem.form.value
    if problem.gate.activation is None:
        return "sum"
    return "gated_pullback" if problem.gate.pullback else "gated"


def _mainloop(problem: Problem) -> Callable[[Problem, Layout], Mainloop]:
    """The class of the mainloop of a problem."""
    if problem.form is Form.CONTRACTION:
        return ContractionMainloop
    if problem.gate is None:
        return RowsMainloop
    if problem.gate.activation is None:
        return PairsMainloop
    return PullbackMainloop if problem.gate.pullback else RowsMainloop


def _between(mainloop: Mainloop) -> str:
    """The warpgroup between producer and consumers: "mask", "upcast", "eight" where it writes bytes, or ""."""
    if isinstance(mainloop, ContractionMainloop):
        return "mask"
    if mainloop.layout.rewrites and mainloop.rewritten.itemsize == 1:
        return "eight"
    return "upcast" if mainloop.layout.upcast_in_smem else ""


def _body(problem: Problem, layout: Layout, mainloop: Mainloop, refs: Refs) -> None:
    """The kernel's body, which every warpgroup runs: it branches into the roles."""
    cta, warpgroup = lax.axis_index("cta"), lax.axis_index("warpgroup")
    scheduler = TileScheduler(problem, layout, refs["sizes"], refs["first_group"])
    of_consumers, of_producer, of_between = REGISTERS[_between(mainloop)]
    consumers, pipeline = layout.consumers * layout.pipelines, None
    if consumers > CONSUMERS:
        of_consumers, of_producer, of_between = REGISTERS_OF_MORE_CONSUMERS[consumers]
    if layout.pipelines > 1:  # warpgroups are the consumers of each pipeline, then the producer of each
        of_consumers, of_producer, of_between = REGISTERS_OF_PIPELINES
        is_consumer = warpgroup < i32(consumers)
        pipeline = lax.select(is_consumer, lax.div(warpgroup, i32(layout.consumers)), warpgroup - i32(consumers))

    def consume() -> None:
        mgpu.set_max_registers(of_consumers, action="increase")
        consumer = Consumer(problem, layout, mainloop, refs, scheduler, warpgroup, pipeline)
        tile_queue.consume(refs, consumer.consume, pipeline)
        mgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def produce() -> None:
        mgpu.set_max_registers(of_producer, action="decrease")
        load = functools.partial(_load, layout, mainloop, refs, scheduler, pipeline)
        if problem.gather is not None:
            arrivals.start(refs, layout)
            load = functools.partial(load_gathered, mainloop, refs, scheduler)
        done = tile_queue.publish(scheduler, layout, refs, cta, load, pipeline)
        tile_queue.drain(refs["empty"], done, layout.stages, pipeline)

    def mask(mainloop: ContractionMainloop) -> None:
        mgpu.set_max_registers(of_between, action="decrease")
        tile_queue.consume(refs, functools.partial(_mask, layout, mainloop, refs, scheduler))

    def rewrite(mainloop: RowsMainloop) -> None:
        mgpu.set_max_registers(of_between, action="increase" if of_between > 128 else "decrease")
        done = tile_queue.consume(refs, functools.partial(_rewrite, layout, mainloop, refs))
        tile_queue.drain(refs["rewritten_empty"], done, REWRITE_STAGES)

    def between() -> None:
        if isinstance(mainloop, ContractionMainloop):
            mask(mainloop)
        else:
            rewrite(mainloop)

    # One tree of branches: only then does the compiler give each role its own number of registers. Pallas lowers the
    # first branch twice, once to find out what it returns, so that this is one that is empty and never taken.
    roles = [lambda: None, consume, produce, *([between] if _between(mainloop) else [])]
    lax.switch(lax.clamp(i32(1), warpgroup - i32(consumers - 2), i32(len(roles) - 1)), roles)


def _load(
    layout: Layout, mainloop: Mainloop, refs: Refs, scheduler: TileScheduler, pipeline: Scalar | None,
    tile: Tile, done: Scalar,
) -> None:  # fmt: skip
    """Producer: start the TMA copies of all steps of a tile, each as soon as its stage is empty."""

    def step(i: Scalar, _: None) -> None:
        at = tile_queue.slot(done + i, layout.stages, pipeline)
        pl.when(done + i >= i32(layout.stages))(lambda: mgpu.barrier_wait(refs["empty"].at[at]))
        mainloop.load(refs, scheduler, tile, i, at)

    if isinstance(mainloop, RowsMainloop):
        mainloop.prefetch(refs, tile)
    lax.fori_loop(i32(0), tile.steps, step, None)


def _mask(
    layout: Layout, mainloop: ContractionMainloop, refs: Refs, scheduler: TileScheduler, tile: Tile, done: Scalar
) -> None:
    """Mask warpgroup: mask the steps of a tile that may hold rows of other groups."""

    def step(i: Scalar, _: None) -> None:
        at = tile_queue.slot(done + i, layout.stages)
        mgpu.barrier_wait(refs["full"].at[at])

        @pl.when(mainloop.may_need_mask(scheduler, tile, i))
        def mask() -> None:
            if mainloop.problem.gather is not None:
                arrivals.wait(refs, layout, done + i)
            mainloop.mask(refs, scheduler, tile, i, at)
            mgpu.barrier_arrive(refs["masked"].at[at])

        mgpu.barrier_arrive(refs["empty"].at[at])  # also where there was nothing to do: no stage may overtake it

    lax.fori_loop(i32(0), tile.steps, step, None)


def _rewrite(layout: Layout, mainloop: RowsMainloop, refs: Refs, tile: Tile, done: Scalar) -> None:
    """Rewrite warpgroup: upcast or transpose the weights of all steps of a tile."""

    def step(i: Scalar, _: None) -> None:
        at, to = (tile_queue.slot(done + i, slots) for slots in (layout.stages, REWRITE_STAGES))
        mgpu.barrier_wait(refs["full"].at[at])
        pl.when(done + i >= i32(REWRITE_STAGES))(lambda: mgpu.barrier_wait(refs["rewritten_empty"].at[to]))
        mainloop.rewrite(refs, at, to)
        mgpu.barrier_arrive(refs["rewritten"].at[to])
        mgpu.barrier_arrive(refs["empty"].at[at])

    lax.fori_loop(i32(0), tile.steps, step, None)
