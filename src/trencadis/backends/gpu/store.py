"""The epilogue of a consumer and its stores: from accumulators through shared memory to the result.

A consumer stores its product in subtiles, through buffers of its own: it fills all of them, starts their TMA copies,
and fills them again when these have read them. Only rows of the span are copied; where they are not all rows of a
subtile, by copies of 32, 16, ..., 1 rows, since the shape of a copy is static.
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

from trencadis.backends.gpu.layout import ROW_ALIGN, SWIZZLE, WGMMA_M, Layout, swizzle_elements
from trencadis.backends.gpu.mma_shapes import MmaShape
from trencadis.backends.gpu.scales import shared_by_tile
from trencadis.backends.gpu.tile_scheduler import Ref, Refs, Scalar, Tile, i32
from trencadis.backends.prepare import round_up
from trencadis.core.epilogue import Extras, inlined
from trencadis.core.jax_compat import for_transposed_store, transpose_ref
from trencadis.core.problem import Form, Problem

THREADS = 128  # threads of a consumer: a vector that it writes itself has an entry for each
COPY_ROWS = 32  # rows of the largest copy out of a buffer of which only some rows are stored


def scratch(problem: Problem, layout: Layout) -> dict[str, Any]:
    """The shared memory and barriers of the epilogue: store buffers, and vectors that it reads."""
    # one row to a tile of shared memory, so that a copy may start at any row
    rows = (mgpu.TilingTransform((1, swizzle_elements(problem.out))), mgpu.SwizzleTransform(SWIZZLE))
    buffers, *shape = store_buffers(problem, layout)
    memory: dict[str, Any] = {"smem_out": mgpu.SMEM((layout.consumers, buffers, *shape), problem.out, transforms=rows)}
    wanted = vectors(problem, layout)
    for name, (length, dtype) in wanted.items():
        memory[f"smem_{name}"] = mgpu.SMEM((layout.consumers, round_up(length, THREADS)), dtype)
    if wanted:
        memory["vectors_full"] = mgpu.Barrier(num_arrivals=len(wanted), num_barriers=layout.consumers)
    if problem.epilogue.accumulate:
        memory["existing_full"] = mgpu.Barrier(num_barriers=layout.consumers * buffers)
    return memory


def vectors(problem: Problem, layout: Layout) -> dict[str, tuple[int, np.dtype[Any]]]:
    """The length and dtype of each vector, by name, that the epilogue of a tile reads from shared memory."""
    epilogue, number = problem.epilogue, np.dtype(np.float32)
    found = {} if not epilogue.by_row or epilogue.row_block else {"by_row": (layout.block_m, number)}
    if shared_by_tile(problem):  # the scales of all steps
        found["by_column"] = (round_up(-(-problem.k // epilogue.column_block[0]), 32), number)
    elif epilogue.by_column and not epilogue.column_block[0]:
        found["by_column"] = (layout.block_n, number)
    return found if epilogue.bias is None else {**found, "bias": (layout.block_n, epilogue.bias)}


def store_buffers(problem: Problem, layout: Layout) -> tuple[int, int, int]:
    """The number of store buffers of a consumer, their rows and columns: few wide ones, so that copies are few."""
    run = swizzle_elements(problem.out)
    if layout.swap_ab:
        return layout.store_buffers, layout.block_m, WGMMA_M
    across = math.gcd(*layout.widths(problem.n)) // run  # no copy crosses the edge of a tile
    # bank conflicts: rows that are an even number of swizzle rows apart, and three swizzle rows of float32
    wide = 3 if problem.out.itemsize == 2 and across % 3 == 0 and layout.store_buffers >= 3 else 1
    return layout.store_buffers // wide, WGMMA_M, wide * run


class Subtile(NamedTuple):
    """A part of a tile that is stored through one buffer; a number is an int or an i32[]."""

    acc_row: Any  # where it starts in the accumulators of the consumer
    acc_column: Any
    row: Any  # where it starts in the tile
    column: Any
    rows: int
    columns: int
    buffer: Any


@dataclasses.dataclass(frozen=True)
class Subtiles:
    """The subtiles of a consumer's product, which starts at row `top` of the products of the tile."""

    top: Scalar
    shape: MmaShape
    columns: int  # of a subtile
    buffers: int
    swap_ab: bool

    @property
    def across(self) -> int:
        """The number of subtiles beside each other."""
        return 1 if self.swap_ab else self.shape.n // self.columns

    def __len__(self) -> int:
        return self.shape.blocks * self.across

    def at(self, first: int, i: Any = 0) -> Subtile:
        """The subtile `first + i`, where `first` is a multiple of the number of buffers and i may be an i32[]."""
        row: Any
        column: Any
        if isinstance(i, int):
            row, column = ((first + i) // self.across) * WGMMA_M, ((first + i) % self.across) * self.columns
            down = self.top + i32(row)
        else:
            index, across = i32(first) + i, i32(self.across)
            row, column = lax.div(index, across) * i32(WGMMA_M), lax.rem(index, across) * i32(self.columns)
            down = self.top + row
        if self.swap_ab:
            return Subtile(row, 0, 0, down, self.shape.n, WGMMA_M, i)
        return Subtile(row, column, down, column, WGMMA_M, self.columns, i)


@dataclasses.dataclass(frozen=True)
class Store:
    """The epilogue and the stores of one consumer."""

    problem: Problem
    layout: Layout
    refs: Refs
    warpgroup: Scalar  # which of the consumers

    def subtiles(self, top: Scalar, shape: MmaShape) -> Subtiles:
        """The subtiles of a consumer's product, which starts at row `top` of the products of the tile."""
        buffers, _, columns = store_buffers(self.problem, self.layout)
        return Subtiles(top, shape, columns, buffers, self.layout.swap_ab)

    def prefetch(self, tile: Tile, subtiles: Subtiles) -> None:
        """Start the copies of what the epilogue reads, while the mainloop runs."""
        wanted = vectors(self.problem, self.layout)
        if wanted:

            @pl.when(tile.steps > 0)
            def _() -> None:
                for name, (length, _) in wanted.items():
                    here = self.refs[f"smem_{name}"].at[self.warpgroup, pl.ds(0, length)]
                    mgpu.copy_gmem_to_smem(self._vector(name, tile), here, self._vectors_full)

        if self.problem.epilogue.accumulate:
            mgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for i in range(min(subtiles.buffers, len(subtiles))):
                self._load_existing(tile, subtiles.at(0, i))

    def wait_vectors(self, tile: Tile) -> None:
        """Wait for the vectors of the epilogue; a tile without steps gets zeros instead, so that it stays zero."""
        wanted = vectors(self.problem, self.layout)

        def zero() -> None:
            for name, (length, dtype) in wanted.items():
                self.refs[f"smem_{name}"].at[self.warpgroup][...] = jnp.zeros((round_up(length, THREADS),), dtype)
            mgpu.commit_smem()

        if wanted:
            lax.cond(tile.steps > 0, lambda: mgpu.barrier_wait(self._vectors_full), zero)

    def store(self, tile: Tile, subtiles: Subtiles, sums: list[jax.Array]) -> None:
        """Apply the epilogue to a consumer's blocks [64, n] and store them, as many subtiles at a time as buffers."""
        if not shared_by_tile(self.problem):  # or the mainloop has waited for them
            self.wait_vectors(tile)
        for first in range(0, len(subtiles), subtiles.buffers):
            count = min(subtiles.buffers, len(subtiles) - first)
            some = [subtiles.at(first, i) for i in range(count)]
            mgpu.wait_smem_to_gmem(0, wait_read_only=True)  # earlier copies have read the buffers
            if self.problem.epilogue.accumulate and first:
                for subtile in some:
                    self._load_existing(tile, subtile)
            for subtile in some:
                self._fill(tile, subtile, sums[subtile.acc_row // WGMMA_M])
            mgpu.commit_smem()
            self._copy_out(tile, subtiles, first, count)
            mgpu.commit_smem_to_gmem_group()

    @property
    def _vectors_full(self) -> Ref:
        """The barrier at which the vectors of the epilogue arrive."""
        return self.refs["vectors_full"].at[self.warpgroup]

    def _vector(self, name: str, tile: Tile) -> Ref:
        """The part of a vector in global memory that the epilogue of a tile reads: of its rows, or of its columns."""
        if name == "by_column" and shared_by_tile(self.problem):
            return self.refs[name].at[tile.group, lax.div(tile.column, i32(self.problem.epilogue.column_block[1]))]
        if name != "by_row":
            columns = pl.ds(pl.multiple_of(tile.column, self.layout.block_n), self.layout.block_n)
            return self.refs[name].at[tile.group, columns]
        rows = pl.ds(pl.multiple_of(tile.row, ROW_ALIGN), self.layout.block_m)
        return self.refs[name].at[rows if self.problem.form is Form.ROWS else (tile.group, rows)]

    def _result(self, tile: Tile, subtile: Subtile, row: Any, rows: int) -> Ref:
        """The place of some rows of a subtile, from `row` on, in the result."""
        run = swizzle_elements(self.problem.out)
        columns = pl.ds(pl.multiple_of(tile.column + subtile.column, run), subtile.columns)
        down = pl.ds(tile.row + (subtile.row + row), rows)
        out = self.refs["out"]
        return out.at[down, columns] if self.problem.form is Form.ROWS else out.at[tile.group, down, columns]

    def _buffer(self, subtile: Subtile, row: Any, rows: int) -> Ref:
        """Some rows, from `row` on, of the buffer of a subtile."""
        return self.refs["smem_out"].at[self.warpgroup, subtile.buffer, pl.ds(row, rows)]

    def _existing_full(self, subtile: Subtile) -> Ref:
        """The barrier at which existing_out arrives in the buffer of a subtile."""
        buffers, _, _ = store_buffers(self.problem, self.layout)
        return self.refs["existing_full"].at[self.warpgroup * i32(buffers) + i32(subtile.buffer)]

    def _load_existing(self, tile: Tile, subtile: Subtile) -> None:
        """Start the copy of existing_out, which the result aliases, into the buffer of a subtile."""
        existing = self._result(tile, subtile, 0, subtile.rows)
        mgpu.copy_gmem_to_smem(existing, self._buffer(subtile, 0, subtile.rows), self._existing_full(subtile))

    def _fill(self, tile: Tile, subtile: Subtile, sums: jax.Array) -> None:
        """Write the result of a subtile into its buffer, from the sums [64, n] of its block."""
        if self.problem.epilogue.accumulate:
            mgpu.barrier_wait(self._existing_full(subtile))
        if not self.layout.swap_ab:
            self._write(self._buffer(subtile, 0, WGMMA_M), tile, subtile, sums, subtile.acc_column, subtile.columns)
            return
        for row in range(0, subtile.rows, WGMMA_M):  # as few registers at a time as can be
            rows = min(WGMMA_M, subtile.rows - row)
            self._write(transpose_ref(self._buffer(subtile, row, rows)), tile, subtile, sums, row, rows)

    def _write(self, buffer: Ref, tile: Tile, subtile: Subtile, sums: jax.Array, column: int, columns: int) -> None:
        """Apply the epilogue to some columns of sums [64, n], and write them to a buffer, transposed for swap-AB."""
        row = column if self.layout.swap_ab else subtile.row
        acc = self._apply_epilogue(tile, subtile, row, sums[:, column : column + columns])

        def cast(x: Any) -> Any:
            return for_transposed_store(x) if self.layout.swap_ab else x

        if self.problem.epilogue.accumulate:
            acc = cast(acc) + cast(buffer[...]).astype(acc.dtype)
            buffer[...] = acc.astype(self.problem.out)
        else:
            buffer[...] = cast(acc.astype(self.problem.out))

    def _copy_out(self, tile: Tile, subtiles: Subtiles, first: int, count: int) -> None:
        """Start the copies of the rows of the buffers that belong to the span: mostly one copy for each buffer."""

        def whole() -> None:
            for i in range(count):
                subtile = subtiles.at(first, i)
                self._copy(tile, subtile, 0, subtile.rows)

        def some(i: Scalar, _: None) -> None:
            self._copy_span(tile, subtiles.at(first, i))

        def by_span() -> None:  # a loop: its many copies are traced and compiled once
            lax.fori_loop(i32(0), i32(count), some, None)

        if self.layout.swap_ab:  # hardly any tile belongs to its span from its first row to its last
            by_span()
            return
        top, last = subtiles.at(first).row, subtiles.at(first, count - 1)
        lax.cond((tile.valid_from <= top) & (tile.valid_to >= last.row + i32(last.rows)), whole, by_span)

    def _copy_span(self, tile: Tile, subtile: Subtile) -> None:
        """Start the copies of the rows of a buffer that belong to the span, by powers of two."""
        edges = (tile.valid_from, tile.valid_to)
        low, high = (jnp.clip(edge - subtile.row, i32(0), i32(subtile.rows)) for edge in edges)

        def largest(i: Scalar, _: None) -> None:
            self._copy(tile, subtile, low + i * i32(COPY_ROWS), COPY_ROWS)

        lax.fori_loop(i32(0), lax.div(high - low, i32(COPY_ROWS)), largest, None)
        for size in (COPY_ROWS >> power for power in range(1, COPY_ROWS.bit_length())):
            row = low + ((high - low) & i32(-2 * size))
            pl.when(((high - low) & size) != 0)(functools.partial(self._copy, tile, subtile, row, size))

    def _copy(self, tile: Tile, subtile: Subtile, row: Any, rows: int) -> None:
        """Start the copy of some rows of a buffer, from `row` on, to the result."""
        target = self._result(tile, subtile, row, rows)
        mgpu.copy_smem_to_gmem(self._buffer(subtile, row, rows), target, commit_group=False)

    def _apply_epilogue(self, tile: Tile, subtile: Subtile, row: Any, acc: jax.Array) -> jax.Array:
        """Scales, bias and activation of sums that start at a row of the tile; a tile without steps stays zero."""
        acc = acc.astype(jnp.float32)  # int8 sums are integers, and what is added to them need not be
        epilogue, wanted = self.problem.epilogue, vectors(self.problem, self.layout)
        if shared_by_tile(self.problem):
            wanted.pop("by_column")  # the mainloop has applied them
        if not wanted and epilogue.activation is None:
            return acc
        row_axis, column_axis = (1, 0) if self.layout.swap_ab else (0, 1)  # of acc, along those of the result
        spread = {}
        for name in wanted:
            at, axis = (row, row_axis) if name == "by_row" else (subtile.column, column_axis)
            vector = self.refs[f"smem_{name}"][self.warpgroup, pl.ds(at, acc.shape[axis])]
            spread[name] = lax.broadcast_in_dim(vector, acc.shape, (axis,))
        if epilogue.activation is None:
            return epilogue.finish(acc, Extras(**spread), self.problem.out)
        # a kernel takes no function with a derivative rule of its own
        epilogue = dataclasses.replace(epilogue, activation=inlined(epilogue.activation))
        done = epilogue.finish(acc, Extras(**spread), self.problem.out).astype(jnp.float32)
        return jnp.where(lax.broadcast(tile.steps, done.shape) > 0, done, jnp.zeros_like(done))
