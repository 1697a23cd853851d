"""The entries of the kernel's table in SMEM: one product of two matrices each, in the order of the results."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from trencadis.backends.tpu.indexing import Index, Ref, i32

MATRIX = ("start", "stride", "rows", "columns")  # of a matrix in its flat buffer, in entries
FIELDS = (
    *(f"{name}_{field}" for name in ("lhs", "rhs") for field in MATRIX),
    "start",  # of the result, whose rows follow one another
    "m",
    "n",
    "panels",  # along m
    "steps",  # along k, at least one
    "blocks",  # along n, of 256
    "strip",  # rows that are collected at a time
    "group",
)


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """The fields of all entries, i32[fields * size + cores + 1]; at its end the first entry of each core, and how many.

    A core has the entries from its first one to that of the next core.
    """

    ref: Ref
    size: int
    core: Index = 0
    cores: int = 1

    def field(self, name: str, entry: Index) -> Index:
        """A number of an entry; of the last if there is no such entry."""
        return self.ref[i32(FIELDS.index(name) * self.size) + jnp.minimum(entry, i32(self.size - 1))]

    @property
    def first(self) -> Index:
        """The first entry of this core."""
        return self.ref[i32(len(FIELDS) * self.size) + i32(self.core)]

    @property
    def end(self) -> Index:
        """The entry after the last one of this core."""
        return self.ref[i32(len(FIELDS) * self.size + 1) + i32(self.core)]

    @property
    def entries(self) -> Index:
        """How many entries there are."""
        return self.ref[i32(len(FIELDS) * self.size + self.cores)]
