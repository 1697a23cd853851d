"""The epilogue of a grouped GEMM: `alpha * product + bias + beta * out`, group by group."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trencadis.core import arguments
from trencadis.core.dtypes import accumulator
from trencadis.core.spans import owner
from trencadis.gemm.operand import GemmOperand, checked_tensor
from trencadis.gemm.ownership import owned_entries, quantized, spread
from trencadis.gemm.sizes import check_same_sizes
from trencadis.gemm.tensor import GroupedTensor

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmEpilogue:
    """The arrays of an epilogue, each of which may be None; `out` is a grouped tensor if the result is ragged."""

    bias: Any = None
    alpha: Any = None
    beta: Any = None
    out: Any = None

    def __post_init__(self) -> None:
        for name in ("bias", "alpha", "beta", "out"):
            x = getattr(self, name)
            if x is not None and not (name == "out" and isinstance(x, GroupedTensor)):
                object.__setattr__(self, name, arguments.as_array(name, x))
        if isinstance(self.out, GroupedTensor) and quantized(self.out.data):
            raise TypeError(f"out: want numbers that can be added to; got quantized ones, {self.out!r}")

    @property
    def given(self) -> tuple[str, ...]:
        """The names of the arrays that are not None."""
        return tuple(name for name in ("bias", "alpha", "beta", "out") if getattr(self, name) is not None)

    def dtype(self, product: Any) -> Any:
        """The dtype in which the epilogue of a product is computed: wide enough for the product and for each array."""
        return functools.reduce(accumulator, (getattr(self, name).dtype for name in self.given), product)


def checked_epilogue(a: GemmOperand, b: GemmOperand, epilogue: GemmEpilogue, ragged: str, dtype: Any) -> GemmEpilogue:
    """The epilogue with its `out` checked as a tensor, or an error: alpha and beta are [g], bias is [g, n].

    Args:
      a: the left operand.
      b: the right operand.
      epilogue: the epilogue of their product.
      ragged: the names of the ragged ones of m, k and n.
      dtype: the dtype of the result.
    """
    groups = b.tensor.num_groups
    for name in ("alpha", "beta"):
        x = getattr(epilogue, name)
        if x is None:
            continue
        if x.shape != (groups,):
            raise ValueError(f"{name}: want one number for each group, shape ({groups},); got {x.shape}")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name}: want a float dtype; got {x.dtype}")
    if epilogue.beta is not None and epilogue.out is None:
        raise ValueError("beta: scales out; want out, too; got None")
    _check_bias(b, epilogue.bias, ragged, dtype)
    if epilogue.out is None:
        return epilogue
    if not isinstance(epilogue.out, GroupedTensor):
        if ragged not in ("", "k"):
            got = type(epilogue.out).__name__
            raise TypeError(f"out: want a GroupedTensor that is ragged as the result is; got {got}")
        return epilogue
    if ragged in ("", "k"):
        raise TypeError("out: want an array, since the result is not ragged; got a GroupedTensor")
    return dataclasses.replace(epilogue, out=checked_tensor("out", epilogue.out)[0])


def _check_bias(b: GemmOperand, bias: Any, ragged: str, dtype: Any) -> None:
    """Raise unless a bias has the groups and the free axes of rhs, and numbers that the result can hold."""
    if bias is None:
        return
    if "n" in ragged:
        raise ValueError("bias: is [g, n], and n is ragged here; want it the same in all groups")
    want = (b.tensor.num_groups, *(b.tensor.shape[axis] for axis in b.free))
    if bias.shape != want:
        raise ValueError(f"bias: want shape {want}, groups and free axes of {b.name}; got {bias.shape}")
    if not jnp.issubdtype(bias.dtype, jnp.number):
        raise TypeError(f"bias: want a number dtype; got {bias.dtype}")
    if jnp.issubdtype(bias.dtype, jnp.complexfloating) and not jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(f"bias: want a real dtype, since the result is {np.dtype(dtype).name}; got {bias.dtype}")


def apply_epilogue(product: GroupedTensor, epilogue: GemmEpilogue, dtype: Any) -> GroupedTensor | Array:
    """alpha * product + bias + beta * out, rounded once to dtype; unowned entries keep what `out` holds, or are 0.

    The product has the dtype in which all is computed. As in BLAS, `out` is not read where beta is 0: NaN and Inf in it
    do not reach the result. A stacked result comes back as an array.
    """
    data = product.data
    if epilogue.given:
        owned = owned_entries(product)
        if epilogue.alpha is not None:
            data = data * spread(epilogue.alpha, product, 1).astype(data.dtype)
        if epilogue.bias is not None:
            data = data + jnp.where(owned, _bias_entries(epilogue.bias.astype(data.dtype), product), 0)
        if epilogue.out is not None:
            old = existing_data(epilogue.out, product.shape, (product.first_dims, product.last_dims), dtype)
            old = old.astype(data.dtype)
            data = jnp.where(owned, data + _scaled(old, epilogue.beta, product), old)
    data = data.astype(dtype)
    if product.is_stacked:
        return data
    return GroupedTensor(data, product.first_dims, product.last_dims, product.shape)


def _scaled(old: Array, beta: Array | None, product: GroupedTensor) -> Array:
    """beta * old; what is not finite counts as 0 where beta is 0, so that the gradient of beta is still that of old."""
    if beta is None:
        return old
    scale = spread(beta, product, 1).astype(old.dtype)
    return jnp.where((scale != 0) | jnp.isfinite(old), old, 0) * scale


def existing_data(out: Any, shape: tuple[int, ...], dims: tuple[Any, Any], dtype: Any) -> Array:
    """The data of `out`, or an error unless it has the shape, the dtype and the ragged axes of the result.

    Args:
      out: an array or a grouped tensor.
      shape: the shape of the result.
      dims: the sizes of the first axis of the result, and those of its last; None where it is not ragged.
      dtype: the dtype of the result.
    """
    data = out.data if isinstance(out, GroupedTensor) else out
    if data.shape != tuple(shape) or data.dtype != dtype:
        raise ValueError(f"out: want {np.dtype(dtype).name}{list(shape)}; got {data.dtype.name}{list(data.shape)}")
    if isinstance(out, GroupedTensor):
        own = out.first_dims, out.last_dims
        if [x is not None for x in own] != [x is not None for x in dims]:
            axes = " and ".join(name for name, x in zip(("first", "last"), dims, strict=True) if x is not None)
            raise ValueError(f"out: want a tensor that is ragged in its {axes} axis, as the result is; got {out!r}")
        for name, x, y in zip(("out.first_dims", "out.last_dims"), own, dims, strict=True):
            if x is not None:
                check_same_sizes(name, x, "the result", y)
    return data


def _bias_entries(bias: Array, product: GroupedTensor) -> Array:
    """The bias of each row [m, ..., n], or of each group [g, ..., n] of a stack, to be added to the product."""
    if product.first_dims is not None:
        bias = jnp.take(bias, owner(product.first_dims, product.shape[0]), axis=0, mode="clip")
    return bias.reshape(bias.shape[0], *(1,) * (product.ndim - bias.ndim), *bias.shape[1:])
