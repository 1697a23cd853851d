"""Software pipelining by explicit DMA: operands are prefetched into VMEM, results are written back asynchronously.

`Prefetcher` does for an operand what `pltpu.emit_pipeline` does for a block spec, over the tiles of a `TileScheduler`
instead of a grid. Each prefetcher has a cursor of its own, ahead of the arithmetic by as many operand blocks as it has
buffers. `OutputRing` is the way back: a ring of buffers for chunks of the results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from trencadis.backends.tpu.indexing import Condition, Dma, Index, Ref, i32
from trencadis.backends.tpu.tile_scheduler import Tile


def start_all(copies: Iterable[Dma]) -> None:
    """Start some copies, one after the other."""
    for copy in copies:
        copy.start()


def wait_for_all(copies: Iterable[Dma]) -> None:
    """Wait for copies that were started."""
    for copy in copies:
        copy.wait()


class Cursor(NamedTuple):
    """The state of a prefetcher, carried through the kernel's loop over tiles."""

    tile: Tile  # the next tile whose operand block is to be fetched
    slot: Index  # the buffer of the tile that is computed
    is_new: Condition  # whether that buffer was filled for this tile, and not for an earlier one
    last_use: Condition = None  # whether this tile is the last that uses the buffer


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Prefetcher:
    """Operands with several VMEM buffers. A block of them is fetched once and stays while its key stays the same.

    An operand block may come in chunks, which are waited for and released one by one: the arithmetic need not wait for
    the whole block, nor the next copies for all of the arithmetic. Operands with the same key, chunks and number of
    buffers share a prefetcher, since the scalar code of each costs time.
    """

    scheduler: Any  # a `TileScheduler`, or another that has its methods for tiles of its own
    key: Callable[[Any], tuple[Index, ...]]  # what identifies the operand block of a tile
    copies: Callable[[Any, Index, Index], Sequence[Dma]]  # (tile, slot, chunk) -> those of one chunk of its block
    num_chunks: Callable[[Any], Index]  # chunks of the operand block of a tile; 0 if there is nothing to fetch
    buffers: int = 2

    def start(self, tile: Tile, slot: Index, first: Index = 0) -> None:
        """Start the copies of a tile's operand block, from the chunk `first` on; none past the last tile."""
        count = jnp.where(self.scheduler.past_end(tile), i32(0), self.num_chunks(tile))
        lax.fori_loop(i32(first), count, lambda chunk, none: start_all(self.copies(tile, slot, chunk)), None)

    def wait(self, tile: Tile, cursor: Cursor, chunk: Index = 0) -> None:
        """Wait for one chunk of the operand block of a tile, unless an earlier tile has waited for it."""

        @pl.when(cursor.is_new & (i32(chunk) < self.num_chunks(tile)))
        def _() -> None:
            wait_for_all(self.copies(tile, cursor.slot, i32(chunk)))

    def release(self, cursor: Cursor, chunk: Index, now: Condition = True) -> None:
        """Refill one chunk of the buffer with that of the next operand block, if this was its last use."""

        @pl.when(cursor.last_use & jnp.logical_not(self.scheduler.past_end(cursor.tile)) & now)
        def _() -> None:
            @pl.when(i32(chunk) < self.num_chunks(cursor.tile))
            def _() -> None:
                start_all(self.copies(cursor.tile, cursor.slot, i32(chunk)))

    def advance(self, cursor: Cursor, released: Index = 0) -> Cursor:
        """The cursor for the next tile; after the last use of a buffer, refill its chunks from `released` on."""

        @pl.when(cursor.last_use)
        def _() -> None:
            self.start(cursor.tile, cursor.slot, released)

        slot = jnp.where(cursor.slot == i32(self.buffers - 1), i32(0), cursor.slot + i32(1))
        tile = self.next_block(cursor.tile, cursor.last_use)
        return Cursor(tile, jnp.where(cursor.last_use, slot, cursor.slot), cursor.last_use)

    def same_block(self, a: Tile, b: Tile) -> Condition:
        """Whether two tiles use the same operand block; False if the second is past the last tile."""
        same = jnp.logical_not(self.scheduler.past_end(b))
        for x, y in zip(self.key(a), self.key(b), strict=True):
            same = same & (x == y)
        return same

    def next_block(self, tile: Tile, go: Condition = True) -> Tile:
        """The next tile with another operand block; the tile itself where `go` is false."""

        def step(state: tuple[Tile, Condition]) -> tuple[Tile, Condition]:
            following = self.scheduler.next_tile(state[0])
            return following, self.same_block(tile, following)

        going = jnp.asarray(go) & jnp.logical_not(self.scheduler.past_end(tile))
        return lax.while_loop(lambda state: state[1], step, (tile, going))[0]


def prologue(prefetchers: Iterable[Prefetcher], tile: Tile) -> tuple[Cursor, ...]:
    """Start to fill all buffers of every prefetcher, the first of each before the second of any; gives the cursors."""
    tiles = {prefetcher: tile for prefetcher in prefetchers}
    for slot in range(max(prefetcher.buffers for prefetcher in tiles)):
        for prefetcher in (prefetcher for prefetcher in tiles if slot < prefetcher.buffers):
            prefetcher.start(tiles[prefetcher], i32(slot))
            tiles[prefetcher] = prefetcher.next_block(tiles[prefetcher])
    return tuple(Cursor(at, jnp.int32(0), jnp.bool_(True)) for at in tiles.values())


class OutputRing:
    """A ring of VMEM buffers for chunks of the results: some are copied to HBM while another is filled.

    `copies(slot, where, rows, columns)` gives the copies of one buffer to HBM, one for each result, which share the
    semaphore of the buffer; `where` is None to wait for them, for which only their sizes matter. `sizes` are the rows
    and columns of a chunk if these are static. If not, they are None, and the sizes of the copies in flight are kept in
    SMEM.
    """

    def __init__(
        self, vmem: dict[str, Ref], sizes: tuple[int | None, int | None], copies: Callable[..., Sequence[Dma]]
    ) -> None:
        self.state, self.sizes, self.copies = vmem["ring_state"], sizes, copies
        self.buffers = vmem["ring_sem"].shape[0]

    @staticmethod
    def scratch(buffers: int) -> dict[str, Any]:
        """The scratch shapes of the ring, by name, beside the buffers themselves."""
        return {
            "ring_sem": pltpu.SemaphoreType.DMA((buffers,)),
            # rows of the copies in flight from each buffer, then their columns, then the buffer to fill next
            "ring_state": pltpu.SMEM((2 * buffers + 1,), jnp.int32),
        }

    def reset(self) -> None:
        """Mark all buffers of the ring as free."""
        for i in range(2 * self.buffers + 1):
            self.state[i] = i32(0)

    def acquire(self) -> Index:
        """The buffer to fill next, after a wait for the copies that were started from it."""
        slot = self.state[2 * self.buffers]
        self._wait(slot)
        return slot

    def write_back(self, where: Any, rows: Index, columns: Index) -> None:
        """Start to copy the first rows and columns of the buffer that was acquired last to HBM."""
        slot = self.state[2 * self.buffers]

        @pl.when(rows > 0)
        def _() -> None:
            start_all(self.copies(slot, where, rows, columns))

        self.state[slot] = jnp.asarray(rows, jnp.int32)
        self.state[slot + i32(self.buffers)] = jnp.asarray(columns, jnp.int32)
        self.state[2 * self.buffers] = jnp.where(slot == i32(self.buffers - 1), i32(0), slot + i32(1))

    def drain(self) -> None:
        """Wait for all copies in flight."""
        for slot in range(self.buffers):
            self._wait(i32(slot))

    def _wait(self, slot: Index) -> None:
        rows, columns = self.state[slot], self.state[slot + i32(self.buffers)]

        @pl.when(rows > 0)
        def _() -> None:
            wait_for_all(self.copies(slot, None, self.sizes[0] or rows, self.sizes[1] or columns))
