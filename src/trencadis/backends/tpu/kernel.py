"""The kernel of both forms: one walk, streams that run ahead of it, and what the form does at each place."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from trencadis.backends.tpu import contraction, rows
from trencadis.backends.tpu.columns import i32
from trencadis.backends.tpu.layout import Layout
from trencadis.backends.tpu.streams import Ahead, begin
from trencadis.backends.tpu.walk import Place, Walk
from trencadis.core.cost import cost
from trencadis.core.problem import Form, Problem

FORMS = {Form.ROWS: (rows.Rows, rows.scratch), Form.CONTRACTION: (contraction.Contraction, contraction.scratch)}


def call(problem: Problem, layout: Layout, operands: dict[str, jax.Array], out_shape: Any, **options: Any) -> jax.Array:
    """Run the kernel. Operands by name: sizes and first in scalar memory, then lhs, rhs and those of the epilogue."""
    shapes = FORMS[problem.form][1](problem, layout)
    names = list(operands)
    aliases = {names.index("existing"): 0} if "existing" in operands else {}
    place = dict.fromkeys(("sizes", "first", "table"), pltpu.SMEM)
    work = cost(problem)

    def body(*refs: Any) -> None:
        outside = [*names, "out"]
        hbm, vmem = dict(zip(outside, refs, strict=False)), dict(zip(shapes, refs[len(outside) :], strict=True))
        _body(problem, layout, hbm, vmem)

    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(out_shape, problem.out),
        grid=(layout.cores,),
        in_specs=[pl.BlockSpec(memory_space=place.get(name, pltpu.HBM)) for name in names],
        out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
        scratch_shapes=list(shapes.values()),
        input_output_aliases=aliases,
        cost_estimate=pl.CostEstimate(flops=work.flops, bytes_accessed=work.bytes, transcendentals=0),
        name=f"trencadis_{problem.form.value}",
        **options,
    )(*operands.values())


def _body(problem: Problem, layout: Layout, hbm: dict[str, Any], vmem: dict[str, Any]) -> None:
    core = pl.program_id(0)
    blocks = layout.blocks(problem)
    low, high = i32(0), i32(blocks)
    if layout.cores > 1:
        low, high = (lax.div((core + i32(c)) * i32(blocks), i32(layout.cores)) for c in (0, 1))
    walk = Walk(problem, layout, hbm, (low, high))
    form = FORMS[problem.form][0](problem, layout, walk, hbm, vmem)
    streams = form.streams()
    first = walk.begin()
    ahead = begin(streams.values(), first)
    form.open()

    def visit(state: tuple[Place, Any, tuple[Ahead, ...]]) -> Any:
        place, before, ahead = state
        after = walk.after(place)
        ahead = {
            name: a._replace(done=jnp.logical_not(stream.same(place, after)))
            for (name, stream), a in zip(streams.items(), ahead, strict=True)
        }
        freed = form.visit(place, before, streams, ahead)
        ahead = tuple(stream.leave(ahead[name], freed.get(name, 0)) for name, stream in streams.items())
        return after, jnp.where(after.span != place.span, place.end, before), ahead

    start = (first, jnp.int32(0), ahead)
    _, before, _ = lax.while_loop(lambda state: jnp.logical_not(walk.over(state[0])), visit, start)
    form.close(before)
