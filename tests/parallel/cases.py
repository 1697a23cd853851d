"""Small layers over a mesh: one program for a strategy and a number of shards, and routings of every kind for it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from trencadis import moe, parallel

T, D, F, E, K = 16, 6, 5, 8, 2
AUTO = jax.sharding.AxisType.Auto


def mesh_of(shards):
    return jax.make_mesh((shards,), ("e",), axis_types=(AUTO,), devices=jax.devices()[:shards])


def numbers(seed=0):
    """Tokens, weights of their experts, parameters of the experts, and a cotangent."""
    rng = np.random.default_rng(seed)
    shapes = {"x": (T, D), "gate": (E, D, F), "up": (E, D, F), "down": (E, F, D), "ct": (T, D)}
    found = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return found | {"weights": rng.uniform(0.1, 1, size=(T, K)).astype(np.float32)}


def routings(seed=0):
    """Experts [T, K] by name; E is no expert."""
    rng = np.random.default_rng(seed)
    two = np.argsort(rng.normal(size=(T, E)), axis=1)[:, :K].astype(np.int32)
    mask = np.arange(T)[:, None] % 3 != 1
    return {
        "random": two,
        "uneven": np.argsort(rng.normal(size=(T, E)) - 2.0 * np.arange(E), axis=1)[:, :K].astype(np.int32),
        "empty": np.where(two % 2 == 1, (two + 1) % E, two),  # odd experts have no tokens, some even ones twice
        "one": np.tile(np.array([[5, E]], np.int32), (T, 1)),
        "shard": np.tile(np.array([[6, 7]], np.int32), (T, 1)),
        "masked": np.where(mask, two, E),
        "none": np.full((T, K), E, np.int32),
        "twice": np.tile(np.array([[3, 3]], np.int32), (T, 1)),
    }


@functools.cache
def step(shards, **options):
    """The compiled layer: the result, the gradients in x, weights, gate, up and down, and rows and drops of shards."""
    return jax.jit(uncompiled(mesh_of(shards), **options))


def uncompiled(mesh, axis="e", backend="reference", **options):
    """The layer; its products by the backend that compiles in the least time: strategies are what is tested."""

    def local(experts, x, weights, *params):
        routing = moe.Routing(experts, weights, jnp.zeros((x.shape[0], E)), jnp.zeros(E, jnp.int32))
        y, load = parallel.expert_parallel(x, routing, *params, axis=axis, backend=backend, **options)
        return y, (load.rows, load.dropped[None], load.imbalance)

    layer = jax.shard_map(local, mesh=mesh, in_specs=P(axis), out_specs=(P(axis), (P(axis), P(axis), P())))

    def both(experts, ct, *inputs):
        y, pull, load = jax.vjp(functools.partial(layer, experts), *inputs, has_aux=True)
        return y, pull(ct), moe.Load(*load)

    return both


def run(call, experts, given):
    return call(experts, *(given[name] for name in ("ct", "x", "weights", "gate", "up", "down")))
