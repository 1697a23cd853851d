"""One regression test for each defect of a peer that was found (7.1 to 7.12 of the survey) and could apply here."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import trencadis as tr
from trencadis.compat import ejkernel, megablox

pytestmark = pytest.mark.core

M, K, N, G = 24, 4, 3, 3


@pytest.fixture
def xw(rng):
    return rng.normal(size=(M, K)).astype("f"), rng.normal(size=(G, K, N)).astype("f")


def test_7_1_a_group_that_starts_inside_the_last_tiles_of_many():
    """The float histogram of megablox misplaces such a group from 3,010 tiles on; here the values are right."""
    m = 3010 * 8
    sizes = np.array([m - 13, 9, 4], np.int32)
    x, w = np.ones((m, 1), np.float32), np.array([1.0, 2.0, 3.0], np.float32).reshape(3, 1, 1)
    out = tr.grouped_matmul(x, w, sizes, tiling=(8, 1, 1))
    np.testing.assert_array_equal(out[:, 0], np.repeat([1.0, 2.0, 3.0], sizes))


def test_7_2_unowned_rows_are_zero_also_in_d_lhs_and_when_all_groups_are_empty(backend, xw):
    x, w = xw
    for sizes in ([5, 0, 7], [0, 0, 0]):
        out, back = jax.vjp(lambda x, s=sizes: tr.grouped_matmul(x, w, np.array(s), backend=backend), x)
        oracle.check(out, oracle.rows(x, w, sizes))
        (dx,) = back(jnp.full((M, N), jnp.nan).at[: sum(sizes)].set(1.0))
        assert not np.asarray(out[sum(sizes) :]).any()
        assert not np.asarray(dx[sum(sizes) :]).any()


def test_7_3_existing_out_means_one_thing_and_has_the_right_cotangent(backend, xw):
    x, w = xw
    e, sizes = jnp.ones((M, N)), np.array([5, 0, 7])
    out, back = jax.vjp(lambda e: tr.grouped_matmul(x, w, sizes, existing_out=e, backend=backend), e)
    oracle.check(out, oracle.rows(x, w, sizes, existing_out=e))
    np.testing.assert_array_equal(back(2 * e)[0], 2 * e)
    out, back = jax.vjp(lambda e: megablox.gmm(x, w, sizes, existing_out=e), e)  # overwrites what it computes
    np.testing.assert_array_equal(back(2 * e)[0], 2 * e * (np.arange(M) >= 12)[:, None])


def test_7_4_mismatches_are_errors(xw):
    x, w = xw
    for f in (tr.grouped_matmul, megablox.gmm, ejkernel.grouped_matmul):
        with pytest.raises((ValueError, TypeError), match="must be k = 2"):
            f(x[:, :2], w, jnp.array([5, 0, 7], jnp.int32))
        with pytest.raises(ValueError, match="groups"):
            f(x, w, jnp.array([5, 7], jnp.int32))


def test_7_5_an_expert_full_of_nan_poisons_no_other(xw):
    x, w = xw
    sizes = np.array([5, 6, 7])
    bad = w.copy()
    bad[1] = np.nan
    out = tr.ragged_dot(x, bad, sizes)
    want = oracle.rows(x, w, sizes)
    oracle.check(out[:5], want[:5])
    oracle.check(out[11:], want[11:])


def test_7_5_memory_does_not_grow_with_the_groups():
    """lax.ragged_dot does g times the work in g times the memory; here 64 groups need the temporaries of one."""
    m, k, n = 256, 64, 64
    used = {}
    for g in (1, 64):
        shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((m, k), (g, k, n))]
        compiled = jax.jit(tr.ragged_dot).lower(*shapes, jax.ShapeDtypeStruct((g,), jnp.int32)).compile()
        used[g] = compiled.memory_analysis().temp_size_in_bytes
    assert used[64] < used[1] + 4 * m * (k + n) + 64 * 1024


def test_7_6_vmap_second_order_contraction_gradient_and_offset_exist(xw):
    x, w = xw
    sizes = jnp.array([5, 0, 7])
    jax.vmap(tr.ragged_dot, in_axes=(1, None, None))(jnp.stack([x, x], 1), w, sizes)
    second = jax.grad(lambda x: jax.grad(lambda w: jnp.sum(tr.ragged_dot(x, w, sizes) ** 2))(w).sum())(x)
    dense = lambda x, w: jnp.concatenate([x[:5] @ w[0], x[5:12] @ w[2]])
    want = jax.grad(lambda x: jax.grad(lambda w: jnp.sum(dense(x, w) ** 2))(w).sum())(x)
    np.testing.assert_allclose(second, want, rtol=1e-4, atol=1e-4)
    out = jax.jit(lambda o: tr.ragged_dot(x, w[1:], sizes, group_offset=o))(jnp.array([1]))
    oracle.check(out, oracle.rows(x, w[1:], sizes, first=1))


def test_7_7_documented_examples_run_as_written(rng):
    x, w = rng.normal(size=(300, 64)).astype("f"), rng.normal(size=(3, 64, 32)).astype("f")
    sizes = jnp.array([100, 150, 50], jnp.int32)
    e = jnp.ones((300, 32))
    oracle.check(ejkernel.grouped_matmul(x, w, sizes), oracle.rows(x, w, sizes))
    oracle.check(ejkernel.grouped_matmul(x, w, sizes, existing_out=e), oracle.rows(x, w, sizes, existing_out=e))
    oracle.check(
        ejkernel.grouped_matmul(x, w[1:], sizes, group_offset=jnp.array([1])), oracle.rows(x, w[1:], sizes, first=1)
    )
    tune = lambda m, k, n: (64, 32, 32)
    oracle.check(ejkernel.grouped_matmul(x, w, sizes, tiling=tune), oracle.rows(x, w, sizes))


def test_7_7_offset_with_bias_gives_the_right_rows(backend, xw):
    x, w = xw
    b = np.arange(2 * N, dtype=np.float32).reshape(2, N)
    out = tr.grouped_matmul(x, w[1:], [5, 6, 7], group_offset=1, bias=b, backend=backend)
    oracle.check(out, oracle.rows(x, w[1:], [5, 6, 7], first=1, bias=b))


def test_7_9_every_backend_runs_on_cpu(xw):
    x, w = xw
    oracle.check(tr.grouped_matmul(x, w, [5, 6, 7], interpret=True), oracle.rows(x, w, [5, 6, 7]))


def test_7_10_a_tiling_of_three_works_backward_too(xw):
    x, w = xw
    grads = {}
    for name, tiling in (("three", (64, 64, 64)), ("nine", (64,) * 9), ("default", (128, 128, 128))):
        f = functools.partial(megablox.gmm, group_sizes=jnp.array([5, 6, 7], jnp.int32), tiling=tiling)
        grads[name] = jax.grad(lambda x, w, f=f: jnp.sum(f(x, w) ** 2), (0, 1))(x, w)
    jax.tree.map(lambda *g: np.testing.assert_allclose(g[0], g[1], rtol=1e-5, atol=1e-5), *grads.values())


def test_7_12_contraction_masks_by_selection_and_rounds_once(backend, xw):
    """Masking by 0 * NaN would give NaN; and sums of bfloat16 operands are kept in float32 up to the result."""
    x = np.array(xw[0])
    x[5:11] = np.nan
    y = np.ones((M, N), np.float32)
    got = tr.transposed_grouped_matmul(x.T, y, [5, 6, 7], backend=backend)
    want = oracle.contraction(xw[0], y, [5, 6, 7])
    oracle.check(got[0], want[0])
    oracle.check(got[2], want[2])
    ones = jnp.ones((2, 257), jnp.bfloat16)
    got = tr.transposed_grouped_matmul(ones, ones.T, [257], jnp.float32, backend=backend)
    np.testing.assert_array_equal(got, np.full((1, 2, 2), 257.0))
