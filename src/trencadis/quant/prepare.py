"""`prepare`: weights stored once in the order in which products read them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trencadis.core.devices import card_for, target_of
from trencadis.core.dtypes import bits
from trencadis.core.interleave import interleaves
from trencadis.quant.calibrate import ordered
from trencadis.quant.formats import FORMATS
from trencadis.quant.qarray import from_qarray, is_qarray
from trencadis.quant.scaled import Scaled


def prepare(w: Any, *, contracting: int = -2, interleave: bool | None = None) -> Scaled:
    """Quantized weights, stored in the order in which products on this machine read them fastest.

    The contracted axis is stored last, which is how tensor cores read 8 bits. For Hopper GPUs, weights that the kernel
    unpacks are interleaved along it as well, so that rows need not be permuted to match. For TPUs it is stored last but
    one: their MXUs load weights in that order twice as fast, and scales along k can be multiplied into them.

    Shape and meaning stay: weights `[g, k, n]` are still multiplied without transpose_rhs, on any machine. Call it
    once, when weights are loaded, on the machine that serves. `quantize` and the loaders of checkpoints store the
    contracted axis last already, but do not interleave: what they make does not depend on the machine.

    The gradient with respect to lhs sums over n, so that it wants weights in the order in which they came. Where it is
    taken as often as the product, as in training with frozen weights, one of the two is transposed in any case.

    Args:
      w: weights `[g, k, n]`, or with more leading axes: a `Scaled`, a `qwix.QArray`, or an array of int8, float8, int4
        or float4, which becomes a `Scaled` with a scale of 1, and with that a constant to autodiff.
      contracting: the axis that products sum over, one of the last two. Weights `[g, n, k]` for transpose_rhs=True have
        contracting=-1.
      interleave: whether to interleave values along the contracted axis, which then has a multiple of 32 entries of 4
        bits, or of 16 of 8. None: where the default device, or `trencadis.target`, is a Hopper GPU, for what its kernel
        unpacks whatever the rows are: 4 bits, and 8 bits with scales of 8 bits (mxfp8), without zero points. Other
        weights stay in order. True: also int8 and float8 with float32 scales. Beside bfloat16 or float16 rows that is
        faster; beside rows of their own dtype, which are permuted to match, slower. False: for int4 with scales along
        k that many rows of 8 bits meet, which are multiplied in 8 bits if the weights are in order.

    Returns:
      A `Scaled`; w itself if it is one in this order.

    >>> w = prepare(jnp.ones((2, 64, 8), jnp.int8))
    >>> w, w.transposed, w.interleaved
    (Scaled(int8[2,64,8], scales float32[1,1,1] of blocks 2 x 64 x 8), True, False)
    """
    if interleave is not None and not isinstance(interleave, (bool, np.bool_)):
        raise TypeError(f"interleave: want True, False or None; got {interleave!r}")
    if is_qarray(w):
        w = from_qarray("w", w)
    if not isinstance(w, Scaled):
        w = _unit_scaled(w)
    if w.ndim < 2:
        raise ValueError(f"w: want weights of at least 2 dimensions, such as [g, k, n]; got shape {w.shape}")
    found = ordered(w, _other(contracting, w.ndim) if target_of(None).platform == "tpu" else contracting)
    wanted = _unpacked_on_hopper(found) if interleave is None else bool(interleave)
    return found.interleave(wanted)


def _other(axis: int, ndim: int) -> int:
    """The other one of the last two axes; what is neither of them is returned as it is, to be refused."""
    if axis in (-1, ndim - 1) and not isinstance(axis, bool):
        return -2
    return -1 if axis in (-2, ndim - 2) and not isinstance(axis, bool) else axis


def _unpacked_on_hopper(w: Scaled) -> bool:
    """Whether products run on a Hopper GPU, and its kernel unpacks these weights whatever the rows are."""
    card = card_for(target_of(None))
    if card is None or not card.hopper or w.zeros is not None:
        return False
    unpacked = bits(w.dtype) == 4 or bits(w.scale.dtype) == 8
    return unpacked and interleaves(w.dtype, w.stored.shape[-1])


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
