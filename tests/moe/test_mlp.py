"""The layer equals a loop over tokens and experts in float64: its result and every gradient.

Programs are few and small, since compiling them is what takes the time. Laws of the layer's own rules, which hold for
any products, run on the backend `reference` by default, and on `xla` in the sweep.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.ad_checkpoint import saved_residuals

import trencadis as tr
from tests.moe.cases import (
    BACKENDS,
    DEFAULT,
    NAMES,
    D,
    E,
    F,
    T,
    call,
    check,
    close,
    compiled,
    parameters,
    plain,
    routings,
    same,
    value_and_gradients,
)
from tests.support import moe_oracle
from tests.support.sweep import sweep
from trencadis import moe, quant

pytestmark = pytest.mark.core


@pytest.fixture
def rng():
    return np.random.default_rng(7)


@pytest.mark.parametrize("name", sweep(NAMES, DEFAULT))
def test_equals_the_loop(rng, name):
    named = routings(rng)
    assert list(named) == NAMES
    check(rng, named[name], parameters(rng))


@given(st.integers(0, 2**31 - 1))
@settings(max_examples=10)
def test_equals_the_loop_for_any_routing(seed):
    """Any experts of each token, none among them, with any weights; all by one program."""
    rng = np.random.default_rng(seed)
    experts = jnp.asarray(rng.integers(-1, E + 1, (T, 2)) if seed % 3 else rng.choice([0, E - 1], (T, 2)), jnp.int32)
    routing = moe.route(jnp.asarray(rng.normal(size=(T, E)), jnp.float32), 2, experts=experts, normalize=bool(seed % 2))
    check(rng, routing, parameters(rng))


def test_biases(rng):
    check(rng, routings(rng)["masked"], parameters(rng, bias=True))


@pytest.mark.parametrize("other", [None, jnp.float32])
def test_biases_of_gate_and_up_need_not_be_alike(rng, other):
    """One of them may be missing, or have another dtype; a kernel reads both in one."""
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), parameters(rng, bias=True))
    params["bias_gate"] = None if other is None else params["bias_gate"].astype(other)
    x, routing = jnp.zeros((T, D), jnp.bfloat16), routings(rng)["top2"]
    layer = jax.jit(lambda x, params: call(routing, x, routing.weights, params))
    with tr.target("v5e"):
        assert "tpu_custom_call" in layer.trace(x, params).lower(lowering_platforms=("tpu",)).as_text()


@BACKENDS
@pytest.mark.parametrize("save", ["fast", "inputs"])
def test_what_is_saved_does_not_matter(rng, save, backend):
    check(rng, routings(rng)["masked"], parameters(rng), save=save, backend=backend)


@BACKENDS
def test_gpt_oss_activation(rng, backend):
    given = {"limit": 0.7, "alpha": 1.702, "shift": 1.0}
    params = parameters(rng, bias=True)
    check(rng, routings(rng)["top2"], params, oracle=given, activation=moe.swiglu(**given), backend=backend)


@BACKENDS
def test_without_a_gate(rng, backend):
    params = parameters(rng, gate=False, bias=True)
    check(rng, routings(rng)["masked"], params, activation=jax.nn.relu, backend=backend)


def test_the_result_of_an_activation_may_have_another_dtype(rng):
    """Its gradient is that of the same function, converted."""
    routing, params = routings(rng)["top2"], parameters(rng)
    x = jnp.asarray(rng.normal(size=(T, D)), jnp.float32)

    def slope(activation):
        return jax.jit(jax.grad(lambda x: call(routing, x, routing.weights, params, activation=activation).sum()))(x)

    narrow = lambda gate, up: (jnp.tanh(gate) * up).astype(jnp.bfloat16)
    same({"x": slope(narrow)}, {"x": slope(lambda *z: narrow(*z).astype(jnp.float32))})


@pytest.mark.parametrize("first", [0, 1, 2])
def test_windows_of_the_experts(rng, first):
    """Experts that are not there add nothing, to the result or to a gradient; the window is traced."""
    check(rng, routings(rng)["masked"], parameters(rng, experts=2), first=first)


def test_float64(rng, x64):
    """No step of the layer or of its gradients is narrower."""
    wide = lambda tree: jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape)), tree)
    params, routing = wide(parameters(rng, bias=True)), routings(rng)["top2"]
    x, ct, weights = (jnp.asarray(rng.normal(size=shape)) for shape in ((T, D), (T, D), (T, 2)))
    out, found = value_and_gradients(routing._replace(weights=weights), x, params, ct, backend="reference")
    want, wanted = moe_oracle.layer(x, routing.experts, weights, params, ct)
    same({"out": out, **found}, {"out": want, **wanted}, tolerance=1e-12)


def test_without_jit(rng):
    routing, params, x = routings(rng)["top2"], parameters(rng), jnp.asarray(rng.normal(size=(T, D)), jnp.float32)
    f = lambda x: call(moe.limit_rows(routing, 3)[0], x, routing.weights, params, backend="reference")
    with jax.disable_jit():
        routing = moe.route(jnp.asarray(rng.normal(size=(T, E)), jnp.float32), 2)
        out, slope = jax.value_and_grad(lambda x: jnp.sum(f(x) ** 2))(x)
    want, wanted = jax.value_and_grad(lambda x: jnp.sum(f(x) ** 2))(x)
    same({"out": out, "x": slope}, {"out": want, "x": wanted})


def test_no_tokens(rng):
    """The result is empty, and so are the gradients of tokens; those of the experts are zero."""
    routing, params, x = moe.route(jnp.zeros((0, E)), 2), parameters(rng, bias=True), jnp.zeros((0, D))
    out, gradients = value_and_gradients(routing, x, params, x)
    assert out.shape == (0, D) and gradients["weights"].shape == (0, 2)
    same(gradients, {name: np.zeros(np.shape(param)) for name, param in params.items()})


@pytest.mark.sweep
def test_the_window_may_be_static(rng):
    routing, params = routings(rng)["top2"], parameters(rng, experts=2)
    x = jnp.asarray(rng.normal(size=(T, D)), jnp.float32)
    want, _ = moe_oracle.layer(x, routing.experts, routing.weights, params, x, first=2)
    found = call(routing, x, routing.weights, params, group_offset=2)
    np.testing.assert_allclose(found, want, rtol=2e-5, atol=2e-5)


@BACKENDS
def test_gradients_reach_the_logits(rng, backend):
    """In reverse and in forward mode, they are those of the same layer without the package, whose routing is ours."""
    x, logits, tangent = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((T, D), (T, E), (T, E)))
    params = parameters(rng)

    def both(layer):
        def loss(logits):
            routing = moe.route(logits, 2)
            return jnp.sum(jnp.sin(layer(routing, x, routing.weights, params)))

        return jax.jit(lambda z: (jax.grad(loss)(z), jax.jvp(loss, (z,), (tangent,))))(logits)

    jax.tree.map(close, both(functools.partial(call, backend=backend)), both(plain))


# ---------------------------------------------------------------------------------------------------------------------
# Nothing leaks


def test_poison_stays_where_it_is(rng):
    """NaN in a masked token and in the weights of an unused expert reaches neither a value nor a gradient."""
    logits = jnp.asarray(rng.normal(size=(T, E)), jnp.float32).at[:, 3].set(-100.0)
    mask = jnp.arange(T) != 4
    x = jnp.asarray(rng.normal(size=(T, D)), jnp.float32)
    params, ct = parameters(rng, bias=True), jnp.asarray(rng.normal(size=(T, D)), jnp.float32)
    clean = value_and_gradients(moe.route(logits, 2, mask=mask), x, params, ct)
    poisoned = {name: p.at[3].set(jnp.nan) for name, p in params.items()}
    routing = moe.route(logits.at[4].set(jnp.nan), 2, mask=mask)
    found = value_and_gradients(routing, x.at[4].set(jnp.nan), poisoned, ct)
    jax.tree.map(np.testing.assert_array_equal, found, clean)
    assert not np.any(found[0][4]) and not np.any(found[1]["x"][4]) and not np.any(found[1]["weights"][4])
    assert all(not np.any(found[1][name][3]) for name in params)


def test_nan_of_one_token_stays_with_it_and_its_experts(rng):
    routing, params = routings(rng)["top2"], parameters(rng)
    x = jnp.asarray(rng.normal(size=(T, D)), jnp.float32).at[0].set(jnp.nan)
    out, gradients = value_and_gradients(routing, x, params, jnp.ones((T, D)))
    assert np.isnan(out[0]).all() and not np.isnan(out[1:]).any()
    assert not np.isnan(gradients["x"][1:]).any()
    for expert in set(range(E)) - set(routing.experts[0].tolist()):
        assert not np.isnan(gradients["up"][expert]).any()


# ---------------------------------------------------------------------------------------------------------------------
# What is kept, and what is compiled


@pytest.mark.parametrize(("save", "wanted"), [("least", 2 * F), ("fast", 2 * F + D), ("inputs", 0)])
def test_residuals(rng, save, wanted):
    """Beside the arguments, t * k rows of so many numbers are kept, and a few integers for each row."""
    routing, params = routings(rng)["top2"], parameters(rng)
    x = jnp.asarray(rng.normal(size=(T, D)), jnp.bfloat16)
    params = {name: None if p is None else p.astype(jnp.bfloat16) for name, p in params.items()}
    kept = saved_residuals(lambda *args: call(routing, *args, save=save).sum(), x, routing.weights, params)
    made = [aval for aval, source in kept if not source.startswith("from the argument")]
    assert sum(aval.size for aval in made if aval.dtype == jnp.bfloat16) == 2 * T * wanted
    assert sum(aval.size for aval in made if aval.dtype != jnp.bfloat16) <= 3 * 2 * T


@pytest.mark.parametrize("quantization", [None, quant.Recipe("int8", "int8")])
def test_residuals_of_inputs_alone(rng, quantization):
    """Also where the layer's own backward pass is not used."""
    routing, params = routings(rng)["top2"], parameters(rng)
    x = jnp.asarray(rng.normal(size=(T, D)), jnp.float32)

    def loss(x, alpha):
        options = {"activation": moe.swiglu(alpha=alpha), "save": "inputs", "quantization": quantization}
        return call(routing, x, routing.weights, params, **options, backend="reference").sum()

    kept = saved_residuals(loss, x, jnp.float32(1.5))
    assert not [
        aval for aval, source in kept if aval.ndim > 1 and "argument" not in source and "constant" not in source
    ]


def test_no_scatter_of_floats_and_no_tensor_of_tokens_experts_and_features(rng):
    routing, params = routings(rng)["top2"], parameters(rng, bias=True)
    x = jnp.zeros((T, D))
    text = compiled.lower(routing, x, routing.weights, params, x, None, ()).compile().as_text()
    assert not [line for line in text.splitlines() if " scatter(" in line and "f32[" in line.split(" scatter(")[0]]
    for shape in ((T, E, D), (T, E, F), (T, 2, E, D), (T, 2, E, F)):
        assert f"[{','.join(map(str, shape))}]" not in text


def test_equal_layers_are_lowered_once(rng):
    routing, params = routings(rng)["top2"], parameters(rng)
    x = jnp.zeros((T, D))

    def stack(depth):
        def layers(x):
            for _ in range(depth):
                x = x + call(routing, x, routing.weights, params)
            return x.sum()

        return len(jax.jit(jax.grad(layers)).lower(x).as_text())

    assert stack(8) < 1.5 * stack(2)


# ---------------------------------------------------------------------------------------------------------------------
# Transformations


@BACKENDS
def test_second_order_and_forward_mode(rng, backend):
    routing, params = routings(rng)["masked"], parameters(rng)
    x = jnp.asarray(rng.normal(size=(T, D)), jnp.float32)
    args = (x, routing.weights, params)

    def derivatives(layer):
        loss = lambda *args: jnp.sum(jnp.tanh(layer(routing, *args)))
        squares = lambda x: jnp.sum(jax.grad(loss, argnums=2)(x, *args[1:])["gate"] ** 2)
        hessian = lambda x: jax.jvp(lambda x: jax.grad(loss)(x, *args[1:]), (x,), (x,))[1]
        return jax.jit(lambda *args: (jax.jvp(loss, args, args), jax.grad(squares)(args[0]), hessian(args[0])))(*args)

    jax.tree.map(close, derivatives(functools.partial(call, backend=backend)), derivatives(plain))


@BACKENDS
def test_vmap_remat_scan_and_shard_map(rng, backend):
    """Each gives the gradients of one layer after the other."""
    routing, params = routings(rng)["top2"], parameters(rng)
    x = jnp.asarray(rng.normal(size=(4, T, D)), jnp.float32)
    weights = jnp.stack([routing.weights, routing.weights + 0.1, routing.weights, routing.weights - 0.1])

    def loss(x, weights, params):
        return jnp.sum(jnp.tanh(call(routing, x, weights, params, backend=backend)))

    gradients = jax.value_and_grad(loss, argnums=(0, 1, 2))
    one = jax.jit(gradients)
    want = jax.tree.map(lambda *xs: jnp.stack(xs), *(one(x[i], weights[i], params) for i in range(4)))
    summed = jax.tree.map(lambda g: g.sum(0), want[1][2])
    jax.tree.map(close, jax.jit(jax.vmap(gradients, in_axes=(0, 0, None)))(x, weights, params), want)

    def scanned(params):
        step = jax.checkpoint(lambda total, xw: (total + loss(*xw, params), None))
        return jax.lax.scan(step, 0.0, (x, weights))[0]

    jax.tree.map(close, jax.jit(jax.grad(scanned))(params), summed)

    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    sharded = jax.shard_map(
        lambda x, w, params: jax.lax.psum(loss(x[0], w[0], params), "data"),
        mesh=mesh, in_specs=(spec("data"), spec("data"), spec()), out_specs=spec(),
    )  # fmt: skip
    jax.tree.map(close, jax.jit(jax.grad(sharded, argnums=2))(x, weights, params), summed)


@BACKENDS
def test_an_activation_over_traced_values(rng, backend):
    """Then the layer's own backward pass is not used, and the gradient of what it closes over is there."""
    routing, params = routings(rng)["top2"], parameters(rng)
    x = jnp.asarray(rng.normal(size=(T, D)), jnp.float32)

    def both(layer, swiglu):
        def loss(slope):
            return jnp.sum(layer(routing, x, routing.weights, params, activation=swiglu(alpha=slope, shift=slope**2)))

        return jax.jit(lambda slope: (jax.grad(loss)(slope), jax.jvp(loss, (slope,), (1.0,))))(0.7)

    def written_out(alpha, shift):
        return lambda gate, up: gate / (1 + jnp.exp(-alpha * gate)) * (up + shift)

    jax.tree.map(close, both(functools.partial(call, backend=backend), moe.swiglu), both(plain, written_out))


def test_deterministic(rng):
    routing, params = routings(rng)["top2"], parameters(rng)
    x = jnp.asarray(rng.normal(size=(T, D)), jnp.float32)
    runs = [value_and_gradients(routing, x, params, x) for _ in range(2)]
    jax.tree.map(np.testing.assert_array_equal, *runs)


# ---------------------------------------------------------------------------------------------------------------------
# Errors

INT8 = quant.Scaled(np.ones((E, D, F), np.int8), np.ones((E, 1, F), np.float32), "int8", (1, D, 1))


@pytest.mark.parametrize(
    ("words", "change"),
    [
        (["x", "[t, d]"], {"x": jnp.ones((T, 2, D))}),
        (["x", "int32"], {"x": jnp.ones((T, D), jnp.int32)}),
        (["x", "16 bits", "float8_e4m3fn"], {"x": jnp.ones((T, D), "float8_e4m3fn")}),
        (["routing", "moe.route", "tuple"], {"routing": (1, 2)}),
        (["w_up", "d = 6"], {"w_up": jnp.ones((E, D + 1, F))}),
        (["w_up: holds 4 experts", "routing has 5", "group_offset"], {"routing": moe.route(jnp.ones((T, E + 1)), 2)}),
        (["w_down", "(4, 5, 6)", "(4, 6, 5)"], {"w_down": jnp.ones((E, D, F))}),
        (["w_down", "(4, 5, 6)", "None"], {"w_down": None}),
        (["group_offset", "[1, 5)", "4 groups"], {"group_offset": 1}),
        (["bias_up", "(4, 5)"], {"bias_up": jnp.ones((E, D))}),
        (["bias_gate", "w_gate"], {"w_gate": None, "bias_gate": jnp.ones((E, F)), "activation": jax.nn.relu}),
        (["activation", "one number"], {"w_gate": None}),
        (["activation", "two numbers"], {"activation": jax.nn.relu}),
        (["save", "'least'", "'much'"], {"save": "much"}),
        (["backend", "'cuda'"], {"backend": "cuda"}),
        (["quantization", "Recipe"], {"quantization": "int8"}),
        (["quantization", "quantized already"], {"w_gate": INT8, "quantization": quant.Recipe("int8", "int8")}),
    ],
)
def test_errors_name_the_argument(rng, words, change):
    params = parameters(rng)
    given = {"x": jnp.ones((T, D)), "routing": routings(rng)["top2"], "w_gate": params["gate"]}
    given |= {"w_up": params["up"], "w_down": params["down"]}
    with pytest.raises((ValueError, TypeError)) as error:
        tr.moe_mlp(**(given | change))
    assert all(word in str(error.value) for word in words)


def test_symbolic_shapes_are_refused(rng):
    (t,), params = jax.export.symbolic_shape("t"), parameters(rng)
    x = jax.ShapeDtypeStruct((t, D), jnp.float32)
    with pytest.raises(ValueError, match="x: want a shape of ints"):
        jax.eval_shape(lambda x: tr.moe_mlp(x, moe.route(x[:, :E], 2), None, params["up"], params["down"]), x)
    with pytest.raises(ValueError, match="experts: want a shape of ints"):
        jax.eval_shape(lambda x: moe.limit_rows(moe.route(x, 2), 3), x)
