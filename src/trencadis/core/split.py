"""A sum in parts: what a product of rows is where scales change along k."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from trencadis.core.dtypes import accumulator, cast
from trencadis.core.epilogue import Epilogue
from trencadis.core.jax_compat import vary_alike
from trencadis.core.problem import Problem

Array = jax.Array
Multiply = Callable[..., Array]  # of a problem, and its operands
Scales = Callable[[Any], list[Array | None]]  # of a part: [m] of rows and [g, n] of columns


def in_parts(problem: Problem, step: int, operands: tuple[Array, ...], scales: Scales, multiply: Multiply) -> Array:
    """[m, n], float32 or wider: the sum over parts of k, each so long, each with scales of its own."""
    lhs, rhs, *rest = operands
    axes = 1, 2 if problem.transpose_rhs else 1  # k
    count = -(-problem.k // step) if step else 1
    short = count * step - problem.k
    lhs, rhs = (_padded(x, axis, short) for x, axis in zip((lhs, rhs), axes, strict=True))

    def part(i: Any) -> Array:
        x, y = (lax.dynamic_slice_in_dim(v, i * step, step, axis) for v, axis in zip((lhs, rhs), axes, strict=True))
        by_row, by_column = scales(i)
        ends = Epilogue(by_row=by_row is not None, by_column=by_column is not None)
        inner = part_of(problem.replace(lhs=np.dtype(x.dtype), rhs=np.dtype(y.dtype), epilogue=ends), step)
        return multiply(inner, x, y, *rest, *(s for s in (by_row, by_column) if s is not None))

    if count == 1:
        return part(0)
    # in shard_map a loop carries what varies over the same axes of the mesh
    sums = jnp.zeros((problem.m, problem.n), accumulator(accumulator(lhs.dtype, rhs.dtype), np.float32))
    total, *_ = vary_alike(sums, lhs, rhs, *rest, *jax.tree.leaves(scales(0)))
    return lax.scan(lambda sums, i: (sums + part(i), None), total, jnp.arange(count))[0]


def part_of(problem: Problem, step: int) -> Problem:
    """The problem of one part."""
    ends = dataclasses.replace(problem.epilogue, blocks=0)
    return problem.replace(k=step, out=accumulator(problem.acc, np.float32), epilogue=ends)


def blocked(problem: Problem, multiply: Multiply, *operands: Array) -> Array:
    """The result of a problem whose scales change every `blocks` entries of k, and of n in rhs."""
    *given, by_row, by_column = operands  # [m, k / blocks], [g, k / blocks, n / blocks]
    length = problem.epilogue.blocks

    def scales(i: Any) -> list[Array | None]:
        down = lax.dynamic_index_in_dim(by_row, i, 1, keepdims=False)
        across = lax.dynamic_index_in_dim(by_column, i, 1, keepdims=False)
        return [down, jnp.repeat(across, length, axis=1)[:, : problem.n]]

    return cast(in_parts(problem, length, tuple(given), scales, multiply), problem.out)


def _padded(x: Array, axis: int, short: int) -> Array:
    return jnp.pad(x, [(0, short if i == axis else 0) for i in range(x.ndim)]) if short else x
