"""The way out: from accumulators through the epilogue and shared memory to the result.

A consumer writes parts of a block of rows by a few lines of columns, through buffers of its own: it fills all of them,
starts their copies, and fills them again when those have read them. Only rows of the span are copied; where these are
not all 64 of a block, by copies of 32, 16, ..., 1 rows, since the shape of a copy is static.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mgpu

from trencadis.backends.gpu.layout import BLOCK, CONSUMERS, GRAIN, LINE, Layout, line
from trencadis.backends.gpu.mma_shapes import Shape
from trencadis.backends.gpu.walk import Tile, i32
from trencadis.backends.prepare import up
from trencadis.core.epilogue import Extras, inlined
from trencadis.core.jax_compat import flipped, turnable
from trencadis.core.problem import Form, Problem

THREADS = 128  # of a consumer: a vector that it writes itself has an entry for each
STRIDE = 32  # rows that are copied out at once, where some of a buffer are not to be written


def scratch(problem: Problem, layout: Layout) -> dict[str, Any]:
    """Buffers on the way out, and for what the epilogue adds."""
    rows = (mgpu.TilingTransform((1, line(problem.out))), mgpu.SwizzleTransform(LINE))  # a copy may start at any row
    buffers, *shape = cut(problem, layout)
    memory: dict[str, Any] = {"staged": mgpu.SMEM((CONSUMERS, buffers, *shape), problem.out, transforms=rows)}
    vectors = notes(problem, layout)
    for name, (length, dtype) in vectors.items():
        memory[f"noted_{name}"] = mgpu.SMEM((CONSUMERS, up(length, THREADS)), dtype)
    if vectors:
        memory["noted"] = mgpu.Barrier(num_arrivals=len(vectors), num_barriers=CONSUMERS)
    if problem.epilogue.accumulate:
        memory["added"] = mgpu.Barrier(num_barriers=CONSUMERS * buffers)
    return memory


def notes(problem: Problem, layout: Layout) -> dict[str, tuple[int, Any]]:
    """The vectors that the epilogue of a tile takes, by name: their length, and their dtype."""
    epilogue = problem.epilogue
    if epilogue.blocks:  # those of rows come with each step; of weights, here are those of all steps
        return {"by_column": (up(-(-problem.k // epilogue.blocks), 32), np.dtype(np.float32))}
    return {
        **({"by_row": (layout.tall, np.dtype(np.float32))} if epilogue.by_row else {}),
        **({"by_column": (layout.wide, np.dtype(np.float32))} if epilogue.by_column else {}),
        **({"bias": (layout.wide, epilogue.bias)} if epilogue.bias is not None else {}),
    }


def cut(problem: Problem, layout: Layout) -> tuple[int, int, int]:
    """How many buffers a consumer has, their rows and columns: few wide ones, so that there are few copies to start."""
    run = line(problem.out)
    if layout.turned:
        return layout.slots, layout.tall, BLOCK
    across = math.gcd(*layout.widths(problem.n)) // run  # no copy crosses the edge of a tile
    # rows that are an even number of lines apart meet in the banks of shared memory, and so do three lines of float32
    lines = 3 if problem.out.itemsize == 2 and across % 3 == 0 and layout.slots >= 3 else 1
    return layout.slots // lines, BLOCK, lines * run


class Part(NamedTuple):
    """What is written at a time."""

    down: int  # where its sums are among those of the consumer
    right: int
    row: Any  # where it is in the tile
    column: Any
    rows: int
    columns: int
    turn: int  # the buffer it goes through


@dataclasses.dataclass(frozen=True)
class Out:
    """The way out of one consumer."""

    problem: Problem
    layout: Layout
    form: Any
    refs: dict[str, Any]
    role: Any

    def parts(self, top: Any, shape: Shape) -> list[Part]:
        """The parts of a consumer's products, those from row `top` of all of the tile on."""
        buffers, _, columns = cut(self.problem, self.layout)
        downs = range(0, shape.blocks * BLOCK, BLOCK)
        if self.layout.turned:
            return [Part(x, 0, 0, top + i32(x), shape.columns, BLOCK, i % buffers) for i, x in enumerate(downs)]
        corners = [(down, right) for down in downs for right in range(0, shape.columns, columns)]
        return [
            Part(down, right, top + i32(down), right, BLOCK, columns, i % buffers)
            for i, (down, right) in enumerate(corners)
        ]

    def prepare(self, tile: Tile, parts: list[Part]) -> None:
        """Start the copies of what the epilogue will add, while the sums are still being made."""
        vectors = notes(self.problem, self.layout)
        if vectors:

            @pl.when(tile.steps > 0)
            def _() -> None:
                for name, (length, _) in vectors.items():
                    here = self.refs[f"noted_{name}"].at[self.role, pl.ds(0, length)]
                    mgpu.copy_gmem_to_smem(self._vector(name, tile), here, self._noted)

        if self.problem.epilogue.accumulate:
            mgpu.wait_smem_to_gmem(0, wait_read_only=True)
            buffers, *_ = cut(self.problem, self.layout)
            for part in parts[:buffers]:
                self._fetch(tile, part)

    def wait(self, tile: Tile) -> None:
        """Wait for the vectors that the epilogue takes. Where nothing was summed they are zero, and so the result."""
        vectors = notes(self.problem, self.layout)

        def nothing() -> None:
            for name, (length, dtype) in vectors.items():
                self.refs[f"noted_{name}"].at[self.role][...] = jnp.zeros((up(length, THREADS),), dtype)
            mgpu.commit_smem()

        if vectors:
            lax.cond(tile.steps > 0, lambda: mgpu.barrier_wait(self._noted), nothing)

    def store(self, tile: Tile, parts: list[Part], sums: list[jax.Array]) -> None:
        """Write a consumer's blocks of a tile [64, wide], as many parts at a time as there are buffers."""
        buffers, *_ = cut(self.problem, self.layout)
        if not self.problem.epilogue.blocks:
            self.wait(tile)
        for first in range(0, len(parts), buffers):
            some = parts[first : first + buffers]
            mgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what the buffers held is read out
            if self.problem.epilogue.accumulate and first:
                for part in some:
                    self._fetch(tile, part)
            for part in some:
                self._fill(tile, part, sums[part.down // BLOCK])
            mgpu.commit_smem()
            self._send(tile, some)
            mgpu.commit_smem_to_gmem_group()

    @property
    def _noted(self) -> Any:
        """The barrier of the vectors that the epilogue takes."""
        return self.refs["noted"].at[self.role]

    def _vector(self, name: str, tile: Tile) -> Any:
        """What the epilogue of a tile takes of a vector: for its rows, or for its columns."""
        if self.problem.epilogue.blocks:
            return self.refs[name].at[tile.group, lax.div(tile.across, i32(self.problem.epilogue.blocks))]
        if name != "by_row":
            columns = pl.ds(pl.multiple_of(tile.across, self.layout.wide), self.layout.wide)
            return self.refs[name].at[tile.group, columns]
        rows = pl.ds(pl.multiple_of(tile.down, GRAIN), self.layout.tall)
        return self.refs[name].at[rows if self.problem.form is Form.ROWS else (tile.group, rows)]

    def _target(self, tile: Tile, part: Part, row: Any, rows: int) -> Any:
        columns = pl.ds(pl.multiple_of(tile.across + part.column, line(self.problem.out)), part.columns)
        return self.form.place(self.refs["out"], tile, part.row + row, rows, columns)

    def _buffer(self, part: Part, row: Any, rows: int) -> Any:
        """Some rows of the buffer of a part."""
        return self.refs["staged"].at[self.role, part.turn, pl.ds(row, rows)]

    def _added(self, part: Part) -> Any:
        """The barrier of what is fetched into the buffer of a part."""
        buffers, *_ = cut(self.problem, self.layout)
        return self.refs["added"].at[self.role * i32(buffers) + i32(part.turn)]

    def _fetch(self, tile: Tile, part: Part) -> None:
        """Start the copy of what is there into the buffer."""
        there = self._target(tile, part, 0, part.rows)
        mgpu.copy_gmem_to_smem(there, self._buffer(part, 0, part.rows), self._added(part))

    def _fill(self, tile: Tile, part: Part, sums: jax.Array) -> None:
        """Put a part of the result into its buffer."""
        if self.problem.epilogue.accumulate:
            mgpu.barrier_wait(self._added(part))
        if not self.layout.turned:
            self._put(self._buffer(part, 0, BLOCK), tile, part, sums, part.right, part.columns)
            return
        for row in range(0, part.rows, BLOCK):  # as few registers at a time as can be
            rows = min(BLOCK, part.rows - row)
            self._put(flipped(self._buffer(part, row, rows)), tile, part, sums, row, rows)

    def _put(self, staged: Any, tile: Tile, part: Part, sums: jax.Array, right: int, wide: int) -> None:
        """Finish sums [64, wide], and put them into a buffer of that shape, or the transpose of one."""
        row = right if self.layout.turned else part.row
        acc = self._finished(tile, part, row, sums[:, right : right + wide])

        def laid(x: Any) -> Any:
            return turnable(x) if self.layout.turned else x

        if self.problem.epilogue.accumulate:
            acc = laid(acc) + laid(staged[...]).astype(acc.dtype)
            staged[...] = acc.astype(self.problem.out)
        else:
            staged[...] = laid(acc.astype(self.problem.out))

    def _send(self, tile: Tile, parts: list[Part]) -> None:
        """Start the copies of those rows of the buffers that are the span's: all of them at once, mostly."""

        def send(part: Part, row: Any, rows: int) -> None:
            target = self._target(tile, part, row, rows)
            mgpu.copy_smem_to_gmem(self._buffer(part, row, rows), target, commit_group=False)

        def whole() -> None:
            for part in parts:
                send(part, 0, part.rows)

        def some() -> None:
            for part in parts:
                low, high = (jnp.clip(edge - part.row, i32(0), i32(part.rows)) for edge in (tile.low, tile.high))
                strides(part, low, lax.div(high - low, i32(STRIDE)))
                for size in (STRIDE >> power for power in range(1, STRIDE.bit_length())):
                    row = low + ((high - low) & i32(-2 * size))
                    pl.when(((high - low) & size) != 0)(functools.partial(send, part, row, size))

        def strides(part: Part, low: Any, count: Any) -> None:
            lax.fori_loop(i32(0), count, lambda i, _: send(part, low + i * i32(STRIDE), STRIDE), None)

        if self.layout.turned:  # hardly any tile is a span's from its first row to its last
            some()
            return
        first, last = parts[0], parts[-1]
        lax.cond((tile.low <= first.row) & (tile.high >= last.row + i32(last.rows)), whole, some)

    def _finished(self, tile: Tile, part: Part, row: Any, acc: jax.Array) -> jax.Array:
        """Scales, bias and activation of sums [64, wide] from a row of the tile on; rows nobody owns stay zero."""
        acc = acc.astype(jnp.float32)  # sums of int8 are integers, and what is added to them need not be
        epilogue, vectors = self.problem.epilogue, notes(self.problem, self.layout)
        if epilogue.blocks or (not vectors and epilogue.activation is None):
            return acc
        down, right = (1, 0) if self.layout.turned else (0, 1)  # the axes of acc along rows of the result, and columns
        spread = {}
        for name in vectors:
            at, axis = (row, down) if name == "by_row" else (part.column, right)
            vector = self.refs[f"noted_{name}"][self.role, pl.ds(at, acc.shape[axis])]
            spread[name] = lax.broadcast_in_dim(vector, acc.shape, (axis,))
        if epilogue.activation is None:
            return epilogue.finish(acc, Extras(**spread), self.problem.out)
        # a kernel knows no functions with derivatives of their own
        epilogue = dataclasses.replace(epilogue, activation=inlined(epilogue.activation))
        done = epilogue.finish(acc, Extras(**spread), self.problem.out).astype(jnp.float32)
        return jnp.where(lax.broadcast(tile.steps, done.shape) > 0, done, jnp.zeros_like(done))
