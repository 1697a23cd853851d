"""The kernel of both forms: one warpgroup copies operands into shared memory, two multiply, and a fourth does what
there is to do in between, if anything.

    copier      walks the tiles and tells the others; waits for a free stage, starts the copies of one step
    blanker     contraction: zeroes the rows of other groups in the first step and in the last of a sum
    widener     weights of few bits: brings them into the dtype of the rows, in buffers of their own
    consumers   half the blocks of a tile each: wait for a stage, multiply, free it; then the epilogue, while the
                copies of the next tile are under way

Barriers of a stage: `full`, its copies have arrived; `blank`, it is blanked; `free`, all others are done with it.
Of widened weights: `ready`, they are there; `spent`, the consumers are done with them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mgpu

from trencadis.backends.gpu import contraction, rows
from trencadis.backends.gpu import store as stores
from trencadis.backends.gpu import tile_queue as mail
from trencadis.backends.gpu.consumer import Consumer
from trencadis.backends.gpu.layout import CONSUMERS, WIDENED, Layout
from trencadis.backends.gpu.walk import Tile, Walk, i32
from trencadis.core.problem import Form, Problem

FORMS: dict[Form, Any] = {Form.ROWS: rows.Rows, Form.CONTRACTION: contraction.Contraction}
PARAMS = mgpu.CompilerParams(
    lowering_semantics=mgpu.LoweringSemantics.Warpgroup,
    reduction_scratch_bytes=0,
    unsafe_no_auto_barriers=True,  # all threads arrive at a barrier, and `commit_smem` is called where they must meet
)
# of a thread: consumers, the copier, and the others; there are 512 for all warpgroups
REGISTERS = {"": (232, 40, 0), "blanker": (224, 32, 32), "widener": (168, 40, 136)}


def call(
    problem: Problem, layout: Layout, operands: dict[str, Any], out_shape: tuple[int, ...], interpret: Any = None
) -> jax.Array:
    """Run the kernel. Operands by name: sizes, first, lhs, rhs, and those of the epilogue."""
    existing = operands.pop("existing", None)
    form = FORMS[problem.form](problem, layout)
    helper = _helper(layout, form)
    warpgroups = CONSUMERS + 1 + bool(helper)
    shared = {
        **form.scratch(),
        **stores.scratch(problem, layout),
        **mail.scratch(warpgroups - 1),
        "full": mgpu.Barrier(num_arrivals=2 + bool(problem.epilogue.blocks), num_barriers=layout.stages),
        "free": mgpu.Barrier(num_arrivals=CONSUMERS + bool(helper), num_barriers=layout.stages),
    }
    if helper == "blanker":
        shared["blank"] = mgpu.Barrier(num_barriers=layout.stages)
    if helper == "widener":
        shared["ready"] = mgpu.Barrier(num_barriers=WIDENED)
        shared["spent"] = mgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=WIDENED)
    # what the kernel reads and writes is a reference; what it only writes is a result
    inout = {"counter": jnp.zeros((1,), jnp.int32)} if layout.claim else {}
    inout |= {} if existing is None else {"out": existing}
    names = [*operands, *inout, *(["out"] if existing is None else [])]

    def body(*refs: Any) -> None:
        given = dict(zip(names, refs, strict=True))
        pl.run_scoped(lambda **memory: _body(problem, layout, form, given | memory), **shared, collective_axes="role")

    result = jax.ShapeDtypeStruct(out_shape, problem.out)
    mesh = mgpu.Mesh(
        grid=(layout.blocks,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="role",
    )
    kernel = pl.kernel(
        body,
        out_type=[result] * (existing is None),
        mesh=mesh,
        compiler_params=PARAMS,
        interpret=interpret,
        name=f"trencadis_{problem.form.value}",
    )
    refs = {name: jax.new_ref(x, memory_space=mgpu.GMEM) for name, x in inout.items()}
    out = kernel(*operands.values(), *refs.values())
    return jax.freeze(refs["out"]) if existing is not None else out[0]


def _helper(layout: Layout, form: Any) -> str:
    """What the warpgroup beside consumers and copier is, if there is one."""
    return "blanker" if form.blanks else "widener" if layout.widened else ""


def _body(problem: Problem, layout: Layout, form: Any, refs: dict[str, Any]) -> None:
    block, role = lax.axis_index("block"), lax.axis_index("role")
    walk = Walk(problem, layout, refs["sizes"], refs["first"])
    helper = _helper(layout, form)
    many, few, some = REGISTERS[helper]

    def consume() -> None:
        mgpu.set_max_registers(many, action="increase")
        mail.listen(refs, Consumer(problem, layout, form, refs, walk, role).consume)
        mgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def copy() -> None:
        mgpu.set_max_registers(few, action="decrease")
        done = mail.tell(walk, layout, refs, block, functools.partial(_copy, layout, form, refs, walk))
        mail.settle(refs["free"], done, layout.stages)

    def blank() -> None:
        mgpu.set_max_registers(some, action="decrease")
        mail.listen(refs, functools.partial(_blank, layout, form, refs, walk))

    def widen() -> None:
        mgpu.set_max_registers(some, action="increase")
        done = mail.listen(refs, functools.partial(_widen, layout, form, refs))
        mail.settle(refs["spent"], done, WIDENED)

    # one tree of branches: the compiler gives each role its own number of registers only then
    def others() -> None:
        lax.cond(role == CONSUMERS, copy, {"blanker": blank, "widener": widen}[helper]) if helper else copy()

    lax.cond(role < CONSUMERS, consume, others)


def _copy(layout: Layout, form: Any, refs: dict[str, Any], walk: Walk, tile: Tile, done: Any) -> None:
    """Start the copies of a tile, as stages get free."""

    def step(i: Any, _: Any) -> None:
        at = mail.slot(done + i, layout.stages)
        pl.when(done + i >= i32(layout.stages))(lambda: mgpu.barrier_wait(refs["free"].at[at]))
        form.copy(refs, walk, tile, i, at)

    lax.fori_loop(i32(0), tile.steps, step, None)


def _blank(layout: Layout, form: Any, refs: dict[str, Any], walk: Walk, tile: Tile, done: Any) -> None:
    """Blank the steps that may hold rows of other groups."""

    def step(i: Any, _: Any) -> None:
        at = mail.slot(done + i, layout.stages)
        mgpu.barrier_wait(refs["full"].at[at])

        @pl.when(form.ends(walk, tile, i))
        def _() -> None:
            form.blank(refs, walk, tile, i, at)
            mgpu.barrier_arrive(refs["blank"].at[at])

        mgpu.barrier_arrive(refs["free"].at[at])  # also where there was nothing to do: no stage may overtake it

    lax.fori_loop(i32(0), tile.steps, step, None)


def _widen(layout: Layout, form: Any, refs: dict[str, Any], tile: Tile, done: Any) -> None:
    """Widen the weights of each step."""

    def step(i: Any, _: Any) -> None:
        at, to = (mail.slot(done + i, slots) for slots in (layout.stages, WIDENED))
        mgpu.barrier_wait(refs["full"].at[at])
        pl.when(done + i >= i32(WIDENED))(lambda: mgpu.barrier_wait(refs["spent"].at[to]))
        form.widen(refs, at, to)
        mgpu.barrier_arrive(refs["ready"].at[to])
        mgpu.barrier_arrive(refs["free"].at[at])

    lax.fori_loop(i32(0), tile.steps, step, None)
