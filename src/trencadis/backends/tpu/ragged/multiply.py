"""The kernel of the products: groups of any m, k and n, whose matrices are blocks.

    for each group:
        for each tile of m and of n:       its sums stay in VMEM
            for each step along k:         the blocks of lhs and rhs of the step are prefetched
                for each part of m and n:  one product, of one of a few sizes

Sizes are counted in granules. Tiles of a group are as equal as they can be. Parts, and steps along k, are as large as
fits into what is left, of sizes that are powers of two; each combination of them is a branch of its own in the kernel.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from trencadis.backends.tpu.indexing import LANES, Condition, Dma, Index, Ref, Value, aligned_ds, i32
from trencadis.backends.tpu.pipeline import Cursor, OutputRing, Prefetcher
from trencadis.backends.tpu.ragged.blocks import BLOCK, Room, word_rows
from trencadis.backends.tpu.ragged.loop import GroupTable, Neighbours, call, run_tiles

FIELDS = ("m", "k", "n", "tile_m", "tile_n", "lhs", "rhs", "out")  # of a group: granules, and its first blocks
OUT_BUFFERS = 2


class Step(NamedTuple):
    """One step along k of one tile of the result of a group; in granules."""

    group: Index
    m: Index
    n: Index
    k: Index


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The sizes of tiles and steps, in granules: the largest tile, and the sizes of products, descending to 1."""

    granule: int
    tile_m: int
    tile_n: int
    m: tuple[int, ...]
    n: tuple[int, ...]
    k: tuple[int, ...]
    buffers: int = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Steps(GroupTable):
    """The steps of all groups, in order."""

    fields = FIELDS
    parts: Parts

    def past_end(self, step: Step) -> Condition:
        """Whether a step is past the last one."""
        return step.group >= i32(self.groups)

    def size(self, name: str, step: Step) -> Index:
        """The granules of a tile along m or n."""
        left = self.field(name, step.group) - getattr(step, name)
        return jnp.minimum(self.field(f"tile_{name}", step.group), left)

    def depth(self, step: Step) -> Index:
        """The granules of a step along k."""
        return largest(self.parts.k, self.field("k", step.group) - step.k)

    def is_last(self, step: Step) -> Condition:
        """Whether a step is the last of its tile."""
        return step.k + self.depth(step) >= self.field("k", step.group)

    def first_tile(self) -> Step:
        """The first step of the first tile of the first group that has a product."""
        return self._enter(jnp.int32(0))

    def next_tile(self, step: Step) -> Step:
        """The step after this one: further along k, or of the next tile along n, along m, or of the next group."""
        zero, group = i32(0), step.group
        n, m = step.n + self.field("tile_n", group), step.m + self.field("tile_m", group)
        deeper = jnp.logical_not(self.is_last(step))
        across = n < self.field("n", group)
        down = m < self.field("m", group)
        here = Step(
            group,
            jnp.where(deeper | across, step.m, m),
            jnp.where(deeper, step.n, jnp.where(across, n, zero)),
            jnp.where(deeper, step.k + self.depth(step), zero),
        )
        return lax.cond(deeper | across | down, lambda: here, lambda: self._enter(group + i32(1)))

    def _enter(self, group: Index) -> Step:
        def multiplies(group: Index) -> Condition:
            return self.field("m", group) * self.field("k", group) * self.field("n", group) > i32(0)

        zero = jnp.int32(0)
        return Step(self.first_where(multiplies, group), zero, zero, zero)


def largest(sizes: tuple[int, ...], left: Index) -> Index:
    """The first of some descending sizes that fits into what is left, or the last of them."""
    found = i32(sizes[-1])
    for size in reversed(sizes[:-1]):
        found = jnp.where(left >= i32(size), i32(size), found)
    return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """lhs or rhs: its dtype, and which of its dimensions are the rows and the lanes of its blocks."""

    name: str
    dtype: np.dtype[Any]
    rows: str
    lanes: str

    @property
    def contracted(self) -> int:
        """The axis of a tile that is contracted."""
        return 0 if self.rows == "k" else 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Multiplier:
    """The kernel of products of blocks: its operands, sizes, and the room for the blocks of the result."""

    lhs: Operand
    rhs: Operand
    groups: int
    parts: Parts
    room: Room
    precision: Any
    flops: int

    @property
    def per(self) -> int:
        """The blocks of a granule along one dimension."""
        return self.parts.granule // BLOCK

    def most(self, dim: str) -> int:
        """The most granules of a tile or of a step along a dimension."""
        return self.parts.k[0] if dim == "k" else int(getattr(self.parts, f"tile_{dim}"))

    def scratch(self) -> dict[str, Any]:
        """The scratch shapes of the kernel, by name."""
        buffers: dict[str, Any] = {}
        for each in (self.lhs, self.rhs):
            rows, lanes = self.most(each.rows) * self.per, self.most(each.lanes) * self.per
            shape = (self.parts.buffers, rows, lanes * word_rows(each.dtype), LANES)
            buffers[each.name] = pltpu.VMEM(shape, jnp.int32)
            buffers[f"{each.name}_sem"] = pltpu.SemaphoreType.DMA((self.parts.buffers,))
        tile = (OUT_BUFFERS, self.parts.tile_m * self.per, self.parts.tile_n * self.per * BLOCK, LANES)
        return {**buffers, "sums": pltpu.VMEM(tile, jnp.float32), **OutputRing.scratch(OUT_BUFFERS)}

    def run(self, lhs: jax.Array, rhs: jax.Array, table: jax.Array, **options: Any) -> jax.Array:
        """The blocks of the products, f32[128 * blocks, 128]; only those of results are written."""
        shape = jax.ShapeDtypeStruct((self.room.blocks * BLOCK, LANES), jnp.float32)
        moved = 4 * (lhs.size + rhs.size + shape.size)
        cost = pl.CostEstimate(flops=self.flops, bytes_accessed=moved, transcendentals=0)
        operands = {"table": table.reshape(-1), "lhs": lhs, "rhs": rhs}
        found = call(
            self._kernel, operands, {"out": shape}, self.scratch(), name="trencadis_ragged", cost=cost, options=options
        )
        return found["out"]

    def _kernel(self, hbm: dict[str, Ref], vmem: dict[str, Ref]) -> None:
        steps = Steps(hbm["table"], self.groups, self.parts)
        prefetchers = {each.name: self._prefetcher(steps, each, hbm, vmem) for each in (self.lhs, self.rhs)}
        ring = OutputRing(vmem, (None, None), lambda *given: self._sent(steps, hbm, vmem, *given))
        ring.reset()

        def compute(here: Neighbours, cursors: dict[str, Cursor]) -> None:
            step = here.tile
            for each in (self.lhs, self.rhs):
                arrived = self._arrived(steps, each, vmem, step, cursors[each.name].slot)
                pl.when(cursors[each.name].is_new)(arrived.wait)
            pl.when(step.k == i32(0))(lambda: (ring.acquire(), None)[1])
            slots = cursors[self.lhs.name].slot, cursors[self.rhs.name].slot, ring.state[2 * ring.buffers]
            self._products(steps, step, slots, vmem)

            @pl.when(steps.is_last(step))
            def _() -> None:
                ring.write_back(step, steps.size("m", step), steps.size("n", step))

        run_tiles(steps, prefetchers, compute)
        ring.drain()

    # -- copies --------------------------------------------------------------------------------------------------------

    def _arrived(self, steps: Steps, each: Operand, vmem: dict[str, Ref], step: Step, slot: Index) -> Dma:
        """A copy of as many bytes as all those of a step have, to wait for them at once."""
        rows, lanes = (
            (steps.depth(step) if dim == "k" else steps.size(dim, step)) * i32(self.per)
            for dim in (each.rows, each.lanes)
        )
        words = word_rows(each.dtype)
        all_of = vmem[each.name].at[slot, pl.ds(0, rows), aligned_ds(0, lanes * i32(words), words)]
        return pltpu.make_async_copy(all_of, all_of, vmem[f"{each.name}_sem"].at[slot])

    def _prefetcher(self, steps: Steps, each: Operand, hbm: dict[str, Ref], vmem: dict[str, Ref]) -> Prefetcher:
        words, per = word_rows(each.dtype), self.per

        def size(dim: str, step: Step) -> Index:
            return steps.depth(step) if dim == "k" else steps.size(dim, step)

        def copies(step: Step, slot: Index, chunk: Index) -> list[Dma]:
            """The blocks of one row of blocks."""
            across = steps.field(each.lanes, step.group) * i32(per)
            row = getattr(step, each.rows) * i32(per) + chunk
            block = steps.field(each.name, step.group) + row * across + getattr(step, each.lanes) * i32(per)
            count = size(each.lanes, step) * i32(per * words)
            source = hbm[each.name].at[aligned_ds(block * i32(words), count, words)]
            target = vmem[each.name].at[slot, chunk, aligned_ds(0, count, words)]
            return [pltpu.make_async_copy(source, target, vmem[f"{each.name}_sem"].at[slot])]

        def key(step: Step) -> tuple[Index, ...]:
            return step.group, getattr(step, each.rows), getattr(step, each.lanes)

        return Prefetcher(steps, key, copies, lambda step: size(each.rows, step) * i32(per), self.parts.buffers)

    def _sent(
        self,
        steps: Steps,
        hbm: dict[str, Ref],
        vmem: dict[str, Ref],
        slot: Index,
        where: Step | None,
        m: Index,
        n: Index,
    ) -> list[Any]:
        """The copies of the sums of a tile to HBM, one for each row of blocks."""
        step = Step(*(jnp.int32(0),) * 4) if where is None else where
        across = steps.field("n", step.group) * i32(self.per)
        first = steps.field("out", step.group) + step.m * i32(self.per) * across + step.n * i32(self.per)
        count = n * i32(self.per * BLOCK)

        def copy(row: Index) -> Dma:
            source = vmem["sums"].at[slot, row, aligned_ds(0, count, BLOCK)]
            target = hbm["out"].at[aligned_ds((first + row * across) * i32(BLOCK), count, BLOCK)]
            return pltpu.make_async_copy(source, target, vmem["ring_sem"].at[slot])

        return [Repeated(m * i32(self.per), copy)]

    # -- arithmetic ----------------------------------------------------------------------------------------------------

    def _products(self, steps: Steps, step: Step, slots: tuple[Index, Index, Index], vmem: dict[str, Ref]) -> None:
        """Add the products of a step to the sums of its tile."""
        m, n, k = steps.size("m", step), steps.size("n", step), steps.depth(step)

        def row(i: Index) -> Index:
            high = largest(self.parts.m, m - i)

            def column(j: Index) -> Index:
                wide = largest(self.parts.n, n - j)
                for sizes in ((a, b, c) for a in self.parts.m for b in self.parts.n for c in self.parts.k):
                    here = (high == i32(sizes[0])) & (wide == i32(sizes[1])) & (k == i32(sizes[2]))
                    pl.when(here)(functools.partial(self._product, sizes, (i, j), step.k == i32(0), slots, vmem))
                return j + wide

            lax.while_loop(lambda j: j < n, column, i32(0) + jnp.int32(0))
            return i + high

        lax.while_loop(lambda i: i < m, row, jnp.int32(0))

    def _product(
        self, sizes: tuple[int, int, int], at: tuple[Index, Index], first: Condition,
        slots: tuple[Index, Index, Index], vmem: dict[str, Ref],
    ) -> None:  # fmt: skip
        """Add the product of a part of static sizes to the sums."""
        per, zero = self.per, i32(0)
        size = dict(zip("mnk", (each * per for each in sizes), strict=True))
        start = {"m": at[0] * i32(per), "n": at[1] * i32(per), "k": zero}
        tiles = [
            self._tile(each, vmem[each.name].at[slot], (start[each.rows], start[each.lanes]),
                       (size[each.rows], size[each.lanes]))
            for each, slot in zip((self.lhs, self.rhs), slots, strict=False)
        ]  # fmt: skip
        x, y = tiles
        if x.dtype != y.dtype:
            x, y = x.astype(jnp.float32), y.astype(jnp.float32)
        dims = (((self.lhs.contracted,), (self.rhs.contracted,)), ((), ()))
        found = lax.dot_general(x, y, dims, precision=self.precision, preferred_element_type=jnp.float32)
        sums = vmem["sums"].at[slots[2]]
        for i in range(size["m"]):
            for j in range(size["n"]):
                block = found[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
                where = (start["m"] + i32(i), aligned_ds((start["n"] + i32(j)) * i32(BLOCK), BLOCK, BLOCK))
                sums[where] = jnp.where(first, jnp.float32(0), sums[where]) + block

    def _tile(self, each: Operand, ref: Ref, start: tuple[Index, Index], size: tuple[int, int]) -> Value:
        """Some blocks of an operand in VMEM as one matrix."""
        words = word_rows(each.dtype)

        def block(i: int, j: int) -> Value:
            found = ref[start[0] + i32(i), aligned_ds((start[1] + i32(j)) * i32(words), words, words), :]
            return pltpu.bitcast(found, each.dtype)

        rows = [jnp.concatenate([block(i, j) for j in range(size[1])], axis=1) for i in range(size[0])]
        return jnp.concatenate(rows, axis=0)


@dataclasses.dataclass(frozen=True, slots=True)
class Repeated:
    """Several copies, of which there is one for each number below a count; it has start() and wait()."""

    count: Index
    copy: Callable[[Index], Dma]

    def start(self) -> None:
        """Start the copies of all blocks, without waiting for them."""
        lax.fori_loop(i32(0), self.count, lambda i, none: self.copy(i).start(), None)

    def wait(self) -> None:
        """Wait until the copies of all blocks have arrived."""
        lax.fori_loop(i32(0), self.count, lambda i, none: self.copy(i).wait(), None)
