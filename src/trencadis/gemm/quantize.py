"""Quantized grouped tensors: each group has scales of its own, wherever it lies.

    ragged rows, blocks of 2        scales, one for each row
    0 0 0 │ 1 1 1 1 │ · ·           a a b │ c c d d │ 1 1
    a a b │ c c d d │

A block ends where its group ends. `Scaled` has blocks of one length, so along a ragged axis they are 1 long, and scales
that entries share are repeated.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trencadis.core.spans import offsets, owner
from trencadis.gemm.ownership import along, owned_entries, quantized, spread
from trencadis.gemm.sizes import flat_places
from trencadis.gemm.tensor import GroupedTensor, checked
from trencadis.quant.formats import Format, format_of
from trencadis.quant.scaled import Scaled, Shape, blocks, checked_floats, largest, rounded

Array = jax.Array


def grouped_quantize(tensor: GroupedTensor, format: str | Format | None, granularity: Any = None) -> GroupedTensor:
    """A grouped tensor of few bits: as if each group were quantized alone.

    No two groups share a scale, and what no group owns is 0. Sizes may be traced.

    Args:
      tensor: a grouped tensor of floats, of any kind.
      format: as in `quantize`; or None, and the tensor comes back as it is.
      granularity: which entries of a group share a scale, as in `quantize`, where "tensor" and "group" mean all of
        them. Lengths of blocks are those along the axes of `tensor.shape`, and 0 is all that a group has; in a stack
        the first is 1; of a tensor that is fully ragged they are the two of a matrix.

    Returns:
      A `GroupedTensor` whose data are a `Scaled`, for `grouped_gemm`; `dequantize` gives one of floats.

    >>> x = GroupedTensor.ragged_rows(jnp.array([[1.0], [-2.0], [100.0], [jnp.nan]]), [2, 1])
    >>> q = grouped_quantize(x, "int8")
    >>> q
    GroupedTensor(Scaled(int8[4,1], scales float32[4,1] of blocks 1 x 1), 2 groups of 2, 1 rows)
    >>> q.data.values.ravel().tolist()
    [64, -127, 127, 0]
    """
    if not isinstance(tensor, GroupedTensor):
        raise TypeError(f"tensor: want a GroupedTensor, such as GroupedTensor.stacked(x); got {type(tensor).__name__}")
    if format is None:
        return tensor
    if quantized(tensor.data):
        raise TypeError(f"tensor: is quantized already; want one of floats; got {tensor!r}")
    kind, tensor = format_of(format), checked("tensor", tensor, ("tensor.first_dims", "tensor.last_dims"))
    x = jnp.where(owned_entries(tensor), checked_floats("tensor.data", tensor.data), 0)
    lengths = _lengths(kind, tensor, granularity)
    if _stacked(tensor):
        block, most = lengths, largest(x, lengths)
    else:
        axis = along(tensor)[1]
        block = tuple(1 if i == axis else lengths[i] for i in range(tensor.ndim))
        most = largest(x, block)
        if _flat(tensor) or lengths[axis] > 1:
            most = _shared(most, axis, *_parts(tensor, lengths))
    data = rounded(kind, x, block, most, _whole(tensor, most) if kind.total else None)
    return GroupedTensor(data, tensor.first_dims, tensor.last_dims, tensor.shape)


def _stacked(tensor: GroupedTensor) -> bool:
    return tensor.first_dims is None and tensor.last_dims is None


def _flat(tensor: GroupedTensor) -> bool:
    return tensor.first_dims is not None and tensor.last_dims is not None


def _lengths(kind: Format, tensor: GroupedTensor, granularity: Any) -> Shape:
    """How long blocks are along each axis of a group; along a ragged one, no longer than all groups together."""
    shape = tensor.shape * 2 if _flat(tensor) else tensor.shape
    if granularity in ("tensor", "group") or (granularity is None and not kind.block):
        granularity = (int(_stacked(tensor)), *(0,) * (len(shape) - 1))
    lengths = blocks(kind, granularity, shape)
    if _stacked(tensor) and lengths[0] > 1:
        raise ValueError(f"granularity: groups have scales of their own; want 1 along their axis; got {granularity!r}")
    return lengths


def _parts(tensor: GroupedTensor, lengths: Shape) -> tuple[Array, int]:
    """Which block each entry of the ragged axis is in, counted through all groups, and how many there are at most."""
    sizes, axis = along(tensor)
    groups, room = tensor.num_groups, tensor.shape[axis]
    bounds, group = offsets(jnp.asarray(sizes), room), owner(sizes, room)
    at = jnp.arange(room, dtype=jnp.int32) - bounds[group]  # in its group
    if _flat(tensor):
        columns = jnp.maximum(jnp.asarray(tensor.last_dims), 0)
        rows = flat_places(tensor.first_dims, columns, room)[1]
        across = _ceil(columns, lengths[1])
        counts, bound = _ceil(rows, lengths[0]) * across, room
        wide, across = (jnp.append(jnp.maximum(x, 1), 1)[group] for x in (columns, across))
        part = at // wide // lengths[0] * across + at % wide // lengths[1]
    else:
        counts, bound = _ceil(bounds[1:] - bounds[:-1], lengths[axis]), min(room, room // lengths[axis] + groups)
        part = at // lengths[axis]
    before = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    return before[group] + jnp.where(group < groups, part, 0), bound + 1  # what is nobody's comes last


def _ceil(x: Array, by: int) -> Array:
    return (x + np.int32(by - 1)) // np.int32(by)


def _loud(x: Array) -> Array:
    """With Inf for NaN, which every way to find a maximum keeps."""
    return jnp.where(jnp.isnan(x), jnp.inf, x)


def _shared(most: Array, axis: int, part: Array, count: int) -> Array:
    """The largest of all entries of an axis that are in one part, at each of them."""
    most = jnp.moveaxis(_loud(most), axis, 0)
    return jnp.moveaxis(jax.ops.segment_max(most, part, count)[part], 0, axis)


def _whole(tensor: GroupedTensor, most: Array) -> Array:
    """The largest finite number of each group, in a shape that broadcasts against the blocks."""
    return spread(largest_by_group(tensor, jnp.where(jnp.isfinite(most), most, 0)), tensor, 0)


def largest_by_group(tensor: GroupedTensor, x: Array) -> Array:
    """The largest of numbers that lie as those of a tensor do, by groups: [g]; 0 where there is none, Inf with NaN."""
    sizes, axis = along(tensor)
    x = _loud(x)
    if sizes is None:
        return x.max(axis=tuple(range(1, x.ndim)), initial=0)
    x = x.max(axis=tuple(i for i in range(x.ndim) if i != axis), initial=0)
    groups = tensor.num_groups
    return jnp.maximum(jax.ops.segment_max(x, owner(sizes, tensor.shape[axis]), groups + 1)[:groups], 0)


def scaled_by_group(tensor: GroupedTensor, scales: Array, format: str) -> GroupedTensor:
    """A tensor of values that are stored already, with a scale [g] for each group."""
    axis = 0 if _stacked(tensor) else along(tensor)[1]
    block = tuple(1 if i == axis else max(size, 1) for i, size in enumerate(tensor.shape))
    data = Scaled(tensor.data, spread(scales, tensor, 1), format, block)
    return GroupedTensor(data, tensor.first_dims, tensor.last_dims, tensor.shape)
