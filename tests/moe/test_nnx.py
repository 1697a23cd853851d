"""The Flax module is `apply` with its parameters as variables, and a bias that only its rule changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trencadis import moe, quant
from trencadis.moe.nnx import BalanceBias, MoE

pytestmark = pytest.mark.core

CONFIG = moe.Config(d=6, f=5, experts=4, k=2, score="sigmoid", shared=3, gated=False, activation=jax.nn.relu)
X = jnp.asarray(np.random.default_rng(0).normal(size=(2, 2, 6)), jnp.float32)


@pytest.fixture
def layer():
    return MoE(CONFIG, rngs=nnx.Rngs(0))


def params_of(layer):
    return {name: getattr(layer, name).get_value() for name in CONFIG.shapes}


def test_value_and_gradients_are_those_of_the_function(layer):
    """With a bias, masked tokens, and gradients of the parameters alone."""
    bias, mask = jnp.array([1.0, 0.0, -1.0, 0.0]), jnp.arange(4).reshape(2, 2) != 3
    layer.balance_bias.set_value(bias)

    @nnx.jit
    def step(layer, x):
        def loss(layer):
            y, routing = layer(x, mask=mask)
            return jnp.sum(jnp.sin(y)), (y, routing)

        return nnx.grad(loss, has_aux=True)(layer)

    @jax.jit
    def expected(params, x):
        def loss(params):
            y, routing = moe.apply(params, x, CONFIG, bias=bias, mask=mask)
            return jnp.sum(jnp.sin(y)), (y, routing)

        return jax.grad(loss, has_aux=True)(params)

    (gradients, found), (wanted, want) = step(layer, X), expected(params_of(layer), X)
    jax.tree.map(np.testing.assert_array_equal, found, want)
    assert set(gradients) == set(wanted) == set(CONFIG.shapes)
    for name in wanted:
        np.testing.assert_array_equal(gradients[name].get_value(), wanted[name])


def test_the_bias_is_updated_by_its_rule_inside_of_jit(layer):
    """An optimizer of `nnx.Param` never sees it, and it makes the load even."""
    assert set(nnx.state(layer, nnx.Param)) == set(CONFIG.shapes)
    x = jax.random.normal(jax.random.key(1), (256, 6)) + 1.0  # the mean makes some experts more frequent

    @nnx.jit
    def step(layer):
        _, routing = layer(x)
        layer.update_bias(routing.sizes, 0.02)
        return moe.load_of(routing).imbalance

    imbalance = [float(step(layer)) for _ in range(100)]
    assert imbalance[0] > 1.3 and imbalance[-1] < 1.1
    biases = jax.tree.leaves(nnx.state(layer, BalanceBias))
    assert len(biases) == 1 and np.any(biases[0])


def test_quantized_experts_may_take_the_place_of_parameters(layer):
    full = {name: getattr(layer, name).get_value() for name in ("w_up", "w_down")}
    stored = {name: quant.quantize(w, "int8", "column") for name, w in full.items()}
    for name, w in stored.items():
        setattr(layer, name, nnx.Param(w))
    wide = params_of(layer) | {name: w.dequantize() for name, w in stored.items()}
    want = jax.jit(lambda params: moe.apply(params, X, CONFIG)[0])(wide)
    np.testing.assert_allclose(nnx.jit(lambda layer: layer(X)[0])(layer), want, rtol=1e-4, atol=1e-4)


def test_layers_may_be_stacked_and_scanned():
    """vmap makes a stack of layers, and scan runs them, as NNX does with any module."""

    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def stack(rngs):
        return MoE(CONFIG, rngs=rngs)

    layers = stack(nnx.Rngs(0))

    @nnx.jit
    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=(nnx.Carry, 0))
    def run(layer, x):
        y, routing = layer(x)
        return x + y, routing.sizes

    y, sizes = run(layers, X)
    want, one = X, jax.jit(lambda params, x: x + moe.apply(params, x, CONFIG)[0])
    for i in range(3):
        want = one({name: getattr(layers, name).get_value()[i] for name in CONFIG.shapes}, want)
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(sizes.sum(axis=1), [8] * 3)
