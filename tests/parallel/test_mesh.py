"""The layer over meshes of several axes: data, experts and the width of an expert; weights sharded in other ways."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import trencadis as tr
from tests.parallel import cases
from tests.support.sweep import sweep
from trencadis import moe, parallel, quant
from trencadis.inspect.collectives import collectives

pytestmark = pytest.mark.core

NAMES = ("x", "router", "gate", "up", "down", "bias")


def given():
    rng = np.random.default_rng(3)
    more = {"router": (cases.D, cases.E), "bias": (cases.E, cases.D), "gate": (cases.E, cases.D, 4)}
    more |= {"up": (cases.E, cases.D, 4), "down": (cases.E, 4, cases.D)}
    return cases.numbers() | {name: rng.normal(size=shape).astype(np.float32) for name, shape in more.items()}


def layer(mlp, x, router, gate, up, down, bias):
    return mlp(x, moe.route(x @ router, cases.K), gate, up, down, bias_down=bias, backend="reference")


def gradients(function, ct, *inputs):
    y, pull = jax.vjp(function, *inputs)
    return y, *pull(ct)


@functools.cache
def single():
    """The result and the gradients of one device."""
    numbers = given()
    return jax.jit(functools.partial(gradients, functools.partial(layer, tr.moe_mlp)))(
        numbers["ct"], *(numbers[name] for name in NAMES)
    )


MESHES = [(kind, ordered) for kind in (AxisType.Auto, AxisType.Explicit) for ordered in (False, True)]


@pytest.mark.parametrize(("kind", "ordered"), sweep(MESHES, [MESHES[0], MESHES[3]]))
def test_data_experts_and_tensor_axes(kind, ordered):
    """Values, gradients of everything, also through the router, and the shardings of fully sharded weights."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "expert", "tensor"), axis_types=(kind,) * 3)
    mlp = functools.partial(
        parallel.moe_mlp, mesh=mesh, axis="expert", data_axis="data", tensor_axis="tensor", ordered=ordered
    )
    numbers = given()
    call = jax.jit(
        functools.partial(gradients, functools.partial(layer, lambda *xs, **options: mlp(*xs, **options)[0]))
    )
    over = {"x": P(("data", "expert")), "gate": P("expert", "data", "tensor"), "up": P("expert", "data", "tensor")}
    over |= {"ct": over["x"], "down": P("expert", "tensor", "data"), "router": P(), "bias": P("expert")}
    placed = {name: jax.device_put(numbers[name], NamedSharding(mesh, spec)) for name, spec in over.items()}
    found = call(placed["ct"], *(placed[name] for name in NAMES))
    for got, want in zip(found, single(), strict=True):
        oracle.check(got, np.asarray(want))
    for got, name in zip(found, ("ct", *NAMES), strict=True):
        assert got.sharding.is_equivalent_to(placed[name].sharding, got.ndim)


def test_the_load_of_all_shards():
    mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)
    numbers = given()

    @jax.jit
    def both(x, router, *params):
        routing = moe.route(x @ router, cases.K)
        return parallel.moe_mlp(x, routing, *params, mesh=mesh, axis="expert", data_axis="data", capacity=4)[1], routing

    load, routing = both(*(numbers[name] for name in NAMES[:-1]))
    assert load.dropped > 0
    assert load.rows.sum() + load.dropped == routing.sizes.sum() == cases.T * cases.K
    np.testing.assert_allclose(load.imbalance, load.rows.max() / load.rows.mean())


def test_the_mesh_in_use():
    """Without the argument it is that of `jax.set_mesh`."""
    numbers = given()
    with jax.set_mesh(cases.mesh_of(2)):
        call = jax.jit(functools.partial(layer, lambda *xs, **o: parallel.moe_mlp(*xs, axis="e", **o)[0]))
        oracle.check(call(*(numbers[name] for name in NAMES)), np.asarray(single()[0]))


def test_tokens_that_shards_do_not_divide():
    numbers = given()
    routing = moe.route(numbers["x"][:15] @ numbers["router"], cases.K)
    experts = (numbers[name] for name in ("gate", "up", "down"))
    with pytest.raises(ValueError, match="x: want a multiple of 2 tokens, a part for each shard; got 15"):
        parallel.moe_mlp(numbers["x"][:15], routing, *experts, mesh=cases.mesh_of(2), axis="e")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mesh": None}, "mesh: want a mesh, or None inside of jax.set_mesh; got None without a mesh that is set"),
        ({"mesh": "e"}, "mesh: want a jax.sharding.Mesh, or None; got str"),
        ({"axis": ["e"]}, "axis: want the name of a mesh axis, or a tuple of names; got ['e']"),
        ({"axis": None}, "axis: want the name of a mesh axis, or a tuple of names; got None"),
        ({"axis": "expert"}, "axis: want axes of the mesh, 'e'; got 'expert'"),
        ({"data_axis": ("e", "d")}, "data_axis: want axes of the mesh, 'e'; got ('e', 'd')"),
        ({"tensor_axis": "f"}, "tensor_axis: want axes of the mesh, 'e'; got 'f'"),
        ({"x": None}, "x: want an array; got NoneType"),
        ({"routing": None}, "routing: want what moe.route returns; got NoneType"),
        ({"data_axis": "e"}, "axis, data_axis, tensor_axis: want each axis of the mesh at most once; got 'e', 'e'"),
        ({"w_up": None}, "w_up: want an array; got NoneType"),
        ({"w_up": np.ones((6, 4), np.float32)}, "w_up: want 3 dimensions; got (6, 4)"),
        ({"w_up": np.ones((5, 6, 4), np.float32)}, "w_up: want experts that the 2 shards of 'e' divide evenly; got 5"),
        (
            {"axis": (), "tensor_axis": "e", "w_up": np.ones((8, 6, 5), np.float32)},
            "w_up: want a last dimension f that the 2 shards of 'e' divide evenly; got 5",
        ),
        ({"group_offset": 1}, "group_offset: no option of this layer; want one of bias_gate"),
    ],
)
def test_errors_name_the_argument(change, message):
    numbers = given()
    routing = moe.route(numbers["x"] @ numbers["router"], cases.K)
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        given_to = {f"w_{name}": numbers[name] for name in ("gate", "up", "down")} | {"x": numbers["x"]}
        given_to |= {"routing": routing, "mesh": cases.mesh_of(2), "axis": "e"}
        parallel.moe_mlp(**(given_to | change))


@pytest.mark.parametrize("strategy", parallel.STRATEGIES)
@pytest.mark.parametrize(
    "promotion", [lambda: jax.numpy_dtype_promotion("strict"), lambda: jax.numpy_rank_promotion("raise")]
)
def test_without_implicit_promotion(strategy, promotion):
    numbers, mesh = given(), cases.mesh_of(2)
    x, *experts = (jnp.asarray(numbers[name], jnp.bfloat16) for name in ("x", "gate", "up", "down"))
    routing = moe.route(numbers["x"] @ numbers["router"], 5)  # of 4 experts of a shard

    def loss(x):
        y, load = parallel.moe_mlp(x, routing, *experts, mesh=mesh, axis="e", strategy=strategy)
        return jnp.sum(y.astype(jnp.float32)) + load.imbalance

    with promotion():
        jax.jit(jax.grad(loss)).lower(x)


# ---------------------------------------------------------------------------------------------------------------------
# Weights that are sharded over another axis


def gathered(mesh, w, spec, dim):
    """The whole weights, which every device has, and the program's text."""
    whole = lambda w: jax.lax.pmax(parallel.gather_weights(w, "d", dim).dequantize(), "d")
    call = jax.jit(jax.shard_map(whole, mesh=mesh, in_specs=(spec,), out_specs=P()))
    return call(w), call.lower(w).compile().as_text()


BYTES = [(format, each) for format in ("int8", "int4", "float8_e4m3fn") for each in ("column", (1, 4, 1))]


@pytest.mark.parametrize(("format", "granularity"), sweep(BYTES, [("int8", "column"), ("int4", (1, 4, 1))]))
def test_quantized_weights_are_gathered_as_bytes(format, granularity):
    """Scales that all shards have are not gathered; others are, with the values."""
    shards = 2
    mesh = jax.make_mesh((shards,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:shards])
    w = quant.quantize(jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 4)), jnp.float32), format, granularity)
    along = P(None, None, "d")  # k is stored last
    spec = quant.Scaled.tree_unflatten(
        w.tree_flatten()[1], (along, P() if granularity == "column" else along, None, None)
    )
    whole, text = gathered(mesh, w, spec, 1)
    np.testing.assert_array_equal(whole, w.dequantize())
    moved = w.nbytes if granularity != "column" else w.values.size * (1 if format != "int4" else 0.5)
    assert sum(c.received for c in collectives(text, shards) if c.kind == "all-gather") == moved / 2


@pytest.mark.parametrize("ordered", [False, True])
def test_gradients_of_sharded_weights_are_scattered(ordered):
    mesh = cases.mesh_of(4)
    w, c = (np.random.default_rng(i).normal(size=(2, 8, 3)).astype(np.float32) for i in range(2))

    def loss(w, scale):
        whole = parallel.gather_weights(w, "e", ordered=ordered)
        return jax.lax.psum(jnp.sum(whole * c * scale[0]), "e")

    mapped = jax.shard_map(loss, mesh=mesh, in_specs=(P(None, "e"), P("e")), out_specs=P())
    gradient = jax.jit(jax.grad(mapped))(w, np.arange(4.0, dtype=np.float32))
    oracle.check(gradient, c * 6.0)


def test_quantized_weights_in_one_call_are_gathered_as_bytes():
    """Those that are sharded over the data axis, too, as for fully sharded data parallelism."""
    mesh = jax.make_mesh((2, 2), ("data", "expert"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    numbers = given()
    experts = [quant.quantize(jnp.asarray(numbers[name]), "int8", "column") for name in ("gate", "up", "down")]
    routing = moe.route(numbers["x"] @ numbers["router"], cases.K)
    want = tr.moe_mlp(jnp.asarray(numbers["x"]), routing, *experts, backend="reference")
    place = lambda x: jax.device_put(x, NamedSharding(mesh, P("expert", "data" if x.dtype == jnp.int8 else None)))
    experts = [jax.tree.map(place, w) for w in experts]
    mlp = functools.partial(parallel.moe_mlp, mesh=mesh, axis="expert", data_axis="data", backend="reference")
    call = jax.jit(lambda x, *ws: mlp(x, routing, *ws)[0]).lower(numbers["x"], *experts).compile()
    oracle.check(call(numbers["x"], *experts), np.asarray(want))
    assert sum("= s8[" in line and " all-gather(" in line for line in call.as_text().splitlines()) == 3
