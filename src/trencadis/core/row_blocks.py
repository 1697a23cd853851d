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
MOST_BLOCKS = 64  # so that a block of many rows is still divided among threads


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

    def block(x: Array, top: Array) -> Array:
        return lax.dynamic_slice_in_dim(x, top, height, allow_negative_indices=False)

    def step(compute: bool, i: Array, arrays: list[Array]) -> list[Array]:
        start = i.astype(jnp.int32) * np.int32(height)
        top = jnp.minimum(start, np.int32(m - height))  # the last block stays inside, and skips rows that are done
        row = top + jnp.arange(height, dtype=jnp.int32)
        old = [block(x, top) for x in arrays]
        new: Sequence[Array] = [jnp.zeros_like(x) for x in old]
        if compute:
            values = _apart(function, high, old, [block(x, top) for x in others])
            mine = (row >= low) & (row < high)
            new = [_where_rows(mine, x, zero) for x, zero in zip(values, new, strict=True)]
        return [
            lax.dynamic_update_slice_in_dim(x, _where_rows(row >= start, a, b), top, 0, allow_negative_indices=False)
            for x, a, b in zip(arrays, new, old, strict=True)
        ]

    first, last, blocks = low // height, -(-high // height), np.int32(-(-m // height))
    ranges = (np.int32(0), first, False), (first, last, True), (jnp.maximum(first, last), blocks, False)
    found = list(arrays)
    for begin, end, compute in ranges:
        found = lax.fori_loop(begin, end, functools.partial(step, compute), found)
    return found


def _apart(
    function: Callable[..., Sequence[Array]], high: Array, blocks: list[Array], others: Sequence[Array]
) -> list[Array]:
    """`function(*blocks, *others)` by a loop with one iteration, since `high`, the end of the rows, is above 0.

    XLA stores what enters a loop. Otherwise it reads each block where it is, in arrays that others of the results were
    written to by then, and so copies all of these arrays in every iteration of the loop over blocks.
    """

    def once(_: Array, blocks: list[Array]) -> list[Array]:
        return [x.astype(old.dtype) for x, old in zip(function(*blocks, *others), blocks, strict=True)]

    return lax.fori_loop(np.int32(0), jnp.minimum(high, np.int32(1)), once, blocks)


def _where_rows(mine: Array, new: Array, old: Array) -> Array:
    """New rows where they are to be replaced, and else the old ones."""
    return jnp.where(mine.reshape(-1, *(1,) * (old.ndim - 1)), new, old)
