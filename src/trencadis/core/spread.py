"""Arrays that every device of a mesh axis has, inside `jax.shard_map`: their gradients are sums over the devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax import lax
from jaxtyping import Array

from trencadis.core.jax_compat import V, vary_over, varying_axes
from trencadis.core.linear import linear
from trencadis.core.mesh import Axes

LARGE = 1 << 20  # bytes of an array whose sum is worth two collectives instead of one


def spread(x: V, axes: Axes, add: Callable[[Array, Any], Array] | None = None) -> V | Array:
    """The same array, which varies over these mesh axes too; its gradient is summed by `add`, or `total`."""
    missing = tuple(axis for axis in axes if axis not in varying_axes(x))
    if not missing:
        return x

    def vary(_: tuple[()], x: Array) -> Array:
        return vary_over(x, missing)

    def back(_: tuple[()], ct: Array) -> Array:
        return (add or total)(ct, missing)

    return linear(vary, back, (), x)


def total(x: Array, axes: Axes) -> Array:
    """The sum over the devices of mesh axes, as `lax.psum` has it.

    For an all-reduce XLA needs a second array on CPUs. A reduce-scatter and an all-gather of its parts move as many
    bytes, and the sums take the place of their terms.
    """
    parts = lax.axis_size(axes)
    dimension = next((i for i, size in enumerate(x.shape) if size and size % parts == 0), None)
    if dimension is None or x.size * x.dtype.itemsize < LARGE:
        return lax.psum(x, axes)

    def in_parts(x: Array) -> Array:
        mine = lax.psum_scatter(x, axes, scatter_dimension=dimension, tiled=True)
        return lax.all_gather(mine, axes, axis=dimension, tiled=True, to="invarying")

    return lax.platform_dependent(x, cpu=in_parts, default=lambda x: lax.psum(x, axes))
