"""grouped_gemm and grouped_dense as a user calls them, and what they refuse. The laws are in tests/gemm/test_laws.py."""

import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sweep import sweep

import trencadis as tr
from trencadis import GroupedTensor
from trencadis.gemm import xla

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(xla, "TILE", 4)


ROWS = [2, 0, 3]
ROOM = 6  # no group owns the last row


@pytest.fixture
def xwy(rng):
    return tuple(jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((ROOM, 5), (3, 5, 4), (ROOM, 4)))


def rows(x, sizes=ROWS):
    return GroupedTensor.ragged_rows(x, sizes)


def program(fn, *args):
    return jax.jit(fn).lower(*args).as_text()


def test_the_passes_of_a_layer_are_one_call_each(xwy):
    """S3-03, S3-04: and the program is that of `grouped_matmul` and `transposed_grouped_matmul`, to the letter."""
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
    transposed = tr.grouped_gemm(
        GroupedTensor.stacked(w),
        GroupedTensor.ragged_cols(x.transpose(3, 2, 1, 0), ROWS),
        contracting_dims=((2, 3), (0, 1)),
    )
    np.testing.assert_allclose(transposed.data, want.transpose(2, 1, 0), rtol=1e-5, atol=1e-5)
    assert transposed.first_dims is None and transposed.last_dims.tolist() == ROWS
    summed = tr.grouped_gemm(rows(x), rows(x), contracting_dims=((0, 1), (0, 1)))
    assert summed.shape == (3, 3, 4, 3, 4)
    np.testing.assert_allclose(summed[2], np.einsum("rhab,rhcd->abcd", x[2:5], x[2:5]), rtol=1e-5, atol=1e-5)


def test_windows(xwy):
    x, w, y = xwy
    out = tr.grouped_gemm(rows(x), GroupedTensor.stacked(w[1:]), contracting_dims=((1,), (1,)), group_offset=1)
    np.testing.assert_array_equal(out.data, tr.grouped_matmul(x, w[1:], ROWS, group_offset=1))
    held = rows(y), GroupedTensor.ragged_cols(y.T, ROWS)
    added = tr.grouped_gemm(
        rows(x), GroupedTensor.stacked(w[1:]), contracting_dims=((1,), (1,)), group_offset=1, out=held[0]
    )
    np.testing.assert_allclose(added.data, out.data + y, rtol=1e-6)
    transposed = tr.grouped_gemm(
        GroupedTensor.stacked(w[1:]), rows(x), contracting_dims=((1,), (1,)), group_offset=1, out=held[1]
    )
    np.testing.assert_allclose(transposed.data, (out.data + y).T, rtol=1e-5)
    some = jax.jit(
        lambda at, room: tr.grouped_gemm(rows(x), rows(y), contracting_dims=((0,), (0,)), group_offset=at, out=room)
    )
    np.testing.assert_allclose(
        some(1, jnp.ones((2, 5, 4))), 1 + tr.transposed_grouped_matmul(x, y, ROWS, transpose_lhs=True)[1:], rtol=1e-6
    )


def test_scales_are_by_group_and_have_gradients(xwy):
    """S3-06; the gradient of a bfloat16 bias is summed in float32 (T-08); unowned rows count for no group (T-03)."""
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

    def plain(a, c):  # without out, unowned entries are zero, and a bias does not change that
        return tr.grouped_gemm(
            rows(x.at[5].set(jnp.nan)), GroupedTensor.stacked(w), contracting_dims=((1,), (1,)), alpha=a, bias=c,
            preferred_element_type=jnp.float32,
        ).data  # fmt: skip

    out, back = jax.vjp(plain, a, c)
    np.testing.assert_allclose(out[:5], a[each][:, None] * product[:5] + 1, rtol=1e-5)
    np.testing.assert_array_equal(out[5], 0)
    np.testing.assert_array_equal(back(jnp.ones_like(out).at[5].set(jnp.nan))[1].astype(jnp.float32)[:, 0], [2, 0, 3])


def test_a_dense_layer(xwy):
    x, w, _ = xwy
    bias = jnp.arange(12.0).reshape(3, 4)
    out = tr.grouped_dense(x, w, ROWS, bias=bias, activation=jax.nn.silu)
    np.testing.assert_array_equal(out, tr.grouped_matmul(x, w, ROWS, bias=bias, activation=jax.nn.silu))
    transposed = tr.grouped_dense(x, w.mT, ROWS, contracting_dims=((1,), (2,)))
    np.testing.assert_allclose(transposed, tr.grouped_matmul(x, w, ROWS), rtol=1e-5)
    assert tr.grouped_dense(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), ROWS).dtype == jnp.bfloat16

    def loss(bias):
        x16, w16 = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
        return tr.grouped_dense(x16, w16, jnp.array([0, 5, 0]), bias=bias).astype(jnp.float32).sum()

    np.testing.assert_array_equal(jax.grad(loss)(bias)[:, 0], [0, 5, 0])  # the last row is not the last group's


def test_flat_results_are_as_large_as_sizes_say(rng):
    """m_i by n_i: known sizes give the size of the result, and traced ones need `out`."""
    x, y = rng.normal(size=(5, 3)).astype(np.float32), rng.normal(size=(3, 6)).astype(np.float32)
    lhs, columns = rows(x), [1, 5, 0]
    out = tr.grouped_gemm(lhs, GroupedTensor.ragged_cols(y, columns), contracting_dims=((1,), (0,)))
    assert out.shape == (2 * 1,) and out.first_dims.tolist() == ROWS and out.last_dims.tolist() == columns
    np.testing.assert_allclose(out.to_list()[0], x[:2] @ y[:, :1], rtol=1e-5)
    with pytest.raises(
        ValueError, match="out: want a tensor that is as large as the result, since sizes of m and n are traced"
    ):
        jax.jit(
            lambda s: tr.grouped_gemm(rows(x, s), GroupedTensor.ragged_cols(y, columns), contracting_dims=((1,), (0,)))
        )(jnp.asarray(ROWS))


def test_traced_sizes_never_leave_the_buffer(rng):
    """Whatever numbers the sizes are."""
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


def test_traced_sizes_of_64_bits(x64, rng):
    """Also in a tensor that no constructor made; sizes that do not fit into int32 are clamped."""
    x, w = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((ROOM, 5), (3, 5, 4)))
    flat, y = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((20,), (6, 2)))

    @jax.jit
    def call(sizes, last):
        one = tr.grouped_gemm(
            GroupedTensor(x, sizes, None, x.shape), GroupedTensor.stacked(w), contracting_dims=((1,), (1,))
        )
        held = GroupedTensor(jnp.zeros((ROOM, 2), jnp.float32), sizes, None, (ROOM, 2))
        lhs, rhs = GroupedTensor(flat, sizes, last, flat.shape), GroupedTensor(y, last, None, y.shape)
        return one.data, tr.grouped_gemm(lhs, rhs, contracting_dims=((1,), (0,)), out=held).data

    wild = jnp.asarray([2, -(2**40), 2**40]), jnp.asarray([2, 0, 2**32 - 1], jnp.uint32)  # both mean [2, 0, 4]
    for sizes in (jnp.asarray(ROWS), *wild):
        one, two = call(sizes, jnp.asarray([3, 1, 2]))
        want = np.concatenate([x[:2] @ w[0], x[2:5] @ w[2]])
        np.testing.assert_allclose(one[:5], want, rtol=1e-5, atol=1e-6)
        third = flat[6:12].reshape(3, 2)  # after the 2 by 3 entries of the first
        want = np.concatenate([flat[:6].reshape(2, 3) @ y[:3], third @ y[4:6]])
        np.testing.assert_allclose(two[:5], want, rtol=1e-5, atol=1e-6)


@pytest.mark.once
def test_sizes_stay_on_the_device(xwy):
    """S3-07: on every platform sizes are operands of the program, and nothing in it calls the host."""
    (x, w, y), sizes = xwy, jnp.asarray(ROWS)

    def call(x, w, y, sizes):
        one = tr.grouped_gemm(rows(x, sizes), GroupedTensor.stacked(w), contracting_dims=((1,), (1,)))
        room = GroupedTensor.fully_ragged(jnp.zeros(36), sizes, sizes)
        scores = tr.grouped_gemm(one, rows(y, sizes), contracting_dims=((1,), (1,)), out=room)
        return tr.grouped_gemm(scores, one, contracting_dims=((1,), (0,)), out=rows(y, sizes)).data

    jax.jit(jax.grad(lambda *args: call(*args).sum(), argnums=(0, 1, 2))).lower(x, w, y, sizes)  # asks for none
    with pytest.warns(tr.PerformanceWarning):  # which GPU it is for is not known
        exported = jax.export.export(jax.jit(call), platforms=["cpu", "cuda", "tpu"])(x, w, y, sizes)
    assert [a.shape for a in exported.in_avals] == [x.shape, w.shape, y.shape, (3,)]
    lines = exported.mlir_module().splitlines()
    called = [line for line in lines if not line.startswith("#loc")]  # functions that called the test have any name
    for word in ("callback", "infeed", "outfeed", "send", "recv"):
        assert not any(word in line for line in called)
    with jax.transfer_guard("disallow"):
        jax.jit(call)(x, w, y, sizes)


def test_one_group_and_none(rng):
    """One group is a matmul, however it is stored; a stack may have no groups."""
    x, y = (rng.normal(size=s).astype(np.float32) for s in ((3, 5), (5, 4)))
    for left, right in itertools.product(["none", "rows", "columns", "both"], repeat=2):
        a, b = GroupedTensor.from_list([x], ragged=left), GroupedTensor.from_list([y], ragged=right)
        if (left in ("columns", "both")) != (right in ("rows", "both")):
            continue  # k would be ragged in one of them
        found = tr.grouped_gemm(a, b, contracting_dims=((1 + (left == "none"),), (right == "none",)))
        found = found.to_list()[0] if isinstance(found, GroupedTensor) else found[0]
        np.testing.assert_allclose(found, x @ y, rtol=1e-5, atol=1e-6)
    empty = GroupedTensor.stacked(jnp.ones((0, 3, 5)))
    assert tr.grouped_gemm(empty, empty, contracting_dims=((2,), (2,))).shape == (0, 3, 3)


def test_an_epilogue_of_integers_keeps_fractions(rng):
    """R-16: products of integers are exact, and alpha, beta, bias and out keep their fractions."""
    x, w = (rng.integers(-9, 9, s).astype(np.int8) for s in ((ROOM, 5), (3, 5, 4)))
    half, sizes = jnp.full(3, 0.5), np.array(ROWS)
    product = np.concatenate([x[:2].astype(int) @ w[0], x[2:5].astype(int) @ w[2], np.zeros((1, 4))])
    old, mine = np.full((ROOM, 4), 0.25, np.float32), np.arange(ROOM)[:, None] < 5
    each = [
        ({"alpha": half}, product / 2),
        ({"bias": jnp.full((3, 4), 0.5)}, product + 0.5 * mine),
        ({"out": rows(old)}, product + 0.25),
        ({"out": rows(old), "beta": half}, product + np.where(mine, 0.125, 0.25)),
        ({"out": rows(old), "bias": jnp.full((3, 4), 0.5)}, product + 0.25 + 0.5 * mine),
    ]
    for ends, want in each:
        lhs, rhs = GroupedTensor.ragged_rows(x, sizes), GroupedTensor.stacked(w)
        found = tr.grouped_gemm(lhs, rhs, contracting_dims=((1,), (1,)), preferred_element_type=jnp.float32, **ends)
        np.testing.assert_array_equal(found.data, want)
    transposed = tr.grouped_gemm(  # n is ragged: no kernel adds to out
        GroupedTensor.stacked(w), GroupedTensor.ragged_cols(x.T, sizes), contracting_dims=((1,), (0,)),
        preferred_element_type=jnp.float32, out=GroupedTensor.ragged_cols(old.T, sizes),
    )  # fmt: skip
    np.testing.assert_array_equal(transposed.data, (product + 0.25).T)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "complex64"])
def test_sums_of_several_ragged_dimensions(dtype, rng):
    """Sums over many tiles are kept in float32, or in int32 and exact; remat changes nothing."""
    first, last = np.array([2, 0, 3]), np.array([3, 1, 300])
    draw = lambda shape: (
        jnp.asarray(rng.integers(-9, 9, shape), dtype) * jnp.asarray(1 + 1j if dtype == "complex64" else 1, dtype)
    )
    flat, y = draw(6 + 900), draw((304, 2))
    out = jnp.int32 if dtype == "int8" else dtype

    def call(flat, y):
        lhs, rhs = GroupedTensor.fully_ragged(flat, first, last), GroupedTensor.ragged_rows(y, last)
        return tr.grouped_gemm(lhs, rhs, contracting_dims=((1,), (0,)), preferred_element_type=out).data

    wide = complex if dtype == "complex64" else float
    a, b = np.asarray(flat).astype(wide), np.asarray(y).astype(wide)
    want = np.concatenate([a[:6].reshape(2, 3) @ b[:3], a[6:].reshape(3, 300) @ b[4:]])
    np.testing.assert_array_equal(call(flat, y), want.astype(out))
    if dtype != "int8":
        found, back = jax.vjp(jax.checkpoint(call), flat, y)
        dx, dy = back(found)
        np.testing.assert_array_equal(dx[6:], (want[2:].astype(out).astype(wide) @ b[4:].T).ravel().astype(dtype))
        np.testing.assert_array_equal(dy[3], 0)


@pytest.mark.parametrize("explicit", sweep([False, True], [True]))
def test_sharded_operands(explicit, xwy):
    """R-03: under jit, without shard_map: operands that lie on several devices, along any axis, give the same numbers."""
    x, w, y = xwy
    x, w, y = jnp.concatenate([x, x[:2]]), jnp.concatenate([w, w[:, :3]], axis=1), jnp.concatenate([y, y[:2]])
    x = jnp.concatenate([x, x[:, :3]], axis=1)  # [8, 8], [3, 8, 4], [8, 4]: axes that four devices can share

    def call(x, w, y):
        one = tr.grouped_gemm(rows(x), GroupedTensor.stacked(w), contracting_dims=((1,), (1,))).data
        two = tr.grouped_gemm(rows(x), rows(y), contracting_dims=((0,), (0,)))
        three = tr.grouped_gemm(rows(x), GroupedTensor.ragged_cols(w[0], [1, 2, 1]), contracting_dims=((1,), (0,)))
        return one, two, three.data

    step = jax.jit(
        lambda *args: (call(*args), jax.grad(lambda *args: sum(z.sum() for z in call(*args)), (0, 1, 2))(*args))
    )
    want = step(x, w, y)
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((4,), ("d",), axis_types=(kind,))
    spec = jax.sharding.PartitionSpec
    with jax.set_mesh(mesh):
        for specs in (
            (spec("d"), spec(None, None, "d"), spec("d")),
            (spec(None, "d"), spec(None, "d"), spec(None, "d")),
        ):
            given = [
                jax.device_put(z, jax.sharding.NamedSharding(mesh, s)) for z, s in zip((x, w, y), specs, strict=True)
            ]
            for a, b in zip(jax.tree.leaves(step(*given)), jax.tree.leaves(want), strict=True):
                np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


def test_derivatives_are_the_same_operation(xwy):
    """R-15: one primitive, with the same operands in every pass."""
    x, *_ = xwy
    scores = lambda x, y: tr.grouped_gemm(rows(x), rows(y), contracting_dims=((1,), (1,))).data
    slopes = jax.make_jaxpr(jax.grad(lambda x, y: (scores(x, y) ** 2).sum(), (0, 1)))(x, -x)
    passes = [len(each.invars) for each in slopes.eqns if each.primitive.name == "grouped_gemm"]
    assert passes == [8, 8, 8]


def test_signatures_say_each_thing_once():
    """S3-01, R-01, R-05, R-06, R-09, R-10, R-12: sizes belong to tensors; no m, k, n, no axis of groups, no sizes of out."""
    names = list(inspect.signature(tr.grouped_gemm).parameters)
    assert names[:3] == ["lhs", "rhs", "contracting_dims"]
    assert not {"m", "k", "n", "M", "K", "N", "group_axis", "group_sizes", "first_dims", "last_dims"} & set(names)
    for made in (GroupedTensor, GroupedTensor.fully_ragged):
        names = list(inspect.signature(made).parameters)
        assert names.index("last_dims") == names.index("first_dims") + 1 and "group_axis" not in names


def test_a_backend_is_obeyed_or_refused_with_every_reason(xwy):
    """S3-09: as in `grouped_matmul`, since the programs are the same."""
    x, w, _ = xwy
    call = lambda backend: tr.grouped_gemm(
        rows(x), GroupedTensor.stacked(w), contracting_dims=((1,), (1,)), backend=backend
    )
    with pytest.raises(ValueError, match=r"'tpu' cannot run rows m=6.*the tpu backend runs on TPU.*xla: supports it"):
        call("tpu")
    np.testing.assert_array_equal(call("reference").data, tr.grouped_matmul(x, w, ROWS, backend="reference"))
    plain = tr.grouped_dense(x, w, ROWS, interpret=True)  # the reference, as in `grouped_matmul`
    np.testing.assert_array_equal(plain, call("reference").data)
    with pytest.raises(ValueError, match="interpret: backend 'xla' has no kernel to interpret"):
        tr.grouped_dense(x, w, ROWS, interpret=True, backend="xla")


def test_goes_through_vmap_shard_map_and_export(rng):
    flat = jnp.asarray(rng.normal(size=(4, 20)), jnp.float32)
    y = jnp.asarray(rng.normal(size=(6, 2)), jnp.float32)

    def call(data):
        return tr.grouped_gemm(
            GroupedTensor.fully_ragged(data, [2, 0, 3], [3, 1, 2]), rows(y, [3, 1, 2]), contracting_dims=((1,), (0,))
        ).data

    wide, right = np.asarray(flat, np.float64), np.asarray(y, np.float64)
    first, third = wide[:, :6].reshape(4, 2, 3), wide[:, 6:12].reshape(4, 3, 2)
    want = np.concatenate([first @ right[:3], third @ right[4:]], axis=1)
    np.testing.assert_allclose(np.stack([call(each) for each in flat]), want, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.vmap(call))(flat), want, rtol=1e-6, atol=1e-6)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    mapped = jax.shard_map(lambda data: call(data[0])[None], mesh=mesh, in_specs=spec, out_specs=spec)
    np.testing.assert_allclose(jax.jit(mapped)(flat), want, rtol=1e-6, atol=1e-6)
    exported = jax.export.export(jax.jit(call), platforms=["cpu", "tpu", "cuda"])(
        jax.ShapeDtypeStruct((20,), jnp.float32)
    )
    np.testing.assert_allclose(
        jax.export.deserialize(exported.serialize()).call(flat[0]), want[0], rtol=1e-6, atol=1e-6
    )


X, W = jnp.ones((6, 5)), jnp.ones((3, 5, 4))
STACK = GroupedTensor.stacked(W)
SUM = ((1,), (1,))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: tr.grouped_gemm(X, STACK, contracting_dims=SUM), TypeError, "lhs: want a GroupedTensor.*got ArrayImpl"),
        (lambda: tr.grouped_gemm(rows(X), W, contracting_dims=SUM), TypeError, "rhs: want a GroupedTensor"),
        (lambda: tr.grouped_gemm(rows(X), STACK, contracting_dims=1), ValueError, "contracting_dims: want two sequences of ints; got 1"),
        (lambda: tr.grouped_gemm(rows(X), STACK, contracting_dims=((1.7,), (1,))), ValueError, r"contracting_dims: want two sequences of ints; got \(\(1.7,\), \(1,\)\)"),
        (lambda: tr.grouped_gemm(rows(X), STACK, contracting_dims=((1,), (0,))), ValueError, "rhs has no axis 0 to contract, which is the axis of the groups"),
        (lambda: tr.grouped_gemm(rows(X), STACK, contracting_dims=((2,), (1,))), ValueError, "lhs has no axis 2 to contract, it has 2 axes"),
        (lambda: tr.grouped_gemm(rows(X), STACK, contracting_dims=((-3,), (1,))), ValueError, "lhs has no axis -3 to contract, it has 2 axes"),
        (lambda: tr.grouped_gemm(rows(X), STACK, contracting_dims=((1,), (2,))), ValueError, r"axis 1 of lhs \(6, 5\) is contracted with axis 2 of rhs \(3, 5, 4\); want the same size"),
        (lambda: tr.grouped_gemm(rows(X), STACK, contracting_dims=((1,), (1, 2))), ValueError, "as many axes of lhs as of rhs"),
        (lambda: tr.grouped_gemm(rows(X), STACK, contracting_dims=((1, 1), (1, 1))), ValueError, "want each axis of lhs once"),
        (lambda: tr.grouped_gemm(rows(jnp.ones((6, 6))), GroupedTensor.stacked(jnp.ones((3, 6))), contracting_dims=((0,), (1,))), ValueError, "axis 0 of lhs is ragged and axis 1 of rhs is not"),
        (lambda: tr.grouped_gemm(rows(X), rows(X, [2, 1, 2]), contracting_dims=((0,), (0,))), ValueError, "lhs.first_dims: group 1 has size 0, and 1 in rhs.first_dims; want the same"),
        (lambda: tr.grouped_gemm(rows(X, [2, 3]), STACK, contracting_dims=SUM), ValueError, "rhs: want as many groups as lhs; got 3 and 2"),
        (lambda: tr.grouped_gemm(GroupedTensor(X, np.array([9, 9, 9]), None, X.shape), STACK, contracting_dims=SUM), ValueError, "lhs.first_dims: must sum to at most 6, the rows of lhs"),
        (lambda: tr.grouped_gemm(GroupedTensor(X, None, None, (6,)), STACK, contracting_dims=SUM), ValueError, r"lhs: its data have shape \(6, 5\)"),
        (lambda: tr.grouped_gemm(rows(X), STACK, contracting_dims=SUM, bias=jnp.ones((3, 5))), ValueError, r"bias: want shape \(3, 4\)"),
        (lambda: tr.grouped_gemm(rows(X), STACK, contracting_dims=SUM, alpha=jnp.ones(2)), ValueError, r"alpha: want one number for each group, shape \(3,\); got \(2,\)"),
        (lambda: tr.grouped_gemm(rows(X), STACK, contracting_dims=SUM, alpha=jnp.ones(3, int)), TypeError, "alpha: want a float dtype"),
        (lambda: tr.grouped_gemm(rows(X), STACK, contracting_dims=SUM, beta=jnp.ones(3)), ValueError, "beta: scales out; want out, too"),
        (lambda: tr.grouped_gemm(rows(X), STACK, contracting_dims=SUM, out=jnp.ones((6, 4))), TypeError, "out: want a GroupedTensor that is ragged as the result is; got ArrayImpl"),
        (lambda: tr.grouped_gemm(rows(X), STACK, contracting_dims=SUM, out=rows(jnp.ones((6, 3)))), ValueError, r"out: want float32\[6, 4\]; got float32\[6, 3\]"),
        (lambda: tr.grouped_gemm(rows(X), STACK, contracting_dims=SUM, out=rows(jnp.ones((6, 4), jnp.bfloat16))), ValueError, r"out: want float32\[6, 4\]; got bfloat16"),
        (lambda: tr.grouped_gemm(rows(X), STACK, contracting_dims=SUM, out=GroupedTensor.ragged_cols(jnp.ones((6, 4)), [1, 1, 1])), ValueError, "out: want a tensor that is ragged in its first axis"),
        (lambda: tr.grouped_gemm(rows(X), rows(X), contracting_dims=((0,), (0,)), out=jnp.ones((2, 5, 5))), ValueError, r"out: want float32\[3, 5, 5\]; got float32\[2, 5, 5\]"),
        (lambda: tr.grouped_gemm(rows(X), rows(X), contracting_dims=((0,), (0,)), out=rows(jnp.ones((6, 5)))), TypeError, "out: want an array, since the result is not ragged"),
        (lambda: tr.grouped_gemm(STACK, STACK, contracting_dims=SUM, group_offset=1), ValueError, "group_offset: want exactly one of m, k and n ragged"),
        (lambda: tr.grouped_gemm(rows(X), rows(X), contracting_dims=((1,), (1,)), backend="gpu"), ValueError, "backend: 'gpu' has no kernel for more than one"),
        (lambda: tr.grouped_gemm(rows(jnp.ones((6, 2, 5))), rows(jnp.ones((6, 5))), contracting_dims=((2,), (1,))), ValueError, "a flat result holds matrices"),
        (lambda: tr.grouped_gemm(STACK, GroupedTensor.ragged_rows(jnp.ones((6, 2, 5)), ROWS), contracting_dims=((1,), (2,))), ValueError, "rhs: its ragged axis would be axis 1 of a result of 3"),
        (lambda: tr.grouped_gemm(STACK, STACK, contracting_dims=SUM, backend="tpu"), ValueError, "backend: 'tpu' has no kernel for stacks alone"),
        (lambda: tr.grouped_gemm(STACK, STACK, contracting_dims=SUM, interpret=True), ValueError, "interpret: True has no kernel for stacks alone; want False"),
        (lambda: tr.grouped_gemm(rows(X), rows(X), contracting_dims=SUM, interpret=True), ValueError, "interpret: True has no kernel for more than one"),
        (lambda: tr.grouped_gemm(rows(X), STACK, contracting_dims=SUM, interpret=1), TypeError, "interpret: want True or False"),
        (lambda: tr.grouped_gemm(STACK, STACK, contracting_dims=SUM, precision="best"), ValueError, "precision: want"),
        (lambda: tr.grouped_gemm(rows(X), STACK, contracting_dims=SUM, bias=jnp.ones((3, 4)), group_offset=0, out=rows(jnp.ones((6, 4)))), ValueError, "group_offset:.* a bias alone where m is ragged; got m ragged and bias"),
        (lambda: tr.grouped_gemm(rows(X), rows(X), contracting_dims=((0,), (0,)), bias=jnp.ones((3, 5)), group_offset=2), ValueError, "got k ragged and bias"),
        (lambda: tr.grouped_gemm(rows(X), STACK, contracting_dims=SUM, alpha=jnp.ones(3), group_offset=0), ValueError, "got m ragged and alpha"),
        (lambda: tr.grouped_gemm(STACK, STACK, contracting_dims=SUM, bias=jnp.ones((3, 4), complex)), TypeError, "bias: want a real dtype, since the result is float32; got complex64"),
        (lambda: tr.grouped_gemm(rows(X), STACK, contracting_dims=SUM, bias="b"), TypeError, "bias: want an array; got str"),
        (lambda: tr.grouped_gemm(rows(X), STACK, contracting_dims=SUM, out=rows(jnp.ones((6, 4)), [3, 0, 3])), ValueError, "out.first_dims: group 0 has size 3, and 2 in the result; want the same"),
        (lambda: tr.grouped_gemm(rows(X), STACK, contracting_dims=SUM, out=rows(jnp.ones((6, 4)), [2, 3])), ValueError, "out.first_dims: want 3 groups, as the result has; got 2"),
        (lambda: tr.grouped_gemm(rows(X), rows(X), contracting_dims=SUM, out=GroupedTensor(jnp.ones(12), np.array(ROWS), np.array(ROWS), (12,))), ValueError, "out: the groups have 13 entries; got 12"),
        (lambda: tr.grouped_gemm(GroupedTensor(X.ravel(), np.array([6]), np.array([6]), (30,)), GroupedTensor.stacked(W[:1]), contracting_dims=SUM), ValueError, "lhs: the groups have 36 entries; got 30"),
        (lambda: tr.grouped_gemm(GroupedTensor(X.ravel(), np.array([1, 2]), np.array([6]), (30,)), STACK, contracting_dims=SUM), ValueError, "lhs.last_dims: want as many groups as lhs.first_dims; got 1 and 2"),
        (lambda: tr.grouped_gemm(GroupedTensor(X, np.array([1, 1, 1]), np.array([1, 1, 1]), X.shape), STACK, contracting_dims=SUM), ValueError, r"lhs: both of its axes are ragged; want flat data"),
        (lambda: tr.grouped_gemm(GroupedTensor(X, np.array([2.0, 1.0]), None, X.shape), STACK, contracting_dims=SUM), TypeError, "lhs.first_dims: want an integer dtype; got float64"),
        (lambda: tr.grouped_gemm(GroupedTensor(X, np.array([2, -1, 1]), None, X.shape), STACK, contracting_dims=SUM), ValueError, "lhs.first_dims: want sizes from 0.*group 1 has -1"),
        (lambda: tr.grouped_gemm(GroupedTensor("x", None, None, ()), STACK, contracting_dims=SUM), TypeError, "lhs.data: want an array; got str"),
        (lambda: tr.grouped_gemm(GroupedTensor(1.0, None, None, ()), STACK, contracting_dims=SUM), ValueError, "lhs: want at least 1 dimension; got a scalar"),
        (lambda: tr.grouped_dense(X, W, [9, 0, 0]), ValueError, "group_sizes: must sum to at most 6, the rows of x; got a sum of 9"),
        (lambda: tr.grouped_dense(X, W, ROWS, contracting_dims=((0,), (1,))), ValueError, "axis 0 of x is ragged and axis 1 of kernel is not"),
        (lambda: tr.grouped_dense(X, W, [2, 3]), ValueError, "kernel: want as many groups as x; got 3 and 2"),
    ],
)  # fmt: skip
def test_errors_say_which_and_why(make, error, words):
    """R-16: no argument is silently dropped or reinterpreted."""
    with pytest.raises(error, match=words):
        make()
