"""The layer and its gradients in float64, by a loop over experts on the device; it shares nothing with the package.

Each expert has room for twice the mean number of tokens. Of large results samples are compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import oracle
from benchmarks.measure import ROOM
from benchmarks.moe.layers import Joined, Params
from benchmarks.moe.shapes import FORWARD, MoeShape
from benchmarks.peers import DTYPES

ROUNDINGS = 6  # on the way to a gradient: logits, pre-activations, activations, two cotangents and the result

Values = dict[str, Any]  # samples of the result, "out", and of the gradient in each field of `Params`


class Sample(NamedTuple):
    """The tokens, and the indices along d and f, at which results are compared."""

    tokens: np.ndarray
    d: np.ndarray
    f: np.ndarray

    @classmethod
    def of(cls, shape: MoeShape) -> Sample:
        """Everything of a small layer, and a part of each axis of a large one."""
        large = shape.e * shape.d * shape.f >= oracle.LARGE or shape.t * shape.d >= oracle.LARGE
        return cls(*(oracle.sample(count, large) for count in (shape.t, shape.d, shape.f)))

    def cut(self, name: str, x: Any) -> Any:
        """The sampled part of a result or gradient."""
        if name in ("out", "x"):
            return x[self.tokens]
        if name == "router":
            return x[self.d]
        if name in ("bias_gate", "bias_up", "bias_down"):
            return x[:, self.d if name == "bias_down" else self.f]
        first, second = (self.f, self.d) if name == "down" else (self.d, self.f)
        return x[:, first][:, :, second]


def samples(shape: MoeShape, results: Any) -> tuple[Values, jax.Array]:
    """The sampled parts of what a call of a layer returns, and whether all of it is finite; to be jitted."""
    out, _, *gradients = results
    found = {"out": out}
    for each in gradients:
        found |= {name: x for name, x in _separate(each)._asdict().items() if x is not None}
    finite = jnp.stack([jnp.isfinite(x).all() for x in found.values()]).all()
    sample = Sample.of(shape)
    return {name: sample.cut(name, x) for name, x in found.items()}, finite


def _separate(gradients: Params | Joined) -> Params:
    if isinstance(gradients, Params):
        return gradients
    gate, up = jnp.split(gradients.gate_up, 2, axis=-1)
    bias = gradients.bias_gate_up
    bias_gate, bias_up = (None, None) if bias is None else jnp.split(bias, 2, axis=-1)
    given = (gradients.x, gradients.router, gate, up, gradients.down)
    return Params(*given, bias_gate, bias_up, gradients.bias_down)


def values(shape: MoeShape, params: Params, ct: Any, experts: Any) -> Values:
    """The sampled parts of the right results, with the experts that a layer chose; to be jitted with 64 bits."""
    plain = Params(*(x.dequantize() if hasattr(x, "dequantize") else x for x in params))
    x, router, ct = (_wide(each) for each in (plain.x, plain.router, ct))
    sample = Sample.of(shape)
    logits = x @ router
    weights, pullback = jax.vjp(lambda logits: _weights(logits, experts), logits)

    def add(carry: Any, expert: Any) -> Any:
        out, d_x = carry
        own, weight = expert
        tokens = jnp.flatnonzero(weight, size=room(shape), fill_value=shape.t)  # past the last: 0, and not written
        mine, ct_mine, weight = (each.at[tokens].get(mode="fill", fill_value=0) for each in (x, ct, weight[:, None]))
        y, d_x_mine, gradients = _expert(shape, mine, ct_mine, own, weight)
        kept = {name: sample.cut(name, each[None])[0] for name, each in gradients.items()}
        d_weight = jnp.zeros(shape.t, x.dtype).at[tokens].set(jnp.sum(ct_mine * y, axis=1), mode="drop")
        out, d_x = out.at[tokens].add(weight * y, mode="drop"), d_x.at[tokens].add(d_x_mine, mode="drop")
        return (out, d_x), (kept, d_weight)

    own = {name: each for name, each in plain._asdict().items() if name not in ("x", "router") and each is not None}
    start = (jnp.zeros_like(x), jnp.zeros_like(x))
    (out, d_x), (found, d_weights) = jax.lax.scan(add, start, (own, weights.T))
    (d_logits,) = pullback(d_weights.T)
    whole = {"out": out, "x": d_x + d_logits @ router.T, "router": x.T @ d_logits}
    return {**found, **{name: sample.cut(name, each) for name, each in whole.items()}}


def room(shape: MoeShape) -> int:
    """The number of tokens that an expert is computed for: some more than twice the mean, at most all."""
    return min(shape.t, 2 * shape.m // shape.e + 16)


def _wide(x: Any) -> jax.Array:
    return jnp.asarray(x, jnp.float64)


def _weights(logits: jax.Array, experts: jax.Array) -> jax.Array:
    """The weights [t, e] of the experts of each token: a softmax over those, and 0 for the others."""
    chosen = (experts[:, :, None] == jnp.arange(logits.shape[1])).any(axis=1)
    score = jnp.where(chosen, jnp.exp(logits - logits.max(axis=1, keepdims=True)), 0)
    return score / score.sum(axis=1, keepdims=True)


def _expert(
    shape: MoeShape, x: jax.Array, ct: jax.Array, own: Mapping[str, Any], weight: jax.Array
) -> tuple[jax.Array, jax.Array, Values]:
    """One expert on its tokens: its output, and the gradients in x and in its parameters."""
    gate, up, down = (_wide(own[name]) for name in ("gate", "up", "down"))
    bias = {name: _wide(own[f"bias_{name}"]) if shape.biases else 0.0 for name in ("gate", "up", "down")}
    h, pullback = jax.vjp(lambda *z: _swiglu(shape, *z), x @ gate + bias["gate"], x @ up + bias["up"])
    d_y = weight * ct
    d_gate, d_up = pullback(d_y @ down.T)
    found = {"gate": x.T @ d_gate, "up": x.T @ d_up, "down": h.T @ d_y}
    if shape.biases:
        found |= {"bias_gate": d_gate.sum(0), "bias_up": d_up.sum(0), "bias_down": d_y.sum(0)}
    return h @ down + bias["down"], d_gate @ gate.T + d_up @ up.T, found


def _swiglu(shape: MoeShape, gate: jax.Array, up: jax.Array) -> jax.Array:
    limit, alpha, shift = shape.swiglu
    if limit is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate / (1 + jnp.exp(-alpha * gate)) * (up + shift)


def limit(shape: MoeShape, which: str) -> float:
    """The largest error with which a layer is timed; the squares of independent roundings add up."""
    depth = max(shape.d, shape.f) if which == FORWARD else max(shape.d, 2 * shape.f, shape.t)
    return ROOM * math.sqrt(ROUNDINGS) * oracle.limit(DTYPES[shape.dtype], depth=depth)


def error(found: Values, right: Values) -> float:
    """The largest of the relative errors of the result and of each gradient that is there."""
    return max(
        oracle.relative(np.asarray(x, np.float64), np.asarray(right[name], np.float64)) for name, x in found.items()
    )
