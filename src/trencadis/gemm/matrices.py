"""Where the matrices of a general grouped GEMM are in its arrays, as kernels count: in entries, row by row."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trencadis.core.problem import Form, Problem
from trencadis.gemm.problem import Buffer, Dim, GemmProblem, Groups, Packing

Array = jax.Array

COMPARED = 1024  # groups whose tiles are summed up by comparing each with each, in one fusion


class Matrices(NamedTuple):
    """Where the matrices of all groups are in an array, in entries, and their sizes in the order of storage: i32[g]."""

    start: Any
    stride: Any  # from one row to the next
    rows: Any
    columns: Any


def mean_problem(problem: GemmProblem) -> Problem:
    """A product of groups that all have the mean size, by the entries of the arrays: what a layout is chosen for."""
    lhs, rhs, out = (math.prod(x.shape) / problem.groups for x in (problem.lhs, problem.rhs, problem.out))
    means = (lhs * out / rhs, lhs * rhs / out, rhs * out / lhs)  # their square roots are m, k and n
    m, k, n = (_mean(dim, mean) for dim, mean in zip((problem.m, problem.k, problem.n), means, strict=True))
    groups = min(problem.groups, (2**31 - 1) // m)
    return Problem(
        form=Form.ROWS, m=m * groups, k=k, n=n, groups=groups, local_groups=groups,
        lhs=problem.lhs.dtype, rhs=problem.rhs.dtype, out=problem.out.dtype,
        transpose_rhs=problem.rhs.transposed, precision=problem.precision,
    )  # fmt: skip


def _mean(dim: Dim, square: float) -> int:
    return max(1, min(dim.size, round(math.sqrt(square)))) if dim.ragged else dim.size


def inside(problem: GemmProblem, groups: Groups) -> tuple[Any, Any, Any]:
    """The sizes m, k and n of all groups, without what does not fit into an array."""
    m, k, n = (jnp.maximum(size, 0) for size in groups[3:])
    m, k = fitting(problem.lhs, groups.lhs, m, k)
    k, n = fitting(problem.rhs, groups.rhs, k, n)
    m, n = fitting(problem.out, groups.out, m, n)
    return m, k, n


def fitting(buffer: Buffer, start: Any, *sizes: Any) -> tuple[Any, Any]:
    """The two sizes of matrices that start there, without what does not fit into the array."""
    rows, columns = sizes[::-1] if buffer.transposed else sizes
    if buffer.packing is Packing.FLAT:
        rows = jnp.where(columns > 0, jnp.minimum(rows, (buffer.shape[0] - start) // jnp.maximum(columns, 1)), rows)
    elif buffer.packing is Packing.CONCATENATED:
        room = [np.int32(length) for length in buffer.shape]
        room[buffer.group_axis] = room[buffer.group_axis] - start
        rows, columns = jnp.minimum(rows, room[0]), jnp.minimum(columns, room[1])
    return (columns, rows) if buffer.transposed else (rows, columns)


def matrices(buffer: Buffer, start: Any, raw: tuple[Any, Any], sizes: tuple[Any, Any]) -> Matrices:
    """Where matrices of these sizes are; rows of a flat buffer have the length that the group has, whether it fits."""
    rows, columns = sizes[::-1] if buffer.transposed else sizes
    if buffer.packing is Packing.FLAT:
        return Matrices(start, raw[0] if buffer.transposed else raw[1], rows, columns)
    stride = jnp.full_like(start, buffer.shape[-1])
    if buffer.packing is Packing.STACKED:
        start = start * np.int32(math.prod(buffer.shape[1:]))
    elif buffer.group_axis == 0:
        start = start * np.int32(buffer.shape[-1])
    return Matrices(start, stride, rows, columns)


def places(problem: GemmProblem, groups: Groups, sizes: tuple[Any, Any, Any]) -> list[Matrices]:
    """Where the matrices of lhs, rhs and the result are; `sizes` are those of groups that fit into the arrays."""
    m, k, n = sizes
    fields = (m, k), (k, n), (m, n)
    raw = (groups.m, groups.k), (groups.k, groups.n), (groups.m, groups.n)
    buffers = problem.lhs, problem.rhs, problem.out
    return [matrices(*each) for each in zip(buffers, groups[:3], raw, fields, strict=True)]


def running_sum(x: Array) -> Array:
    """The sums up to each entry along the last axis; of few, as one fusion."""
    count = x.shape[-1]
    if count > COMPARED:
        return jnp.cumsum(x, axis=-1, dtype=x.dtype)
    index = np.arange(count)
    return jnp.sum(jnp.where(index[:, None] >= index, x[..., None, :], 0), axis=-1, dtype=x.dtype)
