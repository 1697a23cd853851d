"""The permutation of tokens into rows sorted by expert, and back.

    experts of two tokens, k = 2    [[1, 0], [2, 1]]
    row                              0  1  2  3
    token of each row                0  0  1  1       sorted by expert 0 1 1 2
    row of each assignment           [[1, 0], [3, 2]]

A row is gathered by the token of the row; a token's result, and the gradient of a token, is gathered from its k rows and
summed. Nothing is scattered, so that sums have a fixed order.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Integer, Num

from trencadis.core.linear import linear


class Permutation(NamedTuple):
    """Assignments of tokens to experts, sorted by expert; those to no expert come last."""

    token: Int32[Array, " rows"]  # the token of each row
    inverse: Int32[Array, " rows"]  # the row of each assignment: of the k of token 0, then of the k of token 1, ...
    sizes: Int32[Array, " e"]  # the number of rows of each expert


def sort_by_expert(experts: Integer[Array, "t k"], num_experts: int) -> Permutation:
    """The permutation that sorts assignments `[t, k]` by expert; those of an expert stay in the order of tokens.

    >>> token, inverse, sizes = sort_by_expert(jnp.array([[1, 0], [2, 1]]), 3)
    >>> token.tolist(), inverse.tolist(), sizes.tolist()
    ([0, 0, 1, 1], [1, 0, 3, 2], [1, 2, 1])
    """
    experts = jnp.asarray(experts)
    if experts.ndim != 2 or not jnp.issubdtype(experts.dtype, jnp.integer):
        raise ValueError(f"experts: want integers of shape [t, k]; got {experts.dtype} of shape {experts.shape}")
    t, k = experts.shape
    ids = experts.reshape(t * k).astype(jnp.int32)
    there = (ids >= 0) & (ids < num_experts)
    ids = jnp.where(there, ids, num_experts)
    row = jnp.arange(t * k, dtype=jnp.int32)
    _, order = lax.sort((ids, row), num_keys=1, is_stable=True)
    inverse = jnp.zeros_like(order).at[order].set(row, unique_indices=True, mode="promise_in_bounds")
    sizes = jnp.sum(ids[:, None] == jnp.arange(num_experts, dtype=jnp.int32), axis=0, dtype=jnp.int32)
    return Permutation(order // k, inverse, sizes)


def permute(x: Num[Array, "t d"], permutation: Permutation) -> Num[Array, "rows d"]:
    """The rows `[t * k, d]` of the tokens `[t, d]`, sorted by expert. Its gradient sums k rows in float32.

    >>> permute(jnp.array([[1.0], [2.0]]), sort_by_expert(jnp.array([[1, 0], [2, 1]]), 3)).ravel()
    Array([1., 1., 2., 2.], dtype=float32)
    """
    x = jnp.asarray(x)
    if x.ndim != 2 or (permutation.token.shape[0] % x.shape[0] if x.shape[0] else permutation.token.shape[0]):
        raise ValueError(
            f"x: want [t, d], where t divides the {permutation.token.shape[0]} assignments of the permutation; "
            f"got {x.shape}"
        )
    tokens = x.shape[0]

    def gather(permutation: Permutation, x: Array) -> Array:
        return _take(x, permutation.token)

    def gather_sum(permutation: Permutation, ct: Array) -> Array:
        return sum_rows(ct, permutation, tokens)

    return linear(gather, gather_sum, permutation, x)


def sum_rows(y: Num[Array, "rows d"], permutation: Permutation, tokens: int) -> Num[Array, "t d"]:
    """The sum `[tokens, d]` of the rows of each token, in float32, rounded to the dtype of y; the transpose of permute.

    >>> sum_rows(jnp.arange(4.0)[:, None], sort_by_expert(jnp.array([[1, 0], [2, 1]]), 3), 2).ravel()
    Array([1., 5.], dtype=float32)
    """

    def gather_sum(permutation: Permutation, y: Array) -> Array:
        return _sum(y, _by_token(permutation, tokens), None)

    def gather(permutation: Permutation, ct: Array) -> Array:
        return permute(ct, permutation)

    return linear(gather_sum, gather, permutation, jnp.asarray(y))


def combine(y: Num[Array, "rows d"], weights: Float[Array, "t k"], permutation: Permutation) -> Num[Array, "t d"]:
    """The weighted sum `[t, d]` of the k rows of each token, in float32, rounded to the dtype of y.

    Rows of no expert count as 0, whatever they hold. Its gradients in y and weights are exact.

    >>> combine(jnp.arange(4.0)[:, None], jnp.ones((2, 2)), sort_by_expert(jnp.array([[1, 0], [2, 1]]), 3)).ravel()
    Array([1., 5.], dtype=float32)
    """
    y, weights = jnp.asarray(y), jnp.asarray(weights)
    rows = permutation.token.shape[0]
    if y.ndim != 2 or y.shape[0] != rows:
        raise ValueError(f"y: want [rows, d] with the {rows} rows of the permutation; got {y.shape}")
    if weights.ndim != 2 or weights.size != rows:
        raise ValueError(f"weights: want [t, k] with one weight for each of {rows} assignments; got {weights.shape}")
    mine = jnp.arange(rows, dtype=jnp.int32)[:, None] < jnp.sum(permutation.sizes)
    return weighted_sum(jnp.where(mine, y, 0), weights, permutation)


def weighted_sum(y: Num[Array, "rows d"], weights: Float[Array, "t k"], permutation: Permutation) -> Num[Array, "t d"]:
    """`combine` of rows that are 0 where no expert owns them."""
    tokens = weights.shape[0]

    def gather_sum(known: tuple[Permutation, Array], y: Array) -> Array:
        permutation, weights = known
        return _sum(y, _by_token(permutation, tokens), weights)

    def gather(known: tuple[Permutation, Array], ct: Array) -> Array:
        permutation, weights = known
        scale = rows_of(weights, permutation).astype(_wide(ct))[:, None]
        return (permute(ct, permutation).astype(_wide(ct)) * scale).astype(ct.dtype)

    return linear(gather_sum, gather, (permutation, weights), y)


def rows_of(x: Array, permutation: Permutation) -> Array:
    """The entry of x [t, k] that belongs to each row: [rows]. Its gradient is a gather too."""
    shape = x.shape

    def sort(permutation: Permutation, x: Array) -> Array:
        return _take(x.reshape(-1), _assignment(permutation, shape[0]))

    def unsort(permutation: Permutation, ct: Array) -> Array:
        return assignments_of(ct, permutation, shape[0])

    return linear(sort, unsort, permutation, x)


def assignments_of(x: Array, permutation: Permutation, tokens: int) -> Array:
    """The entry of x [rows] that belongs to each assignment: [tokens, k]; the inverse of `rows_of`."""

    def unsort(permutation: Permutation, x: Array) -> Array:
        return _take(x, permutation.inverse).reshape(tokens, -1)

    def sort(permutation: Permutation, ct: Array) -> Array:
        return rows_of(ct, permutation)

    return linear(unsort, sort, permutation, x)


def _take(x: Array, index: Array) -> Array:
    """The rows of x at an index, all of which are there."""
    return x.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _wide(x: Array) -> jnp.dtype:
    """The dtype in which entries of x are summed."""
    return jnp.promote_types(x.dtype, jnp.float32)


def _by_token(permutation: Permutation, tokens: int) -> Array:
    """The rows of each token: i32[t, k]."""
    return permutation.inverse.reshape(tokens, -1) if tokens else permutation.inverse.reshape(0, 0)


def _sum(y: Array, rows: Array, weights: Array | None) -> Array:
    """The sum [t, d] of the given rows [t, k] of y, times weights [t, k] if there are some.

    A sum of k gathers is one loop for XLA, whereas it would store a gather of [t, k, d].
    """
    total = jnp.zeros((rows.shape[0], y.shape[1]), _wide(y))
    for j in range(rows.shape[1]):
        each = _take(y, rows[:, j]).astype(total.dtype)
        total = total + (each if weights is None else each * weights[:, j, None].astype(total.dtype))
    return total.astype(y.dtype)


def _assignment(permutation: Permutation, tokens: int) -> Array:
    """The assignment, t * k + j, of each row: that of its token whose row it is."""
    rows = _by_token(permutation, tokens)
    k = rows.shape[1]
    here = _take(rows, permutation.token) == jnp.arange(permutation.token.shape[0], dtype=jnp.int32)[:, None]
    return permutation.token * k + jnp.argmax(here, axis=1).astype(jnp.int32)
