"""How backends bring operands into the shape, and into the bits, that their loops and kernels take."""

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
    """The next multiple of the unit.

    >>> up(130, 128)
    256
    """
    return -(-x // unit) * unit


def filled(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The array with zeros after its own entries, up to a shape.

    >>> filled(jnp.ones(2), (3,)).tolist()
    [1.0, 1.0, 0.0]
    """
    return x if x.shape == shape else jnp.pad(x, [(0, want - have) for have, want in zip(x.shape, shape, strict=True)])


def whole(problem: Problem, lhs: jax.Array, rhs: jax.Array) -> tuple[Problem, jax.Array, jax.Array]:
    """A problem whose operands have at least 8 bits, and these: XLA cuts nothing smaller out of an array."""
    lhs, rhs = (x.astype(jnp.int8) if x.dtype == jnp.int4 else x for x in (lhs, rhs))
    return problem.replace(lhs=np.dtype(lhs.dtype), rhs=np.dtype(rhs.dtype)), lhs, rhs


def flat_sizes(sizes: jax.Array, m: int) -> jax.Array:
    """Group sizes [batch, groups] in a row, as int32: int32 ones as they are, since a kernel clamps them by itself."""
    return (sizes if sizes.dtype == jnp.int32 else clamped(sizes, m)).reshape(-1)


def to_bits(x: jax.Array) -> jax.Array:
    """A narrow float array as integers of its width, where a loop would otherwise widen all of it at each update."""
    if SLICES_WIDEN_NARROW_FLOATS and x.dtype.itemsize == 2 and jnp.issubdtype(x.dtype, jnp.floating):
        return lax.bitcast_convert_type(x, jnp.uint16)
    return x


def from_bits(x: jax.Array, dtype: Any) -> jax.Array:
    """What `to_bits` was given."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)
