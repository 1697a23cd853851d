"""The operands of grouped products: what a caller may pass, and how it becomes an array or a `Scaled`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from trencadis.core import arguments
from trencadis.quant.qarray import from_qarray, is_qarray
from trencadis.quant.scaled import Scaled, checked


class QArray(Protocol):
    """A quantized array of qwix, known by its attributes."""

    @property
    def qvalue(self) -> Any: ...
    @property
    def scale(self) -> Any: ...
    @property
    def zero_point(self) -> Any: ...


Operand: TypeAlias = jax.Array | np.ndarray | Sequence[Any] | Scaled | QArray
Sizes: TypeAlias = jax.Array | np.ndarray | Sequence[int]


def array_operand(name: str, x: Any) -> jax.Array | Scaled:
    """An argument as an array, or as a `Scaled` that holds together: its own, or one of a `qwix.QArray`."""
    if is_qarray(x):
        x = from_qarray(name, x)
    return checked(name, x) if isinstance(x, Scaled) else arguments.as_array(name, x)


def promoted(*operands: jax.Array | Scaled) -> list[np.dtype]:
    """The dtypes that lax is shown: with a quantized operand, the one that both operands are promoted to."""
    if not any(isinstance(x, Scaled) for x in operands):
        return [x.dtype for x in operands]
    wide = [x.wide if isinstance(x, Scaled) else x.dtype for x in operands]
    narrow = [each.itemsize == 1 and jnp.issubdtype(each, jnp.floating) for each in wide]  # jnp does not promote these
    kept = [jnp.bfloat16 if small else each for small, each in zip(narrow, wide, strict=True)]
    return [jnp.result_type(*kept)] * len(operands)


def dtype_of_product(lhs: jax.Array | Scaled, rhs: jax.Array | Scaled) -> np.dtype:
    """The dtype of a product for which the caller names none: that of `jax.lax.dot`."""
    return _dtype_of_dot(*promoted(lhs, rhs))


@functools.lru_cache(maxsize=64)  # tracing a product takes longer than all other checks of a call together
def _dtype_of_dot(lhs: np.dtype, rhs: np.dtype) -> np.dtype:
    one = [jax.ShapeDtypeStruct((1, 1), dtype) for dtype in (lhs, rhs)]
    return jax.eval_shape(lax.dot, *one).dtype


def operand_specs(x: jax.Array | Scaled, axes: Sequence[Any]) -> Any:
    """The `PartitionSpec`s of an operand, one for each leaf, whose dimensions are sharded over these mesh axes.

    Dimensions along which there is one scale are not sharded in the scales.
    """
    if not isinstance(x, Scaled):
        return PartitionSpec(*axes)
    (_, scale, total, zeros), static = x.tree_flatten()
    stored = [*axes[:-2], axes[-1], axes[-2]] if x.transposed else axes
    shared = PartitionSpec(*(None if size == 1 else axis for size, axis in zip(scale.shape, stored, strict=True)))
    rest = (None if total is None else PartitionSpec(), None if zeros is None else shared)
    return Scaled.tree_unflatten(static, (PartitionSpec(*stored), shared, *rest))
