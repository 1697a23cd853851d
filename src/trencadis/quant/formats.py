"""Low-precision formats: the dtype of the values, the dtype of their scales, and the block that shares a scale.

Scales are never subnormal as float32, because XLA flushes subnormal numbers to zero on CPU and TPU. They are never so
large that a dequantized value overflows float32.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

Array = jax.Array

_E8M0, _E4M3 = np.dtype(jnp.float8_e8m0fnu), np.dtype(jnp.float8_e4m3fn)
_TINY = np.finfo(np.float32).tiny  # the smallest normal float32
_HUGE = float(np.finfo(np.float32).max) * (1 - 2.0**-22)  # stays finite when a product with it is rounded twice


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Format:
    """A low-precision format. `FORMATS` holds all of them by name.

    Attributes:
      name: the name of the format.
      values: the dtype of the values.
      largest: the largest magnitude of the values.
      scales: the dtype of the scales.
      block: the number of entries along one axis that share a scale; 0 if the caller chooses it.
      total: whether the scales are themselves multiplied by one float32 scale of the whole array.

    >>> FORMATS["mxfp8"]
    Format(mxfp8: float8_e4m3fn up to 448, float8_e8m0fnu scales for blocks of 32)
    """

    name: str
    values: np.dtype[Any]
    largest: float
    scales: np.dtype[Any] = np.dtype(np.float32)
    block: int = 0
    total: bool = False

    @property
    def reach(self) -> float:
        """The largest float32 magnitude that can be rounded to this format without overflow of what it stands for.

        Powers of two as scales make 2**128 the next number after this one, and float32 has no 2**128.
        """
        if self.scales != _E8M0:
            return float(np.finfo(np.float32).max)
        return (2 - 2.0 ** -jnp.finfo(self.values).nmant) * 2.0**127

    def scale_of(self, absmax: Array, total: Array | None = None) -> Array:
        """The float32 scales of blocks with these largest magnitudes, divided by `total` if there is one.

        A block of zeros has the scale 1. A block with NaN or Inf has the scale NaN, which makes all its numbers NaN.
        """
        absmax = absmax.astype(jnp.float32)
        largest, most = np.float32(self.largest), np.float32(_HUGE / self.largest)
        if self.scales == _E8M0:  # the next power of two, so that no value saturates
            scale = _next_power_of_two(jnp.minimum(absmax, np.float32(self.reach)), self.largest)
        elif self.scales == np.float32:
            scale = jnp.clip(absmax / largest, _TINY, most)
        else:
            info = jnp.finfo(self.scales)
            one = jnp.ones((), jnp.float32) if total is None else total
            # the product with total must be a normal float32
            least = _next_power_of_two(jnp.maximum(_TINY / one, np.float32(info.smallest_subnormal)))
            scale = jnp.clip(absmax / one / largest, least, np.float32(info.max))
            scale = scale.astype(self.scales).astype(jnp.float32)
        return jnp.where(jnp.isfinite(absmax), jnp.where(absmax > 0, scale, 1), jnp.nan)

    def total_of(self, absmax: Array) -> Array:
        """The float32 scale of all scales, for arrays with these largest magnitudes; 1 for an array of zeros."""
        most = self.largest * float(jnp.finfo(self.scales).max)
        total = jnp.clip(absmax / np.float32(most), _TINY, np.float32(_HUGE / most))
        return jnp.where(absmax > 0, total, 1)

    def rounded(self, x: Array) -> Array:
        """Numbers that are already divided by their scales, rounded to the nearest values of the format."""
        x = jnp.clip(x, -self.largest, self.largest)
        if jnp.issubdtype(self.values, jnp.integer):
            x = jnp.where(jnp.isnan(x), 0, jnp.round(x))  # the scale of such a block is NaN
        return x.astype(self.values)

    def __repr__(self) -> str:
        blocks = f" for blocks of {self.block}" if self.block else ""
        total = ", and a scale of the scales" if self.total else ""
        return f"Format({self.name}: {self.values} up to {self.largest:g}, {self.scales} scales{blocks}{total})"


FormatLike = str | DTypeLike | Format


def _format(name: str, values: Any, largest: float, **fields: Any) -> Format:
    return Format(name=name, values=np.dtype(values), largest=largest, **fields)


FORMATS = {
    each.name: each
    for each in (
        _format("int8", jnp.int8, 127),
        _format("int4", jnp.int4, 7),
        _format("float8_e4m3fn", jnp.float8_e4m3fn, 448),
        _format("float8_e5m2", jnp.float8_e5m2, 57344),
        _format("float4_e2m1fn", jnp.float4_e2m1fn, 6),
        _format("mxfp8", jnp.float8_e4m3fn, 448, scales=_E8M0, block=32),
        _format("mxfp4", jnp.float4_e2m1fn, 6, scales=_E8M0, block=32),
        _format("nvfp4", jnp.float4_e2m1fn, 6, scales=_E4M3, block=16, total=True),
    )
}


# the other MXFP8 of the OCP specification, which TransformerEngine has for gradients
VARIANTS = {"mxfp8_e5m2": _format("mxfp8_e5m2", jnp.float8_e5m2, 57344, scales=_E8M0, block=32)}


def format_of(format: FormatLike) -> Format:
    """The format with this name, or the one with values of this dtype and scales in float32.

    >>> format_of("mxfp8").block
    32
    >>> format_of(jnp.int8)
    Format(int8: int8 up to 127, float32 scales)
    """
    found = {**FORMATS, **VARIANTS}.get(format_name(format))
    if found is None or (isinstance(format, Format) and format != found):
        raise ValueError(f"format: want one of {', '.join(FORMATS)}, or a dtype of that name; got {format!r}")
    return found


def format_name(format: Any) -> str:
    """The name of a format or of a dtype; empty if it is neither."""
    if isinstance(format, Format):
        return format.name
    if format is None or isinstance(format, str):
        return format or ""
    try:
        return jnp.dtype(format).name
    except (TypeError, ValueError):
        return ""


def _next_power_of_two(x: Array, unit: float = 1.0) -> Array:
    """The smallest power of two p, a normal float32, for which p * unit >= x; exact, by arithmetic on the bits."""
    bits = np.float32(unit).view(np.int32)
    fraction, exponent = bits & 0x7FFFFF, (bits >> 23) - 127
    found = lax.bitcast_convert_type(x, jnp.int32) + np.int32(0x7FFFFF - fraction)
    found = (found & np.int32(0x7F800000)) - np.int32(exponent << 23)
    return lax.bitcast_convert_type(jnp.maximum(found, np.int32(1 << 23)), jnp.float32)
