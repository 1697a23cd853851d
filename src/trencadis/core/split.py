"""A product whose scales change along k, where no kernel applies them: a sum of products over parts of k.

The gradient of rows beside weights with scales `[g, k / block, n]` is a product with scales `[g, n, k / block]`, which
change with every entry of its k. There weights are multiplied by their scales first, and it is one product.
"""

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

SHORT = 16  # entries of k: shorter parts are not worth a product of their own


def part_of(problem: Problem) -> Problem:
    """The problem of one part: its scales are constant along k, and its result is a float32 sum or wider.

    Weights times scales have as many digits as a result of 16 bits. It is their product, if there is nothing to add.
    """
    steps, wide = problem.epilogue, accumulator(problem.acc, np.float32)
    inner = problem.replace(out=wide, epilogue=Epilogue(by_row=steps.by_row), interleaved=False)
    if steps.columnwise:
        short = problem.out.itemsize <= 2
        whole_result = short and steps == steps.scaling and not problem.summed
        weights = np.dtype(jnp.bfloat16) if short else wide
        return inner.replace(rhs=weights, out=problem.out if whole_result else wide)
    inner = inner.replace(lhs=whole(problem.lhs), rhs=whole(problem.rhs), k=steps.part)
    return inner.replace(epilogue=Epilogue(by_row=steps.by_row, by_column=steps.by_column))


def part_length(problem: Problem) -> int:
    """The length of a part of k; all of it where weights are multiplied by their scales first."""
    return problem.k if problem.epilogue.columnwise else problem.epilogue.part


def sums_by_parts(problem: Problem, multiply: Multiply, *operands: Value) -> Array:
    """The scaled sums [rows, n] of a problem: `multiply(part_of(problem), ...)` for each part of k.

    Operands are lhs, rhs, group sizes, first group, then the scales of rows `[m, k / block]` or `[m]` and of columns
    `[g, k / block, n / block]` or `[g, n]` where the problem has them.
    """
    if not problem.spans:
        return jnp.zeros((problem.rows, problem.n), part_of(problem).out)
    lhs, rhs, *rest = operands
    rhs = deinterleave(rhs) if problem.interleaved else rhs
    if problem.epilogue.columnwise:
        sizes, first, *by_row, by_column = rest
        return multiply(part_of(problem), lhs, _times_scales(problem, rhs, by_column), sizes, first, *by_row)
    return _by_parts_of_k(problem, multiply, lhs, rhs, *rest)


def _times_scales(problem: Problem, rhs: Value, by_column: Value) -> Array:
    """Weights times their scales `[g, k, n / block]`, in the dtype in which they are multiplied."""
    scales = jnp.repeat(by_column.astype(np.float32), problem.epilogue.column_block[1], axis=2)[..., : problem.n]
    wide = accumulator(problem.acc, np.float32)
    scales = (scales.mT if problem.transpose_rhs else scales).astype(wide)
    return jnp.asarray(rhs.astype(wide) * scales, part_of(problem).rhs)


def _by_parts_of_k(problem: Problem, multiply: Multiply, *operands: Value) -> Array:
    """Products of parts of k, added up in order."""
    lhs, rhs, sizes, first, *scales = operands
    inner, length = part_of(problem), part_length(problem)
    rhs = rhs.astype(inner.rhs)
    axes = 1, 2 if problem.transpose_rhs else 1  # k
    count = -(-problem.k // length)
    lhs, rhs = (_padded(x, axis, count * length) for x, axis in zip((lhs, rhs), axes, strict=True))
    lhs = lhs.astype(inner.lhs)

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


def _padded(x: Value, axis: int, length: int) -> Value:
    """The array with zeros behind it along an axis, up to a length."""
    short = length - x.shape[axis]
    return jnp.pad(x, [(0, short if i == axis else 0) for i in range(x.ndim)]) if short else x
