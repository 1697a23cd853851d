"""Expert parallelism: MoE layers whose experts are sharded over a mesh axis.

choice       the rows and bytes that each strategy moves, and the choice by them
network      pods in figures, and what a step takes at best
layer        `expert_parallel`, inside `jax.shard_map`
mesh         `moe_mlp` over a mesh, in one call
all_gather   the strategy that gathers tokens and scatters sums
exchange     the strategies that send tokens to the shards of their experts
rows         buffers of rows: which token each row is of
setting      what strategies share
collectives  gathers and sums, also in a fixed order; weights that are sharded
"""

from trencadis.parallel.choice import STRATEGIES, Strategy, bytes_moved
from trencadis.parallel.collectives import gather_weights, ordered_psum, ordered_pvary
from trencadis.parallel.layer import expert_parallel
from trencadis.parallel.mesh import moe_mlp
from trencadis.parallel.network import Pod, step_times

__all__ = [
    "STRATEGIES",
    "Pod",
    "Strategy",
    "bytes_moved",
    "expert_parallel",
    "gather_weights",
    "moe_mlp",
    "ordered_psum",
    "ordered_pvary",
    "step_times",
]
