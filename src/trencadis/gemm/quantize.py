"""Quantized grouped tensors: no two groups share a scale, wherever the groups are stored.

    ragged rows, blocks of 2        one scale for each row
    0 0 0 │ 1 1 1 1 │ · ·           a a b │ c c d d │ 1 1
    a a b │ c c d d │

A block ends where its group ends. A `Scaled` has blocks of one length, so along a ragged axis its blocks have length 1,
and a scale that several entries share is repeated.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from trencadis.core.problem import cdiv
from trencadis.core.spans import offsets, owner
from trencadis.gemm.ownership import along, owned_entries, quantized, spread
from trencadis.gemm.sizes import flat_places
from trencadis.gemm.tensor import GroupedTensor, checked
from trencadis.quant.blocks import Shape
from trencadis.quant.calibrate import Granularity, block_absmax, block_shape, checked_floats, quantize_blocks
from trencadis.quant.formats import Format, FormatLike, format_of
from trencadis.quant.scaled import Scaled

Array = jax.Array


def grouped_quantize(
    tensor: GroupedTensor, format: FormatLike | None, granularity: Granularity = None
) -> GroupedTensor:
    """Quantize each group of a grouped tensor as if it were alone.

    No two groups share a scale, and unowned entries become 0. Sizes may be traced.

    Args:
      tensor: a grouped tensor of floats, of any kind.
      format: a format of `quantize`, by name or as a dtype; None returns the tensor as it is.
      granularity: the entries of a group that share a scale, as in `quantize`; both "tensor" and "group" mean the whole
        group. Block lengths are those along the axes of `tensor.shape`, where 0 is all that a group has of the axis. In
        a stack the first length is 1. A fully ragged tensor takes two lengths, those of its matrices.

    Returns:
      A `GroupedTensor` with a `Scaled` as its data, for `grouped_gemm`; `dequantize` makes it one of floats again.

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
    if tensor.is_stacked:
        block, absmax = lengths, block_absmax(x, lengths)
    else:
        axis = along(tensor)[1]
        block = tuple(1 if i == axis else lengths[i] for i in range(tensor.ndim))
        absmax = block_absmax(x, block)
        if tensor.is_fully_ragged or lengths[axis] > 1:
            absmax = _shared(absmax, axis, *_block_ids(tensor, lengths))
    data = quantize_blocks(kind, x, block, absmax, _group_absmax(tensor, absmax) if kind.total else None)
    return GroupedTensor(data, tensor.first_dims, tensor.last_dims, tensor.shape)


def _lengths(kind: Format, tensor: GroupedTensor, granularity: Granularity) -> Shape:
    """The length of a block along each axis of a group; along a ragged axis at most the length of all groups."""
    shape = tensor.shape * 2 if tensor.is_fully_ragged else tensor.shape
    if granularity in ("tensor", "group") or (granularity is None and not kind.block):
        granularity = (int(tensor.is_stacked), *(0,) * (len(shape) - 1))
    lengths = block_shape(kind, granularity, shape)
    if tensor.is_stacked and lengths[0] > 1:
        raise ValueError(f"granularity: groups have scales of their own; want 1 along their axis; got {granularity!r}")
    return lengths


def _block_ids(tensor: GroupedTensor, lengths: Shape) -> tuple[Array, int]:
    """The block of each entry of the ragged axis, numbered through all groups, and a bound on how many there are."""
    sizes, axis = along(tensor)
    groups, room = tensor.num_groups, tensor.shape[axis]
    bounds, group = offsets(jnp.asarray(sizes), room), owner(sizes, room)
    at = jnp.arange(room, dtype=jnp.int32) - bounds[group]  # the position in its group
    if tensor.is_fully_ragged:
        columns = jnp.maximum(jnp.asarray(tensor.last_dims), 0)
        rows = flat_places(tensor.first_dims, columns, room)[1]
        across = cdiv(columns, lengths[1])
        counts, bound = cdiv(rows, lengths[0]) * across, room
        width, across = (jnp.append(jnp.maximum(x, 1), 1)[group] for x in (columns, across))
        block = at // width // lengths[0] * across + at % width // lengths[1]
    else:
        counts, bound = cdiv(bounds[1:] - bounds[:-1], lengths[axis]), min(room, room // lengths[axis] + groups)
        block = at // lengths[axis]
    before = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    return before[group] + jnp.where(group < groups, block, 0), bound + 1  # unowned entries share the last block


def _nan_to_inf(x: Array) -> Array:
    """x with Inf for NaN: a maximum by segments may drop NaN, and keeps Inf on every device."""
    return jnp.where(jnp.isnan(x), jnp.inf, x)


def _shared(absmax: Array, axis: int, ids: Array, count: int) -> Array:
    """The largest of the magnitudes along an axis that have the same block id, at each of them."""
    absmax = jnp.moveaxis(_nan_to_inf(absmax), axis, 0)
    return jnp.moveaxis(jax.ops.segment_max(absmax, ids, count)[ids], 0, axis)


def _group_absmax(tensor: GroupedTensor, absmax: Array) -> Array:
    """The largest finite magnitude of each group, in a shape that broadcasts against the blocks."""
    return spread(largest_by_group(tensor, jnp.where(jnp.isfinite(absmax), absmax, 0)), tensor, 0)


def largest_by_group(tensor: GroupedTensor, x: Array) -> Array:
    """The largest of the numbers of each group, [g], where x is laid out as the tensor's data; Inf if one is NaN.

    A group without a positive number has 0.
    """
    sizes, axis = along(tensor)
    x = _nan_to_inf(x)
    if sizes is None:
        return x.max(axis=tuple(range(1, x.ndim)), initial=0)
    x = x.max(axis=tuple(i for i in range(x.ndim) if i != axis), initial=0)
    groups = tensor.num_groups
    return jnp.maximum(jax.ops.segment_max(x, owner(sizes, tensor.shape[axis]), groups + 1)[:groups], 0)


def scaled_by_group(tensor: GroupedTensor, scales: Array, format: str) -> GroupedTensor:
    """A tensor of values that are quantized already, with one scale for each group, [g]."""
    axis = 0 if tensor.is_stacked else along(tensor)[1]
    block = tuple(1 if i == axis else max(size, 1) for i, size in enumerate(tensor.shape))
    data = Scaled(tensor.data, spread(scales, tensor, 1), format, block)
    return GroupedTensor(data, tensor.first_dims, tensor.last_dims, tensor.shape)
