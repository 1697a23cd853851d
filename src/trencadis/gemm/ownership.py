"""Which entries of a grouped tensor belong to which group, and which belong to none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from trencadis.core import arguments
from trencadis.core.spans import offsets, owner
from trencadis.gemm.sizes import flat_places

if TYPE_CHECKING:
    from trencadis.gemm.tensor import GroupedTensor

Array = jax.Array


def quantized(data: Any) -> bool:
    """Whether data are not an array but stand for one, as a `quant.Scaled` does."""
    return hasattr(data, "dequantize") and hasattr(data, "shape")


def along(tensor: GroupedTensor) -> tuple[Any, int]:
    """The number of entries of each group along the axis on which groups follow one another, and that axis.

    A flat buffer has one axis. A stack has no such sizes: None.
    """
    first, last = tensor.first_dims, tensor.last_dims
    if first is not None and last is not None:
        _, rows = flat_places(first, last, tensor.shape[0])
        columns = arguments.concrete(last)
        return rows * (jnp.maximum(jnp.asarray(last), 0) if columns is None else columns), 0
    return (last, tensor.ndim - 1) if first is None else (first, 0)


def owned_entries(tensor: GroupedTensor) -> Array:
    """Whether a group owns an entry: a bool array that broadcasts against the data."""
    sizes, axis = along(tensor)
    if sizes is None:
        return jnp.ones((1,) * tensor.ndim, bool)
    end = offsets(jnp.asarray(sizes), tensor.shape[axis])[-1]  # groups follow one another from entry 0 on
    shape = [length if i == axis else 1 for i, length in enumerate(tensor.shape)]
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis) < end


def spread(values: Array, tensor: GroupedTensor, fill: Any) -> Array:
    """The value [g] of its group at each entry, `fill` at unowned ones; an array that broadcasts against the data."""
    sizes, axis = along(tensor)
    if sizes is None:
        return values.reshape(-1, *(1,) * (tensor.ndim - 1))
    values = jnp.append(values, jnp.full((1,), fill, values.dtype))[owner(sizes, tensor.shape[axis])]
    return values.reshape([-1 if i == axis else 1 for i in range(tensor.ndim)])
