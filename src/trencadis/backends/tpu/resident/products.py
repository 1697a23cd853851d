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

from trencadis.backends.tpu.indexing import LANES, Condition, Index, Value, aligned_ds, i32
from trencadis.backends.tpu.resident.align import Operand
from trencadis.backends.tpu.resident.sizes import CHUNK, COLUMNS, WIDE
from trencadis.backends.tpu.resident.state import Ring, State
from trencadis.backends.tpu.resident.stream import Stream
from trencadis.backends.tpu.resident.table import Table

VECTORS = COLUMNS // LANES  # of sums of a row of a product


class Job(NamedTuple):
    """A product: its step along k and block along n, and where its blocks and its sums are.

    `lhs` and `sums` are where those of its panel start, and `row` where those of rhs start, for the same block along n.
    """

    step: Index
    block: Index
    lhs: Index
    row: Index
    left: Index
    right: Index
    sums: Index
    to: Index


class Strides(NamedTuple):
    """What the products of an entry have in common: how many there are, and how far blocks are from one another."""

    steps: Index
    blocks: Index
    rhs: Index  # where rhs starts
    last: Index  # where the last panel of an lhs starts that is not streamed
    left: tuple[Index, Index]  # from one step along k to the next, and from one panel
    right: tuple[Index, Index]  # the same, and from one block along n
    slabs: tuple[Index, Index]  # rows of words of a segment of lhs and rhs
    vectors: Index  # of sums of a panel


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
        """The memory of the sums, by name, with some vectors past the last panel for products that are not real."""
        rows = (lhs.sizes.sums + (WIDE + 1) * CHUNK) * lhs.sizes.pitch
        return {"sums": pltpu.VMEM((-(-rows // CHUNK) * CHUNK, LANES), jnp.float32)}

    def vectors(self, entry: Index) -> Index:
        """The vectors of sums of a panel."""
        return self.table.field("blocks", entry) * i32(VECTORS)

    # -- what is computed next -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin with the first entry of this core."""
        self.state["entry"] = self.table.first

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

    def advance(self, count: Index) -> None:
        """Go on by some products; panels that are complete then give up the blocks of lhs."""
        state, entry = self.state, self.state["entry"]
        steps, blocks = (self.table.field(name, entry) for name in ("steps", "blocks"))
        number = state["block"] * steps + state["step"] + count
        panels = lax.div(number, blocks * steps)
        number = number - panels * blocks * steps
        state["block"] = lax.div(number, steps)
        state["step"] = number - state["block"] * steps
        piece, vectors = self.lhs.piece(self.table, entry), self.vectors(entry)

        def close_panel(i: Index, none: None) -> None:
            if self.lhs.streamed:
                self.stream.rings[1].pop(piece)
                state["lhs_place"] = self.stream.rings[1].after(state["lhs_place"], piece)
            state["sums_place"] = self.sums.after(state["sums_place"], vectors)

        lax.fori_loop(i32(0), panels, close_panel, None)
        state.add("panel", panels)
        state["done"] = state["panel"]

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

    def strides(self) -> Strides:
        """What the products of the entry have in common."""
        table, entry = self.table, self.state["entry"]
        right, left = (self._strides(operand, entry) for operand in (self.rhs, self.lhs))
        last = i32(0)
        if self.lhs.streamed:
            left = left[0], self.lhs.piece(table, entry)
        else:
            last = self._lhs(entry, left, table.field("panels", entry) - i32(1))
        rhs = i32(self.rhs.base) + self.stream.rings[0].front(self.rhs.piece(table, entry))
        steps, blocks = (table.field(name, entry) for name in ("steps", "blocks"))
        slabs = self.lhs.slab(table, entry), self.rhs.slab(table, entry)
        return Strides(steps, blocks, rhs, last, left, right, slabs, self.vectors(entry))

    def _strides(self, operand: Operand, entry: Index) -> tuple[Index, Index]:
        """From the blocks of one product of an operand to those of the next along k, and along the other dimension."""
        height, width = operand.product
        down = i32(height // self.sizes.rows) * operand.slab(self.table, entry)
        along = i32(width // LANES * operand.words)
        return (down, along) if operand.along_k == "rows" else (along, down)

    def _lhs(self, entry: Index, strides: tuple[Index, Index], panel: Index) -> Index:
        """Where a panel of an lhs is that is not streamed."""
        return self.stream.rings[1].front(self.lhs.piece(self.table, entry)) + panel * strides[1]

    def job(self, strides: Strides) -> Job:
        """The product that is next."""
        state = self.state
        step, block = state["step"], state["block"]
        lhs = state["lhs_place"] if self.lhs.streamed else self._lhs(state["entry"], strides.left, state["panel"])
        row, sums = strides.rhs + block * strides.right[1], state["sums_place"]
        left, right = lhs + step * strides.left[0], row + step * strides.right[0]
        return Job(step, block, lhs, row, left, right, sums, sums + block * i32(VECTORS))

    def following(self, job: Job, strides: Strides) -> Job:
        """The product after another one of the same entry; past the last it is any."""
        across, down = job.step + i32(1) >= strides.steps, job.block + i32(1) >= strides.blocks
        if self.lhs.streamed:
            panel = self.stream.rings[1].after(job.lhs, strides.left[1])
        else:
            panel = jnp.minimum(job.lhs + strides.left[1], strides.last)
        sums = self.sums.after(job.sums, strides.vectors)
        block = jnp.where(down, i32(0), job.block + i32(1))
        row = jnp.where(down, strides.rhs, job.row + strides.right[1])
        lhs, sums = jnp.where(down, panel, job.lhs), jnp.where(down, sums, job.sums)
        here = Job(
            job.step + i32(1), job.block, job.lhs, job.row, job.left + strides.left[0], job.right + strides.right[0],
            job.sums, job.to,
        )  # fmt: skip
        there = Job(i32(0), block, lhs, row, lhs, row, sums, jnp.where(down, sums, job.to + i32(VECTORS)))
        return Job(*(jnp.where(across, new, old) for new, old in zip(there, here, strict=True)))

    # -- arithmetic ----------------------------------------------------------------------------------------------------

    def compute(self, job: Job, strides: Strides, real: Condition) -> None:
        """Add a product to its sums; to spare ones that are not read if it is not real."""
        right = self._tile(self.rhs, job.right, strides.slabs[1])
        left = self._tile(self.lhs, i32(self.lhs.base) + job.left, strides.slabs[0])
        dims = ((0 if self.lhs.along_k == "rows" else 1,), (0 if self.rhs.along_k == "rows" else 1,))
        product = lax.dot_general(
            left, right, (dims, ((), ())), precision=self.precision, preferred_element_type=jnp.float32
        )
        first = job.step == i32(0)
        to = jnp.where(real, job.to, i32(self.sizes.sums))
        for v in range(VECTORS):
            rows = pl.ds((to + i32(v)) * i32(self.sizes.pitch), self.sizes.rows)
            before = jnp.where(first, jnp.float32(0), self.vmem["sums"][rows, :])
            self.vmem["sums"][rows, :] = before + product[:, v * LANES : (v + 1) * LANES]

    def _tile(self, operand: Operand, place: Index, slab: Index) -> Value:
        """The blocks of a product as a matrix."""
        height, width = operand.product
        segments, vectors, words = height // self.sizes.rows, width // LANES, operand.words

        def part(segment: int, vector: int) -> Value:
            at = place + i32(segment) * slab + i32(vector * words)
            return pltpu.bitcast(self.vmem["blocks"][aligned_ds(at, words, CHUNK), :], operand.dtype)

        rows = [jnp.concatenate([part(i, v) for v in range(vectors)], axis=1) for i in range(segments)]
        return jnp.concatenate(rows, axis=0)
