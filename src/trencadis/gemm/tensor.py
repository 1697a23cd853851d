"""Grouped tensors: many matrices of uneven sizes in one array, which says itself where each of them is.

    ragged rows [m, ...]     ragged columns [..., m]     stacked [g, ...]     fully ragged [c]
    ┌───────┐ 0              ┌──┬─┬────┐                 ┌──┐┌──┐┌──┐         0 0 0 0 1 1 2 2 2 2 2 2 · ·
    ├───────┤                │0 │1│ 2  │                 │0 ││1 ││2 │         group i is a matrix of
    │       │ 1              │  │ │    │                 │  ││  ││  │         first_dims[i] rows and
    ├───────┤ 2              └──┴─┴────┘                 └──┘└──┘└──┘         last_dims[i] columns
    └───────┘

What is ragged is asked for, by a constructor: nothing becomes grouped by accident.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trencadis.core import problem as what
from trencadis.core.jax_compat import exportable
from trencadis.core.spans import offsets, owner

Array = jax.Array
Shape = tuple[int, ...]


@exportable
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class GroupedTensor:
    """Groups that lie in one array; each may have its own number of rows, of columns, or of both.

    Made by `ragged_rows`, `ragged_cols`, `stacked`, `fully_ragged` or `from_list`. A pytree whose leaves are `data` and
    the sizes; `shape` is static, so that it goes through `jit`, `vmap`, `grad` and donation as it is.

    Attributes:
      data: the numbers of all groups: an array, or a `quant.Scaled`.
      first_dims: i32[g], what each group has of the first axis; None if groups do not differ in it.
      last_dims: i32[g], what each group has of the last axis; None if groups do not differ in it.
      shape: the shape of the array of all groups, however `data` is stored.

    >>> x = GroupedTensor.ragged_rows(jnp.arange(6.0).reshape(3, 2), [1, 2])
    >>> x
    GroupedTensor(float32[3,2], 2 groups of 1, 2 rows)
    >>> [group.tolist() for group in x.to_list()]
    [[[0.0, 1.0]], [[2.0, 3.0], [4.0, 5.0]]]
    """

    data: Any
    first_dims: Any
    last_dims: Any
    shape: Shape = dataclasses.field(metadata={"static": True})

    def __post_init__(self) -> None:
        for name in ("first_dims", "last_dims"):  # an empty array is another way to say that groups do not differ
            if getattr(getattr(self, name), "shape", None) == (0,):
                object.__setattr__(self, name, None)

    # -- constructors --------------------------------------------------------------------------------------------------

    @classmethod
    def ragged_rows(cls, x: Any, sizes: Any) -> GroupedTensor:
        """Group i is the `sizes[i]` rows of x `[m, ...]` after those of group i - 1; rows past the last are nobody's.

        >>> GroupedTensor.ragged_rows(jnp.ones((4, 2)), jnp.array([3, 0])).num_groups
        2
        """
        x = _data("x", x)
        if x.ndim < 1:
            raise ValueError("x: want at least 1 dimension [m, ...]; got a scalar")
        return cls(x, _dims("sizes", sizes, x.shape[0], "rows of x"), None, x.shape)

    @classmethod
    def ragged_cols(cls, x: Any, sizes: Any) -> GroupedTensor:
        """Group i is the `sizes[i]` columns of x `[..., m]` after those of group i - 1.

        >>> GroupedTensor.ragged_cols(jnp.ones((2, 4)), [3, 1])
        GroupedTensor(float32[2,4], 2 groups of 3, 1 columns)
        """
        x = _data("x", x)
        if x.ndim < 2:
            raise ValueError(f"x: want at least 2 dimensions [..., m]; got shape {x.shape}")
        return cls(x, None, _dims("sizes", sizes, x.shape[-1], "columns of x"), x.shape)

    @classmethod
    def stacked(cls, x: Any) -> GroupedTensor:
        """Group i is `x[i]`: all groups are of one shape.

        >>> GroupedTensor.stacked(jnp.ones((3, 2, 4)))
        GroupedTensor(float32[3,2,4], 3 groups)
        """
        x = _data("x", x)
        if x.ndim < 1:
            raise ValueError("x: want at least 1 dimension [g, ...]; got a scalar")
        return cls(x, None, None, x.shape)

    @classmethod
    def fully_ragged(cls, flat: Any, first_dims: Any, last_dims: Any) -> GroupedTensor:
        """Group i is a matrix of `first_dims[i]` rows and `last_dims[i]` columns, row after row in `flat [c]`.

        >>> flat = GroupedTensor.fully_ragged(jnp.arange(8.0), [1, 2], [2, 3])
        >>> [group.tolist() for group in flat.to_list()]
        [[[0.0, 1.0]], [[2.0, 3.0, 4.0], [5.0, 6.0, 7.0]]]
        """
        flat = _data("flat", flat)
        if flat.ndim != 1:
            raise ValueError(f"flat: want 1 dimension [c]; got shape {flat.shape}")
        first, last = _flat_dims("flat", ("first_dims", "last_dims"), first_dims, last_dims, flat.shape[0])
        return cls(flat, first, last, flat.shape)

    @classmethod
    def from_list(cls, groups: Sequence[Any], ragged: str | None = None) -> GroupedTensor:
        """The groups of a list, laid one after the other.

        Args:
          groups: arrays of one dtype.
          ragged: "rows", "columns" or "both", or "none" for a stack; by default the first of "none", "rows", "columns"
            and "both" that the shapes allow.

        >>> GroupedTensor.from_list([jnp.ones((1, 2)), jnp.ones((3, 2))])
        GroupedTensor(float32[4,2], 2 groups of 1, 3 rows)
        """
        arrays = [what.as_array(f"groups[{i}]", x) for i, x in enumerate(groups)]
        if not arrays:
            raise ValueError("groups: want at least one group; got an empty list")
        dtypes = sorted({x.dtype.name for x in arrays})
        if len(dtypes) > 1:
            raise TypeError(f"groups: want one dtype; got {', '.join(dtypes)}")
        able = [name for name, fits in _FITS.items() if fits([x.shape for x in arrays])]
        if ragged is not None and ragged not in _FITS:
            raise ValueError(f"ragged: want None or one of {', '.join(map(repr, _FITS))}; got {ragged!r}")
        if not able or (ragged is not None and ragged not in able):
            shapes = ", ".join(str(x.shape) for x in arrays[:4]) + (", ..." if len(arrays) > 4 else "")
            wanted = "groups that differ in one axis, or matrices" if ragged is None else _WANTED[ragged]
            raise ValueError(f"groups: want {wanted}; got shapes {shapes}")
        kind = able[0] if ragged is None else ragged
        if kind == "none":
            return cls.stacked(jnp.stack(arrays))
        first, last = ([x.shape[axis] for x in arrays] for axis in (0, -1))
        if kind == "rows":
            return cls.ragged_rows(jnp.concatenate(arrays), first)
        if kind == "columns":
            return cls.ragged_cols(jnp.concatenate(arrays, axis=-1), last)
        return cls.fully_ragged(jnp.concatenate([x.ravel() for x in arrays]), first, last)

    # -- what it is ----------------------------------------------------------------------------------------------------

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the numbers, as they are stored."""
        return np.dtype(self.data.dtype)

    @property
    def ndim(self) -> int:
        """Axes of `shape`."""
        return len(self.shape)

    @property
    def num_groups(self) -> int:
        """How many groups there are."""
        dims = self.first_dims if self.first_dims is not None else self.last_dims
        return int(self.shape[0] if dims is None else dims.shape[0])

    def to_list(self) -> list[Any]:
        """The groups as arrays, or as `Scaled`; their sizes must be known now.

        >>> GroupedTensor.stacked(jnp.ones((2, 3))).to_list()
        [Array([1., 1., 1.], dtype=float32), Array([1., 1., 1.], dtype=float32)]
        """
        if self.first_dims is None and self.last_dims is None:
            return list(self.unstack())
        first, last = (None if x is None else self._known(x) for x in (self.first_dims, self.last_dims))
        if first is not None and last is not None:
            if quantized(self.data):
                raise ValueError("to_list: a flat buffer of quantized matrices is not cut; dequantize it before")
            shapes = list(zip(first, last, strict=True))
            ends = list(itertools.accumulate((math.prod(shape) for shape in shapes), initial=0))
            return [
                self.data[a:b].reshape(shape) for (a, b), shape in zip(itertools.pairwise(ends), shapes, strict=True)
            ]
        sizes, axis = (first, 0) if last is None else (last, self.ndim - 1)
        assert sizes is not None
        ends = list(itertools.accumulate(sizes, initial=0))
        return [_cut(self.data, a, b, axis) for a, b in itertools.pairwise(ends)]

    def unstack(self) -> tuple[Any, ...]:
        """The groups of a stack, also where nothing is known but shapes.

        >>> len(GroupedTensor.stacked(jnp.ones((2, 3))).unstack())
        2
        """
        if self.first_dims is not None or self.last_dims is not None:
            raise ValueError(f"unstack: want a stacked tensor; got {self!r}; to_list takes ragged ones apart")
        if quantized(self.data):
            return tuple(self.data[i] for i in range(self.shape[0]))
        return tuple(jnp.unstack(self.data))

    def dequantize(self, dtype: Any = jnp.float32) -> GroupedTensor:
        """The same tensor with an array of floats as its data."""
        data = self.data.dequantize(dtype) if quantized(self.data) else self.data
        return GroupedTensor(data, self.first_dims, self.last_dims, self.shape)

    def _known(self, dims: Any) -> list[int]:
        known = what.concrete(dims)
        if known is None:
            raise ValueError("to_list: the sizes are traced, and shapes cannot depend on them; call it outside of jit")
        return [int(size) for size in known]

    def __repr__(self) -> str:
        dtype = getattr(self.data, "dtype", type(self.data).__name__)
        data = repr(self.data) if quantized(self.data) else f"{dtype}[{','.join(map(str, self.shape))}]"
        said = [_said(x, axis) for x, axis in ((self.first_dims, "rows"), (self.last_dims, "columns")) if x is not None]
        dims = self.first_dims if self.first_dims is not None else self.last_dims
        known = self.shape[:1] if dims is None else getattr(dims, "shape", ())  # transformations put in what they like
        count = f"{known[-1] if known else '?'} groups"
        return f"GroupedTensor({data}, {' of '.join([count, ' by '.join(said)] if said else [count])})"


def quantized(data: Any) -> bool:
    """Whether data are no array, but stand for one as `quant.Scaled` does."""
    return hasattr(data, "dequantize") and hasattr(data, "shape")


def _data(name: str, x: Any) -> Any:
    """What a grouped tensor may hold."""
    return x if quantized(x) else what.as_array(name, x)


def _cut(data: Any, start: int, end: int, axis: int) -> Any:
    """A part of an axis, which is the first or the last."""
    if not quantized(data):
        return jax.lax.slice_in_dim(data, start, end, axis=axis)
    if axis == 0:
        return data[start:end]
    order = tuple(range(data.ndim))
    return data.transpose(*order[-1:], *order[:-1])[start:end].transpose(*order[1:], 0)


def _said(dims: Any, axis: str) -> str:
    """Sizes in words: the first few, where they are known."""
    known = what.concrete(dims) if isinstance(dims, (np.ndarray, jax.Array)) else None
    if known is None or known.ndim != 1 or known.dtype.kind not in "iu":
        return f"ragged {axis}"
    some = ", ".join(map(str, known[:8])) + (", ..." if known.size > 8 else "")
    return f"{some} {axis}"


def _alike(shapes: Sequence[Shape], start: int, stop: int | None) -> bool:
    """Whether these shapes agree in some axes, and have as many."""
    return len({(len(shape), shape[start:stop]) for shape in shapes}) == 1


_FITS: dict[str, Callable[[Sequence[Shape]], bool]] = {
    "none": lambda shapes: len(set(shapes)) == 1,
    "rows": lambda shapes: min(map(len, shapes)) >= 1 and _alike(shapes, 1, None),
    "columns": lambda shapes: min(map(len, shapes)) >= 2 and _alike(shapes, 0, -1),
    "both": lambda shapes: all(len(shape) == 2 for shape in shapes),
}
_WANTED = {
    "none": "groups of one shape",
    "rows": "groups that differ in the first axis only",
    "columns": "groups of two axes or more that differ in the last only",
    "both": "matrices",
}


def checked(name: str, tensor: GroupedTensor, dims: tuple[str, str]) -> GroupedTensor:
    """A tensor that anyone may have made, as the constructors make it: sizes that are i32[g], and fit where known.

    Args:
      name: what the caller calls it.
      tensor: the tensor.
      dims: what the caller calls its first and its last dims.
    """
    data = _data(f"{name}.data", tensor.data)
    if data.shape != tensor.shape:
        raise ValueError(f"{name}: its data have shape {data.shape}; want that of the tensor, {tensor.shape}")
    if not data.ndim:
        raise ValueError(f"{name}: want at least 1 dimension; got a scalar")
    first, last = tensor.first_dims, tensor.last_dims
    if first is not None and last is not None:
        if tensor.ndim != 1:
            raise ValueError(f"{name}: both of its axes are ragged; want flat data [c]; got shape {tensor.shape}")
        first, last = _flat_dims(name, dims, first, last, tensor.shape[0])
    elif first is not None:
        first = _dims(dims[0], first, tensor.shape[0], f"rows of {name}")
    elif last is not None:
        last = _dims(dims[1], last, tensor.shape[-1], f"columns of {name}")
    return GroupedTensor(data, first, last, data.shape)


def _flat_dims(name: str, dims: tuple[str, str], first: Any, last: Any, capacity: int) -> tuple[Any, Any]:
    """Sizes of the matrices of a flat buffer, which fit into it."""
    first, last = (_dims(each, x, None, "") for each, x in zip(dims, (first, last), strict=True))
    if first.shape != last.shape:
        raise ValueError(f"{dims[1]}: want as many groups as {dims[0]}; got {last.shape[0]} and {first.shape[0]}")
    rows, columns = what.concrete(first), what.concrete(last)
    if rows is not None and columns is not None:
        need = sum(int(r) * int(c) for r, c in zip(rows, columns, strict=True))
        if need > capacity:
            raise ValueError(f"{name}: the groups have {need} entries; got {capacity}")
    return first, last


def _dims(name: str, sizes: Any, limit: int | None, of: str) -> Any:
    """Sizes i32[g], checked where they are known; numpy stays numpy, so that they are still known inside `jit`."""
    sizes = what.as_sizes(sizes, name)
    if sizes.ndim != 1 or sizes.shape[0] == 0:
        raise ValueError(f"{name}: want 1 dimension [g] of at least one group; got shape {sizes.shape}")
    if not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise TypeError(f"{name}: want an integer dtype; got {sizes.dtype}")
    known = what.concrete(sizes)
    if known is None:
        if not np.can_cast(sizes.dtype, np.int32):
            least = max(int(jnp.iinfo(sizes.dtype).min), -(2**31))  # negative ones stay so: `debug_checks` tells them
            sizes = jnp.clip(sizes, least, 2**31 - 1)
        return sizes.astype(jnp.int32)
    if known.min() < 0 or known.max() >= 2**31:
        i = int(np.argmin(known)) if known.min() < 0 else int(np.argmax(known))
        raise ValueError(f"{name}: want sizes from 0 to 2**31 - 1; group {i} has {known[i]}")
    total = sum(int(size) for size in known)
    if limit is not None and total > limit:
        raise ValueError(f"{name}: must sum to at most {limit}, the {of}; got a sum of {total}")
    return sizes.astype(np.int32)


def flat_places(rows: Any, columns: Any, capacity: int) -> tuple[Array, Array]:
    """Where the matrices of a flat buffer start, and how many rows of each lie inside."""
    rows, columns = (jnp.maximum(jnp.asarray(x), 0) for x in (rows, columns))
    wide = jnp.maximum(columns, 1)
    bounds = offsets(jnp.minimum(rows, np.int32(capacity) // wide) * columns, capacity)  # no product passes 2**31
    inside = jnp.minimum(rows, (bounds[1:] - bounds[:-1]) // wide)
    return bounds[:-1], jnp.where(columns > 0, inside, rows)


def along(tensor: GroupedTensor) -> tuple[Any, int]:
    """How much of the axis that groups lie along belongs to each, and which axis that is; None of a stack."""
    first, last = tensor.first_dims, tensor.last_dims
    if first is not None and last is not None:
        _, rows = flat_places(first, last, tensor.shape[0])
        return rows * jnp.maximum(jnp.asarray(last), 0), 0
    return (last, tensor.ndim - 1) if first is None else (first, 0)


def owned_entries(tensor: GroupedTensor) -> Array:
    """Whether a group owns an entry, in a shape that broadcasts against the data. Groups lie one after the other."""
    sizes, axis = along(tensor)
    if sizes is None:
        return jnp.ones((1,) * tensor.ndim, bool)
    end = offsets(jnp.asarray(sizes), tensor.shape[axis])[-1]
    shape = [length if i == axis else 1 for i, length in enumerate(tensor.shape)]
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis) < end


def spread(values: Array, tensor: GroupedTensor, fill: Any) -> Array:
    """A value of each group at each of its entries, in a shape that broadcasts against the data."""
    sizes, axis = along(tensor)
    if sizes is None:
        return values.reshape(-1, *(1,) * (tensor.ndim - 1))
    values = jnp.append(values, jnp.full((1,), fill, values.dtype))[owner(sizes, tensor.shape[axis])]
    return values.reshape([-1 if i == axis else 1 for i in range(tensor.ndim)])
