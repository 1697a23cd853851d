"""NaNs of float8_e4m3fn for MXUs that drop them: these load it as a float8 format that has a number in their place."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from trencadis.backends.tpu.indexing import LANES, Value

NANS = np.int32(0x7F7F7F7F)  # four bytes of NaN, without their sign bits
ONES = np.int32(0x01010101)
SIGNS = np.int32(-0x7F7F7F80)  # 0x80808080
SUBLANES = 8  # rows of a native tile of 32-bit words


def nan_marks(tile: Value, contracted: int, as_row: bool) -> Value:
    """NaN where a row or column has one along the contracted axis, else 0: float32 `[free, 1]`, or `[1, free]` as row.

    Four bytes are tested at a time: only the 127 of a NaN has its highest bit set once 1 is added to it.
    """
    words = pltpu.bitcast(tile, jnp.int32)  # four rows in one
    found = ((words & NANS) + ONES) & SIGNS
    if contracted == 0:
        some = jnp.max(_any_sublane(found), axis=0, keepdims=True)  # [1, free]
        mark = jnp.where(some > 0, np.float32(np.nan), np.float32(0))
        return mark if as_row else jnp.broadcast_to(mark, (LANES, mark.shape[1])).T[:, :1]
    folded = _any([found[:, at : at + LANES] for at in range(0, found.shape[1], LANES)])
    rows = jnp.abs(pltpu.bitcast(folded, jnp.int8).astype(jnp.float32))  # [free, 128]
    mark = jnp.where(jnp.max(rows, axis=1, keepdims=True) > 0, np.float32(np.nan), np.float32(0))
    return jnp.broadcast_to(mark, rows.shape).T[:1, :] if as_row else mark


def _any_sublane(found: Value) -> Value:
    """A float32 [8, free] that is 1 where a word of the same sublane and lane in any native tile is not 0."""
    folded = _any([found[at : at + SUBLANES] for at in range(0, found.shape[0], SUBLANES)])
    return (folded != 0).astype(jnp.float32)


def _any(parts: list[Value]) -> Value:
    """The bitwise or of all parts, as a tree, so that no operation has to wait for all before it."""
    while len(parts) > 1:
        pairs = [a | b for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[len(pairs) * 2 :]
    return parts[0]
