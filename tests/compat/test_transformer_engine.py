"""TransformerEngine's grouped dense layer through its own signatures: values, gradients, and that of the bias."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from trencadis.compat.transformer_engine import GroupedNoScaleTensor, grouped_dbias, grouped_dense, grouped_gemm

pytestmark = pytest.mark.core

SHAPES = [(5, 32, 128, 64), (5, 32, 64, 128), (5, 64, 32, 128)]  # groups, rows of 8, n, k
DTYPES = [jnp.bfloat16, jnp.float16]


def data(shape, dtype, rng, flipped=False):
    """Rows in groups of uneven sizes, one of them empty."""
    groups, eighths, n, k = shape
    m = 8 * eighths
    cuts = np.sort(rng.integers(0, eighths, groups - 2)) * 8
    sizes = np.diff([0, *cuts, m])
    sizes = np.insert(sizes, 1, 0).astype(np.int32)
    assert sizes.sum() == m and len(sizes) == groups and (sizes == 0).any()
    x, w, b, c = (
        jnp.asarray(rng.normal(size=s), dtype)
        for s in ((m, k), (groups, n, k) if flipped else (groups, k, n), (groups, n), (m, n))
    )
    return x, w, b, c, jnp.asarray(sizes)


@pytest.mark.parametrize("flipped", [False, True], ids=["NN", "NT"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_grouped_gemm(shape, dtype, flipped, rng):
    x, w, _, _, sizes = data(shape, dtype, rng, flipped)
    lhs = GroupedNoScaleTensor(x, None, sizes, None, x.shape)
    rhs = GroupedNoScaleTensor(w, None, jnp.zeros((0,), jnp.int32), None, w.shape)
    out = grouped_gemm(lhs, rhs, contracting_dims=((1,), (2 if flipped else 1,)))
    assert out.dtype == dtype
    oracle.check(out, oracle.rows(x, w, sizes, transpose_rhs=flipped))


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_grouped_dense(shape, dtype, rng):
    """Values, d x, d kernel and d bias, all in one step."""
    x, w, b, c, sizes = data(shape, dtype, rng)

    def step(x, w, b):
        return jax.vjp(lambda x, w, b: grouped_dense(x, w, sizes, bias=b), x, w, b)

    out, back = step(x, w, b)
    dx, dw, db = back(c)
    oracle.check(out, oracle.rows(x, w, sizes, bias=b))
    oracle.check(dx, oracle.rows(c, w, sizes, transpose_rhs=True))
    oracle.check(dw, oracle.contraction(x, c, sizes))
    oracle.check(db, oracle.contraction(np.ones((x.shape[0], 1)), c, sizes)[:, 0])
    assert (dx.dtype, dw.dtype, db.dtype) == (dtype,) * 3
    assert not np.asarray(dw[1]).any()  # T-02: an empty group's gradient is zero
    oracle.check(grouped_dbias(c, sizes), oracle.contraction(np.ones((x.shape[0], 1)), c, sizes)[:, 0])


def test_wgrad_is_the_same_call(rng):
    """S3-03; sizes that do not sum to m (T-01) leave the rest to nobody, and poison there stays there (T-03)."""
    x, _, _, c, sizes = data(SHAPES[0], jnp.bfloat16, rng)
    sizes = sizes.at[-1].add(-8)
    x, c = x.at[-8:].set(jnp.nan), c.at[-8:].set(jnp.nan)
    tensors = [GroupedNoScaleTensor(a.ravel(), None, sizes, None, a.shape) for a in (x, c)]  # stored flat
    out = jax.jit(lambda a, b: grouped_gemm(a, b, contracting_dims=((0,), (0,))))(*tensors)
    oracle.check(out, oracle.contraction(x, c, sizes))
    assert np.isfinite(np.asarray(grouped_dbias(c, sizes), np.float32)).all()


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda x, w: grouped_gemm(x.data, w), TypeError, "lhs: want a GroupedNoScaleTensor; got ArrayImpl"),
        (lambda x, w: grouped_gemm(w, w), ValueError, "Cannot infer number of gemms"),
        (lambda x, w: grouped_gemm(x, w, quantizer_set="fp8"), ValueError, "quantizer_set: want the one that does"),
        (lambda x, w: grouped_dense(x.data, w.data, [1, 3], kernel_fsdp_info=("x", 0)), ValueError, "kernel_fsdp_info"),
        (lambda x, w: grouped_dbias(w.data, x.first_dims), ValueError, "grad: want 2 dimensions"),
    ],
)  # fmt: skip
def test_errors(make, error, words):
    x = GroupedNoScaleTensor(jnp.ones((4, 2)), None, jnp.array([1, 3]), None, (4, 2))
    w = GroupedNoScaleTensor(jnp.ones((2, 2, 2)), None, None, None, (2, 2, 2))
    with pytest.raises(error, match=words):
        make(x, w)


def test_is_a_pytree_with_children_in_order():
    """R-11."""
    x = GroupedNoScaleTensor(1.0, 2.0, 3.0, 4.0, (1,))
    assert jax.tree.leaves(x) == [1.0, 2.0, 3.0, 4.0]
    assert jax.tree.map(lambda a: a, x) == x
