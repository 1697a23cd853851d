"""Scales of blocks of an array: those of its entries, and those of its blocks after axes are merged."""

from __future__ import annotations

import math
from typing import TypeAlias

import jax
import jax.numpy as jnp

from trencadis.core.mesh import repeated

Array = jax.Array
Shape: TypeAlias = tuple[int, ...]


def expanded(scale: Array, block: Shape, shape: Shape) -> Array:
    """The scale of each entry of an array of this shape; an axis with one scale keeps length 1."""
    for axis, (length, size) in enumerate(zip(block, shape, strict=True)):
        if length > 1 and scale.shape[axis] > 1:
            scale = _repeated(scale, axis, length, size)
    return scale


def merged(scale: Array, shape: Shape, block: Shape, counts: Shape) -> tuple[Array, Shape]:
    """The scales, and the lengths of blocks, after neighbouring axes are merged as `Scaled.merged` says."""
    sizes, lengths = list(shape), list(block)
    for at, count in enumerate(counts):
        if not count:
            sizes.insert(at, 1)
            lengths.insert(at, 1)
            scale = jnp.expand_dims(scale, at)
        for _ in range(count - 1):
            scale, lengths[at : at + 2] = _joined(scale, at, sizes[at : at + 2], lengths[at : at + 2])
            sizes[at : at + 2] = [sizes[at] * sizes[at + 1]]
    return scale, tuple(lengths)


def merged_shape(shape: Shape, counts: Shape) -> Shape:
    """The shape after neighbouring axes are merged."""
    starts = [sum(counts[:at]) for at in range(len(counts) + 1)]
    merged = (math.prod(shape[start : start + count]) for start, count in zip(starts, counts, strict=False))
    return (*merged, *shape[starts[-1] :])


def _joined(scale: Array, axis: int, shape: list[int], block: list[int]) -> tuple[Array, list[int]]:
    """The scales, and the length of a block, after an axis and the next one are merged."""
    if scale.shape[axis + 1] == 1:  # a block is made of whole rows of the second axis
        length = block[0] * shape[1]
    else:
        length = math.gcd(block[1], shape[1])
        scale = _repeated(scale, axis, block[0], shape[0])
        scale = _repeated(scale, axis + 1, block[1] // length, shape[1] // length)
    joined = (*scale.shape[:axis], scale.shape[axis] * scale.shape[axis + 1], *scale.shape[axis + 2 :])
    return scale.reshape(joined), [max(length, 1)]


def _repeated(scale: Array, axis: int, times: int, size: int) -> Array:
    """Each scale repeated along an axis, cut off at this size; the axis may be sharded over explicit mesh axes."""
    return scale if times == 1 else jax.lax.slice_in_dim(repeated(scale, times, axis), 0, size, axis=axis)
