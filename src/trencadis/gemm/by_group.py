"""A number for each group at all entries of the group, and sums over the entries of each group.

Groups are pieces `[start, end)` of an axis, in ascending order, with unowned entries between them. Each of the two is
the transpose of the other, and says so to `core.linear`: JAX would transpose the first, a gather, to a scatter-add,
which adds one entry after the other.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from trencadis.core.linear import linear
from trencadis.core.mesh import replicated
from trencadis.gemm.problem import Buffer, Extras, GemmProblem, Groups, Packing

Array = jax.Array

CHUNK = 1024  # entries that are summed at a time
FEW_GROUPS = 64  # groups up to which an entry is compared with each


class Pieces(NamedTuple):
    """The pieces of all groups along an axis of an array: where they start and end, i32[g], and its length."""

    starts: Array
    ends: Array
    length: int

    @property
    def owner(self) -> Array:
        """The group of each entry, or any if it is unowned: i32[length]."""
        found = jnp.searchsorted(self.ends, lax.iota(np.int32, self.length), side="right", method="scan_unrolled")
        return jnp.minimum(found, self.ends.shape[0] - 1)

    @property
    def owned(self) -> Array:
        """Whether a group owns each entry: bool[length]."""
        return _spread(jnp.ones(self.starts.shape, bool), jnp.zeros((), bool), self.starts, self.ends, self.length)


def pieces(buffer: Buffer, start: Array, m: Array, n: Array) -> Pieces:
    """The pieces of groups of m x n in an array that is not a stack, along the axis on which one follows the other."""
    if buffer.packing is Packing.FLAT:
        sizes = jnp.maximum(m, 0) * jnp.maximum(n, 0)
    else:
        sizes = jnp.maximum(m if buffer.ragged[0] else n, 0)
    length = buffer.shape[buffer.group_axis]
    ends = lax.cummax(jnp.minimum(start + sizes, length))  # ascending, whatever a traced array holds
    # XLA would fold what follows from known sizes at compile time, entry by entry
    starts, ends = lax.optimization_barrier((jnp.minimum(start, ends), ends))
    return Pieces(starts, ends, length)


def spread(values: Array, at: Pieces, fill: float = 0.0) -> Array:
    """The value [g] of its group at each entry, `fill` at unowned ones: [length]. Linear in values and fill."""
    length = at.length

    def apply(bounds: tuple[Array, Array], inputs: tuple[Array, Array]) -> Array:
        return _spread(*inputs, *bounds, length)

    def transpose(bounds: tuple[Array, Array], ct: Array) -> tuple[Array, Array]:
        at = Pieces(*bounds, length)
        return sums(ct, at), jnp.sum(jnp.where(at.owned, 0, ct))

    values, starts, ends = map(replicated, (values, at.starts, at.ends))
    return linear(apply, transpose, (starts, ends), (values, jnp.asarray(fill, values.dtype)))


def sums(x: Array, at: Pieces) -> Array:
    """The sum [g] over the entries [length] of each group; unowned ones may hold anything."""
    length = at.length

    def apply(bounds: tuple[Array, Array], x: Array) -> Array:
        return _sums(x, *bounds)

    def transpose(bounds: tuple[Array, Array], ct: Array) -> Array:
        return spread(ct, Pieces(*bounds, length))

    x, starts, ends = map(replicated, (x, at.starts, at.ends))
    return linear(apply, transpose, (starts, ends), x)


# ---------------------------------------------------------------------------------------------------------------------
# What they compute


@functools.partial(jax.jit, static_argnums=4)
def _spread(values: Array, other: Array, starts: Array, ends: Array, length: int) -> Array:
    """Of few groups, choices one after the other: XLA makes one loop of them, but several of a binary search."""
    index = lax.iota(np.int32, length)
    if starts.shape[0] > FEW_GROUPS:
        owner = Pieces(starts, ends, length).owner
        return jnp.where((starts[owner] <= index) & (index < ends[owner]), values[owner], other)
    out = jnp.broadcast_to(other, (length,))
    for i in range(starts.shape[0]):
        out = jnp.where(index >= ends[i], other, jnp.where(index >= starts[i], values[i], out))
    return out


@jax.jit
def _sums(x: Array, starts: Array, ends: Array) -> Array:
    """Sums of whole chunks in a group, and of its entries in the first chunk and in the last."""
    chunks = jnp.pad(x, (0, -x.shape[0] % CHUNK if x.shape[0] else CHUNK)).reshape(-1, CHUNK)
    first, last = -(-starts // CHUNK), ends // CHUNK  # whole chunks of each group, if first < last
    index = np.arange(chunks.shape[0], dtype=np.int32)
    inside = (index >= first[:, None]) & (index < last[:, None])  # [g, chunks]
    total = jnp.sum(jnp.where(inside, jnp.sum(chunks, axis=1), 0), axis=1)
    before = starts, jnp.minimum(ends, first * CHUNK)
    after = jnp.maximum(before[1], last * CHUNK), ends
    for start, end in (before, after):
        chunk = jnp.minimum(start // CHUNK, chunks.shape[0] - 1)
        entry = chunk[:, None] * CHUNK + np.arange(CHUNK, dtype=np.int32)
        there = (entry >= start[:, None]) & (entry < end[:, None])
        total += jnp.sum(jnp.where(there, chunks[chunk], 0), axis=1)
    return total


# ---------------------------------------------------------------------------------------------------------------------
# The epilogue of a problem in XLA's operations


def scaled(problem: GemmProblem, groups: Groups, values: Array, x: Array) -> Array:
    """An array like the result, multiplied by the number [g] of its group; unowned entries are 0, whatever x holds."""
    if problem.out.packing is Packing.STACKED:
        return x * values.reshape(-1, 1, 1)
    at, shape = _pieces_of(problem, groups)
    return jnp.where(at.owned.reshape(shape), x * spread(values, at).reshape(shape), 0)


def scaled_or_kept(problem: GemmProblem, groups: Groups, values: Array, x: Array) -> Array:
    """An array like the result, multiplied by the number [g] of its group; unowned entries stay."""
    if problem.out.packing is Packing.STACKED:
        return x * values.reshape(-1, 1, 1)
    at, shape = _pieces_of(problem, groups)
    return x * spread(values, at, fill=1.0).reshape(shape)


def _pieces_of(problem: GemmProblem, groups: Groups) -> tuple[Pieces, list[int]]:
    """The pieces of the result, and the shape of an array of numbers along its axis, to be broadcast."""
    at = pieces(problem.out, groups.out, groups.m, groups.n)
    return at, [at.length if i == problem.out.group_axis else 1 for i in range(len(problem.out.shape))]


def dots(problem: GemmProblem, groups: Groups, x: Array, y: Array) -> Array:
    """The sum [g] of the products of the entries of each group, of two arrays like the result, in `problem.sum`."""
    product = x.astype(problem.sum) * y.astype(problem.sum)
    if problem.out.packing is Packing.STACKED:
        return product.sum(axis=(1, 2))
    at, _ = _pieces_of(problem, groups)
    return sums(product if product.ndim == 1 else product.sum(axis=1 - problem.out.group_axis), at)


def where_beta(beta: Array, old: Array, problem: GemmProblem, groups: Groups) -> Array:
    """Existing values; what is not finite is 0 where beta is 0, so that the gradient of beta is still that of old."""
    ones = jnp.ones((1,) * old.ndim, old.dtype)
    read = scaled_or_kept(problem, groups, (beta != 0).astype(old.dtype), ones) != 0
    return jnp.where(read | jnp.isfinite(old), old, 0)


def finish(problem: GemmProblem, product: Array, groups: Groups, extras: Extras) -> Array:
    """The result from the product in `problem.sum`: alpha * product + bias + beta * existing, rounded once."""
    z = product
    if extras.alpha is not None:
        z = scaled(problem, groups, extras.alpha, z)
    if extras.bias is not None:  # m is ragged, and n is not
        at, _ = _pieces_of(problem, groups)
        z = z + jnp.where(at.owned[:, None], extras.bias[at.owner], 0)
    if extras.existing is not None:
        old = extras.existing.astype(problem.sum)
        if extras.beta is not None:
            old = scaled_or_kept(problem, groups, extras.beta, where_beta(extras.beta, old, problem, groups))
        z = z + old
        if problem.out.packing is not Packing.STACKED:  # to the bit, also -0
            at, shape = _pieces_of(problem, groups)
            z = jnp.where(at.owned.reshape(shape), z, old)
    return z.astype(problem.out.dtype)
