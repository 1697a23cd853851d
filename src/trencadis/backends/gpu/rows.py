"""The rows form: a tile is rows of one group, the sum runs over k. Rows of other groups in it are not stored."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mgpu

from trencadis.backends.gpu.layout import BLOCK, GRAIN, LINE, WIDENED, Layout, line
from trencadis.backends.gpu.mma_shapes import fit
from trencadis.backends.gpu.upcast import factor, widened
from trencadis.backends.gpu.walk import Tile, Walk, i32
from trencadis.core.dtypes import bits
from trencadis.core.jax_compat import flipped
from trencadis.core.problem import Problem


def tiled(dtype: Any, length: int = LINE) -> tuple[Any, Any]:
    """How a factor lies in shared memory, as the tensor cores want it: in lines of so many bytes."""
    return mgpu.TilingTransform((GRAIN, line(dtype, length))), mgpu.SwizzleTransform(length)


def leftmost(b: Any, wide: int, flat: bool) -> Any:
    """The first columns of the second factor, which is stored [deep, wide], or flat: [wide, deep]."""
    if b.shape[0 if flat else 1] > wide:
        b = b.at[pl.ds(0, wide)] if flat else b.at[:, pl.ds(0, wide)]
    return flipped(b) if flat else b


@dataclasses.dataclass(frozen=True)
class Rows:
    """What is copied, multiplied and written."""

    problem: Problem
    layout: Layout
    blanks = False

    def scratch(self) -> dict[str, Any]:
        """The stages of both factors, and of weights that are widened."""
        problem, cut = self.problem, self.layout
        rhs = (cut.wide, cut.deep) if problem.transpose_rhs else (cut.deep, cut.wide)
        memory = {
            "a": mgpu.SMEM((cut.stages, cut.tall, cut.deep), problem.lhs, transforms=tiled(problem.lhs, cut.lines))
        }
        length = self.run * bits(problem.rhs) // 8 if cut.packed else cut.lines
        name = "packed" if cut.widened else "b"
        memory[name] = mgpu.SMEM((cut.stages, *rhs), problem.rhs, transforms=tiled(problem.rhs, length))
        if problem.epilogue.blocks:
            memory["scales"] = mgpu.SMEM((cut.stages, cut.tall), jnp.float32)  # of the rows
        if cut.widened:
            memory["b"] = mgpu.SMEM((WIDENED, *rhs), problem.lhs, transforms=tiled(problem.lhs))
        return memory

    @property
    def run(self) -> int:
        """Entries in a line of packed weights: as many as a stage has, or fewer, so that it ends where they do."""
        last = self.problem.transpose_rhs
        stage, whole = (self.layout.deep, self.problem.k) if last else (self.layout.wide, self.problem.n)
        return math.gcd(stage, whole)

    def copy(self, refs: dict[str, Any], walk: Walk, tile: Tile, step: Any, slot: Any) -> None:
        """Start the copies of one step: as many rows as the tile has, and columns of the group's weights."""
        problem, cut = self.problem, self.layout
        second, step, _ = walk.half(tile, step)
        k = pl.ds(pl.multiple_of(step * i32(cut.deep), cut.deep), cut.deep)
        n = pl.ds(pl.multiple_of(tile.across, cut.wide), cut.wide)
        full = refs["full"].at[slot]
        group = tile.group if problem.weights == problem.spans else lax.rem(tile.group, i32(problem.weights))
        place = (group, n, k) if problem.transpose_rhs else (group, k, n)
        rhs = refs["rhs"].at[(second, *place) if cut.split == "rhs" else place]
        mgpu.copy_gmem_to_smem(rhs, refs["packed" if cut.widened else "b"].at[slot], full)

        if problem.epilogue.blocks:
            scales = refs["by_row"].at[step, pl.ds(pl.multiple_of(tile.down, GRAIN), cut.tall)]
            mgpu.copy_gmem_to_smem(scales, refs["scales"].at[slot], full)

        def rows(height: int) -> Any:
            place = (pl.ds(pl.multiple_of(tile.down, GRAIN), height), k)
            lhs = refs["lhs"].at[(second, *place) if cut.split == "lhs" else place]
            return lambda: mgpu.copy_gmem_to_smem(lhs, refs["a"].at[slot, pl.ds(0, height)], full)

        lax.switch(fit(cut, tile, cut.heights), [rows(height) for height in cut.heights])

    def factors(self, refs: dict[str, Any], slots: tuple[Any, Any], mine: Any, wide: int) -> tuple[Any, Any]:
        """What a consumer multiplies: its rows, by the columns of the tile; turned, its columns by the rows."""
        last = self.problem.transpose_rhs
        a, b = (refs[name].at[slot] for name, slot in zip("ab", slots, strict=True))
        if self.layout.packed and not self.layout.widened:
            return factor(b.at[mine], self.problem.lhs), leftmost(a, wide, True)
        if self.layout.turned:
            return b.at[mine] if last else flipped(b.at[:, mine]), leftmost(a, wide, True)
        return a.at[mine], leftmost(b, wide, last)

    def widen(self, refs: dict[str, Any], slot: Any, to: Any) -> None:
        """Bring the weights of a stage into the dtype of the rows, which holds all that they can be."""
        packed, wide, rows = refs["packed"].at[slot], refs["b"].at[to], 256 // self.run
        tiles = mgpu.Tiling(((4 * rows, self.run), (rows, self.run), (8,)))  # 8 numbers to a lane
        layout = mgpu.Layout.TILED(tiles, (-5,), (-3, -2), -1)
        for top in range(0, wide.shape[0], BLOCK):
            some = pl.ds(top, BLOCK)
            wide.at[some][...] = widened(mgpu.layout_cast(packed.at[some][...], layout), wide.dtype)
        mgpu.commit_smem()

    def place(self, ref: Any, tile: Tile, row: Any, rows: int, columns: Any) -> Any:
        """A part of the tile in an array shaped like the result."""
        return ref.at[pl.ds(tile.down + row, rows), columns]
