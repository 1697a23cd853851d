"""Routing: which experts each token goes to, with which weights, and how evenly."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int32, Integer

from trencadis.core import arguments
from trencadis.core.jax_compat import exportable_tuple
from trencadis.core.mesh import Axes, explicit_axes, explicit_mesh, placed, replicated, spec_of
from trencadis.moe.permutation import ids_of, sort_by_expert
from trencadis.moe.selection import SCORES, Rule, Score, choose, one_hot, picked


@exportable_tuple
class Routing(NamedTuple):
    """The experts of each token. An id outside of `[0, e)` is no expert: a masked or dropped assignment.

    >>> routing = route(jnp.array([[1.0, 0.0], [2.0, 0.0]]), 1)
    >>> routing.experts.tolist(), routing.weights.tolist(), routing.sizes.tolist()
    ([[0], [0]], [[1.0], [1.0]], [2, 0])
    """

    experts: Int32[Array, "t k"]
    weights: Float[Array, "t k"]  # float32; 0 where there is no expert
    probs: Float[Array, "t e"]  # float32: all scores over their sum; 0 for masked tokens, and where all scores are 0
    sizes: Int32[Array, " e"]  # the number of assignments of each expert


@exportable_tuple
class Load(NamedTuple):
    """How many rows each expert gets, and how evenly they are distributed.

    >>> load = load_of(route(jnp.array([[1.0, 0.0], [2.0, 0.0]]), 1))
    >>> load.rows.tolist(), int(load.dropped), float(load.imbalance)
    ([2, 0], 0, 2.0)
    """

    rows: Int32[Array, " e"]
    dropped: Int32[Array, ""]  # assignments to an expert that are not computed
    imbalance: Float[Array, ""]  # the rows of the busiest expert over their mean; 1 is perfect balance


def route(
    logits: Float[Array, "t e"],
    k: int,
    *,
    score: Score = "softmax",
    normalize: bool = True,
    scale: ArrayLike = 1.0,
    bias: Float[Array, " e"] | None = None,
    groups: int | None = None,
    group_k: int | None = None,
    mask: Bool[Array, " t"] | None = None,
    experts: Integer[Array, "t k"] | None = None,
) -> Routing:
    """Choose k experts for each token and the weights of their outputs, in float32.

    Differentiable in logits by way of weights and probs; the choice itself has no gradient.

    Args:
      logits: `[t, e]`, the router's output for each token and expert.
      k: the number of experts of a token.
      score: how logits become scores: "softmax" over all experts, "softmax_topk" over the chosen ones, "sigmoid",
        "sqrtsoftplus", or a function of the logits.
      normalize: divide the weights of a token by their sum. Those of "softmax_topk" have the sum 1 already.
      scale: a factor of all weights, or `[e]`, one for each expert.
      bias: `[e]`, added to the scores when experts are chosen, and not to the weights. `update_bias` keeps it current.
      groups: the number of groups of consecutive experts of which only some are eligible for a token.
      group_k: the number of eligible groups: those with the largest sum of their two best scores.
      mask: `[t]`; where it is False, a token goes to no expert and its weights are 0.
      experts: `[t, k]`, given ids instead of the choice by score: a routing to replay, a hash, or forced balance.
        Weights are those of the given logits.

    >>> routing = route(jnp.log(jnp.array([[1.0, 2.0, 1.0], [6.0, 1.0, 3.0]])), 2)
    >>> routing.experts.tolist(), routing.sizes.tolist()
    ([[1, 0], [0, 2]], [2, 1, 1])
    >>> [round(float(w), 2) for w in routing.weights[1]]
    [0.67, 0.33]
    """
    logits = arguments.as_array("logits", logits)
    bias, experts = (
        None if x is None else arguments.as_array(name, x) for name, x in (("bias", bias), ("experts", experts))
    )
    mask = None if mask is None else arguments.as_mask(mask)
    scale = arguments.as_array("scale", scale)
    _check(logits, k, score, {"scale": scale, "bias": bias, "mask": mask, "experts": experts}, groups, group_k)
    choice = _Choice(Rule(score, normalize), k, groups, group_k)
    given: tuple[Any, ...] = logits, scale, bias, mask, experts
    mesh = explicit_mesh(logits)
    tokens = () if mesh is None else spec_of(jax.typeof(logits).sharding, mesh, 2)[0]
    if mesh is None or not tokens or not logits.size or callable(score):  # a function may close over arrays
        here: Any = (x if x is None else replicated(x) for x in given)
        return choice.routing(*here)
    return _over_tokens(*given, choice=choice, mesh=mesh, tokens=tokens)


@dataclasses.dataclass(frozen=True, slots=True)
class _Choice:
    """The static description of how experts are chosen."""

    rule: Rule
    k: int
    groups: int | None
    group_k: int | None

    def routing(
        self, logits: Array, scale: Array, bias: Array | None, mask: Array | None, experts: Array | None
    ) -> Routing:
        """The routing of tokens that are all here."""
        there = None if mask is None else mask[:, None]
        if there is not None:
            logits = jnp.where(there, logits, 0)  # NaN of a masked token reaches nothing
        rule, k = self.rule, self.k
        if experts is None and isinstance(rule.score, str):
            experts, weights, probs = choose(rule, k, logits, _keys(rule, logits, bias, self.groups, self.group_k))
        else:
            if experts is None:
                keys = _keys(rule, logits, bias, self.groups, self.group_k)
                experts = lax.top_k(lax.stop_gradient(rule.keys(logits)) if keys is None else keys, k)[1]
            experts = ids_of(experts, logits.shape[1])
            weights, probs = rule.weights(experts, logits)
        if there is not None:
            experts = jnp.where(there, experts, logits.shape[1])
            weights, probs = jnp.where(there, weights, 0), jnp.where(there, probs, 0)
        hot = one_hot(experts, logits.shape[1])
        weights = weights * (
            scale.astype(weights.dtype) if scale.ndim == 0 else picked(hot, scale[None].astype(weights.dtype))
        )
        return Routing(experts, weights, probs, jnp.sum(hot, axis=(0, 1), dtype=jnp.int32))


@functools.partial(jax.jit, static_argnames=("choice", "mesh", "tokens"))
def _over_tokens(
    logits: Array, scale: Array, bias: Array | None, mask: Array | None, experts: Array | None, *,
    choice: _Choice, mesh: AbstractMesh, tokens: Axes,
) -> Routing:  # fmt: skip
    """The routing of tokens that are sharded over explicit mesh axes: each device has those of its own."""

    def local(*given: Any) -> tuple[Array, ...]:
        *by_token, sizes = choice.routing(*given)
        return *by_token, lax.psum(sizes, tokens)

    rows, whole = PartitionSpec(tokens, None), PartitionSpec()
    given = logits, scale, bias, mask, experts
    each = rows, whole, whole, PartitionSpec(tokens), rows
    specs = tuple(None if x is None else spec for x, spec in zip(given, each, strict=True))
    out: Any = (rows, rows, rows, whole)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out, axis_names=set(explicit_axes(mesh)))
    return Routing(*mapped(*placed(mesh, given, specs)))


def _keys(rule: Rule, logits: Array, bias: Array | None, groups: int | None, group_k: int | None) -> Array | None:
    """What experts are chosen by, [t, e], with the bias and only of the eligible groups; None if it is the rule's."""
    if bias is None and groups is None:
        return None
    keys = lax.stop_gradient(rule.keys(logits))
    if bias is not None:
        keys = keys + lax.stop_gradient(bias).astype(keys.dtype)[None]
    if groups is not None and group_k is not None:
        each = keys.reshape(keys.shape[0], groups, keys.shape[1] // groups)  # [t, groups, e / groups]
        best = lax.top_k(each, min(2, each.shape[2]))[0].sum(axis=-1)
        _, eligible = lax.top_k(best, group_k)
        there = one_hot(eligible, groups).any(axis=1)
        keys = jnp.where(there[:, :, None], each, -jnp.inf).reshape(keys.shape)
    return keys


def check_groups(experts: int, k: int, groups: int | None, group_k: int | None) -> None:
    """Raise an error that names the argument if experts cannot be chosen from so many groups."""
    if (groups is None) != (group_k is None):
        raise ValueError(f"groups, group_k: want both or neither; got {groups} and {group_k}")
    if groups is None or group_k is None:
        return
    if not arguments.is_int(groups) or groups < 1 or experts % groups:
        raise ValueError(f"groups: want an int, a divisor of the number of experts, {experts}; got {groups!r}")
    each = experts // groups
    if not arguments.is_int(group_k) or not 1 <= group_k <= groups or group_k * each < k:
        raise ValueError(f"group_k: want at most {groups} groups that hold k = {k} experts, {each} each; got {group_k}")


def _check(
    logits: Array, k: int, score: Score, arrays: dict[str, Array | None], groups: int | None, group_k: int | None
) -> None:
    """Raise an error that names the argument if one of those of `route` makes no sense."""
    if logits.ndim != 2 or not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(f"logits: want floats of shape [t, e]; got {logits.dtype} of shape {logits.shape}")
    t, e = logits.shape
    if not arguments.is_int(k) or not 1 <= k <= e:
        raise ValueError(f"k: want an int between 1 and the number of experts, {e}; got {k!r}")
    check_score(score)
    check_groups(e, k, groups, group_k)
    shapes: dict[str, tuple[int, ...]] = {"scale": (e,), "bias": (e,), "mask": (t,), "experts": (t, k)}
    for name, x in arrays.items():
        if x is not None and x.shape != shapes[name] and not (name == "scale" and x.ndim == 0):
            raise ValueError(f"{name}: want {'one number, or ' * (name == 'scale')}shape {shapes[name]}; got {x.shape}")
    experts = arrays["experts"]
    if experts is not None and not jnp.issubdtype(experts.dtype, jnp.integer):
        raise TypeError(f"experts: want integers; got {experts.dtype}")


# ---------------------------------------------------------------------------------------------------------------------
# Balance


def balance_loss(routing: Routing, *, axis_name: str | tuple[str, ...] | None = None) -> Float[Array, ""]:
    """The load-balancing loss: the number of experts times the sum of (share of assignments x mean probability).

    It is 1 if both are even. Masked tokens do not count. With axis_name the shares are those of all shards.

    >>> float(balance_loss(route(jnp.zeros((4, 4)), 4)))
    1.0
    """
    check_routing(routing)
    sizes, probs = routing.sizes.astype(jnp.float32), jnp.sum(routing.probs, axis=0)
    if axis_name is not None:
        sizes, probs = lax.psum((sizes, probs), axis_name)
    assigned, tokens = jnp.maximum(jnp.sum(sizes), 1), lax.stop_gradient(jnp.sum(probs))
    shares = sizes / assigned * (probs / jnp.where(tokens == 0, 1, tokens))
    return float(sizes.shape[0]) * jnp.sum(shares)


def z_loss(logits: Float[Array, "t e"], *, mask: Bool[Array, " t"] | None = None) -> Float[Array, ""]:
    """The mean over tokens of the squared logsumexp of their logits, which keeps logits small; 0 without tokens.

    >>> z_loss(jnp.zeros((2, 1)))
    Array(0., dtype=float32)
    """
    logits = arguments.as_array("logits", logits).astype(jnp.float32)
    if mask is None:
        squares = jax.nn.logsumexp(logits, axis=-1) ** 2
        return jnp.sum(squares) / max(squares.size, 1)
    mask = arguments.as_mask(mask)
    if mask.shape != logits.shape[:-1]:
        raise ValueError(f"mask: want shape {logits.shape[:-1]}; got {mask.shape}")
    squares = jax.nn.logsumexp(jnp.where(mask[..., None], logits, 0), axis=-1) ** 2
    return jnp.sum(jnp.where(mask, squares, 0)) / jnp.maximum(jnp.sum(mask), 1).astype(jnp.float32)


def update_bias(
    bias: Float[Array, " e"],
    sizes: Int32[Array, " e"],
    rate: ArrayLike,
    *,
    axis_name: str | tuple[str, ...] | None = None,
) -> Float[Array, " e"]:
    """The bias for the choice of experts after a step: up by rate for experts with few rows, down for those with many.

    This balances experts without a loss. With axis_name the sizes are summed over all shards.

    >>> update_bias(jnp.zeros(3), jnp.array([1, 3, 5]), 0.5)
    Array([ 0.5,  0. , -0.5], dtype=float32)
    """
    bias, sizes, rate = (arguments.as_array(*each) for each in (("bias", bias), ("sizes", sizes), ("rate", rate)))
    if bias.ndim != 1 or not jnp.issubdtype(bias.dtype, jnp.floating):
        raise ValueError(f"bias: want floats of shape [e]; got {bias.dtype} of shape {bias.shape}")
    if sizes.shape != bias.shape:
        raise ValueError(f"sizes: want shape {bias.shape}, that of bias; got {sizes.shape}")
    if rate.ndim:
        raise ValueError(f"rate: want one number; got shape {rate.shape}")
    sizes = (sizes if axis_name is None else lax.psum(sizes, axis_name)).astype(jnp.float32)
    return bias + rate.astype(bias.dtype) * jnp.sign(jnp.mean(sizes) - sizes).astype(bias.dtype)


def load_of(routing: Routing, *, axis_name: str | tuple[str, ...] | None = None) -> Load:
    """The load of each expert, with axis_name over all shards.

    >>> load_of(route(jnp.array([[1.0, 0.0], [2.0, 0.0]]), 1)).rows.tolist()
    [2, 0]
    """
    check_routing(routing)
    rows = routing.sizes if axis_name is None else lax.psum(routing.sizes, axis_name)
    return _load(rows, jnp.zeros((), jnp.int32))


def limit_rows(routing: Routing, capacity: int) -> tuple[Routing, Load]:
    """The routing with at most `capacity` rows for each expert, those of the first tokens, and its load.

    Further assignments go to no expert and have the weight 0; `Load.dropped` counts them.

    >>> limited, load = limit_rows(route(jnp.array([[2.0, 1.0]] * 3), 1), 2)
    >>> limited.experts.ravel().tolist(), int(load.dropped)
    ([0, 0, 2], 1)
    """
    check_routing(routing)
    if not arguments.is_int(capacity) or capacity < 0:
        raise ValueError(f"capacity: want a nonnegative int, the rows of an expert; got {capacity!r}")
    num_experts, routing = routing.sizes.shape[0], Routing(*map(replicated, routing))
    ids = ids_of(routing.experts, num_experts)
    _, inverse, sizes = sort_by_expert(ids, num_experts)
    starts = jnp.cumsum(sizes) - sizes  # the first sorted row of each expert
    there = (ids >= 0) & (ids < num_experts)
    of_expert = jnp.take(starts, jnp.where(there, ids, 0).reshape(-1))
    kept = there & ((inverse - of_expert).reshape(ids.shape) < capacity)
    rows = jnp.minimum(sizes, capacity)
    limited = routing._replace(
        experts=jnp.where(kept, ids, num_experts), weights=jnp.where(kept, routing.weights, 0), sizes=rows
    )
    return limited, _load(rows, jnp.sum(sizes - rows, dtype=jnp.int32))


def check_score(score: object) -> None:
    """Raise unless it is the name of a score, or a function."""
    if not (callable(score) or (isinstance(score, str) and score in SCORES)):
        raise ValueError(f"score: want one of {', '.join(map(repr, SCORES))} or a function; got {score!r}")


def check_routing(routing: object) -> None:
    """Raise an error unless it is what `route` returns."""
    arguments.check_type("routing", routing, Routing, "what moe.route returns")


def check_routing_for(routing: Routing, tokens: int) -> None:
    """Raise an error unless it is what `route` returns for so many tokens."""
    check_routing(routing)
    if routing.experts.ndim != 2 or routing.experts.shape[0] != tokens:
        raise ValueError(
            f"routing: want experts of shape [t, k] for the {tokens} tokens of x; got {routing.experts.shape}"
        )


def imbalance(busiest: Array, mean: Array) -> Array:
    """The rows of the busiest expert over their float32 mean; 0 if there are no rows."""
    return busiest.astype(jnp.float32) / jnp.maximum(mean, jnp.finfo(jnp.float32).tiny)


def _load(rows: Array, dropped: Array) -> Load:
    return Load(rows, dropped, imbalance(jnp.max(rows), jnp.mean(rows.astype(jnp.float32))))
