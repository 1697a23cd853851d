"""What a consumer does with a tile: its half of the blocks, the products of each step, and then the way out."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mgpu

from trencadis.backends.gpu import store as stores
from trencadis.backends.gpu import tile_queue as mail
from trencadis.backends.gpu.layout import BLOCK, WIDENED, Layout
from trencadis.backends.gpu.mma_shapes import Shape, shapes
from trencadis.backends.gpu.walk import Tile, Walk, i32
from trencadis.core.problem import Problem


@dataclasses.dataclass(frozen=True)
class Consumer:
    """One of the warpgroups that multiply."""

    problem: Problem
    layout: Layout
    form: Any
    refs: dict[str, Any]
    walk: Walk
    role: Any

    def consume(self, tile: Tile, done: Any) -> None:
        """Its part of a tile, the first half of the blocks or the second, after so many steps of others."""
        kinds = shapes(self.layout, self.problem.n)
        blocks = kinds.blocks(tile)
        half = lax.div(blocks + i32(1), i32(2))
        top = pl.multiple_of(jnp.where(self.role == 0, i32(0), half) * i32(BLOCK), BLOCK)
        mine = jnp.where(self.role == 0, half, blocks - half)
        skip = functools.partial(self._skip, tile, done)
        branches = [skip, *(functools.partial(self._multiply, tile, done, top, shape) for shape in kinds.all)]
        lax.switch(jnp.where(mine > 0, kinds.branch(tile, mine) + i32(1), i32(0)), branches)

    def _multiply(self, tile: Tile, done: Any, top: Any, shape: Shape) -> None:
        out = stores.Out(self.problem, self.layout, self.form, self.refs, self.role)
        parts = out.parts(top, shape)
        out.prepare(tile, parts)
        if self.problem.epilogue.blocks:
            out.store(tile, parts, self._promoted(tile, done, top, shape, out))
            return
        summed = functools.partial(self._in_turn, tile, done, top, shape)
        acc = pl.run_scoped(summed, mgpu.ACC((shape.blocks * BLOCK, shape.columns), self.problem.acc))
        out.store(tile, parts, [acc[down : down + BLOCK] for down in range(0, shape.blocks * BLOCK, BLOCK)])

    def _in_turn(self, tile: Tile, done: Any, top: Any, shape: Shape, acc: Any) -> Any:
        """The sums of a tile, one product after the other."""

        def step(i: Any, _: Any) -> None:
            at = self._arrived(tile, done, i)
            mgpu.wgmma(acc, *self._factors(at, top, shape.blocks, shape.columns))
            # Meanwhile the other consumer multiplies: the sooner the stage is free, the better. And the compiler knows
            # nothing of instructions under way that still read a factor in registers: it would use these again.
            mgpu.wgmma_wait(0)
            self._free(done, i)

        lax.fori_loop(i32(0), tile.steps, step, None)
        return acc[...]

    def _promoted(self, tile: Tile, done: Any, top: Any, shape: Shape, out: stores.Out) -> list[Any]:
        """The same, where each step has scales of its own: its product is added to sums that are kept apart."""
        out.wait(tile)

        def product(at: Any, down: int) -> Any:
            def run(acc: Any) -> Any:
                mgpu.wgmma(acc, *self._factors(at, top + i32(down), 1, shape.columns))
                mgpu.wgmma_wait(0)
                return acc[...].astype(jnp.float32)

            return pl.run_scoped(run, mgpu.ACC((BLOCK, shape.columns), self.problem.acc))

        def step(i: Any, sums: list[Any]) -> list[Any]:
            at = self._arrived(tile, done, i)
            weights = self.refs["noted_by_column"][self.role, i]
            downs = range(0, shape.blocks * BLOCK, BLOCK)
            rows = [self.refs["scales"][at[0], pl.ds(top + i32(down), BLOCK)] * weights for down in downs]  # [64]
            for block, (down, row) in enumerate(zip(downs, rows, strict=True)):
                acc = product(at, down)
                if block == shape.blocks - 1:
                    self._free(done, i)
                sums[block] = sums[block] + acc * lax.broadcast_in_dim(row, acc.shape, (0,))
            return sums

        zeros = [jnp.zeros((BLOCK, shape.columns), jnp.float32) for _ in range(shape.blocks)]
        return lax.fori_loop(i32(0), tile.steps, step, zeros)

    def _skip(self, tile: Tile, done: Any) -> None:
        """The tile is not so tall."""

        def step(i: Any, _: Any) -> None:
            self._arrived(tile, done, i)
            self._free(done, i)

        lax.fori_loop(i32(0), tile.steps, step, None)

    def _factors(self, at: Any, top: Any, blocks: int, columns: int) -> Any:
        return self.form.factors(self.refs, at, pl.ds(top, blocks * BLOCK), columns)

    def _arrived(self, tile: Tile, done: Any, i: Any) -> tuple[Any, Any]:
        """Wait for a step; where its factors are."""
        refs, at = self.refs, mail.slot(done + i, self.layout.stages)
        mgpu.barrier_wait(refs["full"].at[at])
        if self.form.blanks:
            pl.when(self.form.ends(self.walk, tile, i))(lambda: mgpu.barrier_wait(refs["blank"].at[at]))
        if not self.layout.widened:
            return at, at
        to = mail.slot(done + i, WIDENED)
        mgpu.barrier_wait(refs["ready"].at[to])
        return at, to

    def _free(self, done: Any, i: Any) -> None:
        mgpu.barrier_arrive(self.refs["free"].at[mail.slot(done + i, self.layout.stages)])
        if self.layout.widened:
            mgpu.barrier_arrive(self.refs["spent"].at[mail.slot(done + i, WIDENED)])
