"""Layers of weights that are quantized, and of recipes for training."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import trencadis as tr
from tests.moe.cases import BACKENDS, D, E, T, call, close, parameters, routings
from tests.support.sweep import marked, sweep
from trencadis import moe, quant

pytestmark = pytest.mark.core


@pytest.fixture
def rng():
    return np.random.default_rng(7)


@pytest.mark.parametrize("format", sweep(["int4", "float8_e4m3fn", "mxfp4"], ["mxfp4"]))
def test_quantized_weights(rng, format):
    """The result is that of the dequantized weights, and so is the gradient of x."""
    routing = routings(rng)["top2"]
    wide = {"gate": (E, 32, 32), "up": (E, 32, 32), "down": (E, 32, 32)}
    stored = {
        n: quant.quantize(jnp.asarray(rng.normal(size=s), jnp.float32), format, contracting=1) for n, s in wide.items()
    }
    x = jnp.asarray(rng.normal(size=(T, 32)), jnp.float32)
    full = {name: w.dequantize() for name, w in stored.items()}

    @jax.jit
    @jax.value_and_grad
    def found(x, w):
        return jnp.sum(jnp.tanh(tr.moe_mlp(x, routing, w["gate"], w["up"], w["down"], backend="reference")))

    jax.tree.map(close, found(x, stored), found(x, full))


@BACKENDS
def test_quantization_for_training(rng, backend):
    """A recipe gives the products of grouped_dense with it."""
    routing, params = routings(rng)["top2"], parameters(rng, bias=True)
    x = jnp.asarray(rng.normal(size=(T, D)), jnp.float32)
    recipe = quant.Recipe("int8", "int8")

    def composed(x, params):
        permutation = moe.sort_by_expert(routing.experts, E)
        dense = functools.partial(tr.grouped_dense, group_sizes=permutation.sizes, quantization=recipe, backend=backend)
        rows = moe.permute(x, permutation)
        gate, up = (dense(rows, params[name], bias=params[f"bias_{name}"]) for name in ("gate", "up"))
        y = dense(jax.nn.silu(gate) * up, params["down"], bias=params["bias_down"])
        return jnp.sum(jnp.tanh(moe.combine(y, routing.weights, permutation)))

    def loss(x, params):
        y = call(routing, x, routing.weights, params, quantization=recipe, backend=backend)
        return jnp.sum(jnp.tanh(y))

    found, want = (jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(x, params) for f in (loss, composed))
    jax.tree.map(close, found, want)


@pytest.mark.parametrize("lhs", ["mxfp8", marked("int8"), marked((("int8", "tensor"),))])
def test_tokens_are_quantized_before_they_become_rows(rng, lhs):
    """The numbers are those of quantized rows, with a window and a masked NaN too; and 8-bit rows are gathered."""
    t, d, f, e = 10, 64, 32, 4
    routing = moe.route(jnp.asarray(rng.normal(size=(t, e)), jnp.float32), 2, mask=jnp.arange(t) != 3)
    x = jnp.asarray(rng.normal(size=(t, d)) * np.exp(rng.normal(size=(t, 1))), jnp.float32).at[3].set(jnp.nan)
    w = {name: jnp.asarray(rng.normal(size=s), jnp.float32) for name, s in (("up", (2, d, f)), ("down", (2, f, d)))}
    options = dict(quantization=quant.Recipe(lhs, "int8", "int8"), group_offset=1, backend="reference")
    permutation = moe.sort_by_expert(routing.experts, e)

    def ours(x, w):
        return jnp.sum(jnp.sin(tr.moe_mlp(x, routing, None, w["up"], w["down"], activation=jnp.tanh, **options)))

    def composed(x, w):
        z = tr.grouped_dense(moe.permute(x, permutation), w["up"], permutation.sizes, **options)
        y = tr.grouped_dense(jnp.tanh(z), w["down"], permutation.sizes, **options)
        return jnp.sum(jnp.sin(moe.combine(y, routing.weights, permutation)))

    found, want = (jax.jit(jax.value_and_grad(g, argnums=(0, 1)))(x, w) for g in (ours, composed))
    jax.tree.map(np.testing.assert_array_equal, found, want)
    text = jax.jit(ours).lower(x, w).compile().as_text()
    moved = re.findall(rf"= (\w+)\[{2 * t},1,{d}\]\S* gather\(", text)
    assert moved and "f32" not in moved


def test_quantization_with_an_activation_over_traced_values(rng):
    """The recipe is obeyed, whatever the activation closes over."""
    routing, params = routings(rng)["top2"], parameters(rng)
    x = jnp.asarray(rng.normal(size=(T, D)), jnp.float32)

    @jax.jit
    def both(one):
        run = functools.partial(call, routing, x, routing.weights, params, quantization=quant.Recipe("int8", "int8"))
        return run(backend="reference"), run(
            backend="reference", activation=lambda gate, up: jax.nn.silu(one * gate) * up
        )

    np.testing.assert_allclose(*both(1.0), rtol=1e-5, atol=1e-5)


class Clipped(quant.Recipe):
    """A recipe with a state of its own."""

    def __init__(self, factor):
        super().__init__("int8", "int8")
        object.__setattr__(self, "factor", factor)

    def bound(self, name, absmax):
        return absmax * self.factor


def test_recipes_with_a_state_are_not_taken_for_others(rng):
    assert quant.Recipe("int8", "int8") == quant.Recipe("int8", "int8") != Clipped(1.0) != Clipped(0.5)
    x, up, down = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((3, 8), (2, 8, 4), (2, 4, 8)))
    routing = moe.route(x[:, :2], 1)
    layer = functools.partial(tr.moe_mlp, x, routing, None, up, down, activation=jnp.abs)
    run = lambda factor: layer(quantization=Clipped(factor))
    whole, half, traced = run(1.0), run(0.5), jax.jit(run)(0.5)
    assert np.abs(whole - half).max() > 0.1
    close(traced, half)
    changing = Clipped(1.0)
    close(layer(quantization=changing), whole)
    object.__setattr__(changing, "factor", 0.5)
    close(layer(quantization=changing), half)


def test_a_recipe_that_holds_an_array_on_explicit_axes(rng):
    """It has no hash, so that its programs are those of one call."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
    x, w = (jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((8, 4), (4, 4, 4)))
    recipe, sizes = Clipped(jnp.float32(0.5)), jnp.array([3, 0, 4, 1])
    product = functools.partial(tr.grouped_dense, group_sizes=sizes, quantization=recipe)
    close(product(put(x, "d"), put(w)), product(x, w))
    layer = lambda x, w: tr.moe_mlp(x, moe.route(x, 1), None, w, w, activation=jnp.abs, quantization=recipe)
    assert jax.eval_shape(layer, put(x, "d"), put(w)).sharding.spec == PartitionSpec("d", None)
