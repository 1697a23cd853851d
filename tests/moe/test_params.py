"""`init` and `apply` are `route`, `moe_mlp` and a shared expert, for tokens in any arrangement."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trencadis import moe, quant

pytestmark = pytest.mark.core

SMALL = moe.Config(d=6, f=5, experts=4, k=2, score="sigmoid", scale=2.5, biases=True, shared=3)
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 6)), jnp.float32)
BIAS = jnp.array([0.0, 0.3, -0.2, 0.1])


def written_out(params, x, config, bias=None, mask=None):
    """The layer from its parts, of tokens `[t, d]`."""
    routing = moe.route(
        x @ params["router"] + params["bias_router"], config.k, score="sigmoid", scale=2.5, bias=bias, mask=mask
    )
    biases = {name: params[name] for name in ("bias_gate", "bias_up", "bias_down")}
    y = moe.moe_mlp(x, routing, params["w_gate"], params["w_up"], params["w_down"], **biases)
    shared = (jax.nn.silu(x @ params["shared_gate"]) * (x @ params["shared_up"])) @ params["shared_down"]
    return y + shared, routing


def test_equals_its_parts():
    """The value, the routing and all gradients; those of the balance bias are 0."""
    params = moe.init(jax.random.key(0), SMALL)
    assert set(params) == set(SMALL.shapes) and all(params[name].shape == s for name, s in SMALL.shapes.items())
    params["bias_down"] = jnp.ones_like(params["bias_down"])

    def loss(params, x, bias):
        y, routing = moe.apply(params, x, SMALL, bias=bias)
        return jnp.sum(jnp.sin(y)), (y, routing)

    def expected(params, x, bias):
        y, routing = written_out(params, x.reshape(-1, 6), SMALL, bias)
        return jnp.sum(jnp.sin(y)), (y.reshape(x.shape), routing)

    def gradients(f):
        return jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2), has_aux=True))(params, X, BIAS)

    found = gradients(loss)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, gradients(expected))
    assert not np.any(found[1][2])


def test_masked_tokens_are_zero_and_their_nan_reaches_no_gradient():
    params = moe.init(jax.random.key(0), SMALL)
    mask = jnp.array([[True, True, False, True], [True, False, True, True]])

    def loss(params, x):
        y, _ = moe.apply(params, x, SMALL, mask=mask)
        return jnp.sum(jnp.sin(y)), y

    step = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
    clean, y = step(params, X)
    poisoned, there = step(params, X.at[~mask].set(jnp.nan))
    jax.tree.map(np.testing.assert_array_equal, (clean, y), (poisoned, there))
    assert not np.any(y[~mask]) and not np.any(clean[1][~mask])


def test_experts_may_be_given():
    params = moe.init(jax.random.key(0), SMALL)
    ids = jnp.tile(jnp.array([3, 1]), (2, 4, 1))
    _, routing = moe.apply(params, X, SMALL, experts=ids)
    np.testing.assert_array_equal(routing.sizes, [0, 8, 0, 8])


def test_dtypes():
    """The result has the dtype of x, the router is computed in float32, and quantized weights stay as they are."""
    config = moe.Config(d=6, f=5, experts=4, k=2, gated=False, activation=jax.nn.relu)
    params = moe.init(jax.random.key(0), config, jnp.bfloat16)
    assert "w_gate" not in params and all(p.dtype == jnp.bfloat16 for p in params.values())
    y, routing = moe.apply(params, X.astype(jnp.bfloat16), config)
    assert y.dtype == jnp.bfloat16 and routing.probs.dtype == jnp.float32
    stored = params | {name: quant.quantize(params[name], "int8", "column") for name in ("w_up", "w_down")}
    full = params | {name: stored[name].dequantize() for name in ("w_up", "w_down")}
    outs = [moe.apply(each, X, config)[0] for each in (stored, full)]
    np.testing.assert_allclose(*outs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("words", "change"),
    [
        (["x", "d = 6", "(2, 5)"], {"x": jnp.ones((2, 5))}),
        (["mask", "(2, 4)", "(8,)"], {"mask": jnp.ones(8, bool)}),
        (["experts", "(2, 4, 2)"], {"experts": jnp.ones((2, 4), jnp.int32)}),
    ],
)
def test_errors_name_the_argument(words, change):
    params = moe.init(jax.random.key(0), SMALL)
    with pytest.raises(ValueError) as error:
        moe.apply(**({"params": params, "x": X, "config": SMALL} | change))
    assert all(word in str(error.value) for word in words)
