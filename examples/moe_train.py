"""A Mixture-of-Experts layer in plain JAX, and a training loop with plain SGD.

Each token is routed to its top 2 experts. Tokens are sorted by expert, so that each expert's tokens are consecutive.
Then one grouped matmul runs all experts at once, however unevenly the router distributes the tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

import trencadis

Matmul = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # (rows, matrices, group sizes) -> rows
Params = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The sizes of the layer."""

    tokens: int = 1024
    model: int = 128
    hidden: int = 256
    experts: int = 16
    chosen: int = 2  # experts per token


class Routing(NamedTuple):
    """The routing of the tokens. A slot is one (token, expert) pair."""

    token: jax.Array  # [slots]: the token of each slot, slots sorted by expert
    weight: jax.Array  # [slots]: the weight of the expert's output
    sizes: jax.Array  # [experts]: the number of slots of each expert


def init(config: Config, key: jax.Array) -> Params:
    """Initialize the router and all experts; gate and up are concatenated into one matrix."""
    e, d, f = config.experts, config.model, config.hidden
    shapes = {"router": (d, e), "gate_up": (e, d, 2 * f), "down": (e, f, d)}
    keys = jax.random.split(key, len(shapes))
    return {
        name: jax.random.normal(k, shape) / shape[-2] ** 0.5
        for (name, shape), k in zip(shapes.items(), keys, strict=True)
    }


def route(config: Config, router: jax.Array, x: jax.Array) -> Routing:
    """Choose the top experts of each token, and sort the slots by expert."""
    score, expert = jax.lax.top_k(jax.nn.softmax(x @ router), config.chosen)  # [tokens, chosen]
    weight = score / score.sum(axis=-1, keepdims=True)
    order = jnp.argsort(expert.reshape(-1))  # stable: tokens of an expert stay in order
    sizes = jnp.bincount(expert.reshape(-1), length=config.experts)
    return Routing(order // config.chosen, weight.reshape(-1)[order], sizes)


def grouped(rows: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """A grouped matmul whose result has the dtype of its rows.

    The default result is float32. For bfloat16 rows that would make every gradient a float32 x bfloat16 product.
    """
    return trencadis.grouped_matmul(rows, w, sizes, preferred_element_type=rows.dtype)


def layer(config: Config, params: Params, x: jax.Array, matmul: Matmul = grouped) -> jax.Array:
    """`[tokens, model] -> [tokens, model]`: route, permute, gate and up, down, combine."""
    routing = route(config, params["router"], x)
    rows = x[routing.token]  # [slots, model], sorted by expert
    gate, up = jnp.split(matmul(rows, params["gate_up"], routing.sizes), 2, axis=-1)
    rows = matmul(jax.nn.silu(gate) * up, params["down"], routing.sizes)  # [slots, model]
    return jnp.zeros_like(x).at[routing.token].add(routing.weight[:, None] * rows)


def loss(config: Config, params: Params, x: jax.Array, y: jax.Array, matmul: Matmul) -> jax.Array:
    """The mean squared error against y."""
    return jnp.mean((layer(config, params, x, matmul) - y) ** 2)


def make_step(config: Config, matmul: Matmul = grouped, rate: float = 20.0) -> Callable[..., tuple]:
    """Return a jitted SGD step: `(params, x, y) -> (params, loss, gradients)`."""

    @jax.jit
    def step(params: Params, x: jax.Array, y: jax.Array) -> tuple[Params, jax.Array, Params]:
        value, grads = jax.value_and_grad(functools.partial(loss, config))(params, x, y, matmul)
        return jax.tree.map(lambda p, g: p - rate * g, params, grads), value, grads

    return step


def data(config: Config, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Random tokens, and as targets the outputs of another random layer of the same kind."""
    keys = jax.random.split(key, 2)
    x = jax.random.normal(keys[0], (config.tokens, config.model))
    return x, layer(config, init(config, keys[1]), x)


def train(config: Config, steps: int, seed: int = 0) -> list[float]:
    """Train for some steps, and return the loss of each."""
    keys = jax.random.split(jax.random.key(seed), 2)
    params, (x, y) = init(config, keys[0]), data(config, keys[1])
    step, losses = make_step(config), []
    for _ in range(steps):
        params, value, _ = step(params, x, y)
        losses.append(float(value))
    return losses


def main(steps: int = 20) -> None:
    losses = train(Config(), steps)
    for i in range(0, steps, max(steps // 5, 1)):
        print(f"step {i:3d}  loss {losses[i]:.4f}")
    print(f"step {steps - 1:3d}  loss {losses[-1]:.4f}")
    assert losses[-1] < losses[0], "the loss did not fall"


if __name__ == "__main__":
    main()
