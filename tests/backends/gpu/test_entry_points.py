"""The public operations by interpreted kernels, under JAX transformations: values equal those of the oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from grouped_cases import check_both_forms

import trencadis as tr
from trencadis.backends.gpu import kernel

pytestmark = pytest.mark.core

M, K, N, G = 77, 43, 37, 3  # multiples of nothing
SIZES = np.array([9, 0, 61], np.int32)  # the last seven rows are unowned
OWNED = int(SIZES.sum())
HOW = dict(backend="gpu", interpret=True)


def rows(x, w, sizes=SIZES, **options):
    return tr.grouped_matmul(x, w, sizes, **options)


def summed(x, y, sizes=SIZES, **options):
    return tr.transposed_grouped_matmul(x, y, sizes, transpose_lhs=True, **options)


@pytest.fixture
def xwy(rng):
    return tuple(jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((M, K), (G, K, N), (M, N)))


@functools.cache
def forms(**options):
    """Both operations with traced sizes, compiled once."""
    return jax.jit(lambda x, w, y, sizes: (rows(x, w, sizes, **HOW, **options), summed(x, y, sizes, **HOW, **options)))


def same(transform, *args):
    """Check that the kernels and the reference backend agree under a transformation."""
    got = jax.jit(transform(HOW))(*args)
    want = jax.jit(transform(dict(backend="reference")))(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        oracle.check(a, oracle.wide(b))


@pytest.mark.parametrize("sizes", [[77, 0, 0], [0, 0, 0], [-5, 200, 3], [2**31 - 1, -(2**31), 2**31 - 1], [1, 8, 64]])
def test_traced_sizes_are_clamped(sizes, xwy):
    """Negative counts as 0, and no group reaches past m."""
    x, w, y = xwy
    out, weights = forms()(x, w, y, np.asarray(sizes, np.int32))
    oracle.check(out, oracle.rows(x, w, sizes))
    oracle.check(weights, oracle.contraction(x, y, sizes))


def test_sizes_of_other_integers(xwy):
    x, w, _ = xwy
    out = jax.jit(functools.partial(rows, **HOW))(x, w, jnp.asarray(SIZES, jnp.uint8))
    oracle.check(out, oracle.rows(x, w, SIZES))


@pytest.mark.parametrize(
    "activation", [jax.nn.silu, jax.nn.gelu, lambda z: jnp.tanh(z) + 1, jnp.arctan],
    ids=["silu", "gelu", "lambda", "arctan"],
)  # fmt: skip
def test_bias_and_activations(activation, rng):
    """Unowned rows stay zero, also where the activation of zero is not; arctan is applied after the kernel."""
    x, w, b = (jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in ((M, 64), (G, 64, 64), (G, 64)))
    out = jax.jit(lambda *xs: rows(*xs[:2], bias=xs[2], activation=activation, **HOW))(x, w, b)
    apply = lambda z: np.asarray(activation(jnp.asarray(z, jnp.float32)))
    oracle.check(out, oracle.rows(x, w, SIZES, bias=b, activation=apply), dtype="float32")
    assert not np.asarray(out[OWNED:]).any()


def test_existing_out(xwy):
    """Unowned rows and empty groups keep existing_out to the bit, even NaN."""
    x, w, y = xwy
    y = y.at[OWNED:].set(jnp.nan)
    e = jnp.asarray(np.random.default_rng(1).normal(size=(G, K, N)), jnp.float32).at[1, 0].set(jnp.inf)
    out = jax.jit(lambda x, w, y: rows(x, w, existing_out=y, **HOW))(x, w, y)
    oracle.check(out[:OWNED], oracle.rows(x, w, SIZES, existing_out=y)[:OWNED])
    assert np.asarray(out[OWNED:]).tobytes() == np.asarray(y[OWNED:]).tobytes()
    clean = jnp.nan_to_num(y)
    weights = jax.jit(lambda x, y, e: summed(x, y, existing_out=e, **HOW))(x, clean, e)
    for i in (0, 2):
        oracle.check(weights[i], oracle.contraction(x, clean, SIZES, existing_out=e)[i])
    assert np.asarray(weights[1]).tobytes() == np.asarray(e[1]).tobytes()


def test_gradients(xwy):
    """NaN in unowned rows reaches no gradient."""
    x, w, c = xwy
    x, c = x.at[OWNED:].set(jnp.nan), c.at[OWNED:].set(jnp.nan)

    def pull(x, w, c):
        out, back = jax.vjp(lambda x, w: rows(x, w, **HOW), x, w)
        return out, *back(c)

    out, dx, dw = jax.jit(pull)(x, w, c)
    oracle.check(out, oracle.rows(x, w, SIZES))
    oracle.check(dx, oracle.rows(c, w, SIZES, transpose_rhs=True))
    oracle.check(dw, oracle.contraction(x, c, SIZES))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_gradient_of_a_bias(dtype, xwy):
    """The gradient of a bias is summed in float32, and not in tf32."""
    x, w, c = (a.astype(jnp.bfloat16) for a in xwy)
    c = c.at[OWNED:].set(jnp.nan).astype(dtype) * (1 + 2.0**-20 * (dtype == jnp.float32))

    def pull(b, c):
        return jax.vjp(lambda b: rows(x, w, preferred_element_type=dtype, bias=b, **HOW), b)[1](c)[0]

    db = jax.jit(pull)(w[:, 0].astype(jnp.float32), c)
    oracle.check(db, oracle.contraction(np.ones((M, 1)), c, SIZES)[:, 0])


def test_gradient_through_an_activation(xwy):
    """`jax.grad` of a loss, by value."""
    x, w, c = xwy

    def transform(how):
        return jax.grad(lambda x, w: jnp.sum(jnp.sin(rows(x, w, activation=jax.nn.silu, **how)) * c), (0, 1))

    same(transform, x, w)


def test_forward_mode(xwy):
    x, _, y = xwy
    same(lambda how: lambda x, y, dx: jax.jvp(lambda x: summed(x, y, **how), (x,), (dx,)), x, y, x[::-1])


@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, 0)])
def test_vmap(axes, xwy):
    """Entries with weights of their own, and with weights that they share; entries whose rows are no multiple of 8."""
    given = (*xwy[:2], jnp.asarray(SIZES))
    stacked = [jnp.stack([a, a[::-1]]) if axis == 0 else a for a, axis in zip(given, axes, strict=True)]
    same(lambda how: jax.vmap(functools.partial(rows, **how), in_axes=axes), *stacked)


def test_vmap_of_a_contraction(xwy):
    given = (xwy[0], xwy[2], jnp.asarray(SIZES))
    same(lambda how: jax.vmap(functools.partial(summed, **how)), *(jnp.stack([a, a[::-1]]) for a in given))


@pytest.mark.parametrize("traced", [False, True])
def test_windows(traced, xwy):
    """A static first group, and a traced one; a window outside of the groups has no rows."""
    x, w, y = xwy
    held = w[:2]

    def each(first):
        options = dict(group_offset=first, **HOW)
        return rows(x, held, **options), summed(x, y, num_actual_groups=2, **options) if traced else None

    f = jax.jit(each, static_argnums=() if traced else 0)
    for first in (1, -1, 2, 7) if traced else (1,):
        out, weights = f(first)
        oracle.check(out, oracle.rows(x, held, SIZES, first=first))
        if traced:
            oracle.check(weights, oracle.contraction(x, y, SIZES, first=first, local=2))


def test_the_callers_tile_changes_the_layout_and_not_the_value(xwy, monkeypatch):
    x, w, _ = xwy
    seen, call = [], kernel.call
    monkeypatch.setattr(
        kernel, "call", lambda problem, layout, *rest: seen.append(layout) or call(problem, layout, *rest)
    )
    first, second = (jax.jit(functools.partial(rows, tiling=tile, **HOW))(x, w) for tile in (None, (128, 32, 128)))
    assert [(layout.block_m, layout.block_n) for layout in seen] == [(256, 64), (128, 128)]
    oracle.check(first, oracle.wide(second))
    oracle.check(first, oracle.rows(x, w, SIZES))


def test_grouped_gemm(xwy):
    """Both forms, with gradients, through grouped tensors."""
    x, w, y = (a.at[sum(SIZES) :].set(jnp.nan) if a.ndim == 2 else a for a in xwy)
    check_both_forms(x, w, y, SIZES, **HOW)
