"""Preparation of operands: the padding, dtypes and bit patterns that the loops and kernels of backends need."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from trencadis.core.dtypes import bits
from trencadis.core.jax_compat import SLICES_WIDEN_NARROW_FLOATS
from trencadis.core.problem import Form, Problem
from trencadis.core.spans import clamped

# what plans say of the order in which weights are stored, and their advice
PREPARE = "trencadis.quant.prepare(w) stores them in that order once"
DEINTERLEAVED = "weights are interleaved, and are put in order along k before each product"
PREPARE_IN_ORDER = "trencadis.quant.prepare(w, interleave=False) stores them in order once"


def round_up(x: int, unit: int) -> int:
    """Round x up to a multiple of the unit.

    >>> round_up(130, 128)
    256
    """
    return -(-x // unit) * unit


def pad_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Pad the array with zeros at the end of each axis, up to this shape.

    >>> pad_to(jnp.ones(2), (3,)).tolist()
    [1.0, 1.0, 0.0]
    """
    return x if x.shape == shape else jnp.pad(x, [(0, want - have) for have, want in zip(x.shape, shape, strict=True)])


def int4_as_int8(problem: Problem, *, weights: bool = True) -> Problem:
    """The problem with int8 in place of int4 operands; without `weights`, rhs of the rows form stays as it is.

    XLA cannot slice arrays of less than 8 bits, and kernels read 4 bits only of weights that they unpack.
    """
    kept = problem.form is Form.ROWS and not weights
    lhs, rhs = (np.dtype(np.int8) if x == jnp.int4 else x for x in (problem.lhs, problem.rhs))
    return problem.replace(lhs=lhs, rhs=problem.rhs if kept else rhs)


def with_k_last(problem: Problem) -> Problem:
    """The problem with 4-bit weights stored `[g, n, k]`, as GPU kernels unpack them where scales change along k."""
    if problem.form is not Form.ROWS or bits(problem.rhs) != 4 or not problem.epilogue.along_k:
        return problem
    return problem.replace(transpose_rhs=True)


def in_order(asked: Problem, problem: Problem, rhs: jax.Array) -> jax.Array:
    """Weights as a problem has them stored, from how they were asked to be multiplied."""
    return rhs if asked.transpose_rhs == problem.transpose_rhs else rhs.mT


def flat_sizes(sizes: jax.Array, m: int) -> jax.Array:
    """Flatten group sizes [batch, groups] to an int32 vector; int32 sizes are not clamped, since kernels do that."""
    return (sizes if sizes.dtype == jnp.int32 else clamped(sizes, m)).reshape(-1)


def to_bits(x: jax.Array) -> jax.Array:
    """Bitcast a 16-bit float array to uint16 if XLA would otherwise convert all of it at each update in a loop."""
    if SLICES_WIDEN_NARROW_FLOATS and x.dtype.itemsize == 2 and jnp.issubdtype(x.dtype, jnp.floating):
        return lax.bitcast_convert_type(x, jnp.uint16)
    return x


def from_bits(x: jax.Array, dtype: Any) -> jax.Array:
    """Bitcast the result of `to_bits` back to the dtype of the array that it was given."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)
