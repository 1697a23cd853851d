"""How rows of a flat buffer, which start at any lane, become rows of blocks of 128 lanes in VMEM.

A segment is some rows of a matrix, which are contiguous in the flat buffer. They are copied to VMEM as they are, and
aligned chunk by chunk: eight vectors of 128 words of each row. A word is one entry of 32 bits or two of 16: lane l of
vectors 2 i and 2 i + 1 of the flat buffer.

    spread      each row's eight vectors are stored apart, so that the same vector of eight rows is one register
    rotated     each row of that register by its own number of lanes, with a gather
    merged      with the vector before it, by shifts: a lane takes its entries from one of the two or from both
    paired      of 16-bit entries: words of two rows become words of two vectors, as a TPU stores matrices

Vector i is complete when vector i + 1 is there, so a chunk has the last vector of the chunk before and all of its own
but the last. While products are computed, what was aligned is staged, and copied to the blocks after them.

A segment in blocks is one vector of lanes of all of its rows after the other; segments follow one another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from trencadis.backends.tpu.indexing import LANES, Index, Ref, Value, aligned_ds, i32
from trencadis.backends.tpu.ragged.flat import TILE
from trencadis.backends.tpu.resident.sizes import CHUNK, COLUMNS, PAIR, Sizes
from trencadis.backends.tpu.resident.table import MATRIX, Table

APART = (
    PAIR + 1
)  # rows from one vector of a pair of registers to the next; odd, since memory has an even number of banks
MARGIN = 4  # tiles: a segment starts within one, and chunks of its last row go past its end
Put = Callable[[int, int, Value], None]
LOW, HIGH = np.int32(0xFFFF), np.int32(-0x10000)


def over(x: Index, unit: int) -> Index:
    """How many units, whose size is a power of two, a number takes that is not negative."""
    return (x + i32(unit - 1)) >> i32(unit.bit_length() - 1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """lhs or rhs: its flat buffer, and how its blocks are ordered.

    A streamed operand, whose panels are used one after the other, has few of them in VMEM.
    """

    name: str
    dtype: np.dtype[Any]
    length: int  # entries of the flat buffer
    along_k: str  # "rows" or "lanes"
    streamed: bool
    sizes: Sizes

    @property
    def packing(self) -> int:
        """The entries of a word."""
        return 4 // self.dtype.itemsize

    @property
    def height(self) -> int:
        """The rows of a product, if its lanes are along k."""
        return self.sizes.rows if self.streamed else COLUMNS

    @property
    def product(self) -> tuple[int, int]:
        """The rows and the lanes of a product's blocks."""
        return (self.sizes.depth, COLUMNS) if self.along_k == "rows" else (self.height, self.sizes.depth)

    @property
    def tile(self) -> int:
        """The rows of words of a product's blocks."""
        height, width = self.product
        return height * width // (LANES * self.packing)

    @property
    def words(self) -> int:
        """The rows of words of a segment in one vector of lanes."""
        return self.sizes.rows // self.packing

    @property
    def base(self) -> int:
        """Where the first blocks of the operand are: those of lhs follow those of rhs."""
        return self.sizes.rhs if self.name == "lhs" else 0

    def field(self, table: Table, name: str, entry: Index) -> Index:
        """A number of the operand's matrix of an entry."""
        return table.field(f"{self.name}_{name}", entry)

    def outer(self, table: Table, entry: Index) -> Index:
        """The products along the dimension that is not k."""
        return table.field("panels" if self.name == "lhs" else "blocks", entry)

    def vectors(self, table: Table, entry: Index) -> Index:
        """The vectors of lanes of a matrix, with padding."""
        if self.along_k == "rows":
            return self.outer(table, entry) * i32(COLUMNS // LANES)
        return table.field("steps", entry) * i32(self.sizes.depth // LANES)

    def kept(self, table: Table, entry: Index) -> Index:
        """The columns before those that have to be zeros: along k, none of the padding may be left as it is."""
        if self.along_k == "rows":
            return self.vectors(table, entry) * i32(LANES)
        return self.field(table, "columns", entry)

    def chunks(self, table: Table, entry: Index) -> Index:
        """The chunks of a row; the last vector of words is complete with the vector after it."""
        return over(self.field(table, "columns", entry) + i32(LANES * self.packing), CHUNK * LANES * self.packing)

    def segments(self, table: Table, entry: Index) -> Index:
        """The segments of a matrix, with those that are only padding along k."""
        if self.along_k == "rows":
            return table.field("steps", entry) * i32(self.sizes.depth // self.sizes.rows)
        return over(self.field(table, "rows", entry), self.sizes.rows)

    def fetched(self, table: Table, entry: Index) -> Index:
        """The segments of a matrix that have entries."""
        rows = over(self.field(table, "rows", entry), self.sizes.rows)
        return jnp.where(self.field(table, "columns", entry) > i32(0), rows, i32(0))

    def piece(self, table: Table, entry: Index) -> Index:
        """The rows of words of a matrix, or of a panel of a streamed one."""
        steps = table.field("steps", entry) * i32(self.tile)
        return steps if self.streamed else steps * self.outer(table, entry)

    def room(self, table: Table, entry: Index) -> Index:
        """The tiles of a segment in VMEM: room for all of its rows, also for those that a matrix does not have."""
        entries = self.field(table, "stride", entry) * i32(self.sizes.rows)
        return over(entries, TILE) + i32(MARGIN)

    def slab(self, table: Table, entry: Index) -> Index:
        """The rows of words of a segment."""
        return self.vectors(table, entry) * i32(self.words)

    def apart(self, table: Table, entry: Index) -> Index:
        """The rows of words from one segment of a piece to the next."""
        return i32(0) if self.streamed else self.slab(table, entry)

    def number(self, table: Table, name: str, entry: Index) -> Index:
        """One of the numbers of a matrix, by its name."""
        return self.field(table, name, entry) if name in MATRIX else getattr(self, name)(table, entry)


def spread_scratch(sizes: Sizes) -> Any:
    """The memory for the words of a segment that are spread."""
    return pltpu.VMEM((sizes.rows // PAIR * CHUNK * APART, LANES), jnp.int32)


def staged_scratch(sizes: Sizes) -> Any:
    """The memory for what was aligned of a chunk: a vector of half of the rows of the segment after the other."""
    return pltpu.VMEM((2 * CHUNK, sizes.rows // 2, LANES), jnp.int32)


def carry_scratch(sizes: Sizes) -> Any:
    """The memory for the last vector of words of a chunk, which the next chunk needs: those of all rows, rotated."""
    return pltpu.VMEM((sizes.rows, LANES), jnp.int32)


def align_pair(vmem: dict[str, Ref], packing: int, pair: int, rows: tuple[Index, Index, Index], put: Put) -> None:
    """Align eight vectors of words of 16 rows: `rows` are where the first starts, their stride, and how many are valid.

    Rows past the valid ones are 0. `put(vector, half, words)` takes a vector of eight of the rows: of 16-bit entries
    the even or the odd ones, else the first or the last.
    """
    raw, spread, carry = vmem["raw"], vmem["spread"], vmem["carry"]
    (at, stride, valid), span = rows, LANES * packing
    first, place = pair * CHUNK * APART, at
    for r in range(PAIR):
        words = raw[pl.ds(pl.multiple_of(place & i32(-span), span), CHUNK * span)].reshape(CHUNK * packing, LANES)
        row = (r % 2) * CHUNK + r // 2 if packing == 2 else r
        spread[pl.ds(first + row, CHUNK, APART), :] = pltpu.bitcast(words, jnp.int32)
        place = place + stride
    for h in range(2):
        index, down, up = _rotation(packing, h, pair, at, stride, valid)
        kept = pl.ds(pair * PAIR + h * CHUNK, CHUNK)
        last = carry[kept, :]
        for v in range(CHUNK):
            word = _rotated(spread[pl.ds(first + v * APART + h * CHUNK, CHUNK), :], index)
            put(v, h, lax.shift_right_logical(last, down) | lax.shift_left(word, up))
            last = word
        carry[kept, :] = last


def paired(even: Value, odd: Value) -> tuple[Value, Value]:
    """Words of entries of two vectors of a row, of even and of odd rows, as words of two rows, of both vectors."""
    first = (even & LOW) | lax.shift_left(odd, i32(16))
    return first, lax.shift_right_logical(even, i32(16)) | (odd & HIGH)


def _rotated(words: Value, index: Value) -> Value:
    return jnp.take_along_axis(words, index, axis=1, mode="promise_in_bounds")


def _rotation(packing: int, half: int, pair: int, at: Index, stride: Index, valid: Index) -> tuple[Value, Value, Value]:
    """The lane that each lane of eight rows comes from, and the shifts of a vector of words and of the next."""
    span, bits = LANES * packing, 32 // packing
    lane, sublane = (lax.broadcasted_iota(jnp.int32, (CHUNK, LANES), axis) for axis in (1, 0))
    row = sublane * i32(2) + i32(half) if packing == 2 else sublane + i32(half * CHUNK)
    offset = ((row * stride + at) & i32(span - 1)) + lane
    down = (offset >> i32(LANES.bit_length() - 1)) * i32(bits)
    up = i32(32) - down
    there = row < valid - i32(PAIR * pair)
    down, up = jnp.where(there, down, i32(32)), jnp.where(there, up, i32(32))
    return offset & i32(LANES - 1), down, up


def commit(operand: Operand, staged: Ref, blocks: Ref, place: Index, vectors: tuple[Index, Index]) -> None:
    """Copy staged vectors of words of a chunk, from one to before another, to blocks: the first of all to `place`."""
    words, packing = operand.words, operand.packing

    def copy(v: Index, none: None) -> None:
        at = place + v * i32(words * packing)
        halves = [staged[2 * v + h] for h in range(2)]
        if packing == 2:
            for i, value in enumerate(paired(*halves)):
                blocks[aligned_ds(at + i32(i * words), words, CHUNK), :] = value
            return
        for pair in range(operand.sizes.rows // PAIR):
            for h, value in enumerate(halves):
                to = aligned_ds(at + i32(pair * PAIR + h * CHUNK), CHUNK, CHUNK)
                blocks[to, :] = value[pair * CHUNK : (pair + 1) * CHUNK]

    lax.fori_loop(*vectors, copy, None)


def clear(blocks: Ref, words: int, place: Index, first: Index, vectors: Index) -> None:
    """Fill the lanes of a segment from a column on with zeros, up to its last vector."""
    lane = lax.broadcasted_iota(jnp.int32, (words, LANES), 1)

    def fill(i: Index, none: None) -> None:
        where = aligned_ds(place + i * i32(words), words, CHUNK)
        blocks[where, :] = jnp.where(lane < first - i * i32(LANES), blocks[where, :], i32(0))

    lax.fori_loop(first >> i32(LANES.bit_length() - 1), vectors, fill, None)
