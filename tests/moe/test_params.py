"""`init` and `apply` are `route`, `moe_mlp` and a shared expert, for tokens in any arrangement."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from trencadis import moe, quant

pytestmark = pytest.mark.core

SMALL = moe.Config(d=6, f=5, experts=4, k=2, score="sigmoid", scale=2.5, biases=True, shared=3)
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 2, 6)), jnp.float32)
PARAMS = moe.init(jax.random.key(0), SMALL)
BIAS = jnp.array([0.0, 0.3, -0.2, 0.1])


def gradients(layer):
    """A compiled function of params, x, bias and mask: gradients in the first three, and the results."""

    def loss(params, x, bias, mask):
        y, routing = layer(params, x, bias, mask)
        return jnp.sum(jnp.sin(y)), (y, routing)

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))


@gradients
def ours(params, x, bias, mask):
    return moe.apply(params, x, SMALL, bias=bias, mask=mask)


@gradients
def written_out(params, x, bias, mask):
    """The layer from its parts."""
    mask, tokens = mask.ravel(), x.reshape(-1, 6)
    logits = tokens @ params["router"] + params["bias_router"]
    routing = moe.route(logits, 2, score="sigmoid", scale=2.5, bias=bias, mask=mask)
    biases = {name: params[name] for name in ("bias_gate", "bias_up", "bias_down")}
    y = moe.moe_mlp(tokens, routing, params["w_gate"], params["w_up"], params["w_down"], **biases, backend="reference")
    shared = (jax.nn.silu(tokens @ params["shared_gate"]) * (tokens @ params["shared_up"])) @ params["shared_down"]
    return (y + jnp.where(mask[:, None], shared, 0)).reshape(x.shape), routing


def test_equals_its_parts():
    """The value, the routing and all gradients; those of the balance bias are 0."""
    params = moe.init(jax.random.key(0), SMALL)
    assert {name: p.shape for name, p in params.items()} == SMALL.shapes
    params["bias_down"] = jnp.ones_like(params["bias_down"])
    for mask in (jnp.ones((2, 2), bool), jnp.array([[True, False], [True, True]])):
        found, want = (f(params, X, BIAS, mask) for f in (ours, written_out))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, want)
        assert not np.any(found[0][2])


def test_masked_tokens_are_zero_and_their_nan_reaches_no_gradient():
    params, mask = moe.init(jax.random.key(0), SMALL), jnp.array([[True, False], [True, True]])
    clean = ours(params, X, BIAS, mask)
    jax.tree.map(np.testing.assert_array_equal, clean, ours(params, X.at[~mask].set(jnp.nan), BIAS, mask))
    assert not np.any(clean[1][0][~mask]) and not np.any(clean[0][1][~mask])


def test_experts_may_be_given():
    params = moe.init(jax.random.key(0), SMALL)
    ids = jnp.tile(jnp.array([3, 1]), (2, 2, 1))
    routing = jax.jit(lambda: moe.apply(params, X, SMALL, experts=ids)[1])()
    np.testing.assert_array_equal(routing.sizes, [0, 4, 0, 4])


def test_dtypes():
    """The result has the dtype of x, the router is computed in float32, and quantized weights stay as they are."""
    config = moe.Config(d=6, f=5, experts=4, k=2, gated=False, activation=jax.nn.relu)
    params = moe.init(jax.random.key(0), config, jnp.bfloat16)
    assert "w_gate" not in params and all(p.dtype == jnp.bfloat16 for p in params.values())
    y, routing = jax.eval_shape(lambda x: moe.apply(params, x, config), X.astype(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16 and routing.probs.dtype == jnp.float32
    stored = params | {name: quant.quantize(params[name], "int8", "column") for name in ("w_up", "w_down")}
    full = params | {name: stored[name].dequantize() for name in ("w_up", "w_down")}
    run = jax.jit(lambda params: moe.apply(params, X, config)[0])
    np.testing.assert_allclose(run(stored), run(full), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "promotion", [lambda: jax.numpy_dtype_promotion("strict"), lambda: jax.numpy_rank_promotion("raise")]
)
def test_without_implicit_promotion(promotion):
    """Nothing has to be compiled to see it."""

    def loss(params, x):
        y, routing = moe.apply(params, x, SMALL, bias=BIAS, mask=jnp.ones((2, 2), bool))
        limited, load = moe.limit_rows(routing, 2)
        bias = moe.update_bias(BIAS, limited.sizes, 1e-3)
        losses = moe.balance_loss(limited) + moe.z_loss(x[0].astype(jnp.float32), mask=jnp.ones(2, bool))
        return jnp.sum(y.astype(jnp.float32)) + losses + load.imbalance + jnp.sum(bias)

    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    with promotion():
        jax.jit(jax.grad(loss, (0, 1))).lower(params, X.astype(jnp.bfloat16))


@pytest.mark.parametrize("spec", [P("a"), P(None, "b"), P("a", "b"), P(None, "b", "a")])
def test_tokens_that_are_sharded_over_explicit_axes(spec):
    """The result is sharded like x, and the routing over the mesh axes of all tokens."""
    x, mask = (
        jnp.asarray(np.random.default_rng(1).normal(size=(2, 4, 6)), jnp.float32),
        jnp.arange(8).reshape(2, 4) % 3 > 0,
    )
    layer = lambda params, x: moe.apply(params, x, SMALL, mask=mask)
    y, routing = layer(PARAMS, x)
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        found, sharded = jax.jit(layer)(PARAMS, jax.device_put(x, NamedSharding(mesh, spec)))
    assert jax.typeof(found).sharding.spec == P(*spec, *(None,) * (3 - len(spec)))
    np.testing.assert_allclose(np.asarray(found), y, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(sharded.experts), routing.experts)


def without(name):
    return {key: p for key, p in PARAMS.items() if key != name}


@pytest.mark.parametrize(
    ("words", "change"),
    [
        (["x", "d = 6", "(2, 5)"], {"x": jnp.ones((2, 5))}),
        (["x", "array", "str"], {"x": "tokens"}),
        (["params", "missing: bias_down", "router, w_gate"], {"params": without("bias_down")}),
        (["params", "missing: router"], {"params": without("router")}),
        (["params", "unknown: w_side"], {"params": PARAMS | {"w_side": X}}),
        (["params", "dict of arrays by name", "list"], {"params": [1]}),
        (["config", "moe.Config", "dict"], {"config": PARAMS}),
        (["x", "floats of 16 bits", "int32"], {"x": jnp.ones((2, 2, 6), jnp.int32)}),
        (["params", "w_up", "(4, 6, 5)", "(4, 6, 3)"], {"params": PARAMS | {"w_up": PARAMS["w_up"][:, :, :3]}}),
        (["mask", "(2, 2)", "(4,)"], {"mask": jnp.ones(4, bool)}),
        (["mask", "booleans", "float32"], {"mask": jnp.zeros((2, 2))}),
        (["experts", "(2, 2, 2)"], {"experts": jnp.ones((2, 2), jnp.int32)}),
        (["mlp", "the result alone", "tuple"], {"mlp": lambda x, *experts, **options: (x, None)}),
    ],
)
def test_errors_name_the_argument(words, change):
    with pytest.raises((ValueError, TypeError)) as error:
        moe.apply(**({"params": PARAMS, "x": X, "config": SMALL} | change))
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("d: want an int of at least 1; got 8.0", {"d": 8.0}),
        ("f: want an int of at least 1; got 0", {"f": 0}),
        ("shared: want an int of at least 0; got -3", {"shared": -3}),
        ("k: want at most 4, the number of experts; got 9", {"k": 9}),
        ("groups: want an int, a divisor of the number of experts, 4; got 3", {"groups": 3, "group_k": 1}),
        ("groups, group_k: want both or neither; got 2 and None", {"groups": 2}),
        (r"activation: want a function of two numbers, such as moe.swiglu\(\); got 'silu'", {"activation": "silu"}),
        ("activation: want a function of one number, since gated is False; got SwiGLU", {"gated": False}),
        ("score: want one of 'softmax'", {"score": "foo"}),
        ("save: want one of 'least'", {"save": "all"}),
    ],
)
def test_a_config_is_checked_when_it_is_made(message, change):
    with pytest.raises((TypeError, ValueError), match=message):
        dataclasses.replace(SMALL, **change)


def test_a_layer_and_its_routing_can_be_serialized():
    """`apply` returns a Routing, and code that sorts by itself a Permutation."""

    def layer(params, x):
        y, routing = moe.apply(params, x, SMALL)
        return y, routing, moe.load_of(routing), moe.sort_by_expert(routing.experts, SMALL.experts)

    exported = jax.export.export(jax.jit(layer))(PARAMS, X)
    found = jax.export.deserialize(exported.serialize()).call(PARAMS, X)
    jax.tree.map(np.testing.assert_array_equal, found, jax.jit(layer)(PARAMS, X))
    assert isinstance(found[1], moe.Routing) and isinstance(found[3], moe.Permutation)
