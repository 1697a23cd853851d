"""The order in which weights are stored: shape and meaning stay, and the kernels of GPUs read them as they lie."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import close
from stand_in import qarray
from sweep import sweep

import trencadis as tr
from trencadis.quant import Scaled, prepare, quantize

pytestmark = pytest.mark.core

M, K, N, SIZES = 11, 64, 24, np.array([4, 0, 5])  # the last two rows are unowned
G = len(SIZES)


@pytest.fixture
def x(rng):
    x = rng.normal(size=(M, K)).astype(np.float32)
    x[9:] = np.nan
    return x


@pytest.fixture
def w(rng):
    return rng.normal(size=(G, K, N)).astype(np.float32)


def wide(q):
    return np.asarray(q.dequantize(), np.float64)


def stored(q):
    return q.tree_flatten()[0][0].shape


@pytest.mark.parametrize(
    ("granularity", "contracting", "shape"),
    [
        ("column", None, (G, N, K)), ("tensor", None, (G, N, K)), ((1, 32, 8), None, (G, N, K)),
        ((1, 32, 1), None, (G, N, K)), ((1, 1, 1), None, (G, N, K)), ("row", None, (G, K, N)),
        ((1, 1, 8), None, (G, K, N)), ("column", -1, (G, K, N)), ("column", 2, (G, K, N)), ("row", 1, (G, N, K)),
    ],
)  # fmt: skip
def test_quantize_stores_the_contracted_axis_last(granularity, contracting, shape, w):
    q = jax.eval_shape(lambda w: quantize(w, "int8", granularity, contracting=contracting), w)
    assert q.shape == (G, K, N) == q.values.shape and stored(q) == shape and q.transposed == (shape[1] == N)
    assert quantize(jnp.ones((4, 8)), "int8", "column").transposed is False  # rows [m, k]


def test_prepare_keeps_shape_and_meaning(w):
    plain = quantize(w, "int8", (1, 16, 1), contracting=-1)
    q = prepare(plain)
    assert stored(q) == (G, N, K) and repr(q) == repr(plain) and prepare(q) is q
    np.testing.assert_array_equal(q.dequantize(), plain.dequantize())
    np.testing.assert_array_equal(q.values, plain.values)
    back = prepare(q, contracting=-1)
    assert stored(back) == (G, K, N) and (back.scale == plain.scale).all()
    assert prepare(qarray(w, "int8", (1, 0, 1))).transposed
    bare = prepare(np.asarray(plain.values))
    np.testing.assert_array_equal(bare.dequantize(), np.asarray(plain.values, np.float32))
    assert prepare(plain.mT, contracting=-1).shape == (G, N, K) and stored(prepare(plain.mT, contracting=-1))[2] == K


def test_views_move_nothing(w):
    q = quantize(w, "nvfp4", (1, 16, 1))
    leaf = q.tree_flatten()[0][0]
    for view in (q.mT, q.mT.mT, q.transpose(0, 2, 1), q.merged(1, 1, 1)):
        assert view.tree_flatten()[0][0] is leaf
    part = q[1:]
    assert part.transposed and stored(part) == (2, N, K)
    np.testing.assert_array_equal(part.dequantize(), q.dequantize()[1:])
    np.testing.assert_array_equal(q[2].dequantize(), q.dequantize()[2])
    np.testing.assert_array_equal(q.mT[2][3:].dequantize(), q.dequantize()[2, :, 3:].T)
    np.testing.assert_array_equal(q.merged(1, 2).dequantize(), q.dequantize().reshape(G, -1))
    np.testing.assert_array_equal(q.transpose(2, 0, 1).dequantize(), q.dequantize().transpose(2, 0, 1))


def test_products_gradients_and_transformations(x, w, rng):
    """Of either order, with and without transpose_rhs, in jit, scan over layers, vmap and with donated weights."""
    q = quantize(w, "int8", (1, 32, 1))
    plain, ct = prepare(q, contracting=-1), rng.normal(size=(M, N)).astype(np.float32)
    want, d_want = oracle.rows(x, wide(q), SIZES), oracle.rows(ct, wide(q), SIZES, transpose_rhs=True)

    @jax.jit
    def both(x, q, plain):
        def loss(x, w, **how):
            out = tr.grouped_matmul(x, w, SIZES, **how)
            return jnp.where(jnp.arange(M)[:, None] < 9, out * ct, 0).sum(), out

        pulled = jax.value_and_grad(loss, has_aux=True)
        return [pulled(x, q), pulled(x, plain), pulled(x, q.mT, transpose_rhs=True)]

    for (_, out), d_x in both(x, q, plain):
        close(out, want)
        close(d_x, d_want)

    layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), q, prepare(quantize(2 * w, "int8", (1, 32, 1))))

    @jax.jit
    def scanned(x, layers):
        return jax.lax.scan(lambda carry, w: (carry, tr.grouped_matmul(x, w, SIZES)), 0, layers)[1]

    close(scanned(x, layers)[1], 2 * want)
    close(jax.jit(jax.vmap(lambda w: tr.grouped_matmul(x, w, SIZES)))(layers)[0], want)
    again = jax.jit(lambda q: q, donate_argnums=0)(jax.tree.map(jnp.copy, q))
    assert again.transposed and (again.values == q.values).all()


# ---------------------------------------------------------------------------------------------------------------------
# Interleaved along k


FORMATS = [("mxfp4", (1, 32, 1)), ("nvfp4", (1, 16, 1)), ("mxfp8", (1, 32, 1)), ("int4", (1, 32, 1)),
           ("int8", "column"), ("float4_e2m1fn", "column"), ("float8_e4m3fn", (1, 32, 8))]  # fmt: skip


@pytest.mark.parametrize(("format", "granularity"), sweep(FORMATS, [FORMATS[1], FORMATS[3], FORMATS[6]]))
def test_interleaved_weights_are_the_same_weights(format, granularity, x, w, rng):
    """By value, in views and products, with their gradients, on a backend that reads them in order."""
    plain = quantize(w, format, granularity)
    q = prepare(plain, interleave=True)
    assert q.interleaved and q.transposed and stored(q) == (G, N, K) and repr(q) == repr(plain)
    leaves = jax.tree.leaves(q), jax.tree.leaves(plain)
    assert [x.dtype for x in leaves[0]] == [x.dtype for x in leaves[1]]
    views = [lambda q: q, lambda q: q.mT, lambda q: q[1:], lambda q: q[2], lambda q: q.mT[1], lambda q: q.merged(1, 2),
             lambda q: q.transpose(2, 0, 1), lambda q: prepare(q, contracting=-1)]  # fmt: skip
    for view in views:
        np.testing.assert_array_equal(view(q).dequantize(), view(plain).dequantize())
    assert q[1:].interleaved and q.mT.interleaved
    np.testing.assert_array_equal(np.asarray(q.values).view(np.uint8), np.asarray(plain.values).view(np.uint8))
    assert prepare(q, interleave=True) is q and not prepare(q, interleave=False).interleaved

    ct = rng.normal(size=(M, N)).astype(np.float32)

    @jax.jit
    def both(x, q):
        out, pullback = jax.vjp(lambda x: tr.grouped_matmul(x, q, SIZES), x)
        return out, pullback(ct)[0], tr.grouped_matmul(x, q.mT, SIZES, transpose_rhs=True)

    for got, want in zip(both(x, q), both(x, plain), strict=True):
        np.testing.assert_array_equal(got, want)


def test_interleaved_weights_in_transformations(x, w):
    q = prepare(quantize(w, "mxfp4", (1, 32, 1)), interleave=True)
    want = tr.grouped_matmul(x, q, SIZES)
    layers = jax.tree.map(
        lambda *leaves: jnp.stack(leaves), q, prepare(quantize(2 * w, "mxfp4", (1, 32, 1)), interleave=True)
    )
    scanned = jax.jit(lambda x, layers: jax.lax.scan(lambda c, w: (c, tr.grouped_matmul(x, w, SIZES)), 0, layers)[1])
    np.testing.assert_array_equal(scanned(x, layers)[1], 2 * want)
    np.testing.assert_array_equal(jax.jit(jax.vmap(lambda w: tr.grouped_matmul(x, w, SIZES)))(layers)[0], want)
    again = jax.tree.map(lambda x: x, q)
    np.testing.assert_array_equal(q.mT[1][3:].dequantize(), q.dequantize()[1, :, 3:].T)  # a matrix is cut in order
    assert again.interleaved and not q.mT[1][3:].interleaved and jax.eval_shape(lambda q: q, q).interleaved
    close(jax.jvp(lambda x: tr.grouped_matmul(x, q, SIZES), (x,), (x,))[1], want)
    assert (
        jax.eval_shape(lambda w: prepare(quantize(w, "mxfp4", (1, 32, 1)), interleave=True), w).values.shape == w.shape
    )


def test_the_contracted_axis_is_last_but_one_on_a_tpu(w):
    q = quantize(w, "mxfp4", (1, 32, 1))
    with tr.target("v6e"):
        assert q.transposed and stored(prepare(q)) == stored(prepare(q, contracting=1)) == (G, K, N)
        assert stored(prepare(q.mT, contracting=-1)) == (G, K, N)
        with pytest.raises(ValueError, match="contracting: want one of the last two axes"):
            prepare(q, contracting=0)


def test_weights_are_interleaved_for_a_hopper_gpu_that_unpacks_them(w):
    made = {format: quantize(w, format, granularity) for format, granularity in FORMATS}
    assert not any(prepare(q).interleaved for q in made.values())  # of this machine
    with tr.target("h200"):
        found = {format for format, q in made.items() if prepare(q).interleaved}
        assert not prepare(quantize(w[:, :48], "int4", "column")).interleaved  # not whole runs
        assert not quantize(w, "mxfp4", (1, 32, 1)).interleaved
        assert not prepare(Scaled(made["int4"].values, made["int4"].scale, "int4", (1, 32, 1),
                                  zeros=jnp.zeros((G, 2, N), jnp.int4))).interleaved  # fmt: skip
    assert found == {"mxfp4", "nvfp4", "mxfp8", "int4", "float4_e2m1fn"}
    with tr.target("b200"):
        assert not prepare(made["mxfp4"]).interleaved


# ---------------------------------------------------------------------------------------------------------------------
# Zero points


@pytest.fixture(params=["int4", "int8"])
def zeroed(request, rng):
    """Weights with zero points over the whole range of their dtype."""
    least, most = {"int4": (-8, 8), "int8": (-128, 128)}[request.param]
    draw = lambda *shape: jnp.asarray(rng.integers(least, most, shape), request.param)
    scale = jnp.asarray(rng.random((G, 2, N)), jnp.float32)
    values, zeros = draw(G, K, N), draw(G, 2, N)
    values, zeros = values.at[0, 0, 0].set(least), zeros.at[0, 0, 0].set(most - 1)  # the largest difference
    return Scaled(values, scale, request.param, (1, 32, 1), zeros=zeros)


def by_hand(q):
    values, scale, zeros = (np.asarray(x.astype(jnp.float32), np.float64) for x in (q.values, q.scale, q.zeros))
    return (values - zeros.repeat(32, 1)) * scale.repeat(32, 1)


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_zero_points_are_subtracted(zeroed, backend, x, rng):
    want = by_hand(zeroed)
    np.testing.assert_allclose(zeroed.dequantize(), want, 1e-6)
    ct = rng.normal(size=(M, N)).astype(np.float32)

    @jax.jit
    def products(x, q, ct):
        multiply = lambda x, q: tr.grouped_matmul(x, q, SIZES, backend=backend)
        out, pullback = jax.vjp(lambda x: multiply(x, q), x)
        return out, pullback(ct)[0], multiply(x, prepare(q)), multiply(quantize(x, "int8", (1, 32)), q)

    out, d_x, other, both = products(x, zeroed, ct)
    close(out, oracle.rows(x, want, SIZES))
    close(other, oracle.rows(x, want, SIZES))
    close(d_x, oracle.rows(ct, want, SIZES, transpose_rhs=True))
    rows = np.asarray(quantize(np.nan_to_num(x), "int8", (1, 32)).dequantize(), np.float64)
    close(both, oracle.rows(rows, want, SIZES))


def test_zero_points_follow_the_axes(zeroed):
    want = by_hand(zeroed)
    assert repr(zeroed).startswith(f"Scaled({zeroed.format}[3,64,24], scales float32[3,2,24] and zero points ")
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(zeroed)]
    assert paths == [".values", ".scale", ".zeros"]
    views = [
        (zeroed.mT, want.swapaxes(1, 2)), (zeroed.transpose(2, 0, 1), want.transpose(2, 0, 1)), (zeroed[1:], want[1:]),
        (zeroed[2], want[2]), (zeroed.merged(2, 1), want.reshape(-1, N)), (zeroed.merged(1, 2), want.reshape(G, -1)),
        (prepare(zeroed), want),
    ]  # fmt: skip
    for view, expected in views:
        np.testing.assert_allclose(view.dequantize(), expected, 1e-6)
    assert zeroed.nbytes == sum(-(-x.size * (4 if x.dtype == jnp.int4 else 8 * x.dtype.itemsize) // 8)
                                for x in jax.tree.leaves(zeroed))  # fmt: skip


def test_a_contraction_with_zero_points(rng):
    values, zeros = (jnp.asarray(rng.integers(-8, 8, shape), jnp.int4) for shape in ((M, 8), (1, 8)))
    q = Scaled(values, jnp.ones((1, 8)), "int4", (M, 1), zeros=zeros)
    y = rng.normal(size=(M, 4)).astype(np.float32)
    for lhs, flag in ((q, True), (q.mT, False)):
        got = tr.transposed_grouped_matmul(lhs, y, SIZES, transpose_lhs=flag)
        close(got, oracle.contraction(wide(q), y, SIZES))


INT8 = jnp.ones((2, 4, 6), jnp.int8)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Scaled(INT8, jnp.ones((2, 1, 6)), "int8", (1, 4, 1), zeros=jnp.ones((2, 1, 6))), "zeros: want int8"),
        (lambda: Scaled(INT8, jnp.ones((2, 1, 6)), "int8", (1, 4, 1), zeros=INT8), r"zeros: .* shape \(2, 1, 6\); got"),
        (
            lambda: Scaled(jnp.ones((2, 4), jnp.float8_e5m2), jnp.ones((1, 1)), "float8_e5m2", (2, 4), zeros=INT8),
            "zeros: want values of integers; got float8_e5m2",
        ),
        (lambda: Scaled(INT8[0, 0], jnp.ones(1), "int8", (6,), transposed=True), "transposed: want values of at least"),
        (lambda: quantize(jnp.ones((2, 4, 6)), "int8", contracting=0), "contracting: want one of the last two axes"),
        (lambda: prepare(jnp.ones((2, 4, 6), jnp.bfloat16)), "w: want one of int8, .*; got bfloat16; products read it"),
        (lambda: prepare("w"), "w: want a Scaled, a qwix.QArray or an array; got str"),
        (
            lambda: prepare(INT8, interleave=True),
            r"interleaved: want a multiple of 16 entries along axis -2, which is stored last; got shape \(2, 4, 6\)",
        ),
        (lambda: prepare(INT8, interleave=1), "interleave: want True, False or None; got 1"),
        (lambda: prepare(INT8[0, 0]), r"w: want weights of at least 2 dimensions, .*; got shape \(6,\)"),
    ],
)
def test_errors_name_the_argument(make, words):
    with pytest.raises((TypeError, ValueError), match=words):
        make()


# ---------------------------------------------------------------------------------------------------------------------
# On a GPU


def forward(w, dtype=jnp.bfloat16):
    x = jax.ShapeDtypeStruct((256, 512), dtype)
    return tr.why(x, w, jax.ShapeDtypeStruct((4,), jnp.int32), jnp.bfloat16, target="h200").passes


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_why_recommends_it_and_finds_nothing_to_say_then(dtype):
    w = jax.ShapeDtypeStruct((4, 512, 1024), jnp.float32)
    for format in ("float8_e4m3fn", "int4") if dtype == "bfloat16" else ("float8_e4m3fn",):
        q = jax.eval_shape(lambda w, f=format: quantize(w, f, "column"), w)
        first, d_lhs, _ = forward(q, dtype)
        assert first.plan.backend == "gpu" and first.problem.transpose_rhs and not first.plan.slow
        assert not any(copy.startswith("transpose") for copy in first.copies) and not d_lhs.plan.slow
        slow = forward(jax.eval_shape(lambda q: prepare(q, contracting=-1), q), dtype)[0]
        assert f"{format} weights are stored [g, k, n]" in str(slow) and "trencadis.quant.prepare(w)" in str(slow)
    assert not forward(jax.ShapeDtypeStruct((4, 512, 1024), jnp.bfloat16), jnp.bfloat16)[0].plan.slow


def test_a_warning_recommends_it():
    x, w = (jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn) for shape in ((64, 128), (4, 128, 256)))
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
    multiply = lambda x, w, s: tr.grouped_matmul(x, w, s, jnp.bfloat16)
    with tr.target("h200"):
        with pytest.warns(tr.PerformanceWarning, match=r"stored \[g, k, n\].*trencadis.quant.prepare\(w\)"):
            jax.jit(multiply).trace(x, w, sizes).lower(lowering_platforms=("cuda",))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            jax.jit(multiply).trace(x, jax.eval_shape(prepare, w), sizes).lower(lowering_platforms=("cuda",))


def test_interleaved_weights_on_gpus():
    """The kernel for Hopper reads them; elsewhere they are put in order first, and a warning says so."""
    w = jax.ShapeDtypeStruct((4, 512, 1024), jnp.float32)
    with tr.target("h200"):
        q = jax.eval_shape(lambda w: prepare(quantize(w, "mxfp4", (1, 32, 1))), w)
    first, d_lhs, _ = forward(q)
    assert first.plan.problem.interleaved and not first.plan.slow and not d_lhs.plan.slow
    assert first.plan.backend == "gpu" and not d_lhs.plan.problem.interleaved
    assert "float4_e2m1fnᵀ interleaved" in str(first.problem)
    x, sizes = jax.ShapeDtypeStruct((256, 512), jnp.bfloat16), jax.ShapeDtypeStruct((4,), jnp.int32)
    multiply = lambda x, w, s: tr.grouped_matmul(x, w, s, jnp.bfloat16)
    with (
        tr.target("b200"),
        pytest.warns(tr.PerformanceWarning, match=r"are interleaved.*trencadis.quant.prepare\(w, interleave=False\)"),
    ):
        jax.jit(multiply).trace(x, q, sizes).lower(lowering_platforms=("cuda",))
