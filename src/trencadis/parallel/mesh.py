"""`moe_mlp` over a mesh, for programs that do not write `jax.shard_map`."""

from __future__ import annotations

import math
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec
from jaxtyping import Array, Float

from trencadis.core.alike import sharded_like
from trencadis.core.mesh import placed
from trencadis.moe.routing import Load, Routing
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
    data = names_of(data_axis)
    used = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    _check_axes(used, axis=axis, data_axis=data_axis, tensor_axis=() if tensor_axis is None else tensor_axis)
    shards = math.prod(used.shape[name] for name in (*data, *names_of(axis)))
    if jnp.shape(x)[0] % shards:
        raise ValueError(f"x: want tokens that {shards} shards divide evenly, padded and masked; got {jnp.shape(x)[0]}")
    names = {"bias_gate": options.pop("bias_gate", None), "bias_up": options.pop("bias_up", None)}
    names |= {"bias_down": options.pop("bias_down", None)}
    params: dict[str, Any] = {"w_gate": w_gate, "w_up": w_up, "w_down": w_down} | names
    params = {name: None if w is None else array_operand(name, w) for name, w in params.items()}
    tokens = PartitionSpec((*data, *names_of(axis)))
    specs = {name: _spec(name, w, axis, tensor_axis) for name, w in params.items()}

    def local(x: Array, experts: Array, weights: Array, params: dict[str, Any]) -> tuple[Array, tuple[Array, ...]]:
        if ordered:
            params = {name: _ordered(w, data) for name, w in params.items()}
        mine = Routing(experts, weights, jnp.zeros((x.shape[0], 0)), jnp.zeros(routing.sizes.shape, jnp.int32))
        matrices = (params.pop(name) for name in ("w_gate", "w_up", "w_down"))
        y, load = expert_parallel(
            x, mine, *matrices, axis=axis, strategy=strategy, capacity=capacity, chunks=chunks, ordered=ordered,
            dispatch=dispatch, tensor_axis=tensor_axis, **params, **options,
        )  # fmt: skip
        rows, dropped = (lax.psum(each, data) if data else each for each in load[:2])
        return y, tuple(load_over(axis, rows, lax.psum(dropped, axis)))

    alike = {name: w if w is None or isinstance(w, Scaled) else sharded_like(w, w) for name, w in params.items()}
    x = jnp.asarray(x)
    given = (sharded_like(x, x), routing.experts, routing.weights, alike)  # and so are their gradients
    in_specs = (tokens, tokens, tokens, specs)
    out_specs = (tokens, (PartitionSpec(axis), PartitionSpec(), PartitionSpec()))
    y, load = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs)(*_placed(used, given, in_specs))
    return y, Load(*load)


def _check_axes(mesh: Mesh | AbstractMesh, **axes: Axis) -> None:
    """Raise an error that names the argument unless the mesh has all of these axes."""
    if mesh.empty:
        raise ValueError("mesh: want a mesh, or None inside of jax.set_mesh; got None without a mesh that is set")
    for name, given in axes.items():
        if not set(names_of(given)) <= set(mesh.axis_names):
            raise ValueError(f"{name}: want axes of the mesh, {', '.join(map(repr, mesh.axis_names))}; got {given!r}")


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
