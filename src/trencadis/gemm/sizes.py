"""The sizes of groups along a ragged axis: static ones and arrays, their checks, and where groups start.

Sizes given as Python ints are static, as a shape is: they are known inside `jit` and belong to the structure of a
pytree. Sizes given as arrays, of numpy or of JAX, are data: `jit` traces them, and one program serves all values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify

from trencadis.core import arguments
from trencadis.core.debug import checking
from trencadis.core.spans import offsets

Array = jax.Array


class StaticSizes(np.ndarray):
    """Group sizes i32[g] that are part of a tensor's static structure; a read-only numpy array.

    >>> StaticSizes([2, 0, 3]).key
    (2, 0, 3)
    """

    def __new__(cls, sizes: Any) -> StaticSizes:
        found = np.array(sizes, np.int32).view(cls)
        found.flags.writeable = False
        return found

    @property
    def key(self) -> tuple[int, ...]:
        """The sizes as a tuple of ints, which can be hashed and compared."""
        return tuple(self.tolist())


def as_sizes(sizes: Any, name: str) -> Any:
    """Sizes as an array; those given as Python ints become `StaticSizes`, and numpy arrays stay numpy's."""
    found = arguments.as_sizes(sizes, name)
    if isinstance(sizes, (list, tuple)) and isinstance(found, np.ndarray) and _fit_int32(found):
        return StaticSizes(found)
    return found


def _fit_int32(sizes: np.ndarray[Any, Any]) -> bool:
    return sizes.ndim == 1 and sizes.size > 0 and sizes.min() >= -(2**31) and sizes.max() < 2**31


def checked_sizes(name: str, sizes: Any, limit: int | None, of: str) -> Any:
    """The sizes as i32[g], or an error if they are known and do not fit into `limit`, which is the number of `of`.

    Numpy arrays stay numpy arrays, so that their values are still known inside `jit`.
    """
    sizes = as_sizes(sizes, name)
    if sizes.ndim != 1 or sizes.shape[0] == 0:
        raise ValueError(f"{name}: want 1 dimension [g] of at least one group; got shape {sizes.shape}")
    if not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise TypeError(f"{name}: want an integer dtype; got {sizes.dtype}")
    known = arguments.concrete(sizes)
    if known is None:
        if not np.can_cast(sizes.dtype, np.int32):
            least = max(int(jnp.iinfo(sizes.dtype).min), -(2**31))  # the sign is kept for `debug_checks`
            sizes = jnp.clip(sizes, least, 2**31 - 1)
        return sizes.astype(jnp.int32)
    if known.min() < 0 or known.max() >= 2**31:
        i = int(np.argmin(known)) if known.min() < 0 else int(np.argmax(known))
        raise ValueError(f"{name}: want sizes from 0 to 2**31 - 1; group {i} has {known[i]}")
    total = sum(int(size) for size in known)
    if limit is not None and total > limit:
        raise ValueError(f"{name}: must sum to at most {limit}, the {of}; got a sum of {total}")
    return sizes if isinstance(sizes, StaticSizes) else sizes.astype(np.int32)


def checked_flat_sizes(name: str, dims: Sequence[str], first: Any, last: Any, capacity: int) -> tuple[Any, Any]:
    """The sizes i32[g] of the matrices of a flat buffer, or an error if they are known and do not fit into it.

    Args:
      name: what the caller calls the buffer.
      dims: what the caller calls the sizes of the first axis, and those of the last.
      first: the number of rows of each matrix.
      last: the number of columns of each matrix.
      capacity: how many entries the buffer has.
    """
    first, last = (checked_sizes(each, x, None, "") for each, x in zip(dims, (first, last), strict=True))
    if first.shape != last.shape:
        raise ValueError(f"{dims[1]}: want as many groups as {dims[0]}; got {last.shape[0]} and {first.shape[0]}")
    rows, columns = arguments.concrete(first), arguments.concrete(last)
    if rows is not None and columns is not None:
        need = sum(int(r) * int(c) for r, c in zip(rows, columns, strict=True))
        if need > capacity:
            raise ValueError(f"{name}: the groups have {need} entries; got {capacity}")
    return first, last


def check_same_sizes(name: str, sizes: Any, other: str, others: Any) -> None:
    """Raise unless two sizes i32[g] are equal; where one is traced, `debug_checks` compares them at run time."""
    if sizes.shape != others.shape:
        raise ValueError(f"{name}: want {others.shape[0]} groups, as {other} has; got {sizes.shape[0]}")
    one, two = arguments.concrete(sizes), arguments.concrete(others)
    if one is not None and two is not None:
        if (one != two).any():
            i = int(np.argmax(one != two))
            raise ValueError(f"{name}: group {i} has size {one[i]}, and {two[i]} in {other}; want the same")
        return
    if not checking():
        return
    left, right = jnp.asarray(sizes), jnp.asarray(others)
    at = jnp.argmax(left != right)
    checkify.check(
        left[at] == right[at],
        f"{name}: group {{i}} has size {{one}}, and {{two}} in {other}; want the same",
        i=at,
        one=left[at],
        two=right[at],
    )


def starts_and_sizes(sizes: Any, total: int) -> tuple[Any, Any]:
    """Where each group starts along an axis of `total` entries, and its size there: i32[g], in numpy where known."""
    known = arguments.concrete(sizes)
    if known is None:
        bounds = offsets(sizes, total)
        return bounds[:-1], bounds[1:] - bounds[:-1]
    return (np.cumsum(known) - known).astype(np.int32), known.astype(np.int32)


def flat_places(rows: Any, columns: Any, capacity: int) -> tuple[Any, Any]:
    """Where the matrices of a flat buffer start, and how many rows of each lie inside: i32[g], in numpy where known."""
    known = arguments.concrete(rows), arguments.concrete(columns)
    if known[0] is not None and known[1] is not None and known[0].ndim == 1:
        entries = known[0].astype(np.int64) * known[1]
        if entries.sum() <= capacity and min(known[0].min(), known[1].min()) >= 0:
            return (np.cumsum(entries) - entries).astype(np.int32), known[0].astype(np.int32)
    rows, columns = (jnp.maximum(jnp.asarray(x), 0) for x in (rows, columns))
    wide = jnp.maximum(columns, 1)
    bounds = offsets(jnp.minimum(rows, np.int32(capacity) // wide) * columns, capacity)  # no product passes 2**31
    inside = jnp.minimum(rows, (bounds[1:] - bounds[:-1]) // wide)
    return bounds[:-1], jnp.where(columns > 0, inside, rows)
