"""Where the entries of two cores meet: a piece of the flat result that has entries of both.

A copy to HBM moves whole pieces, and cores do not wait for each other. So the core before writes the piece, and the
other one an array of its own, from which XLA takes what follows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from trencadis.backends.prepare import round_up
from trencadis.backends.tpu.indexing import Index, i32
from trencadis.backends.tpu.ragged.flat import TILE
from trencadis.backends.tpu.resident.epilogue import Epilogue
from trencadis.backends.tpu.resident.sizes import Sizes
from trencadis.backends.tpu.resident.strips import PIECE
from trencadis.backends.tpu.resident.table import FIELDS, Table


def results(epilogue: Epilogue, sizes: Sizes) -> dict[str, jax.ShapeDtypeStruct]:
    """The array of pieces, one for each core, as a result of the kernel by name; none for one core."""
    if sizes.cores == 1:
        return {}
    return {"seam": jax.ShapeDtypeStruct((sizes.cores * PIECE,), epilogue.dtype)}


def begin(table: Table, length: int) -> Index:
    """The entry of the flat result at which this core begins; its length for a core that has nothing to compute."""
    return jnp.where(table.first < table.end, table.field("start", table.first), i32(length))


def limit(table: Table, length: int) -> Index:
    """The end of the pieces that this core fills with zeros: that of the piece in which the next core begins."""
    following = (table.field("start", table.end) + i32(PIECE - 1)) & i32(-PIECE)
    return jnp.where(table.end < table.entries, following, i32(round_up(length, TILE)))


def merged(out: jax.Array, pieces: jax.Array, *, table: jax.Array, entries: int) -> jax.Array:
    """The flat result with what each core but the first wrote to a piece of its own; `table` is that of all entries."""
    length = out.shape[0]
    for core in range(1, pieces.shape[0] // PIECE):
        first, end = (table[len(FIELDS) * entries + core + i] for i in range(2))
        starts = lax.slice(table, (FIELDS.index("start") * entries,), ((FIELDS.index("start") + 1) * entries,))
        start = starts[jnp.minimum(first, np.int32(entries - 1))]
        piece = start & np.int32(-PIECE)
        at = jnp.minimum(piece, np.int32(length - PIECE))  # of a piece that the end of the result cuts off
        mine = jnp.pad(lax.slice(pieces, (core * PIECE,), ((core + 1) * PIECE,)), (PIECE, 0))
        mine = lax.dynamic_slice(mine, (at - piece + np.int32(PIECE),), (PIECE,))
        index = at + lax.iota(jnp.int32, PIECE)
        old = lax.dynamic_slice(out, (at,), (PIECE,))
        new = jnp.where((first < end) & (index >= start), mine, old)
        out = lax.dynamic_update_slice(out, new, (at,))
    return out
