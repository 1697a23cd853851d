"""What the copier tells the other warpgroups: which tile comes next.

One warpgroup walks; the others hear of each tile through shared memory. So the walk, with its divisions and its reads
of group sizes, is done once, ahead of the arithmetic, and the order of tiles may depend on which block is free first.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu.utils import memref_ptr
from jax.experimental.pallas import mosaic_gpu as mgpu
from jaxlib.mlir.dialects import llvm

from trencadis.backends.gpu.layout import GRAIN, TOLD, Layout
from trencadis.backends.gpu.walk import Tile, Walk, i32


def scratch(listeners: int) -> dict[str, Any]:
    """The letters, and the barriers of each slot: it holds a letter, all have read it."""
    return {
        "mail": mgpu.SMEM((TOLD + 1, len(Tile._fields)), jnp.int32),  # the last row: the tile that was claimed
        "told": mgpu.Barrier(num_barriers=TOLD),
        "heard": mgpu.Barrier(num_arrivals=listeners, num_barriers=TOLD),
    }


def slot(count: Any, slots: int) -> Any:
    """Where the next thing goes that there are `slots` places for."""
    return lax.rem(count, i32(slots))


def tell(walk: Walk, layout: Layout, refs: dict[str, Any], block: Any, copy: Any) -> Any:
    """Walk, tell of each tile, and let its steps be copied; returns how many steps there were."""

    def post(tile: Tile, count: Any) -> None:
        at = slot(count, TOLD)
        pl.when(count >= i32(TOLD))(lambda: mgpu.barrier_wait(refs["heard"].at[at]))
        for i, value in enumerate(tile):
            refs["mail"][at, i] = value
        mgpu.barrier_arrive(refs["told"].at[at])

    def body(state: Any) -> Any:
        at, place, count, done, _ = state
        tile = walk.tile(place, at)
        post(tile, count)
        if layout.claim:
            _ask(refs)
        copy(tile, done)
        after = _answer(refs, layout) if layout.claim else at + i32(layout.blocks)
        return after, walk.seek(place, after), count + i32(1), done + jnp.maximum(tile.steps, i32(0)), tile.steps

    start = (block, walk.begin(block), i32(0), i32(0), i32(0))
    _, _, count, done, _ = lax.while_loop(lambda state: state[4] >= 0, body, start)
    settle(refs["heard"], count, TOLD)
    return done


def listen(refs: dict[str, Any], do: Any) -> Any:
    """Do something for each tile; it is told how many steps came before. Returns how many there were."""

    def body(state: Any) -> Any:
        count, done, _ = state
        at = slot(count, TOLD)
        mgpu.barrier_wait(refs["told"].at[at])
        tile = Tile(*(refs["mail"][at, i] for i in range(len(Tile._fields))))
        mgpu.barrier_arrive(refs["heard"].at[at])
        tile = tile._replace(down=pl.multiple_of(tile.down, GRAIN))
        pl.when(tile.steps >= 0)(lambda: do(tile, done))
        return count + i32(1), done + jnp.maximum(tile.steps, i32(0)), tile.steps

    return lax.while_loop(lambda state: state[2] >= 0, body, (i32(0), i32(0), i32(0)))[1]


def settle(barrier: Any, count: Any, slots: int) -> None:
    """Wait for what was not waited for yet, so that no barrier is left in the middle of a phase."""

    def wait(i: Any, _: Any) -> None:
        mgpu.barrier_wait(barrier.at[slot(i, slots)])

    lax.fori_loop(jnp.maximum(count - i32(slots), i32(0)), count, wait, None)


def _ask(refs: dict[str, Any]) -> None:
    """Ask for the next tile that no block has taken. Who takes it does not change what is computed."""
    mgpu.commit_smem()  # all threads have read the last answer
    _fetch(refs["counter"], refs["mail"].at[TOLD])


def _answer(refs: dict[str, Any], layout: Layout) -> Any:
    """The tile that was asked for."""
    mgpu.commit_smem()
    return refs["mail"][TOLD, 0] + i32(layout.blocks)


@mgpu.inline_mgpu(arg_types=(mgpu.RefType(), mgpu.RefType()))
def _fetch(_: Any, counter: Any, claimed: Any) -> None:
    """Add one to a counter in global memory, and put what it held into shared memory.

    The last warp does it, so that the first, which starts the copies, need not wait for the answer.
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
    pointers = [memref_ptr(counter), memref_ptr(claimed)]
    llvm.inline_asm(None, pointers, text, "l,r", has_side_effects=True)
