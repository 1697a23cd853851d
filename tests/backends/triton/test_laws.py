"""Laws of the interpreted kernels through the public functions: gradients by value, and transformations."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import strategies

pytest.importorskip("triton")

import trencadis as tr

pytestmark = pytest.mark.core

M, K, N, G = 60, 24, 40, 4
few = hypothesis.settings(max_examples=2, phases=[hypothesis.Phase.generate])
HOW = dict(backend="triton", interpret=True)


def operands(seed):
    rng = np.random.default_rng(seed)
    return tuple(rng.normal(size=s).astype(np.float32) for s in ((M, K), (G, K, N), (M, N)))


@few
@hypothesis.given(sizes=strategies.sizes(M, G), seed=strategies.seeds)
def test_adjoints_agree(sizes, seed):
    """<f(x, w), c> = <x, dx> = <w, dw>, and each gradient equals its formula."""
    x, w, c = operands(seed)
    gradients = jax.vjp(lambda x, w: tr.grouped_matmul(x, w, sizes, **HOW), x, w)[1](c)
    oracle.check_adjoints(x, w, sizes, c, *gradients)


@few
@hypothesis.given(sizes=strategies.sizes(M, G), seed=strategies.seeds)
def test_vmap_is_a_batch(sizes, seed):
    x, w, _ = operands(seed)
    xs = np.stack([x, -2 * x])
    got = jax.vmap(lambda x: tr.grouped_matmul(x, w, sizes, **HOW))(xs)
    oracle.check(got, np.stack([oracle.rows(x, w, sizes) for x in xs]))


@pytest.mark.parametrize(
    "activation",
    [jax.nn.gelu, jax.nn.silu, jax.nn.softplus, jax.nn.elu, jnp.tanh, lambda z: jax.nn.gelu(z, approximate=False),
     jax.nn.hard_swish, jnp.arctan],
    ids=["gelu", "silu", "softplus", "elu", "tanh", "erf", "hard_swish", "arctan, in XLA"],
)  # fmt: skip
def test_activations_equal_those_of_jax(activation):
    x, w, _ = operands(0)
    sizes, bias = np.array([13, 0, 30, 10]), np.linspace(-3, 3, G * N, dtype=np.float32).reshape(G, N)
    got = tr.grouped_matmul(x, w, sizes, bias=bias, activation=activation, **HOW)
    want = tr.grouped_matmul(x, w, sizes, bias=bias, activation=activation, backend="reference")
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    plain = tr.why(x, w, sizes, bias=bias, activation=activation, target="a100").passes[0].plan
    assert bool(plain.peeled) == (activation is jnp.arctan)
