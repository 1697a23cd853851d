"""The products of aligned blocks: of one size, and any number of them in any order.

    for each entry:
        for each panel of m:
            for each block of n:
                for each step along k:    one product, added to sums in VMEM

A basic block of the kernel has some products that follow one another in this order; they may belong to several panels.
If the last of an entry are fewer, others take any blocks and add to sums that are not read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from trencadis.backends.tpu.indexing import LANES, Condition, Index, Ref, Value, aligned_ds, i32
from trencadis.backends.tpu.resident.align import Operand
from trencadis.backends.tpu.resident.sizes import CHUNK, COLUMNS
from trencadis.backends.tpu.resident.state import Ring, State
from trencadis.backends.tpu.resident.stream import Stream
from trencadis.backends.tpu.resident.table import Table

VECTORS = COLUMNS // LANES  # of sums of a row of a product


class Job(NamedTuple):
    """A product: its step along k and block along n, and where the blocks of its panel and its sums are."""

    step: Index
    block: Index
    panel: Index
    lhs: Index  # where the panel of a streamed lhs is
    sums: Index


class Products:
    """The products of an entry, which are computed in order, and their sums."""

    NAMES = ("entry", "step", "block", "panel", "lhs_place", "sums_place", "opened", "done", *Ring.names("sums"))

    def __init__(self, stream: Stream, state: State, precision: Any) -> None:
        self.stream, self.state, self.precision = stream, state, precision
        self.table: Table = stream.table
        self.rhs, self.lhs = stream.operands
        self.sizes, self.vmem = stream.sizes, stream.vmem
        self.sums = Ring(state, "sums", self.sizes.sums)

    @staticmethod
    def scratch(lhs: Operand) -> dict[str, Any]:
        """The memory of the sums, by name: some vectors more are read past the last panel, or written by no one's."""
        rows = (lhs.sizes.sums + CHUNK) * lhs.sizes.pitch
        return {"sums": pltpu.VMEM((-(-rows // CHUNK) * CHUNK, LANES), jnp.float32)}

    def vectors(self, entry: Index) -> Index:
        """The vectors of sums of a panel."""
        return self.table.field("blocks", entry) * i32(VECTORS)

    # -- what is computed next -----------------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin an entry, whose rhs and first panel of lhs are aligned: take room for the sums of its first panel."""
        entry = self.state["entry"]
        for name in ("step", "block", "panel", "opened", "done"):
            self.state[name] = i32(0)
        if self.lhs.streamed:
            self.state["lhs_place"] = self.stream.rings[1].front(self.lhs.piece(self.table, entry))
        self.state["sums_place"] = self.sums.push(self.vectors(entry))

    def open_panel(self) -> None:
        """Take room for the sums of another panel."""
        self.sums.push(self.vectors(self.state["entry"]))
        self.state.add("opened")

    def available(self) -> Index:
        """The products of the panels that are open, as many as a basic block has at most."""
        table, entry, state = self.table, self.state["entry"], self.state
        steps = table.field("steps", entry)
        panels = state["opened"] + i32(1) - state["panel"]
        left = panels * table.field("blocks", entry) * steps - state["block"] * steps - state["step"]
        return jnp.minimum(left, i32(self.sizes.products))

    def advance(self, job: Job) -> None:
        """Go on to a product; panels before its own are complete, and lhs gives up their blocks."""
        entry, before = self.state["entry"], self.state["panel"]
        for name, value in zip(("step", "block", "panel", "lhs_place", "sums_place"), job, strict=True):
            self.state[name] = value
        self.state["done"] = job.panel
        if self.lhs.streamed:
            piece = self.lhs.piece(self.table, entry)
            lax.fori_loop(before, job.panel, lambda i, none: self.stream.rings[1].pop(piece), None)

    def close(self) -> None:
        """Give up the room of the blocks of an entry."""
        entry = self.state["entry"]
        self.stream.rings[0].pop(self.rhs.piece(self.table, entry))
        if not self.lhs.streamed:
            self.stream.rings[1].pop(self.lhs.piece(self.table, entry))
        self.state.add("entry")

    def more(self) -> Condition:
        """Whether the entry has products that are not computed."""
        return self.state["panel"] < self.table.field("panels", self.state["entry"])

    def job(self) -> Job:
        """The product that is next."""
        names = ("step", "block", "panel", "lhs_place", "sums_place")
        return Job(*(self.state[name] for name in names))

    def following(self, job: Job, entry: Index) -> Job:
        """The product after another one of the same entry."""
        step = job.step + i32(1)
        across = step >= self.table.field("steps", entry)
        block = jnp.where(across, job.block + i32(1), job.block)
        down = block >= self.table.field("blocks", entry)
        lhs = self.stream.rings[1].after(job.lhs, self.lhs.piece(self.table, entry))
        sums = self.sums.after(job.sums, self.vectors(entry))
        return Job(
            jnp.where(across, i32(0), step), jnp.where(down, i32(0), block),
            jnp.where(down, job.panel + i32(1), job.panel),
            jnp.where(down, lhs, job.lhs), jnp.where(down, sums, job.sums),
        )  # fmt: skip

    # -- arithmetic ----------------------------------------------------------------------------------------------------

    def compute(self, job: Job, entry: Index, real: Condition) -> None:
        """Add a product to its sums; to those of no one if it is not real."""
        table = self.table
        right = self._tile(self.rhs, self.stream.rings[0].front(self.rhs.piece(table, entry)), entry, job.block, job.step)
        if self.lhs.streamed:
            left = self._tile(self.lhs, job.lhs, entry, i32(0), job.step)
        else:
            base, panels = self.stream.rings[1].front(self.lhs.piece(table, entry)), table.field("panels", entry)
            panel = jnp.minimum(job.panel, panels - i32(1))  # one that is not real follows the last panel
            left = self._tile(self.lhs, base, entry, panel, job.step)
        dims = ((0 if self.lhs.along_k == "rows" else 1,), (0 if self.rhs.along_k == "rows" else 1,))
        product = lax.dot_general(
            left, right, (dims, ((), ())), precision=self.precision, preferred_element_type=jnp.float32
        )
        first = job.step == i32(0)
        to = jnp.where(real, job.sums + job.block * i32(VECTORS), i32(self.sizes.sums))
        for v in range(VECTORS):
            rows = pl.ds((to + i32(v)) * i32(self.sizes.pitch), self.sizes.rows)
            before = jnp.where(first, jnp.float32(0), self.vmem["sums"][rows, :])
            self.vmem["sums"][rows, :] = before + product[:, v * LANES : (v + 1) * LANES]

    def _tile(self, operand: Operand, piece: Index, entry: Index, outer: Index, step: Index) -> Value:
        """The blocks of a product as a matrix, by its number along k and along the other dimension."""
        blocks, slab, words = self.vmem["blocks"], operand.slab(self.table, entry), operand.words
        width = self.sizes.depth if operand.along_k == "lanes" else COLUMNS
        height = operand.height if operand.along_k == "lanes" else self.sizes.depth
        row, column = (outer, step) if operand.along_k == "lanes" else (step, outer)
        segments, vectors = height // self.sizes.rows, width // LANES
        start = i32(operand.base) + piece + row * i32(segments) * slab + column * i32(vectors * words)

        def part(segment: int, vector: int) -> Value:
            at = start + i32(segment) * slab + i32(vector * words)
            return pltpu.bitcast(blocks[aligned_ds(at, words, CHUNK), :], operand.dtype)

        rows = [jnp.concatenate([part(i, v) for v in range(vectors)], axis=1) for i in range(segments)]
        return jnp.concatenate(rows, axis=0)
