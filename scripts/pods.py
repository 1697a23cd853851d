"""Compile a training step of an expert-parallel MoE layer for TPU pods that are not here, and say what it would take.

    python scripts/pods.py [--pods v6e:8x8 ...] [--strategies ragged ...] [--model qwen3-30b-a3b] [--capacity 1.25]

For each pod and strategy it prints: seconds of compilation; memory of a device in arguments, results and temporaries;
the collectives of the compiled program; bytes that a device gets from others by the formula of docs/parallel.md,
forward and backward; and the times of docs/scaling.md: kernels by the compiler's schedule, products at the peak rate,
and communication by the links.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import os
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from trencadis import inspect, moe, parallel
from trencadis.inspect.aot import ENVIRONMENT
from trencadis.inspect.collectives import collectives
from trencadis.parallel import Pod, step_times
from trencadis.parallel.choice import worst_case

PODS = ("v5e:4x4", "v5p:4x4x4", "v6e:8x8", "tpu7x:4x4x4")
AXIS = "expert"
COLUMNS = (
    "pod", "strategy", "capacity", "compile, s", "memory, GiB", "kernels", "collectives", "MB", "schedule, ms",
    "products, ms", "communication, ms",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """The sizes of a layer, and the tokens of a device."""

    d: int
    f: int
    experts: int
    k: int
    tokens: int = 4096


MODELS = {
    "small": Layer(d=128, f=128, experts=16, k=2, tokens=16),
    "qwen3-30b-a3b": Layer(d=2048, f=768, experts=128, k=8),
    "gpt-oss-120b": Layer(d=2880, f=2880, experts=128, k=4),
    "deepseek-v3": Layer(d=7168, f=2048, experts=256, k=8),
}


def model_on(name: str, layer: Layer) -> tuple[Layer, Mesh]:
    """The layer with at least one expert on each device of a pod, and the mesh of these devices."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    return dataclasses.replace(layer, experts=max(layer.experts, len(devices))), Mesh(np.array(devices), (AXIS,))


def lowered(layer: Layer, mesh: Mesh, strategy: parallel.Strategy, capacity: int | None, chunks: int = 1) -> Any:
    """The step, a loss with its gradients in tokens, router and experts, lowered for the devices of a mesh."""

    def loss(x: jax.Array, router: jax.Array, *experts: jax.Array) -> jax.Array:
        routing = moe.route(x.astype(jnp.float32) @ router, layer.k)
        how: dict[str, Any] = dict(axis=AXIS, strategy=strategy, capacity=capacity, chunks=chunks)
        y, _ = parallel.expert_parallel(x, routing, *experts, **how)
        return jax.lax.psum(jnp.sum(y.astype(jnp.float32) ** 2), AXIS)

    here, e, d, f = P(AXIS), layer.experts, layer.d, layer.f
    mapped = jax.shard_map(loss, mesh=mesh, in_specs=(here, P(), here, here, here), out_specs=P())
    shapes = [((mesh.size * layer.tokens, d), jnp.bfloat16, here), ((d, e), jnp.float32, P())]
    shapes += [(shape, jnp.bfloat16, here) for shape in ((e, d, f), (e, d, f), (e, f, d))]
    given = [jax.ShapeDtypeStruct(shape, kind, sharding=NamedSharding(mesh, spec)) for shape, kind, spec in shapes]
    return jax.jit(jax.value_and_grad(mapped, argnums=range(5))).trace(*given).lower()


def even(layer: Layer, shards: int, strategy: parallel.Strategy, capacity: int | None) -> np.ndarray[Any, Any]:
    """The experts [rows, k] of the rows that a shard has room for, at an even load; `local` is no expert."""
    local, rows = layer.experts // shards, layer.tokens * layer.k
    room = worst_case(shards, layer.tokens, layer.k, local) if capacity is None else capacity
    room = -(-room // shards) * shards if strategy == "all_to_all" else room
    if strategy == "all_gather" and capacity is None:  # all tokens, of which most go to no expert of this shard
        ids = np.arange(shards * rows).reshape(-1, layer.k) % layer.experts
        return np.where(ids < local, ids, local).astype(np.int32)[:, : min(layer.k, local)]
    ids = np.arange(room) % local
    return np.where(np.arange(room) < rows, ids, local).astype(np.int32)[:, None]


def scheduled(layer: Layer, pod: Pod, strategy: parallel.Strategy, capacity: int | None) -> inspect.Inspection:
    """The schedule of the kernels of one shard's experts, forward and backward, at an even load."""

    def step(experts: jax.Array, ct: jax.Array, *inputs: jax.Array) -> Any:
        def local(x: jax.Array, weights: jax.Array, *params: jax.Array) -> jax.Array:
            unused = jnp.zeros((x.shape[0], 0)), jnp.zeros(params[0].shape[0], jnp.int32)
            return moe.moe_mlp(x, moe.Routing(experts, weights, *unused), *params)

        y, pull = jax.vjp(local, *inputs)
        return y, pull(ct)

    ids = even(layer, pod.devices, strategy, capacity)
    e, d, f = layer.experts // pod.devices, layer.d, layer.f
    wide = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((len(ids), d), (e, d, f), (e, d, f), (e, f, d))]
    weights = jax.ShapeDtypeStruct(ids.shape, jnp.float32)
    return inspect.inspect(step, ids, wide[0], wide[0], weights, *wide[1:], generation=pod.chip.name)


def report(name: str, layer: Layer, strategy: parallel.Strategy, factor: float | None) -> str:
    """A line of the table."""
    layer, mesh = model_on(name, layer)
    capacity = None if factor is None else int(factor * layer.tokens * layer.k)
    began = time.perf_counter()
    compiled = lowered(layer, mesh, strategy, capacity).compile()
    seconds = time.perf_counter() - began
    memory, text = compiled.memory_analysis(), compiled.as_text()
    used = (memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes) / 2**30
    kinds = collections.Counter(each.kind for each in collectives(text, mesh.size))
    times = step_times(
        Pod.named(name), strategy, tokens=layer.tokens, k=layer.k, d=layer.d, f=layer.f,
        local=layer.experts // mesh.size, capacity=capacity,
    )  # fmt: skip
    schedule = scheduled(layer, Pod.named(name), strategy, capacity)
    about = "about " * any(kernel.warnings for kernel in schedule.kernels)  # more indices than the simulator is given
    counted = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    columns = (
        name, strategy, factor or "worst case", f"{seconds:.0f}", f"{used:.2f}", text.count("tpu_custom_call"), counted,
        f"{times.bytes / 1e6:.4g}", f"{about}{1e3 * schedule.seconds:.4g}", f"{1e3 * times.products:.4g}",
        f"{1e3 * times.communication:.4g}",
    )  # fmt: skip
    return f"| {' | '.join(map(str, columns))} |"


def main() -> None:
    """Print the table that the command line asks for."""
    ask = argparse.ArgumentParser(description="Compile an expert-parallel layer for TPU pods.")
    ask.add_argument("--pods", nargs="+", default=PODS, help="topologies as the compiler names them")
    ask.add_argument("--strategies", nargs="+", default=parallel.STRATEGIES, choices=parallel.STRATEGIES)
    ask.add_argument("--model", default="qwen3-30b-a3b", choices=MODELS)
    ask.add_argument("--tokens", type=int, help="on each device")
    ask.add_argument("--capacity", type=float, help="in units of the mean number of rows; default: the worst case")
    asked = ask.parse_args()
    for name, value in {**ENVIRONMENT, "TPU_LOG_DIR": "disabled"}.items():
        os.environ.setdefault(name, value)
    layer = MODELS[asked.model]
    layer = dataclasses.replace(layer, tokens=asked.tokens or layer.tokens)
    print(f"{asked.model}: {layer}\n\n| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    for pod in asked.pods:
        for strategy in asked.strategies:
            print(report(pod, layer, strategy, asked.capacity), flush=True)


if __name__ == "__main__":
    main()
