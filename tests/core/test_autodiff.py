"""Derivatives and transformations against a dense einsum: every one, both forms, every backend."""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from sweep import marked, sweep

import trencadis as tr
from trencadis.core.autodiff import grouped_p

pytestmark = pytest.mark.core

M, K, N, G = 11, 3, 5, 4
SIZES = np.array([3, 0, 4, 2], np.int32)  # an empty group, and two unowned rows


def onehot(sizes):
    return np.asarray([[a <= r < b for a, b in oracle.bounds(sizes, M)] for r in range(M)], np.float32)


def dense_rows(x, w, sizes=SIZES):
    return jnp.einsum("mg,mk,gkn->mn", onehot(sizes), x, w, precision="highest")


def dense_contraction(x, y, sizes=SIZES):
    return jnp.einsum("mg,mk,mn->gkn", onehot(sizes), x, y, precision="highest")


@pytest.fixture
def xwy(rng):
    shapes = (M, K), (G, K, N), (M, N)
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)


@functools.cache
def forms(backend):
    """Name, ours, dense, and which of (x, w, y) are the operands."""
    rows = functools.partial(tr.grouped_matmul, group_sizes=SIZES, backend=backend)
    summed = functools.partial(tr.transposed_grouped_matmul, group_sizes=SIZES, backend=backend)
    return [
        ("rows", lambda x, w: rows(x, w), dense_rows, (0, 1)),
        ("rows, rhs transposed", lambda x, w: rows(x, w.swapaxes(1, 2), transpose_rhs=True), dense_rows, (0, 1)),
        ("contraction", lambda x, y: summed(x.T, y), dense_contraction, (0, 2)),
        ("contraction, lhs [m, k]", lambda x, y: summed(x, y, transpose_lhs=True), dense_contraction, (0, 2)),
    ]


@functools.partial(jax.jit, static_argnums=0)
def value_and_vjp(f, args, cotangent):
    """Both passes in one program."""
    out, back = jax.vjp(f, *args)
    return out, back(cotangent)


def close(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), got, want)


@functools.partial(jax.jit, static_argnums=0)
def forward_modes(f, args, tangents):
    """Results and tangents by jvp, by linearize, and by jvp where the second operand has no tangent."""
    out, push = jax.linearize(f, *args)
    zero = (tangents[0], jnp.zeros_like(args[1]))
    return jax.jvp(f, args, tangents), (out, push(*tangents)), jax.jvp(f, args, zero)


def test_jvp_and_linearize(backend, xwy):
    for _, ours, dense, pick in forms(backend):
        args = tuple(xwy[i] for i in pick)
        tangents = tuple(np.cos(3 * a) for a in args)
        close(forward_modes(ours, args, tangents), forward_modes(dense, args, tangents))


def test_vjp(backend, xwy):
    for _, ours, dense, pick in forms(backend):
        args = tuple(xwy[i] for i in pick)
        out, back = jax.vjp(ours, *args)
        c = np.sin(out)
        close((out, back(c)), value_and_vjp(dense, args, c))


@pytest.mark.parametrize(
    ("backend", "outer"),
    sweep(itertools.product(["xla", "reference"], [jax.jacfwd, jax.jacrev]), [("xla", jax.jacfwd)]),
)
def test_second_order(backend, outer, xwy):
    """Hessian in both operands of a nonlinear function of the result, forward over reverse and reverse over reverse."""
    for _, ours, dense, pick in forms(backend):
        args = tuple(xwy[i] for i in pick)
        close(hessian(ours, outer, args), hessian(dense, jax.jacfwd, args))


@functools.partial(jax.jit, static_argnums=(0, 1))
def hessian(f, outer, args):
    return outer(jax.grad(lambda a, b: jnp.sum(jnp.sin(f(a, b))), argnums=(0, 1)), argnums=(0, 1))(*args)


def test_third_order(backend, xwy):
    _, ours, dense, _ = forms(backend)[0]
    scale = lambda f: lambda t: jnp.sum(f(t * xwy[0], jnp.sin(t) * xwy[1]) ** 2)
    third = lambda f: jax.grad(jax.grad(jax.grad(scale(f))))(0.7)
    np.testing.assert_allclose(third(ours), third(dense), rtol=1e-3)


@pytest.mark.parametrize("backend", ["xla", marked("reference")])
@pytest.mark.parametrize("activation", [None, jnp.tanh, marked(jax.nn.silu)])
def test_epilogue_derivatives(backend, rng, activation, x64):
    x, w, b = rng.normal(size=(M, K)), rng.normal(size=(G, K, N)), rng.normal(size=(G, N))
    f = lambda x, w, b: tr.grouped_matmul(x, w, SIZES, jnp.float64, bias=b, activation=activation, backend=backend)
    check_grads(f, (x, w, b), order=2, modes=("fwd", "rev"))
    e = rng.normal(size=(M, N))
    if activation is None:
        g = lambda x, w, b, e: tr.grouped_matmul(x, w, SIZES, jnp.float64, bias=b, existing_out=e, backend=backend)
        check_grads(g, (x, w, b, e), order=1, modes=("fwd", "rev"))


def test_gradient_dtypes_and_bias_in_float32(backend):
    """bf16 bias: the sum of many rows of cotangent is not rounded on the way; unowned rows count for no group."""
    m = 600
    x, w = np.ones((m, 2), jnp.bfloat16), np.ones((2, 2, 3), np.float32)
    b = np.zeros((2, 3), jnp.bfloat16)
    f = lambda x, w, b: tr.grouped_matmul(x, w, np.array([300, 257]), jnp.bfloat16, bias=b, backend=backend)
    _, (dx, dw, db) = value_and_vjp(f, (x, w, b), np.ones((m, 3), jnp.bfloat16))
    assert (dx.dtype, dw.dtype, db.dtype) == (jnp.bfloat16, jnp.float32, jnp.bfloat16)
    np.testing.assert_array_equal(oracle.wide(db), [[300.0] * 3, [256.0] * 3])  # 257 rounds to 256 once
    np.testing.assert_array_equal(oracle.wide(dw)[1], np.full((2, 3), 257.0))


VMAPS = [
    axes for axes in itertools.product([None, 0, 1], [None, 0, 3], [None, 0, 1]) if any(a is not None for a in axes)
]


@pytest.mark.parametrize("axes", VMAPS)
def test_vmap_rows(axes, rng):
    """Any axis of any subset of the operands, sizes alone included; values, and gradients through and over the vmap."""
    xs, ws = rng.normal(size=(2, M, K)).astype("f"), rng.normal(size=(2, G, K, N)).astype("f")
    sizes = np.array([SIZES, [1, 1, 0, 5]], np.int32)
    pick = lambda a, axis: a[0] if axis is None else np.moveaxis(a, 0, axis)
    args = tuple(pick(a, axis) for a, axis in zip((xs, ws, sizes), axes, strict=True))
    at = lambda a, axis, i: a[0 if axis is None else i]
    entry = lambda i: tuple(at(a, axis, i) for a, axis in zip((xs, ws, sizes), axes, strict=True))

    f = lambda x, w, s: tr.grouped_matmul(x, w, s)
    loss = lambda x, w, s: jnp.sum(jnp.sin(f(x, w, s)))
    got = jax.vmap(f, in_axes=axes)(*args)
    grads = jax.vmap(jax.grad(loss, argnums=(0, 1)), in_axes=axes)(*args)
    total = lambda x, w: jnp.sum(jax.vmap(loss, in_axes=axes)(x, w, args[2]))
    outer = jax.grad(total, argnums=(0, 1))(*args[:2])
    got, grads, outer = jax.tree.map(np.asarray, (got, grads, outer))
    summed = [0.0, 0.0]
    for i in range(2):
        x, w, s = entry(i)
        out = oracle.rows(x, w, s)
        close(got[i], out)
        want = oracle.rows(np.cos(out), w, s, transpose_rhs=True), oracle.contraction(x, np.cos(out), s)
        close(tuple(g[i] for g in grads), want)
        summed = [total + g for total, g in zip(summed, want, strict=True)]
    for j in range(2):
        if axes[j] is None:
            close(outer[j], summed[j])


@pytest.mark.parametrize(
    "axes", [(0, None, None), (None, 1, None), (0, 0, None), (1, 1, 0), (None, None, 0), (0, None, 0)]
)
@pytest.mark.parametrize("transpose_lhs", [True, False])
def test_vmap_contraction(axes, transpose_lhs, rng):
    xs, ys = rng.normal(size=(2, M, K)).astype("f"), rng.normal(size=(2, M, N)).astype("f")
    sizes = np.array([SIZES, [1, 1, 0, 5]], np.int32)
    lhs = xs if transpose_lhs else xs.swapaxes(1, 2)
    pick = lambda a, axis: a[0] if axis is None else np.moveaxis(a, 0, axis)
    args = tuple(pick(a, axis) for a, axis in zip((lhs, ys, sizes), axes, strict=True))
    f = lambda x, y, s: tr.transposed_grouped_matmul(x, y, s, transpose_lhs=transpose_lhs)
    got = np.asarray(jax.vmap(f, in_axes=axes)(*args))
    for i in range(2):
        x, y, s = (a[0 if axis is None else i] for a, axis in zip((xs, ys, sizes), axes, strict=True))
        close(got[i], oracle.contraction(x, y, s))


def test_vmap_nested_mixed_sharing(rng):
    """Weights shared by the inner vmap and mapped by the outer one, and the other way round."""
    xs, sizes = rng.normal(size=(2, 3, M, K)).astype("f"), np.array([SIZES, [1, 1, 0, 5], [0, 0, 0, 9]], np.int32)
    ws = rng.normal(size=(3, G, K, N)).astype("f")
    f = tr.grouped_matmul
    got = jax.jit(jax.vmap(jax.vmap(f, in_axes=(0, None, 0)), in_axes=(0, 0, None)))(xs, ws[:2], sizes)
    close(got, np.stack([[oracle.rows(xs[i, j], ws[i], sizes[j]) for j in range(3)] for i in range(2)]))
    got = jax.jit(jax.vmap(jax.vmap(f, in_axes=(0, 0, 0)), in_axes=(0, None, None)))(xs, ws, sizes)
    close(got, np.stack([[oracle.rows(xs[i, j], ws[j], sizes[j]) for j in range(3)] for i in range(2)]))


def test_vmap_of_everything_else(rng):
    """Epilogue operands and the window, mapped too."""
    x, w = rng.normal(size=(M, K)).astype("f"), rng.normal(size=(2, K, N)).astype("f")
    b, e = rng.normal(size=(2, 2, N)).astype("f"), rng.normal(size=(2, M, N)).astype("f")
    first = np.array([0, 2], np.int32)
    f = lambda b, e, i: tr.grouped_matmul(x, w, SIZES, bias=b, existing_out=e, group_offset=i)
    got = np.asarray(jax.jit(jax.vmap(f))(b, e, first))
    for i in range(2):
        oracle.check(got[i], oracle.rows(x, w, SIZES, first=first[i], bias=b[i], existing_out=e[i]))
    got = np.asarray(
        jax.jit(jax.vmap(lambda b: tr.grouped_matmul(x, w, SIZES, bias=b, activation=jnp.exp, group_offset=0)))(b)
    )
    for i in range(2):  # exp(0) is 1: unowned rows are 0 all the same
        oracle.check(got[i], oracle.rows(x, w, SIZES, bias=b[i], activation=np.exp))


def test_remat_scan_and_jit_commute(backend, xwy):
    x, w, _ = xwy
    square = w[:, :, :K]
    f = lambda x, w: jnp.sin(tr.grouped_matmul(x, w, SIZES, backend=backend))
    loss = lambda f: lambda x, w: jnp.sum(jax.lax.scan(lambda c, _: (f(c, w), None), x, None, length=3)[0])
    both = lambda f: jax.value_and_grad(loss(f), (0, 1))
    want = jax.jit(both(lambda x, w: jnp.sin(dense_rows(x, w))))(x, square)
    for g in (f, jax.checkpoint(f), jax.jit(f)):
        close(jax.jit(both(g))(x, square), want)
    close(both(jax.checkpoint(f))(x, square), want)


def test_shard_map_checks_varying_axes(backend, xwy):
    """Experts over a mesh with check_vma on: partial results add up, forward and backward."""
    x, w, _ = xwy
    mesh = jax.make_mesh((2,), ("e",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("e"), P()), out_specs=P())
    def sharded(x, w, sizes):
        first = jax.lax.axis_index("e") * w.shape[0]
        y = tr.grouped_matmul(x, w, sizes, group_offset=first, activation=jnp.tanh, backend=backend)
        return jax.lax.psum(y, "e")

    plain = lambda x, w: jnp.tanh(dense_rows(x, w))
    c = np.cos(xwy[2])
    close(value_and_vjp(lambda x, w: sharded(x, w, SIZES), (x, w), c), value_and_vjp(plain, (x, w), c))


def test_shard_map_over_rows_and_bias(backend, xwy):
    """Rows and sizes sharded: each device has its own ragged problem; weight gradients add up over them."""
    x, w, _ = xwy
    xs, b = np.stack([x, 2 * x]), np.ones((G, N), np.float32)
    sizes = np.asarray([SIZES, [1, 1, 0, 5]])
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("d"), P(), P(), P("d")), out_specs=P("d"))
    def sharded(x, w, b, s):
        return tr.grouped_matmul(x[0], w, s[0], bias=b, backend=backend)[None]

    def plain(xs, w, b):
        return jnp.stack([dense_rows(xs[i], w, sizes[i]) + onehot(sizes[i]) @ b for i in range(2)])

    c = np.cos(np.stack([xwy[2], 3 * xwy[2]]))
    close(value_and_vjp(lambda *a: sharded(*a, sizes), (xs, w, b), c), value_and_vjp(plain, (xs, w, b), c))


def test_export_for_other_platforms(xwy):
    """A process without accelerators lowers for them; what it exports for its own runs after a round trip."""
    x, w, _ = xwy
    f = jax.jit(jax.value_and_grad(lambda x, w, s: jnp.sum(jnp.sin(tr.grouped_matmul(x, w, s))), (0, 1)))
    for platforms in (["tpu"], ["cuda"], ["cpu", "cuda", "tpu"]):
        with (
            contextlib.nullcontext()
            if platforms == ["tpu"]
            else pytest.warns(tr.PerformanceWarning, match="not known here")
        ):
            exported = jax.export.export(f, platforms=platforms)(x, w, SIZES)
        assert exported.platforms == tuple(platforms)
    again = jax.export.deserialize(exported.serialize())
    close(again.call(x, w, SIZES), f(x, w, SIZES))


def test_each_pass_gets_its_own_tiling(xwy):
    """Sizes belong to m, k and n: they follow the dimension into each pass, or each pass has its own."""
    x, w, _ = xwy
    tilings = tr.Tilings(forward=(8, 2, 3), d_lhs=(4, 2, 3), d_rhs=(2, 2, 3))

    def passes(tiling):
        f = jax.grad(lambda x, w: jnp.sum(tr.grouped_matmul(x, w, SIZES, tiling=tiling) ** 2), (0, 1))
        eqns = [e for e in jax.make_jaxpr(f)(x, w).eqns if e.primitive is grouped_p]
        return [(e.params["problem"].form.value, e.params["overrides"].tilings.forward) for e in eqns]

    for tiling in (tr.Tiling(8, 2, 3), (8, 2, 3), lambda m, k, n: (8, 2, 3) if (m, k, n) == (M, K, N) else None):
        assert sorted(passes(tiling), key=str) == sorted(
            [("rows", tr.Tiling(8, 2, 3)), ("rows", tr.Tiling(8, 3, 2)), ("contraction", tr.Tiling(8, 2, 3))], key=str
        )
    assert sorted(passes(tilings), key=str) == sorted(
        [("rows", tr.Tiling(8, 2, 3)), ("rows", tr.Tiling(4, 3, 2)), ("contraction", tr.Tiling(2, 2, 3))], key=str
    )
    assert {t for _, t in passes(None)} == {None}


def test_complex(backend, rng):
    x = (rng.normal(size=(M, K)) + 1j * rng.normal(size=(M, K))).astype(np.complex64)
    w = (rng.normal(size=(G, K, N)) + 1j * rng.normal(size=(G, K, N))).astype(np.complex64)
    f = lambda x, w: tr.grouped_matmul(x, w, SIZES, jnp.complex64, backend=backend)
    oracle.check(f(x, w), oracle.rows(x, w, SIZES))
    c = oracle.rows(x, w, SIZES).astype(np.complex64)
    close(value_and_vjp(f, (x, w), c), value_and_vjp(dense_rows, (x, w), c))


@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, None), (None, 0, None), (None, None, 0)])
def test_vmap_over_an_axis_of_length_zero(axes):
    shapes = (M, K), (G, K, N), (G,)
    x, w, sizes = (np.ones(shape if axis is None else (0, *shape)) for shape, axis in zip(shapes, axes, strict=True))
    mapped = lambda x, w: jax.vmap(tr.grouped_matmul, in_axes=axes)(x, w, sizes.astype(int))
    twice = lambda x, w: jax.vmap(mapped)(jnp.stack([x, x]), jnp.stack([w, w])).sum()
    out, gradient = jax.jit(lambda x, w: (mapped(x, w), jax.grad(twice, argnums=1)(x, w)))(x, w)
    assert out.shape == (0, M, N)
    np.testing.assert_array_equal(gradient, np.zeros_like(w))


def test_linear_transpose(backend, xwy):
    x, w, y = xwy
    b, e = np.ones((G, N), np.float32), np.ones((M, N), np.float32)
    f = lambda b, e: tr.grouped_matmul(x, w, SIZES, bias=b, existing_out=e, backend=backend)
    db, de = jax.linear_transpose(f, b, e)(y)
    close((db, de), (onehot(SIZES).T @ y, y))
    (dx,) = jax.linear_transpose(lambda x: tr.grouped_matmul(x, w, SIZES, backend=backend), x)(y)
    close(dx, oracle.rows(y, w, SIZES, transpose_rhs=True))


def test_explicitly_sharded_operands(xwy):
    """They are gathered, which is right; rules that shard may come later."""
    x, w, _ = xwy
    mesh = jax.make_mesh((2,), ("e",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        ws = jax.sharding.reshard(w, P("e"))
        f = lambda x, w: tr.grouped_matmul(x, w, SIZES)
        close(jax.jit(f)(x, ws), oracle.rows(x, w, SIZES))
        grads = jax.jit(jax.grad(lambda x, w: jnp.sum(jnp.sin(f(x, w))), (0, 1)))(x, ws)
        many = jax.jit(jax.vmap(f, in_axes=(None, 0)))(x, jax.sharding.reshard(np.stack([w, 2 * w]), P("e")))
    out = oracle.rows(x, w, SIZES)
    close(grads, (oracle.rows(np.cos(out), w, SIZES, transpose_rhs=True), oracle.contraction(x, np.cos(out), SIZES)))
    close(np.asarray(many)[1], 2 * out)
