"""Expert parallelism: each device holds some of the matrices and computes the rows of its own groups.

`group_sizes` still has the sizes of all groups, and `group_offset` is the index of the first local group. Rows of other
devices' groups are exactly 0, so the sum over the devices is the complete result. The devices are virtual CPU devices.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import trencadis

DEVICES, GROUPS = 4, 8


def sharded(mesh: jax.sharding.Mesh, x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """Compute `grouped_matmul(x, w, sizes)` with w sharded over the mesh by groups."""

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("expert"), P()), out_specs=P())
    def run(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:  # w: [groups / devices, k, n]
        first = jax.lax.axis_index("expert") * w.shape[0]
        mine = trencadis.grouped_matmul(x, w, sizes, group_offset=first)
        return jax.lax.psum(mine, "expert")

    return run(x, w, sizes)


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)  # before the first array is made
    mesh = jax.make_mesh((DEVICES,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    keys = jax.random.split(jax.random.key(0), 3)
    x, w = jax.random.normal(keys[0], (120, 16)), jax.random.normal(keys[1], (GROUPS, 16, 24))
    c = jax.random.normal(keys[2], (120, 24))
    sizes = jnp.array([30, 0, 17, 20, 1, 2, 40, 5])  # 115 rows; the last 5 are unowned

    def loss(matmul: object, x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.vdot(c, matmul(x, w, sizes))  # type: ignore[operator]

    spread = functools.partial(sharded, mesh)
    np.testing.assert_allclose(
        jax.jit(spread)(x, w, sizes), trencadis.grouped_matmul(x, w, sizes), rtol=1e-5, atol=1e-5
    )
    print(f"value: {DEVICES} devices with {GROUPS // DEVICES} matrices each agree with one device")
    there, here = (
        jax.jit(jax.grad(functools.partial(loss, f), argnums=(0, 1)))(x, w) for f in (spread, trencadis.grouped_matmul)
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), there, here)
    print("gradients: agree as well")


if __name__ == "__main__":
    main()
