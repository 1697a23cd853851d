"""The general GEMM: for every ragged combination, stored either way, values and gradients are those of a loop over groups."""

import functools
import itertools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import trencadis as tr
from trencadis import GroupedTensor
from trencadis.backends import tiles

pytestmark = pytest.mark.core

G, TOTAL = 4, 13  # groups, and entries of a ragged dimension of all groups together
UNIFORM = (3, 5, 4)  # m, k, n where they are not ragged
MOST = 6  # of a ragged dimension
CASES = list(itertools.product([False, True], repeat=3))  # which of m, k and n are ragged
TURNS = list(itertools.product([False, True], repeat=2))  # lhs stored [k, m], rhs stored [n, k]
ids = ["".join(x for x, on in zip("mkn", case, strict=True) if on) or "none" for case in CASES]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(tiles, "TILE", 4)


def sizes_of(case):
    """For each dimension the sizes of the groups; ragged ones do not fill what there is."""
    ragged = st.lists(st.integers(0, MOST), min_size=G, max_size=G).map(lambda x: _fit(x, TOTAL - 1))
    return st.tuples(*(ragged if on else st.just([u] * G) for on, u in zip(case, UNIFORM, strict=True)))


def _fit(sizes, limit):
    kept = []
    for size in sizes:
        kept.append(min(size, limit - sum(kept)))
    return kept


def shape_of(dims):
    """The shape of a tensor of two dimensions, each (ragged, uniform size)."""
    match [on for on, _ in dims]:
        case [False, False]:
            return (G, dims[0][1], dims[1][1])
        case [True, True]:
            return (MOST * (TOTAL - 1) + 3,)
    return tuple(TOTAL if on else size for on, size in dims)


def tensor_of(dims, data, sizes):
    first, last = (jnp.asarray(x, jnp.int32) if on else None for (on, _), x in zip(dims, sizes, strict=True))
    return GroupedTensor(data, first, last, data.shape)


def packed(dims, matrices, fill):
    """An array that holds the matrices, and `fill` in what is nobody's."""
    data = np.full(shape_of(dims), fill, np.float32)
    at = 0
    for i, x in enumerate(matrices):
        match [on for on, _ in dims]:
            case [False, False]:
                data[i] = x
            case [True, True]:
                data[at : at + x.size], at = x.ravel(), at + x.size
            case [True, False]:
                data[at : at + len(x)], at = x, at + len(x)
            case [False, True]:
                data[:, at : at + x.shape[1]], at = x, at + x.shape[1]
    return data


def sides(case, turns, sizes):
    """Dimensions and sizes of lhs, rhs and out, as they are stored, and the axes that are summed."""
    (m, k, n), (a, b, c) = zip(case, UNIFORM, strict=True), sizes
    lhs, rhs, out = ((m, k), (a, b)), ((k, n), (b, c)), ((m, n), (a, c))
    flip = lambda side, on: tuple(x[::-1] for x in side) if on else side
    axes = tuple(
        (int(on != right) + (not (p[0] or q[0])),)
        for (p, q), on, right in (((m, k), turns[0], True), ((k, n), turns[1], False))
    )
    return flip(lhs, turns[0]), flip(rhs, turns[1]), out, axes


@functools.cache
def compiled(case, turns):
    def call(x, y, room, *sizes):
        lhs, rhs, out, axes = sides(case, turns, sizes)
        room = tensor_of(out[0], room, out[1]) if case[0] or case[2] else room
        found = tr.grouped_gemm(
            tensor_of(lhs[0], x, lhs[1]), tensor_of(rhs[0], y, rhs[1]), contracting_dims=axes, out=room
        )
        return found.data if isinstance(found, GroupedTensor) else found

    def pull(x, y, room, ct, *sizes):
        out, back = jax.vjp(lambda x, y, room: call(x, y, room, *sizes), x, y, room)
        return out, *back(ct)

    return jax.jit(pull)


def drawn(case, sizes, seed):
    rng = np.random.default_rng(seed)
    normal = lambda first, last: [rng.normal(size=shape).astype(np.float32) for shape in zip(first, last, strict=True)]
    m, k, n = sizes
    return normal(m, k), normal(k, n), normal(m, n), normal(m, n)


@pytest.mark.parametrize("turns", TURNS, ids=["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("case", CASES, ids=ids)
@hypothesis.settings(max_examples=6)
@hypothesis.given(data=st.data(), seed=st.integers(0, 2**16))
def test_equals_a_loop_over_groups(case, turns, data, seed):
    """S3-03, S3-05: forward and both gradients; NaN in what is nobody's reaches neither."""
    sizes = data.draw(sizes_of(case))
    a, b, old, ct = drawn(case, sizes, seed)
    lhs, rhs, out, _ = sides(case, turns, sizes)
    lay = lambda side, xs, on=False, fill=np.nan: packed(side[0], [x.T for x in xs] if on else xs, fill)
    x, y = lay(lhs, a, turns[0]), lay(rhs, b, turns[1])
    got, dx, dy, d_old = compiled(case, turns)(
        x, y, lay(out, old, fill=7), lay(out, ct), *(np.asarray(s) for s in sizes)
    )
    check = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    check(got, lay(out, [p @ q + r for p, q, r in zip(a, b, old, strict=True)], fill=7))
    check(dx, lay(lhs, [c @ q.T for c, q in zip(ct, b, strict=True)], turns[0], 0))
    check(dy, lay(rhs, [p.T @ c for p, c in zip(a, ct, strict=True)], turns[1], 0))
    check(d_old, lay(out, ct))


# ---------------------------------------------------------------------------------------------------------------------
# What a user would do


ROWS = [2, 0, 3]
ROOM = 6  # the last row is nobody's


@pytest.fixture
def xwy(rng):
    return tuple(jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((ROOM, 5), (3, 5, 4), (ROOM, 4)))


def rows(x, sizes=ROWS):
    return GroupedTensor.ragged_rows(x, sizes)


def program(fn, *args):
    return jax.jit(fn).lower(*args).as_text()


def test_the_passes_of_a_layer_are_one_call_each(xwy):
    """S3-03, S3-04: and the program is that of the doors it goes through: same text, same speed."""
    x, w, y = xwy
    sizes = jnp.asarray(ROWS)
    forward = lambda x, w, s: tr.grouped_gemm(rows(x, s), GroupedTensor.stacked(w), contracting_dims=((1,), (1,))).data
    d_x = lambda y, w, s: tr.grouped_gemm(rows(y, s), GroupedTensor.stacked(w), contracting_dims=((1,), (2,))).data
    d_w = lambda x, y, s: tr.grouped_gemm(rows(x, s), rows(y, s), contracting_dims=((0,), (0,)))
    pairs = [
        (forward, lambda x, w, s: tr.grouped_matmul(x, w, s), (x, w, sizes)),
        (d_x, lambda y, w, s: tr.grouped_matmul(y, w, s, transpose_rhs=True), (y, w, sizes)),
        (d_w, lambda x, y, s: tr.transposed_grouped_matmul(x, y, s, transpose_lhs=True), (x, y, sizes)),
    ]
    for general, direct, args in pairs:
        np.testing.assert_array_equal(general(*args), direct(*args))
        assert program(general, *args) == program(direct, *args)


def test_several_axes(rng):
    """R-02, R-04: heads and features; weights stored another way; columns that are ragged."""
    x = jnp.asarray(rng.normal(size=(ROOM, 2, 3, 4)), jnp.float32)  # rows, heads, features
    w = jnp.asarray(rng.normal(size=(3, 7, 4, 3)), jnp.float32)  # groups, out, features the other way round
    out = tr.grouped_gemm(rows(x), GroupedTensor.stacked(w), contracting_dims=((2, 3), (3, 2)))
    want = np.zeros((ROOM, 2, 7), np.float32)
    for i, (start, end) in enumerate([(0, 2), (2, 2), (2, 5)]):
        want[start:end] = np.einsum("rhfg,ogf->rho", x[start:end], w[i])
    np.testing.assert_allclose(out.data, want, rtol=1e-5, atol=1e-5)
    assert out.shape == (ROOM, 2, 7)
    turned = tr.grouped_gemm(
        GroupedTensor.stacked(w),
        GroupedTensor.ragged_cols(x.transpose(3, 2, 1, 0), ROWS),
        contracting_dims=((2, 3), (0, 1)),
    )
    np.testing.assert_allclose(turned.data, want.transpose(2, 1, 0), rtol=1e-5, atol=1e-5)
    assert turned.first_dims is None and turned.last_dims.tolist() == ROWS
    summed = tr.grouped_gemm(rows(x), rows(x), contracting_dims=((0, 1), (0, 1)))
    assert summed.shape == (3, 3, 4, 3, 4)
    np.testing.assert_allclose(summed[2], np.einsum("rhab,rhcd->abcd", x[2:5], x[2:5]), rtol=1e-5, atol=1e-5)


def test_windows(xwy):
    x, w, y = xwy
    out = tr.grouped_gemm(rows(x), GroupedTensor.stacked(w[1:]), contracting_dims=((1,), (1,)), group_offset=1)
    np.testing.assert_array_equal(out.data, tr.grouped_matmul(x, w[1:], ROWS, group_offset=1))
    some = jax.jit(
        lambda at, room: tr.grouped_gemm(rows(x), rows(y), contracting_dims=((0,), (0,)), group_offset=at, out=room)
    )
    np.testing.assert_allclose(
        some(1, jnp.ones((2, 5, 4))), 1 + tr.transposed_grouped_matmul(x, y, ROWS, transpose_lhs=True)[1:], rtol=1e-6
    )


def test_scales_are_by_group_and_have_gradients(xwy):
    """S3-06; the gradient of a bias in bfloat16 is summed in float32 (T-08), and nobody's rows are credited to none (T-03)."""
    x, w, y = xwy
    a, b = jnp.array([2.0, 3.0, -1.0]), jnp.array([0.5, 7.0, 0.0])
    c = jnp.ones((3, 4), jnp.bfloat16)

    def call(a, b, c, held):
        return tr.grouped_gemm(
            rows(x.at[5].set(jnp.nan)), GroupedTensor.stacked(w), contracting_dims=((1,), (1,)), alpha=a, beta=b, bias=c,
            out=rows(held), preferred_element_type=jnp.float32,
        ).data  # fmt: skip

    product = tr.grouped_matmul(x, w, ROWS)
    each = np.repeat([0, 2], [2, 3])
    out, back = jax.vjp(call, a, b, c, y)
    np.testing.assert_allclose(out[:5], a[each][:, None] * product[:5] + 1 + b[each][:, None] * y[:5], rtol=1e-5)
    np.testing.assert_array_equal(out[5], y[5])
    da, db, dc, dy = back(jnp.ones_like(out).at[5].set(jnp.nan))
    np.testing.assert_allclose(da, [product[:2].sum(), 0, product[2:5].sum()], rtol=1e-5)
    np.testing.assert_allclose(db, [y[:2].sum(), 0, y[2:5].sum()], rtol=1e-5)
    np.testing.assert_array_equal(dc.astype(jnp.float32)[:, 0], [2, 0, 3])
    np.testing.assert_allclose(dy[:5], b[each][:, None] * np.ones((5, 4)))


def test_a_dense_layer(xwy):
    x, w, _ = xwy
    bias = jnp.arange(12.0).reshape(3, 4)
    out = tr.grouped_dense(x, w, ROWS, bias=bias, activation=jax.nn.silu)
    np.testing.assert_array_equal(out, tr.grouped_matmul(x, w, ROWS, bias=bias, activation=jax.nn.silu))
    turned = tr.grouped_dense(x, w.mT, ROWS, contracting_dims=((1,), (2,)))
    np.testing.assert_allclose(turned, tr.grouped_matmul(x, w, ROWS), rtol=1e-5)
    assert tr.grouped_dense(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), ROWS).dtype == jnp.bfloat16

    def loss(bias):
        x16, w16 = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
        return tr.grouped_dense(x16, w16, jnp.array([0, 5, 0]), bias=bias).astype(jnp.float32).sum()

    np.testing.assert_array_equal(jax.grad(loss)(bias)[:, 0], [0, 5, 0])  # the last row is not the last group's


def test_flat_results_are_as_large_as_sizes_say(rng):
    """M_i by N_i: sizes that are known say how large it is, and traced ones need a place to put it."""
    x, y = rng.normal(size=(5, 3)).astype(np.float32), rng.normal(size=(3, 6)).astype(np.float32)
    lhs, columns = rows(x), [1, 5, 0]
    out = tr.grouped_gemm(lhs, GroupedTensor.ragged_cols(y, columns), contracting_dims=((1,), (0,)))
    assert out.shape == (2 * 1,) and out.first_dims.tolist() == ROWS and out.last_dims.tolist() == columns
    np.testing.assert_allclose(out.to_list()[0], x[:2] @ y[:, :1], rtol=1e-5)
    with pytest.raises(ValueError, match="out: sizes of m and n are traced"):
        jax.jit(
            lambda s: tr.grouped_gemm(rows(x, s), GroupedTensor.ragged_cols(y, columns), contracting_dims=((1,), (0,)))
        )(jnp.asarray(ROWS))


def test_traced_sizes_never_leave_the_buffer(rng):
    """Whatever they hold."""
    flat, y = jnp.asarray(rng.normal(size=20), jnp.float32), jnp.asarray(rng.normal(size=(6, 2)), jnp.float32)

    @jax.jit
    def call(first, last):
        lhs = GroupedTensor(flat, first, last, flat.shape)
        held = GroupedTensor(jnp.zeros((7, 2)), first, None, (7, 2))
        return tr.grouped_gemm(lhs, rows(y, last), contracting_dims=((1,), (0,)), out=held).data

    for first, last in itertools.product(
        [[2, 0, 3], [2**31 - 1, -5, 2**31 - 1], [100, 1, 1]], [[3, 1, 2], [-1, 2**31 - 1, 7], [0, 0, 0]]
    ):
        assert np.isfinite(call(np.asarray(first, np.int32), np.asarray(last, np.int32))).all()


def test_goes_through_vmap_shard_map_and_export(rng):
    flat = jnp.asarray(rng.normal(size=(4, 20)), jnp.float32)
    y = jnp.asarray(rng.normal(size=(6, 2)), jnp.float32)

    def call(data):
        return tr.grouped_gemm(
            GroupedTensor.fully_ragged(data, [2, 0, 3], [3, 1, 2]), rows(y, [3, 1, 2]), contracting_dims=((1,), (0,))
        ).data

    want = np.stack([call(each) for each in flat])
    np.testing.assert_allclose(jax.jit(jax.vmap(call))(flat), want, rtol=1e-6)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    mapped = jax.shard_map(lambda data: call(data[0])[None], mesh=mesh, in_specs=spec, out_specs=spec)
    np.testing.assert_allclose(jax.jit(mapped)(flat), want, rtol=1e-6)
    exported = jax.export.export(jax.jit(call), platforms=["cpu", "tpu", "cuda"])(
        jax.ShapeDtypeStruct((20,), jnp.float32)
    )
    np.testing.assert_allclose(jax.export.deserialize(exported.serialize()).call(flat[0]), want[0], rtol=1e-6)


X, W = jnp.ones((6, 5)), jnp.ones((3, 5, 4))
STACK = GroupedTensor.stacked(W)
SUM = ((1,), (1,))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: tr.grouped_gemm(X, STACK, contracting_dims=SUM), TypeError, "lhs: want a GroupedTensor.*got ArrayImpl"),
        (lambda: tr.grouped_gemm(rows(X), W, contracting_dims=SUM), TypeError, "rhs: want a GroupedTensor"),
        (lambda: tr.grouped_gemm(rows(X), STACK, contracting_dims=1), ValueError, "contracting_dims: want two sequences of axes; got 1"),
        (lambda: tr.grouped_gemm(rows(X), STACK, contracting_dims=((1,), (0,))), ValueError, "rhs has no axis 0 to sum over, which is that of the groups"),
        (lambda: tr.grouped_gemm(rows(X), STACK, contracting_dims=((2,), (1,))), ValueError, "lhs has no axis 2 to sum over, of 2"),
        (lambda: tr.grouped_gemm(rows(X), STACK, contracting_dims=((1,), (2,))), ValueError, r"axis 1 of lhs \(6, 5\) and axis 2 of rhs \(3, 5, 4\).*same size"),
        (lambda: tr.grouped_gemm(rows(X), STACK, contracting_dims=((1,), (1, 2))), ValueError, "as many axes of lhs as of rhs"),
        (lambda: tr.grouped_gemm(rows(X), STACK, contracting_dims=((1, 1), (1, 1))), ValueError, "want each axis of lhs once"),
        (lambda: tr.grouped_gemm(rows(jnp.ones((6, 6))), GroupedTensor.stacked(jnp.ones((3, 6))), contracting_dims=((0,), (1,))), ValueError, "axis 0 of lhs is ragged and axis 1 of rhs is not"),
        (lambda: tr.grouped_gemm(rows(X), rows(X, [2, 1, 2]), contracting_dims=((0,), (0,))), ValueError, "same sizes, got 0 and 1 in group 1"),
        (lambda: tr.grouped_gemm(rows(X, [2, 3]), STACK, contracting_dims=SUM), ValueError, "rhs: want as many groups as lhs; got 3 and 2"),
        (lambda: tr.grouped_gemm(GroupedTensor(X, np.array([9, 9, 9]), None, X.shape), STACK, contracting_dims=SUM), ValueError, "must sum to at most"),
        (lambda: tr.grouped_gemm(GroupedTensor(X, None, None, (6,)), STACK, contracting_dims=SUM), ValueError, r"lhs: its data have shape \(6, 5\)"),
        (lambda: tr.grouped_gemm(rows(X), STACK, contracting_dims=SUM, bias=jnp.ones((3, 5))), ValueError, r"bias: want shape \(3, 4\)"),
        (lambda: tr.grouped_gemm(rows(X), STACK, contracting_dims=SUM, alpha=jnp.ones(2)), ValueError, r"alpha: want one number for each group, shape \(3,\); got \(2,\)"),
        (lambda: tr.grouped_gemm(rows(X), STACK, contracting_dims=SUM, alpha=jnp.ones(3, int)), TypeError, "alpha: want a float dtype"),
        (lambda: tr.grouped_gemm(rows(X), STACK, contracting_dims=SUM, beta=jnp.ones(3)), ValueError, "beta: scales what is in out"),
        (lambda: tr.grouped_gemm(rows(X), STACK, contracting_dims=SUM, out=jnp.ones((6, 4))), TypeError, "out: want a GroupedTensor, ragged as the result"),
        (lambda: tr.grouped_gemm(rows(X), STACK, contracting_dims=SUM, out=rows(jnp.ones((6, 3)))), ValueError, r"out: want float32\[6, 4\]; got float32\[6, 3\]"),
        (lambda: tr.grouped_gemm(rows(X), STACK, contracting_dims=SUM, out=rows(jnp.ones((6, 4), jnp.bfloat16))), ValueError, r"out: want float32\[6, 4\]; got bfloat16"),
        (lambda: tr.grouped_gemm(rows(X), STACK, contracting_dims=SUM, out=GroupedTensor.ragged_cols(jnp.ones((6, 4)), [1, 1, 1])), ValueError, "out: want a tensor that is ragged in its first axis"),
        (lambda: tr.grouped_gemm(rows(X), rows(X), contracting_dims=((0,), (0,)), out=jnp.ones((2, 5, 5))), ValueError, r"out: want float32\[3, 5, 5\]; got float32\[2, 5, 5\]"),
        (lambda: tr.grouped_gemm(rows(X), rows(X), contracting_dims=((0,), (0,)), out=rows(jnp.ones((6, 5)))), TypeError, "out: want an array, since the result is not ragged"),
        (lambda: tr.grouped_gemm(STACK, STACK, contracting_dims=SUM, group_offset=1), ValueError, "group_offset: says which groups a stack holds"),
        (lambda: tr.grouped_gemm(rows(X), rows(X), contracting_dims=((1,), (1,)), backend="tpu"), ValueError, "backend: 'tpu' has no kernel for more than one"),
        (lambda: tr.grouped_gemm(rows(jnp.ones((6, 2, 5))), rows(jnp.ones((6, 5))), contracting_dims=((2,), (1,))), ValueError, "a flat result holds matrices"),
        (lambda: tr.grouped_gemm(STACK, GroupedTensor.ragged_rows(jnp.ones((6, 2, 5)), ROWS), contracting_dims=((1,), (2,))), ValueError, "rhs: its ragged axis would be axis 1 of a result of 3"),
        (lambda: tr.grouped_dense(X, W, ROWS, contracting_dims=((0,), (1,))), ValueError, "axis 0 of x is ragged and axis 1 of kernel is not"),
        (lambda: tr.grouped_dense(X, W, [2, 3]), ValueError, "kernel: want as many groups as x; got 3 and 2"),
    ],
)  # fmt: skip
def test_errors_say_which_and_why(make, error, words):
    """R-16: never a number that is silently wrong."""
    with pytest.raises(error, match=words):
        make()
