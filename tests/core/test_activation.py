"""Activations as parts of a problem: which are equal, and what is traced again."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trencadis as tr
from trencadis import moe, parallel
from trencadis.core.activation import elementwise, inlined, static_activation

pytestmark = pytest.mark.core

F32 = np.dtype("float32")


@pytest.mark.parametrize(
    "activation",
    [
        jax.nn.relu,
        jax.nn.silu,
        lambda z: jax.nn.gelu(z, approximate=False),
        lambda z: jax.lax.fori_loop(0, 3, lambda _, y: y * 0.5, z),
        lambda z: jax.lax.scan(lambda y, _: (y + z, None), z, None, length=2)[0],
        lambda z: jax.lax.cond(z > 0, jnp.sin, jax.nn.softplus, z),
        lambda z: jax.lax.while_loop(lambda y: y < 3, lambda y: y + 1, z),
    ],
)
def test_inlined_means_the_same(activation):
    for z in (-1.5, 0.25, 2.0):
        np.testing.assert_allclose(inlined(activation)(jnp.float32(z)), activation(jnp.float32(z)), rtol=1e-6)


def test_elementwise_by_construction():
    z = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(elementwise(lambda x: jnp.where(x > 2, x, -x))(z), jnp.where(z > 2, z, -z))
    with pytest.raises(ValueError, match="one number"):
        static_activation(jnp.cumsum, F32, F32)


def test_a_traced_value_inside_keeps_it_out_of_kernels():
    assert static_activation(jax.nn.gelu, F32, F32)
    seen = []
    jax.jit(lambda b: seen.append(static_activation(lambda z: z * b, F32, F32)) or b)(2.0)
    jax.grad(lambda b: seen.append(static_activation(lambda z: z * b, F32, F32)) or b)(2.0)
    assert seen == [None, None]


@pytest.mark.parametrize("value", [jnp.float32, np.float32, lambda x: jnp.array([x]), lambda x: np.array([x])])
def test_activations_are_equal_only_if_they_compute_the_same(value):
    """Arrays that a jitted function closes over are not in the text of its jaxpr."""

    def times(number, wrap):
        held = value(number)
        return static_activation(wrap(lambda z: jnp.reshape(z * held, ())), F32, F32)

    for wrap in (lambda f: f, jax.jit, lambda f: lambda z: jax.jit(jax.jit(f))(z) + 1, jax.checkpoint):
        assert times(2.0, wrap) != times(3.0, wrap)


READ = {}  # what activations read, as they would a global variable


@dataclasses.dataclass(frozen=True)
class Sloped:
    """A frozen value of a user, which reads a variable all the same."""

    factor: float = 1.0
    hidden: float = dataclasses.field(default=1.0, compare=False)

    def __call__(self, *z):
        return functools.reduce(jnp.multiply, z) * self.factor * self.hidden * READ["slope"]


READERS = [
    lambda *z: functools.reduce(jnp.multiply, z) * READ["slope"],
    Sloped(),
    functools.wraps(jax.nn.relu)(lambda *z: functools.reduce(jnp.multiply, z) * READ["slope"]),
]


def layer_of(rows, **options):
    """A function of an activation: the first number of an MoE layer of ones, which is 4 times the slope."""
    x, w = jnp.ones((rows, 2)), jnp.ones((1, 2, 2))
    routing = moe.route(jnp.ones((rows, 1)), 1)
    return lambda activation: tr.moe_mlp(x, routing, None, w, w, activation=activation, **options)[0, 0]


def over_mesh(rows):
    """The same by `parallel.moe_mlp`, over a mesh of one device."""
    mesh = jax.make_mesh((1,), ("e",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    x, w = jnp.ones((rows, 2)), jnp.ones((1, 2, 2))
    routing = moe.route(jnp.ones((rows, 1)), 1)
    layer = functools.partial(parallel.moe_mlp, x, routing, None, w, w, axis="e", mesh=mesh)
    return lambda activation: layer(activation=activation)[0][0, 0]


def product_of(rows):
    """The same of a grouped matmul, whose sums are 3, and then the result is 4 / 3 of them."""
    x, w = jnp.full((rows, 3), 4 / 3), jnp.ones((1, 3, 2))
    return lambda activation: tr.grouped_matmul(x, w, [rows], backend="reference", activation=activation)[0, 0]


@pytest.mark.parametrize("activation", READERS, ids=["lambda", "frozen", "wrapped"])
@pytest.mark.parametrize("of", [product_of, layer_of, over_mesh])
def test_an_activation_may_read_a_variable_that_changes(of, activation):
    """Outside of jit a call computes what the function is then, and never what another was with the same text."""
    call = of(2)
    for READ["slope"] in (1.0, 2.0):
        np.testing.assert_allclose(call(activation), 4 * READ["slope"], rtol=1e-6)
    np.testing.assert_allclose(call(lambda z: z * 1.0), 4, rtol=1e-6)
    np.testing.assert_allclose(of(3)(lambda z: z * 1.0), 4, rtol=1e-6)  # a program of its own, by the same text


@pytest.mark.parametrize("make", [jnp.float32, lambda x: np.full(1, x, np.float32), lambda x: jnp.full(3, x)[1]])
def test_an_activation_may_close_over_an_array_that_changes(make):
    held = [make(1.0)]
    activation = lambda z: jnp.reshape(z * held[0], ())
    for slope in (1.0, 3.0):
        held[0] = make(slope)
        np.testing.assert_allclose(product_of(2)(activation), 4 * slope, rtol=1e-6)
    if isinstance(held[0], np.ndarray):
        held[0][:] = 5
        np.testing.assert_allclose(product_of(2)(activation), 20, rtol=1e-6)


@pytest.mark.parametrize("size", [20, 2**17, 2**19])
def test_an_activation_may_hold_a_table_that_changes(size):
    """Also one that is too large to tell by its values whether it is the same."""

    class Table:
        def __init__(self, values):
            self.values = values

        def __call__(self, z):
            return jnp.interp(z, jnp.linspace(0, 10, size), self.values)

    activation, line = Table(jnp.linspace(0.0, 10.0, size)), jnp.linspace(0.0, 10.0, size)
    for slope in (1.0, 3.0):
        activation.values = line * slope
        np.testing.assert_allclose(product_of(2)(activation), 4 * slope, rtol=1e-4)


@pytest.mark.parametrize("of", [product_of, layer_of])
def test_a_call_computes_what_its_activation_was_when_it_was_traced(of):
    """As everything else under jit does; and another one of the same operations is not changed by it."""
    call, slope = of(2), lambda z: z * READ["slope"]
    READ["slope"] = 2.0
    first = jax.jit(lambda s: call(lambda z: slope(z) * s))
    jax.eval_shape(first, 1.0)
    jitted = jax.jit(lambda: call(slope))
    jax.eval_shape(jitted)
    gradient = jax.grad(
        lambda x: tr.grouped_matmul(x, jnp.ones((1, 3, 2)), [2], activation=slope, backend="reference").sum()
    )
    early = jax.jit(gradient).lower(jnp.ones((2, 3)))
    READ["slope"] = 5.0
    np.testing.assert_allclose(jitted(), 8, rtol=1e-6)
    np.testing.assert_allclose(call(lambda z: z * 2.0), 8, rtol=1e-6)
    np.testing.assert_allclose(early.compile()(jnp.ones((2, 3))), np.full((2, 3), 4.0))
    np.testing.assert_allclose(jax.jit(lambda: (jitted(), call(lambda z: z * 2.0)))(), (8, 8), rtol=1e-6)


def test_a_change_is_an_error_on_a_mesh():
    """Where operations have other types, a function has to be traced again."""
    mesh = jax.make_mesh((1,), ("e",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    READ["slope"] = 2.0
    activation = static_activation(lambda z: z * READ["slope"], F32, F32)
    call = lambda: jax.shard_map(elementwise(activation), mesh=mesh, in_specs=jax.P("e"), out_specs=jax.P("e"))(
        jnp.ones((2, 3))
    )
    np.testing.assert_array_equal(call(), np.full((2, 3), 2.0))
    READ["slope"] = 3.0
    with pytest.raises(RuntimeError, match=r"activation: <lambda> reads a variable that has changed"):
        call()


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto])
@pytest.mark.parametrize("spec", [jax.P(), jax.P("d")])
def test_an_activation_may_close_over_an_array_on_a_mesh(kind, spec):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(kind,), devices=jax.devices()[:2])
    held = jax.device_put(np.arange(4.0, dtype=np.float32), jax.NamedSharding(mesh, spec))
    x, w = np.ones((4, 3), np.float32), np.ones((1, 3, 2), np.float32)
    call = lambda: tr.grouped_matmul(x, w, np.array([4]), activation=lambda z: z * held.sum())
    np.testing.assert_array_equal(np.asarray(call()), np.full((4, 2), 18.0))
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(np.asarray(call()), np.full((4, 2), 18.0))
        np.testing.assert_array_equal(np.asarray(jax.jit(call)()), np.full((4, 2), 18.0))


def test_the_gradient_of_one_layer_is_not_that_of_another_with_the_same_operations():
    """Each has an object that it reads; one of them changes after its first call."""
    x, w = jnp.ones((4, 2)), jnp.ones((2, 2, 2))
    routing = moe.route(jnp.ones((4, 2)), 1)

    class Model:
        beta = 1.0

        def loss(self, x):
            return tr.moe_mlp(x, routing, None, w, w, activation=lambda up: up * self.beta).sum()

    one, other = Model(), Model()
    one.loss(x)
    one.beta = 4.0
    np.testing.assert_array_equal(4 * jax.grad(other.loss)(x), jax.grad(one.loss)(x))


def test_fields_that_are_not_compared_count():
    READ["slope"] = 1.0
    for hidden in (1.0, 2.0):
        np.testing.assert_allclose(product_of(2)(Sloped(hidden=hidden)), 4 * hidden, rtol=1e-6)


def test_rules_of_jax_are_known_without_their_derivatives(monkeypatch):
    """To trace derivatives takes several times as long as the rest of a call outside of jit."""
    monkeypatch.setattr("trencadis.core.activation._pullbacks", lambda _: pytest.fail("traced"))
    for activation in (jax.nn.relu, jax.nn.softplus, lambda z: jax.nn.relu(z) * jax.nn.gelu(z)):
        assert static_activation(lambda z, f=activation: f(z), F32, F32)


def test_python_functions_are_told_apart_even_if_they_look_alike():
    class Times:
        def __init__(self, number):
            self.number = number

        def __call__(self, z):
            return np.asarray(z * self.number, np.float32)

        def __repr__(self):
            return "Times"

    def activation(number):
        return lambda z: jax.pure_callback(
            Times(number), jax.ShapeDtypeStruct(z.shape, z.dtype), z, vmap_method="expand_dims"
        )

    assert static_activation(activation(2), F32, F32) is None  # so that it is applied after the product
    for number in (2, 3):
        assert product_of(2)(activation(number)) == 4 * number
    fresh = (static_activation(lambda z: jax.nn.relu(z) * 0.5, F32, F32) for _ in range(2))
    assert next(fresh) == next(fresh)


def rounded(slope, kind):
    """Rounding with a derivative of its own, which only its rule has."""
    if kind == "jvp":
        call = jax.custom_jvp(lambda z: jnp.round(z))
        call.defjvp(lambda primals, tangents: (call(*primals), slope * tangents[0]))
    elif kind == "vjp":
        call = jax.custom_vjp(lambda z: jnp.round(z))
        call.defvjp(lambda z: (call(z), None), lambda _, ct: (slope * ct,))
    else:  # only its second derivative is its own
        inner = jax.custom_jvp(lambda z: jnp.round(z))
        inner.defjvp(lambda primals, tangents: (inner(*primals), slope * tangents[0]))
        call = jax.custom_jvp(lambda z: jnp.round(z))
        call.defjvp(lambda primals, tangents: (call(*primals), inner(*primals) * tangents[0]))
    return call


@pytest.mark.parametrize("kind", ["jvp", "vjp", "second"])
def test_activations_with_other_derivatives_are_different(kind):
    one, again, other = (static_activation(rounded(slope, kind), F32, F32) for slope in (1.0, 1.0, 5.0))
    assert one == again != other
    if kind != "second":  # outside of jit, equal activations have one program
        x, w = jnp.ones((2, 3)), jnp.ones((1, 3, 2))
        slope = lambda s: jax.grad(
            lambda x: tr.grouped_matmul(x, w, [2], activation=rounded(s, kind), backend="reference").sum()
        )(x)
        np.testing.assert_array_equal(5 * slope(1.0), slope(5.0))


@pytest.mark.parametrize("activation", [jax.nn.relu, jax.nn.silu, jax.nn.softplus, moe.swiglu(limit=7.0, alpha=1.7)])
def test_fresh_functions_of_the_same_operations_are_equal(activation):
    numbers = 2 if isinstance(activation, moe.activation.SwiGLU) else 1
    one, other = (static_activation(lambda *z: activation(*z), F32, F32, numbers) for _ in range(2))
    assert one is not other and one == other


def test_a_rule_that_closes_over_a_traced_value_keeps_it_out_of_kernels():
    seen = []
    jax.jit(lambda s: seen.append(static_activation(rounded(s, "jvp"), F32, F32)) or s)(2.0)
    assert seen == [None]


@dataclasses.dataclass(frozen=True)
class Applied:
    """A value with a hash, that of a function which may close over anything."""

    function: Callable[..., jax.Array]

    def __call__(self, z):
        return self.function(z)


def test_nothing_keeps_what_an_activation_closes_over():
    with jax.checking_leaks():
        jax.jit(lambda b: static_activation(Applied(lambda z: z * b), F32, F32) or b)(2.0)


def test_the_reason_of_a_failing_activation_is_in_the_error():
    with pytest.raises(ValueError, match=r"activation: .*ZeroDivisionError: division by zero"):
        static_activation(lambda z: z + 1 / 0, F32, F32)


@pytest.mark.parametrize(
    ("activation", "message"),
    [
        (lambda y: y - jnp.mean(y), "it reduces its argument, by reduce_sum"),
        (lambda y: y / jnp.linalg.norm(y), "it reduces its argument, by reduce_sum"),
        (lambda y: jax.nn.softmax(y, axis=None), "it reduces its argument, by reduce_max"),
        (lambda y: jnp.where(jax.random.bernoulli(jax.random.key(0)), y, 0), "it draws random numbers"),
    ],
)
def test_what_is_not_elementwise_is_refused(activation, message):
    """Of one number it would be something else than of a row, without a word."""
    with pytest.raises(ValueError, match=f"activation: want a function of each number by itself; {message}"):
        product_of(2)(activation)
