"""Preparing operands: the shapes, dtypes and bit patterns that the loops and kernels of backends take."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from trencadis.core.jax_compat import SLICES_WIDEN_NARROW_FLOATS
from trencadis.core.problem import Problem
from trencadis.core.spans import clamped


def up(x: int, unit: int) -> int:
    """The least multiple of the unit that is not below x.

    >>> up(130, 128)
    256
    """
    return -(-x // unit) * unit


def filled(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The array padded with zeros at the end of each axis, up to a shape.

    >>> filled(jnp.ones(2), (3,)).tolist()
    [1.0, 1.0, 0.0]
    """
    return x if x.shape == shape else jnp.pad(x, [(0, want - have) for have, want in zip(x.shape, shape, strict=True)])


def in_bytes(problem: Problem) -> Problem:
    """The problem with int8 for int4 operands: XLA slices no array of less than 8 bits."""
    lhs, rhs = (np.dtype(np.int8) if x == jnp.int4 else x for x in (problem.lhs, problem.rhs))
    return problem.replace(lhs=lhs, rhs=rhs)


def flat_sizes(sizes: jax.Array, m: int) -> jax.Array:
    """Group sizes [batch, groups] as one int32 vector; int32 sizes stay as they are, since kernels clamp them."""
    return (sizes if sizes.dtype == jnp.int32 else clamped(sizes, m)).reshape(-1)


def to_bits(x: jax.Array) -> jax.Array:
    """A 16-bit float array as integers, where XLA would otherwise convert all of it at each update in a loop."""
    if SLICES_WIDEN_NARROW_FLOATS and x.dtype.itemsize == 2 and jnp.issubdtype(x.dtype, jnp.floating):
        return lax.bitcast_convert_type(x, jnp.uint16)
    return x


def from_bits(x: jax.Array, dtype: Any) -> jax.Array:
    """The array that `to_bits` was given, from its integers."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)
