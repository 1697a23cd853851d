"""NaN of float8_e4m3fn, which some MXUs do not see: they load it as a float8 that has a number in its place."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from trencadis.backends.tpu.columns import LANES

ALL = np.int32(0x7F7F7F7F)  # four bytes of NaN, without their signs
ONES = np.int32(0x01010101)
TOPS = np.int32(-0x7F7F7F80)  # 0x80808080
WORDS = 8  # rows of 32 bits that are stored together


def marks(tile: Any, summed: int, turned: bool) -> Any:
    """NaN for what has one along the axis that is summed, else 0: float32 `[free, 1]`, or `[1, free]` if turned.

    Four bytes are looked at at a time: only the 127 of a NaN has its highest bit set once 1 is added to it.
    """
    words = pltpu.bitcast(tile, jnp.int32)  # four rows in one
    found = ((words & ALL) + ONES) & TOPS
    if summed == 0:
        some = jnp.max(_lanes_of_words(found), axis=0, keepdims=True)  # [1, free]
        mark = jnp.where(some > 0, np.float32(np.nan), np.float32(0))
        return mark if turned else jnp.broadcast_to(mark, (LANES, mark.shape[1])).T[:, :1]
    folded = _any([found[:, at : at + LANES] for at in range(0, found.shape[1], LANES)])
    rows = jnp.abs(pltpu.bitcast(folded, jnp.int8).astype(jnp.float32))  # [free, 128]
    mark = jnp.where(jnp.max(rows, axis=1, keepdims=True) > 0, np.float32(np.nan), np.float32(0))
    return jnp.broadcast_to(mark, rows.shape).T[:1, :] if turned else mark


def _lanes_of_words(found: Any) -> Any:
    folded = _any([found[at : at + WORDS] for at in range(0, found.shape[0], WORDS)])
    return (folded != 0).astype(jnp.float32)


def _any(parts: list[Any]) -> Any:
    """The bits that any has, in pairs, so that none has to wait for all before it."""
    while len(parts) > 1:
        pairs = [a | b for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[len(pairs) * 2 :]
    return parts[0]
