"""TransformerEngine's grouped GEMM for JAX, as it is since grouped tensors have `first_dims` and `last_dims`.

`from trencadis.compat.transformer_engine import GroupedNoScaleTensor, grouped_gemm, grouped_dense, grouped_dbias`. On
every backend, for any sizes: groups may be empty, and rows past the last group are nobody's, so that they are 0 in
results and in gradients. `group_offset`, `precision` and a bias are honoured. Tensors with scales are not here yet.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from trencadis import api, grouped
from trencadis import problem as what
from trencadis.tensors import GroupedTensor

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class QuantizerSet:
    """Quantizers of the passes of a layer: none."""


noop_quantizer_set = QuantizerSet()


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class GroupedNoScaleTensor:
    """A grouped tensor as TransformerEngine has it: `data` may be flat, `original_shape` is its shape.

    >>> x = GroupedNoScaleTensor(jnp.ones((3, 2)), None, jnp.array([1, 2]), None, (3, 2))
    >>> x.ndim, x.dequantize().shape
    (2, (3, 2))
    """

    data: Any
    amax: Any
    first_dims: Any
    last_dims: Any
    original_shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @property
    def ndim(self) -> int:
        """Axes of `original_shape`."""
        return len(self.original_shape)

    def dequantize(self) -> Any:
        """The data: there are no scales."""
        return self.data


def grouped_gemm(
    lhs: GroupedNoScaleTensor,
    rhs: GroupedNoScaleTensor,
    contracting_dims: tuple[Sequence[int], Sequence[int]] = ((1,), (2,)),
    bias: Any = None,
    precision: Any = jax.lax.Precision.DEFAULT,
    preferred_element_type: Any = None,
    group_offset: Any = None,
    quantizer_set: Any = noop_quantizer_set,
    use_async_d2h_group_sizes: bool = False,
) -> Array:
    """Forward, dgrad and wgrad by what is ragged, as `trencadis.grouped_gemm`; returns the data of the result.

    Args:
      preferred_element_type: the dtype of the result; by default that of lhs.
      quantizer_set: only the one that does nothing.
      use_async_d2h_group_sizes: sizes are never copied to the host: there is nothing to make asynchronous.

    >>> x = GroupedNoScaleTensor(jnp.ones((3, 2)), None, jnp.array([1, 2]), None, (3, 2))
    >>> w = GroupedNoScaleTensor(jnp.ones((2, 2, 4)), None, None, None, (2, 2, 4))
    >>> grouped_gemm(x, w, contracting_dims=((1,), (1,))).shape
    (3, 4)
    """
    del use_async_d2h_group_sizes
    _unscaled(quantizer_set)
    a, b = _tensor("lhs", lhs), _tensor("rhs", rhs)
    if all(dims is None for x in (a, b) for dims in (x.first_dims, x.last_dims)):
        raise ValueError("Cannot infer number of gemms: lhs and rhs have neither first_dims nor last_dims")
    found = grouped.grouped_gemm(
        a, b, contracting_dims=contracting_dims, bias=bias, precision=precision, group_offset=group_offset,
        preferred_element_type=a.dtype if preferred_element_type is None else preferred_element_type,
    )  # fmt: skip
    return found.data if isinstance(found, GroupedTensor) else found


def grouped_dense(
    x: Any,
    kernel: Any,
    group_sizes: Any,
    contracting_dims: tuple[Sequence[int], Sequence[int]] = ((1,), (1,)),
    bias: Any = None,
    precision: Any = jax.lax.Precision.DEFAULT,
    preferred_element_type: Any = None,
    group_offset: Any = None,
    quantizer_set: Any = noop_quantizer_set,
    kernel_fsdp_info: tuple[Any, int] = (None, -1),
) -> Array:
    """A dense layer for each group, as `trencadis.grouped_dense`. Gradients have the dtypes of what they belong to.

    Args:
      preferred_element_type: the dtype of the result; by default that of x.
      quantizer_set: only the one that does nothing.
      kernel_fsdp_info: only `(None, -1)`: gather a sharded kernel before the call.

    >>> grouped_dense(jnp.ones((3, 2)), jnp.ones((2, 2, 4)), jnp.array([1, 2])).shape
    (3, 4)
    """
    _unscaled(quantizer_set)
    if tuple(kernel_fsdp_info) != (None, -1):
        raise ValueError(f"kernel_fsdp_info: want (None, -1), a kernel that is gathered; got {kernel_fsdp_info!r}")
    x = what.as_array("x", x)
    return grouped.grouped_dense(
        x, kernel, group_sizes, contracting_dims=contracting_dims, bias=bias, precision=precision,
        preferred_element_type=x.dtype if preferred_element_type is None else preferred_element_type,
        group_offset=group_offset,
    )  # fmt: skip


def grouped_dbias(grad: Any, group_sizes: Any) -> Array:
    """The gradient of a bias: rows `[m, n]` summed by group to `[g, n]`, in float32, in the dtype of grad.

    >>> grouped_dbias(jnp.ones((3, 2), jnp.bfloat16), jnp.array([0, 2])).tolist()  # the last row is nobody's
    [[0.0, 0.0], [2.0, 2.0]]
    """
    grad = what.as_array("grad", grad)
    if grad.ndim != 2:
        raise ValueError(f"grad: want 2 dimensions [m, n]; got shape {grad.shape}")
    ones = jnp.ones((grad.shape[0], 1), grad.dtype)
    total = api.transposed_grouped_matmul(
        ones, grad, group_sizes, grad.dtype, transpose_lhs=True, precision=jax.lax.Precision.HIGHEST
    )
    return total[:, 0]


def _tensor(name: str, x: Any) -> GroupedTensor:
    if not isinstance(x, GroupedNoScaleTensor):
        raise TypeError(f"{name}: want a GroupedNoScaleTensor; got {type(x).__name__}")
    data = what.as_array(f"{name}.data", x.data)
    both = all(getattr(dims, "size", 0) for dims in (x.first_dims, x.last_dims))
    shape = data.shape if both else tuple(x.original_shape)
    if data.size != math.prod(shape):
        raise ValueError(f"{name}: its data have shape {data.shape}; want as many numbers as original_shape {shape}")
    return GroupedTensor(data.reshape(shape), x.first_dims, x.last_dims, shape)


def _unscaled(quantizer_set: Any) -> None:
    if quantizer_set is not noop_quantizer_set and quantizer_set is not None:
        raise ValueError(
            f"quantizer_set: want the one that does nothing: scales are not supported; got {quantizer_set!r}"
        )
