"""8-bit numbers as bfloat16 numbers by loops of XLA on GPUs, four of them at a time.

Such a loop takes as long for an array of bytes as for one of as many bfloat16 numbers: it is bound by their count. So
four neighbours are read as one word of 32 bits, and written as one of 64:

    float8    sign, exponent and mantissa are moved to those of a float32 number, whose exponent has another bias
    int8      bytes of a word, extended by their sign

Both are exact. Other platforms, and axes that are not whole words, have a plain conversion.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Num

from trencadis.core.mesh import repeated

WORD = 4  # bytes


class Bits(NamedTuple):
    """Where the bits of a float8 number are in a float32 number."""

    up: int  # by how many bits exponent and mantissa are moved up
    power: int  # by how much the bias of the exponent differs
    special: int  # exponent and mantissa of the first byte that is Inf or NaN


BITS = {"float8_e4m3fn": Bits(20, 120, 0x7F), "float8_e5m2": Bits(21, 112, 0x7C)}


def takes(x: Num[Array, ...]) -> bool:
    """Whether `upcast` takes an array: float8 or int8 numbers, whole words of them along the last axis.

    >>> takes(jnp.zeros((2, 8), jnp.float8_e4m3fn)), takes(jnp.zeros((2, 6), jnp.int8)), takes(jnp.zeros((2, 8)))
    (True, False, False)
    """
    return x.ndim > 0 and x.shape[-1] % WORD == 0 and (x.dtype.name in BITS or x.dtype == jnp.int8)


def upcast(x: Num[Array, "*lead k"], scales: Num[Array, "*lead k/length"] | None = None) -> Num[Array, "*lead k"]:
    """An array of 8-bit numbers as bfloat16 numbers, times float32 scales that equal parts of its last axis share.

    >>> upcast(jnp.array([1.5, -0.25, 448, 0], jnp.float8_e4m3fn)).tolist()
    [1.5, -0.25, 448.0, 0.0]
    """
    words = lax.bitcast_convert_type(x.reshape(*x.shape[:-1], x.shape[-1] // WORD, WORD), jnp.uint32)
    each = None if scales is None else repeated(scales, words.shape[-1] // scales.shape[-1], scales.ndim - 1)
    numbers = [_number(words, i, x.dtype.name) for i in range(WORD)]
    scaled = [number if each is None else number * each for number in numbers]
    halves = [lax.bitcast_convert_type(each.astype(jnp.bfloat16), jnp.uint16).astype(jnp.uint32) for each in scaled]
    low, high = halves[0] | halves[1] << 16, halves[2] | halves[3] << 16
    with jax.enable_x64(True):
        both = low.astype(jnp.uint64) | high.astype(jnp.uint64) << np.uint64(32)
        return lax.bitcast_convert_type(both, jnp.bfloat16).reshape(x.shape)


def _number(words: Array, i: int, kind: str) -> Array:
    """Byte i of all words as a float32 number."""
    if kind == "int8":
        return (lax.bitcast_convert_type(words << (24 - 8 * i), jnp.int32) >> 24).astype(jnp.float32)
    up, power, special = BITS[kind]
    byte = words >> 8 * i if i else words
    found, least = (byte & 0x7F) << up, np.uint32(power + 1 << 23)
    normal = found + np.uint32(power << 23)
    # a subnormal number has no implicit bit: the difference of two that have
    subnormal = lax.bitcast_convert_type(found | least, jnp.float32) - lax.bitcast_convert_type(least, jnp.float32)
    bits = jnp.where(found < np.uint32(1 << 23), lax.bitcast_convert_type(subnormal, jnp.uint32), normal)
    bits = jnp.where((byte & 0x7F) >= special, found | np.uint32(0x7F800000), bits)
    return lax.bitcast_convert_type(bits | (byte & 0x80) << 24, jnp.float32)
