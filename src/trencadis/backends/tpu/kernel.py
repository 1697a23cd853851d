"""The Pallas kernel of both forms: a loop over the tiles of a scheduler, prefetched operands, and a body per form.

The grid is one step per TensorCore. All loops are inside the kernel, since the number of tiles and their heights depend
on group sizes, and since an operand block is fetched by its own rule (see `pipeline`), not once per grid step.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from trencadis.backends.tpu import contraction, rows
from trencadis.backends.tpu.indexing import Index, Ref, i32
from trencadis.backends.tpu.layout import Layout
from trencadis.backends.tpu.pipeline import Cursor, Prefetcher, prologue
from trencadis.backends.tpu.tile_scheduler import Tile, TileScheduler
from trencadis.core.cost import cost
from trencadis.core.problem import Form, Problem

IN_SMEM = ("sizes", "first", "height_table", "k_start")


class Body(Protocol):
    """The part of a kernel that differs between the two forms."""

    def prefetchers(self) -> dict[str, Prefetcher]:
        """The operands that are prefetched, by name."""

    def start(self) -> None:
        """Initialize scratch memory before the first tile."""

    def compute(
        self, tile: Tile, prev_end: Index, prefetchers: dict[str, Prefetcher], cursors: dict[str, Cursor]
    ) -> dict[str, Index]:
        """Compute a tile, and give the number of chunks of each operand's buffer that were released meanwhile."""

    def finish(self, prev_end: Index) -> None:
        """Complete the result after the last tile, and wait for all copies in flight."""


def results(problem: Problem, layout: Layout) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes and dtypes of the results that the kernel writes, by name."""
    return (rows if problem.form is Form.ROWS else contraction).results(problem, layout)


def call(problem: Problem, layout: Layout, operands: dict[str, jax.Array], **options: Any) -> dict[str, jax.Array]:
    """Run the kernel; operands are, by name, sizes, first and height_table, then lhs, rhs and those of the epilogue.

    With `k_start`, the kernel multiplies the part of k from there on that is as long as the problem's.
    """
    form = rows if problem.form is Form.ROWS else contraction
    shapes = form.scratch(problem, layout)
    names, found = list(operands), results(problem, layout)
    aliases = {names.index("existing"): 0} if "existing" in operands else {}
    work = cost(problem)

    def kernel(*refs: Ref) -> None:
        outside = [*names, *found]
        hbm, vmem = dict(zip(outside, refs, strict=False)), dict(zip(shapes, refs[len(outside) :], strict=True))
        _kernel(problem, layout, hbm, vmem)

    outs = pl.pallas_call(
        kernel,
        out_shape=list(found.values()),
        grid=(layout.cores,),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM if name in IN_SMEM else pltpu.HBM) for name in names],
        out_specs=[pl.BlockSpec(memory_space=pltpu.HBM)] * len(found),
        scratch_shapes=list(shapes.values()),
        input_output_aliases=aliases,
        cost_estimate=pl.CostEstimate(flops=work.flops, bytes_accessed=work.bytes, transcendentals=0),
        name=_name(problem),
        **options,
    )(*operands.values())
    return dict(zip(found, outs, strict=True))


def _name(problem: Problem) -> str:
    """The name of the kernel, by which it is found in a profile."""
    if problem.gate is None:
        return f"trencadis_{problem.form.value}"
    return "trencadis_gated_pullback" if problem.gate.pullback else "trencadis_gated"


def _kernel(problem: Problem, layout: Layout, hbm: dict[str, Ref], vmem: dict[str, Ref]) -> None:
    core = pl.program_id(0)
    blocks = layout.num_blocks(problem)
    begin, end = i32(0), i32(blocks)
    if layout.cores > 1:  # each core has a contiguous range of column blocks
        begin, end = (lax.div((core + i32(c)) * i32(blocks), i32(layout.cores)) for c in (0, 1))
    scheduler = TileScheduler(problem, layout, hbm, (begin, end))
    body = _body(problem, layout, scheduler, hbm, vmem)
    prefetchers = body.prefetchers()
    first = scheduler.first_tile()
    cursors = prologue(prefetchers.values(), first)
    body.start()

    def step(state: tuple[Tile, Index, tuple[Cursor, ...]]) -> tuple[Tile, Index, tuple[Cursor, ...]]:
        tile, prev_end, cursors = state
        following = scheduler.next_tile(tile)
        by_name = {
            name: cursor._replace(last_use=jnp.logical_not(prefetcher.same_block(tile, following)))
            for (name, prefetcher), cursor in zip(prefetchers.items(), cursors, strict=True)
        }
        released = body.compute(tile, prev_end, prefetchers, by_name)
        cursors = tuple(each.advance(by_name[name], released.get(name, 0)) for name, each in prefetchers.items())
        return following, jnp.where(following.span != tile.span, tile.end, prev_end), cursors

    start = (first, jnp.int32(0), cursors)
    _, prev_end, _ = lax.while_loop(lambda state: jnp.logical_not(scheduler.past_end(state[0])), step, start)
    body.finish(prev_end)


def _body(
    problem: Problem, layout: Layout, scheduler: TileScheduler, hbm: dict[str, Ref], vmem: dict[str, Ref]
) -> Body:
    body = rows.RowsBody if problem.form is Form.ROWS else contraction.ContractionBody
    return body(problem, layout, scheduler, hbm, vmem)
