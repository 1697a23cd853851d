"""The way out: from accumulators through the epilogue and shared memory to the result.

A consumer writes a block of rows and a line of columns at a time, through buffers of its own: while one is copied out,
the next is filled. Only rows of the span are copied, by copies of 64, 32, ..., 1 rows: their shapes are static.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mgpu

from trencadis.backends.gpu.layout import BLOCK, CONSUMERS, LINE, Layout, line
from trencadis.backends.gpu.walk import Tile, i32
from trencadis.problem import Problem


def scratch(problem: Problem, layout: Layout) -> dict[str, Any]:
    """Buffers on the way out, and for what the epilogue adds."""
    run = line(problem.out)
    rows = (mgpu.TilingTransform((1, run)), mgpu.SwizzleTransform(LINE))  # a copy may start at any row
    memory: dict[str, Any] = {"staged": mgpu.SMEM((CONSUMERS, layout.slots, BLOCK, run), problem.out, transforms=rows)}
    if problem.epilogue.bias is not None:
        memory["biases"] = mgpu.SMEM((CONSUMERS, layout.wide), problem.epilogue.bias)
        memory["biased"] = mgpu.Barrier(num_barriers=CONSUMERS)
    if problem.epilogue.accumulate:
        memory["added"] = mgpu.Barrier(num_barriers=CONSUMERS)
    return memory


@dataclasses.dataclass(frozen=True)
class Out:
    """The way out of one consumer."""

    problem: Problem
    layout: Layout
    form: Any
    refs: dict[str, Any]
    role: Any

    def prepare(self, tile: Tile) -> None:
        """Start the copy of the bias, which the epilogue of the tile will want."""
        if self.problem.epilogue.bias is None:
            return

        @pl.when(tile.steps > 0)
        def _() -> None:
            columns = pl.ds(pl.multiple_of(tile.across, self.layout.wide), self.layout.wide)
            bias, arrived = self.refs["bias"].at[tile.group, columns], self.refs["biased"].at[self.role]
            mgpu.copy_gmem_to_smem(bias, self.refs["biases"].at[self.role], arrived)

    def store(self, tile: Tile, top: Any, acc: jax.Array) -> None:
        """Write a consumer's blocks of a tile, those from row `top` of it on."""
        if self.problem.epilogue.bias is not None:
            pl.when(tile.steps > 0)(lambda: mgpu.barrier_wait(self.refs["biased"].at[self.role]))
        mgpu.wait_smem_to_gmem(0, wait_read_only=True)  # all buffers are free, whichever the last tile ended with
        run = line(self.problem.out)
        corners = [(down, right) for down in range(0, acc.shape[0], BLOCK) for right in range(0, self.layout.wide, run)]
        for i, (down, right) in enumerate(corners):
            part = acc[down : down + BLOCK, right : right + run]
            write = functools.partial(self._write, tile, top + i32(down), right, part, i % self.layout.slots)
            mgpu.wait_smem_to_gmem(self.layout.slots - 1, wait_read_only=True)  # the buffer's last copy is read out
            if self.problem.n % self.layout.wide:
                pl.when(tile.across + i32(right) < self.problem.n)(write)
            else:
                write()
            mgpu.commit_smem_to_gmem_group()  # also where nothing was written, so that groups count buffers

    def _write(self, tile: Tile, row: Any, right: int, acc: jax.Array, turn: int) -> None:
        """Write one block of rows and one line of columns."""
        run = acc.shape[1]
        staged = self.refs["staged"].at[self.role, turn]  # [64, run]
        columns = pl.ds(pl.multiple_of(tile.across + i32(right), run), run)
        acc = self._finished(tile, right, acc)
        if self.problem.epilogue.accumulate:
            added = self.refs["added"].at[self.role]
            mgpu.copy_gmem_to_smem(self.form.place(self.refs["out"], tile, row, BLOCK, columns), staged, added)
            mgpu.barrier_wait(added)
            acc = acc + staged[...].astype(acc.dtype)
        staged[...] = acc.astype(self.problem.out)
        mgpu.commit_smem()
        low, high = (jnp.clip(edge - row, i32(0), i32(BLOCK)) for edge in (tile.low, tile.high))
        for size in (BLOCK >> power for power in range(BLOCK.bit_length())):

            @pl.when(((high - low) & size) != 0)
            def _(size: int = size) -> None:
                at = low + ((high - low) & i32(-2 * size))
                target = self.form.place(self.refs["out"], tile, row + at, size, columns)
                mgpu.copy_smem_to_gmem(staged.at[pl.ds(at, size)], target, commit_group=False)

    def _finished(self, tile: Tile, right: int, acc: jax.Array) -> jax.Array:
        """Bias and activation of sums [64, run]; rows that nobody owns stay zero."""
        epilogue, bias = self.problem.epilogue, None
        if epilogue.bias is None and epilogue.activation is None:
            return acc
        if epilogue.bias is not None:
            run = self.refs["biases"][self.role, pl.ds(right, acc.shape[1])]  # [run]
            bias = lax.broadcast_in_dim(run, acc.shape, (1,))
        done = epilogue.finish(acc, bias, self.problem.out)
        return jnp.where(lax.broadcast(tile.steps, done.shape) > 0, done, jnp.zeros_like(done))
