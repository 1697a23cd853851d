"""The Mixture-of-Experts layer: routing, the permutation of tokens, and the experts' MLPs."""

from trencadis.moe.activation import swiglu
from trencadis.moe.mlp import moe_mlp
from trencadis.moe.params import Config, apply, init
from trencadis.moe.permutation import Permutation, combine, permute, sort_by_expert
from trencadis.moe.routing import (
    Load,
    Routing,
    balance_loss,
    limit_rows,
    load_of,
    route,
    update_bias,
    z_loss,
)

__all__ = [
    "Config",
    "Load",
    "Permutation",
    "Routing",
    "apply",
    "balance_loss",
    "combine",
    "init",
    "limit_rows",
    "load_of",
    "moe_mlp",
    "permute",
    "route",
    "sort_by_expert",
    "swiglu",
    "update_bias",
    "z_loss",
]
