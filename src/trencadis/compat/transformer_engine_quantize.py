"""What TransformerEngine's JAX modules quantize grouped tensors with: modes, quantizers, and the tensors they make.

Tensor scaling has one scale for each group; MXFP8 one for each 32 entries along the last axis, or colwise along the
one before. Groups may have any sizes: a block ends where its group ends, and what is nobody's has no part in a scale.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trencadis.core import problem as what
from trencadis.gemm.ownership import owned_entries, spread
from trencadis.gemm.quantize import grouped_quantize as quantize
from trencadis.gemm.quantize import largest_by_group, scaled_by_group
from trencadis.gemm.tensor import GroupedTensor
from trencadis.quant.formats import FORMATS, Format
from trencadis.quant.scaled import Scaled, dequantize

Array = jax.Array

STATIC = {"static": True}


class ScalingMode(enum.Enum):
    """What shares a scale, and when it is found."""

    NO_SCALING = 0
    DELAYED_TENSOR_SCALING = 1  # a group, by what was largest in the calls before
    MXFP8_1D_SCALING = 2  # 32 entries
    CURRENT_TENSOR_SCALING = 3  # a group, by what is largest now

    def is_tensor_scaling(self) -> bool:
        """One scale for each group."""
        return self in (ScalingMode.DELAYED_TENSOR_SCALING, ScalingMode.CURRENT_TENSOR_SCALING)

    def is_1d_block_scaling(self) -> bool:
        """One for each block."""
        return self is ScalingMode.MXFP8_1D_SCALING


class QuantizeLayout(enum.Enum):
    """Along which axis blocks lie: the last, the one before, or both, in two tensors."""

    ROWWISE = 0
    COLWISE = 1
    ROWWISE_COLWISE = 2


class TensorUsage(enum.Enum):
    """What a tensor is in a product."""

    LHS = 0
    LHS_TRANS = 1
    RHS = 2
    RHS_TRANS = 3


# ---------------------------------------------------------------------------------------------------------------------
# Quantizers


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class GroupedQuantizer:
    """How a grouped tensor is quantized. Delayed scaling has a state, `scale` and `amax_history`, of each group.

    Made by `QuantizerFactory.create`.
    """

    scale: Any = None  # [g], what numbers are multiplied with
    amax_history: Any = None  # [g, length]
    q_dtype: Any = dataclasses.field(default=jnp.float8_e4m3fn, metadata=STATIC)
    scaling_mode: ScalingMode = dataclasses.field(default=ScalingMode.CURRENT_TENSOR_SCALING, metadata=STATIC)
    q_layout: QuantizeLayout = dataclasses.field(default=QuantizeLayout.ROWWISE, metadata=STATIC)
    n_groups: int = dataclasses.field(default=1, metadata=STATIC)

    @property
    def quantizers(self) -> tuple[GroupedQuantizer, ...]:
        """The original has one for each group; here one does for all."""
        return (self,)

    @property
    def format(self) -> Format:
        """Of the numbers."""
        plain = FORMATS[np.dtype(self.q_dtype).name]
        if self.scaling_mode.is_tensor_scaling():
            return plain
        return dataclasses.replace(FORMATS["mxfp8"], values=plain.values, largest=plain.largest)

    def update(self, amax: Any) -> None:
        """Be the quantizer of the next call, after one that saw these largest numbers [g]."""
        if self.scaling_mode is not ScalingMode.DELAYED_TENSOR_SCALING:
            return
        history = self.amax_history.at[:, 0].set(amax)
        most = history.max(axis=1)
        self.scale = jnp.where((most > 0) & jnp.isfinite(most), np.float32(self.format.largest) / most, self.scale)
        self.amax_history = jnp.roll(history, -1, axis=1).at[:, 0].set(0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class QuantizerSet:
    """Quantizers of a layer: of what comes in, of its kernel, and of the gradient of what comes out; None: of none."""

    x: GroupedQuantizer | None = None
    kernel: GroupedQuantizer | None = None
    dgrad: GroupedQuantizer | None = None


noop_quantizer_set = QuantizerSet()

HISTORY = 1024  # calls that delayed scaling looks back


class QuantizerFactory:
    """Makes quantizers, as the original's does, for groups."""

    @staticmethod
    def create(
        n_quantizers: int = 1,
        scaling_mode: ScalingMode | None = None,
        q_dtype: Any = None,
        q_layout: QuantizeLayout = QuantizeLayout.ROWWISE,
        n_groups: int | None = None,
    ) -> Any:
        """A quantizer, or a tuple of several; None where there is no scaling.

        >>> QuantizerFactory.create(scaling_mode=ScalingMode.NO_SCALING) is None
        True
        """
        if not isinstance(scaling_mode, ScalingMode):
            raise TypeError(f"scaling_mode: want a ScalingMode; got {scaling_mode!r}")
        made = [_quantizer(scaling_mode, q_dtype, q_layout, n_groups) for _ in range(n_quantizers)]
        return made[0] if n_quantizers == 1 else tuple(made)

    @staticmethod
    def create_set(
        n_quantizer_sets: int = 1,
        scaling_mode: ScalingMode = ScalingMode.NO_SCALING,
        fwd_dtype: Any = jnp.float8_e4m3fn,
        bwd_dtype: Any = jnp.float8_e5m2,
        is_2x2x: bool | None = None,
        n_groups: int | None = None,
    ) -> Any:
        """A set of quantizers, or a tuple of several.

        >>> made = QuantizerFactory.create_set(scaling_mode=ScalingMode.MXFP8_1D_SCALING, n_groups=2)
        >>> made.kernel.q_layout, made.dgrad.q_dtype.__name__
        (<QuantizeLayout.ROWWISE_COLWISE: 2>, 'float8_e5m2')
        """
        both = scaling_mode.is_1d_block_scaling() if is_2x2x is None else is_2x2x
        rows = QuantizeLayout.ROWWISE_COLWISE if both else QuantizeLayout.ROWWISE
        kernel = QuantizeLayout.COLWISE if scaling_mode.is_1d_block_scaling() and not both else rows
        sets = [
            QuantizerSet(*(
                QuantizerFactory.create(1, scaling_mode, dtype, layout, n_groups)
                for dtype, layout in ((fwd_dtype, rows), (fwd_dtype, kernel), (bwd_dtype, rows))
            ))
            for _ in range(n_quantizer_sets)
        ]  # fmt: skip
        return sets[0] if n_quantizer_sets == 1 else tuple(sets)


def _quantizer(mode: ScalingMode, dtype: Any, layout: QuantizeLayout, groups: int | None) -> GroupedQuantizer | None:
    if mode is ScalingMode.NO_SCALING:
        return None
    if np.dtype(dtype) not in (jnp.float8_e4m3fn, jnp.float8_e5m2):
        raise TypeError(f"q_dtype: want float8_e4m3fn or float8_e5m2; got {np.dtype(dtype).name}")
    if groups is None:
        raise ValueError("n_groups: want the number of groups; quantizers here are for grouped tensors")
    state: dict[str, Any] = {}
    if mode is ScalingMode.DELAYED_TENSOR_SCALING:
        state = {"scale": jnp.ones((groups,)), "amax_history": jnp.zeros((groups, HISTORY))}
    return GroupedQuantizer(**state, q_dtype=dtype, scaling_mode=mode, q_layout=layout, n_groups=groups)


# ---------------------------------------------------------------------------------------------------------------------
# Tensors


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
    original_shape: tuple[int, ...] = dataclasses.field(metadata=STATIC)

    @property
    def ndim(self) -> int:
        """Axes of `original_shape`."""
        return len(self.original_shape)

    def dequantize(self) -> Any:
        """The data: there are no scales."""
        return self.data

    def get_tensor(self, usage: TensorUsage) -> GroupedNoScaleTensor:
        """Itself, for any usage."""
        del usage
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class GroupedScaledTensor1x:
    """A quantized grouped tensor as TransformerEngine has it: data and scales are flat, `original_shape` is its shape.

    `scale_inv` is what stored numbers are multiplied with: `[g]` in the tensor modes; in MXFP8 one for each 32 entries
    along the last axis, or colwise the one before, in the order of the data, neither padded nor swizzled. Where that
    axis is ragged, blocks end with their groups, and there is one for each entry.
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
    original_shape: tuple[int, ...] = dataclasses.field(metadata=STATIC)
    pre_swizzled: bool = dataclasses.field(default=False, metadata=STATIC)

    @property
    def ndim(self) -> int:
        """Axes of `original_shape`."""
        return len(self.original_shape)

    @property
    def group_sizes(self) -> Any:
        """First dims; of a stack as many ones as it has groups, as in the original."""
        ragged = getattr(self.first_dims, "size", 0) > 0
        return self.first_dims if ragged else jnp.ones((self.original_shape[0],), jnp.int32)

    def dequantize(self) -> Array:
        """The numbers it stands for, in the original shape; also inside of `jit`."""
        return dequantize(tensor_of("tensor", self), self.dq_dtype).data

    def get_tensor(self, usage: TensorUsage) -> GroupedScaledTensor1x:
        """Itself, if its blocks lie along the axis that this usage sums over."""
        if self.scaling_mode.is_1d_block_scaling() and self.is_colwise != _colwise(usage):
            raise ValueError(f"usage: {usage.name} wants a tensor with is_colwise={_colwise(usage)}")
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class ScaledTensor2x:
    """A tensor that is quantized both ways."""

    rowwise_tensor: GroupedScaledTensor1x
    colwise_tensor: GroupedScaledTensor1x

    def dequantize(self) -> Array:
        """The numbers that the first of them stands for."""
        return self.rowwise_tensor.dequantize()

    def get_tensor(self, usage: TensorUsage) -> GroupedScaledTensor1x:
        """That of them whose blocks lie along the axis that this usage sums over."""
        return self.colwise_tensor if _colwise(usage) else self.rowwise_tensor


def _colwise(usage: TensorUsage) -> bool:
    return usage in (TensorUsage.LHS_TRANS, TensorUsage.RHS)


# ---------------------------------------------------------------------------------------------------------------------
# From one to the other


def grouped_quantize(x: Any, quantizer: Any, group_sizes: Any = None, flatten_axis: int = -1) -> Any:
    """Quantize rows `[m, ...]` by groups, or a stack `[g, ...]` where there are no sizes.

    Delayed scaling uses the scales the quantizer has, and updates it: under `jit`, let it be an argument and a result.

    Args:
      x: an array, or a `GroupedNoScaleTensor`, which has its own sizes.
      quantizer: from `QuantizerFactory`, of as many groups; or None, and nothing is quantized.
      group_sizes: the rows of each group; the rest is nobody's.
      flatten_axis: axes from here on are the columns; blocks of 32 lie along the last axis, or colwise along that
        before this one.

    Returns:
      A `GroupedScaledTensor1x`; a `ScaledTensor2x` if the layout is both; a `GroupedNoScaleTensor` without a quantizer.

    >>> q = QuantizerFactory.create(1, ScalingMode.CURRENT_TENSOR_SCALING, jnp.float8_e4m3fn, n_groups=2)
    >>> made = grouped_quantize(jnp.array([[1.0], [7.0], [56.0]]), q, jnp.array([2, 1]))
    >>> made.scale_inv.tolist(), made.dequantize().ravel().tolist()
    ([0.015625, 0.125], [1.0, 7.0, 56.0])
    """
    if not isinstance(x, GroupedNoScaleTensor):
        x = what.as_array("x", x)
        x = GroupedNoScaleTensor(x, None, group_sizes, None, x.shape)
    elif group_sizes is not None:
        raise ValueError("group_sizes: a GroupedNoScaleTensor has its own")
    if quantizer is None:
        return x
    tensor = tensor_of("x", x)
    axis = flatten_axis + tensor.ndim if flatten_axis < 0 else flatten_axis
    if not 0 < axis < tensor.ndim:
        raise ValueError(f"flatten_axis: want an axis after the first of {tensor.ndim}; got {flatten_axis}")
    made, amax = [], None
    for colwise in (False, True):
        if quantizer.q_layout not in (QuantizeLayout(int(colwise)), QuantizeLayout.ROWWISE_COLWISE):
            continue
        scaled, scale, amax = quantized(tensor, quantizer, axis - 1 if colwise else tensor.ndim - 1)
        made.append(GroupedScaledTensor1x(
            scaled.data.values.ravel(), scale, amax, tensor.first_dims, tensor.last_dims, quantizer.scaling_mode,
            tensor.dtype, grouped_dequantize, colwise, "N", axis, tensor.shape,
        ))  # fmt: skip
    quantizer.update(amax)
    return made[0] if len(made) == 1 else ScaledTensor2x(*made)


def grouped_dequantize(tensor: Any) -> GroupedNoScaleTensor:
    """The tensor without scales, with the same groups, in its original shape; also inside of `jit`.

    >>> x = GroupedNoScaleTensor(jnp.ones((3, 2)), None, jnp.array([1, 2]), None, (3, 2))
    >>> grouped_dequantize(x) is x
    True
    """
    if isinstance(tensor, GroupedNoScaleTensor):
        return tensor
    one = tensor.rowwise_tensor if isinstance(tensor, ScaledTensor2x) else tensor
    return GroupedNoScaleTensor(one.dequantize(), one.amax, one.first_dims, one.last_dims, one.original_shape)


def quantized(tensor: GroupedTensor, quantizer: GroupedQuantizer, axis: int) -> tuple[GroupedTensor, Array, Any]:
    """A tensor with scales, blocks of which lie along an axis; its scales as the original has them; largest numbers."""
    kind, groups = quantizer.format, tensor.num_groups
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


def tensor_of(name: str, x: Any) -> GroupedTensor:
    """One of the original's tensors as one of ours."""
    if not isinstance(x, (GroupedNoScaleTensor, GroupedScaledTensor1x)):
        raise TypeError(f"{name}: want a GroupedNoScaleTensor or a GroupedScaledTensor1x; got {type(x).__name__}")
    data = what.as_array(f"{name}.data", x.data)
    both = all(getattr(dims, "size", 0) for dims in (x.first_dims, x.last_dims))
    shape = data.shape if both else tuple(x.original_shape)
    if data.size != math.prod(shape):
        raise ValueError(f"{name}: its data have shape {data.shape}; want as many numbers as original_shape {shape}")
    tensor = GroupedTensor(data.reshape(shape), x.first_dims, x.last_dims, shape)
    return tensor if isinstance(x, GroupedNoScaleTensor) else _scaled(name, x, tensor)


def _scaled(name: str, x: GroupedScaledTensor1x, values: GroupedTensor) -> GroupedTensor:
    """With its scales."""
    if x.scaling_mode is ScalingMode.NO_SCALING:
        return values
    for said, got, want in (("data_layout", x.data_layout, "N"), ("pre_swizzled", x.pre_swizzled, False)):
        if got != want:
            raise ValueError(f"{name}.{said}: want {want!r}, numbers and scales in their natural order; got {got!r}")
    blocks, counts = _mx_blocks(x, values)
    shape = (values.num_groups,) if x.scaling_mode.is_tensor_scaling() else counts
    scale = what.as_array(f"{name}.scale_inv", x.scale_inv)
    if scale.size != math.prod(shape):
        raise ValueError(f"{name}.scale_inv: want {math.prod(shape)} scales, not padded; got shape {scale.shape}")
    if x.scaling_mode.is_tensor_scaling():
        return scaled_by_group(values, scale.reshape(shape), values.dtype.name)
    data = Scaled(values.data, scale.reshape(shape), "mxfp8", blocks)
    return GroupedTensor(data, values.first_dims, values.last_dims, values.shape)


def _mx_blocks(x: GroupedScaledTensor1x, values: GroupedTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """How long blocks of MXFP8 are along each axis, and how many there are."""
    axis = x.flatten_axis % values.ndim - 1 if x.is_colwise else values.ndim - 1
    ragged = {0: values.first_dims, values.ndim - 1: values.last_dims}.get(axis) is not None
    length = 1 if ragged else FORMATS["mxfp8"].block
    blocks = tuple(max(min(length, size), 1) if i == axis else 1 for i, size in enumerate(values.shape))
    return blocks, tuple(-(-size // length) for size, length in zip(values.shape, blocks, strict=True))
