"""TransformerEngine's `grouped_quantize` and `grouped_dequantize`.

Groups may have any sizes: a block ends where its group ends, and unowned rows do not count in any scale.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from trencadis.compat.transformer_engine.quantizers import GroupedQuantizer, QuantizeLayout, ScalingMode
from trencadis.compat.transformer_engine.tensors import (
    GroupedNoScaleTensor,
    GroupedScaledTensor1x,
    ScaledTensor2x,
    tensor_of,
)
from trencadis.core import arguments
from trencadis.gemm.ownership import owned_entries, spread
from trencadis.gemm.quantize import grouped_quantize as quantize
from trencadis.gemm.quantize import largest_by_group, scaled_by_group
from trencadis.gemm.tensor import GroupedTensor

Array = jax.Array


def grouped_quantize(x: Any, quantizer: Any, group_sizes: Any = None, flatten_axis: int = -1) -> Any:
    """Quantize the groups of rows of x `[m, ...]`, or the matrices of a stack `[g, ...]` if there are no group_sizes.

    Delayed scaling uses the scales that the quantizer has, and updates them in place: under `jit`, make the quantizer
    an argument and a result.

    Args:
      x: an array, or a `GroupedNoScaleTensor`, which has its own sizes.
      quantizer: made by `QuantizerFactory` for as many groups; or None, and nothing is quantized.
      group_sizes: the number of rows of each group; the rows after them are unowned.
      flatten_axis: the first of the axes that count as columns. Blocks of 32 lie along the last axis; colwise, along
        the axis before this one.

    Returns:
      A `GroupedScaledTensor1x`, or a `ScaledTensor2x` with the layout ROWWISE_COLWISE, or a `GroupedNoScaleTensor`
      without a quantizer.

    >>> from trencadis.compat.transformer_engine import QuantizerFactory, ScalingMode
    >>> q = QuantizerFactory.create(1, ScalingMode.CURRENT_TENSOR_SCALING, jnp.float8_e4m3fn, n_groups=2)
    >>> made = grouped_quantize(jnp.array([[1.0], [7.0], [56.0]]), q, jnp.array([2, 1]))
    >>> made.scale_inv.tolist(), made.dequantize().ravel().tolist()
    ([0.015625, 0.125], [1.0, 7.0, 56.0])
    """
    if not isinstance(x, GroupedNoScaleTensor):
        x = arguments.as_array("x", x)
        x = GroupedNoScaleTensor(x, None, group_sizes, None, x.shape)
    elif group_sizes is not None:
        raise ValueError("group_sizes: a GroupedNoScaleTensor has its own")
    if quantizer is None:
        return x
    _check_quantizer(quantizer)
    tensor = tensor_of("x", x, "group_sizes" if group_sizes is not None else "")
    axis = _columns_from(flatten_axis, tensor.ndim)
    made, amax = [], None
    for colwise in (False, True):
        if quantizer.q_layout not in (QuantizeLayout(int(colwise)), QuantizeLayout.ROWWISE_COLWISE):
            continue
        scaled, scale, amax = quantized("x", tensor, quantizer, axis - 1 if colwise else tensor.ndim - 1)
        made.append(GroupedScaledTensor1x(
            scaled.data.values.ravel(), scale, amax, tensor.first_dims, tensor.last_dims, quantizer.scaling_mode,
            tensor.dtype, grouped_dequantize, colwise, "N", axis, tensor.shape,
        ))  # fmt: skip
    quantizer.update(amax)
    return made[0] if len(made) == 1 else ScaledTensor2x(*made)


def grouped_dequantize(tensor: Any) -> GroupedNoScaleTensor:
    """The tensor without scales, with the same groups, in its original shape; works under `jit`.

    >>> x = GroupedNoScaleTensor(jnp.ones((3, 2)), None, jnp.array([1, 2]), None, (3, 2))
    >>> grouped_dequantize(x) is x
    True
    """
    if isinstance(tensor, GroupedNoScaleTensor):
        return tensor
    one = tensor.rowwise_tensor if isinstance(tensor, ScaledTensor2x) else tensor
    if not isinstance(one, GroupedScaledTensor1x):
        raise TypeError(f"tensor: want one that grouped_quantize makes; got {type(tensor).__name__}")
    return GroupedNoScaleTensor(one.dequantize(), one.amax, one.first_dims, one.last_dims, one.original_shape)


def quantized(
    name: str, tensor: GroupedTensor, quantizer: GroupedQuantizer, axis: int
) -> tuple[GroupedTensor, Array, Any]:
    """The tensor with blocks of scales along an axis, its flat `scale_inv`, and the largest magnitude of each group."""
    kind, groups = quantizer.format, tensor.num_groups
    if not jnp.issubdtype(tensor.dtype, jnp.floating):
        raise TypeError(f"{name}: want a float dtype to quantize; got {tensor.dtype}")
    if quantizer.n_groups != groups:
        raise ValueError(f"quantizer: is for {quantizer.n_groups} groups; got a tensor of {groups}")
    if quantizer.scaling_mode.is_1d_block_scaling():
        made = quantize(tensor, kind, tuple(kind.block if i == axis else 1 for i in range(tensor.ndim)))
        return made, made.data.scale.ravel(), None
    x = jnp.where(owned_entries(tensor), tensor.data.astype(jnp.float32), 0)
    amax = largest_by_group(tensor, jnp.abs(x))
    delayed = quantizer.scaling_mode is ScalingMode.DELAYED_TENSOR_SCALING
    scale = 1 / quantizer.scale if delayed else kind.scale_of(amax)
    values = kind.rounded(x / spread(scale, tensor, 1))
    stored = GroupedTensor(values, tensor.first_dims, tensor.last_dims, tensor.shape)
    return scaled_by_group(stored, scale, kind.name), scale, amax


def _check_quantizer(quantizer: Any) -> None:
    """Raise unless this is a quantizer for grouped tensors."""
    if not isinstance(quantizer, GroupedQuantizer):
        raise TypeError(
            f"quantizer: want None or a GroupedQuantizer, made by QuantizerFactory; got {type(quantizer).__name__}"
        )


def _columns_from(flatten_axis: Any, ndim: int) -> int:
    """flatten_axis counted from the first axis, or an error unless there is an axis before it."""
    axis = flatten_axis + ndim if isinstance(flatten_axis, int) and flatten_axis < 0 else flatten_axis
    if not isinstance(axis, int) or not 0 < axis < ndim:
        raise ValueError(f"flatten_axis: want an axis after the first of {ndim}; got {flatten_axis!r}")
    return axis
