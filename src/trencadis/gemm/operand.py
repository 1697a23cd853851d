"""The operands of a grouped GEMM: which axes are summed over, which are free, and which of them are ragged."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trencadis.core import problem as what
from trencadis.gemm.debug import check_same, check_tensor
from trencadis.gemm.tensor import GroupedTensor, checked
from trencadis.quant.operand import array_operand
from trencadis.quant.scaled import Scaled, dequantize

Array = jax.Array
Axes = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Side:
    """An operand: which of its axes are summed over and which are free, and which are ragged with what sizes."""

    name: str
    first: bool  # whether it is the left one
    said: tuple[str, str]  # what the caller calls its first and its last dims
    tensor: GroupedTensor
    summed: Axes
    free: Axes

    @property
    def sizes(self) -> dict[int, Any]:
        """Sizes of the ragged axes."""
        axes = ((0, self.tensor.first_dims), (self.last, self.tensor.last_dims))
        return {axis: dims for axis, dims in axes if dims is not None}

    @property
    def flat(self) -> bool:
        """Both axes are ragged."""
        return self.tensor.first_dims is not None and self.tensor.last_dims is not None

    @property
    def stacked(self) -> bool:
        """Neither is."""
        return not self.sizes

    @property
    def quantized(self) -> bool:
        """Its numbers have scales."""
        return isinstance(self.tensor.data, Scaled)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the numbers that it stands for."""
        return np.dtype(np.float32) if self.quantized else self.tensor.dtype

    @property
    def last(self) -> int:
        """The last axis of a group; a flat buffer holds matrices."""
        return 1 if self.flat else self.tensor.ndim - 1

    def called(self, axis: int) -> str:
        """What the caller calls the sizes of a ragged axis."""
        return self.said[int(axis != 0)]

    def ragged(self, axes: Axes) -> Any:
        """The sizes along some axes, if one of them is ragged."""
        return next((dims for axis, dims in self.sizes.items() if axis in axes), None)

    def ordered(self, axes: Axes) -> Axes:
        """The axes with the ragged one first, so that they can be merged."""
        return tuple(sorted(axes, key=lambda axis: axis not in self.sizes))

    def extent(self, axes: Axes) -> int:
        """How many entries they have together; of a ragged axis, all groups'."""
        return math.prod(self.tensor.shape[axis] for axis in axes if not self.flat)

    def inner(self, axes: Axes) -> int:
        """How many entries they have for each of the ragged one's."""
        return math.prod(self.tensor.shape[axis] for axis in axes if axis not in self.sizes and not self.flat)


def sides(
    lhs: Any, rhs: Any, contracting_dims: Any, names: tuple[str, str] = ("lhs", "rhs"), dims: str = ""
) -> tuple[Side, Side]:
    """Both operands, checked by themselves and against each other; `dims` is what the caller calls their sizes."""
    for name, x in zip(names, (lhs, rhs), strict=True):
        if not isinstance(x, GroupedTensor):
            raise TypeError(f"{name}: want a GroupedTensor, such as GroupedTensor.stacked(x); got {type(x).__name__}")
    try:
        left, right = (tuple(int(axis) for axis in axes) for axes in contracting_dims)
    except (TypeError, ValueError):
        raise ValueError(f"contracting_dims: want two sequences of axes; got {contracting_dims!r}") from None
    a, b = _side(names[0], True, lhs, left, dims), _side(names[1], False, rhs, right, dims)
    if len(left) != len(right):
        raise ValueError(f"contracting_dims: want as many axes of {a.name} as of {b.name}; got {left} and {right}")
    for x, y in zip(a.summed, b.summed, strict=True):
        _check_pair(a, x, b, y)
    return a, b


def _check_pair(a: Side, x: int, b: Side, y: int) -> None:
    """Two axes that are summed over together: both ragged by the same sizes, or of one size."""
    if (x in a.sizes) != (y in b.sizes):
        (ragged, axis), (other, plain) = ((a, x), (b, y)) if x in a.sizes else ((b, y), (a, x))
        raise ValueError(
            f"contracting_dims: axis {axis} of {ragged.name} is ragged and axis {plain} of {other.name} is not; "
            "want both ragged, or neither"
        )
    if x not in a.sizes:
        if a.tensor.shape[x] != b.tensor.shape[y]:
            raise ValueError(
                f"contracting_dims: axis {x} of {a.name} {a.tensor.shape} and axis {y} of {b.name} {b.tensor.shape} "
                "are summed over together; want the same size"
            )
        return
    check_same(a.called(x), a.sizes[x], b.called(y), b.sizes[y])
    one, two = what.concrete(a.sizes[x]), what.concrete(b.sizes[y])
    if one is not None and two is not None and one.shape == two.shape and (one != two).any():
        i = int(np.argmax(one != two))
        raise ValueError(
            f"contracting_dims: axis {x} of {a.name} and axis {y} of {b.name} are summed over together; want groups of "
            f"the same sizes, got {one[i]} and {two[i]} in group {i}"
        )


def sound(name: str, tensor: GroupedTensor, dims: str = "") -> tuple[GroupedTensor, tuple[str, str]]:
    """A tensor whose sizes are checked, also at run time if that is asked for; and what the caller calls them."""
    said = (dims or f"{name}.first_dims", dims or f"{name}.last_dims")
    data = array_operand(f"{name}.data", tensor.data)
    tensor = checked(name, GroupedTensor(data, tensor.first_dims, tensor.last_dims, tensor.shape), said)
    check_tensor(name, tensor, said)
    return tensor, said


def _side(name: str, first: bool, tensor: GroupedTensor, axes: Axes, dims: str) -> Side:
    """One operand, checked by itself."""
    tensor, said = sound(name, tensor, dims)
    flat = tensor.first_dims is not None and tensor.last_dims is not None
    ndim = 2 if flat else tensor.ndim
    stacked = tensor.first_dims is None and tensor.last_dims is None
    summed = tuple(axis + ndim if axis < 0 else axis for axis in axes)
    mine = tuple(range(int(stacked), ndim))
    for given, axis in zip(axes, summed, strict=True):
        if axis not in mine:
            why = "which is that of the groups" if stacked and axis == 0 else f"of {ndim}"
            raise ValueError(f"contracting_dims: {name} has no axis {given} to sum over, {why}")
    if len(set(summed)) < len(summed):
        raise ValueError(f"contracting_dims: want each axis of {name} once; got {axes}")
    return Side(name, first, said, tensor, summed, tuple(axis for axis in mine if axis not in summed))


def laid(side: Side, first: Axes, second: Axes) -> tuple[Any, bool]:
    """The data with two axes, each merged of several, after that of the groups; or with the second of them first."""
    data = side.tensor.data
    lead = (0,) if side.stacked else ()
    stored = tuple(range(len(lead), side.tensor.ndim))
    turned = stored == (*second, *first) and stored != (*first, *second)
    order = (second, first) if turned else (first, second)
    if stored != (*order[0], *order[1]):
        data = data.transpose(*lead, *order[0], *order[1])
    if isinstance(data, Scaled):
        return data.merged(*(1 for _ in lead), *map(len, order)), turned
    shape = [data.shape[0]] * len(lead) + [side.extent(axes) for axes in order]
    return data.reshape(shape), turned


def dequantized(side: Side) -> Side:
    """The same side with numbers that have no scales, as a constant."""
    if not side.quantized:
        return side
    return dataclasses.replace(side, tensor=dequantize(jax.lax.stop_gradient(side.tensor)))


def paired(a: Side, b: Side) -> tuple[Axes, Axes]:
    """The axes that are summed over, in one order for both, the ragged one first."""
    order = sorted(range(len(a.summed)), key=lambda i: a.summed[i] not in a.sizes)
    return tuple(a.summed[i] for i in order), tuple(b.summed[i] for i in order)


def times(sizes: Any, inner: int, total: int) -> Any:
    """Sizes of merged axes: the ragged one's, times the others; none reaches past the total."""
    return sizes if inner == 1 else jnp.clip(sizes, 0, total // max(inner, 1)) * np.int32(inner)


def arranged(side: Side, other: Side, out: Array, labels: list[tuple[str, int]]) -> GroupedTensor:
    """With the axes of lhs before those of rhs; the ragged one must come first or last."""
    a, b = (side, other) if side.first else (other, side)
    want = [(each.name, axis) for each in (a, b) for axis in each.free]
    out = out.transpose([labels.index(label) for label in want])
    at = next(i for i, label in enumerate(want) if label[0] == side.name and label[1] in side.sizes)
    dims = side.ragged(side.free)
    if at not in (0, out.ndim - 1):
        raise ValueError(
            f"{side.name}: its ragged axis would be axis {at} of a result of {out.ndim}; want it first or last"
        )
    return GroupedTensor(out, dims, None, out.shape) if at == 0 else GroupedTensor(out, None, dims, out.shape)
