"""Functions with a transpose, or a backward pass, of their own: every transformation, by value."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trencadis.core.linear import linear, with_backward

pytestmark = pytest.mark.core

COUNTS = jnp.arange(3)
INPUTS = {"a": jnp.arange(4.0) + 1, "b": jnp.arange(4.0) * 0.3}


def value(counts, inputs):
    return {"out": inputs["a"] * jnp.sin(inputs["b"]) + counts.sum()}


def forward(counts, inputs):
    sine = jnp.sin(inputs["b"])
    return {"out": inputs["a"] * sine + counts.sum()}, (sine,)


def backward(counts, inputs, kept, ct):
    del counts
    return {"a": ct["out"] * kept[0], "b": ct["out"] * inputs["a"] * jnp.cos(inputs["b"])}


OWN = with_backward(value, forward, backward)


def loss(inputs):
    return jnp.sum(OWN(COUNTS, inputs)["out"] ** 2)


def plain(inputs):
    return jnp.sum(value(COUNTS, inputs)["out"] ** 2)


def mixed(f):
    """One input with a batch axis, the other without, under grad."""
    return jax.grad(lambda x: jax.vmap(lambda a: f({"a": a, "b": x["b"]}))(jnp.stack([x["a"], 2 * x["a"]])).sum())


def sharded(f):
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    local = lambda a, b: jax.lax.psum(f({"a": a, "b": b}), "i")
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(spec("i"), spec()), out_specs=spec())
    return lambda x: jax.grad(mapped, argnums=(0, 1))(x["a"], x["b"][1:2])


TRANSFORMED = {
    "value": lambda f: f,
    "grad": jax.grad,
    "jit of grad": lambda f: jax.jit(jax.grad(f)),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
    "hessian": jax.hessian,
    "grad of grad": lambda f: jax.grad(lambda x: sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(f)(x)))),
    "vmap of grad": lambda f: lambda x: jax.vmap(jax.grad(f))(jax.tree.map(lambda a: jnp.stack([a, 2 * a]), x)),
    "grad of vmap": mixed,
    "remat": lambda f: jax.grad(jax.checkpoint(f)),
    "scan": lambda f: jax.grad(
        lambda x: jax.lax.scan(lambda c, _: (jax.tree.map(lambda a: 1.1 * a, c), f(c)), x, None, length=3)[1].sum()
    ),
    "one input": lambda f: lambda x: jax.grad(lambda b: f({"a": x["a"], "b": b}))(x["b"]),
    "shard_map": sharded,
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_equals_the_plain_function(name):
    found, want = (TRANSFORMED[name](f)(INPUTS) for f in (loss, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, want)


def test_reverse_mode_runs_the_given_backward_pass():
    function = with_backward(value, forward, lambda *_: {"a": jnp.full(4, 7.0), "b": jnp.zeros(4)})
    assert jax.grad(lambda x: function(COUNTS, x)["out"].sum())(INPUTS)["a"].tolist() == [7.0] * 4


def test_a_linear_function_is_differentiated_in_its_constants():
    scaled = lambda c, x: linear(lambda c, x: c * x, lambda c, ct: c * ct, c, x)
    for mode in (jax.jacfwd, jax.jacrev):
        d_c, d_x = mode(scaled, argnums=(0, 1))(3.0, 5.0)
        assert (float(d_c), float(d_x)) == (5.0, 3.0)
