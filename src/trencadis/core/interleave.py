"""The interleaved order of low-precision weights: words of 32 bits that hold what a lane of wgmma multiplies.

Four lanes of a warp hold a row of a register operand, two neighbours along k in each lane, the next two in the next
lane. In interleaved weights, the word of lane l holds exactly its pairs, 8 p + 2 l and 8 p + 2 l + 1 of each run of k:

    8 bits, runs of 16    bytes      k0 k8 k1 k9 | k2 k10 k3 k11 | ...
    int4, runs of 32      nibbles    k0 k8 k16 k24 k1 k9 k17 k25 | k2 k10 k18 k26 k3 k11 k19 k27 | ...

The two of a pair lie at the same place of both halves of the word, so that one instruction can move both.

A word of float4_e2m1fn holds the same pairs as bits: `FLOAT4_MOVES` says how each becomes a pair of bfloat16. Shape and
dtype of the array stay. Whole runs are needed: see `interleaves`.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from trencadis.core.dtypes import bits

Array = jax.Array
Move = tuple[int, int]  # bits to rotate a word to the left by, and those to keep then, of either half

LANES = 4  # that hold a row of operand A
WORD = 32  # bits
FLOAT4 = "float4_e2m1fn"

# Pair p of a word is the union of its moves: signs at bit 15 of each half, exponent and mantissa at bits 8 to 6. No
# four rotations put all bits to their places, so that one pair takes two. These leave the fewest shifts to the right
# and logical operations, which limit a kernel; a shift to the left can be a multiplication.
FLOAT4_MOVES: tuple[tuple[Move, ...], ...] = (
    ((0, 0x81C0),),
    ((4, 0x81C0),),
    ((26, 0x81C0),),
    ((30, 0x8180), (6, 0x0040)),
)


def run_length(dtype: Any) -> int:
    """The entries of k that four words hold, within which weights are interleaved: 32 of 4 bits, 16 of 8."""
    return LANES * WORD // bits(dtype)


def interleaves(dtype: Any, k: int) -> bool:
    """Whether k values of a dtype can be interleaved: they are of 8 or 4 bits, and whole runs.

    >>> interleaves(jnp.int8, 48), interleaves(jnp.int4, 48), interleaves(jnp.bfloat16, 64)
    (True, False, False)
    """
    return bits(dtype) in (4, 8) and k % run_length(dtype) == 0


@functools.partial(jax.jit, static_argnums=1)
def interleave_columns(x: Array, weights: Any) -> Array:
    """An array of any dtype with its last axis in the order of interleaved weights of a dtype.

    >>> interleave_columns(jnp.arange(16), jnp.int8).tolist()
    [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15]
    """
    return _transposed(x, (run_length(weights) // (2 * LANES), LANES, 2), (1, 2, 0))


@functools.partial(jax.jit, static_argnums=1)
def deinterleave_columns(x: Array, weights: Any) -> Array:
    """Columns that `interleave_columns` has reordered, in their first order again."""
    return _transposed(x, (LANES, 2, run_length(weights) // (2 * LANES)), (2, 0, 1))


@jax.jit
def interleave(x: Array) -> Array:
    """Weights with their last axis, which is k, in the interleaved order.

    >>> interleave(jnp.arange(16, dtype=jnp.int8)).tolist()
    [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15]
    """
    if x.dtype.name != FLOAT4:
        return interleave_columns(x, x.dtype)
    nibbles = _parts(_nibbles(x), (len(FLOAT4_MOVES), LANES, 2))
    each = (nibbles & 8) << 12 | (nibbles & 7) << 6  # sign, exponent and mantissa in a bfloat16 number
    both = each[..., 0] | each[..., 1] << 16
    words = functools.reduce(
        operator.or_,
        (_rotated(both[..., p, :] & _twice(keep), -by) for p, moves in enumerate(FLOAT4_MOVES) for by, keep in moves),
    )
    return _float4(words[..., None] >> (4 * jnp.arange(8, dtype=jnp.uint32)) & 15, x.shape)


@jax.jit
def deinterleave(x: Array) -> Array:
    """The inverse of `interleave`: weights along k in the usual order.

    >>> deinterleave(interleave(jnp.arange(16, dtype=jnp.int8))).tolist() == list(range(16))
    True
    """
    if x.dtype.name != FLOAT4:
        return deinterleave_columns(x, x.dtype)
    nibbles = _parts(_nibbles(x), (LANES, WORD // 4))
    words = functools.reduce(operator.or_, (nibbles[..., i] << (4 * i) for i in range(WORD // 4)))
    both = jnp.stack([
        functools.reduce(operator.or_, (_rotated(words, by) & _twice(keep) for by, keep in moves))
        for moves in FLOAT4_MOVES
    ], axis=-2)  # fmt: skip
    each = both[..., None] >> (16 * jnp.arange(2, dtype=jnp.uint32))
    return _float4(each >> 12 & 8 | each >> 6 & 7, x.shape)


def _transposed(x: Array, sizes: tuple[int, int, int], order: tuple[int, int, int]) -> Array:
    """The last axis, in runs of three axes of these sizes, with these in another order."""
    parts = _parts(x, sizes)
    lead = parts.ndim - len(sizes)
    return parts.transpose(*range(lead), *(lead + axis for axis in order)).reshape(x.shape)


def _parts(x: Array, sizes: tuple[int, ...]) -> Array:
    """The last axis as runs of these sizes; their number is given, since an array may have no entries."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // math.prod(sizes), *sizes)


# Bits of 4-bit floats, there and back. XLA for CPUs cannot fuse their bitcast with a slice, as of the layers in a scan;
# it goes by float32 numbers, whose exponent and first bit of the mantissa are those of 0.5, or of 1.0 on.


def _nibbles(x: Array) -> Array:
    """The bits of 4-bit floats, as integers."""
    return lax.platform_dependent(x, cpu=_to_nibbles_by_value, default=_to_nibbles)


def _float4(nibbles: Array, shape: tuple[int, ...]) -> Array:
    """The 4-bit floats that have these bits."""
    return lax.platform_dependent(nibbles.reshape(shape), cpu=_from_nibbles_by_value, default=_from_nibbles)


def _to_nibbles(x: Array) -> Array:
    both = lax.bitcast_convert_type(_parts(x, (2,)), jnp.uint8).astype(jnp.uint32)
    return jnp.stack([both & 15, both >> 4], axis=-1).reshape(x.shape)


def _from_nibbles(nibbles: Array) -> Array:
    pairs = _parts(nibbles, (2,))
    both = (pairs[..., 0] | pairs[..., 1] << 4).astype(jnp.uint8)
    return lax.bitcast_convert_type(both, jnp.float4_e2m1fn).reshape(nibbles.shape)


def _to_nibbles_by_value(x: Array) -> Array:
    wide = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    from_one = (wide << 1 >> 23).astype(jnp.int32) - 252
    least = (wide << 1 != 0).astype(jnp.int32)
    return wide >> 31 << 3 | jnp.maximum(from_one, least).astype(jnp.uint32)


def _from_nibbles_by_value(nibbles: Array) -> Array:
    magnitude = nibbles & 7
    wide = jnp.where(magnitude > 1, magnitude + 252 << 22, magnitude * np.uint32(0x3F000000)) | nibbles >> 3 << 31
    return lax.bitcast_convert_type(wide, jnp.float32).astype(jnp.float4_e2m1fn)


def _rotated(words: Array, by: int) -> Array:
    """Words with their bits rotated to the left."""
    return words << (by % WORD) | words >> (-by % WORD) if by % WORD else words


def _twice(half: int) -> np.uint32:
    """The bits of a half word, for both halves."""
    return np.uint32(half << 16 | half)
