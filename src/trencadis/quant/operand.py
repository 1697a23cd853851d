"""The operands of grouped products: what a caller may pass, and how it becomes an array or a `Scaled`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from trencadis.core import problem as what
from trencadis.quant.qarray import from_qarray, is_qarray
from trencadis.quant.scaled import Scaled


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


def array_operand(name: str, x: Operand) -> Any:
    """An argument as an array, or as a `Scaled` that holds together: its own, or one of a `qwix.QArray`."""
    if is_qarray(x):
        x = from_qarray(name, x)
    if not isinstance(x, Scaled):
        return what.as_array(name, x)
    shape, scale = jnp.shape(x.values), jnp.shape(x.scale)
    if len(x.block) != len(shape) or (0 in x.block and 0 not in shape):
        raise ValueError(f"{name}: want blocks of a length along each axis of {shape}; got {x.block}")
    if x.total is not None and jnp.shape(x.total) != ():
        raise ValueError(f"{name}: want one total; got an array of shape {jnp.shape(x.total)}")
    want = tuple(-(-size // max(length, 1)) for size, length in zip(shape, x.block, strict=True))
    if 0 in shape:  # no entries: any scales will do, and these broadcast
        return dataclasses.replace(x, scale=jnp.ones([max(count, 1) for count in want], x.scale.dtype))
    if scale != want:
        raise ValueError(f"{name}: want a scale for each block of {x.block}, shape {want}; got {scale}")
    return x
