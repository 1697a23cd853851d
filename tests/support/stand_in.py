"""Stand-ins for qwix, which is no dependency: a pytree with the attributes of a `QArray`, and what it stands for."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trencadis.quant import FORMATS

M, K, N, SIZES = 20, 12, 8, np.array([7, 0, 6, 3])  # a small problem; four rows are unowned


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QArray:
    qvalue: Any
    scale: Any
    zero_point: Any = None
    qtype: Any = dataclasses.field(default=None, metadata={"static": True})


def qarray(x, format, tile, dtype=jnp.float32):
    """Of tiles that divide the axes, 0 being all of an axis; in numpy, so that nothing is compiled for it."""
    counts = [size // (length or size) for size, length in zip(x.shape, tile, strict=True)]
    parts = np.abs(x).reshape([n for size, count in zip(x.shape, counts, strict=True) for n in (count, size // count)])
    scale = (parts.max(axis=tuple(range(1, parts.ndim, 2))) / FORMATS[format].largest).astype(dtype)
    values = x / spread(scale.astype(np.float32), x.shape)
    values = np.rint(values).astype(np.int8) if format.startswith("int") else values
    return QArray(jnp.asarray(values.astype(FORMATS[format].values)), jnp.asarray(scale), None, FORMATS[format].values)


def spread(scale, shape):
    for axis, size in enumerate(shape):
        scale = np.repeat(scale, size // scale.shape[axis], axis)
    return scale


def meaning(x):
    """The numbers, in float64."""
    if not isinstance(x, QArray):
        return np.asarray(x).astype(np.float32).astype(np.float64)
    return meaning(x.qvalue) * spread(meaning(x.scale), x.qvalue.shape)
