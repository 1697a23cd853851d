"""From group sizes to the rows of each group. Every backend, and every mask over owned rows, starts here.

    rows    0 1 2 3 4 5 6 7        sizes [3, 0, 5]
    group   0 0 0 2 2 2 2 2        offsets [0, 3, 3, 8]

All positions are exact int32, whatever a traced array holds: a negative size counts as 0, an end past m is m, and a
group outside of group_sizes is empty.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32, Integer

from trencadis.core.problem import Problem

Sizes: TypeAlias = Integer[Array | np.ndarray, " {problem.batch} {problem.groups}"]
First: TypeAlias = Integer[Array | np.ndarray, " {problem.batch}"]  # the first local group of each batch entry

FEW = 64  # groups over which it takes less time to search or sum for each of them than to compile a sort or scan


class Spans(NamedTuple):
    """The rows `[start, end)` of each local group, for all batch entries one after the other."""

    starts: Int32[Array, " spans"]
    ends: Int32[Array, " spans"]  # equal to starts for an empty group


class Bounds(NamedTuple):
    """The same for loops over groups, which compile sooner without the starts of few groups."""

    first: Int32[Array, ""]  # the row at which the first group starts
    ends: Int32[Array, " spans"]  # of few groups these are sums of sizes, which may be past the last row
    starts: Int32[Array, " spans"] | None  # None for few groups, each of which starts where the one before it ends


def clamped(group_sizes: Integer[Array | np.ndarray, "*batch g"], m: int) -> Int32[Array, "*batch g"]:
    """Group sizes of any integer dtype as int32 between 0 and m.

    >>> clamped(jnp.array([-3, 5, 200], jnp.int16), 100).tolist()
    [0, 5, 100]
    """
    if group_sizes.dtype.itemsize < 4:  # m need not fit into so narrow a dtype
        group_sizes = group_sizes.astype(jnp.int32)
    zero, most = np.zeros((), group_sizes.dtype), np.asarray(m, group_sizes.dtype)
    return lax.clamp(zero, group_sizes, most).astype(jnp.int32)


def clamp_first(
    first: Int32[Array | np.ndarray | np.int32, "*batch"], groups: int, local_groups: int
) -> Int32[Array, "*batch"]:
    """The first group of a window of local_groups, clamped so that `first + local_groups` cannot overflow int32.

    A window that holds none of the groups still holds none of them, and any other window is unchanged.

    >>> clamp_first(jnp.int32(2**31 - 1), 3, 2).tolist(), clamp_first(jnp.int32(-1), 3, 2).tolist()
    (3, -1)
    """
    return lax.clamp(np.int32(-local_groups), first, np.int32(groups))


def offsets(group_sizes: Integer[Array | np.ndarray, "*batch g"], m: int) -> Int32[Array, "*batch g+1"]:
    """The row at which each group starts, then the end of the last: `[..., g] -> i32[..., g + 1]`, ascending from 0.

    A negative size counts as 0 and an end past m is m, so that no group leaves the rows, whatever a traced array holds.

    >>> offsets(jnp.array([3, 0, 5]), 8).tolist()
    [0, 3, 3, 8]
    """
    sizes = clamped(group_sizes, m)
    if sizes.shape[-1] * m < 2**31:
        ends = jnp.minimum(jnp.cumsum(sizes, axis=-1, dtype=jnp.int32), m)
    else:  # the plain sum might overflow before it is clamped
        ends = lax.associative_scan(lambda a, b: a + jnp.minimum(b, m - a), sizes, axis=-1)
    return jnp.concatenate([jnp.zeros_like(ends[..., :1], shape=(*ends.shape[:-1], 1)), ends], axis=-1)


def spans(problem: Problem, group_sizes: Sizes, first: First) -> Spans:
    """The rows of each local group, from group_sizes `[batch, groups]` and the first group of the window `[batch]`.

    A local group that group_sizes does not name is empty.
    """
    if problem.groups == 0 or problem.local_groups == 0:
        nothing = jnp.zeros((problem.spans,), jnp.int32)
        return Spans(nothing, nothing)
    starts, ends = (rows_before(problem, group_sizes, first, i, problem.local_groups) for i in range(2))
    if problem.batch > 1:
        entry = np.arange(problem.batch, dtype=np.int32)[:, None] * np.int32(problem.m)
        starts, ends = starts + entry, ends + entry
    return Spans(starts.reshape(-1), ends.reshape(-1))


def bounds_of(problem: Problem, group_sizes: Sizes, first: First) -> Bounds:
    """The rows of the local groups, of which there is at least one."""
    if problem.batch > 1 or problem.spans > FEW or problem.groups == 0 or not _summable(problem):
        starts, ends = spans(problem, group_sizes, first)
        return Bounds(starts[0], ends, starts)
    first, sizes = clamp_first(first, problem.groups, problem.local_groups), clamped(group_sizes, problem.m)
    start = lax.min(_sums(sizes, first, 0, 1), np.int32(problem.m))
    return Bounds(start[0, 0], _sums(sizes, first, 1, problem.local_groups)[0], None)


def rows_before(
    problem: Problem, group_sizes: Sizes, first: First, offset: int, count: int
) -> Int32[Array, " {problem.batch} {count}"]:
    """The rows of all groups before group `first + offset`, and before the groups after it, of each batch entry.

    Offset and count together are at most one more than the local groups.
    """
    first = clamp_first(first, problem.groups, problem.local_groups)
    if not _summable(problem):
        return _window(problem, offsets(group_sizes, problem.m), first + np.int32(offset), count)
    return lax.min(_sums(clamped(group_sizes, problem.m), first, offset, count), np.int32(problem.m))


def _summable(problem: Problem) -> bool:
    """Whether groups are so few that sums over all sizes are one for each, and that none overflows."""
    return problem.groups * problem.local_groups <= FEW**2 and problem.groups * problem.m < 2**31


def _sums(sizes: Array, first: Array, offset: int, count: int) -> Array:
    """The sizes `[batch, groups]` of all groups before group `first + offset`, and before the groups after it, added.

    It is one kernel for XLA, which compiles in a fraction of the time of a scan.
    """
    shape = sizes.shape[0], count, sizes.shape[1]
    limit = lax.broadcast_in_dim(first + np.int32(offset) if offset else first, shape, (0,))
    limit = limit + lax.broadcasted_iota(jnp.int32, shape, 1) if count > 1 else limit
    sizes = lax.broadcast_in_dim(sizes, shape, (0, 2))
    sizes = lax.select(lax.broadcasted_iota(jnp.int32, shape, 2) < limit, sizes, lax.full_like(sizes, 0))
    return lax.reduce_sum(sizes, (2,))


def _window(problem: Problem, bounds: Array, first: Array, count: int) -> Array:
    """So many of bounds `[batch, groups + 1]` from the first on, where those outside are equal to the outermost."""
    bounds = jnp.pad(bounds, ((0, 0), (problem.local_groups,) * 2), mode="edge")

    def window(bounds: Array, first: Array) -> Array:
        return lax.dynamic_slice(bounds, (first,), (count,), allow_negative_indices=False)

    return jax.vmap(window)(bounds, first + np.int32(problem.local_groups))


def owned(problem: Problem, group_sizes: Sizes, first: First) -> Bool[Array, " {problem.rows}"]:
    """The mask of owned rows, bool[rows]: True where a local group covers the row."""
    if problem.spans == 0:
        return jnp.zeros((problem.rows,), bool)
    starts, ends = spans(problem, group_sizes, first)
    low = starts.reshape(problem.batch, -1).min(axis=1)  # the local groups of an entry are adjacent: one range of rows
    high = ends.reshape(problem.batch, -1).max(axis=1)
    row = jnp.arange(problem.rows, dtype=jnp.int32).reshape(problem.batch, problem.m)
    return ((row >= low[:, None]) & (row < high[:, None])).reshape(-1)


def owned_by_window(
    group_sizes: Integer[Array | np.ndarray, " g"], m: int, first: Int32[Array | np.int32, ""], count: int
) -> Bool[Array, " {m}"]:
    """The mask of the rows of a window of groups, bool[m].

    >>> owned_by_window(jnp.array([1, 2, 1]), 5, jnp.int32(1), 2).tolist()
    [False, True, True, True, False]
    """
    first = clamp_first(first, group_sizes.shape[0], count)
    low, high = jnp.take(offsets(group_sizes, m), jnp.stack([first, first + count]), mode="clip")
    row = jnp.arange(m, dtype=jnp.int32)
    return (row >= low) & (row < high)


def owner(group_sizes: Integer[Array | np.ndarray, " g"], m: int) -> Int32[Array, " {m}"]:
    """The index of the group that covers each row, i32[m]; the number of groups for a row that no group covers.

    >>> owner(jnp.array([2, 0, 1]), 4).tolist()
    [0, 0, 2, 3]
    """
    bounds = offsets(jnp.asarray(group_sizes), m)
    lengths = jnp.append(bounds[1:] - bounds[:-1], m - bounds[-1])
    lengths = lax.optimization_barrier(lengths)  # XLA would fold the repetition of known sizes at compile time, slowly
    return jnp.repeat(jnp.arange(lengths.shape[0], dtype=jnp.int32), lengths, total_repeat_length=m)


def local_group(problem: Problem, group_sizes: Sizes, first: First) -> Int32[Array, " {problem.rows}"]:
    """The index, from 0, of the local group of each row: i32[rows].

    An unowned row gets the index of some local group, so that it can be used to gather; mask it with `owned`.
    """
    first = clamp_first(first, problem.groups, problem.local_groups)
    if problem.batch == 1:
        owners = owner(group_sizes[0], problem.m) - first[0]
    else:
        each = jax.vmap(lambda sizes: owner(sizes, problem.m))(jnp.asarray(group_sizes))
        owners = (each - first[:, None]).reshape(-1)
    return jnp.clip(owners, 0, max(problem.local_groups - 1, 0))
