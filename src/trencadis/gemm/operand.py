"""The operands of a grouped GEMM: which of their axes are contracted, which are free, and which are ragged."""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trencadis.core import arguments
from trencadis.gemm.debug import check_tensor
from trencadis.gemm.sizes import check_same_sizes
from trencadis.gemm.tensor import GroupedTensor, checked
from trencadis.quant.operand import array_operand
from trencadis.quant.scaled import Scaled, dequantize

Array = jax.Array
Axes = tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmOperand:
    """A grouped tensor as lhs or rhs of a GEMM: which of its axes are contracted, and which are free."""

    name: str  # what the caller calls it
    size_names: tuple[str, str]  # what the caller calls the sizes of its first axis, and those of its last
    tensor: GroupedTensor
    contracted: Axes
    free: Axes
    is_lhs: bool

    @property
    def sizes(self) -> dict[int, Any]:
        """The sizes i32[g] of each ragged axis."""
        axes = ((0, self.tensor.first_dims), (self.last_axis, self.tensor.last_dims))
        return {axis: dims for axis, dims in axes if dims is not None}

    @property
    def flat(self) -> bool:
        """True if both axes are ragged, so that the data are a flat buffer of matrices."""
        return self.tensor.is_fully_ragged

    @property
    def stacked(self) -> bool:
        """True if no axis is ragged, so that the first axis of the data is that of the groups."""
        return self.tensor.is_stacked

    @property
    def quantized(self) -> bool:
        """True if the data are a `Scaled`."""
        return isinstance(self.tensor.data, Scaled)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the numbers that the data stand for; float32 if they are quantized."""
        return np.dtype(np.float32) if self.quantized else self.tensor.dtype

    @property
    def last_axis(self) -> int:
        """The last axis of a group; a flat buffer holds matrices."""
        return 1 if self.flat else self.tensor.ndim - 1

    def size_name(self, axis: int) -> str:
        """What the caller calls the sizes of a ragged axis."""
        return self.size_names[int(axis != 0)]

    def ragged_sizes(self, axes: Axes) -> Any:
        """The sizes i32[g] along the ragged one of some axes; None if none of them is ragged."""
        return next((dims for axis, dims in self.sizes.items() if axis in axes), None)

    def ragged_first(self, axes: Axes) -> Axes:
        """The axes with the ragged one first, so that they can be merged into one ragged axis."""
        return tuple(sorted(axes, key=lambda axis: axis not in self.sizes))

    def extent(self, axes: Axes) -> int:
        """The number of entries along some axes together; a ragged axis counts with all groups."""
        return math.prod(self.tensor.shape[axis] for axis in axes if not self.flat)

    def uniform_extent(self, axes: Axes) -> int:
        """The number of entries along those of the axes that are not ragged."""
        return math.prod(self.tensor.shape[axis] for axis in axes if axis not in self.sizes and not self.flat)


def gemm_operands(
    lhs: Any, rhs: Any, contracting_dims: Any, names: tuple[str, str] = ("lhs", "rhs"), size_name: str = ""
) -> tuple[GemmOperand, GemmOperand]:
    """Both operands of a GEMM, checked each by itself and against each other.

    Args:
      lhs: the left grouped tensor.
      rhs: the right grouped tensor.
      contracting_dims: the axes of lhs and those of rhs that are contracted with each other.
      names: what the caller calls the two.
      size_name: what the caller calls the sizes; by default `lhs.first_dims` and so on.
    """
    for name, x in zip(names, (lhs, rhs), strict=True):
        if not isinstance(x, GroupedTensor):
            raise TypeError(f"{name}: want a GroupedTensor, such as GroupedTensor.stacked(x); got {type(x).__name__}")
    try:
        left, right = (tuple(operator.index(axis) for axis in axes) for axes in contracting_dims)
    except (TypeError, ValueError):
        raise ValueError(f"contracting_dims: want two sequences of ints; got {contracting_dims!r}") from None
    a = _operand(names[0], lhs, left, size_name, is_lhs=True)
    b = _operand(names[1], rhs, right, size_name, is_lhs=False)
    if len(left) != len(right):
        raise ValueError(f"contracting_dims: want as many axes of {a.name} as of {b.name}; got {left} and {right}")
    for x, y in zip(a.contracted, b.contracted, strict=True):
        _check_pair(a, x, b, y)
    return a, b


def _check_pair(a: GemmOperand, x: int, b: GemmOperand, y: int) -> None:
    """Check two axes that are contracted with each other: both are ragged with the same sizes, or of one length."""
    if (x in a.sizes) != (y in b.sizes):
        (ragged, axis), (other, plain) = ((a, x), (b, y)) if x in a.sizes else ((b, y), (a, x))
        raise ValueError(
            f"contracting_dims: axis {axis} of {ragged.name} is ragged and axis {plain} of {other.name} is not; "
            "want both ragged, or neither"
        )
    if x in a.sizes:
        check_same_sizes(a.size_name(x), a.sizes[x], b.size_name(y), b.sizes[y])
    elif a.tensor.shape[x] != b.tensor.shape[y]:
        raise ValueError(
            f"contracting_dims: axis {x} of {a.name} {a.tensor.shape} is contracted with axis {y} of {b.name} "
            f"{b.tensor.shape}; want the same size"
        )


def checked_tensor(name: str, tensor: GroupedTensor, size_name: str = "") -> tuple[GroupedTensor, tuple[str, str]]:
    """A tensor whose data and sizes are checked, with `debug_checks` also at run time; and the names of its sizes."""
    size_names = (size_name or f"{name}.first_dims", size_name or f"{name}.last_dims")
    data = array_operand(f"{name}.data", tensor.data)
    tensor = checked(name, GroupedTensor(data, tensor.first_dims, tensor.last_dims, tensor.shape), size_names)
    check_tensor(name, tensor, size_names)
    return tensor, size_names


def _operand(name: str, tensor: GroupedTensor, axes: Axes, size_name: str, *, is_lhs: bool) -> GemmOperand:
    """One operand, checked by itself."""
    tensor, size_names = checked_tensor(name, tensor, size_name)
    ndim = 2 if tensor.is_fully_ragged else tensor.ndim
    contracted = tuple(axis + ndim if axis < 0 else axis for axis in axes)
    own = tuple(range(int(tensor.is_stacked), ndim))
    for given, axis in zip(axes, contracted, strict=True):
        if axis not in own:
            why = "which is the axis of the groups" if tensor.is_stacked and axis == 0 else f"it has {ndim} axes"
            raise ValueError(f"contracting_dims: {name} has no axis {given} to contract, {why}")
    if len(set(contracted)) < len(contracted):
        raise ValueError(f"contracting_dims: want each axis of {name} once; got {axes}")
    free = tuple(axis for axis in own if axis not in contracted)
    return GemmOperand(name=name, size_names=size_names, tensor=tensor, contracted=contracted, free=free, is_lhs=is_lhs)


def as_matrices(x: GemmOperand, first: Axes, second: Axes) -> tuple[Any, bool]:
    """The data with axes merged into two, after that of the groups in a stack; and whether `second` is stored first.

    Nothing is moved in memory if the data are stored in either order.
    """
    data = x.tensor.data
    lead = (0,) if x.stacked else ()
    stored = tuple(range(len(lead), x.tensor.ndim))
    transposed = stored == (*second, *first) and stored != (*first, *second)
    order = (second, first) if transposed else (first, second)
    if stored != (*order[0], *order[1]):
        data = data.transpose(*lead, *order[0], *order[1])
    if isinstance(data, Scaled):
        return data.merged(*(1 for _ in lead), *map(len, order)), transposed
    shape = [data.shape[0]] * len(lead) + [x.extent(axes) for axes in order]
    return data.reshape(shape), transposed


def dequantized(x: GemmOperand) -> GemmOperand:
    """The operand with an array as its data; quantized data become floats that are constants to autodiff."""
    if not x.quantized:
        return x
    return dataclasses.replace(x, tensor=dequantize(jax.lax.stop_gradient(x.tensor)))


def contracted_axes(a: GemmOperand, b: GemmOperand) -> tuple[Axes, Axes]:
    """The contracted axes of both operands in the same order, with the ragged one first."""
    order = sorted(range(len(a.contracted)), key=lambda i: a.contracted[i] not in a.sizes)
    return tuple(a.contracted[i] for i in order), tuple(b.contracted[i] for i in order)


def merged_sizes(sizes: Any, uniform: int, total: int) -> Any:
    """The sizes i32[g] of a ragged axis merged with others that have `uniform` entries; clamped to `total` entries."""
    if uniform == 1:
        return sizes
    xp: Any = jnp if arguments.concrete(sizes) is None else np
    return xp.clip(sizes, 0, total // max(uniform, 1)) * np.int32(uniform)


def result_tensor(ragged: GemmOperand, other: GemmOperand, out: Array, labels: list[tuple[str, int]]) -> GroupedTensor:
    """The result as a tensor with the axes of lhs before those of rhs.

    Args:
      ragged: the operand whose ragged axis is free.
      other: the other operand.
      out: the result, with its axes in some order.
      labels: the name of the operand and the axis there, for each axis of `out`.
    """
    a, b = (ragged, other) if ragged.is_lhs else (other, ragged)
    want = [(each.name, axis) for each in (a, b) for axis in each.free]
    out = out.transpose([labels.index(label) for label in want])
    at = next(i for i, label in enumerate(want) if label[0] == ragged.name and label[1] in ragged.sizes)
    if at not in (0, out.ndim - 1):
        raise ValueError(
            f"{ragged.name}: its ragged axis would be axis {at} of a result of {out.ndim}; want it first or last"
        )
    sizes = ragged.ragged_sizes(ragged.free)
    return GroupedTensor(out, sizes, None, out.shape) if at == 0 else GroupedTensor(out, None, sizes, out.shape)
