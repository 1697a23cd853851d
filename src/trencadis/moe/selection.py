"""The choice of experts by score and the weights of the chosen ones, with kernels on GPUs and a gradient of its own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from trencadis.backends.triton import moe as kernels
from trencadis.core import operation
from trencadis.core.linear import linear

Score: TypeAlias = Literal["softmax", "softmax_topk", "sigmoid", "sqrtsoftplus"] | Callable[[Array], Array]

SCORES: dict[str, Callable[[Array], Array]] = {
    "softmax": lambda logits: jax.nn.softmax(logits, axis=-1),
    "softmax_topk": lambda logits: jax.nn.softmax(logits, axis=-1),
    "sigmoid": jax.nn.sigmoid,
    "sqrtsoftplus": lambda logits: _sqrt(jax.nn.softplus(logits)),
}


def _sqrt(x: Array) -> Array:
    """The square root, with the derivative 0 at 0, which is that of the whole score where softplus underflows."""
    return jnp.where(x == 0, 0, jnp.sqrt(jnp.where(x == 0, 1, x)))


@dataclasses.dataclass(frozen=True)
class Rule:
    """How logits [t, e] become scores, and the scores of chosen experts weights."""

    score: Score
    normalize: bool

    def scores(self, logits: Array) -> Array:
        """The scores of all experts, in float32."""
        function = SCORES[self.score] if isinstance(self.score, str) else self.score
        scores = function(logits.astype(jnp.float32))
        if jnp.shape(scores) != logits.shape:
            raise ValueError(
                f"score: want a function whose result has the shape {logits.shape}; got {jnp.shape(scores)}"
            )
        return scores.astype(jnp.float32)

    def keys(self, logits: Array) -> Array:
        """What experts are chosen by, if nothing is added to it."""
        return logits.astype(jnp.float32) if self.score == "softmax_topk" else self.scores(logits)

    def weights(self, experts: Array, logits: Array) -> tuple[Array, Array]:
        """The weights [t, k] of given experts, and the scores of all experts, which sum to 1."""
        scores = self.scores(logits)
        # a comparison with every id instead of a gather, whose gradient would be a scatter
        hot = one_hot(experts, logits.shape[1])
        return self._chosen(logits, scores, hot), _normalized(scores)

    def _chosen(self, logits: Array, scores: Array, hot: Array) -> Array:
        if self.score == "softmax_topk":  # normalized exponentials of the chosen logits, shifted by their maximum
            there = hot.any(axis=-1)
            chosen = jnp.where(there, picked(hot, logits.astype(jnp.float32)), -jnp.inf)
            top = lax.stop_gradient(jnp.max(chosen, axis=-1, keepdims=True))
            weights = jnp.exp(chosen - jnp.where(jnp.isfinite(top), top, 0))
        else:
            weights = picked(hot, scores)
            if not self.normalize:
                return weights
        return _normalized(weights)


def _normalized(x: Array) -> Array:
    """Entries over their sum; 0 where all of them are 0, or subnormal, which some devices count as 0.

    They are divided by the largest first, so that the square of the sum in the derivative does not underflow.
    """
    top = lax.stop_gradient(jnp.max(jnp.abs(x), axis=-1, keepdims=True))
    none = top < jnp.finfo(x.dtype).tiny
    x = x / jnp.where(none, 1, top)
    total = jnp.sum(x, axis=-1, keepdims=True)
    none = none | (total == 0)
    return jnp.where(none, 0, x / jnp.where(none, 1, total))


def one_hot(ids: Array, size: int) -> Array:
    """Whether each of the ids [t, k] is each of `size`: [t, k, size]."""
    return ids[:, :, None] == jnp.arange(size, dtype=jnp.int32)[None, None]


def picked(hot: Array, x: Array) -> Array:
    """The entries [t, k] of x [t, e] where hot [t, k, e] is set, and 0 where it is not set at all."""
    return jnp.sum(jnp.where(hot, x[:, None, :], 0), axis=-1)


@dataclasses.dataclass(frozen=True)
class ChooseExperts(operation.Operation):
    """The k experts of each token, their weights, and all scores: of logits, and of keys unless they are the rule's."""

    rule: Rule
    k: int

    def composed(self, logits: Array, *keys: Array) -> list[Array]:
        """The results by XLA's top_k."""
        experts = lax.top_k(keys[0] if keys else self.rule.keys(logits), self.k)[1]
        return [experts, *self.rule.weights(experts, logits)]

    def on_gpu(self, arch: str, logits: Array, *keys: Array) -> Sequence[Array] | None:
        """The results by one kernel."""
        assert isinstance(self.rule.score, str)
        given = keys[0] if keys else None
        return kernels.route(logits, given, self.k, self.rule.score, self.rule.normalize, arch)


@dataclasses.dataclass(frozen=True)
class PullBackWeights(operation.Operation):
    """The gradient of the logits: of logits, experts, and the gradients of their weights and of all scores."""

    rule: Rule

    def composed(self, logits: Array, experts: Array, d_weights: Array, d_probs: Array) -> list[Array]:
        """The result by JAX's own derivative."""
        return list(jax.vjp(functools.partial(self.rule.weights, experts), logits)[1]((d_weights, d_probs)))

    def on_gpu(self, arch: str, logits: Array, experts: Array, d_weights: Array, d_probs: Array) -> list[Array] | None:
        """The result by one kernel."""
        assert isinstance(self.rule.score, str)
        found = kernels.route_backward(logits, experts, d_weights, d_probs, self.rule.score, self.rule.normalize, arch)
        return None if found is None else [found]


def choose(rule: Rule, k: int, logits: Array, keys: Array | None) -> tuple[Array, Array, Array]:
    """The k experts of each token with the best keys, by default the rule's, their weights, and all scores.

    The rule's score is one with a name: a function may close over values that have gradients of their own. Weights and
    scores are differentiable in logits; the backward pass keeps the logits and the experts.
    """
    given = lax.stop_gradient((logits,) if keys is None else (logits, keys))
    experts, weights, probs = operation.run(ChooseExperts(rule, k), *given)
    return experts, *_of_logits(rule, logits, experts, weights, probs)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _of_logits(rule: Rule, logits: Array, experts: Array, weights: Array, probs: Array) -> tuple[Array, Array]:
    """Weights and scores, as given, as functions of the logits that they were computed from."""
    return weights, probs


@_of_logits.defjvp
def _(rule: Rule, primals: tuple[Array, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    logits, experts, weights, probs = primals

    def tangent(known: tuple[Array, Array], d_logits: Array) -> Any:
        logits, experts = known
        return jax.jvp(functools.partial(rule.weights, experts), (logits,), (d_logits,))[1]

    def cotangent(known: tuple[Array, Array], ct: tuple[Array, Array]) -> Array:
        return operation.run(PullBackWeights(rule), *known, *ct)[0]

    # values by this function again, so that higher derivatives see that they are those of the logits
    return _of_logits(rule, logits, experts, weights, probs), linear(tangent, cotangent, (logits, experts), tangents[0])
