"""Some steps of training of one layer over four devices, in one process or as one of two; prints losses to the bit.

    python -m tests.parallel.training PROCESS PORT HEARTBEAT

The first process then goes on until it is ended, and the second one kills itself.
"""

import os
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.parallel import cases
from trencadis import moe, parallel

DEVICES, PROCESSES = 4, 2


def loss(params, x, target):
    """The mean square error of a layer and its router, on this shard's tokens; summed in the order of the shards."""
    router, *experts = params
    routing = moe.route(x @ parallel.ordered_pvary(router, "e"), cases.K)
    options = {"strategy": "all_gather", "ordered": True, "backend": "reference"}
    y, _ = parallel.expert_parallel(x, routing, *experts, axis="e", **options)
    return parallel.ordered_psum(jnp.sum((y - target) ** 2), "e") / (cases.T * cases.D)


def losses(mesh):
    """Losses of steps of gradient descent, without an end."""
    specs = (P(), P("e"), P("e"), P("e"))
    mapped = jax.shard_map(loss, mesh=mesh, in_specs=(specs, P("e"), P("e")), out_specs=P())

    @jax.jit
    def step(params, x, target):
        value, gradients = jax.value_and_grad(mapped)(params, x, target)
        return value, jax.tree.map(lambda p, g: p - 0.05 * g, params, gradients)

    def place(x, spec):
        return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda at: x[at])

    given = cases.numbers()
    router = np.random.default_rng(1).normal(size=(cases.D, cases.E)).astype(np.float32)
    params = tuple(map(place, (router, given["gate"], given["up"], given["down"]), specs))
    x, target = place(given["x"], P("e")), place(given["ct"], P("e"))
    while True:
        value, params = step(params, x, target)
        yield float(value).hex()


def main(process, port, heartbeat):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"127.0.0.1:{port}", PROCESSES, int(process), heartbeat_timeout_seconds=int(heartbeat),
        initialization_timeout=60, shutdown_timeout_seconds=int(heartbeat),
    )  # fmt: skip
    mesh = jax.make_mesh((DEVICES,), ("e",), axis_types=(cases.AUTO,))
    steps = losses(mesh)
    print("losses", *(next(steps) for _ in range(3)), flush=True)
    if process == "1":
        next(steps)  # which the first process takes part in when it has printed its losses
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in steps:
        pass


if __name__ == "__main__":
    main(*sys.argv[1:])
