"""Time a training step of an MoE layer over four virtual CPU devices beside the step of one device, on the same cores.

    python scripts/mesh.py [--tokens 2048] [--rounds 7] [--only all_gather ...]

It prints the least wall and CPU time of each way to divide the layer, its page faults, and its ratios to one device.
All take turns in one process: only the ratios mean something on a shared machine.
"""

from __future__ import annotations

import argparse
import functools
import os
import resource
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import trencadis as tr
from trencadis import moe, parallel

DEVICES = 4
D, F, EXPERTS, K = 512, 512, 16, 2
HERE = P("e")
EXPLICIT = {  # specs of tokens and of the three weights
    "tokens": (HERE, P(), P(), P()),
    "experts": (P(), HERE, HERE, HERE),
    "tokens and experts": (HERE, HERE, HERE, HERE),
    "width": (P(), P(None, None, "e"), P(None, None, "e"), P(None, "e")),
    "fully sharded": (HERE, P(None, "e"), P(None, "e"), P(None, None, "e")),
}


def single(x: jax.Array, router: jax.Array, *experts: jax.Array) -> jax.Array:
    """The loss of the layer on one device, or on a mesh whose axes are explicit."""
    return jnp.sum(tr.moe_mlp(x, moe.route(x @ router, K), *experts) ** 2)


def over_experts(options: dict[str, Any], x: jax.Array, router: jax.Array, *experts: jax.Array) -> jax.Array:
    """The loss of an expert-parallel layer, inside `shard_map`."""
    y, _ = parallel.expert_parallel(x, moe.route(x @ router, K), *experts, axis="e", **options)
    return jax.lax.psum(jnp.sum(y**2), "e")


def compiled(loss: Callable[..., Any], mesh: Any, specs: Sequence[P], arrays: Sequence[jax.Array]) -> Callable[[], Any]:
    """A call of a loss and its gradients in everything, with arrays that lie on a mesh as specs say."""
    given = arrays if mesh is None else [jax.device_put(*each) for each in zip(arrays, _on(mesh, specs), strict=True)]
    program = jax.jit(jax.value_and_grad(loss, argnums=range(5))).lower(*given).compile()
    return functools.partial(program, *given)


def _on(mesh: Any, specs: Sequence[P]) -> list[NamedSharding]:
    return [NamedSharding(mesh, spec) for spec in specs]


def programs(tokens: int, only: Sequence[str]) -> dict[str, Callable[[], Any]]:
    """All ways to divide the layer whose names hold one of these words, after the layer of one device."""
    rng = np.random.default_rng(0)
    shapes = (tokens, D), (D, EXPERTS), (EXPERTS, D, F), (EXPERTS, D, F), (EXPERTS, F, D)
    arrays = [jnp.asarray(rng.standard_normal(shape, np.float32) / shape[-2] ** 0.5) for shape in shapes]
    automatic, explicit = (
        jax.make_mesh((DEVICES,), ("e",), axis_types=(kind,)) for kind in (AxisType.Auto, AxisType.Explicit)
    )
    found = {"one device": (single, None, (P(),) * 5)}
    for strategy in parallel.STRATEGIES:
        for capacity in (None, int(1.25 * tokens * K / DEVICES)):
            specs = (HERE, P(), HERE, HERE, HERE)
            loss = functools.partial(over_experts, {"strategy": strategy, "capacity": capacity})
            mapped = jax.shard_map(loss, mesh=automatic, in_specs=specs, out_specs=P())
            found[f"{strategy}, {'worst case' if capacity is None else 'capacity 1.25'}"] = mapped, automatic, specs
    for name, (rows, *weights) in EXPLICIT.items():
        found[f"explicit axes: {name}"] = single, explicit, (rows, P(), *weights)
    asked = {name: each for name, each in found.items() if name == "one device" or any(word in name for word in only)}
    return {name: compiled(*each, arrays) for name, each in asked.items()}


def _spent() -> np.ndarray:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return np.array([time.perf_counter(), usage.ru_utime + usage.ru_stime, usage.ru_minflt])


def main() -> None:
    """Print the table that the command line asks for."""
    ask = argparse.ArgumentParser(description="Time an MoE layer over four virtual CPU devices.")
    ask.add_argument("--tokens", type=int, default=2048)
    ask.add_argument("--rounds", type=int, default=7)
    ask.add_argument("--only", nargs="+", default=[""], help="words in the names of programs")
    asked = ask.parse_args()
    calls = programs(asked.tokens, asked.only)
    spent: dict[str, list[np.ndarray]] = {name: [] for name in calls}
    for turn in range(asked.rounds + 1):  # the first is not counted
        for name, call in calls.items():
            time.sleep(0.03)  # in which XLA frees the arrays of the last one
            before = _spent()
            jax.block_until_ready(call())
            spent[name] += [_spent() - before] if turn else []
    print(
        "| layer | wall, ms | CPU, ms | page faults | wall / one device | CPU / one device |\n|---|--:|--:|--:|--:|--:|"
    )
    first = np.min(spent["one device"], axis=0)
    for name, times in spent.items():
        wall, cpu, faults = np.min(times, axis=0)
        ratios = f"{wall / first[0]:.2f} | {cpu / first[1]:.2f}"
        print(f"| {name} | {1e3 * wall:.0f} | {1e3 * cpu:.0f} | {faults:.0f} | {ratios} |")


if __name__ == "__main__":
    main()
