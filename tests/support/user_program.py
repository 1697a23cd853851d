"""What a user would write, in every way that the documentation allows; `make lint` checks its types as a user would."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import trencadis as tr

x, w = jnp.ones((8, 4)), jnp.ones((2, 4, 3))
sizes = jnp.array([3, 5])
y: jax.Array = tr.grouped_matmul(x, w, sizes, x.dtype, bias=jnp.zeros((2, 3)), activation=jax.nn.silu)
y = tr.grouped_matmul(x, tr.quant.quantize(w, "int8", "column"), [3, 5], group_offset=0, tiling=(8, 4, 3))
y = tr.grouped_matmul(np.ones((8, 4), np.float32), np.ones((2, 4, 3)), np.array([3, 5]), tiling=tr.Tiling(8, 4, 3))
y = tr.grouped_matmul([[1.0, 2.0]], [[[1.0], [2.0]]], (1,), tiling=lambda m, k, n: (m, k, n))
z: jax.Array = tr.transposed_grouped_matmul(x, jnp.ones((8, 3)), sizes, transpose_lhs=True, num_actual_groups=2)
z = tr.ragged_dot(x, tr.quant.quantize(w, "float8_e4m3fn"), sizes)
meta, count = tr.make_group_metadata(group_sizes=[3, 5], m=8, tm=4, start_group=0, num_nonzero_groups=2)
rows = tr.GroupedTensor.ragged_rows(x, [3, 5])
out = tr.grouped_gemm(rows, tr.GroupedTensor.stacked(w), contracting_dims=((1,), (1,)))
dense: jax.Array = tr.grouped_dense(x, w, sizes, quantization=tr.quant.Recipe("int8", "int8"))
routing = tr.moe.route(x @ jnp.ones((4, 2)), 1, score="sigmoid", bias=jnp.zeros(2), scale=2.5)
mlp: jax.Array = tr.moe_mlp(x, routing, w, tr.quant.quantize(w, "int8", "column"), jnp.ones((2, 3, 4)), save="fast")
mlp = tr.moe_mlp(x, routing, None, w, jnp.ones((2, 3, 4)), activation=jax.nn.relu)
config = tr.moe.Config(d=4, f=3, experts=2, k=1, activation=tr.moe.swiglu(limit=7.0))
mlp, routing = tr.moe.apply(tr.moe.init(jax.random.key(0), config), x, config, bias=jnp.zeros(2))
balance: jax.Array = tr.moe.balance_loss(routing) + tr.moe.limit_rows(routing, 2)[1].imbalance
why: str = str(tr.why(tr.grouped_matmul, x, w, sizes, target="v6e"))


class QArray:  # as qwix has it
    def __init__(self, qvalue: jax.Array, scale: jax.Array) -> None:
        self.qvalue, self.scale = qvalue, scale
        self.zero_point: Any = None
        self.qtype: Any = "int8"


y = tr.grouped_matmul(x, QArray(jnp.ones((2, 4, 3), jnp.int8), jnp.ones((2, 1, 3))), sizes)
