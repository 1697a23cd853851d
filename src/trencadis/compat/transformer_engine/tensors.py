"""TransformerEngine's grouped tensors, without scales and with them, and their conversion to `trencadis.GroupedTensor`.

Tensor scaling has one scale per group. MXFP8 has one per 32 entries along the last axis, or colwise along the one
before.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp

from trencadis.compat.transformer_engine.quantizers import STATIC, ScalingMode, TensorUsage
from trencadis.core import arguments
from trencadis.gemm.quantize import scaled_by_group
from trencadis.gemm.tensor import GroupedTensor, checked
from trencadis.quant.formats import FORMATS
from trencadis.quant.scaled import Scaled, dequantize

Array = jax.Array
Shape = tuple[int, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class GroupedNoScaleTensor:
    """TransformerEngine's grouped tensor without scales: `data` may be stored flat, `original_shape` is its shape.

    >>> x = GroupedNoScaleTensor(jnp.ones((3, 2)), None, jnp.array([1, 2]), None, (3, 2))
    >>> x.ndim, x.dequantize().shape
    (2, (3, 2))
    """

    data: Any
    amax: Any
    first_dims: Any
    last_dims: Any
    original_shape: Shape = dataclasses.field(metadata=STATIC)

    @property
    def ndim(self) -> int:
        """The number of axes of `original_shape`."""
        return len(self.original_shape)

    def dequantize(self) -> Any:
        """The data as they are, since there are no scales."""
        return self.data

    def get_tensor(self, usage: TensorUsage) -> GroupedNoScaleTensor:
        """Return this tensor, whatever the usage."""
        del usage
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class GroupedScaledTensor1x:
    """TransformerEngine's quantized grouped tensor: data and scales are stored flat, `original_shape` is its shape.

    A number is its stored value times `scale_inv`. There is one `scale_inv` per group, `[g]`, with tensor scaling. In
    MXFP8 there is one per 32 entries along the last axis, or colwise along the one before, in the order of the data,
    neither padded nor swizzled. Along a ragged axis, blocks end where groups end, and there is a `scale_inv` for each
    entry.
    """

    data: Any
    scale_inv: Any
    amax: Any
    first_dims: Any
    last_dims: Any
    scaling_mode: ScalingMode = dataclasses.field(metadata=STATIC)
    dq_dtype: Any = dataclasses.field(metadata=STATIC)
    _dq_func: Any = dataclasses.field(metadata=STATIC)
    is_colwise: bool = dataclasses.field(metadata=STATIC)
    data_layout: str = dataclasses.field(metadata=STATIC)
    flatten_axis: int = dataclasses.field(metadata=STATIC)
    original_shape: Shape = dataclasses.field(metadata=STATIC)
    pre_swizzled: bool = dataclasses.field(default=False, metadata=STATIC)

    @property
    def ndim(self) -> int:
        """The number of axes of `original_shape`."""
        return len(self.original_shape)

    @property
    def group_sizes(self) -> Any:
        """`first_dims`; for a stack of matrices a 1 per group, as in the original."""
        ragged = getattr(self.first_dims, "size", 0) > 0
        return self.first_dims if ragged else jnp.ones((self.original_shape[0],), jnp.int32)

    def dequantize(self) -> Array:
        """The dequantized numbers in the original shape and dtype; works under `jit`."""
        return dequantize(tensor_of("tensor", self), self.dq_dtype).data

    def get_tensor(self, usage: TensorUsage) -> GroupedScaledTensor1x:
        """Return this tensor if its blocks lie along the axis that this usage contracts; raises otherwise."""
        if self.scaling_mode.is_1d_block_scaling() and self.is_colwise != usage.colwise:
            raise ValueError(f"usage: {usage.name} wants a tensor with is_colwise={usage.colwise}")
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class ScaledTensor2x:
    """A tensor that is quantized twice, with blocks along the last axis and along the one before."""

    rowwise_tensor: GroupedScaledTensor1x
    colwise_tensor: GroupedScaledTensor1x

    def dequantize(self) -> Array:
        """The dequantized numbers of the rowwise tensor."""
        return self.rowwise_tensor.dequantize()

    def get_tensor(self, usage: TensorUsage) -> GroupedScaledTensor1x:
        """The one of the two tensors whose blocks lie along the axis that this usage contracts."""
        return self.colwise_tensor if usage.colwise else self.rowwise_tensor


def tensor_of(name: str, x: Any, sizes: str = "") -> GroupedTensor:
    """One of TransformerEngine's tensors as a `GroupedTensor`, or an error that names the argument, or its `sizes`."""
    if not isinstance(x, (GroupedNoScaleTensor, GroupedScaledTensor1x)):
        hint = "; choose one by get_tensor(usage)" if isinstance(x, ScaledTensor2x) else ""
        raise TypeError(f"{name}: want a GroupedNoScaleTensor or a GroupedScaledTensor1x; got {type(x).__name__}{hint}")
    data = arguments.as_array(f"{name}.data", x.data)
    both = all(getattr(dims, "size", 0) for dims in (x.first_dims, x.last_dims))
    shape = data.shape if both else _checked_shape(name, x.original_shape)
    if data.size != math.prod(shape):
        raise ValueError(f"{name}: its data have shape {data.shape}; want as many numbers as original_shape {shape}")
    dims = sizes or f"{name}.first_dims", f"{name}.last_dims"
    tensor = checked(name, GroupedTensor(data.reshape(shape), x.first_dims, x.last_dims, shape), dims)
    return tensor if isinstance(x, GroupedNoScaleTensor) else _scaled(name, x, tensor)


def _checked_shape(name: str, shape: Any) -> Shape:
    """original_shape as a tuple of ints, or an error that names it."""
    try:
        return tuple(operator.index(size) for size in shape)
    except TypeError:
        raise TypeError(f"{name}.original_shape: want a tuple of ints; got {shape!r}") from None


def _scaled(name: str, x: GroupedScaledTensor1x, values: GroupedTensor) -> GroupedTensor:
    """The tensor of stored values, together with its scales."""
    if not isinstance(x.scaling_mode, ScalingMode):
        raise TypeError(f"{name}.scaling_mode: want a ScalingMode; got {x.scaling_mode!r}")
    if x.scaling_mode is ScalingMode.NO_SCALING:
        return values
    for field, got, want in (("data_layout", x.data_layout, "N"), ("pre_swizzled", x.pre_swizzled, False)):
        if got != want:
            raise ValueError(f"{name}.{field}: want {want!r}, numbers and scales in their natural order; got {got!r}")
    blocks, counts = _mx_blocks(name, x, values)
    shape = (values.num_groups,) if x.scaling_mode.is_tensor_scaling() else counts
    scale = arguments.as_array(f"{name}.scale_inv", x.scale_inv)
    if scale.size != math.prod(shape):
        raise ValueError(f"{name}.scale_inv: want {math.prod(shape)} scales, not padded; got shape {scale.shape}")
    if x.scaling_mode.is_tensor_scaling():
        return scaled_by_group(values, scale.reshape(shape), values.dtype.name)
    format = "mxfp8" if values.dtype == FORMATS["mxfp8"].values else "mxfp8_e5m2"
    data = Scaled(values.data, scale.reshape(shape), format, blocks)
    return GroupedTensor(data, values.first_dims, values.last_dims, values.shape)


def _mx_blocks(name: str, x: GroupedScaledTensor1x, values: GroupedTensor) -> tuple[Shape, Shape]:
    """The length of MXFP8 blocks along each axis, and the number of blocks along each axis."""
    if x.flatten_axis not in range(-values.ndim, values.ndim):
        raise ValueError(f"{name}.flatten_axis: want one of the {values.ndim} axes; got {x.flatten_axis!r}")
    axis = x.flatten_axis % values.ndim - 1 if x.is_colwise else values.ndim - 1
    ragged = {0: values.first_dims, values.ndim - 1: values.last_dims}.get(axis) is not None
    length = 1 if ragged else FORMATS["mxfp8"].block
    blocks = tuple(max(min(length, size), 1) if i == axis else 1 for i, size in enumerate(values.shape))
    return blocks, tuple(-(-size // length) for size, length in zip(values.shape, blocks, strict=True))
