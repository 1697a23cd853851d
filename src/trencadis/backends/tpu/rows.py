"""Rows: out[r] = lhs[r] @ rhs[group of r]. A group's weights stay in VMEM while its rows pass.

A tile begins at a slab, not at a row: the first slab of a group may begin with rows of the group before, and its last
may end with rows of the one after. Rows do not mix in a product, so nothing is masked on the way in. On the way out a
slab that two groups share is kept, until the later group has filled its part; so each slab is written once.
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

TALL = {"x", "by_row"}  # what comes in once for a tile of rows; all else comes in chunks
ZEROS = 256  # rows of the block of zeros that unowned rows are written from


def scratch(problem: Problem, layout: Layout) -> dict[str, Any]:
    """The buffers of the form."""
    parts, chunk, tall = layout.chunks, layout.chunk, layout.tallest
    weights = (chunk, problem.k) if problem.transpose_rhs else (problem.k, chunk)
    buffers = {
        "x": pltpu.VMEM((layout.x_slots, tall, problem.k), problem.lhs),
        "x_sem": pltpu.SemaphoreType.DMA((layout.x_slots,)),
        "w": pltpu.VMEM((2, parts, *weights), problem.rhs),
        "w_sem": pltpu.SemaphoreType.DMA((2, parts)),
        **Outbox.scratch(layout.out_slots, tall, chunk, problem.out),
        "kept": pltpu.VMEM((-(-problem.n // chunk), layout.slab, chunk), problem.out),
        "kept_sem": pltpu.SemaphoreType.DMA,
        **scales.scratch(problem, layout),
    }
    if problem.epilogue.accumulate:
        buffers["e"] = pltpu.VMEM((2, parts, tall, chunk), problem.out)
        buffers["e_sem"] = pltpu.SemaphoreType.DMA((2, parts))
    else:
        buffers["zeros"] = pltpu.VMEM((min(ZEROS, tall), chunk), problem.out)
        buffers["zeros_sem"] = pltpu.SemaphoreType.DMA
        buffers["zeros_sent"] = pltpu.SMEM((2,), jnp.int32)
    return buffers


class Rows:
    """What the form does at each place of a walk. `hbm` and `vmem` are references by name."""

    def __init__(self, problem: Problem, layout: Layout, walk: Walk, hbm: dict[str, Any], vmem: dict[str, Any]) -> None:
        self.problem, self.layout, self.walk, self.hbm, self.vmem = problem, layout, walk, hbm, vmem
        self.n = Columns(problem.n, layout.wide, layout.chunk)
        self.scales = scales.Scales(problem, layout, self.n, hbm, vmem)
        self.out = Outbox(vmem, (None, self.n.even), lambda at, *size: self._out(*(at or (0, 0)), *size))

    def _out(self, row: Any, column: Any, rows: Any, columns: Any) -> Any:
        return self.hbm["out"].at[span(row, rows, self.layout.slab), span(column, columns, LANES)]

    # -- operands ------------------------------------------------------------------------------------------------------

    def streams(self) -> dict[str, Stream]:
        """The operands on their way in; all but lhs in chunks."""
        walk, ends = self.walk, self.problem.epilogue

        def chunks(place: Place) -> Any:
            return self.n.count(place.block)

        def weights(place: Place) -> Any:
            return place.span, place.block

        def tall(copy: Any) -> Stream:
            return Stream(walk, lambda place: (place.span, place.row), copy, lambda place: i32(1), self.layout.x_slots)

        streams = {"x": tall(self._copy_x), "w": Stream(walk, weights, self._copy_w, chunks)}
        if ends.by_row:
            streams["by_row"] = tall(lambda place, slot, part: self.scales.copy_lines(scales.line(place.row), slot))
        for name in scales.across(self.problem):
            streams[name] = Stream(walk, weights, functools.partial(self._copy_across, name), chunks)
        if ends.accumulate:
            streams["e"] = Stream(walk, lambda place: (place.span, place.block, place.row), self._copy_e, chunks)
        return streams

    def _copy_x(self, place: Place, slot: Any, part: Any) -> Any:
        del part
        rows, inside = self.walk.copied(place)
        return pltpu.make_async_copy(
            self.hbm["lhs"].at[rows, :], self.vmem["x"].at[slot, inside, :], self.vmem["x_sem"].at[slot]
        )

    def _copy_w(self, place: Place, slot: Any, part: Any) -> Any:
        at, size = self.n.of_chunk(place.block, part)
        columns, inside = span(at, size, LANES), span(0, size, LANES)
        which, target = lax.rem(place.span, i32(self.problem.weights)), self.vmem["w"].at[slot, part]
        if self.problem.transpose_rhs:
            source, target = self.hbm["rhs"].at[which, columns, :], target.at[inside, :]
        else:
            source, target = self.hbm["rhs"].at[which, :, columns], target.at[:, inside]
        return pltpu.make_async_copy(source, target, self.vmem["w_sem"].at[slot, part])

    def _copy_across(self, name: str, place: Place, slot: Any, part: Any) -> Any:
        return self.scales.copy(name, lax.rem(place.span, i32(self.problem.weights)), place.block, slot, part)

    def _copy_e(self, place: Place, slot: Any, part: Any) -> Any:
        at, size = self.n.of_chunk(place.block, part)
        rows = self.walk.rows(place)
        return pltpu.make_async_copy(
            self._out(place.row, at, rows, size),
            self.vmem["e"].at[slot, part, span(0, rows, self.layout.slab), span(0, size, LANES)],
            self.vmem["e_sem"].at[slot, part],
        )

    # -- work ----------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Before the first place."""
        self.out.open()
        if "zeros" in self.vmem:
            self.vmem["zeros"][...] = jnp.zeros_like(self.vmem["zeros"])
            for i in range(2):
                self.vmem["zeros_sent"][i] = i32(0)

    def visit(self, place: Place, before: Any, streams: dict[str, Stream], ahead: dict[str, Ahead]) -> dict[str, Any]:
        """One tile of rows with one block of weights; `before` is where the rows of the span before ended."""
        walk = self.walk
        for name in (name for name in streams if name in TALL):
            streams[name].wait(place, ahead[name])
        if "by_row" in streams:
            pl.when(ahead["by_row"].fresh)(lambda: self.scales.turn(ahead["by_row"].slot))
        height, chunks = walk.height(place), self.n.count(place.block)

        def chunk(part: Any, none: None) -> None:
            for name in (name for name in streams if name not in TALL):
                streams[name].wait(place, ahead[name], part)

            @pl.when(place.row == walk.floor(place.start))
            def _() -> None:
                self._fill(before, walk.floor(place.start), place.block, part)

            slot = self.out.take()
            for h in self.layout.heights:

                @pl.when(height == i32(h))
                def _(h: int = h) -> None:
                    self._multiply(h, place, part, slot, ahead)

            streams["w"].free(ahead["w"], part)
            streams["x"].free(ahead["x"], 0, part == chunks - i32(1))  # what comes in goes before what goes out
            self._merge(place, before, part, slot, ahead)
            done = jnp.where(walk.last(place), walk.floor(place.end) - place.row, height)
            at, columns = self.n.of_chunk(place.block, part)
            self.out.send((place.row, at), done, columns)

        lax.fori_loop(i32(0), chunks, chunk, None)
        return {"w": chunks, "x": 1}

    def _multiply(self, h: int, place: Place, part: Any, slot: Any, ahead: dict[str, Ahead]) -> None:
        problem, vmem = self.problem, self.vmem
        x = vmem["x"][ahead["x"].slot, :h, :]  # [h, k]
        w = vmem["w"][ahead["w"].slot, part]  # [k, chunk] or [chunk, k]
        sums = multiply(problem, self.layout.chip, x, w, (1, 1 if problem.transpose_rhs else 0))  # [h, chunk]
        down = self.scales.down(place.row & i32(LANES - 1), h, self.layout.slab)
        along = (self.scales.across(name, ahead, part) for name in ("by_column", "bias"))
        result = problem.epilogue.finish(sums, Extras(down, *along), problem.out)
        if problem.epilogue.accumulate:
            result = add(vmem["e"][ahead["e"].slot, part, :h, :], result)
        vmem["o"][slot, :h, :] = cast(result, problem.out)

    def _merge(self, place: Place, before: Any, part: Any, slot: Any, ahead: dict[str, Ahead]) -> None:
        """Put right the rows of other groups in the tile's first slab, and keep its last if it is not full."""
        walk, layout, out = self.walk, self.layout, self.vmem["o"]
        kept = self.vmem["kept"].at[self.n.index(place.block, part)]
        index = lax.broadcasted_iota(jnp.int32, (layout.slab, layout.chunk), 0)

        def old(offset: Any) -> Any:  # what rows of nobody hold
            if "e" not in self.vmem:
                return jnp.zeros((layout.slab, layout.chunk), self.problem.out)
            return self.vmem["e"][ahead["e"].slot, part, span(offset, layout.slab, layout.slab), :]

        @pl.when(place.row < place.start)
        def _() -> None:
            head = slice(0, layout.slab)
            theirs = jnp.where(index < before - place.row, kept[...], old(0))
            out[slot, head, :] = jnp.where(index < place.start - place.row, theirs, out[slot, head, :])

        @pl.when(walk.last(place) & (walk.floor(place.end) < place.end))
        def _() -> None:
            offset = walk.floor(place.end) - place.row
            tail = out[slot, span(offset, layout.slab, layout.slab), :]
            kept[...] = jnp.where(index < place.end - place.row - offset, tail, old(offset))

    # -- rows of nobody ------------------------------------------------------------------------------------------------

    def _fill(self, before: Any, top: Any, block: Any, part: Any) -> None:
        """Settle the rows between two spans, in one chunk of columns: from where one ended to the slab `top`."""
        walk, layout = self.walk, self.layout
        column, columns = self.n.of_chunk(block, part)
        kept, low = walk.floor(before), walk.ceil(before)

        @pl.when((kept < before) & (kept < top))
        def _() -> None:
            copy = pltpu.make_async_copy(
                self.vmem["kept"].at[self.n.index(block, part), :, span(0, columns, LANES)],
                self._out(kept, column, layout.slab, columns),
                self.vmem["kept_sem"],
            )
            copy.start()
            copy.wait()

        if "zeros" not in self.vmem:
            return
        height, sent = self.vmem["zeros"].shape[0], self.vmem["zeros_sent"]

        def send(row: Any) -> Any:
            self._zeros(row, column, height, columns).start()
            return row + i32(height)

        whole = lax.while_loop(lambda row: row + i32(height) <= top, send, low)
        sent[0] = sent[0] + lax.div(jnp.maximum(top - low, i32(0)), i32(height)) * self._units(columns)

        @pl.when(whole < top)
        def _() -> None:
            self._zeros(whole, column, top - whole, columns).start()
            sent[1] = sent[1] + lax.div(top - whole, i32(layout.slab)) * self._units(columns)

    def _units(self, columns: Any) -> Any:
        return i32(1) if self.n.even else lax.div(columns, i32(LANES))

    def _zeros(self, row: Any, column: Any, rows: Any, columns: Any) -> Any:
        source = self.vmem["zeros"].at[span(0, rows, self.layout.slab), span(0, columns, LANES)]
        return pltpu.make_async_copy(source, self._out(row, column, rows, columns), self.vmem["zeros_sem"])

    def close(self, before: Any) -> None:
        """After the last place: the rows that follow the last span, and whatever is still under way."""
        walk = self.walk
        bottom = walk.ceil(i32(self.problem.rows))

        def block(b: Any, none: None) -> None:
            lax.fori_loop(i32(0), self.n.count(b), lambda part, none: self._fill(before, bottom, b, part), None)

        lax.fori_loop(walk.low, walk.high, block, None)
        self.out.close()
        if "zeros" in self.vmem:
            unit = self.n.even or LANES
            for i, rows in enumerate((self.vmem["zeros"].shape[0], self.layout.slab)):
                wait = self._zeros(0, 0, rows, unit).wait
                lax.fori_loop(i32(0), self.vmem["zeros_sent"][i], lambda i, none, wait=wait: wait(), None)
