"""The public operations by interpreted kernels, under JAX transformations: values equal those of the oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from grouped_cases import check_both_forms
from sweep import marked

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
    return tuple(rng.normal(size=s).astype(np.float32) for s in ((M, K), (G, K, N), (M, N)))


@jax.jit
def forms(x, w, y, sizes):
    """Both operations with traced sizes, compiled once."""
    return rows(x, w, sizes, **HOW), summed(x, y, sizes, **HOW)


def same(transform, *args):
    """Check that the kernels and the reference backend agree under a transformation.

    Without jit, a kernel is compiled once for all tests that call it.
    """
    got = transform(HOW)(*args)
    want = jax.jit(transform(dict(backend="reference")))(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        oracle.check(a, oracle.wide(b))


@pytest.mark.parametrize("sizes", [[77, 0, 0], [0, 0, 0], [-5, 200, 3], [2**31 - 1, -(2**31), 2**31 - 1], [1, 8, 64]])
def test_traced_sizes_are_clamped(sizes, xwy):
    """Negative counts as 0, and no group reaches past m."""
    x, w, y = xwy
    out, weights = forms(x, w, y, np.asarray(sizes, np.int32))
    oracle.check(out, oracle.rows(x, w, sizes))
    oracle.check(weights, oracle.contraction(x, y, sizes))


def test_sizes_of_other_integers(xwy):
    x, w, _ = xwy
    out = rows(x, w, SIZES.astype(np.uint8), **HOW)
    oracle.check(out, oracle.rows(x, w, SIZES))


@pytest.mark.parametrize(
    "activation", [marked(jax.nn.silu), marked(jax.nn.gelu), lambda z: jnp.tanh(z) + 1, jnp.arctan],
    ids=["silu", "gelu", "lambda", "arctan"],
)  # fmt: skip
def test_bias_and_activations(activation, rng):
    """Unowned rows stay zero, also where the activation of zero is not; arctan is applied after the kernel."""
    x, w, b = (rng.normal(size=s).astype(jnp.bfloat16) for s in ((M, 64), (G, 64, 64), (G, 64)))
    out = np.asarray(rows(x, w, bias=b, activation=activation, **HOW))
    want = np.array(jax.jit(activation)(oracle.rows(x, w, SIZES, bias=b).astype(np.float32)))
    want[OWNED:] = 0
    oracle.check(out, want, dtype="float32")
    assert not out[OWNED:].any()


@pytest.mark.sweep
def test_existing_out(xwy):
    """Unowned rows and empty groups keep existing_out to the bit, even NaN."""
    x, w, y = xwy
    y[OWNED:] = np.nan
    e = np.random.default_rng(1).normal(size=(G, K, N)).astype(np.float32)
    e[1, 0] = np.inf
    out = np.asarray(rows(x, w, existing_out=y, **HOW))
    oracle.check(out[:OWNED], oracle.rows(x, w, SIZES, existing_out=y)[:OWNED])
    assert out[OWNED:].tobytes() == y[OWNED:].tobytes()
    clean = np.nan_to_num(y)
    weights = np.asarray(summed(x, clean, existing_out=e, **HOW))
    for i in (0, 2):
        oracle.check(weights[i], oracle.contraction(x, clean, SIZES, existing_out=e)[i])
    assert weights[1].tobytes() == e[1].tobytes()


def test_gradients(xwy):
    """NaN in unowned rows reaches no gradient."""
    x, w, c = xwy
    x[OWNED:] = c[OWNED:] = np.nan
    out, back = jax.vjp(lambda x, w: rows(x, w, **HOW), x, w)
    dx, dw = back(c)
    oracle.check(out, oracle.rows(x, w, SIZES))
    oracle.check(dx, oracle.rows(c, w, SIZES, transpose_rhs=True))
    oracle.check(dw, oracle.contraction(x, c, SIZES))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_gradient_of_a_bias(dtype, xwy):
    """The gradient of a bias is summed in float32, and not in tf32."""
    x, w, c = (a.astype(jnp.bfloat16) for a in xwy)
    c[OWNED:] = np.nan
    c = c.astype(dtype) if dtype == jnp.bfloat16 else c.astype(dtype) * np.float32(1 + 2.0**-20)
    pull = jax.vjp(lambda b: rows(x, w, preferred_element_type=dtype, bias=b, **HOW), w[:, 0].astype(np.float32))[1]
    oracle.check(pull(c)[0], oracle.contraction(np.ones((M, 1)), c, SIZES)[:, 0])


@pytest.mark.sweep
def test_gradient_through_an_activation(xwy):
    """`jax.grad` of a loss, by value."""
    x, w, c = xwy

    def transform(how):
        return jax.grad(lambda x, w: jnp.sum(jnp.sin(rows(x, w, activation=jax.nn.silu, **how)) * c), (0, 1))

    same(transform, x, w)


@pytest.mark.sweep
def test_forward_mode(xwy):
    x, _, y = xwy
    same(lambda how: lambda x, y, dx: jax.jvp(lambda x: summed(x, y, **how), (x,), (dx,)), x, y, x[::-1])


@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, 0)])
def test_vmap(axes, xwy):
    """Entries with weights of their own, and with weights that they share; entries whose rows are no whole grains."""
    given = (*xwy[:2], SIZES)
    stacked = [np.stack([a, a[::-1]]) if axis == 0 else a for a, axis in zip(given, axes, strict=True)]
    same(lambda how: jax.vmap(functools.partial(rows, **how), in_axes=axes), *stacked)


@pytest.mark.sweep
def test_vmap_of_a_contraction(xwy):
    given = (xwy[0], xwy[2], SIZES)
    same(lambda how: jax.vmap(functools.partial(summed, **how)), *(np.stack([a, a[::-1]]) for a in given))


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


@pytest.mark.sweep
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


@pytest.mark.sweep
def test_grouped_gemm(xwy):
    """Both forms by what tensors say, with gradients."""
    x, w, y = xwy
    x[sum(SIZES) :] = y[sum(SIZES) :] = np.nan
    check_both_forms(x, w, y, SIZES, **HOW)
