"""`expert_parallel`: the experts of an MoE layer inside `jax.shard_map`, each shard with some of them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection
from typing import Any, TypedDict, Unpack

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from trencadis.core import arguments
from trencadis.core.activation import Activation
from trencadis.core.jax_compat import mesh_platform, vary_over
from trencadis.moe.layer import Save
from trencadis.moe.mlp import check_tokens, moe_mlp
from trencadis.moe.permutation import ids_of
from trencadis.moe.routing import Load, Routing, check_routing_for, imbalance
from trencadis.parallel import all_gather, exchange
from trencadis.parallel.choice import Strategy, check_strategy, choose, worst_case
from trencadis.parallel.collectives import Axis, names_of, ordered_psum, ordered_pvary, size_of
from trencadis.parallel.setting import Setting, dispatch_format
from trencadis.quant.formats import FormatLike
from trencadis.quant.operand import Operand, array_operand
from trencadis.quant.recipe import Recipe

RUN = {"all_gather": all_gather.run, "all_to_all": exchange.padded, "ragged": exchange.ragged}


class MlpOptions(TypedDict, total=False):
    """The options of `moe_mlp`, for the experts of a shard."""

    bias_gate: Float[Array, "e f"] | None
    bias_up: Float[Array, "e f"] | None
    bias_down: Float[Array, "e d"] | None
    activation: Activation
    save: Save
    quantization: Recipe | None
    backend: str | None


def expert_parallel(
    x: Float[Array, "t d"],
    routing: Routing,
    w_gate: Operand | None,
    w_up: Operand,
    w_down: Operand,
    *,
    axis: Axis,
    strategy: Strategy | None = None,
    capacity: int | None = None,
    chunks: int = 1,
    ordered: bool = False,
    dispatch: FormatLike | None = None,
    tensor_axis: Axis | None = None,
    **options: Unpack[MlpOptions],
) -> tuple[Float[Array, "t d"], Load]:
    """The same as `moe_mlp`, inside `jax.shard_map`, with the experts sharded over a mesh axis.

    Args:
      x: `[t, d]`, the tokens of this shard, as many on each.
      routing: what `route` returns for them, over all experts.
      w_gate: `[e / shards, d, f]`, consecutive experts, those of shard i after those of shard i - 1; or None.
      w_up: `[e / shards, d, f]`, likewise.
      w_down: `[e / shards, f, d]`, likewise.
      axis: the mesh axis, or a tuple of them, over which tokens and experts are sharded.
      strategy: "all_gather": all tokens to all shards, and a reduce-scatter of the results; "all_to_all": tokens to the
        shards of their experts, in blocks of equal length; "ragged": the same with as many rows as there are, by
        `lax.ragged_all_to_all`. None: that which moves the fewest rows on the platform of the mesh.
      capacity: the most rows that a shard computes. None: as many as there can be, `shards * t * min(k, e / shards)`,
        so that nothing is dropped. "all_to_all" divides it among the shards that rows
        come from, rounded up. Rows beyond it, of later tokens and shards, add nothing, and are counted.
      chunks: how many parts the tokens are divided into, so that one part travels while another is multiplied. Capacity
        is divided, too.
      ordered: floats are added in the order of the shards, by this layer and its gradients, so that results are
        bitwise equal however devices are divided among processes. See `ordered_psum` and `ordered_pvary`.
      dispatch: a format of 8 bits, such as "float8_e4m3fn", in which tokens travel, with a scale for each. Gradients
        and results travel in the dtype of x.
      tensor_axis: a mesh axis over which f of the weights is sharded. The result is summed over it.
      options: those of `moe_mlp`.

    Returns:
      The result `[t, d]`, and a `Load`: the rows of each of this shard's experts, how many assignments to them were
      dropped, and the imbalance over all experts, which is the same on all shards. Nothing waits for the host.

    >>> import jax, trencadis as tr
    >>> from trencadis import moe
    >>> mesh = jax.make_mesh((1,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> x, router = jnp.ones((4, 8)), jax.random.normal(jax.random.key(0), (8, 3))
    >>> params = jnp.ones((3, 8, 16)) / 8, jnp.ones((3, 8, 16)) / 8, jnp.ones((3, 16, 8)) / 16
    >>> def layer(x, router, *params):
    ...     return expert_parallel(x, moe.route(x @ router, 2), *params, axis="expert")[0]
    >>> here, all = jax.sharding.PartitionSpec("expert"), jax.sharding.PartitionSpec()
    >>> mapped = jax.shard_map(layer, mesh=mesh, in_specs=(here, all, here, here, here), out_specs=here)
    >>> [round(float(y), 3) for y in jax.jit(mapped)(x, router, *params)[:, 0]]
    [0.731, 0.731, 0.731, 0.731]
    """
    check_options(options)
    x = arguments.as_array("x", x)
    up = array_operand("w_up", w_up)
    shards, local = size_of(axis), up.shape[0]
    _check(x, routing, shards, local, strategy, capacity, chunks)
    routing = routing._replace(experts=ids_of(routing.experts, routing.sizes.shape[0]))
    sizes: dict[str, Any] = dict(shards=shards, tokens=x.shape[0], k=routing.experts.shape[1], local=local)
    if not x.shape[0]:  # nothing travels
        none = vary_over(jnp.zeros(local, jnp.int32), names_of(axis))
        return x, load_over(axis, none, jnp.sum(none))
    chosen = strategy or choose(mesh_platform(), capacity=capacity, **sizes)
    bias = options.get("bias_down")
    if tensor_axis is not None and bias is not None:  # it is added once, not by every shard of f
        options["bias_down"] = jnp.where(lax.axis_index(tensor_axis) == 0, bias, 0)
    vary = functools.partial(_vary, tensor_axis, ordered)
    compute = functools.partial(_compute, local, vary, (w_gate, up, w_down), options)
    experts, weights = _merged(routing) if sizes["k"] > local else routing[:2]
    x, experts, weights = (vary_over(each, names_of(axis)) for each in (x, experts, weights))
    inputs = vary(x), experts, weights  # so that gradients are summed over tensor_axis as [t, d], not as rows
    parts = []
    for tokens in _split(x.shape[0], chunks):
        most = worst_case(shards, tokens.stop - tokens.start, sizes["k"], local)
        room = most if capacity is None else min(most, -(-capacity // chunks))
        setting = Setting(
            axis=axis, shards=shards, local=local, ordered=ordered, dispatch=dispatch_format(dispatch),
            capacity=-(-room // shards) * shards if chosen == "all_to_all" else room,
        )  # fmt: skip
        parts.append(RUN[chosen](setting, compute, *(each[tokens] for each in inputs)))
    y = jnp.concatenate([part.y for part in parts]) if chunks > 1 else parts[0].y
    if tensor_axis is not None:
        y = ordered_psum(y, tensor_axis) if ordered else lax.psum(y, tensor_axis)
    rows, dropped = (functools.reduce(jnp.add, each) for each in ([p.rows for p in parts], [p.dropped for p in parts]))
    return y, load_over(axis, rows, dropped)


def _compute(
    local: int, vary: Callable[[Array], Array], params: tuple[Any, Any, Any], options: MlpOptions,
    x: Array, experts: Array, weights: Array,
) -> Array:  # fmt: skip
    """The experts of this shard, of rows whose experts are numbered from 0; `local` is no expert."""
    unused = jnp.zeros((x.shape[0], 0)), jnp.zeros((local,), jnp.int32)
    return moe_mlp(x, Routing(experts, vary(weights), *unused), *params, **options)


def _merged(routing: Routing) -> tuple[Array, Array]:
    """Experts and weights without repetitions: an expert that a token names again adds its weight to the first."""
    experts, weights = routing.experts, routing.weights
    same = experts[:, :, None] == experts[:, None, :]  # [t, k, k]
    k = experts.shape[1]
    first = ~jnp.any(same & (jnp.arange(k)[:, None] > jnp.arange(k)[None])[None], axis=2)
    total = jnp.sum(jnp.where(same, weights[:, None, :], 0), axis=2)
    return jnp.where(first, experts, routing.sizes.shape[0]), jnp.where(first, total, 0)


def _vary(tensor_axis: Axis | None, ordered: bool, x: Array) -> Array:
    """The array as one that varies over tensor_axis, over which its gradient is summed here."""
    if tensor_axis is None:
        return x
    return ordered_pvary(x, tensor_axis) if ordered else vary_over(x, names_of(tensor_axis))


def _split(tokens: int, chunks: int) -> list[slice]:
    """Consecutive parts of almost equal length."""
    ends = np.linspace(0, tokens, chunks + 1).astype(int).tolist()
    return [slice(low, high) for low, high in itertools.pairwise(ends)]


def load_over(axis: Axis, rows: Array, dropped: Array) -> Load:
    """The load of the experts of all shards of an axis, given the rows of this shard's; without a host sync."""
    mean = lax.psum(jnp.sum(rows), axis).astype(jnp.float32) / (rows.shape[0] * lax.axis_size(axis))
    busiest = lax.pmax(jnp.max(rows, initial=0), axis)
    return Load(rows, dropped.astype(jnp.int32), imbalance(busiest, mean))


def check_options(options: Collection[str]) -> None:
    """Raise unless each name is that of an option for the experts of a shard."""
    unknown = [name for name in options if name not in MlpOptions.__annotations__]
    if unknown:
        raise TypeError(f"{unknown[0]}: no option of this layer; want one of {', '.join(MlpOptions.__annotations__)}")


def _check(
    x: Array, routing: Routing, shards: int, local: int, strategy: str | None, capacity: int | None, chunks: int
) -> None:
    """Raise an error that names the argument; `moe_mlp` checks the others."""
    check_tokens(x)
    check_routing_for(routing, x.shape[0])
    if shards * local != routing.sizes.shape[0]:
        raise ValueError(
            f"w_up: want the {routing.sizes.shape[0]} experts of the routing over {shards} shards, as many on each; "
            f"got {local} on this one"
        )
    if strategy is not None:
        check_strategy(strategy)
    if capacity is not None and (not arguments.is_int(capacity) or capacity < 1):
        raise ValueError(f"capacity: want an int of at least 1 row, or None; got {capacity!r}")
    if not arguments.is_int(chunks) or not 1 <= chunks <= max(x.shape[0], 1):
        raise ValueError(f"chunks: want an int between 1 and the {x.shape[0]} tokens of x; got {chunks!r}")
