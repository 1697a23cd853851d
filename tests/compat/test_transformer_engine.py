"""TransformerEngine's grouped dense layer through its own signatures: values, gradients, and that of the bias."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import trencadis as tr
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
    """Values, d x, d kernel and d bias, all in one step; an empty group's gradient is zero (T-02)."""
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
    assert not np.asarray(dw[1]).any()
    oracle.check(grouped_dbias(c, sizes), oracle.contraction(np.ones((x.shape[0], 1)), c, sizes)[:, 0])


def test_wgrad_is_the_same_call(rng):
    """S3-03, S3-04; sizes that do not sum to m (T-01) leave the rest to nobody, and poison there stays there (T-03)."""
    x, _, _, c, sizes = data(SHAPES[0], jnp.bfloat16, rng)
    sizes = sizes.at[-1].add(-8)
    x, c = x.at[-8:].set(jnp.nan), c.at[-8:].set(jnp.nan)
    tensors = [GroupedNoScaleTensor(a.ravel(), None, sizes, None, a.shape) for a in (x, c)]  # stored flat
    out = jax.jit(lambda a, b: grouped_gemm(a, b, contracting_dims=((0,), (0,))))(*tensors)
    oracle.check(out, oracle.contraction(x, c, sizes))
    assert np.isfinite(np.asarray(grouped_dbias(c, sizes), np.float32)).all()


def test_arguments_that_the_original_ignores_or_refuses_are_honoured(rng):
    """T-06: group_offset, precision, a bias, vmap; and gradients have the dtypes of what they belong to."""
    x, w, b, c, sizes = data((4, 3, 16, 8), jnp.bfloat16, rng)
    out, back = jax.vjp(lambda x, w, b: grouped_dense(x, w, sizes, bias=b, preferred_element_type=jnp.float32), x, w, b)
    assert out.dtype == jnp.float32
    oracle.check(out, oracle.rows(x, w, sizes, bias=b))
    slopes = back(c.astype(jnp.float32))
    assert [d.dtype for d in slopes] == [jnp.bfloat16] * 3
    oracle.check(slopes[0], oracle.rows(c, w, sizes, transpose_rhs=True))
    oracle.check(grouped_dense(x, w[1:], sizes, group_offset=jnp.array([1])), oracle.rows(x, w[1:], sizes, first=1))
    many = jax.vmap(lambda x, s: grouped_dense(x, w, s))(jnp.stack([x, -x]), jnp.stack([sizes, sizes[::-1]]))
    oracle.check(many[1], oracle.rows(-x, w, sizes[::-1]))
    wide = x.astype(jnp.float32), w.astype(jnp.float32)
    asked = lambda p: jax.jit(lambda x, w: grouped_dense(x, w, sizes, precision=p)).lower(*wide).as_text()
    assert "HIGHEST" in asked(jax.lax.Precision.HIGHEST) and "HIGHEST" not in asked(jax.lax.Precision.DEFAULT)


def test_sums_that_bfloat16_cannot_hold():
    """T-08: the gradient of a bias over 512 rows, each of which is lost beside the sum of the others."""
    ones, sizes = jnp.ones((520, 1), jnp.bfloat16), jnp.array([512, 8])
    np.testing.assert_array_equal(grouped_dbias(ones, sizes)[:, 0], [512, 8])
    layer = lambda b: grouped_dense(ones, jnp.ones((2, 1, 1), jnp.bfloat16), sizes, bias=b).astype(jnp.float32).sum()
    np.testing.assert_array_equal(jax.grad(layer)(jnp.zeros((2, 1), jnp.bfloat16))[:, 0], [512, 8])


def test_all_four_logical_dims_of_operands(rng):
    """S3-05, R-04, R-14: lhs ragged in its first or last axis, transposed or not, stored flat."""
    x, w, _, _, sizes = data((4, 3, 16, 8), jnp.float32, rng)
    want, stack = oracle.rows(x, w, sizes), GroupedNoScaleTensor(w, None, None, None, w.shape)
    for stored, dims, axis in ((x, (sizes, None), 1), (x.T, (None, sizes), 0)):
        lhs = GroupedNoScaleTensor(stored.ravel(), None, *dims, stored.shape)
        out = grouped_gemm(lhs, stack, contracting_dims=((axis,), (1,)))
        oracle.check(out, want)
        rhs = GroupedNoScaleTensor(x, None, sizes, None, x.shape)
        summed = grouped_gemm(lhs, rhs, contracting_dims=((1 - axis,), (0,)))
        oracle.check(summed, oracle.contraction(x, x, sizes))


class GroupedScaledTensor1x:
    """What the original has for numbers with scales."""

    def __init__(self, x):
        self.data, self.scale_inv, self.first_dims, self.last_dims = x.data, jnp.ones(2), x.first_dims, None
        self.original_shape = x.original_shape


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda x, w: grouped_gemm(x.data, w), TypeError, "lhs: want a GroupedNoScaleTensor; got ArrayImpl"),
        (lambda x, w: grouped_gemm(x, GroupedScaledTensor1x(w)), TypeError, "rhs: want a GroupedNoScaleTensor; got GroupedScaledTensor1x"),
        (lambda x, w: grouped_gemm(GroupedScaledTensor1x(x), w), TypeError, "lhs: want a GroupedNoScaleTensor; got GroupedScaledTensor1x"),
        (lambda x, w: tr.grouped_gemm(x, w, contracting_dims=((1,), (1,))), TypeError, "lhs: want a GroupedTensor"),
        (lambda x, w: grouped_gemm(dataclasses.replace(x, original_shape=(5, 2)), w), ValueError, r"lhs: its data have shape \(4, 2\); want as many numbers as original_shape \(5, 2\)"),
        (lambda x, w: grouped_gemm(w, w), ValueError, "Cannot infer number of gemms"),
        (lambda x, w: grouped_gemm(x, w, quantizer_set="fp8"), ValueError, "quantizer_set: want the one that does"),
        (lambda x, w: grouped_dense(x.data, w.data, [1, 3], kernel_fsdp_info=("x", 0)), ValueError, "kernel_fsdp_info"),
        (lambda x, w: grouped_dbias(w.data, x.first_dims), ValueError, "grad: want 2 dimensions"),
    ],
)  # fmt: skip
def test_errors(make, error, words):
    """R-07, R-08, R-16: a shape alone makes nothing ragged, scales are never ignored, nor is anything else asked for."""
    x = GroupedNoScaleTensor(jnp.ones((4, 2)), None, jnp.array([1, 3]), None, (4, 2))
    w = GroupedNoScaleTensor(jnp.ones((2, 2, 2)), None, None, None, (2, 2, 2))
    with pytest.raises(error, match=words):
        make(x, w)


def test_is_a_pytree_with_children_in_order():
    """R-11, R-09: and first_dims is next to last_dims."""
    x = GroupedNoScaleTensor(1.0, 2.0, 3.0, 4.0, (1,))
    assert jax.tree.leaves(x) == [1.0, 2.0, 3.0, 4.0]
    assert jax.tree.map(lambda a: a, x) == x
