"""Grouped tensors: many matrices of uneven sizes in one array, together with the sizes.

    ragged rows [m, ...]     ragged columns [..., m]     stacked [g, ...]     fully ragged [c]
    ┌───────┐ 0              ┌──┬─┬────┐                 ┌──┐┌──┐┌──┐         0 0 0 0 1 1 2 2 2 2 2 2 · ·
    ├───────┤                │0 │1│ 2  │                 │0 ││1 ││2 │         group i is a matrix of
    │       │ 1              │  │ │    │                 │  ││  ││  │         first_dims[i] rows and
    ├───────┤ 2              └──┴─┴────┘                 └──┘└──┘└──┘         last_dims[i] columns
    └───────┘

The constructor says what is ragged; an array never becomes grouped by accident.
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

from trencadis.core import arguments
from trencadis.core.jax_compat import exportable
from trencadis.gemm.elementwise import Elementwise
from trencadis.gemm.ownership import quantized
from trencadis.gemm.sizes import StaticSizes, checked_flat_sizes, checked_sizes

Array = jax.Array
Shape = tuple[int, ...]


@exportable
@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class GroupedTensor(Elementwise):
    """Groups stored in one array; each may have its own number of rows, of columns, or of both.

    Made by `ragged_rows`, `ragged_cols`, `stacked`, `fully_ragged` or `from_list`. It is a pytree, so it passes through
    `jit`, `vmap`, `grad`, `jax.tree.map` and donation. How the sizes were given decides what they are there:

    - Python ints, as in `[1, 2]`, are static, as `shape` is. They are known inside `jit`, which compiles once for each
      value, and `jax.grad` works with respect to the tensor.
    - An array, of numpy or of JAX, is a leaf. `jit` traces it and compiles once for all values. JAX differentiates
      integer leaves only with `allow_int=True`, or use `jax.grad` with respect to `data` and `with_data`.

    Tensors of the same groups can be added, subtracted, multiplied and divided, and so can a tensor and a scalar.
    Entries that no group owns are 0 in the result, as they are after `map`.

    Attributes:
      data: the numbers of all groups: an array, or a `quant.Scaled`.
      first_dims: i32[g], the size of each group along the first axis; None if it is the same for all groups.
      last_dims: i32[g], the size of each group along the last axis; None if it is the same for all groups.
      shape: the shape of the array of all groups, however `data` is stored.

    >>> x = GroupedTensor.ragged_rows(jnp.arange(6.0).reshape(3, 2), [1, 2])
    >>> x
    GroupedTensor(float32[3,2], 2 groups of 1, 2 rows)
    >>> [group.tolist() for group in x.to_list()]
    [[[0.0, 1.0]], [[2.0, 3.0], [4.0, 5.0]]]
    >>> slope = jax.grad(lambda t: (t.data**2).sum())(x)
    >>> (x - 0.5 * slope).data.tolist()
    [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    """

    data: Any
    first_dims: Any
    last_dims: Any
    shape: Shape

    def __post_init__(self) -> None:
        for name in ("first_dims", "last_dims"):  # an empty array is another way to say that groups do not differ
            if getattr(getattr(self, name), "shape", None) == (0,):
                object.__setattr__(self, name, None)

    # -- a pytree: static sizes belong to its structure, other sizes are leaves ----------------------------------------

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], tuple[Any, ...]]:
        """The leaves with their names, and the static part: static sizes, or None, and the shape."""
        dims = self.first_dims, self.last_dims
        static = tuple(x.key if isinstance(x, StaticSizes) else None for x in dims)
        leaves = self.data, *(x if key is None else None for x, key in zip(dims, static, strict=True))
        names = map(jax.tree_util.GetAttrKey, ("data", "first_dims", "last_dims"))
        return tuple(zip(names, leaves, strict=True)), (*static, self.shape)

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], leaves: Sequence[Any]) -> GroupedTensor:
        """The tensor of some leaves, which may be anything that a transformation puts there."""
        first, last = (x if key is None else StaticSizes(key) for key, x in zip(static[:2], leaves[1:], strict=True))
        return cls(leaves[0], first, last, static[2])

    # -- constructors --------------------------------------------------------------------------------------------------

    @classmethod
    def ragged_rows(cls, x: Any, sizes: Any) -> GroupedTensor:
        """Group i is the `sizes[i]` rows of x `[m, ...]` after those of group i - 1; no group owns rows past the last.

        >>> GroupedTensor.ragged_rows(jnp.ones((4, 2)), jnp.array([3, 0])).num_groups
        2
        """
        x = _data("x", x)
        if x.ndim < 1:
            raise ValueError("x: want at least 1 dimension [m, ...]; got a scalar")
        return cls(x, checked_sizes("sizes", sizes, x.shape[0], "rows of x"), None, x.shape)

    @classmethod
    def ragged_cols(cls, x: Any, sizes: Any) -> GroupedTensor:
        """Group i is the `sizes[i]` columns of x `[..., m]` after those of group i - 1.

        >>> GroupedTensor.ragged_cols(jnp.ones((2, 4)), [3, 1])
        GroupedTensor(float32[2,4], 2 groups of 3, 1 columns)
        """
        x = _data("x", x)
        if x.ndim < 2:
            raise ValueError(f"x: want at least 2 dimensions [..., m]; got shape {x.shape}")
        return cls(x, None, checked_sizes("sizes", sizes, x.shape[-1], "columns of x"), x.shape)

    @classmethod
    def stacked(cls, x: Any) -> GroupedTensor:
        """Group i is `x[i]`, so that all groups have the same shape.

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
        dims = "first_dims", "last_dims"
        first, last = checked_flat_sizes("flat", dims, first_dims, last_dims, flat.shape[0])
        return cls(flat, first, last, flat.shape)

    @classmethod
    def from_list(cls, groups: Sequence[Any], ragged: str | None = None) -> GroupedTensor:
        """A tensor of the arrays of a list, one after the other; its sizes are static.

        Args:
          groups: arrays of one dtype.
          ragged: "rows", "columns" or "both", or "none" for a stack; by default the first of "none", "rows", "columns"
            and "both" that the shapes allow.

        >>> GroupedTensor.from_list([jnp.ones((1, 2)), jnp.ones((3, 2))])
        GroupedTensor(float32[4,2], 2 groups of 1, 3 rows)
        """
        arrays = [arguments.as_array(f"groups[{i}]", x) for i, x in enumerate(groups)]
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

    # -- properties ----------------------------------------------------------------------------------------------------

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the numbers as they are stored."""
        return np.dtype(self.data.dtype)

    @property
    def ndim(self) -> int:
        """The number of axes of `shape`."""
        return len(self.shape)

    @property
    def num_groups(self) -> int:
        """The number of groups, empty ones included."""
        dims = self.first_dims if self.first_dims is not None else self.last_dims
        return int(self.shape[0] if dims is None else dims.shape[0])

    @property
    def is_stacked(self) -> bool:
        """Whether no axis is ragged, so that the first axis is that of the groups."""
        return self.first_dims is None and self.last_dims is None

    @property
    def is_fully_ragged(self) -> bool:
        """Whether both axes are ragged, so that the matrices are stored in a flat buffer."""
        return self.first_dims is not None and self.last_dims is not None

    def to_list(self) -> list[Any]:
        """The groups as a list of arrays, or of `Scaled`; their sizes must be known at trace time.

        >>> GroupedTensor.stacked(jnp.ones((2, 3))).to_list()
        [Array([1., 1., 1.], dtype=float32), Array([1., 1., 1.], dtype=float32)]
        """
        if self.is_stacked:
            return list(self.unstack())
        first, last = (None if x is None else self._known(x) for x in (self.first_dims, self.last_dims))
        if first is not None and last is not None:
            if quantized(self.data):
                raise ValueError("to_list: want flat data that are not quantized; got a Scaled; dequantize it first")
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
        """The groups of a stacked tensor as a tuple of arrays; works on traced arrays, too.

        >>> len(GroupedTensor.stacked(jnp.ones((2, 3))).unstack())
        2
        """
        if not self.is_stacked:
            raise ValueError(f"unstack: want a stacked tensor; got {self!r}; to_list takes ragged ones apart")
        if quantized(self.data):
            return tuple(self.data[i] for i in range(self.shape[0]))
        return tuple(jnp.unstack(self.data))

    def dequantize(self, dtype: Any = jnp.float32) -> GroupedTensor:
        """The same tensor with an array of floats as its data.

        >>> from trencadis.gemm import grouped_quantize
        >>> x = GroupedTensor.ragged_rows(jnp.array([[1.0, 2.0], [4.0, 8.0]]), [1, 1])
        >>> grouped_quantize(x, "float8_e4m3fn").dequantize().data.tolist()
        [[1.0, 2.0], [4.0, 8.0]]
        """
        data = self.data.dequantize(dtype) if quantized(self.data) else self.data
        return GroupedTensor(data, self.first_dims, self.last_dims, self.shape)

    def with_data(self, data: Any) -> GroupedTensor:
        """The same groups with other numbers: `data` is an array, or a `quant.Scaled`, of the tensor's shape.

        >>> x = GroupedTensor.ragged_rows(jnp.ones((3, 2)), [1, 2])
        >>> jax.grad(lambda data: (x.with_data(data).data ** 2).sum())(x.data).tolist()
        [[2.0, 2.0], [2.0, 2.0], [2.0, 2.0]]
        """
        data = _data("data", data)
        if data.shape != self.shape:
            raise ValueError(f"data: want shape {self.shape}, as the tensor has; got {data.shape}")
        return GroupedTensor(data, self.first_dims, self.last_dims, self.shape)

    def _known(self, dims: Any) -> list[int]:
        known = arguments.concrete(dims)
        if known is None:
            raise ValueError("to_list: want sizes that are known, since shapes depend on them; got traced sizes")
        return [int(size) for size in known]

    def __repr__(self) -> str:
        dtype = getattr(self.data, "dtype", type(self.data).__name__)
        data = repr(self.data) if quantized(self.data) else f"{dtype}[{','.join(map(str, self.shape))}]"
        axes = (self.first_dims, "rows"), (self.last_dims, "columns")
        sizes = [_sizes_text(x, axis) for x, axis in axes if x is not None]
        dims = self.first_dims if self.first_dims is not None else self.last_dims
        known = self.shape[:1] if dims is None else getattr(dims, "shape", ())  # dims may be any leaf of a pytree
        count = f"{known[-1] if known else '?'} groups"
        return f"GroupedTensor({data}, {' of '.join([count, ' by '.join(sizes)] if sizes else [count])})"


def _data(name: str, x: Any) -> Any:
    """The data of a grouped tensor as an array, or as the quantized data that they are."""
    return x if quantized(x) else arguments.as_array(name, x)


def _cut(data: Any, start: int, end: int, axis: int) -> Any:
    """The entries from start to end along the first axis or the last, of an array or of quantized data."""
    if not quantized(data):
        return jax.lax.slice_in_dim(data, start, end, axis=axis)
    if axis == 0:
        return data[start:end]
    order = tuple(range(data.ndim))
    return data.transpose(*order[-1:], *order[:-1])[start:end].transpose(*order[1:], 0)


def _sizes_text(dims: Any, axis: str) -> str:
    """Sizes for the repr: the first eight where they are known, else that the axis is ragged."""
    known = arguments.concrete(dims) if isinstance(dims, (np.ndarray, jax.Array)) else None
    if known is None or known.ndim != 1 or known.dtype.kind not in "iu":
        return f"ragged {axis}"
    some = ", ".join(map(str, known[:8])) + (", ..." if known.size > 8 else "")
    return f"{some} {axis}"


def _agree(shapes: Sequence[Shape], start: int, stop: int | None) -> bool:
    """Whether these shapes have the same rank and are equal from axis `start` to `stop`."""
    return len({(len(shape), shape[start:stop]) for shape in shapes}) == 1


_FITS: dict[str, Callable[[Sequence[Shape]], bool]] = {
    "none": lambda shapes: len(set(shapes)) == 1,
    "rows": lambda shapes: min(map(len, shapes)) >= 1 and _agree(shapes, 1, None),
    "columns": lambda shapes: min(map(len, shapes)) >= 2 and _agree(shapes, 0, -1),
    "both": lambda shapes: all(len(shape) == 2 for shape in shapes),
}
_WANTED = {
    "none": "groups of one shape",
    "rows": "groups that differ in the first axis only",
    "columns": "groups of two axes or more that differ in the last only",
    "both": "matrices",
}


def checked(name: str, tensor: GroupedTensor, dims: tuple[str, str]) -> GroupedTensor:
    """The tensor with sizes i32[g] and data that fit, or an error; for tensors that no constructor checked.

    Args:
      name: what the caller calls it.
      tensor: the tensor.
      dims: what the caller calls the sizes of its first axis, and those of its last.
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
        first, last = checked_flat_sizes(name, dims, first, last, tensor.shape[0])
    elif first is not None:
        first = checked_sizes(dims[0], first, tensor.shape[0], f"rows of {name}")
    elif last is not None:
        last = checked_sizes(dims[1], last, tensor.shape[-1], f"columns of {name}")
    return GroupedTensor(data, first, last, data.shape)
