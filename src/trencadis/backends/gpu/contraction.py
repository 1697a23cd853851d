"""The contraction form: a tile is a part of one group's matrix, the sum runs over the group's rows.

Steps start at multiples of a few rows, so that the first step of a group and its last hold rows of its neighbours.
These are blanked in both factors, since zero times whatever they hold need not be zero.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mgpu

from trencadis.backends.gpu.layout import BLOCK, GRAIN, Layout, line
from trencadis.backends.gpu.rows import leftmost, tiled
from trencadis.backends.gpu.walk import Tile, Walk, i32
from trencadis.core.jax_compat import flipped
from trencadis.core.problem import Problem

FEW = 64  # rows that are blanked at a time


@dataclasses.dataclass(frozen=True)
class Contraction:
    """What is copied, blanked, multiplied and written."""

    problem: Problem
    layout: Layout
    blanks = True

    @property
    def flat(self) -> tuple[bool, bool]:
        """Whether lhs is stored [k, rows], and rhs [n, rows]."""
        return self.problem.transpose_lhs or self.layout.flat, self.layout.flat

    def scratch(self) -> dict[str, Any]:
        """The stages of both factors."""
        problem, cut = self.problem, self.layout
        a, b = (
            (wide, cut.deep) if flat else (cut.deep, wide)
            for wide, flat in zip((cut.tall, cut.wide), self.flat, strict=True)
        )
        return {
            "a": mgpu.SMEM((cut.stages, *a), problem.lhs, transforms=tiled(problem.lhs, cut.lines)),
            "b": mgpu.SMEM((cut.stages, *b), problem.rhs, transforms=tiled(problem.rhs, cut.lines)),
        }

    def copy(self, refs: dict[str, Any], walk: Walk, tile: Tile, step: Any, slot: Any) -> None:
        """Start the copies of one step: rows of both operands."""
        cut, full = self.layout, refs["full"].at[slot]
        second, step, _ = walk.half(tile, step)
        rows = pl.ds(walk.row(tile, step), cut.deep)
        k = pl.ds(pl.multiple_of(tile.down, BLOCK), cut.tall)
        n = pl.ds(pl.multiple_of(tile.across, cut.wide), cut.wide)
        for name, stage, columns, flat in zip(("lhs", "rhs"), "ab", (k, n), self.flat, strict=True):
            place = (columns, rows) if flat else (rows, columns)
            source = refs[name].at[(second, *place) if cut.split == name else place]
            mgpu.copy_gmem_to_smem(source, refs[stage].at[slot], full)

    def factors(self, refs: dict[str, Any], slots: tuple[Any, Any], mine: Any, wide: int) -> tuple[Any, Any]:
        """What a consumer multiplies: its rows of the matrix, by the columns of the tile."""
        flat_a, flat_b = self.flat
        a, b = (refs[name].at[slot] for name, slot in zip("ab", slots, strict=True))
        return a.at[mine] if flat_a else flipped(a.at[:, mine]), leftmost(b, wide, flat_b)

    def ends(self, walk: Walk, tile: Tile, step: Any) -> Any:
        """Whether rows of other groups may be in a step: in the first of a sum, and in the last."""
        _, step, steps = walk.half(tile, step)
        return (step == 0) | (step == steps - 1)

    def blank(self, refs: dict[str, Any], walk: Walk, tile: Tile, step: Any, slot: Any) -> None:
        """Zero the rows in a stage that are not the group's."""
        deep, row = i32(self.layout.deep), walk.row(tile, walk.half(tile, step)[1])
        low, high = jnp.maximum(tile.start - row, i32(0)), jnp.minimum(tile.end - row, deep)

        @pl.when((low > 0) | (high < deep))
        def _() -> None:
            for stage, flat in zip("ab", self.flat, strict=True):
                (_blank_columns if flat else _blank_rows)(refs[stage].at[slot], low, high)
            mgpu.commit_smem()

    def place(self, ref: Any, tile: Tile, row: Any, rows: int, columns: Any) -> Any:
        """A part of the tile in an array shaped like the result."""
        return ref.at[tile.group, pl.ds(tile.down + row, rows), columns]


def _spread(dtype: Any, run: int) -> Any:
    """How rows of a stage lie in registers, cut into so many columns: 8 bytes to a lane."""
    rows = 256 // (run * dtype.itemsize)  # of a warp
    tiles = mgpu.Tiling(((4 * rows, run), (rows, run), (8 // dtype.itemsize,)))
    return mgpu.Layout.TILED(tiles, (-5,), (-3, -2), -1)


def _blank_rows(ref: Any, low: Any, high: Any) -> None:
    """Zero the rows of a stage [deep, wide] outside of [low, high), a few at a time; most are not touched."""
    deep, wide = ref.shape
    layout = _spread(ref.dtype, line(ref.dtype))
    zeros = mgpu.layout_cast(jnp.zeros((GRAIN, wide), ref.dtype), layout)

    def rows(i: Any) -> Any:
        return ref.at[pl.ds(pl.multiple_of(i * i32(GRAIN), GRAIN), GRAIN)]

    def zero(i: Any, _: Any) -> None:
        rows(i)[...] = zeros

    def cut(row: Any) -> None:
        i = lax.div(row, i32(GRAIN))

        @pl.when(row > i * i32(GRAIN))
        def _() -> None:
            at = mgpu.layout_cast(lax.broadcasted_iota(jnp.int32, zeros.shape, 0), layout) + i * i32(GRAIN)
            own = (at >= low) & (at < high)
            rows(i)[...] = jnp.where(own, mgpu.layout_cast(rows(i)[...], layout), zeros)

    cut(low)
    cut(high)
    lax.fori_loop(i32(0), lax.div(low, i32(GRAIN)), zero, None)
    lax.fori_loop(lax.div(high + i32(GRAIN - 1), i32(GRAIN)), i32(deep // GRAIN), zero, None)


def _blank_columns(ref: Any, low: Any, high: Any) -> None:
    """Zero the columns of a stage [wide, deep] outside of [low, high)."""
    layout, shape = _spread(ref.dtype, ref.shape[1]), (FEW, ref.shape[1])
    at = mgpu.layout_cast(lax.broadcasted_iota(jnp.int32, shape, 1), layout)
    # All bits of what is the group's. Comparisons would be taken for a choice between numbers of 8 bits, one by one;
    # bits are cleared a word at a time.
    own = lax.shift_right_arithmetic((low - i32(1) - at) & (at - high), jnp.full(shape, 31, jnp.int32))
    narrow = ref.dtype.itemsize == 1  # of which registers know bits only
    mask = own.astype(jnp.int8) if narrow else own < 0

    def some(i: Any, _: Any) -> None:
        rows = ref.at[pl.ds(pl.multiple_of(i * i32(FEW), FEW), FEW)]
        held = mgpu.layout_cast(rows[...], layout)
        if narrow:
            rows[...] = lax.bitcast_convert_type(lax.bitcast_convert_type(held, jnp.int8) & mask, ref.dtype)
        else:
            rows[...] = jnp.where(mask, held, mgpu.layout_cast(jnp.zeros(shape, ref.dtype), layout))

    lax.fori_loop(i32(0), i32(ref.shape[0] // FEW), some, None)
