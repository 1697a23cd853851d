"""Gated activations: functions of two numbers, the gate and the value that it gates."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array


@dataclasses.dataclass(frozen=True, slots=True)
class SwiGLU:
    """`gate * sigmoid(alpha * gate) * (up + shift)`, with gate clipped above and up on both sides by limit."""

    limit: float | None = None
    alpha: float = 1.0
    shift: float = 0.0

    def __call__(self, gate: Array, up: Array) -> Array:
        if self.limit is not None:
            gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        value = up if self.shift == 0.0 else up + self.shift
        return gate * jax.nn.sigmoid(gate if self.alpha == 1.0 else self.alpha * gate) * value

    @property
    def __name__(self) -> str:
        return "swiglu"


def swiglu(limit: float | None = None, alpha: float = 1.0, shift: float = 0.0) -> SwiGLU:
    """The gated activation `gate * sigmoid(alpha * gate) * (up + shift)`, for `moe_mlp`.

    Args:
      limit: gate is at most limit, and up between -limit and limit; None: as they come.
      alpha: the steepness of the sigmoid.
      shift: what is added to up.

    gpt-oss has `swiglu(limit=7.0, alpha=1.702, shift=1.0)`.

    >>> swiglu()(jnp.float32(0.0), jnp.float32(3.0)), swiglu(limit=1.0)(jnp.float32(100.0), jnp.float32(100.0)).round(3)
    (Array(0., dtype=float32), Array(0.731, dtype=float32))
    """
    return SwiGLU(limit, alpha, shift)
