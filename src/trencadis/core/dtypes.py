"""The dtypes that products are summed in, conversions between dtypes, and the size of a number."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


@runtime_checkable
class ShapeDtype(Protocol):
    """Anything with the shape and dtype of an array: an array, a `jax.ShapeDtypeStruct` or a quantized operand."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype: ...
    @property
    def ndim(self) -> int: ...


def cast(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """x converted to dtype; a complex x loses its imaginary part if dtype is real, as the gradient of a real x does."""
    if jnp.iscomplexobj(x) and not jnp.issubdtype(dtype, jnp.complexfloating):
        x = x.real
    return x.astype(dtype)


def width(dtype: DTypeLike) -> float:
    """The bytes of one number in a packed array, which may be a fraction of a byte.

    >>> width(jnp.bfloat16), width(jnp.int4)
    (2.0, 0.5)
    """
    return bits(dtype) / 8


def accumulator(lhs: DTypeLike, rhs: DTypeLike) -> np.dtype:
    """The dtype in which products of these two dtypes, or numbers of the two, are summed.

    It is float32 for floats of up to 32 bits and int32 for integers of up to 32 bits, and wider if an operand is.

    >>> accumulator(jnp.bfloat16, jnp.bfloat16), accumulator(jnp.int8, jnp.int8), accumulator(jnp.int8, jnp.float64)
    (dtype('float32'), dtype('int32'), dtype('float64'))
    """
    both = [jnp.dtype(lhs), jnp.dtype(rhs)]
    inexact = [d for d in both if jnp.issubdtype(d, jnp.inexact)]
    if not inexact:
        signed = any(jnp.issubdtype(d, jnp.signedinteger) for d in both)
        return np.dtype(f"{'int' if signed else 'uint'}{64 if max(d.itemsize for d in both) == 8 else 32}")
    # only a float64 makes the sum float64: int64 x float32 is float32, as in JAX's own promotion
    wide = any(jnp.finfo(d).bits == 64 for d in inexact)
    if any(jnp.issubdtype(d, jnp.complexfloating) for d in inexact):
        return np.dtype(np.complex128 if wide else np.complex64)
    return np.dtype(np.float64 if wide else np.float32)


def whole(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which values are multiplied: their own, or for 4-bit floats a byte, which holds them exactly."""
    return np.dtype(jnp.float8_e4m3fn) if dtype.name == "float4_e2m1fn" else dtype


def bits(dtype: DTypeLike) -> int:
    """The bits of one number of this dtype in a packed array.

    >>> bits(jnp.int4), bits(jnp.float8_e4m3fn), bits(jnp.bfloat16)
    (4, 8, 16)
    """
    dtype = jnp.dtype(dtype)
    packed = {"int4": 4, "uint4": 4, "float4_e2m1fn": 4, "int2": 2, "uint2": 2}
    return packed.get(dtype.name, 8 * dtype.itemsize)
