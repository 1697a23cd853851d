"""Quantized grouped tensors: each group as if it were alone, and products that equal those of the dequantized ones."""

import functools
import itertools

import grouped_cases as cases
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from sweep import marked

import trencadis as tr
from trencadis import GroupedTensor
from trencadis.gemm import grouped_quantize
from trencadis.gemm import xla as tiles
from trencadis.quant import FORMATS, Scaled, dequantize, quantize


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(tiles, "TILE", 4)


# ---------------------------------------------------------------------------------------------------------------------
# What a tensor stands for


def alone(format, x, lengths):
    """One group, block by block, in numpy."""
    kind, out = FORMATS[format], np.zeros_like(x)
    lengths = [length or size or 1 for length, size in zip(lengths, x.shape, strict=True)]
    starts = itertools.product(*(range(0, size, b) for size, b in zip(x.shape, lengths, strict=True)))
    blocks = [tuple(slice(i, i + b) for i, b in zip(start, lengths, strict=True)) for start in starts]
    most = [np.abs(x[at]).max() for at in blocks]
    total = max([m for m in most if np.isfinite(m)], default=0) / np.float32(kind.largest * 448) if kind.total else 1
    total = np.float32(total or 1)
    for at, largest in zip(blocks, most, strict=True):
        scale = largest / total / np.float32(kind.largest)
        if kind.scales.name == "float8_e8m0fnu" and scale > 0:
            scale = np.float32(2.0) ** np.ceil(np.log2(np.float64(scale)))
        elif kind.total:
            scale = min(scale, np.float32(448)).astype(kind.scales).astype(np.float32)
        scale = np.float32((scale if scale > 0 else 1) * total if np.isfinite(largest) else np.nan)
        values = np.clip(x[at] / scale, -kind.largest, kind.largest)
        values = np.round(values) if "int" in kind.values.name else values.astype(kind.values)
        out[at] = values.astype(np.float32) * scale
    return out


G, M, K = 4, 13, 5
LAWS = [  # format, what is ragged, granularity, and how long blocks are along the axes of a group
    ("int8", "rows", None, (0, 0)),
    ("int8", "rows", "column", (0, 1)),
    ("int4", "rows", (2, 3), (2, 3)),
    ("mxfp8", "rows", (32, 1), (32, 1)),
    ("nvfp4", "rows", None, (1, 16)),
    ("float8_e5m2", "columns", "row", (1, 0)),
    ("mxfp4", "columns", None, (1, 32)),
    ("nvfp4", "none", None, (1, 16)),
    ("int8", "both", (2, 3), (2, 3)),
    ("nvfp4", "both", (16, 1), (16, 1)),
]


@functools.cache
def compiled(format, granularity, shape):
    def call(data, first, last):
        return dequantize(grouped_quantize(GroupedTensor(data, first, last, shape), format, granularity)).data

    # with the emitters that users have: those that the tests have round float32 to float4 twice
    return jax.jit(call, compiler_options={"xla_backend_extra_options": ""})


@pytest.mark.parametrize(("format", "ragged", "granularity", "lengths"), LAWS, ids=str)
@hypothesis.given(data=st.data())
def test_a_group_is_quantized_as_if_it_were_alone(format, ragged, granularity, lengths, data):
    """T-05, R-14: any sizes, every kind of tensor and format; unowned entries are NaN before, and 0 after."""
    on = [(ragged in ("rows", "both"), K), (ragged in ("columns", "both"), 40)]
    some = st.lists(st.integers(0, 5), min_size=G, max_size=G).map(lambda x: cases._fit(x, M - 1))
    sizes = [data.draw(some) if ragged_here else [size] * G for ragged_here, size in on]
    groups = cases.normal(*sizes, data.draw(st.integers(0, 99)))
    groups = [x * np.float32(10) ** (3 * i - 4) for i, x in enumerate(groups)]
    bad = data.draw(st.integers(0, G))  # a group that holds NaN, or none does
    if bad < G and groups[bad].size:
        groups[bad][-1, 0] = np.nan
    shape = {"rows": (M, 40), "columns": (K, M), "none": (G, K, 40), "both": (M * 5,)}[ragged]
    laid = np.full(shape, np.nan, np.float32)
    for (at, _), x in zip(cases.places(on, sizes), groups, strict=True):
        laid[at] = x.ravel() if laid.ndim == 1 else x
    dims = [jnp.asarray(s) if ragged_here else None for (ragged_here, _), s in zip(on, sizes, strict=True)]
    got = compiled(format, granularity, shape)(laid, *dims)
    for x, want in zip(cases.unpacked(on, sizes, got, 0.0), groups, strict=True):
        np.testing.assert_allclose(x, alone(format, want, lengths), rtol=1e-6, atol=0)


@pytest.mark.parametrize("block", [(1, 4, 2, 1), (2, 3, 5, 4), (1, 1, 5, 6)])
def test_axes_that_are_merged_keep_their_scales(block, rng):
    x = rng.normal(size=(3, 4, 5, 6)).astype(np.float32)
    q = quantize(x, "int8", block)
    merges = {(2, 2): (12, 30), (1, 2, 1): (3, 20, 6), (4,): (360,), (3, 1): (60, 6), (1, 0, 3): (3, 1, 120)}
    made = jax.jit(lambda q: [(q.merged(*counts), q.merged(*counts).dequantize()) for counts in merges])(q)
    for (each, back), shape in zip(made, merges.values(), strict=True):
        assert each.scale.shape == tuple(-(-s // b) for s, b in zip(shape, each.block, strict=True))
        np.testing.assert_array_equal(back, q.dequantize().reshape(shape))
    few = Scaled(q.values, jnp.ones((3, 1, 1, 1)), "int8", (1, 4, 5, 6)).merged(2, 2)
    assert few.block == (4, 30) and few.scale.shape == (3, 1)  # no more than there have to be


@pytest.mark.parametrize("format", FORMATS)
def test_groups_of_any_magnitude(format, rng):
    """From below the smallest normal float32 to the largest: as `quantize` has them, and finite."""
    scales = np.array([1e-44, 1e-38, 1e-36, 1.0, 3.4e38, 0.0], np.float32)
    x = np.sign(rng.normal(size=(6, 32))).astype(np.float32) * scales[:, None]
    options = {"xla_backend_extra_options": ""}  # see above

    def call(x):
        grouped = dequantize(grouped_quantize(GroupedTensor.ragged_rows(x, [1] * 6), format)).data
        return grouped, jnp.concatenate([dequantize(quantize(row[None], format)) for row in x])

    got, want = jax.jit(call, compiler_options=options)(x)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=0)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got[2:], x[2:], rtol=0.26)  # of 4 bits the next to the largest are 3 * 2**126


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.int4, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float4_e2m1fn])
def test_a_dtype_names_its_format(dtype):
    q = jax.eval_shape(lambda x: grouped_quantize(GroupedTensor.ragged_rows(x, [1, 2]), dtype, "row"), jnp.ones((4, 8)))
    assert q.data.values.dtype == dtype and q.data.format == jnp.dtype(dtype).name


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_tensors_without_entries(shape):
    x = GroupedTensor.ragged_rows(jnp.zeros(shape), [0, 0])
    for format in ("int8", "mxfp8", "nvfp4"):
        assert jax.jit(lambda x, f=format: dequantize(grouped_quantize(x, f)))(x).data.shape == shape


def test_lists_of_quantized_groups(rng):
    x = jnp.asarray(rng.normal(size=(5, 4)), jnp.float32)

    @jax.jit
    def call(x):
        rows, columns = GroupedTensor.ragged_rows(x, [2, 0, 3]), GroupedTensor.ragged_cols(x.T, [2, 0, 3])
        made = [grouped_quantize(tensor, "int8") for tensor in (rows, columns, GroupedTensor.stacked(x))]
        return [(q.to_list(), dequantize(q).to_list(), [x.dequantize() for x in q.to_list()]) for q in made]

    for kept, want, got in call(x):
        assert all(isinstance(each, Scaled) for each in kept)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(a, b)


def test_no_quantizer_and_no_scales():
    """R-13: without a format it is the same tensor; T-04: and back again is one of groups, inside of jit."""
    x = GroupedTensor.ragged_cols(jnp.ones((2, 4)), jnp.array([1, 2]))
    assert grouped_quantize(x, None) is x
    back = jax.jit(lambda x: dequantize(grouped_quantize(x, "int8"), jnp.bfloat16))(x)
    assert back.last_dims.tolist() == [1, 2] and back.dtype == jnp.bfloat16
    np.testing.assert_array_equal(back.data.astype(jnp.float32), np.array([1, 1, 1, 0]) * np.ones((2, 1)))
    np.testing.assert_array_equal(dequantize(x).data, x.data)


# ---------------------------------------------------------------------------------------------------------------------
# Products


def stored(dims, data, sizes, granularity):
    return grouped_quantize(cases.tensor_of(dims, data, sizes), "int8", granularity)


@pytest.mark.parametrize("case", [marked((case,)) if i in (1, 2, 4) else case for i, case in enumerate(cases.CASES)])
def test_products_are_those_of_what_the_operands_stand_for(case):
    """S3-05, R-08: every ragged combination; lhs, rhs or both quantized; gradients of the others; NaN is unowned."""
    turns = cases.TRANSPOSES[cases.CASES.index(case) % 4]
    sizes = tuple([3, 0, 5, 2] if on else [u] * cases.G for on, u in zip(case, cases.UNIFORM, strict=True))
    a, b, old, ct = cases.drawn(sizes, 1)
    put = functools.partial(cases.lay, case, turns, sizes)
    get = functools.partial(cases.take, case, turns, sizes)
    dims, of, axes = cases.sides(case, turns)

    @jax.jit
    def call(x, y, room, ct, *sizes):
        each = [[sizes[i] for i in pair] for pair in of]
        q, r = stored(dims[0], x, each[0], "group"), stored(dims[1], y, each[1], "row")
        out = cases.tensor_of(dims[2], room, each[2]) if case[0] or case[2] else room

        def multiply(lhs, rhs):
            found = tr.grouped_gemm(lhs, rhs, contracting_dims=axes, out=out)
            return found.data if isinstance(found, GroupedTensor) else found

        left, right = (lambda x: cases.tensor_of(dims[0], x, each[0])), (lambda y: cases.tensor_of(dims[1], y, each[1]))
        one, dx = jax.vjp(lambda x: multiply(left(x), r), x)
        two, dy = jax.vjp(lambda y: multiply(q, right(y)), y)
        back = dequantize(q).data, dequantize(r).data
        return multiply(q, r), one, two, *dx(ct), *dy(ct), *back

    laid = put(0, a, np.nan), put(1, b, np.nan), put(2, old, 7), put(2, ct, np.nan)
    both, one, two, dx, dy, q, r = call(*laid, *map(np.asarray, sizes))
    q, r = get(0, q), get(1, r)
    assert any(np.abs(x - y).max(initial=0) > 1e-4 for x, y in zip(a, q, strict=True))
    for found, pair in ((both, (q, r)), (one, (a, r)), (two, (q, b))):
        cases.check(get(2, found, 7), cases.add(cases.product(*pair), old))
    cases.check(get(0, dx), cases.product(ct, cases.transposed(r)))
    cases.check(get(1, dy), cases.product(cases.transposed(q), ct))


def test_several_axes(rng):
    """R-02: heads and features, with blocks that axes cut; of quantized operands the result is float32."""
    x, w = rng.normal(size=(6, 2, 3, 4)).astype(np.float32), rng.normal(size=(3, 7, 4, 3)).astype(np.float32)

    @jax.jit
    def call(x, w):
        q = grouped_quantize(GroupedTensor.ragged_rows(x, [2, 0, 3]), "int8", (1, 1, 2, 4))
        r = grouped_quantize(GroupedTensor.stacked(w), "int8", (1, 2, 3, 3))
        out = tr.grouped_gemm(q, r, contracting_dims=((2, 3), (3, 2))).data
        return out, tr.grouped_gemm(q, q, contracting_dims=((0, 1), (0, 1))), dequantize(q).data, dequantize(r).data

    out, sums, x, w = call(x, w)
    assert out.dtype == sums.dtype == jnp.float32
    for i, part in enumerate((slice(0, 2), slice(2, 2), slice(2, 5))):
        np.testing.assert_allclose(out[part], np.einsum("rhfg,ogf->rho", x[part], w[i]), rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(sums[i], np.einsum("rhab,rhcd->abcd", x[part], x[part]), rtol=1e-5, atol=1e-5)


def test_integers_are_multiplied_as_integers(rng):
    """Also in a product of stacks: sums that float32 has no room for."""
    x, w = (rng.integers(-127, 128, s, np.int8) for s in ((2, 3, 2**15), (2, 2**15, 4)))
    one = [GroupedTensor.stacked(Scaled(jnp.asarray(a), jnp.ones((1, 1, 1)), "int8", a.shape)) for a in (x, w)]
    got = tr.grouped_gemm(*one, contracting_dims=((2,), (1,)))
    np.testing.assert_array_equal(got, (x.astype(np.int64) @ w.astype(np.int64)).astype(np.float32))


@pytest.mark.parametrize("ragged", [False, True])
def test_nan_loses_its_group_where_groups_are_large(ragged, rng):
    """XLA's maximum of so many numbers drops NaN on CPU."""
    x = rng.normal(size=(2, 128, 64)).astype(np.float32)
    x[1, 3, 3] = np.nan
    tensor = GroupedTensor.ragged_rows(x.reshape(256, 64), [128, 128]) if ragged else GroupedTensor.stacked(x)
    found = np.isnan(dequantize(grouped_quantize(tensor, "int8").data)).reshape(x.shape)
    assert found[1].all() and not found[0].any()


def test_a_layer(rng):
    """Bias, activation, the dtype of what is not quantized, gradients; alpha, and what no group owns."""
    x, w = rng.normal(size=(6, 8)).astype(np.float32), rng.normal(size=(3, 8, 4)).astype(np.float32)
    sizes, bias = np.array([2, 0, 3]), rng.normal(size=(3, 4)).astype(np.float32)
    x[5] = np.nan
    layer = lambda x, w, b: tr.grouped_dense(x, w, sizes, bias=b, activation=jax.nn.silu)

    @jax.jit
    def call(x, w, b):
        q, r = quantize(x, "int8", "row"), quantize(w, "int8", "column")
        found = []
        for left, right in ((q, r), (q.dequantize(), r.dequantize())):
            out, back = jax.vjp(lambda x, b, right=right: layer(x, right, b), x, b)
            one, two = (GroupedTensor(a, s, None, a.shape) for a, s in ((left, sizes), (right, None)))
            half = tr.grouped_gemm(one, two, contracting_dims=((1,), (1,)), alpha=jnp.full(3, 0.5)).data
            found.append((out, layer(left, right, b), half, *back(out)))
        return found

    got, want = call(x, w, bias)
    for one, two in zip(got, want, strict=True):
        assert one.dtype == two.dtype
        np.testing.assert_allclose(one, two, rtol=2e-5, atol=2e-5)
    assert not np.asarray(got[0][5]).any()
    small = jax.eval_shape(lambda x: layer(x, quantize(w, "int8", "column"), bias), jnp.zeros((6, 8), jnp.bfloat16))
    assert small.dtype == jnp.bfloat16


STACK, ROWS = GroupedTensor.stacked(jnp.ones((2, 4, 3))), GroupedTensor.ragged_rows(jnp.ones((4, 4)), [1, 2])
gemm = functools.partial(tr.grouped_gemm, contracting_dims=((1,), (1,)))


def packed(shape, scales=(1, 1)):
    return Scaled(jnp.ones(shape, jnp.int8), jnp.ones(scales), "int8", shape)


FLAT = GroupedTensor.fully_ragged(Scaled(jnp.ones(4, jnp.int8), jnp.ones(4), "int8", (1,)), [2], [2])


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: grouped_quantize(jnp.ones((2, 2)), "int8"), TypeError, "tensor: want a GroupedTensor.*got ArrayImpl"),
        (lambda: grouped_quantize(FLAT, "int8"), TypeError, "tensor: is quantized already"),
        (lambda: grouped_quantize(ROWS, "int3"), ValueError, "format: want one of int8"),
        (lambda: grouped_quantize(STACK, "int8", (0, 0, 1)), ValueError, r"scales of their own; want 1.*\(0, 0, 1\)"),
        (lambda: grouped_quantize(ROWS, "int8", (1, 2, 3)), ValueError, "granularity: want 2 lengths"),
        (lambda: grouped_quantize(ROWS, "mxfp8", "row"), ValueError, "mxfp8 has blocks of 32 along one axis"),
        (lambda: grouped_quantize(GroupedTensor.stacked(jnp.arange(3)), "int8"), TypeError, "data: want a float dtype"),
        (lambda: FLAT.to_list(), ValueError, "to_list: want flat data that are not quantized"),
        (lambda: GroupedTensor.from_list([packed((2, 2))]), TypeError, r"groups\[0\]: want an array; got Scaled"),
        (lambda: gemm(ROWS, STACK, out=GroupedTensor.stacked(packed((4, 3)))), TypeError, "out: want numbers that"),
        (lambda: gemm(STACK, STACK, out=packed((2, 3, 3), (1, 1, 1))), TypeError, "out: want an array; got Scaled"),
        (lambda: gemm(ROWS, STACK, bias=packed((2, 3))), TypeError, "bias: want an array; got Scaled"),
        (
            lambda: gemm(GroupedTensor.ragged_rows(packed((4, 4), (3, 1)), [1, 2]), STACK), ValueError,
            r"scale: want one for each block of \(4, 4\), shape \(1, 1\); got shape \(3, 1\)",
        ),
    ],
)  # fmt: skip
def test_errors_say_what_is_wanted(make, error, words):
    """R-08, R-16: scales are applied, or refused with a sentence."""
    with pytest.raises(error, match=words):
        make()


def test_goes_through_serialization(rng):
    """A server that has the bytes of a function alone calls it with quantized weights, and gets grouped tensors."""
    x = GroupedTensor.ragged_rows(jnp.asarray(rng.normal(size=(9, 32)), jnp.float32), [4, 0, 3])
    w = GroupedTensor.stacked(quantize(rng.normal(size=(3, 32, 6)), "nvfp4", (1, 16, 1)))

    def call(x, w):
        return tr.grouped_gemm(x, w, contracting_dims=((1,), (1,))), w

    exported = jax.export.export(jax.jit(call))(x, w)
    got, back = jax.export.deserialize(exported.serialize()).call(x, w)
    want, _ = call(x, w)
    assert (got.shape, back.data.format, back.data.block) == (want.shape, "nvfp4", (1, 16, 1))
    np.testing.assert_allclose(got.data, want.data, rtol=1e-6)
