"""A whole MoE layer as two functions: `init` makes its parameters, a dict of arrays, and `apply` runs it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Float, Integer

from trencadis.core import arguments
from trencadis.core.activation import Activation
from trencadis.core.mesh import flattened, unflattened
from trencadis.moe.activation import SwiGLU, swiglu
from trencadis.moe.layer import Save
from trencadis.moe.mlp import check_floats, check_save, moe_mlp
from trencadis.moe.routing import Routing, check_groups, check_score, route
from trencadis.moe.selection import Score
from trencadis.quant.recipe import Recipe

Params: TypeAlias = dict[str, Any]  # arrays by name; those of the experts may be quantized

ROUTER = ("router", "bias_router")  # computed in float32, whatever the dtype of x


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The static description of a whole layer: router, experts and an optional shared expert.

    Attributes:
      d: the width of a token.
      f: the width of an expert.
      experts: the number of experts.
      k: the number of experts of a token.
      score, normalize, scale, groups, group_k: as in `route`.
      gated: whether experts have a gate; without one, activation is a function of one number.
      activation, save, quantization: as in `moe_mlp`.
      biases: whether router and experts have biases, as those of gpt-oss.
      shared: the width of an expert that every token goes to with weight 1; 0 for none.

    >>> Config(d=8, f=16, experts=4, k=2, shared=16).shapes["shared_up"]
    (8, 16)
    """

    d: int
    f: int
    experts: int
    k: int
    score: Score = "softmax"
    normalize: bool = True
    scale: float = 1.0
    groups: int | None = None
    group_k: int | None = None
    gated: bool = True
    activation: Activation = swiglu()
    biases: bool = False
    shared: int = 0
    save: Save = "least"
    quantization: Recipe | None = None

    def __post_init__(self) -> None:
        for name, least in (("d", 1), ("f", 1), ("experts", 1), ("k", 1), ("shared", 0)):
            value = getattr(self, name)
            if not arguments.is_int(value) or value < least:
                raise ValueError(f"{name}: want an int of at least {least}; got {value!r}")
        if self.k > self.experts:
            raise ValueError(f"k: want at most {self.experts}, the number of experts; got {self.k}")
        check_score(self.score)
        check_save(self.save)
        check_groups(self.experts, self.k, self.groups, self.group_k)
        wanted = "two numbers, such as moe.swiglu()" if self.gated else "one number, since gated is False"
        if not callable(self.activation) or (not self.gated and isinstance(self.activation, SwiGLU)):
            raise TypeError(f"activation: want a function of {wanted}; got {self.activation!r}")

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter by its name."""
        e, d, f, s = self.experts, self.d, self.f, self.shared
        shapes = {"router": (d, e), "w_gate": (e, d, f), "w_up": (e, d, f), "w_down": (e, f, d)}
        if self.biases:
            shapes |= {"bias_router": (e,), "bias_gate": (e, f), "bias_up": (e, f), "bias_down": (e, d)}
        if s:
            shapes |= {"shared_gate": (d, s), "shared_up": (d, s), "shared_down": (s, d)}
        return {name: shape for name, shape in shapes.items() if self.gated or not name.endswith("_gate")}


def init(key: Array, config: Config, dtype: DTypeLike = jnp.float32) -> Params:
    """The parameters of a layer: normal weights with variance 1 / (number of inputs), and biases that are 0.

    >>> params = init(jax.random.key(0), Config(d=8, f=16, experts=4, k=2))
    >>> {name: p.shape for name, p in params.items()}
    {'router': (8, 4), 'w_gate': (4, 8, 16), 'w_up': (4, 8, 16), 'w_down': (4, 16, 8)}
    """
    params: Params = {}
    for (name, shape), each in zip(config.shapes.items(), jax.random.split(key, len(config.shapes)), strict=True):
        if name.startswith("bias"):
            params[name] = jnp.zeros(shape, dtype)
        else:
            params[name] = jax.random.normal(each, shape, dtype) * jnp.asarray(shape[-2] ** -0.5, dtype)
    return params


def apply(
    params: Params,
    x: Float[Array, "*batch d"],
    config: Config,
    *,
    bias: Float[Array, " e"] | None = None,
    mask: Bool[Array, "*batch"] | None = None,
    experts: Integer[Array, "*batch k"] | None = None,
    mlp: Callable[..., Array] = moe_mlp,
) -> tuple[Float[Array, "*batch d"], Routing]:
    """The result of a layer, of the shape and dtype of x, and the routing, for losses, load and `update_bias`.

    The router is computed in float32. Parameters of experts are converted to the dtype of x, unless they are quantized.

    Args:
      params: what `init` returns. Weights of experts may be `quant.Scaled`.
      x: `[..., d]`, tokens in any arrangement. The routing has them in one axis.
      config: the static description of the layer.
      bias: `[e]`, added to scores for the choice of experts. It is not among the parameters because no gradient
        changes it, and no optimizer should.
      mask: `[...]`; where it is False, a token goes to no expert, and its result is 0.
      experts: `[..., k]`, given ids instead of the choice by score.
      mlp: what runs the experts: a function with the arguments of `moe_mlp` that returns the result alone. Over a mesh:
        `lambda *a, **o: parallel.moe_mlp(*a, axis="expert", **o)[0]`, without the load.

    >>> config = Config(d=8, f=16, experts=4, k=2)
    >>> y, routing = apply(init(jax.random.key(0), config), jnp.ones((2, 3, 8)), config)
    >>> y.shape, int(routing.sizes.sum())
    ((2, 3, 8), 12)
    """
    x = arguments.as_array("x", x)
    check_floats(x)
    arguments.check_type("config", config, Config, "a moe.Config")
    if not isinstance(params, Mapping):
        raise TypeError(f"params: want a dict of arrays by name, as moe.init returns; got {type(params).__name__}")
    if x.ndim < 1 or x.shape[-1] != config.d:
        raise ValueError(f"x: want [..., d] with d = {config.d}; got {x.shape}")
    _check(params, config, whole=mlp is moe_mlp)
    tokens, mask = flattened(x, x.ndim - 1), _flat("mask", mask, x.shape[:-1])
    if mask is not None:  # NaN of a masked token reaches no gradient of the router or of the shared expert
        tokens = jnp.where(mask[:, None], tokens, 0)
    routing = route(
        _logits(params, tokens), config.k, score=config.score, normalize=config.normalize, scale=config.scale,
        bias=bias, groups=config.groups, group_k=config.group_k, mask=mask,
        experts=_flat("experts", experts, (*x.shape[:-1], config.k)),
    )  # fmt: skip
    own = {name: _as(p, x.dtype) for name, p in params.items() if name not in ROUTER}
    biases = {name: own.get(name) for name in ("bias_gate", "bias_up", "bias_down")}
    y = mlp(
        tokens, routing, own.get("w_gate"), own["w_up"], own["w_down"], **biases,
        activation=config.activation, save=config.save, quantization=config.quantization,
    )  # fmt: skip
    if isinstance(y, tuple):
        raise TypeError("mlp: want a function that returns the result alone; got a tuple, as of parallel.moe_mlp")
    if config.shared:
        shared = _shared(own, tokens, config.activation)
        y = y + (shared if mask is None else jnp.where(mask[:, None], shared, 0))
    return unflattened(y, x), routing


def _check(params: Params, config: Config, *, whole: bool) -> None:
    """Raise an error unless params are those of the config; those of the router alone where others may be shards."""
    shapes = config.shapes
    missing, unknown = shapes.keys() - params.keys(), params.keys() - shapes.keys()
    for what, names in (("missing", missing), ("unknown", unknown)):
        if names:
            raise ValueError(f"params: want {', '.join(shapes)}, as config says; {what}: {', '.join(sorted(names))}")
    for name, want in shapes.items():
        if (whole or name in ROUTER) and tuple(jnp.shape(params[name])) != want:
            raise ValueError(
                f"params: want {name} of shape {want}, as config has it; got {tuple(jnp.shape(params[name]))}"
            )


def _logits(params: Params, tokens: Array) -> Array:
    """The logits [t, e] of the router in float32."""
    logits = tokens.astype(jnp.float32) @ params["router"].astype(jnp.float32)
    return logits + params["bias_router"].astype(jnp.float32)[None] if "bias_router" in params else logits


def _shared(params: Params, tokens: Array, activation: Activation) -> Array:
    """The result [t, d] of the expert that every token goes to."""
    inputs = (params[name] for name in ("shared_gate", "shared_up") if name in params)
    return activation(*(tokens @ w for w in inputs)) @ params["shared_down"]


def _flat(name: str, x: ArrayLike | None, shape: tuple[int, ...]) -> Array | None:
    """An argument with the leading axes of x, which become one."""
    if x is None:
        return None
    x = arguments.as_array(name, x)
    if x.shape != shape:
        raise ValueError(f"{name}: want shape {shape}; got {x.shape}")
    return flattened(x, x.ndim - (name == "experts"))


def _as(p: Any, dtype: DTypeLike) -> Any:
    """A parameter in the dtype of the tokens; quantized ones stay as they are."""
    return p.astype(dtype) if isinstance(p, jax.Array | np.ndarray) else p
