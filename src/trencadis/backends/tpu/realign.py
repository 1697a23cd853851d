"""Rows of an 8-bit dtype that start at any of its sublanes, though copies from HBM start at its native tiles.

A copy starts at a multiple of 32 rows. Were row tiles to start there too, a group would have up to 31 rows of others
above it. A sublane holds four rows: as they are loaded, they are rotated by whole sublanes to the top of the tile. That
takes a selection and a rotation for 4096 numbers, while the MXUs multiply.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from trencadis.backends.prepare import round_up
from trencadis.backends.tpu.indexing import Index, Ref, Value, aligned_ds, i32

SUBLANES = 8  # of a native tile
ROWS_IN_SUBLANE = 4  # of an 8-bit dtype
NATIVE_ROWS = SUBLANES * ROWS_IN_SUBLANE


def native_rows(itemsize: int) -> int:
    """The rows of a native tile of a dtype: of 8 sublanes, which hold one, two or four rows."""
    return NATIVE_ROWS // itemsize


def load_rows(ref: Ref, row: Index, size: int, lead: Index) -> Value:
    """The rows of a buffer [rows, columns] from `row + lead` on, [size, columns].

    `row` is a multiple of 32. `lead` is less than that: a multiple of four, or of the native tile of a wider dtype.
    """
    if ref.dtype.itemsize > 1:
        return ref[aligned_ds(row + lead, size, native_rows(ref.dtype.itemsize)), :]
    height, columns = round_up(size, NATIVE_ROWS), ref.shape[1]
    words = pltpu.bitcast(ref[aligned_ds(row, height + NATIVE_ROWS, NATIVE_ROWS), :], jnp.int32)
    tiles = words.reshape(-1, SUBLANES, columns)
    sublanes = lax.div(lead, i32(ROWS_IN_SUBLANE))
    index = lax.broadcasted_iota(jnp.int32, tiles[1:].shape, 1)
    chosen = jnp.where(index < sublanes, tiles[1:], tiles[:-1])
    rotated = pltpu.roll(chosen, (i32(SUBLANES) - sublanes) & i32(SUBLANES - 1), 1)
    return pltpu.bitcast(rotated.reshape(-1, columns), ref.dtype)[:size]
