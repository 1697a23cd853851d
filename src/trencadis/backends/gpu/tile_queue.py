"""The tile queue in shared memory, by which the producer warpgroup publishes the tiles that come next.

Only the producer runs the tile scheduler; the other warpgroups read each tile from the queue. So the scheduler, with
its divisions and its reads of group sizes, runs once for each tile and ahead of the arithmetic, and the order of tiles
may depend on which CTA is free first (dynamic persistent scheduling).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.utils import memref_ptr
from jax.experimental.pallas import mosaic_gpu as mgpu
from jaxlib.mlir.dialects import llvm

from trencadis.backends.gpu.layout import QUEUE_SLOTS, ROW_ALIGN, Layout
from trencadis.backends.gpu.tile_scheduler import Ref, Refs, Scalar, Tile, TileScheduler, i32

OnTile = Callable[[Tile, Scalar], None]  # what a warpgroup does with a tile, and the steps of all tiles before it


def scratch(readers: int, pipelines: int) -> dict[str, Any]:
    """The shared memory of the queue of each pipeline, and its barriers for this many warpgroups that read it."""
    slots = QUEUE_SLOTS * pipelines
    return {
        "queue": mgpu.SMEM((slots + pipelines, len(Tile._fields)), jnp.int32),  # last: the tile index that was fetched
        "queue_full": mgpu.Barrier(num_barriers=slots),
        "queue_empty": mgpu.Barrier(num_arrivals=readers, num_barriers=slots),
    }


def slot(count: Scalar, slots: int, pipeline: Scalar | None = None) -> Scalar:
    """The slot of a ring buffer that the next item uses, after `count` items before it.

    The rings of several pipelines are one behind the other.
    """
    at = lax.rem(count, i32(slots))
    return at if pipeline is None else pipeline * i32(slots) + at


def publish(
    scheduler: TileScheduler, layout: Layout, refs: Refs, cta: Scalar, load: OnTile, pipeline: Scalar | None
) -> Scalar:
    """Publish every tile of this pipeline and load its operands; returns how many steps there were in all.

    The first tiles of second pipelines follow those of all first ones, so that the last tiles are one to an SM.
    """
    first, fetched = cta, i32(QUEUE_SLOTS)
    if pipeline is not None:
        first, fetched = pipeline * i32(layout.num_ctas) + cta, i32(QUEUE_SLOTS * layout.pipelines) + pipeline

    def push(tile: Tile, count: Scalar) -> None:
        at = slot(count, QUEUE_SLOTS, pipeline)
        pl.when(count >= i32(QUEUE_SLOTS))(lambda: mgpu.barrier_wait(refs["queue_empty"].at[at]))
        for i, value in enumerate(tile):
            refs["queue"][at, i] = value
        mgpu.barrier_arrive(refs["queue_full"].at[at])

    def body(state: Any) -> Any:
        index, span, count, done, _ = state
        span = scheduler.advance(span, index)
        tile = scheduler.tile(span, index)
        push(tile, count)
        if layout.dynamic:
            _start_fetch(refs, fetched)
        load(tile, done)
        stride = i32(layout.num_ctas * layout.pipelines)
        after = _fetched(refs, fetched) + stride if layout.dynamic else index + stride
        return after, span, count + i32(1), done + lax.max(tile.steps, i32(0)), tile.steps

    start = (first, scheduler.before, i32(0), i32(0), i32(0))
    _, _, count, done, _ = lax.while_loop(lambda state: state[4] >= 0, body, start)
    drain(refs["queue_empty"], count, QUEUE_SLOTS, pipeline)
    return done


def consume(refs: Refs, do: OnTile, pipeline: Scalar | None = None) -> Scalar:
    """Call `do` for every tile that is published to this pipeline; returns how many steps there were in all."""

    def body(state: Any) -> Any:
        count, done, _ = state
        at = slot(count, QUEUE_SLOTS, pipeline)
        mgpu.barrier_wait(refs["queue_full"].at[at])
        tile = Tile(*(refs["queue"][at, i] for i in range(len(Tile._fields))))
        mgpu.barrier_arrive(refs["queue_empty"].at[at])
        tile = tile._replace(row=pl.multiple_of(tile.row, ROW_ALIGN))
        pl.when(tile.steps >= 0)(lambda: do(tile, done))
        return count + i32(1), done + lax.max(tile.steps, i32(0)), tile.steps

    return lax.while_loop(lambda state: state[2] >= 0, body, (i32(0), i32(0), i32(0)))[1]


def drain(barrier: Ref, count: Scalar, slots: int, pipeline: Scalar | None = None) -> None:
    """Wait for the last arrivals at the barriers of a ring buffer, so that the kernel leaves none within a phase."""

    def wait(i: Scalar, _: None) -> None:
        mgpu.barrier_wait(barrier.at[slot(i, slots, pipeline)])

    lax.fori_loop(lax.max(count - i32(slots), i32(0)), count, wait, None)


def _start_fetch(refs: Refs, row: Scalar) -> None:
    """Start to fetch the next tile that no CTA has taken, into a row of the queue.

    Which CTA computes a tile does not change its value.
    """
    mgpu.commit_smem()  # all threads have read the index that was fetched before
    _fetch_add(refs["counter"], refs["queue"].at[row])


def _fetched(refs: Refs, row: Scalar) -> Scalar:
    """What `_start_fetch` got: the index of a tile, counted from the first tiles, which are static."""
    mgpu.commit_smem()
    return refs["queue"][row, 0]


@mgpu.inline_mgpu(arg_types=(mgpu.RefType(), mgpu.RefType()))
def _fetch_add(_: Any, counter: Any, fetched: Any) -> None:
    """Add one to a counter in global memory, and write what it held to shared memory.

    The last warp does it, so that the first, which starts the TMA copies, need not wait for the atomic.
    """
    text = """{
        .reg .pred last;
        .reg .b32 lane, old;
        mov.u32 lane, %tid.x;
        and.b32 lane, lane, 127;
        setp.eq.u32 last, lane, 96;
        @last atom.global.add.u32 old, [$0], 1;
        @last st.shared.u32 [$1], old;
    }"""
    pointers = [memref_ptr(counter), memref_ptr(fetched)]
    llvm.inline_asm(None, pointers, text, "l,r", has_side_effects=True)
