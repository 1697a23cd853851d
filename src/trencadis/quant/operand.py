"""The operands of grouped products: what a caller may pass, and how it becomes an array or a `Scaled`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np
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
