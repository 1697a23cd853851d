"""Formats of quantized numbers: what a number is stored as, what its scale is, and how many share one."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One format."""

    name: str
    values: np.dtype[Any]
    largest: float  # of the values that are used
    scales: np.dtype[Any] = np.dtype(np.float32)
    block: int = 0  # entries that share a scale, along one axis; 0: as many as the caller likes
    total: bool = False  # scales have a scale of their own, one for the whole array

    def scale_of(self, largest: Array) -> Array:
        """The scales, float32, of blocks with these largest magnitudes.

        A block of zeros has the scale 1. One that holds NaN or Inf has NaN, and so have its numbers.
        """
        exact = largest.astype(jnp.float32) / np.float32(self.largest)
        if self.scales == jnp.float8_e8m0fnu:  # the next power of two, so that nothing is cut off
            fraction, exponent = jnp.frexp(exact)
            exponent = jnp.clip(exponent - (fraction == 0.5), -127, 127)
            exact = jnp.where(exact > 0, jnp.ldexp(np.float32(1), exponent), exact)
        elif self.scales != jnp.float32:
            most = float(jnp.finfo(self.scales).max)
            exact = jnp.minimum(exact, most).astype(self.scales).astype(jnp.float32)
        return jnp.where(jnp.isfinite(largest), jnp.where(exact > 0, exact, 1), jnp.nan)

    def rounded(self, x: Array) -> Array:
        """Numbers that are divided by their scales already, as they are stored."""
        x = jnp.clip(x, -self.largest, self.largest)
        if jnp.issubdtype(self.values, jnp.integer):
            x = jnp.where(jnp.isnan(x), 0, jnp.round(x))  # their scale is NaN
        return x.astype(self.values)


def _format(name: str, values: Any, largest: float, **fields: Any) -> Format:
    return Format(name=name, values=np.dtype(values), largest=largest, **fields)


_E8M0, _E4M3 = np.dtype(jnp.float8_e8m0fnu), np.dtype(jnp.float8_e4m3fn)

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


def format_of(name: Any) -> Format:
    """The format of that name, or an error that lists them.

    >>> format_of("mxfp8").block
    32
    """
    if isinstance(name, Format):
        return name
    if not isinstance(name, str) or name not in FORMATS:
        raise ValueError(f"format: want one of {', '.join(FORMATS)}; got {name!r}")
    return FORMATS[name]
