"""The permutation of tokens into rows sorted by expert, and back.

    experts of two tokens, k = 2    [[1, 0], [2, 1]]
    row                              0  1  2  3
    token of each row                0  0  1  1       sorted by expert 0 1 1 2
    row of each assignment           [[1, 0], [3, 2]]

A row is gathered by the token of the row; a token's result, and the gradient of a token, is gathered from its k rows
and summed. Nothing is scattered, so that sums have a fixed order.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Integer, Num

from trencadis.core import arguments, operation
from trencadis.core.jax_compat import exportable_tuple
from trencadis.core.linear import linear
from trencadis.moe.row_operations import GatherEntries, SortByExpert, SpreadEntries, SpreadRows, sum_of_rows


@exportable_tuple
class Permutation(NamedTuple):
    """Assignments of tokens to experts, sorted by expert; those to no expert come last.

    >>> permutation = sort_by_expert(jnp.array([[1, 0], [2, 3]]), 3)  # 3 is no expert
    >>> permutation.token.tolist(), permutation.sizes.tolist()
    ([0, 0, 1, 1], [1, 1, 1])
    """

    token: Int32[Array, " rows"]  # the token of each row
    inverse: Int32[Array, " rows"]  # the row of each assignment: of the k of token 0, then of the k of token 1, ...
    sizes: Int32[Array, " e"]  # the number of rows of each expert


def sort_by_expert(experts: Integer[Array, "t k"], num_experts: int) -> Permutation:
    """The permutation that sorts assignments `[t, k]` by expert; those of an expert stay in the order of tokens.

    >>> token, inverse, sizes = sort_by_expert(jnp.array([[1, 0], [2, 1]]), 3)
    >>> token.tolist(), inverse.tolist(), sizes.tolist()
    ([0, 0, 1, 1], [1, 0, 3, 2], [1, 2, 1])
    """
    ids = ids_of(jnp.asarray(experts), num_experts)
    arguments.check_static("experts", ids)
    return Permutation(*operation.run(SortByExpert(num_experts), ids))


def ids_of(experts: Integer[Array, "t k"], num_experts: int) -> Int32[Array, "t k"]:
    """Ids of experts in 32 bits, which hold `num_experts`, too: no expert, also for ids that do not fit."""
    if experts.ndim != 2 or not jnp.issubdtype(experts.dtype, jnp.integer):
        raise ValueError(f"experts: want integers of shape [t, k]; got {experts.dtype} of shape {experts.shape}")
    if jnp.iinfo(experts.dtype).max > jnp.iinfo(jnp.int32).max:
        experts = jnp.where((experts >= 0) & (experts < num_experts), experts, num_experts)
    return experts.astype(jnp.int32)


Owned: TypeAlias = tuple[Array, Array] | None  # the first row that an expert owns and the end of them; None: all are


def permute(x: Num[Array, "t d"], permutation: Permutation) -> Num[Array, "rows d"]:
    """The rows `[t * k, d]` of the tokens `[t, d]`, sorted by expert. Its gradient sums k rows in float32.

    >>> permute(jnp.array([[1.0], [2.0]]), sort_by_expert(jnp.array([[1, 0], [2, 1]]), 3)).ravel()
    Array([1., 1., 2., 2.], dtype=float32)
    """
    _check(permutation)
    x = jnp.asarray(x)
    if x.ndim != 2 or (permutation.token.shape[0] % x.shape[0] if x.shape[0] else permutation.token.shape[0]):
        raise ValueError(
            f"x: want [t, d], where t divides the {permutation.token.shape[0]} assignments of the permutation; "
            f"got {x.shape}"
        )
    tokens = x.shape[0]

    def gather(permutation: Permutation, x: Array) -> Array:
        return _spread(x, permutation)

    def gather_sum(permutation: Permutation, ct: Array) -> Array:
        return sum_rows(ct, permutation, tokens)

    return linear(gather, gather_sum, permutation, x)


def _check(permutation: object) -> None:
    arguments.check_type("permutation", permutation, Permutation, "what moe.sort_by_expert returns")


def rows_of_tokens(x: Array, token: Array, inverse: Array) -> Array:
    """`permute` by the token of each row and the inverse of the permutation: what a product that gathers rows needs."""
    return permute(x, Permutation(token, inverse, sizes=jnp.zeros((0,), jnp.int32)))


def sum_rows(y: Num[Array, "rows d"], permutation: Permutation, tokens: int, owned: Owned = None) -> Num[Array, "t d"]:
    """The sum `[tokens, d]` of the rows of each token, in float32, rounded to the dtype of y; the transpose of permute.

    Rows that are not owned are 0, or count as that.

    >>> sum_rows(jnp.arange(4.0)[:, None], sort_by_expert(jnp.array([[1, 0], [2, 1]]), 3), 2).ravel()
    Array([1., 5.], dtype=float32)
    """

    def gather_sum(known: tuple[Permutation, Owned], y: Array) -> Array:
        rows, masked = _by_token(known[0], tokens), known[1] is not None
        return sum_of_rows(y, _masked(rows, known[1]), None, masked=masked)

    def gather(known: tuple[Permutation, Owned], ct: Array) -> Array:
        return _where_owned(permute(ct, known[0]), known[1])

    return linear(gather_sum, gather, (permutation, owned), jnp.asarray(y))


def _masked(rows: Array, owned: Owned) -> Array:
    """The rows of tokens, and -1 for those that are not owned."""
    return rows if owned is None else jnp.where((rows >= owned[0]) & (rows < owned[1]), rows, -1)


def _where_owned(rows: Array, owned: Owned) -> Array:
    """The rows [m, d], and 0 for those that are not owned."""
    if owned is None:
        return rows
    return jnp.where(owned_mask(rows.shape[0], owned), rows, 0)


def owned_mask(rows: int, owned: tuple[Array, Array]) -> Array:
    """The mask [rows, 1] of the rows that are owned."""
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    return (row >= owned[0]) & (row < owned[1])


def combine(y: Num[Array, "rows d"], weights: Float[Array, "t k"], permutation: Permutation) -> Num[Array, "t d"]:
    """The weighted sum `[t, d]` of the k rows of each token, in float32, rounded to the dtype of y.

    Rows of no expert count as 0, whatever they hold. Its gradients in y and weights are exact.

    >>> combine(jnp.arange(4.0)[:, None], jnp.ones((2, 2)), sort_by_expert(jnp.array([[1, 0], [2, 1]]), 3)).ravel()
    Array([1., 5.], dtype=float32)
    """
    _check(permutation)
    y, weights = jnp.asarray(y), jnp.asarray(weights)
    rows = permutation.token.shape[0]
    if y.ndim != 2 or y.shape[0] != rows:
        raise ValueError(f"y: want [rows, d] with the {rows} rows of the permutation; got {y.shape}")
    if weights.ndim != 2 or weights.size != rows:
        raise ValueError(f"weights: want [t, k] with one weight for each of {rows} assignments; got {weights.shape}")
    if rows == 0:
        return jnp.zeros((weights.shape[0], y.shape[1]), y.dtype)
    return weighted_sum(y, weights, permutation, owned=(jnp.int32(0), jnp.sum(permutation.sizes)))


def weighted_sum(
    y: Num[Array, "rows d"], weights: Float[Array, "t k"], permutation: Permutation, owned: Owned = None
) -> Num[Array, "t d"]:
    """`combine` of rows that are 0 where no expert owns them, or of which only those that are owned count."""
    tokens = weights.shape[0]

    def gather_sum(known: tuple[Permutation, Array, Owned], y: Array) -> Array:
        permutation, weights, owned = known
        rows = _masked(_by_token(permutation, tokens), owned)
        return sum_of_rows(y, rows, weights, masked=owned is not None)

    def gather(known: tuple[Permutation, Array, Owned], ct: Array) -> Array:
        permutation, weights, owned = known
        return _where_owned(_spread(ct, permutation, weights), owned)

    return linear(gather_sum, gather, (permutation, weights, owned), y)


def rows_of(x: Array, permutation: Permutation) -> Array:
    """The entry of x [t, k] that belongs to each row: [rows]. Its gradient is a gather too."""
    tokens = x.shape[0]

    def sort(permutation: Permutation, x: Array) -> Array:
        rows = _by_token(permutation, tokens)
        return operation.run(SpreadEntries(), x, permutation.token, rows)[0]

    def unsort(permutation: Permutation, ct: Array) -> Array:
        return assignments_of(ct, permutation, tokens)

    return linear(sort, unsort, permutation, x)


def assignments_of(x: Array, permutation: Permutation, tokens: int) -> Array:
    """The entry of x [rows] that belongs to each assignment: [tokens, k]; the inverse of `rows_of`."""

    def unsort(permutation: Permutation, x: Array) -> Array:
        return operation.run(GatherEntries(), x, _by_token(permutation, tokens))[0]

    def sort(permutation: Permutation, ct: Array) -> Array:
        return rows_of(ct, permutation)

    return linear(unsort, sort, permutation, x)


def _by_token(permutation: Permutation, tokens: int) -> Array:
    """The rows of each token: i32[t, k]."""
    return permutation.inverse.reshape(tokens, -1) if tokens else permutation.inverse.reshape(0, 0)


def _spread(x: Array, permutation: Permutation, *weights: Array) -> Array:
    """The rows of tokens x [t, d], times weights [t, k] if there are any."""
    return operation.run(SpreadRows(), x, permutation.token, _by_token(permutation, x.shape[0]), *weights)[0]
