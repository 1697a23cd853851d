"""A layer on a mesh with explicit axes: values and gradients of one device, and what the devices exchange."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import trencadis as tr
from tests.support.sweep import sweep
from trencadis import moe, quant
from trencadis.quant.operand import operand_specs

pytestmark = pytest.mark.core

T, D, F, E = 32, 6, 4, 4
COLLECTIVES = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
GATHER = {"all-gather", "reduce-scatter"}
LAYOUTS = {  # axes of tokens, experts, d and f of the weights; and the kinds of collectives
    "data": ("d", None, None, None, {"all-reduce"}),
    "data over both": (("d", "e"), None, None, None, {"all-reduce"}),
    "data and experts": ("d", "e", None, None, {"all-reduce"}),
    "data and width": ("d", None, None, "e", {"all-reduce"}),
    "one axis": (("e", "d"), "e", None, None, {"all-reduce"} | GATHER),
    "experts, width and data": ("d", "e", None, "d", {"all-reduce"} | GATHER),
    "fully sharded": ("d", None, "d", None, {"all-reduce"} | GATHER),  # weights are gathered, gradients scattered
}


@functools.cache
def mesh():
    return jax.make_mesh((2, 2), ("d", "e"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])


def put(x, *axes):
    return jax.device_put(x, NamedSharding(mesh(), P(*axes)))


@functools.cache
def numbers(tokens=T):
    rng = np.random.default_rng(0)
    shapes = (tokens, D), (D, E), (E, D, F), (E, D, F), (E, F, D), (E, F), (E, D)
    return [jnp.asarray(rng.normal(size=shape) / 2, jnp.float32) for shape in shapes]


def layer(x, router, gate, up, down, bias_up, bias_down, **options):
    routing = moe.route(x @ router, 2, mask=jnp.arange(x.shape[0]) != 3)
    options = {"backend": "reference", "bias_up": bias_up, "bias_down": bias_down} | options
    return tr.moe_mlp(x, routing, gate, up, down, **options)


def step(call):
    both = lambda *args: (call(*args), jax.grad(lambda *args: jnp.sum(jnp.sin(call(*args))), range(len(args)))(*args))
    return jax.jit(both)


def placed(tokens, e, d, f):
    specs = (tokens,), (), (e, d, f), (e, d, f), (e, f, d), (e, f), (e, None)
    return [put(x, *axes) for x, axes in zip(numbers(), specs, strict=True)]


@functools.cache
def expected(recipe):
    return step(functools.partial(layer, quantization=recipe))(*numbers())


def close(got, want):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5), got, want)


RECIPE = quant.Recipe("int8", "int8", "int8")
CASES = [(layout, recipe) for layout in LAYOUTS for recipe in (None, RECIPE)]
DEFAULT = [("one axis", None), ("fully sharded", None)]


@pytest.mark.parametrize(("layout", "recipe"), sweep(CASES, DEFAULT))
def test_equals_one_device(layout, recipe):
    *axes, kinds = LAYOUTS[layout]
    given = placed(*axes)
    compiled = step(functools.partial(layer, quantization=recipe)).lower(*given).compile()
    value, gradients = compiled(*given)
    close((value, gradients), expected(recipe))
    assert [jax.typeof(x).sharding.spec for x in (value, *gradients)] == [
        jax.typeof(x).sharding.spec for x in (given[0], *given)
    ]
    text = compiled.as_text()
    assert set(re.findall(rf" ({COLLECTIVES})\(", text)) <= kinds
    if layout == "fully sharded":  # sums of gradients are scattered, and no device has all of them
        assert not re.search(r"\[\d+,\d+,\d+\]\S* all-reduce\(", text)


@pytest.mark.parametrize("gated", [True, False])
def test_weights_that_are_sharded_in_different_ways(gated):
    """The last dimension of each over the data axis, or another one: gradients are sharded like what they are of."""
    last, other = ("e", None, "d"), ("e", "d", None)
    x, router, gate, up, down, *biases = placed("d", None, None, None)
    inputs = [put(gate, *last), put(up, *other)] if gated else [put(up, *last)]
    given = [x, router, *inputs, put(down, *last), *biases]
    without = lambda x, router, *rest: layer(x, router, None, *rest, activation=jax.nn.relu)
    _, gradients = jax.eval_shape(step(layer if gated else without), *given)
    assert [g.sharding.spec for g in gradients] == [jax.typeof(each).sharding.spec for each in given]


def test_quantized_weights_over_experts_and_width():
    """Scales are divided with the values they belong to."""
    x, router, *weights = numbers()[:5]
    call = jax.jit(lambda x, *ws: tr.moe_mlp(x, moe.route(x @ router, 2), *ws, backend="reference"))
    experts = [quant.quantize(w, "int8", "column") for w in weights]
    specs = map(operand_specs, experts, [("e", None, "d"), ("e", None, "d"), ("e", "d", None)])
    sharded = jax.tree.map(lambda leaf, spec: put(leaf, *spec), experts, list(specs))
    close(call(put(x, "d"), *sharded), call(x, *experts))


@pytest.mark.sweep
def test_vmap_of_a_sharded_axis():
    xs = jnp.stack([numbers()[0], 2 * numbers()[0]])
    several = jax.jit(jax.vmap(layer, in_axes=(0, *[None] * 6)))
    given = placed(None, "e", None, None)[1:]
    close(several(put(xs, "d"), *given), several(xs, *numbers()[1:]))


def test_no_tokens():
    x, *rest = numbers()
    value, gradients = step(layer)(put(x[:0], "d"), *rest)
    assert value.shape == (0, D) and not any(np.any(g) for g in gradients)


def test_routing_is_that_of_one_device():
    """All options; sizes are those of all tokens, and everything else stays with the tokens."""
    logits = numbers()[0] @ numbers()[1]
    options = {"bias": jnp.arange(4.0) / 8, "groups": 2, "group_k": 1, "scale": jnp.arange(1.0, 5), "score": "sigmoid"}

    @jax.jit
    def route(logits, mask):
        routing = moe.route(logits, 2, mask=mask, **options)
        return routing, moe.limit_rows(routing, 3)

    mask = jnp.arange(T) % 5 != 0
    routing, limited = route(put(logits, ("d", "e")), put(mask, ("d", "e")))
    close((routing, limited), route(logits, mask))
    assert jax.typeof(routing.experts).sharding.spec == P(("d", "e"), None)
