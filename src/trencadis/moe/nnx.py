"""The MoE layer as a Flax NNX module.

It needs flax: `pip install 'trencadis[flax]'`, or in a checkout: `pip install '.[flax]'`.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int32, Integer

from trencadis.core import arguments
from trencadis.moe.mlp import moe_mlp
from trencadis.moe.params import Config, apply, init
from trencadis.moe.routing import Routing, update_bias


class BalanceBias(nnx.Variable):
    """The bias for the choice of experts, a variable of its own type, so that an optimizer of `nnx.Param` leaves it."""


class MoE(nnx.Module):
    """A Mixture-of-Experts layer: router, experts, an optional shared expert, and a bias that balances the load.

    Args:
      config: the static description of the layer, a `moe.Config`.
      rngs: the random numbers of the parameters; the stream `params` is used.
      param_dtype: the dtype of the parameters. The layer computes in the dtype of its input.

    Each parameter of `moe.init` is an `nnx.Param` of the same name: `router`, `w_gate`, `w_up`, `w_down` and so on.
    `balance_bias` is a `BalanceBias` of zeros that only `update_bias` changes.

    >>> from trencadis.moe import Config
    >>> layer = MoE(Config(d=8, f=16, experts=4, k=2), rngs=nnx.Rngs(0))
    >>> y, routing = layer(jnp.ones((2, 3, 8)))
    >>> y.shape, int(routing.sizes.sum())
    ((2, 3, 8), 12)
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs, param_dtype: DTypeLike = jnp.float32) -> None:
        arguments.check_type("config", config, Config, "a moe.Config")
        arguments.check_type("rngs", rngs, nnx.Rngs, "an nnx.Rngs")
        self.config = config
        for name, value in init(rngs.params(), config, param_dtype).items():
            setattr(self, name, nnx.Param(value))
        self.balance_bias = BalanceBias(jnp.zeros(config.experts, jnp.float32))

    def __call__(
        self,
        x: Float[Array, "*batch d"],
        *,
        mask: Bool[Array, "*batch"] | None = None,
        experts: Integer[Array, "*batch k"] | None = None,
        mlp: Callable[..., Array] = moe_mlp,
    ) -> tuple[Float[Array, "*batch d"], Routing]:
        """The result, of the shape and dtype of x, and the routing; arguments are those of `moe.apply`."""
        params = {name: getattr(self, name).get_value() for name in self.config.shapes}
        return apply(params, x, self.config, bias=self.balance_bias.get_value(), mask=mask, experts=experts, mlp=mlp)

    def update_bias(
        self, sizes: Int32[Array, " e"], rate: float = 1e-3, *, axis_name: str | tuple[str, ...] | None = None
    ) -> None:
        """Move the bias toward balance, given the sizes of a routing: once after each step of the optimizer.

        With axis_name the sizes are summed over all shards.

        >>> from trencadis.moe import Config
        >>> layer = MoE(Config(d=8, f=16, experts=3, k=1), rngs=nnx.Rngs(0))
        >>> layer.update_bias(jnp.array([1, 3, 5]), 0.5)
        >>> layer.balance_bias.get_value()
        Array([ 0.5,  0. , -0.5], dtype=float32)
        """
        self.balance_bias.set_value(update_bias(self.balance_bias.get_value(), sizes, rate, axis_name=axis_name))
