"""Quantized arrays of qwix, recognized by their attributes: qwix itself is never imported."""

from __future__ import annotations

from typing import Any

from trencadis.quant.formats import FORMATS
from trencadis.quant.scaled import Scaled

ATTRIBUTES = ("qvalue", "scale", "zero_point", "qtype")


def is_qarray(x: Any) -> bool:
    """Whether x is a `qwix.QArray`, or has the attributes of one."""
    return all(hasattr(x, name) for name in ATTRIBUTES)


def from_qarray(name: str, x: Any) -> Scaled:
    """A `Scaled` with the values and scales of a `qwix.QArray`, not copied; errors start with the argument's name.

    A QArray tells the number of blocks along an axis, by the shape of its scales; a Scaled tells the length of a block.
    """
    if x.zero_point is not None:
        raise ValueError(f"{name}: want a QArray without a zero_point, as absmax calibrates it; got one with it")
    kind, shape, counts = x.qvalue.dtype.name, tuple(x.qvalue.shape), tuple(x.scale.shape)
    if kind not in FORMATS:
        known = ", ".join(each for each, format in FORMATS.items() if not format.block)
        raise TypeError(f"{name}: want a QArray with values of {known}; got {kind}, of qtype {x.qtype}")
    uneven = [size and (not count or size % count) for size, count in zip(shape, counts, strict=False)]
    if len(shape) != len(counts) or any(uneven):
        raise ValueError(f"{name}: want a number of scales along each axis that divides it, {shape}; got {counts}")
    block = tuple(size // count if size else 1 for size, count in zip(shape, counts, strict=True))
    try:
        return Scaled(x.qvalue, x.scale, kind, block)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}.{error}") from None
