"""The epilogue of a grouped GEMM: rounded once, and `out` is not read where beta is 0."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trencadis as tr
from trencadis import GroupedTensor

pytestmark = pytest.mark.core

ROWS, OWNED = [2, 0, 3], 5
SUM = ((1,), (1,))


def by_rows(x, w, held, **options):
    out = GroupedTensor.ragged_rows(held, ROWS)
    return tr.grouped_gemm(
        GroupedTensor.ragged_rows(x, ROWS), GroupedTensor.stacked(w), contracting_dims=SUM, out=out, **options
    )


@pytest.mark.parametrize("flat", [False, True], ids=["m", "mn"])
def test_beta_times_out_is_rounded_once(flat, rng):
    """In bfloat16, from numbers of which all is exact in float32: the result is the exact one, rounded."""
    draw = lambda shape: jnp.asarray(rng.integers(-9, 10, shape), jnp.bfloat16)
    x, old = draw((OWNED, 4)), jnp.asarray(rng.normal(size=13 if flat else (OWNED, 6)), jnp.bfloat16)
    beta = jnp.asarray(rng.normal(size=3), jnp.bfloat16).astype(jnp.float32)
    wide = lambda a: np.asarray(a, np.float64)
    if flat:
        lhs, out = GroupedTensor.ragged_rows(x, ROWS), GroupedTensor.fully_ragged(old, ROWS, ROWS)
        found = tr.grouped_gemm(lhs, lhs, contracting_dims=SUM, out=out, beta=beta).data
        product = np.concatenate([(wide(a) @ wide(a).T).ravel() for a in (x[:2], x[2:])])
        scale = np.repeat(wide(beta), [4, 0, 9])
    else:
        w = draw((3, 4, 6))
        found = by_rows(x, w, old, beta=beta).data
        product = np.concatenate([wide(x[:2]) @ wide(w[0]), wide(x[2:]) @ wide(w[2])])
        scale = np.repeat(wide(beta), ROWS)[:, None]
    want = jnp.asarray(product + scale * wide(old), jnp.bfloat16)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(wide(found), wide(want))


@pytest.mark.parametrize("groups", [2, 80])
def test_factors_of_an_empty_buffer_have_gradients_of_0(groups):
    lhs = GroupedTensor.fully_ragged(jnp.zeros(0), [0] * groups, [3] * groups)
    rhs = GroupedTensor.fully_ragged(jnp.ones(6 * groups), [3] * groups, [2] * groups)
    out = tr.grouped_gemm(lhs, rhs, contracting_dims=((1,), (0,)))

    def total(alpha, beta):
        return tr.grouped_gemm(lhs, rhs, contracting_dims=((1,), (0,)), alpha=alpha, beta=beta, out=out).data.sum()

    for each in jax.grad(total, (0, 1))(jnp.ones(groups), jnp.ones(groups)):
        np.testing.assert_array_equal(each, np.zeros(groups))


def test_out_is_not_read_where_beta_is_0(rng):
    """As in BLAS; the gradients of beta and out are those of `beta * out`, and unowned rows keep what out holds."""
    x, w, old = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((6, 4), (3, 4, 2), (6, 2)))
    held = old.at[0, 0].set(jnp.nan).at[1, 1].set(-jnp.inf).at[5].set(jnp.nan)
    beta = jnp.array([0.0, 1.0, 2.0])

    def step(held, beta):
        out, pull = jax.vjp(lambda held, beta: by_rows(x, w, held, beta=beta).data, held, beta)
        return out, tr.grouped_matmul(x, w, ROWS), pull(jnp.ones_like(out))

    out, product, (d_held, d_beta) = jax.jit(step)(held, beta)
    np.testing.assert_array_equal(out[:2], product[:2])
    np.testing.assert_allclose(out[2:5], product[2:5] + 2 * old[2:5], 1e-6)
    assert np.isnan(out[5]).all()
    np.testing.assert_array_equal(d_held, np.repeat([0.0, 2.0, 1.0], [2, 3, 1])[:, None] * np.ones((6, 2)))
    np.testing.assert_allclose(d_beta, [old[0, 1] + old[1, 0], 0, old[2:5].sum()], 1e-5)
