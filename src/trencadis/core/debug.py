"""Optional run-time checks of traced group sizes and windows, by `jax.experimental.checkify`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.experimental import checkify
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int32, Integer

from trencadis.core.mesh import replicated

# part of jit's cache key: a function that was traced without the checks is traced again with them
_checking = jax.make_user_context(False)


@contextlib.contextmanager
def debug_checks() -> Iterator[None]:
    """Check traced group sizes and windows at run time, with errors that name the group.

    Without it a negative size counts as 0 and rows past m are dropped. For grouped tensors it also finds matrices that
    do not fit into a flat buffer, and sizes that differ between two tensors that must have the same. The checks are
    `checkify` checks: transform the function with `checkify.checkify`, and look at the error it returns.

    >>> from jax.experimental import checkify
    >>> import trencadis as tr
    >>> f = checkify.checkify(jax.jit(tr.grouped_matmul))
    >>> with tr.debug_checks():
    ...     error, _ = f(jnp.ones((8, 4)), jnp.ones((3, 4, 2)), jnp.array([3, -1, 5]))
    >>> print(error.get().splitlines()[0])
    group_sizes: group 1 has size -1; sizes must be >= 0 (`check` failed)
    """
    with _checking(True):
        yield


def checking() -> bool:
    """Whether the caller is inside of `debug_checks`."""
    return bool(_checking.value)


def check_traced(group_sizes: Integer[Array, "*batch g"], first: ArrayLike, m: int, local_groups: int) -> None:
    """Check the sizes `[..., g]` and the first group `[]` of one call at run time, if `debug_checks` is on."""
    groups = group_sizes.shape[-1]
    if not checking() or group_sizes.size == 0:
        return
    first = jnp.asarray(first)
    check = functools.partial(_check_sizes, m=m)
    jax.vmap(check)(replicated(group_sizes).reshape(-1, groups))
    checkify.check(
        (first >= 0) & (first <= groups - local_groups),
        "group_offset: a window of {local} groups from group {i} on leaves the {groups} groups of group_sizes",
        i=first,
        local=jnp.int32(local_groups),
        groups=jnp.int32(groups),
    )


def _check_sizes(group_sizes: Integer[Array, " g"], m: int) -> None:
    """Check that no size is negative, and that all groups fit into m rows."""
    bound = jnp.iinfo(group_sizes.dtype)  # clip to int32 without hiding a size that is negative or past m
    sizes = jnp.clip(group_sizes, max(bound.min, -(2**31)), min(bound.max, m + 1)).astype(jnp.int32)
    least = jnp.min(sizes)
    checkify.check(
        least >= 0, "group_sizes: group {i} has size {size}; sizes must be >= 0", i=jnp.argmin(sizes), size=least
    )
    fits, over = fit(sizes, m)
    checkify.check(
        fits, "group_sizes: group {i} ends past m = {m} rows; sizes must sum to at most m", i=over, m=jnp.int32(m)
    )


def fit(sizes: Int32[Array, " g"], room: int) -> tuple[Bool[Array, ""], Integer[Array, ""]]:
    """True if the sizes sum to at most room, and the first group that ends past it; negative sizes are 0."""
    most = past(room)
    ends = jax.lax.associative_scan(
        lambda a, b: a + jnp.minimum(b, most - a), jnp.clip(sizes, 0, most)
    )  # cannot overflow
    return ends[-1] <= room, jnp.argmax(ends > room)


def past(room: int) -> int:
    """The smallest size that does not fit into room, or the largest int32."""
    return min(room + 1, 2**31 - 1)
