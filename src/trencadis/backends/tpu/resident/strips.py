"""Strips of the result: which rows are collected next, and where they are in the flat buffer.

A strip is some rows of a panel, and so a contiguous part of the flat result. Two of them are at work: the rows of one
are written, lane by lane, to a flat buffer of float32, while the one before is converted to the dtype of the result.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from trencadis.backends.tpu.indexing import LANES, Index, i32
from trencadis.backends.tpu.resident.sizes import CHUNK, WIDE, Sizes
from trencadis.backends.tpu.resident.table import Table

PIECE = 2048  # entries of the result that are converted together


class Strip(NamedTuple):
    """A strip by its number in an entry."""

    entry: Index
    number: Index


class Strips:
    """The strips of all entries, in order."""

    def __init__(self, table: Table, sizes: Sizes) -> None:
        self.table, self.sizes = table, sizes

    def first_row(self, strip: Strip) -> Index:
        """The first row of a strip."""
        return strip.number * self.table.field("strip", strip.entry)

    def panel(self, strip: Strip) -> Index:
        """The panel that a strip is a part of."""
        return lax.div(self.first_row(strip), i32(self.sizes.rows))

    def rows(self, strip: Strip) -> Index:
        """The rows of a strip."""
        left = self.table.field("m", strip.entry) - self.first_row(strip)
        return jnp.minimum(self.table.field("strip", strip.entry), left)

    def bounds(self, strip: Strip) -> tuple[Index, Index]:
        """Where a strip begins and ends in the flat result."""
        n = self.table.field("n", strip.entry)
        begin = self.table.field("start", strip.entry) + self.first_row(strip) * n
        return begin, begin + self.rows(strip) * n

    def slots(self, strip: Strip) -> tuple[Index, Index]:
        """The parts in which the rows of a strip are written: along the rows, and along n."""
        rows = lax.div(self.rows(strip) + i32(self.sizes.slot_rows - 1), i32(self.sizes.slot_rows))
        return rows, lax.div(self.chunks(strip) + i32(WIDE - 1), i32(WIDE))

    def chunks(self, strip: Strip) -> Index:
        """The chunks of a row."""
        return lax.div(self.table.field("n", strip.entry) + i32(CHUNK * LANES - 1), i32(CHUNK * LANES))

    def pieces(self, strip: Strip) -> Index:
        """The pieces of the flat result that a strip reaches into."""
        begin, end = self.bounds(strip)
        return lax.div(end + i32(PIECE - 1), i32(PIECE)) - lax.div(begin, i32(PIECE))

    def following(self, strip: Strip) -> Strip:
        """The strip after another one."""
        later = strip.number + i32(1)
        done = later * self.table.field("strip", strip.entry) >= self.table.field("m", strip.entry)
        return Strip(jnp.where(done, strip.entry + i32(1), strip.entry), jnp.where(done, i32(0), later))

    def ends_panel(self, strip: Strip) -> Index:
        """Whether a strip is the last of its panel."""
        after = self.following(strip)
        return (after.entry > strip.entry) | (self.panel(after) > self.panel(strip))
