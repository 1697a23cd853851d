"""Gated activations: functions of two numbers, the gate and the value that it gates."""

from __future__ import annotations

import dataclasses
import functools
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

Number: TypeAlias = float | Array


@dataclasses.dataclass(frozen=True, slots=True)
class SwiGLU:
    """`gate * sigmoid(alpha * gate) * (up + shift)`, with gate clipped above and up on both sides by limit."""

    limit: Number | None = None
    alpha: Number = 1.0
    shift: Number = 0.0

    def __call__(self, gate: Array, up: Array) -> Array:
        if self.limit is not None:
            gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        known = isinstance(self.alpha, int | float | np.number)
        swish = _swish(self.alpha, gate) if known else gate * jax.nn.sigmoid(self.alpha * gate)
        return swish * (up if isinstance(self.shift, int | float) and self.shift == 0.0 else up + self.shift)

    @property
    def __name__(self) -> str:
        return "swiglu"


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _swish(alpha: float, x: Array) -> Array:
    """`x * sigmoid(alpha * x)`, whose derivative has fewer operations than that of its product."""
    return x * _sigmoid(alpha, x)


@_swish.defjvp
def _(alpha: float, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (d_x,) = primals, tangents
    sigmoid = _sigmoid(alpha, x)
    swish = x * sigmoid
    return swish, d_x * (sigmoid + (swish if alpha == 1.0 else alpha * swish) * (1 - sigmoid))


def _sigmoid(alpha: float, x: Array) -> Array:
    return jax.nn.sigmoid(x if alpha == 1.0 else alpha * x)


def swiglu(limit: Number | None = None, alpha: Number = 1.0, shift: Number = 0.0) -> SwiGLU:
    """The gated activation `gate * sigmoid(alpha * gate) * (up + shift)`, for `moe_mlp`.

    Args:
      limit: gate is at most limit, and up between -limit and limit; None: as they come.
      alpha: the steepness of the sigmoid.
      shift: what is added to up.

    They may be traced numbers, such as parameters with gradients; then the activation is not part of kernels.

    gpt-oss has `swiglu(limit=7.0, alpha=1.702, shift=1.0)`.

    >>> swiglu()(jnp.float32(0.0), jnp.float32(3.0)), swiglu(limit=1.0)(jnp.float32(100.0), jnp.float32(100.0)).round(3)
    (Array(0., dtype=float32), Array(0.731, dtype=float32))
    """
    return SwiGLU(limit, alpha, shift)
