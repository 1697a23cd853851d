"""A number for each group at all entries of the group, and sums over the entries of each group.

Groups are pieces `[start, end)` of an axis, in ascending order, with unowned entries between them. Each of the two is
the transpose of the other. XLA would transpose the first, a gather, to a scatter-add, which adds one entry after the
other; hence a primitive.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from trencadis.core.jax_compat import replicated, result_type, vary_alike
from trencadis.gemm.problem import Buffer, Extras, GemmProblem, Groups, Packing

Array = jax.Array

CHUNK = 1024  # entries that are summed at a time


class Pieces(NamedTuple):
    """The pieces of all groups along an axis of an array: where they start and end, i32[g], and its length."""

    starts: Array
    ends: Array
    length: int

    @property
    def owner(self) -> Array:
        """The group of each entry, or any if it is unowned: i32[length]. The search is one fusion."""
        index = np.arange(self.length, dtype=np.int32)
        found = jnp.searchsorted(self.ends, index, side="right", method="scan_unrolled")
        return jnp.minimum(found, self.ends.shape[0] - 1)

    @property
    def owned(self) -> Array:
        """Whether a group owns each entry: bool[length]."""
        index, owner = np.arange(self.length, dtype=np.int32), self.owner
        return (self.starts[owner] <= index) & (index < self.ends[owner])


def pieces(buffer: Buffer, start: Array, m: Array, n: Array) -> Pieces:
    """The pieces of groups of m x n in an array that is not a stack, along the axis on which one follows the other."""
    if buffer.packing is Packing.FLAT:
        sizes = jnp.maximum(m, 0) * jnp.maximum(n, 0)
    else:
        sizes = jnp.maximum(m if buffer.ragged[0] else n, 0)
    length = buffer.shape[buffer.group_axis]
    ends = lax.cummax(jnp.minimum(start + sizes, length))  # ascending, whatever a traced array holds
    return Pieces(jnp.minimum(start, ends), ends, length)


def spread(values: Array, at: Pieces) -> Array:
    """The value [g] of its group at each entry, 0 at unowned ones: [length]."""
    values, starts, ends = vary_alike(*map(replicated, (values, at.starts, at.ends)))
    return spread_p.bind(values, starts, ends, length=at.length)


def sums(x: Array, at: Pieces) -> Array:
    """The sum [g] over the entries [length] of each group; unowned ones may hold anything."""
    x, starts, ends = vary_alike(*map(replicated, (x, at.starts, at.ends)))
    return sums_p.bind(x, starts, ends, length=at.length)


# ---------------------------------------------------------------------------------------------------------------------
# What they compute


def _spread(values: Array, starts: Array, ends: Array, *, length: int) -> Array:
    at = Pieces(starts, ends, length)
    return jnp.where(at.owned, values[at.owner], jnp.zeros((), values.dtype))


def _sums(x: Array, starts: Array, ends: Array, *, length: int) -> Array:
    """Sums of whole chunks in a group, and of its entries in the first chunk and in the last."""
    chunks = jnp.pad(x, (0, -length % CHUNK)).reshape(-1, CHUNK)
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


spread_p, sums_p = Primitive("spread_by_group"), Primitive("sums_by_group")


def _register(primitive: Primitive, run: Any, transposed: Any) -> None:
    """Give a linear function of its first operand its rules: the other one is its transpose."""

    def abstract(x: Any, starts: Any, ends: Any, *, length: int) -> Any:
        shape = (length,) if primitive is spread_p else starts.shape
        return result_type((x, starts, ends), shape, x.dtype)

    def transpose(ct: Any, x: Any, starts: Any, ends: Any, *, length: int) -> Any:
        return transposed(ct, Pieces(starts, ends, length)), None, None

    def batch(args: Any, dims: Any, *, length: int) -> Any:
        return jax.vmap(functools.partial(run, length=length), dims)(*args), 0

    primitive.def_impl(jax.jit(run, static_argnames="length"))
    primitive.def_abstract_eval(abstract)
    ad.deflinear2(primitive, transpose)
    ad.primitive_jvps[primitive] = functools.partial(_jvp, primitive)
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=False))


def _jvp(primitive: Primitive, primals: Any, tangents: Any, *, length: int) -> Any:
    x, starts, ends = primals
    out = primitive.bind(x, starts, ends, length=length)
    if type(tangents[0]) is ad.Zero:
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, primitive.bind(tangents[0], starts, ends, length=length)


_register(spread_p, _spread, sums)
_register(sums_p, _sums, spread)


# ---------------------------------------------------------------------------------------------------------------------
# The epilogue of a problem in XLA's operations


def scaled(problem: GemmProblem, groups: Groups, values: Array, x: Array, unowned: float = 0.0) -> Array:
    """An array like the result, multiplied by the number [g] of its group; `unowned` is that of entries of none.

    Where that is 0, what an unowned entry holds is not multiplied: the result is 0.
    """
    if problem.out.packing is Packing.STACKED:
        return x * values.reshape(-1, 1, 1)
    at = pieces(problem.out, groups.out, groups.m, groups.n)
    shape = [at.length if i == problem.out.group_axis else 1 for i in range(x.ndim)]
    owned, factor = at.owned.reshape(shape), spread(values, at).reshape(shape)
    return jnp.where(owned, x * factor, x * unowned if unowned else jnp.zeros((), x.dtype))


def dots(problem: GemmProblem, groups: Groups, x: Array, y: Array) -> Array:
    """The sum [g] of the products of the entries of each group, of two arrays like the result, in `problem.sum`."""
    product = x.astype(problem.sum) * y.astype(problem.sum)
    if problem.out.packing is Packing.STACKED:
        return product.sum(axis=(1, 2))
    at, axis = pieces(problem.out, groups.out, groups.m, groups.n), problem.out.group_axis
    return sums(product if product.ndim == 1 else product.sum(axis=1 - axis), at)


def where_beta(beta: Array, old: Array, problem: GemmProblem, groups: Groups) -> Array:
    """Existing values; what is not finite is 0 where beta is 0, so that the gradient of beta is still that of old."""
    zero = scaled(problem, groups, (beta == 0).astype(old.dtype), jnp.ones((1,) * old.ndim, old.dtype))
    return jnp.where((zero == 0) | jnp.isfinite(old), old, 0)


def finish(problem: GemmProblem, product: Array, groups: Groups, extras: Extras) -> Array:
    """The result from the product in `problem.sum`: alpha * product + bias + beta * existing, rounded once."""
    z = product
    if extras.alpha is not None:
        z = scaled(problem, groups, extras.alpha, z)
    if extras.bias is not None:  # m is ragged, and n is not
        at = pieces(problem.out, groups.out, groups.m, groups.n)
        z = z + jnp.where(at.owned[:, None], extras.bias[at.owner], 0)
    if extras.existing is not None:
        old = extras.existing.astype(problem.sum)
        if extras.beta is not None:
            old = scaled(problem, groups, extras.beta, where_beta(extras.beta, old, problem, groups), 1.0)
        z = z + old
    return z.astype(problem.out.dtype)
