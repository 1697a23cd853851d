"""Rows of tokens in buffers that are sent: which token each row is of, and which row each assignment of a token is.

A buffer has a fixed number of rows, some of which may be empty. Tokens are gathered into it, and results are gathered
from it and summed; one is the transpose of the other, and nothing is scattered.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Num

from trencadis.core.linear import linear
from trencadis.moe.permutation import Permutation, rows_of, sort_by_expert
from trencadis.moe.row_operations import sum_of_rows, take


class SendBuffer(NamedTuple):
    """What each row of a buffer that is sent holds, in both directions; -1 is nothing."""

    permutation: Permutation  # assignments [t, k] sorted by where they go
    row: Int32[Array, " s"]  # the sorted assignment in each row of the buffer
    slot: Int32[Array, " m"]  # the row of the buffer of each sorted assignment


def sorted_buffer(where: Int32[Array, "t k"], places: int, capacity: int | None = None) -> SendBuffer:
    """All assignments sorted by place, those of one place in the order of tokens; the first `capacity` of them."""
    permutation = sort_by_expert(where, places)
    m = permutation.token.shape[0]
    row = jnp.arange(m, dtype=jnp.int32)
    slot = jnp.where(row < jnp.sum(permutation.sizes), row, -1)
    if capacity is None or capacity >= m:
        return SendBuffer(permutation, slot, slot)
    return SendBuffer(permutation, slot[:capacity], jnp.where(row < capacity, slot, -1))


def padded_buffer(where: Int32[Array, "t k"], places: int, each: int) -> SendBuffer:
    """A block of `each` rows for every place, filled from its start by the first assignments to that place."""
    permutation = sort_by_expert(where, places)
    m = permutation.token.shape[0]
    ends = jnp.cumsum(permutation.sizes, dtype=jnp.int32)
    starts = ends - permutation.sizes
    at = jnp.arange(each, dtype=jnp.int32)
    row = jnp.where(at < permutation.sizes[:, None], starts[:, None] + at, -1).reshape(-1)
    order = jnp.arange(m, dtype=jnp.int32)
    place = jnp.sum(order[:, None] >= ends, axis=1, dtype=jnp.int32)  # `places` for assignments to none
    behind = order - take(starts, jnp.minimum(place, places - 1))
    slot = jnp.where((place < places) & (behind < each), place * each + behind, -1)
    return SendBuffer(permutation, row, slot)


def fill(x: Num[Array, "t c"], buffer: SendBuffer) -> Num[Array, "s c"]:
    """The tokens of the rows of a buffer, and 0 in empty rows; its gradient is `collect`."""
    tokens = x.shape[0]
    return linear(lambda known, x: _fill(x, known), lambda known, ct: _collect(ct, known, tokens), buffer, x)


def collect(y: Num[Array, "s c"], buffer: SendBuffer, tokens: int) -> Num[Array, "t c"]:
    """The sum over the rows of each token, in float32, rounded to the dtype of y; its gradient is `fill`."""
    return linear(lambda known, y: _collect(y, known, tokens), lambda known, ct: _fill(ct, known), buffer, y)


def fill_entries(x: Float[Array, "t k"], buffer: SendBuffer) -> Float[Array, " s"]:
    """The entry of each row of a buffer, one for each assignment, and 0 in empty rows."""

    def place(known: SendBuffer, x: Array) -> Array:
        return _taken(x, known.row)

    def unplace(known: SendBuffer, ct: Array) -> Array:
        return _taken(ct, known.slot)

    return linear(place, unplace, buffer, rows_of(x, buffer.permutation))


def _fill(x: Array, buffer: SendBuffer) -> Array:
    token = buffer.permutation.token
    return _taken(x, jnp.where(buffer.row < 0, -1, take(token, jnp.maximum(buffer.row, 0)) if token.size else -1))


def _collect(y: Array, buffer: SendBuffer, tokens: int) -> Array:
    inverse = buffer.permutation.inverse
    slots = take(buffer.slot, inverse).reshape(tokens, inverse.shape[0] // max(tokens, 1))
    return sum_of_rows(y, slots, None, masked=True)


def _taken(x: Array, index: Array) -> Array:
    """The entries of x at an index, and 0 where it is -1."""
    if not x.shape[0]:
        return jnp.zeros((*index.shape, *x.shape[1:]), x.dtype)
    there: Bool[Array, " s"] = index >= 0
    found = take(x, jnp.maximum(index, 0))
    return jnp.where(there.reshape(-1, *(1,) * (x.ndim - 1)), found, jnp.zeros((), x.dtype))
