"""`moe_mlp` over a mesh, for programs that do not write `jax.shard_map`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec
from jaxtyping import Array, Float

from trencadis.core import arguments
from trencadis.core.activation import static_activation
from trencadis.core.alike import sharded_like
from trencadis.core.mesh import placed
from trencadis.core.programs import run_once
from trencadis.moe.activation import swiglu
from trencadis.moe.mlp import check_tokens
from trencadis.moe.routing import Load, Routing, check_routing
from trencadis.parallel.choice import Strategy
from trencadis.parallel.collectives import Axis, names_of, ordered_pvary
from trencadis.parallel.layer import MlpOptions, check_options, expert_parallel, load_over
from trencadis.quant.formats import FormatLike
from trencadis.quant.operand import Operand, array_operand, operand_specs
from trencadis.quant.scaled import Scaled


def moe_mlp(
    x: Float[Array, "t d"],
    routing: Routing,
    w_gate: Operand | None,
    w_up: Operand,
    w_down: Operand,
    *,
    axis: Axis,
    mesh: Mesh | None = None,
    data_axis: Axis = (),
    tensor_axis: Axis | None = None,
    strategy: Strategy | None = None,
    capacity: int | None = None,
    chunks: int = 1,
    ordered: bool = False,
    dispatch: FormatLike | None = None,
    **options: Unpack[MlpOptions],
) -> tuple[Float[Array, "t d"], Load]:
    """`trencadis.moe_mlp` of whole arrays over a mesh: experts sharded over `axis`, tokens over `axis` and `data_axis`.

    Arguments may lie on the devices in any way; what lies otherwise is moved. Weights that are sharded over other axes,
    as fully sharded data parallelism has them, are gathered as they are stored, quantized ones as bytes.

    Args:
      axis: the mesh axis over which the experts are sharded, and the tokens, too.
      mesh: the mesh; None is that of `jax.set_mesh`.
      data_axis: further mesh axes over which tokens are sharded; each of their shards has all experts.
      tensor_axis: a mesh axis over which f, the width of each expert, is sharded.
      x, routing, w_gate, w_up, w_down, options: those of `trencadis.moe_mlp`.
      strategy, capacity, chunks, ordered, dispatch: those of `expert_parallel`.

    Returns:
      The result `[t, d]`, and the `Load` of all experts.

    >>> from trencadis import moe
    >>> mesh = jax.make_mesh((1,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> x, router = jnp.ones((4, 8)), jax.random.normal(jax.random.key(0), (8, 3))
    >>> params = jnp.ones((3, 8, 16)) / 8, jnp.ones((3, 8, 16)) / 8, jnp.ones((3, 16, 8)) / 16
    >>> y, load = moe_mlp(x, moe.route(x @ router, 2), *params, axis="expert", mesh=mesh)
    >>> y.shape, load.rows.shape, int(load.dropped)
    ((4, 8), (3,), 0)
    """
    check_options(options)
    used = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    _check_axes(used, axis=axis, data_axis=data_axis, tensor_axis=() if tensor_axis is None else tensor_axis)
    data = names_of(data_axis)
    shards = math.prod(used.shape[name] for name in (*data, *names_of(axis)))
    x = arguments.as_array("x", x)
    check_tokens(x)
    if x.shape[0] % shards:
        raise ValueError(
            f"x: want a multiple of {shards} tokens, a part for each shard; got {x.shape[0]}. Pad x and mask the rest"
        )
    check_routing(routing)
    names = {"bias_gate": options.pop("bias_gate", None), "bias_up": options.pop("bias_up", None)}
    names |= {"bias_down": options.pop("bias_down", None)}
    params: dict[str, Any] = {"w_gate": w_gate, "w_up": w_up, "w_down": w_down} | names
    needed = "w_up", "w_down"
    params = {n: None if w is None and n not in needed else array_operand(n, w) for n, w in params.items()}
    for name, w in params.items():
        if w is not None and w.ndim != (rank := 3 if name.startswith("w_") else 2):
            raise ValueError(f"{name}: want {rank} dimensions; got {tuple(w.shape)}")
    experts, _, width = params["w_up"].shape
    _check_shards("w_up: want experts", experts, used, axis)
    _check_shards("w_up: want a last dimension f", width, used, tensor_axis)
    alike = {name: w if w is None or isinstance(w, Scaled) else sharded_like(w, w) for name, w in params.items()}
    given = (sharded_like(x, x), routing.experts, routing.weights, alike)  # and so are their gradients
    activation = options.pop("activation", swiglu())
    static = static_activation(activation, x.dtype, x.dtype, 1 if w_gate is None else 2)
    rest: dict[str, Any] = {"strategy": strategy, "capacity": capacity, "chunks": chunks, "dispatch": dispatch}
    layer = _Layer(
        mesh=mesh, axis=axis, data=data, tensor_axis=tensor_axis, ordered=ordered, num_experts=routing.sizes.shape[0],
        options=tuple({**rest, **options, "activation": static or activation}.items()),
    )  # fmt: skip
    # an activation over traced values is no part of a program that others may share
    return run_once(_run, (layer,), *given) if static is not None else _run(layer, *given)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """The static description of a layer over a mesh."""

    mesh: Mesh | None
    axis: Axis
    data: tuple[str, ...]
    tensor_axis: Axis | None
    ordered: bool
    num_experts: int
    options: tuple[tuple[str, Any], ...]  # of `expert_parallel`, by name

    def local(
        self, x: Array, experts: Array, weights: Array, params: dict[str, Any]
    ) -> tuple[Array, tuple[Array, ...]]:
        """The result of one device, and the load: rows of its own experts, dropped and imbalance of all."""
        if self.ordered:
            params = {name: _ordered(w, self.data) for name, w in params.items()}
        mine = Routing(experts, weights, jnp.zeros((x.shape[0], 0)), jnp.zeros((self.num_experts,), jnp.int32))
        options: dict[str, Any] = params | dict(self.options)
        matrices = [options.pop(name) for name in ("w_gate", "w_up", "w_down")]
        y, load = expert_parallel(
            x, mine, *matrices, axis=self.axis, ordered=self.ordered, tensor_axis=self.tensor_axis, **options
        )
        rows, dropped = (lax.psum(each, self.data) if self.data else each for each in load[:2])
        return y, tuple(load_over(self.axis, rows, lax.psum(dropped, self.axis)))


def _run(layer: _Layer, x: Array, experts: Array, weights: Array, params: dict[str, Any]) -> tuple[Array, Load]:
    """The result of all devices, and the load."""
    used = jax.sharding.get_abstract_mesh() if layer.mesh is None else layer.mesh
    tokens = PartitionSpec((*layer.data, *names_of(layer.axis)))
    specs = {name: _spec(name, w, layer.axis, layer.tensor_axis) for name, w in params.items()}
    in_specs = (tokens, tokens, tokens, specs)
    out_specs = (tokens, (PartitionSpec(layer.axis), PartitionSpec(), PartitionSpec()))
    mapped = jax.shard_map(layer.local, mesh=layer.mesh, in_specs=in_specs, out_specs=out_specs)
    y, load = mapped(*_placed(used, (x, experts, weights, params), in_specs))
    return y, Load(*load)


def _check_axes(mesh: Mesh | AbstractMesh, **axes: Axis) -> None:
    """Raise an error that names the argument unless the mesh has all of these axes."""
    if not isinstance(mesh, (Mesh, AbstractMesh)):
        raise TypeError(f"mesh: want a jax.sharding.Mesh, or None; got {type(mesh).__name__}")
    if mesh.empty:
        raise ValueError("mesh: want a mesh, or None inside of jax.set_mesh; got None without a mesh that is set")
    for name, given in axes.items():
        if not isinstance(given, (str, tuple)):
            raise TypeError(f"{name}: want the name of a mesh axis, or a tuple of names; got {given!r}")
        if not set(names_of(given)) <= set(mesh.axis_names):
            raise ValueError(f"{name}: want axes of the mesh, {', '.join(map(repr, mesh.axis_names))}; got {given!r}")
    every = [each for given in axes.values() for each in names_of(given)]
    if len(every) > len(set(every)):
        found = ", ".join(map(repr, every))
        raise ValueError(f"{', '.join(axes)}: want each axis of the mesh at most once; got {found}")


def _check_shards(wanted: str, length: int, mesh: Mesh | AbstractMesh, axis: Axis | None) -> None:
    """Raise an error unless the shards of a mesh axis divide a dimension evenly."""
    shards = math.prod(mesh.shape[name] for name in names_of(() if axis is None else axis))
    if length % shards:
        raise ValueError(f"{wanted} that the {shards} shards of {axis!r} divide evenly; got {length}")


def _spec(name: str, w: Any, axis: Axis, tensor_axis: Axis | None) -> Any:
    """The specs of the leaves of a parameter `[e, ...]`: experts over one axis, f over another."""
    if w is None:
        return None
    parts: list[Axis | None] = [axis, *[None] * (w.ndim - 1)]
    f = {"w_gate": 2, "w_up": 2, "w_down": 1, "bias_gate": 1, "bias_up": 1}.get(name)
    if f is not None:
        parts[f] = tensor_axis
    return operand_specs(w, parts)


def _placed(mesh: Mesh | AbstractMesh, given: Any, specs: Any) -> Any:
    """The arguments as specs say, over explicit mesh axes, which nothing else moves them over."""
    if not any(kind == AxisType.Explicit for kind in mesh.axis_types):
        return given
    return placed(mesh, given, specs)


def _ordered(w: Any, data: tuple[str, ...]) -> Any:
    """A parameter that lies on all shards of the data axes, with a gradient that is summed in their order."""
    return w if w is None or isinstance(w, Scaled) or not data else ordered_pvary(w, data)
