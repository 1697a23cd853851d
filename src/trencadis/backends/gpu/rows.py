"""The rows form: a tile is rows of one group, the sum runs over k. Rows of other groups in it are not stored."""

from __future__ import annotations

import dataclasses
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mgpu

from trencadis.backends.gpu.layout import GRAIN, LINE, Layout, line
from trencadis.backends.gpu.shapes import fit
from trencadis.backends.gpu.walk import Tile, Walk, i32
from trencadis.problem import Problem
from trencadis.versions import flipped


def tiled(dtype: Any) -> tuple[Any, Any]:
    """How a factor lies in shared memory, as the tensor cores want it."""
    return mgpu.TilingTransform((GRAIN, line(dtype))), mgpu.SwizzleTransform(LINE)


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
        """The stages of both factors."""
        problem, cut = self.problem, self.layout
        rhs = (cut.wide, cut.deep) if problem.transpose_rhs else (cut.deep, cut.wide)
        return {
            "a": mgpu.SMEM((cut.stages, cut.tall, cut.deep), problem.lhs, transforms=tiled(problem.lhs)),
            "b": mgpu.SMEM((cut.stages, *rhs), problem.rhs, transforms=tiled(problem.rhs)),
        }

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
        mgpu.copy_gmem_to_smem(rhs, refs["b"].at[slot], full)

        def rows(height: int) -> Any:
            place = (pl.ds(pl.multiple_of(tile.down, GRAIN), height), k)
            lhs = refs["lhs"].at[(second, *place) if cut.split == "lhs" else place]
            return lambda: mgpu.copy_gmem_to_smem(lhs, refs["a"].at[slot, pl.ds(0, height)], full)

        lax.switch(fit(cut, tile, cut.heights), [rows(height) for height in cut.heights])

    def factors(self, refs: dict[str, Any], slot: Any, mine: Any, wide: int) -> tuple[Any, Any]:
        """What a consumer multiplies: its rows, by the columns of the tile; turned, its columns by the rows."""
        last = self.problem.transpose_rhs
        if self.layout.turned:
            weights = refs["b"].at[slot, mine] if last else flipped(refs["b"].at[slot, :, mine])
            return weights, leftmost(refs["a"].at[slot], wide, True)
        return refs["a"].at[slot, mine], leftmost(refs["b"].at[slot], wide, last)

    def place(self, ref: Any, tile: Tile, row: Any, rows: int, columns: Any) -> Any:
        """A part of the tile in an array shaped like the result."""
        return ref.at[pl.ds(tile.down + row, rows), columns]
