"""A product whose scales change along k, as a sum of products over parts of k with constant scales."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from trencadis.core.dtypes import accumulator, whole
from trencadis.core.epilogue import Epilogue
from trencadis.core.interleave import deinterleave
from trencadis.core.jax_compat import Value, vary_alike
from trencadis.core.problem import Problem

Array = jax.Array
Multiply = Callable[..., Array]  # of the problem of a part, and its operands


def part_of(problem: Problem) -> Problem:
    """The problem of one part of k: its scales are constant, and its result is a float32 sum or wider."""
    epilogue = Epilogue(by_row=problem.epilogue.by_row, by_column=problem.epilogue.by_column)
    out, lhs, rhs = accumulator(problem.acc, np.float32), whole(problem.lhs), whole(problem.rhs)
    return problem.replace(k=problem.epilogue.part, lhs=lhs, rhs=rhs, out=out, epilogue=epilogue, interleaved=False)


def sum_of_parts(problem: Problem, multiply: Multiply, *operands: Value) -> Array:
    """The scaled sums [rows, n] of a problem: `multiply(part_of(problem), ...)` for each part of k, added up in order.

    Operands are lhs, rhs, group sizes, first group, then the scales of rows `[m, k / block]` or `[m]` and of columns
    `[g, k / block, n / block]` or `[g, n]` where the problem has them.
    """
    lhs, rhs, sizes, first, *scales = operands
    rhs = deinterleave(rhs) if problem.interleaved else rhs
    inner, length = part_of(problem), problem.epilogue.part
    axes = 1, 2 if problem.transpose_rhs else 1  # k
    count = -(-problem.k // length)
    short = count * length - problem.k
    lhs, rhs = (_padded(x, axis, short) for x, axis in zip((lhs, rhs), axes, strict=True))
    lhs, rhs = lhs.astype(inner.lhs), rhs.astype(inner.rhs)

    def part(i: int | Array) -> Array:
        x, y = (lax.dynamic_slice_in_dim(v, i * length, length, axis) for v, axis in zip((lhs, rhs), axes, strict=True))
        return multiply(inner, x, y, sizes, first, *_scales_at(problem, i * length, scales))

    if count == 1:
        return part(0)
    # inside shard_map a loop carries arrays that vary over the same mesh axes
    sums = jnp.zeros((problem.rows, problem.n), inner.out)
    total, *_ = vary_alike(sums, lhs, rhs, sizes, first, *scales)
    return lax.scan(lambda sums, i: (sums + part(i), None), jnp.asarray(total), jnp.arange(count))[0]


def _scales_at(problem: Problem, at: int | Array, scales: list[Value]) -> list[Value]:
    """The scales of the part of k that starts at `at`: those of rows [m] and those of columns [g, n]."""
    steps, rest, found = problem.epilogue, iter(scales), []
    if steps.by_row:
        by_row = next(rest)
        found.append(_at(by_row, at // steps.row_block) if steps.row_block else by_row)
    if steps.by_column:
        by_column, (k, n) = next(rest), steps.column_block
        if k:
            by_column = _at(by_column, at // k)  # [g, n / block]
            by_column = jnp.repeat(by_column, n, axis=1)[:, : problem.n] if n > 1 else by_column
            by_column = by_column.astype(jnp.float32)
        found.append(by_column)
    return found


def _at(x: Value, i: int | Array) -> Array:
    return lax.dynamic_index_in_dim(x, i, 1, keepdims=False)


def _padded(x: Value, axis: int, short: int) -> Value:
    return jnp.pad(x, [(0, short if i == axis else 0) for i in range(x.ndim)]) if short else x
