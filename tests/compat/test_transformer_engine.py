"""TransformerEngine's grouped dense layer through its own signatures: values, gradients, and that of the bias."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from sweep import sweep

import trencadis as tr
from trencadis.compat.transformer_engine import (
    GroupedNoScaleTensor,
    GroupedScaledTensor1x,
    QuantizeLayout,
    QuantizerFactory,
    QuantizerSet,
    ScaledTensor2x,
    ScalingMode,
    TensorUsage,
    grouped_dbias,
    grouped_dense,
    grouped_dequantize,
    grouped_gemm,
    grouped_quantize,
    noop_quantizer_set,
)

SHAPES = [(5, 32, 128, 64), (5, 32, 64, 128), (5, 64, 32, 128)]  # groups, rows of 8, n, k
DTYPES = [jnp.bfloat16, jnp.float16]
ALL = list(itertools.product(SHAPES, DTYPES))


def data(shape, dtype, rng, transposed=False):
    """Rows in groups of uneven sizes, one of them empty."""
    groups, eighths, n, k = shape
    m = 8 * eighths
    cuts = np.sort(rng.integers(0, eighths, groups - 2)) * 8
    sizes = np.diff([0, *cuts, m])
    sizes = np.insert(sizes, 1, 0).astype(np.int32)
    assert sizes.sum() == m and len(sizes) == groups and (sizes == 0).any()
    x, w, b, c = (
        jnp.asarray(rng.normal(size=s), dtype)
        for s in ((m, k), (groups, n, k) if transposed else (groups, k, n), (groups, n), (m, n))
    )
    return x, w, b, c, jnp.asarray(sizes)


@pytest.mark.parametrize("transposed", [False, True], ids=["NN", "NT"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_grouped_gemm(shape, dtype, transposed, rng):
    x, w, _, _, sizes = data(shape, dtype, rng, transposed)
    lhs = GroupedNoScaleTensor(x, None, sizes, None, x.shape)
    rhs = GroupedNoScaleTensor(w, None, jnp.zeros((0,), jnp.int32), None, w.shape)
    out = jax.jit(lambda lhs, rhs: grouped_gemm(lhs, rhs, contracting_dims=((1,), (2 if transposed else 1,))))(lhs, rhs)
    assert out.dtype == dtype
    oracle.check(out, oracle.rows(x, w, sizes, transpose_rhs=transposed))


@jax.jit
def step(x, w, b, c, sizes):
    out, back = jax.vjp(lambda x, w, b: grouped_dense(x, w, sizes, bias=b), x, w, b)
    return out, *back(c), grouped_dbias(c, sizes)


@pytest.mark.parametrize(
    ("shape", "dtype"), sweep(ALL, [ALL[0], ALL[3]]), ids=lambda x: x.__name__ if isinstance(x, type) else str(x)
)
def test_grouped_dense(shape, dtype, rng):
    """Values, d x, d kernel and d bias, all in one step; an empty group's gradient is zero (T-02)."""
    x, w, b, c, sizes = data(shape, dtype, rng)
    out, dx, dw, db, summed = step(x, w, b, c, sizes)
    oracle.check(out, oracle.rows(x, w, sizes, bias=b))
    oracle.check(dx, oracle.rows(c, w, sizes, transpose_rhs=True))
    oracle.check(dw, oracle.contraction(x, c, sizes))
    oracle.check(db, oracle.contraction(np.ones((x.shape[0], 1)), c, sizes)[:, 0])
    assert (dx.dtype, dw.dtype, db.dtype) == (dtype,) * 3
    assert not np.asarray(dw[1]).any()
    oracle.check(summed, oracle.contraction(np.ones((x.shape[0], 1)), c, sizes)[:, 0])


def test_wgrad_is_the_same_call(rng):
    """S3-03, S3-04; sizes that do not sum to m (T-01) leave unowned rows, and NaN there does not leak (T-03)."""
    x, _, _, c, sizes = data(SHAPES[0], jnp.bfloat16, rng)
    sizes = sizes.at[-1].add(-8)
    x, c = x.at[-8:].set(jnp.nan), c.at[-8:].set(jnp.nan)
    tensors = [GroupedNoScaleTensor(a.ravel(), None, sizes, None, a.shape) for a in (x, c)]  # stored flat
    out = jax.jit(lambda a, b: grouped_gemm(a, b, contracting_dims=((0,), (0,))))(*tensors)
    oracle.check(out, oracle.contraction(x, c, sizes))
    assert np.isfinite(np.asarray(grouped_dbias(c, sizes), np.float32)).all()


def test_arguments_that_the_original_ignores_or_refuses_are_honoured(rng):
    """T-06: group_offset, precision, a bias, vmap; and gradients have the dtypes of their operands."""
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
    """T-08: the gradient of a bias over 512 rows, where a bfloat16 sum would stop at 256."""
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


# ---------------------------------------------------------------------------------------------------------------------
# Scales

MODES = list(ScalingMode)[1:]
ERROR = {"float8_e4m3fn": 2**-4, "float8_e5m2": 2**-3}  # rounding error, relative to the largest magnitude of a block


def quantizer(mode, dtype=jnp.float8_e4m3fn, layout=QuantizeLayout.ROWWISE, groups=4):
    return QuantizerFactory.create(1, mode, dtype, layout, groups)


@pytest.mark.parametrize(
    ("mode", "ragged"), [*((mode, True) for mode in MODES), (MODES[1], False)], ids=lambda x: getattr(x, "name", str(x))
)
def test_grouped_quantize(mode, ragged, rng):
    """T-04, T-05: both layouts, three axes, sizes of any values; under jit, and back; unowned rows count in no scale."""
    x = rng.normal(size=(75, 3, 40) if ragged else (4, 35, 3, 40)).astype(np.float32)
    sizes, groups = (np.array([33, 0, 7, 30], np.int32), 4) if ragged else (None, 4)
    x *= np.repeat([1, 10, 1e3, 0.1, 1e9], [33, 0, 7, 30, 5]).reshape(-1, 1, 1) if ragged else 1
    x = x.astype(np.float32)
    if ragged:
        x[70:] = np.nan
    axis = 1 if ragged else 2
    q = quantizer(mode, layout=QuantizeLayout.ROWWISE_COLWISE, groups=groups)

    @jax.jit
    def call(x, q, sizes):
        grouped_quantize(x, q, sizes, flatten_axis=axis)  # delayed scaling knows after the first what there was
        both = grouped_quantize(x, q, sizes, flatten_axis=axis)
        return both, *(grouped_dequantize(both.get_tensor(usage)) for usage in (TensorUsage.LHS, TensorUsage.RHS))

    both, *back = call(x, q, sizes)
    assert isinstance(both, ScaledTensor2x) and both.rowwise_tensor.data.ndim == both.rowwise_tensor.scale_inv.ndim == 1
    starts = [(0, 33), (33, 33), (33, 40), (40, 70)] if ragged else [(i, i + 1) for i in range(4)]
    for made in back:
        assert isinstance(made, GroupedNoScaleTensor) and made.data.shape == x.shape and made.data.dtype == x.dtype
        assert not ragged or not np.asarray(made.data[70:]).any()
        for start, end in starts:
            one, two = np.asarray(made.data)[start:end], x[start:end]
            assert np.abs(one - two).max(initial=0) <= ERROR["float8_e4m3fn"] * np.abs(two).max(initial=0)
    if mode.is_tensor_scaling():
        want = [np.abs(x[a:b]).max(initial=0) for a, b in starts]
        np.testing.assert_array_equal(both.rowwise_tensor.amax, np.float32(want))
        got = both.rowwise_tensor.scale_inv * 448
        np.testing.assert_allclose(got[np.array(want) > 0], np.array(want)[np.array(want) > 0], rtol=1e-6)
    else:
        assert both.colwise_tensor.scale_inv.size == (x.size if ragged and axis == 1 else 4 * 2 * 3 * 40)


def test_delayed_scaling_looks_back(rng):
    """The scale of a call comes from earlier calls; the largest magnitude of each group is recorded."""
    q, sizes = quantizer(ScalingMode.DELAYED_TENSOR_SCALING, groups=2), jnp.array([1, 2])
    for i, most in enumerate([4.0, 2.0, 8.0]):
        made = grouped_quantize(jnp.array([[most], [0.0], [0.0], [99.0]]), q, sizes)
        assert made.scale_inv[0] == (1 if i == 0 else np.float32(4 / 448)) and made.scale_inv[1] == 1
        assert made.amax.tolist() == [most, 0]
    assert q.scale.tolist() == [56, 1] and q.amax_history[0].max() == 8
    # no scale comes from a history with NaN, of which a maximum of so many numbers might not tell
    q = quantizer(ScalingMode.DELAYED_TENSOR_SCALING, groups=8)
    q.update(jnp.arange(8.0).at[2].set(jnp.nan))
    q.update(jnp.full(8, 4.0))
    np.testing.assert_allclose(q.scale, [112, 112, 1, 112, 112, 448 / 5, 448 / 6, 64], rtol=1e-6)


@pytest.mark.parametrize("mode", MODES[1:], ids=lambda mode: mode.name)
def test_grouped_gemm_of_scaled_tensors(mode, rng):
    """R-08: scaled x scaled and scaled x plain, in all three passes, equal the products of the dequantized tensors."""
    x, w, _, c, sizes = data((4, 5, 32, 64), jnp.float32, rng)
    sizes = sizes.at[-1].add(-3)
    x, c = x.at[-3:].set(jnp.nan), c.at[-3:].set(jnp.nan)

    @jax.jit
    def call(x, w, c, sizes):
        made = [grouped_quantize(x, quantizer(mode), sizes), grouped_quantize(w, quantizer(mode)),
                grouped_quantize(c, quantizer(mode, jnp.float8_e5m2), sizes)]  # fmt: skip
        xs, ws, cs = made
        plain = GroupedNoScaleTensor(w, None, None, None, w.shape)
        out = [grouped_gemm(xs, each, contracting_dims=((1,), (1,))) for each in (ws, plain)]
        out += [
            grouped_gemm(cs, ws, contracting_dims=((1,), (2,))),
            grouped_gemm(xs, cs, contracting_dims=((0,), (0,))),
        ]
        return out, [each.dequantize() for each in made]

    (forward, mixed, dx, dw), (a, b, d) = call(x, w, c, sizes)
    oracle.check(forward, oracle.rows(a, b, sizes))
    oracle.check(mixed, oracle.rows(a, w, sizes))
    oracle.check(dx, oracle.rows(d, b, sizes, transpose_rhs=True))
    oracle.check(dw, oracle.contraction(a, d, sizes))


@pytest.mark.parametrize("mode", MODES[:2], ids=lambda mode: mode.name)
def test_grouped_dense_with_quantizers(mode, rng):
    """Values and gradients are near the exact ones; d bias is exact; the gradient of the set is the next set."""
    x, w, b, c, sizes = data((4, 5, 32, 64), jnp.bfloat16, rng)
    quantizers = QuantizerFactory.create_set(scaling_mode=mode, n_groups=4)

    @jax.jit
    def step(x, w, b, quantizers):
        layer = lambda x, w, b, quantizers: grouped_dense(x, w, sizes, bias=b, quantizer_set=quantizers)
        out, back = jax.vjp(layer, x, w, b, quantizers)
        lhs, rhs = (GroupedNoScaleTensor(a, None, s, None, a.shape) for a, s in ((x, sizes), (w, None)))
        same = grouped_gemm(lhs, rhs, contracting_dims=((1,), (1,)), bias=b, quantizer_set=quantizers)
        return out, same, *back(c)

    out, same, dx, dw, db, after = step(x, w, b, quantizers)
    assert [d.dtype for d in (out, dx, dw, db)] == [jnp.bfloat16] * 4 and isinstance(after, QuantizerSet)
    wants = (oracle.rows(x, w, sizes, bias=b), oracle.rows(c, w, sizes, transpose_rhs=True),
             oracle.contraction(x, c, sizes))  # fmt: skip
    for got, want in zip((out, dx, dw), wants, strict=True):
        assert 5e-3 < np.linalg.norm(oracle.wide(got) - want) / np.linalg.norm(want) < 0.1
    np.testing.assert_array_equal(out, same)
    oracle.check(db, oracle.contraction(np.ones((x.shape[0], 1)), c, sizes)[:, 0])
    if mode is ScalingMode.DELAYED_TENSOR_SCALING:
        most = np.array([np.abs(oracle.wide(x)[s:e]).max(initial=0) for s, e in oracle.bounds(sizes, len(x))])
        np.testing.assert_allclose(after.x.scale, np.where(most, 448 / np.where(most, most, 1), 1), rtol=1e-6)
        again = oracle.wide(step(x, w, b, after)[0])
        assert np.linalg.norm(again - wants[0]) / np.linalg.norm(wants[0]) < 0.1 and (again != oracle.wide(out)).any()


def test_quantized_kernels_that_all_devices_share(rng):
    """Rows are sharded: gradients of the kernel are sums over devices, and so the next scales look at all rows."""
    x, w, b, c, sizes = data((4, 4, 8, 16), jnp.float32, rng)
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    quantizers = QuantizerFactory.create_set(scaling_mode=ScalingMode.DELAYED_TENSOR_SCALING, n_groups=4)
    sizes = sizes.at[-1].add(-2)

    def layer(x, w, b, sizes, quantizers):
        return grouped_dense(x, w, sizes, bias=b, quantizer_set=quantizers)

    def whole(x, w, b, quantizers):
        parts = (layer(x, w, b, sizes, quantizers), layer(-2 * x, w, b, sizes, quantizers))
        return (jnp.concatenate(parts) * jnp.concatenate([c, c])).sum()

    def sharded(x, w, b, quantizers):
        spec = jax.sharding.PartitionSpec
        specs = spec("d"), spec(), spec(), spec("d"), spec()
        of_mesh = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=spec("d"))
        rows, both = jnp.concatenate([x, -2 * x]), jnp.concatenate([sizes, sizes])
        return (of_mesh(rows, w, b, both, quantizers) * jnp.concatenate([c, c])).sum()

    (dw, after), (want, _) = jax.jit(lambda *args: [jax.grad(f, (1, 3))(*args) for f in (sharded, whole)])(
        x, w, b, quantizers
    )
    np.testing.assert_allclose(dw, want, rtol=1e-5, atol=1e-5)
    most = np.array([np.abs(2 * np.asarray(x)[s:e]).max(initial=0) for s, e in oracle.bounds(sizes, len(x))])
    np.testing.assert_allclose(after.x.scale, np.where(most, 448 / np.where(most, most, 1), 1), rtol=1e-6)


def test_without_a_quantizer_nothing_is_scaled():
    """R-13, R-12: without a quantizer a tensor comes back unchanged, with its own sizes."""
    x = GroupedNoScaleTensor(jnp.ones((4, 2)), None, jnp.array([1, 3]), None, (4, 2))
    assert grouped_quantize(x, None) is x and grouped_dequantize(x) is x
    assert QuantizerFactory.create_set(scaling_mode=ScalingMode.NO_SCALING) == noop_quantizer_set
    made = grouped_quantize(x.data, None, x.first_dims)
    assert isinstance(made, GroupedNoScaleTensor) and made.first_dims is x.first_dims


def scaled(x, **changes):
    """x as a tensor with scales, one per group."""
    given = {"scaling_mode": ScalingMode.CURRENT_TENSOR_SCALING, "scale_inv": jnp.ones(2), **changes}
    return GroupedScaledTensor1x(
        data=x.data.ravel().astype(jnp.float8_e4m3fn), amax=None, first_dims=x.first_dims, last_dims=None, dq_dtype=jnp.float32, _dq_func=None,
        is_colwise=False, flatten_axis=1, original_shape=x.original_shape, **{"data_layout": "N", **given},
    )  # fmt: skip


MX = ScalingMode.MXFP8_1D_SCALING
TWO = QuantizerFactory.create_set(scaling_mode=ScalingMode.CURRENT_TENSOR_SCALING, n_groups=2)
SET = QuantizerFactory.create_set(scaling_mode=ScalingMode.CURRENT_TENSOR_SCALING, n_groups=3)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda x, w: grouped_gemm(x.data, w), TypeError, "lhs: want a GroupedNoScaleTensor or a GroupedScaledTensor1x; got ArrayImpl"),
        (lambda x, w: grouped_gemm(x, scaled(w, scale_inv=jnp.ones(3))), ValueError, r"rhs.scale_inv: want 2 scales, not padded; got shape \(3,\)"),
        (lambda x, w: grouped_gemm(scaled(x, scaling_mode=MX), w), ValueError, "lhs.scale_inv: want 4 scales"),
        (lambda x, w: grouped_gemm(scaled(x, data_layout="T"), w), ValueError, "lhs.data_layout: want 'N'"),
        (lambda x, w: grouped_gemm(scaled(x, pre_swizzled=True), w), ValueError, "lhs.pre_swizzled: want False"),
        (lambda x, w: grouped_gemm(scaled(x), scaled(w), quantizer_set=SET), ValueError, "lhs and rhs are quantized already"),
        (lambda x, w: grouped_gemm(x, w, quantizer_set=SET), ValueError, "quantizer: is for 3 groups; got a tensor of 2"),
        (lambda x, w: grouped_dense(x.data[None], w.data, [1, 3], quantizer_set=SET), ValueError, r"quantizer_set: goes with x \[m, k\]"),
        (lambda x, w: grouped_quantize(x, SET.x, x.first_dims), ValueError, "group_sizes: a GroupedNoScaleTensor has its own"),
        (lambda x, w: grouped_quantize(x, SET.x, flatten_axis=2), ValueError, "flatten_axis: want an axis after the first of 2; got 2"),
        (lambda x, w: quantizer(MX, jnp.int8), TypeError, "q_dtype: want float8_e4m3fn or float8_e5m2; got int8"),
        (lambda x, w: quantizer(MX, groups=None), ValueError, "n_groups: want the number of groups"),
        (lambda x, w: quantizer("mx"), TypeError, "scaling_mode: want a ScalingMode; got 'mx'"),
        (lambda x, w: scaled(x, scaling_mode=MX).get_tensor(TensorUsage.RHS), ValueError, "usage: RHS wants a tensor with is_colwise=True"),
        (lambda x, w: tr.grouped_gemm(x, w, contracting_dims=((1,), (1,))), TypeError, "lhs: want a GroupedTensor"),
        (lambda x, w: grouped_gemm(dataclasses.replace(x, original_shape=(5, 2)), w), ValueError, r"lhs: its data have shape \(4, 2\); want as many numbers as original_shape \(5, 2\)"),
        (lambda x, w: grouped_gemm(w, w), ValueError, "Cannot infer number of gemms"),
        (lambda x, w: grouped_gemm(x, w, quantizer_set="fp8"), TypeError, "quantizer_set: want a QuantizerSet; got str"),
        (lambda x, w: grouped_dense(x.data, w.data, [1, 3], kernel_fsdp_info=("x", 0)), ValueError, "kernel_fsdp_info"),
        (lambda x, w: grouped_gemm(x, w, "ab", quantizer_set=TWO), ValueError, "contracting_dims: want two sequences of ints; got 'ab'"),
        (lambda x, w: grouped_gemm(dataclasses.replace(x, original_shape=3.5), w), TypeError, "lhs.original_shape: want a tuple of ints; got 3.5"),
        (lambda x, w: grouped_gemm(dataclasses.replace(x, first_dims=jnp.array([1.5])), w), TypeError, "lhs.first_dims: want an integer dtype; got float32"),
        (lambda x, w: grouped_gemm(scaled(x, scaling_mode="mx"), w), TypeError, "lhs.scaling_mode: want a ScalingMode; got 'mx'"),
        (lambda x, w: grouped_gemm(x, w, quantizer_set=QuantizerSet("fp8")), TypeError, "quantizer_set.x: want None or a GroupedQuantizer; got str"),
        (lambda x, w: grouped_dense(x.data, w.data, [1, 3], (1, 1), quantizer_set=TWO), ValueError, "contracting_dims: want two sequences"),
        (lambda x, w: grouped_dense(x.data, w.data, 3, quantizer_set=TWO), ValueError, "group_sizes: want 1 dimension"),
        (lambda x, w: grouped_dense(x.data, w.data, [1, 4], quantizer_set=TWO), ValueError, "group_sizes: must sum to at most 4"),
        (lambda x, w: grouped_dense(x.data, w.data, [1, 3], group_offset=1, quantizer_set=TWO), ValueError, r"group_offset: the window \[1, 3\)"),
        (lambda x, w: grouped_dense(x.data > 0, w.data, [1, 3]), TypeError, "x: want a number dtype; got bool"),
        (lambda x, w: grouped_dense(x.data, w.data.astype(int), [1, 3], quantizer_set=TWO), TypeError, "kernel: want a float dtype to quantize; got int32"),
        (lambda x, w: grouped_quantize(x.data, TWO.x, "ab"), TypeError, "group_sizes: want an array; got str"),
        (lambda x, w: grouped_quantize(x.data, "fp8", [1, 3]), TypeError, "quantizer: want None or a GroupedQuantizer, .*; got str"),
        (lambda x, w: grouped_quantize(x.data.astype(int), TWO.x, [1, 3]), TypeError, "x: want a float dtype to quantize; got int32"),
        (lambda x, w: grouped_quantize(x.data, TWO.x, [1, 3], 1.5), ValueError, "flatten_axis: want an axis after the first of 2; got 1.5"),
        (lambda x, w: grouped_dequantize(x.data), TypeError, "tensor: want one that grouped_quantize makes; got ArrayImpl"),
        (lambda x, w: grouped_gemm(ScaledTensor2x(scaled(x), scaled(x)), w), TypeError, r"lhs: want a .*; got ScaledTensor2x; choose one by get_tensor"),
        (lambda x, w: quantizer(MX, "fp8"), TypeError, "q_dtype: want float8_e4m3fn or float8_e5m2; got 'fp8'"),
        (lambda x, w: quantizer(MX, layout="rows"), TypeError, "q_layout: want a QuantizeLayout; got 'rows'"),
        (lambda x, w: quantizer(MX, groups=0), ValueError, "n_groups: want a positive int; got 0"),
        (lambda x, w: QuantizerFactory.create_set(scaling_mode=MX, bwd_dtype="e5", n_groups=2), TypeError, "bwd_dtype: want float8_e4m3fn or float8_e5m2"),
        (lambda x, w: QuantizerFactory.create_set(scaling_mode="mx"), TypeError, "scaling_mode: want a ScalingMode; got 'mx'"),
        (lambda x, w: QuantizerFactory.create(0, MX), ValueError, "n_quantizers: want a positive int; got 0"),
        (lambda x, w: grouped_dbias(w.data, x.first_dims), ValueError, "grad: want 2 dimensions"),
    ],
)  # fmt: skip
def test_errors(make, error, words):
    """R-07, R-08, R-16: scales and other arguments are never ignored, and each error names its argument."""
    x = GroupedNoScaleTensor(jnp.ones((4, 2)), None, jnp.array([1, 3]), None, (4, 2))
    w = GroupedNoScaleTensor(jnp.ones((2, 2, 2)), None, None, None, (2, 2, 2))
    with pytest.raises(error, match=words):
        make(x, w)


def test_is_a_pytree_with_children_in_order():
    """R-11, R-09: and first_dims is next to last_dims."""
    x = GroupedNoScaleTensor(1.0, 2.0, 3.0, 4.0, (1,))
    assert jax.tree.leaves(x) == [1.0, 2.0, 3.0, 4.0]
    assert jax.tree.map(lambda a: a, x) == x
