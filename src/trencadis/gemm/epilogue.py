"""What comes after the product of a grouped GEMM: `alpha * product + bias + beta * out`, by groups."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trencadis.core import problem as what
from trencadis.core.dtypes import accumulator
from trencadis.core.spans import owner
from trencadis.gemm.debug import check_same
from trencadis.gemm.operand import Side, sound
from trencadis.gemm.tensor import GroupedTensor, owned_entries, quantized, spread

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ends:
    """What comes after the product: arrays, of which out may be a grouped tensor."""

    bias: Any = None
    alpha: Any = None
    beta: Any = None
    out: Any = None

    def __post_init__(self) -> None:
        for name in ("bias", "alpha", "beta", "out"):
            x = getattr(self, name)
            if x is not None and not (name == "out" and isinstance(x, GroupedTensor)):
                object.__setattr__(self, name, what.as_array(name, x))
        if isinstance(self.out, GroupedTensor) and quantized(self.out.data):
            raise TypeError(f"out: want numbers that can be added to; got quantized ones, {self.out!r}")

    @property
    def any(self) -> bool:
        """Whether anything does."""
        return any(x is not None for x in (self.bias, self.alpha, self.beta, self.out))

    def dtype(self, product: Any) -> Any:
        """The dtype in which it is added to a product of some dtype: integers have no room for a half."""
        given = (x.dtype for x in (self.bias, self.alpha, self.beta, self.out) if x is not None)
        return functools.reduce(accumulator, given, product)


def check_ends(a: Side, b: Side, ends: Ends, ragged: str) -> Ends:
    """Alpha and beta are [g]; bias is [g, n] where n is the same in all groups; beta needs out."""
    groups = b.tensor.num_groups
    for name in ("alpha", "beta"):
        x = getattr(ends, name)
        if x is None:
            continue
        if x.shape != (groups,):
            raise ValueError(f"{name}: want one number for each group, shape ({groups},); got {x.shape}")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name}: want a float dtype; got {x.dtype}")
    if isinstance(ends.out, GroupedTensor) and ragged in ("", "k"):
        raise TypeError("out: want an array, since the result is not ragged; got a GroupedTensor")
    if ends.out is not None and ragged not in ("", "k") and not isinstance(ends.out, GroupedTensor):
        raise TypeError(f"out: want a GroupedTensor, ragged as the result is; got {type(ends.out).__name__}")
    if ends.beta is not None and ends.out is None:
        raise ValueError("beta: scales what is in out; want out, too")
    if ends.bias is not None:
        if "n" in ragged:
            raise ValueError("bias: is [g, n], and n is ragged here; want it the same in all groups")
        want = (groups, *(b.tensor.shape[axis] for axis in b.free))
        if ends.bias.shape != want:
            raise ValueError(f"bias: want shape {want}, groups and free axes of {b.name}; got {ends.bias.shape}")
    if not isinstance(ends.out, GroupedTensor):
        return ends
    return dataclasses.replace(ends, out=sound("out", ends.out)[0])


def finished(product: GroupedTensor, ends: Ends, dtype: Any) -> GroupedTensor | Array:
    """Alpha * product + bias + beta * out, where groups own it; what nobody owns keeps what out holds, or is 0."""
    data = product.data
    if ends.any:
        mine = owned_entries(product)
        if ends.alpha is not None:
            data = data * spread(ends.alpha, product, 1).astype(data.dtype)
        if ends.bias is not None:
            data = data + jnp.where(mine, _bias_of(ends.bias.astype(data.dtype), product), 0)
        if ends.out is not None:
            old = held(ends.out, product.shape, (product.first_dims, product.last_dims), dtype)
            scale = 1 if ends.beta is None else spread(ends.beta, product, 1)
            data = jnp.where(mine, data + (old * scale).astype(data.dtype), old.astype(data.dtype))
    data = data.astype(dtype)
    if product.first_dims is None and product.last_dims is None:
        return data
    return GroupedTensor(data, product.first_dims, product.last_dims, product.shape)


def held(out: Any, shape: tuple[int, ...], dims: tuple[Any, Any], dtype: Any) -> Array:
    """The data of out, if it is as the result is: of its shape and dtype, and ragged in the same of first and last."""
    data = out.data if isinstance(out, GroupedTensor) else out
    if data.shape != tuple(shape) or data.dtype != dtype:
        raise ValueError(f"out: want {np.dtype(dtype).name}{list(shape)}; got {data.dtype.name}{list(data.shape)}")
    if isinstance(out, GroupedTensor):
        _check_ragged(out, dims)
    return data


def _check_ragged(out: GroupedTensor, dims: tuple[Any, Any]) -> None:
    """Out is ragged as the result is, by the same sizes."""
    mine = out.first_dims, out.last_dims
    if [x is not None for x in mine] != [x is not None for x in dims]:
        axes = " and ".join(name for name, x in zip(("first", "last"), dims, strict=True) if x is not None)
        raise ValueError(f"out: want a tensor that is ragged in its {axes} axis, as the result is; got {out!r}")
    for name, x, y in zip(("out.first_dims", "out.last_dims"), mine, dims, strict=True):
        if x is None:
            continue
        if x.shape != y.shape:
            raise ValueError(f"{name}: want {y.shape[0]} groups, as the result has; got {x.shape[0]}")
        one, two = what.concrete(x), what.concrete(y)
        if one is not None and two is not None and (one != two).any():
            i = int(np.argmax(one != two))
            raise ValueError(f"{name}: want the sizes of the result; group {i} has {one[i]} and {two[i]} there")
        check_same(name, x, "the result", y)


def _bias_of(bias: Array, product: GroupedTensor) -> Array:
    """The bias of each row [m, ..., n] or of each group [g, 1, n]."""
    if product.first_dims is None:
        return bias.reshape(bias.shape[0], *(1,) * (product.ndim - bias.ndim), *bias.shape[1:])
    rows = jnp.take(bias, owner(product.first_dims, product.shape[0]), axis=0, mode="clip")
    return rows.reshape(rows.shape[0], *(1,) * (product.ndim - bias.ndim), *bias.shape[1:])
