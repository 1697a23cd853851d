"""A loop over blocks of rows that replaces owned rows of arrays in place, and clears the others.

XLA on CPUs allocates its temporary arrays anew at every call, and the first write to each page of them takes longer
than an elementwise function of it. An elementwise function of many large arrays therefore overwrites its operands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

BLOCK = 256  # rows, at least: what several arrays of a usual width have in a cache
MOST_BLOCKS = 16  # so that a block of many rows is still divided among threads


def replace_rows(
    function: Callable[..., Sequence[Array]], rows: tuple[Array, Array], arrays: Sequence[Array], *others: Array
) -> list[Array]:
    """The arrays `[m, ...]` with `function(*blocks of arrays, *blocks of others)` in the rows [low, high), and else 0.

    >>> low, high = jnp.int32(1), jnp.int32(3)
    >>> replace_rows(lambda x, y: [x + y], (low, high), [jnp.ones(4)], jnp.arange(4.0))
    [Array([0., 2., 3., 0.], dtype=float32)]
    """
    low, high = rows
    m = arrays[0].shape[0]
    height = min(max(BLOCK, -(-m // MOST_BLOCKS)), m)

    def top_of(i: Array) -> Array:
        return jnp.minimum(i.astype(jnp.int32) * np.int32(height), np.int32(m - height))  # the last block stays inside

    def block(x: Array, i: Array) -> Array:
        return lax.dynamic_slice_in_dim(x, top_of(i), height, allow_negative_indices=False)

    def step(compute: bool, i: Array, state: tuple[list[Array], list[Array]]) -> tuple[list[Array], list[Array]]:
        arrays, old = state
        row = top_of(i) + jnp.arange(height, dtype=jnp.int32)
        new: Sequence[Array] = [jnp.zeros_like(x) for x in old]
        if compute:
            values = function(*old, *(block(x, i) for x in others))
            mine = (row >= low) & (row < high)
            new = [_where_rows(mine, x.astype(zero.dtype), zero) for x, zero in zip(values, new, strict=True)]
        fresh = row >= i.astype(jnp.int32) * np.int32(height)  # the last block skips rows that are done
        arrays = [
            lax.dynamic_update_slice_in_dim(x, _where_rows(fresh, a, b), top_of(i), 0, allow_negative_indices=False)
            for x, a, b in zip(arrays, new, old, strict=True)
        ]
        return arrays, [block(x, i + 1) for x in arrays]

    first, last, blocks = low // height, -(-high // height), np.int32(-(-m // height))
    ranges = (np.int32(0), first, False), (first, last, True), (jnp.maximum(first, last), blocks, False)
    state = list(arrays), [block(x, jnp.int32(0)) for x in arrays]
    for begin, end, compute in ranges:
        state = lax.fori_loop(begin, end, functools.partial(step, compute), state)
    return state[0]


def _where_rows(mine: Array, new: Array, old: Array) -> Array:
    """New rows where they are to be replaced, and else the old ones."""
    return jnp.where(mine.reshape(-1, *(1,) * (old.ndim - 1)), new, old)
