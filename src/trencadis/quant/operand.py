"""The operands of grouped products: what a caller may pass, and how it becomes an array or a `Scaled`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np

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
