"""Where the work is: from group sizes to row spans, and from spans to the walk over (group, tile) pairs.

    rows    0 1 2 3 │ 4 5 6 7        sizes [3, 0, 5], tiles of 4 rows
    group   0 0 0 2 │ 2 2 2 2
    visits  (0,0) (2,0) (2,1)        a tile that two groups share is visited by each, one after the other

All integers are exact, for any number of tiles. `walk` is the slow twin of `visits`: plain Python, plainly right.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32, Integer

from trencadis.core.problem import Problem

Sizes: TypeAlias = Integer[Array, "{problem.batch} {problem.groups}"]
First: TypeAlias = Integer[Array, "{problem.batch}"]  # the first local group of each batch entry


class Spans(NamedTuple):
    """Row ranges of the local groups of all batch entries, one entry after the other."""

    starts: Int32[Array, " spans"]
    ends: Int32[Array, " spans"]  # equal to starts for an empty group


def clamped(group_sizes: Integer[Array | np.ndarray, "*batch g"], m: int) -> Int32[Array, "*batch g"]:
    """Sizes as int32 between 0 and m, whatever integers they are."""
    if group_sizes.dtype.itemsize < 4:  # m need not fit into so narrow a dtype
        group_sizes = group_sizes.astype(jnp.int32)
    return jnp.clip(group_sizes, 0, m).astype(jnp.int32)


def offsets(group_sizes: Integer[Array | np.ndarray, "*batch g"], m: int) -> Int32[Array, "*batch g+1"]:
    """Row positions between groups: `[..., g] -> i32[..., g + 1]`, from 0, ascending, never past m.

    A negative size counts as 0 and an end past m is m, so that whatever a traced array holds, no group leaves the rows.

    >>> offsets(jnp.array([3, 0, 5]), 8).tolist()
    [0, 3, 3, 8]
    """
    sizes = clamped(group_sizes, m)
    if sizes.shape[-1] * m < 2**31:
        ends = jnp.minimum(jnp.cumsum(sizes, axis=-1, dtype=jnp.int32), m)
    else:  # the plain sum might wrap before it is clamped
        ends = lax.associative_scan(lambda a, b: a + jnp.minimum(b, m - a), sizes, axis=-1)
    return jnp.concatenate([jnp.zeros_like(ends[..., :1], shape=(*ends.shape[:-1], 1)), ends], axis=-1)


def spans(problem: Problem, group_sizes: Sizes, first: First) -> Spans:
    """The rows of each local group: group_sizes `[batch, groups]`, first group of the window `[batch]`.

    Groups of a window that reaches outside of group_sizes are empty.
    """
    if problem.groups == 0 or problem.local_groups == 0:
        nothing = jnp.zeros((problem.spans,), jnp.int32)
        return Spans(nothing, nothing)
    bounds = offsets(group_sizes, problem.m)  # [batch, groups + 1]
    group = first[:, None] + np.arange(problem.local_groups, dtype=np.int32)[None]  # [batch, local_groups]
    known = (group >= 0) & (group < problem.groups)
    at = jnp.clip(group, 0, problem.groups - 1)
    starts = jnp.take_along_axis(bounds, at, axis=1, mode="promise_in_bounds")
    ends = jnp.take_along_axis(bounds, at + 1, axis=1, mode="promise_in_bounds")
    entry = np.arange(problem.batch, dtype=np.int32)[:, None] * np.int32(problem.m)
    return Spans((starts + entry).reshape(-1), (jnp.where(known, ends, starts) + entry).reshape(-1))


def owned(problem: Problem, group_sizes: Sizes, first: First) -> Bool[Array, {problem.rows}]:
    """Whether a local group covers the row: bool[rows]. The local groups of an entry are neighbours: one range each."""
    if problem.spans == 0:
        return jnp.zeros((problem.rows,), bool)
    starts, ends = spans(problem, group_sizes, first)
    low = starts.reshape(problem.batch, -1).min(axis=1)
    high = ends.reshape(problem.batch, -1).max(axis=1)
    row = jnp.arange(problem.rows, dtype=jnp.int32).reshape(problem.batch, problem.m)
    return ((row >= low[:, None]) & (row < high[:, None])).reshape(-1)


def owner(group_sizes: Integer[Array | np.ndarray, " g"], m: int) -> Int32[Array, {m}]:
    """The group of each row: i32[m]; the number of groups where there is none.

    >>> owner(jnp.array([2, 0, 1]), 4).tolist()
    [0, 0, 2, 3]
    """
    bounds = offsets(jnp.asarray(group_sizes), m)
    lengths = jnp.append(bounds[1:] - bounds[:-1], m - bounds[-1])
    lengths = lax.optimization_barrier(lengths)  # of sizes that are known, XLA would work it out as it compiles
    return jnp.repeat(jnp.arange(lengths.shape[0], dtype=jnp.int32), lengths, total_repeat_length=m)


def local_group(problem: Problem, group_sizes: Sizes, first: First) -> Int32[Array, {problem.m}]:
    """The local group of each row of a problem of one entry: i32[m]; some group for rows that nobody owns."""
    return jnp.clip(owner(group_sizes[0], problem.m) - first[0], 0, max(problem.local_groups - 1, 0))
