"""`prepare`: weights stored once in the order in which products read them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trencadis.core.dtypes import bits
from trencadis.quant.calibrate import ordered
from trencadis.quant.formats import FORMATS
from trencadis.quant.qarray import from_qarray, is_qarray
from trencadis.quant.scaled import Scaled


def prepare(w: Any, *, contracting: int = -2) -> Scaled:
    """Quantized weights, stored so that the contracted axis is the last: the order in which tensor cores read 8 bits.

    Shape and meaning stay: weights `[g, k, n]` are still multiplied without transpose_rhs. Call it once, when weights
    are loaded. `quantize` and the loaders of checkpoints store their results in this order already.

    The gradient with respect to lhs sums over n, so that it wants weights in the order in which they came. Where it is
    taken as often as the product, as in training with frozen weights, one of the two is transposed in any case.

    Args:
      w: weights `[g, k, n]`, or with more leading axes: a `Scaled`, a `qwix.QArray`, or an array of int8, float8, int4
        or float4, which becomes a `Scaled` with a scale of 1, and with that a constant to autodiff.
      contracting: the axis that products sum over, one of the last two. Weights `[g, n, k]` for transpose_rhs=True have
        contracting=-1.

    Returns:
      A `Scaled`; w itself if it is one in this order.

    >>> w = prepare(jnp.ones((2, 64, 8), jnp.int8))
    >>> w, w.transposed
    (Scaled(int8[2,64,8], scales float32[1,1,1] of blocks 2 x 64 x 8), True)
    """
    if is_qarray(w):
        w = from_qarray("w", w)
    if not isinstance(w, Scaled):
        w = _unit_scaled(w)
    if w.ndim < 2:
        raise ValueError(f"w: want weights of at least 2 dimensions, such as [g, k, n]; got shape {w.shape}")
    return ordered(w, contracting)


def _unit_scaled(w: Any) -> Scaled:
    """An array of a low-precision dtype as a `Scaled` with one scale, which is 1."""
    if not isinstance(w, (np.ndarray, jax.Array)):
        raise TypeError(f"w: want a Scaled, a qwix.QArray or an array; got {type(w).__name__}")
    if w.dtype.name not in FORMATS:
        known = ", ".join(name for name, each in FORMATS.items() if not each.block)
        either = "; products read it in either order" if bits(w.dtype) > 8 else ""
        raise TypeError(f"w: want one of {known}; got {w.dtype.name}{either}")
    block = tuple(max(size, 1) for size in w.shape)
    return Scaled(w, jnp.ones((1,) * w.ndim, jnp.float32), w.dtype.name, block)
