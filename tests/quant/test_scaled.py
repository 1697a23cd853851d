"""`Scaled`: its checks, its life as a pytree, and products, which equal those of the dequantized operands."""

import copy
import dataclasses
import functools
import itertools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from oracle import close, rows
from sweep import sweep

import trencadis as tr
from trencadis.quant import FORMATS, Scaled, dequantize, quantize

pytestmark = pytest.mark.core

M, K, N, SIZES = 11, 70, 6, np.array([4, 0, 5])  # the last two rows are unowned
G = len(SIZES)
FREE = [name for name, each in FORMATS.items() if not each.block]


@pytest.fixture
def x(rng):
    return rng.normal(size=(M, K)).astype(np.float32)


@pytest.fixture
def w(rng):
    return rng.normal(size=(G, K, N)).astype(np.float32) * np.array([1, 100, 0.01], np.float32)[:, None, None]


def entry_by_entry(q):
    """What a Scaled stands for, by the definition."""
    values, scale = np.asarray(q.values.astype(jnp.float32), np.float64), np.asarray(q.scale.astype(jnp.float32))
    total = 1.0 if q.total is None else float(q.total)
    blocks = (np.arange(size) // length for size, length in zip(q.shape, q.block, strict=True))
    return values * scale[np.ix_(*blocks)] * total


# ---------------------------------------------------------------------------------------------------------------------
# Scaled


INT8 = jnp.array([[3, -1, 2], [5, 2, 0]], jnp.int8)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Scaled(INT8, jnp.ones((2, 1)), "int8", "column"), ValueError, "block: want 2 ints, .*; got 'column'"),
        (lambda: Scaled(INT8, jnp.ones((2, 1)), "int8", None), ValueError, "block: want 2 ints, .*; got None"),
        (lambda: Scaled(INT8, jnp.ones((2, 1)), "int8", (1,)), ValueError, r"block: want 2 ints, .*; got \(1,\)"),
        (lambda: Scaled(INT8, jnp.ones((2, 1)), "int8", (1, 3.0)), ValueError, "block: want 2 ints"),
        (lambda: Scaled(INT8, jnp.ones((2, 1)), "int8", (1, 0)), ValueError, r"block: want lengths of at least 1"),
        (lambda: Scaled(INT8, jnp.ones((2, 1)), "int8", (-1, 3)), ValueError, r"block: want lengths of at least 1"),
        (lambda: Scaled(INT8, jnp.ones((2, 1)), "int7", (1, 3)), ValueError, "format: want one of .*; got 'int7'"),
        (lambda: Scaled(INT8, jnp.ones((2, 1)), None, (1, 3)), ValueError, "format: want one of .*; got None"),
        (lambda: Scaled(jnp.ones((2, 3)), jnp.ones((2, 1)), "int8", (1, 3)), TypeError, "values: want int8, .*float32"),
        (
            lambda: Scaled(INT8, jnp.ones((2, 1)), "mxfp8", (1, 3)),
            TypeError,
            "values: want float8_e4m3fn, the dtype of",
        ),
        (lambda: Scaled(INT8, jnp.ones((2, 1)).astype(int), "int8", (1, 3)), TypeError, "scale: want a float dtype"),
        (lambda: Scaled(INT8, jnp.ones((2, 1)), "int8", (1, 2)), ValueError, r"scale: .* shape \(2, 2\); got .*\(2, 1"),
        (lambda: Scaled(INT8, jnp.ones(2), "int8", (1, 3)), ValueError, r"scale: want one for each block of \(1, 3\)"),
        (lambda: Scaled(INT8, jnp.ones((2, 1)), "int8", (1, 3), jnp.ones(2)), ValueError, "total: want a scalar"),
        (lambda: Scaled(INT8, jnp.ones((2, 1)), "int8", (1, 3), jnp.array(1)), TypeError, "total: want a float dtype"),
        (lambda: Scaled([[1, 2]], jnp.ones((1, 1)), "int8", (1, 2)), TypeError, "values: want an array, .*; got list"),
        (lambda: Scaled(INT8, [[1.0], [2.0]], "int8", (1, 3)), TypeError, "scale: want an array, .*; got list"),
        (lambda: Scaled(None, None, "int8", ()), TypeError, "values: want an array, .*; got NoneType"),
        (
            lambda: dataclasses.replace(quantize(jnp.ones((2, 3)), "int8"), format="int4"),
            TypeError,
            "values: want int4",
        ),
    ],
)
def test_is_checked_when_it_is_built(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_is_made_of_anything_that_has_a_shape_and_a_dtype():
    one = Scaled(np.asarray(INT8), np.array([[0.5], [2.0]]), jnp.int8, [np.int64(1), 3], 2)
    assert (one.format, one.block) == ("int8", (1, 3)) and type(one.block[0]) is int
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(one))
    np.testing.assert_array_equal(one.dequantize(), [[3, -1, 2], [20, 8, 0]])
    spec = Scaled(jax.ShapeDtypeStruct((4, 64), jnp.float4_e2m1fn), jax.ShapeDtypeStruct((4, 2), jnp.float8_e8m0fnu),
                  "mxfp4", (1, 32))  # fmt: skip
    assert jax.eval_shape(dequantize, spec).shape == (4, 64) and spec.nbytes == 4 * 32 + 8


def test_is_compared_by_identity():
    one, other = (quantize(jnp.ones(2), "int8") for _ in range(2))
    assert one == one and one != other and len({one, other, one}) == 2


def test_transformations_put_in_what_they_like(w):
    """Nothing is checked where JAX makes one: by any leaves, of any shape."""
    q = jax.jit(lambda w: quantize(w, "nvfp4", (1, 16, 1)))(w)
    for leaf in (None, object(), P("e"), 3, jnp.ones(7), "text"):
        made = jax.tree.map(lambda _, leaf=leaf: leaf, q)
        assert type(made) is Scaled and made.block == q.block and repr(made).startswith("Scaled(")
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(q)]
    assert paths == [".values", ".scale", ".total"]
    assert copy.deepcopy(q).format == pickle.loads(pickle.dumps(q)).format == "nvfp4"
    row = jax.jit(jax.vmap(lambda x: quantize(x, "int8", "row")))(w)  # each [K, N]
    assert row.values.shape == (G, K, N) and row.block == (1, N)
    alone = jax.jit(lambda x: quantize(x, "int8", "row").dequantize())(w[1])
    np.testing.assert_array_equal(jax.jit(jax.vmap(dequantize))(row)[1], alone)
    with pytest.raises(ValueError, match=r"Scaled.block: want a length along each axis .* \(3, 70, 6\); got \(1, 6\)"):
        row.dequantize()
    with pytest.raises(TypeError, match="Scaled: want a Scaled of arrays; got"):
        jax.tree.map(lambda _: None, q).dequantize()


def test_rows_of_an_unknown_number_are_exported(x):
    """A function is exported for any m, and the blocks of rows are as long as k."""
    (m,) = jax.export.symbolic_shape("m")
    quantized = jax.jit(lambda x: quantize(x, "int8", "row"))
    exported = jax.export.export(quantized)(jax.ShapeDtypeStruct((m, K), jnp.float32))
    got, want = jax.export.deserialize(exported.serialize()).call(x), quantized(x)
    assert got.block == (1, K) and (got.values == want.values).all() and (got.scale == want.scale).all()


def test_scales_have_gradients_by_hand():
    q = quantize(jnp.array([[127.0, 50.0], [1.0, -1.0]]), "int8", "row")
    grads = jax.jit(jax.grad(lambda q: q.dequantize().sum(), allow_int=True))(q)
    assert isinstance(grads, Scaled) and grads.values.dtype == jax.dtypes.float0
    assert grads.scale.tolist() == [[177], [0]]


def test_is_transposed_and_cut(w):
    q, shared = (jax.jit(lambda w, g=g: quantize(w, "int8", g))(w) for g in ((1, 32, 1), (0, 0, 1)))
    some = [lambda q: q.mT, lambda q: q.transpose(2, 0, 1), lambda q: q[1:], lambda q: q[2], lambda q: q[np.int64(-1)]]
    back = entry_by_entry(q)
    wants = [back.swapaxes(1, 2), back.transpose(2, 0, 1), back[1:], back[2], back[2]]
    back = entry_by_entry(shared)
    wants += [back.swapaxes(1, 2), back.transpose(2, 0, 1), back[1:], back[2], back[2]]
    found = jax.jit(lambda *qs: [part(q).dequantize() for q in qs for part in some])(q, shared)
    for got, want in zip(found, wants, strict=True):
        np.testing.assert_allclose(got, want, 1e-6)
    assert q[3:].shape == jax.eval_shape(dequantize, shared[3:]).shape == (0, K, N)


def test_prints_and_weighs_what_it_holds(w):
    q = jax.eval_shape(lambda w: quantize(w, "int8", (1, 32, 1)), w)
    assert repr(q) == "Scaled(int8[3,70,6], scales float32[3,3,6] of blocks 1 x 32 x 1)"
    gradient = jax.grad(lambda q: q.dequantize().sum(), allow_int=True)(quantize(w, "int8", (1, 32, 1)))
    assert repr(gradient) == "Scaled(int8: void[3,70,6], scales float32[3,3,6] of blocks 1 x 32 x 1)"
    assert repr(jax.eval_shape(lambda w: quantize(w, "nvfp4", (1, 16, 1)), w)) == (
        "Scaled(nvfp4: float4_e2m1fn[3,70,6], scales float8_e4m3fn[3,5,6] of blocks 1 x 16 x 1, "
        "times a total float32[])"
    )
    assert jax.eval_shape(lambda w: quantize(w, "int4", "group"), w).nbytes == w.size // 2 + 4 * G


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: quantize(jnp.ones((2, 2)), "int3"), ValueError, "format: want one of int8, int4, .*; got 'int3'"),
        (lambda: quantize(jnp.ones((2, 2), jnp.int8), "int8"), TypeError, "x: want a float dtype; got int8"),
        (lambda: quantize(jnp.ones((2, 2)), "int8", "expert"), ValueError, "granularity: want one of tensor.*'expert'"),
        (lambda: quantize(jnp.ones((2, 2)), "int8", (1,)), ValueError, r"granularity: want 2 lengths .*got \(1,\)"),
        (lambda: quantize(jnp.ones(2), "int8", "column"), ValueError, "'column' wants at least 2 dimensions; got 1"),
        (lambda: quantize(jnp.ones((2, 64)), "mxfp8", "row"), ValueError, "mxfp8 has blocks of 32 along one axis"),
        (lambda: dequantize(jnp.ones(2)), TypeError, "x: want a Scaled or a GroupedTensor; got ArrayImpl"),
        (lambda: quantize(jnp.ones((4, 2)), "int8", (2, 1))[1:], ValueError, "index: blocks are 2 long"),
        (lambda: quantize(jnp.ones((4, 2)), "int8")[1, 0], TypeError, "index: want an int or a slice"),
        (lambda: quantize(jnp.ones((4, 2)), "int8")[4], IndexError, "index: want one below 4, .*; got 4"),
        (lambda: quantize(1.0, "int8")[0], IndexError, "index: a scalar has no first axis"),
        (lambda: quantize(jnp.ones(3), "int8").mT, ValueError, r"mT: want at least 2 dimensions; got shape \(3,\)"),
    ],
)  # fmt: skip
def test_errors_say_what_is_wanted(make, error, words):
    with pytest.raises(error, match=words):
        make()


# ---------------------------------------------------------------------------------------------------------------------
# Products


def exact(x):
    return entry_by_entry(x) if isinstance(x, Scaled) else np.asarray(x, np.float64)


def by_rows(x, w, sizes=SIZES):
    out, start = np.zeros((len(x), w.shape[2])), 0
    for size, matrix in zip(sizes, w, strict=True):
        out[start : start + size] = x[start : start + size] @ matrix
        start += size
    return out


def by_sums(x, y):
    ends = np.cumsum(SIZES)
    return np.stack([x[e - s : e].T @ y[e - s : e] for s, e in zip(SIZES, ends, strict=True)])


PAIRS = [("row", "column"), ("tensor", (0, 0, 1)), ((1, 32), (1, 32, 4)), ((1, 16), (1, 32, 1)), ((4, 0), "group"),
         ("row", (1, 1, 0)), ((0, 1), (0, 2, 0)), ((1, 1), (1, 32, 3))]  # fmt: skip
CASES = [("int8", *pair) for pair in PAIRS] + [("float8_e4m3fn", *pair) for pair in PAIRS[2:4]]
CASES += [(format, "row", "column") for format in FREE if format != "int8"]
CASES += [(f, (1, b), (1, b, 1)) for f, b in (("mxfp8", 32), ("mxfp4", 32), ("nvfp4", 16))]


@pytest.mark.parametrize(("format", "left", "right"), sweep(CASES, CASES[::2]), ids=str)
def test_rows_are_those_of_what_the_operands_stand_for(format, left, right, x, w):
    """Either side scaled, or both; weights stored either way; NaN in unowned rows, and in their scales."""
    q, r = quantize(x, format, left), quantize(w, format, right)
    if q.scale.shape[0] == M:
        q = Scaled(q.values, q.scale.at[9:].set(jnp.nan), q.format, q.block, q.total)
    x[9:] = np.nan

    @jax.jit
    def products(q, r, x, w):
        straight = [tr.grouped_matmul(a, b, SIZES) for a, b in ((q, r), (x, r), (q, w))]
        return *straight, tr.grouped_matmul(q, r.mT, SIZES, transpose_rhs=True)

    left, right = exact(q), exact(r)
    wants = by_rows(left, right), by_rows(x, right), by_rows(left, w), by_rows(left, right)
    for got, want in zip(products(q, r, x, w), wants, strict=True):
        close(got, want)


SUMS = [("int8", *pair) for pair in itertools.product(["tensor", "row", (0, 1), (1, 32)], ["row", (0, 1)])]


@pytest.mark.parametrize(("format", "left", "right"), [*SUMS, ("float8_e5m2", "row", "row")], ids=str)
def test_sums_are_those_of_what_the_operands_stand_for(format, left, right, x, rng):
    y = rng.normal(size=(M, N)).astype(np.float32)
    q, r = quantize(x, format, left), quantize(y, format, right)
    old = rng.normal(size=(G, K, N)).astype(np.float32)

    @jax.jit
    def products(q, r, x, y):
        pairs = (q, r), (x, r), (q, y)
        straight = [tr.transposed_grouped_matmul(a, b, SIZES, transpose_lhs=True) for a, b in pairs]
        return *straight, tr.transposed_grouped_matmul(q.transpose(), r, SIZES, existing_out=old)

    left, right = exact(q), exact(r)
    wants = by_sums(left, right), by_sums(x, right), by_sums(left, y), by_sums(left, right) + old
    for got, want in zip(products(q, r, x, y), wants, strict=True):
        close(got, want)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int4"])
def test_packed_rows_beside_scales_that_columns_share(dtype, rng):
    """JAX does not promote these rows to the dtype of the scales by itself."""
    x, q = rng.integers(-4, 5, (4, 64)), quantize(rng.normal(size=(2, 64, 8)).astype("f"), "int8", "row")
    got = tr.grouped_matmul(jnp.asarray(x).astype(dtype), q, [3, 1])
    close(got, rows(x, exact(q), [3, 1]))


def test_a_sum_is_not_cut_into_single_numbers(x, w):
    """Scales that change with every k, as those of columns do in d lhs, go to the rows."""
    splits = [
        tr.why(tr.grouped_matmul, x, quantize(w, "int8", granularity), SIZES, target="cpu").passes[0].plan.split
        for granularity in ("column", (1, 1, 0), (1, 32, 1))
    ]
    assert splits == [0, 0, 32]
    pair = quantize(x, "int8", (1, 17)), quantize(w, "int8", (1, 32, 1))  # they share no part of k: lhs is dequantized
    assert tr.why(tr.grouped_matmul, *pair, SIZES, target="cpu").passes[0].plan.split == 32


def test_integers_are_multiplied_as_integers(rng):
    """Sums of int8 products are exact, at any length: float32 would lose what is below its 24 bits."""
    k = 2**16
    x, w = (rng.integers(-127, 128, shape, np.int8) for shape in ((3, k), (1, k, 2)))
    one = [Scaled(jnp.asarray(a), jnp.ones((1,) * a.ndim), "int8", a.shape) for a in (x, w)]
    want = (x.astype(np.int64) @ w[0].astype(np.int64)).astype(np.float32)
    assert (np.asarray(tr.grouped_matmul(*one, [3])) == want).all()


def test_windows_bias_activation_and_existing_out(x, w, rng):
    q, r = quantize(x, "int8", "row"), quantize(w[1:], "int8", "column")
    bias, old = rng.normal(size=(2, N)).astype(np.float32), rng.normal(size=(M, N)).astype(np.float32)
    local = np.concatenate([np.zeros_like(w[:1]), exact(r)])
    mine = np.zeros((M, 1), bool)
    mine[4:9] = True
    want = np.where(mine, by_rows(exact(q), local), 0)
    close(tr.grouped_matmul(q, r, SIZES, group_offset=1), want)
    close(tr.grouped_matmul(q, r, SIZES, group_offset=jnp.array(1), existing_out=old), want + old)
    want = np.where(mine, want + bias[1], 0)
    close(tr.grouped_matmul(q, r, SIZES, group_offset=1, bias=bias), want)
    silu = lambda z: z / (1 + np.exp(-z))
    close(
        tr.grouped_matmul(q, r, SIZES, group_offset=1, bias=bias, activation=jax.nn.silu), np.where(mine, silu(want), 0)
    )


def test_a_bad_scale_stays_in_its_group(x, w):
    r = quantize(w, "int8", "column")
    r = Scaled(r.values, r.scale.at[0].set(jnp.nan), r.format, r.block)
    out = np.asarray(tr.grouped_matmul(x, r, SIZES))
    assert np.isnan(out[:4]).all()
    close(out[4:], by_rows(x, exact(r))[4:])


@pytest.mark.parametrize("granularity", ["column", (1, 32, 1)], ids=str)
def test_gradients_of_what_is_not_quantized(granularity, x, w, rng):
    """Weights that are quantized are constants; rows have the gradient of a product with what those stand for."""
    r, ct = quantize(w, "int8", granularity), rng.normal(size=(M, N)).astype(np.float32)
    loss = lambda x, r: (tr.grouped_matmul(x, r, SIZES) * ct).sum()
    got = jax.jit(jax.grad(loss))(x, r)
    close(got, by_rows(ct, exact(r).swapaxes(1, 2)))
    ones = lambda bias: tr.grouped_matmul(x, r, SIZES, bias=bias).sum()
    d_bias = jax.grad(ones)(jnp.zeros((G, N), jnp.bfloat16))
    assert d_bias.dtype == jnp.bfloat16 and d_bias[:, 0].tolist() == SIZES.tolist()
    many = jax.vmap(lambda x: tr.grouped_matmul(x, r, SIZES))(np.stack([x, 2 * x]))
    close(many[1], by_rows(2 * x, exact(r)))


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_scales_for_each_of_k_are_as_exact_as_the_result(format, x, w):
    """They are multiplied into the weights, in float32 unless the result is rounded as well; `why` says so."""
    x, r = jnp.where(np.isnan(x), 0, x).astype(jnp.bfloat16), quantize(w, format, (1, 1, 4))
    close(tr.grouped_matmul(x, r, SIZES, jnp.float32), by_rows(np.asarray(x, np.float64), exact(r)))
    for dtype in (jnp.bfloat16, jnp.float32):
        (plan, *_) = tr.why(lambda x, r, dtype=dtype: tr.grouped_matmul(x, r, SIZES, dtype), x, r, target="h200").passes
        assert f"weights times scales before it, in {jnp.dtype(dtype)}" in str(plan.plan)


def test_a_gradient_takes_one_product_for_each_of_its_terms(x, w, rng):
    """Scales along k do not change what runs in the forward pass, nor is anything multiplied by zeros."""
    q, r = quantize(x, "float8_e4m3fn", (1, 32)), quantize(w, "float8_e4m3fn", (1, 32, 1))
    bias = jnp.asarray(rng.normal(size=(G, N)), jnp.float32)

    def layer(lhs, bias):
        return (tr.grouped_matmul(lhs, r, SIZES, bias=bias, activation=jnp.tanh) ** 2).sum()

    def products(loss, argnums):
        gradient = jax.grad(loss, argnums=argnums)
        return str(jax.make_jaxpr(gradient)(jnp.asarray(x), bias)).count("grouped_matmul[")

    assert products(layer, 0) == 2  # forward, d x
    assert products(layer, (0, 1)) == 3  # forward, d x, d bias
    assert products(lambda _, bias: layer(q, bias), 1) == 2  # forward, d bias


@pytest.mark.parametrize(("format", "granularity"), [("int8", "column"), ("int4", (1, 32, 1)), ("nvfp4", (1, 16, 1))])
def test_experts_over_a_mesh(format, granularity, x, w):
    """With varying axes checked; what all experts share, as the total of nvfp4, is on every device."""
    mesh = jax.make_mesh((G,), ("e",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:G])
    r = quantize(w, format, granularity)
    spec = jax.tree.map(lambda leaf: P("e") if leaf.ndim else P(), r)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), spec), out_specs=P())
    def sharded(x, r):
        return jax.lax.psum(tr.grouped_matmul(x, r, SIZES, group_offset=jax.lax.axis_index("e")), "e")

    close(jax.jit(sharded)(x, r), by_rows(x, exact(r)))


def _small():
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((12, 48), (3, 48, 16)))
    return x, w, jnp.array([4, 3, 2])  # the last three rows are unowned


def test_scales_of_unowned_rows_reach_no_gradient():
    x, w, sizes = _small()
    rows = quantize(x.at[10].set(jnp.nan), "int8", "row")
    d_y = jax.grad(lambda y: tr.transposed_grouped_matmul(rows, y, sizes, transpose_lhs=True).sum())(jnp.ones((12, 16)))
    np.testing.assert_array_equal(d_y[9:], 0)
    fine = quantize(w, "int8", (1, 8, 0))
    fine = Scaled(fine.values, fine.scale.at[2].set(jnp.nan), "int8", fine.block)
    np.testing.assert_array_equal(jax.grad(lambda x: tr.grouped_matmul(x, fine, sizes).sum())(x)[9:], 0)


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_scales_of_empty_groups_reach_nothing(backend):
    x, _, _ = _small()
    columns = quantize(x.at[10, 1].set(jnp.nan), "int8", (0, 1))  # the scale of a column is NaN, for all groups
    sizes = jnp.array([4, 0, 3])
    out = tr.transposed_grouped_matmul(columns, jnp.ones((12, 16)), sizes, transpose_lhs=True, backend=backend)
    np.testing.assert_array_equal(out[1], 0)


def test_float16_gradients_have_room_for_scales():
    x, w, sizes = _small()
    packed = quantize(w * 0.02, "int8", "column")

    def loss(x, w):
        return (tr.grouped_matmul(x, w, sizes, jnp.float16).astype(jnp.float32) * 1e-4).sum()

    got, want = jax.grad(loss)(x.astype(jnp.float16), packed), jax.grad(loss)(x, packed.dequantize())
    assert jnp.linalg.norm(got - want) < 0.01 * jnp.linalg.norm(want)


def test_sums_in_parts_are_as_wide_as_others():
    x, w, sizes = _small()
    parts = quantize(w, "int8", (1, 16, 1))
    turned = tr.grouped_matmul(x * (1 + 2j), parts, sizes, jnp.complex64)
    np.testing.assert_allclose(turned.imag, 2 * tr.grouped_matmul(x, parts, sizes), rtol=1e-5, atol=1e-5)
    before = jnp.full((12, 16), 2**24 + 1, jnp.int32)  # more than float32 holds
    after = tr.grouped_matmul(x, parts, sizes, jnp.int32, existing_out=before)
    np.testing.assert_array_equal(after[9:], before[9:])


@pytest.mark.parametrize("granularity", ["column", (1, 16, 1), (1, 8, 0)])
def test_no_groups_give_zeros(granularity):
    x, _, _ = _small()
    none = quantize(jnp.ones((0, 48, 16)), "int8", granularity)
    sizes = jnp.zeros((0,), jnp.int32)

    def total(x):
        return tr.grouped_matmul(x, none, sizes, bias=jnp.ones((0, 16))).sum()

    assert total(x) == 0
    np.testing.assert_array_equal(jax.grad(total)(x), 0)


@pytest.mark.parametrize("granularity", ["row", "column", "tensor"])
@pytest.mark.parametrize("shape", [(0, 3), (4, 0)])
def test_nothing_to_sum_gives_zeros(shape, granularity):
    empty, y = quantize(jnp.ones(shape), "int8", granularity), jnp.ones((shape[0], 2))
    out = tr.transposed_grouped_matmul(empty, y, [shape[0], 0], transpose_lhs=True)
    np.testing.assert_array_equal(out, np.zeros((2, shape[1], 2)))
    out = tr.transposed_grouped_matmul(y.T, empty, [shape[0], 0])
    np.testing.assert_array_equal(out, np.zeros((2, 2, shape[1])))


def test_is_no_sequence():
    _, w, _ = _small()
    with pytest.raises(TypeError, match="not iterable"):
        list(quantize(w, "int8", "column"))


def test_what_cannot_be_quantized_is_named():
    x, _, _ = _small()
    for wrong in (None, quantize(x, "int8"), object(), np.array(["a"]), [[1.0], [2.0, 3.0]]):
        with pytest.raises(TypeError, match=r"x: want (an array|a float dtype)"):
            quantize(wrong, "int8")
    with pytest.raises(ValueError, match="granularity: want 2 lengths"):
        quantize(x, "int8", 5)
    with pytest.raises(ValueError, match="format: want one of"):
        quantize(x, ["int8"])
