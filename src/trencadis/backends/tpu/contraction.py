"""Contraction: out[i] = sum over the rows r of group i of lhs[r, :, None] * rhs[r, None, :]. Sums stay in VMEM.

A block of the result is summed in steps of rows. Rows of other groups, in the first and in the last slab of a span, and
rows that fill up the last step are set to zero in the buffers, in both operands, before they are multiplied; all other
rows are multiplied as they came. The last step of a sum rounds it on its way out.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from trencadis.backends.tpu import scales
from trencadis.backends.tpu.columns import LANES, Columns, i32, span
from trencadis.backends.tpu.layout import Layout
from trencadis.backends.tpu.products import multiply
from trencadis.backends.tpu.streams import Ahead, Outbox, Stream
from trencadis.backends.tpu.walk import Place, Walk
from trencadis.core.dtypes import cast
from trencadis.core.epilogue import Extras, add
from trencadis.core.problem import Problem


def scratch(problem: Problem, layout: Layout) -> dict[str, Any]:
    """The buffers of the form."""
    parts, chunk, tall, deep = layout.chunks, layout.chunk, layout.tallest, layout.deep
    buffers = {
        "x": pltpu.VMEM((layout.x_slots, *((deep, tall) if problem.transpose_lhs else (tall, deep))), problem.lhs),
        "x_sem": pltpu.SemaphoreType.DMA((layout.x_slots,)),
        "y": pltpu.VMEM((2, parts, tall, chunk), problem.rhs),
        "y_sem": pltpu.SemaphoreType.DMA((2, parts)),
        "sums": pltpu.VMEM((parts, deep, chunk), problem.acc),
        **Outbox.scratch(layout.out_slots, deep, chunk, problem.out),
        **scales.scratch(problem, layout),
    }
    if problem.epilogue.accumulate:
        buffers["e"] = pltpu.VMEM((2, parts, deep, chunk), problem.out)
        buffers["e_sem"] = pltpu.SemaphoreType.DMA((2, parts))
    return buffers


class Contraction:
    """What the form does at each place of a walk. `hbm` and `vmem` are references by name."""

    def __init__(self, problem: Problem, layout: Layout, walk: Walk, hbm: dict[str, Any], vmem: dict[str, Any]) -> None:
        self.problem, self.layout, self.walk, self.hbm, self.vmem = problem, layout, walk, hbm, vmem
        self.k = Columns(problem.k, layout.deep, layout.deep)
        self.n = Columns(problem.n, layout.wide, layout.chunk)
        self.scales = scales.Scales(problem, layout, self.n, hbm, vmem)
        self.out = Outbox(vmem, (self.k.even, self.n.even), lambda at, *size: self._out(*(at or (0, 0, 0)), *size))

    def _out(self, which: Any, row: Any, column: Any, rows: Any, columns: Any) -> Any:
        return self.hbm["out"].at[which, span(row, rows, LANES), span(column, columns, LANES)]

    def _block(self, place: Place) -> tuple[Any, Any]:
        """The block of k and the block of n of a place."""
        if self.k.blocks == 1:
            return i32(0), place.block
        if self.n.blocks == 1:
            return place.block, i32(0)
        inner = i32((self.n if self.layout.k_outside else self.k).blocks)
        outside, inside = lax.div(place.block, inner), lax.rem(place.block, inner)
        return (outside, inside) if self.layout.k_outside else (inside, outside)

    # -- operands ------------------------------------------------------------------------------------------------------

    def streams(self) -> dict[str, Stream]:
        """The operands on their way in."""
        walk = self.walk

        def some(place: Place, parts: Any) -> Any:  # an empty span has nothing to fetch
            return jnp.where(walk.left(place) > 0, parts, i32(0))

        streams = {
            "x": Stream(
                walk,
                lambda place: (place.span, place.row, self._block(place)[0]),
                self._copy_x,
                lambda place: some(place, i32(1)),
                self.layout.x_slots,
            ),
            "y": Stream(
                walk,
                lambda place: (place.span, place.row, self._block(place)[1]),
                self._copy_y,
                lambda place: some(place, self.n.count(self._block(place)[1])),
            ),
        }
        if self.problem.epilogue.by_row:
            streams["by_row"] = Stream(
                walk,
                lambda place: (place.span, self._block(place)[0]),
                self._copy_lines,
                lambda place: some(place, i32(1)),
                self.layout.x_slots,
            )
        for name in scales.across(self.problem):
            streams[name] = Stream(
                walk,
                lambda place: (place.span, self._block(place)[1]),
                functools.partial(self._copy_across, name),
                lambda place: some(place, self.n.count(self._block(place)[1])),
            )
        if self.problem.epilogue.accumulate:
            streams["e"] = Stream(
                walk,
                lambda place: (place.span, place.block),
                self._copy_e,
                lambda place: self.n.count(self._block(place)[1]),
            )
        return streams

    def _copy_x(self, place: Place, slot: Any, part: Any) -> Any:
        del part
        rows, inside = self.walk.copied(place)
        at, size = self.k.of_block(self._block(place)[0])
        columns, first = span(at, size, LANES), span(0, size, LANES)
        if self.problem.transpose_lhs:
            source, target = self.hbm["lhs"].at[columns, rows], self.vmem["x"].at[slot, first, inside]
        else:
            source, target = self.hbm["lhs"].at[rows, columns], self.vmem["x"].at[slot, inside, first]
        return pltpu.make_async_copy(source, target, self.vmem["x_sem"].at[slot])

    def _copy_y(self, place: Place, slot: Any, part: Any) -> Any:
        rows, inside = self.walk.copied(place)
        at, size = self.n.of_chunk(self._block(place)[1], part)
        return pltpu.make_async_copy(
            self.hbm["rhs"].at[rows, span(at, size, LANES)],
            self.vmem["y"].at[slot, part, inside, span(0, size, LANES)],
            self.vmem["y_sem"].at[slot, part],
        )

    def _copy_lines(self, place: Place, slot: Any, part: Any) -> Any:
        del part
        block = place.span * i32(self.k.blocks) + self._block(place)[0]
        return self.scales.copy_lines(block * i32(self.scales.lines), slot)

    def _copy_across(self, name: str, place: Place, slot: Any, part: Any) -> Any:
        return self.scales.copy(name, place.span, self._block(place)[1], slot, part)

    def _copy_e(self, place: Place, slot: Any, part: Any) -> Any:
        kb, nb = self._block(place)
        (row, rows), (column, columns) = self.k.of_block(kb), self.n.of_chunk(nb, part)
        return pltpu.make_async_copy(
            self._out(place.span, row, column, rows, columns),
            self.vmem["e"].at[slot, part, span(0, rows, LANES), span(0, columns, LANES)],
            self.vmem["e_sem"].at[slot, part],
        )

    # -- work ----------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Before the first place."""
        self.out.open()

    def visit(self, place: Place, before: Any, streams: dict[str, Stream], ahead: dict[str, Ahead]) -> dict[str, Any]:
        """One tile of rows, added to the sums of one block."""
        del before
        kb, nb = self._block(place)
        chunks = self.n.count(nb)
        some = self.walk.left(place) > 0
        x = self.vmem["x"].at[ahead["x"].slot]
        streams["x"].wait(place, ahead["x"])

        @pl.when(ahead["x"].fresh & some)
        def _() -> None:
            self._mask(place, x, 1 if self.problem.transpose_lhs else 0)

        def chunk(part: Any, none: None) -> None:
            y = self.vmem["y"].at[ahead["y"].slot, part]
            for name in (name for name in streams if name != "x"):
                streams[name].wait(place, ahead[name], part)

            @pl.when(ahead["y"].fresh & some)
            def _() -> None:
                self._mask(place, y, 0)

            self._sum(place, part, x, y)

            @pl.when(self.walk.last(place))
            def _() -> None:
                self._finish(place, part, x, y, ahead)

            streams["y"].free(ahead["y"], part)
            streams["x"].free(ahead["x"], 0, part == chunks - i32(1))  # what comes in goes before what goes out

            @pl.when(self.walk.last(place))
            def _() -> None:
                (row, rows), (column, columns) = self.k.of_block(kb), self.n.of_chunk(nb, part)
                self.out.send((place.span, row, column), rows, columns)

        lax.fori_loop(i32(0), chunks, chunk, None)
        return {"y": chunks, "x": 1}

    def _steps(self, place: Place) -> tuple[Any, Any]:
        """Short steps that the tile takes, and pairs of them that come before the last step of its sum."""
        shift = i32(self.layout.fine.bit_length() - 1)
        steps = (self.walk.rows(place) + i32(self.layout.fine - 1)) >> shift
        return steps, jnp.where(self.walk.last(place), (jnp.maximum(steps, i32(1)) - i32(1)) >> i32(1), steps >> i32(1))

    def _mask(self, place: Place, tile: Any, axis: int) -> None:
        """Zeros in the rows of the tile's steps that are not the span's."""
        walk, slab = self.walk, self.layout.slab

        def at(row: Any) -> Any:
            rows = span(row, slab, slab)
            return (slice(None), rows) if axis else (rows, slice(None))

        def keep(row: Any, low: Any, high: Any) -> None:
            old = tile[at(row)]
            index = lax.broadcasted_iota(jnp.int32, old.shape, axis)
            tile[at(row)] = jnp.where((index >= low) & (index < high), old, jnp.zeros_like(old))

        @pl.when(place.row < place.start)
        def _() -> None:
            keep(0, place.start - place.row, i32(slab))

        @pl.when(walk.last(place))
        def _() -> None:
            end, bottom = walk.floor(place.end) - place.row, self._steps(place)[0] * i32(self.layout.fine)

            @pl.when(walk.floor(place.end) < place.end)
            def _() -> None:
                keep(end, i32(0), place.end - place.row - end)

            def clear(row: Any) -> Any:
                tile[at(row)] = jnp.zeros_like(tile[at(row)])
                return row + i32(slab)

            lax.while_loop(lambda row: row < bottom, clear, walk.ceil(place.end) - place.row)

    def _product(self, x: Any, y: Any, row: Any, size: int) -> Any:
        rows = span(row, size, self.layout.fine)
        if self.problem.transpose_lhs:
            return multiply(self.problem, self.layout.chip, x[:, rows], y[rows, :], (1, 0))  # [deep, chunk]
        return multiply(self.problem, self.layout.chip, x[rows, :], y[rows, :], (0, 0))

    def _sum(self, place: Place, part: Any, x: Any, y: Any) -> None:
        """The long steps before the last step of the sum."""
        coarse, sums = 2 * self.layout.fine, self.vmem["sums"].at[part]
        count = self._steps(place)[1]
        first = (place.row == self.walk.floor(place.start)) & (count > 0)

        @pl.when(first)
        def _() -> None:
            sums[...] = self._product(x, y, 0, coarse)

        def step(i: Any, none: None) -> None:
            sums[...] += self._product(x, y, i * i32(coarse), coarse)

        lax.fori_loop(first.astype(jnp.int32), count, step, None)

    def _finish(self, place: Place, part: Any, x: Any, y: Any, ahead: dict[str, Ahead]) -> None:
        """The last step of the sum, long or short, and its result."""
        slot, sums, problem, fine = self.out.take(), self.vmem["sums"].at[part], self.problem, self.layout.fine
        steps, before = self._steps(place)
        left = steps - i32(2) * before
        only = (place.row == self.walk.floor(place.start)) & (before == 0)

        if "by_row" in self.vmem:
            pl.when((part == i32(0)) & (left > 0))(lambda: self.scales.turn(ahead["by_row"].slot))

        def scaled(total: Any) -> Any:
            down, along = self.scales.down(0, self.layout.deep, LANES), self.scales.across("by_column", ahead, part)
            return problem.epilogue.finish(total, Extras(down, along), problem.out)

        def put(result: Any) -> None:
            if problem.epilogue.accumulate:
                old = self.vmem["e"][ahead["e"].slot, part]
                result = add(old, result)
            self.vmem["o"][slot] = cast(result, problem.out)

        for short in (1, 2):

            @pl.when((left == i32(short)) & only)
            def _(short: int = short) -> None:
                put(scaled(self._product(x, y, 0, short * fine)))

            @pl.when((left == i32(short)) & jnp.logical_not(only))
            def _(short: int = short) -> None:
                put(scaled(sums[...] + self._product(x, y, before * i32(2 * fine), short * fine)))

        @pl.when(left == i32(0))
        def _() -> None:
            put(jnp.zeros(sums.shape, problem.acc))

    def close(self, before: Any) -> None:
        """After the last place."""
        del before
        self.out.close()
