"""Elementwise functions of grouped tensors: the operators +, -, *, / and unary -, and `map`.

Operands are tensors of the same groups, or scalars. The result has these groups, and 0 in entries that no group owns.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from trencadis.core import arguments
from trencadis.gemm.ownership import along, owned_entries, quantized
from trencadis.gemm.sizes import check_same_sizes

if TYPE_CHECKING:
    from trencadis.gemm.tensor import GroupedTensor

Array = jax.Array


class Elementwise:
    """The operators of a grouped tensor, and `map`."""

    __array_ufunc__ = None  # a numpy scalar on the left leaves the operation to the tensor

    def __neg__(self) -> GroupedTensor:
        return elementwise("-", jnp.negative, self)

    def __add__(self, other: Any) -> GroupedTensor:
        return elementwise("+", jnp.add, self, other)

    def __radd__(self, other: Any) -> GroupedTensor:
        return elementwise("+", jnp.add, other, self)

    def __sub__(self, other: Any) -> GroupedTensor:
        return elementwise("-", jnp.subtract, self, other)

    def __rsub__(self, other: Any) -> GroupedTensor:
        return elementwise("-", jnp.subtract, other, self)

    def __mul__(self, other: Any) -> GroupedTensor:
        return elementwise("*", jnp.multiply, self, other)

    def __rmul__(self, other: Any) -> GroupedTensor:
        return elementwise("*", jnp.multiply, other, self)

    def __truediv__(self, other: Any) -> GroupedTensor:
        return elementwise("/", jnp.true_divide, self, other)

    def __rtruediv__(self, other: Any) -> GroupedTensor:
        return elementwise("/", jnp.true_divide, other, self)

    def map(self, fn: Callable[[Array], Array]) -> GroupedTensor:
        """Apply an elementwise function to the numbers of all groups.

        `fn` sees the data as one array and returns an array of the same shape. Entries that no group owns are 0 in the
        result. While `fn` runs they hold a number that some group owns, so that no NaN or infinite slope comes from
        them, also in gradients with respect to what `fn` closes over.

        >>> from trencadis import GroupedTensor
        >>> GroupedTensor.ragged_rows(jnp.array([[4.0], [9.0], [-1.0]]), [1, 1]).map(jnp.sqrt).data.ravel()
        Array([2., 3., 0.], dtype=float32)
        """
        return elementwise("map", fn, self)


def elementwise(symbol: str, fn: Callable[..., Any], *operands: Any) -> GroupedTensor:
    """`fn` of the data of operands, each a tensor of the same groups or a scalar; `symbol` is for errors."""
    tensors: list[Any] = [x for x in operands if isinstance(x, Elementwise)]
    if not all(isinstance(x, Elementwise) or _is_scalar(x) for x in operands):
        got = " and ".join(type(x).__name__ for x in operands)
        raise TypeError(f"{symbol}: want grouped tensors of the same groups, or scalars; got {got}")
    groups = _common_groups(symbol, tensors)
    owned = None if _all_owned(groups) else owned_entries(groups)
    out = fn(*(_owned_data(x, owned) if isinstance(x, Elementwise) else x for x in operands))
    if np.shape(out) != groups.shape:
        raise ValueError(f"fn: want a result of shape {groups.shape}, as the data have; got {np.shape(out)}")
    return groups.with_data(out if owned is None else jnp.where(owned, out, jnp.zeros_like(out)))


def _is_scalar(x: Any) -> bool:
    """Whether x is a number, or an array of numpy or of JAX without axes."""
    if isinstance(x, (np.ndarray, jax.Array)):
        return x.ndim == 0
    return isinstance(x, (numbers.Number, np.number, np.bool_))


def _common_groups(symbol: str, tensors: Sequence[GroupedTensor]) -> GroupedTensor:
    """The tensor whose groups the result has, or an error unless all tensors have the same groups.

    A gradient that JAX made with `allow_int=True` has float0 in place of its sizes; it follows the other tensors.
    """
    found = next((x for x in tensors if not _sizeless(x)), tensors[0])
    for x in tensors:
        if quantized(x.data):
            raise TypeError(f"{symbol}: want tensors that are not quantized; got {x!r}; dequantize it first")
        if x.shape != found.shape or np.shape(x.data) != found.shape:
            raise ValueError(f"{symbol}: want data of one shape, {found.shape}; got {np.shape(x.data)} in {x!r}")
        pairs = [(x.first_dims, found.first_dims), (x.last_dims, found.last_dims)]
        if any((one is None) != (two is None) for one, two in pairs):
            raise ValueError(f"{symbol}: want tensors that are ragged in the same axes; got {found!r} and {x!r}")
        for name, (one, two) in zip(("first_dims", "last_dims"), pairs, strict=True):
            if one is not None and one is not two and not _sizeless(x):
                check_same_sizes(f"right.{name}", one, f"left.{name}", two)
    return found


def _sizeless(tensor: GroupedTensor) -> bool:
    """Whether the tensor is a gradient that has float0 in place of its sizes."""
    return any(getattr(x, "dtype", None) == jax.dtypes.float0 for x in (tensor.first_dims, tensor.last_dims))


def _all_owned(tensor: GroupedTensor) -> bool:
    """Whether every entry is known to belong to a group; also where there are no sizes, as in a gradient."""
    if _sizeless(tensor):
        return True
    sizes, axis = along(tensor)
    known = None if sizes is None else arguments.concrete(sizes)
    return sizes is None or (known is not None and int(known.sum(dtype=np.int64)) == tensor.shape[axis])


def _owned_data(tensor: Any, owned: Array | None) -> Array:
    """The data, with a number that some group owns, or 1, in unowned entries; `owned` None means that all are owned."""
    data = jnp.asarray(tensor.data)
    if owned is None or data.size == 0:
        return data
    first = (0,) * data.ndim  # groups follow one another from the first entry on: it is owned if any is
    some = jnp.where(owned[first], jax.lax.stop_gradient(data[first]), jnp.ones((), data.dtype))
    return jnp.where(owned, data, some)
