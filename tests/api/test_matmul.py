"""`grouped_matmul` and `transposed_grouped_matmul`: every argument means what it says."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from sweep import marked

import trencadis as tr

pytestmark = pytest.mark.core

M, K, N, G = 37, 6, 5, 4
SIZES = np.array([10, 0, 20, 3], np.int32)


@pytest.fixture
def xwy(rng):
    return tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((M, K), (G, K, N), (M, N)))


@functools.cache
def spelt(backend):
    """Both forms with the offset of a window as an argument: one program for all spellings of one dtype."""
    window = dict(group_sizes=SIZES, backend=backend)
    rows = lambda x, w, o: tr.grouped_matmul(x, w, group_offset=o, **window)
    summed = lambda x, y, o: tr.transposed_grouped_matmul(x.T, y, group_offset=o, num_actual_groups=1, **window)
    return jax.jit(rows), jax.jit(summed)


def test_signatures_are_those_of_the_design():
    names = list(inspect.signature(tr.grouped_matmul).parameters)
    assert names == [
        "lhs",
        "rhs",
        "group_sizes",
        "preferred_element_type",
        "tiling",
        "group_offset",
        "existing_out",
        "transpose_rhs",
        "interpret",
        "precision",
        "bias",
        "activation",
        "backend",
    ]
    names = list(inspect.signature(tr.transposed_grouped_matmul).parameters)
    assert names == [
        "lhs",
        "rhs",
        "group_sizes",
        "preferred_element_type",
        "tiling",
        "group_offset",
        "num_actual_groups",
        "existing_out",
        "interpret",
        "transpose_lhs",
        "precision",
        "backend",
    ]


@pytest.mark.parametrize("backend", ["xla", marked("reference")])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_group_sizes_of_any_integer_dtype(backend, xwy, dtype):
    x, w, y = xwy
    oracle.check(tr.grouped_matmul(x, w, SIZES.astype(dtype), backend=backend), oracle.rows(x, w, SIZES))
    got = tr.transposed_grouped_matmul(x.T, y, SIZES.astype(dtype), backend=backend)
    oracle.check(got, oracle.contraction(x, y, SIZES))


def test_numpy_and_lists_are_arrays_too(xwy):
    x, w, _ = (np.asarray(a) for a in xwy)
    oracle.check(tr.grouped_matmul(x, w, [10, 0, 20, 3]), oracle.rows(x, w, SIZES))
    oracle.check(tr.grouped_matmul(x.tolist(), w.tolist(), (10, 0, 20, 3)), oracle.rows(x, w, SIZES))


@pytest.mark.parametrize("backend", ["xla", marked("reference")])
@pytest.mark.parametrize(
    "spelling", [2, np.int64(2), np.array(2), np.array([2]), jnp.array(2), jnp.array([2], jnp.uint8)]
)
def test_group_offset_spellings(backend, xwy, spelling):
    x, w, y = map(np.asarray, xwy)
    rows, summed = spelt(backend)
    want = oracle.rows(x, w[2:], SIZES, first=2)
    oracle.check(tr.grouped_matmul(x, w[2:], SIZES, group_offset=spelling, backend=backend), want)
    oracle.check(rows(x, w[2:], spelling), want)
    got = tr.transposed_grouped_matmul(x.T, y, SIZES, group_offset=spelling, backend=backend)
    oracle.check(got, oracle.contraction(x, y, SIZES, first=2))  # all that remain
    oracle.check(summed(x, y, spelling), oracle.contraction(x, y, SIZES, first=2, local=1))


def test_a_traced_window_past_the_end_is_empty_there(backend, xwy):
    x, w, _ = xwy
    f = jax.jit(lambda o: tr.grouped_matmul(x, w[:2], SIZES, group_offset=o, backend=backend))
    for first in (-1, 3, 7):
        padded = np.concatenate(
            [np.zeros((1, K, N)), w[:2], np.zeros((9, K, N))]
        )  # weights at their group, else nothing
        want = np.zeros((M, N))
        for i, (a, b) in enumerate(oracle.bounds(SIZES, M)):
            if 0 <= i - first < 2:
                want[a:b] = np.asarray(x[a:b], np.float64) @ padded[1 + i - first]
        oracle.check(f(first), want)


@pytest.mark.parametrize("backend", ["xla", marked("reference")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", "int32"])
def test_preferred_element_type(backend, xwy, dtype, x64):
    x, w, y = (np.round(np.asarray(a) * 4) for a in xwy)
    out = tr.grouped_matmul(x, w, SIZES, dtype, backend=backend)
    assert out.dtype == jnp.dtype(dtype)
    oracle.check(out, oracle.rows(x, w, SIZES))
    out = tr.transposed_grouped_matmul(x.T, y, SIZES, preferred_element_type=dtype, backend=backend)
    assert out.dtype == jnp.dtype(dtype)
    oracle.check(out, oracle.contraction(x, y, SIZES))


def test_default_result_is_float32(xwy):
    x, w, y = (a.astype(jnp.bfloat16) for a in xwy)
    assert tr.grouped_matmul(x, w, SIZES).dtype == tr.transposed_grouped_matmul(x.T, y, SIZES).dtype == jnp.float32


def test_accumulation_is_float32(backend):
    """4096 ones in bf16 sum to 4096; a bf16 accumulator would stop at 256."""
    k = 4096
    x, w = np.ones((3, k), jnp.bfloat16), np.ones((1, k, 2), jnp.bfloat16)
    np.testing.assert_array_equal(tr.grouped_matmul(x, w, [3], jnp.bfloat16, backend=backend), np.full((3, 2), k))
    got = tr.transposed_grouped_matmul(
        np.ones((2, k), jnp.bfloat16), np.ones((k, 2), jnp.bfloat16), [k], backend=backend
    )
    np.testing.assert_array_equal(got, np.full((1, 2, 2), k))


def test_float64(backend, rng, x64):
    x, w, y = rng.normal(size=(M, K)), rng.normal(size=(G, K, N)), rng.normal(size=(M, N))
    oracle.check(tr.grouped_matmul(x, w, SIZES, jnp.float64, backend=backend), oracle.rows(x, w, SIZES))
    got = tr.transposed_grouped_matmul(x.T, y, SIZES, jnp.float64, backend=backend)
    oracle.check(got, oracle.contraction(x, y, SIZES))


def test_int8_accumulates_in_int32_exactly(backend):
    k = 3000  # past what float32 could hold exactly
    x, w = np.full((5, k), -128, np.int8), np.full((2, k, 3), -127, np.int8)
    got = tr.grouped_matmul(x, w, [2, 2], jnp.int32, backend=backend)
    np.testing.assert_array_equal(got, np.array([[128 * 127 * k] * 3] * 4 + [[0] * 3]))
    x, y = np.full((2, k), -128, np.int8), np.full((k, 3), 127, np.int8)
    got = tr.transposed_grouped_matmul(x, y, [k, 0], jnp.int32, backend=backend)
    np.testing.assert_array_equal(got, np.stack([np.full((2, 3), -128 * 127 * k), np.zeros((2, 3))]))


@pytest.mark.parametrize(
    "lhs, rhs", [("bfloat16", "float32"), ("float32", "float16"), ("int8", "bfloat16"), ("float8_e4m3fn", "bfloat16")]
)
def test_mixed_operands(backend, xwy, lhs, rhs):
    x, w, y = map(np.asarray, xwy)
    x, w, y = np.round(4 * x).astype(jnp.dtype(lhs)), w.astype(jnp.dtype(rhs)), y.astype(jnp.dtype(rhs))
    oracle.check(tr.grouped_matmul(x, w, SIZES, backend=backend), oracle.rows(x, w, SIZES))
    oracle.check(tr.transposed_grouped_matmul(x.T, y, SIZES, backend=backend), oracle.contraction(x, y, SIZES))


def test_precision_is_honoured(xwy):
    """It arrives at the dots of the compiled program."""
    x, w, y = xwy
    for precision in ("highest", jax.lax.Precision.HIGHEST, ("highest", "highest")):
        f = functools.partial(tr.grouped_matmul, precision=precision)
        oracle.check(f(x, w, SIZES), oracle.rows(x, w, SIZES))
        text = jax.jit(f).lower(x, w, SIZES).as_text()
        assert text.count("HIGHEST") >= text.count("stablehlo.dot_general") > 0
        grads = jax.jit(jax.grad(lambda x, w, f=f: f(x, w, SIZES).sum(), (0, 1))).lower(x, w).as_text()
        assert grads.count("HIGHEST") >= grads.count("stablehlo.dot_general") > 0
        text = (
            jax.jit(functools.partial(tr.transposed_grouped_matmul, precision=precision)).lower(x.T, y, SIZES).as_text()
        )
        assert text.count("HIGHEST") >= text.count("stablehlo.dot_general") > 0


TILINGS = [
    None, (16, 2, 3), tr.Tiling(1, 1, 1), tr.Tilings(forward=(8, 8, 8), d_rhs=(4, 4, 4)),
    lambda m, k, n: (m, k, n), lambda m, k, n: None,
]  # fmt: skip


@pytest.mark.parametrize("tiling", TILINGS)
def test_tiling_changes_nothing_but_speed(xwy, tiling):
    x, w, y = xwy
    oracle.check(tr.grouped_matmul(x, w, SIZES, tiling=tiling), oracle.rows(x, w, SIZES))
    oracle.check(tr.transposed_grouped_matmul(x.T, y, SIZES, tiling=tiling), oracle.contraction(x, y, SIZES))
    dx, dw = jax.vjp(lambda x, w: tr.grouped_matmul(x, w, SIZES, tiling=tiling), x, w)[1](y)
    oracle.check(dx, oracle.rows(y, w, SIZES, transpose_rhs=True))
    oracle.check(dw, oracle.contraction(x, y, SIZES))


def test_interpret(xwy):
    x, w, y = xwy
    for f in (tr.grouped_matmul, jax.jit(tr.grouped_matmul, static_argnames="interpret")):
        oracle.check(f(x, w, SIZES, interpret=True), oracle.rows(x, w, SIZES))
    dx, dw = jax.vjp(lambda x, w: tr.grouped_matmul(x, w, SIZES, interpret=True), x, w)[1](y)
    oracle.check(dx, oracle.rows(y, w, SIZES, transpose_rhs=True))
    oracle.check(dw, oracle.contraction(x, y, SIZES))
    oracle.check(tr.transposed_grouped_matmul(x.T, y, SIZES, interpret=True), oracle.contraction(x, y, SIZES))


def test_existing_out_keeps_unowned_rows_and_takes_the_cotangent(backend, xwy):
    x, w, y = xwy
    f = lambda e: tr.grouped_matmul(x, w[:2], SIZES, group_offset=0, existing_out=e, backend=backend)
    out, back = jax.vjp(f, y)
    oracle.check(out, oracle.rows(x, w[:2], SIZES, existing_out=y))
    np.testing.assert_array_equal(out[10:], y[10:])
    np.testing.assert_array_equal(back(y)[0], y)


def test_existing_out_is_reused_under_jit(xwy):
    """A donated existing_out is the result's buffer, and no other array of that size is made."""
    x, w, y = xwy
    f = jax.jit(lambda e: tr.grouped_matmul(x, w, SIZES, existing_out=e), donate_argnums=0)
    assert f.lower(y).compile().memory_analysis().alias_size_in_bytes == y.nbytes
    e = jnp.zeros((G, K, N))
    f = jax.jit(lambda e: tr.transposed_grouped_matmul(x.T, y, SIZES, existing_out=e), donate_argnums=0)
    assert f.lower(e).compile().memory_analysis().alias_size_in_bytes == e.nbytes


def test_float32_gradient_accumulation_of_bfloat16(backend, xwy):
    x, _, y = (a.astype(jnp.bfloat16) for a in xwy)
    e = jnp.full((G, K, N), 1000.0)
    got = tr.transposed_grouped_matmul(x.T, y, SIZES, existing_out=e, backend=backend)
    oracle.check(got, oracle.contraction(x, y, SIZES, existing_out=e))
    np.testing.assert_array_equal(got[1], e[1])  # empty


@pytest.mark.parametrize("backend", ["xla", marked("reference")])
@pytest.mark.parametrize("activation", [jax.nn.relu, jax.nn.silu, jax.nn.gelu, jnp.tanh, jnp.exp, lambda z: z * z + 1])
def test_activation_after_bias_before_rounding(backend, xwy, activation):
    x, w, _ = map(np.asarray, xwy)
    b = np.arange(G * N, dtype=np.float32).reshape(G, N) / 7
    want = oracle.wide(jax.jit(activation)(oracle.rows(x, w, SIZES, bias=b).astype(np.float32)))
    want[33:] = 0  # also where the activation of zero is not
    got = tr.grouped_matmul(x, w, SIZES, bias=b, activation=activation, backend=backend)
    oracle.check(got, want)
    half = tr.grouped_matmul(x, w, SIZES, jnp.bfloat16, bias=b, activation=activation, backend=backend)
    oracle.check(half, want)
    assert not np.asarray(got)[33:].any()


def test_activation_may_close_over_traced_values(backend, xwy):
    x, w, y = xwy

    def f(beta, x):
        return jnp.sum(y * tr.grouped_matmul(x, w, SIZES, activation=lambda z: jnp.tanh(beta * z), backend=backend))

    def dense(beta, x):
        z = jnp.concatenate([x[a:b] @ w[i] for i, (a, b) in enumerate(oracle.bounds(SIZES, M))])
        return jnp.sum(y[:33] * jnp.tanh(beta * z))

    got, want = (jax.jit(jax.grad(loss, (0, 1)))(0.7, x) for loss in (f, dense))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


def test_an_infinite_slope_at_zero_does_not_reach_the_gradients(backend, xwy):
    """sqrt has slope inf at 0, where unowned rows are: neither lhs nor weights nor bias may see a NaN."""
    x, w, _ = (np.abs(np.asarray(a)) + 0.5 for a in xwy)
    b = np.ones((G, N), np.float32)
    f = lambda x, w, b: jnp.sum(tr.grouped_matmul(x, w, SIZES, bias=b, activation=jnp.sqrt, backend=backend))
    dx, dw, db = map(np.asarray, jax.jit(jax.grad(f, (0, 1, 2)))(x, w, b))
    for g in (dx, dw, db):
        assert np.isfinite(g).all()
    assert not dx[33:].any()
    assert not db[1].any()


@pytest.mark.parametrize("backend", ["xla", marked("reference")])
@pytest.mark.parametrize("m, k, n, g", [(m, k, n, g) for m in (0, 3) for k in (0, 2) for n in (0, 2) for g in (0, 2)])
def test_zero_sized_dimensions(backend, m, k, n, g):
    x, w, sizes = np.ones((m, k), "f"), np.ones((g, k, n), "f"), np.full((g,), m // 2, np.int32)
    f = functools.partial(tr.grouped_matmul, group_sizes=sizes, backend=backend)
    np.testing.assert_array_equal(f(x, w), oracle.rows(x, w, sizes))

    def in_blocks(w):
        return tr.grouped_matmul(jnp.concatenate([x, x]), w, np.stack([sizes, sizes]), backend=backend).sum()

    @jax.jit
    def transformed(x, w):
        mapped = jax.vmap(f)(jnp.stack([x, x]), jnp.stack([w, w]))
        return *jax.grad(lambda x, w: f(x, w).sum(), (0, 1))(x, w), mapped, jax.grad(in_blocks)(w)

    dx, dw, both, of_blocks = map(np.asarray, transformed(x, w))
    np.testing.assert_array_equal(dx, oracle.rows(np.ones((m, n)), w, sizes, transpose_rhs=True))
    np.testing.assert_array_equal(dw, oracle.contraction(x, np.ones((m, n)), sizes))
    np.testing.assert_array_equal(both[1], oracle.rows(x, w, sizes))
    np.testing.assert_array_equal(of_blocks, 2 * dw)
    np.testing.assert_array_equal(tr.grouped_matmul(x, w, sizes[None], backend=backend), f(x, w))  # a single block


def test_large_group_counts(backend):
    """As many groups as rows, and many more."""
    m, g = 40, 300
    x = np.arange(m, dtype=np.float32)[:, None]
    w = np.arange(g, dtype=np.float32).reshape(g, 1, 1)
    sizes = np.zeros(g, np.int32)
    sizes[np.arange(m) * 7] = 1
    got = np.asarray(tr.grouped_matmul(x, w, sizes, backend=backend))
    np.testing.assert_array_equal(got[:, 0], np.arange(m) ** 2 * 7)


@pytest.mark.parametrize("backend", ["xla", marked("reference")])
@pytest.mark.parametrize("dtype, size", [("int8", 100), ("uint8", 200), ("int16", 30000), ("uint16", 60000)])
def test_m_past_what_the_sizes_dtype_can_hold(backend, dtype, size):
    m = 70000
    sizes = np.array([size, 7], dtype)
    x, w = np.ones((m, 1), np.float32), np.array([1.0, 2.0], np.float32).reshape(2, 1, 1)
    want = np.repeat([1.0, 2.0, 0.0], [size, 7, m - size - 7])
    for f in (tr.grouped_matmul, jax.jit(tr.grouped_matmul, static_argnames="backend")):
        np.testing.assert_array_equal(np.asarray(f(x, w, sizes, backend=backend))[:, 0], want)
    meta, _ = tr.make_group_metadata(group_sizes=sizes, m=m, tm=128, start_group=0, num_nonzero_groups=2)
    assert meta.group_offsets.tolist() == [0, size, size + 7]
    folded = jax.vmap(lambda x: tr.grouped_matmul(x, w, jnp.asarray(sizes), backend=backend))(np.stack([x, 2 * x]))
    np.testing.assert_array_equal(np.asarray(folded)[1, :, 0], 2 * want)


def test_bias_and_existing_out_keep_their_fractions_beside_integers(backend):
    x, w = np.ones((3, 2), np.int8), np.ones((1, 2, 2), np.int8)
    f = functools.partial(tr.grouped_matmul, x, w, [2], backend=backend)
    half = np.full((3, 2), 0.5, np.float32)
    np.testing.assert_array_equal(f(existing_out=half), [[2.5] * 2, [2.5] * 2, [0.5] * 2])
    b = np.full((1, 2), 0.25, jnp.bfloat16)
    np.testing.assert_array_equal(f(bias=b), [[2.25] * 2, [2.25] * 2, [0.0] * 2])
    np.testing.assert_array_equal(f(bias=b, activation=jnp.sqrt), [[1.5] * 2, [1.5] * 2, [0.0] * 2])
    np.testing.assert_array_equal(np.asarray(jax.jit(jax.vmap(lambda b: f(bias=b)))(b[None]))[0], f(bias=b))


def test_float64_existing_out_of_float32_operands(backend, x64):
    x, w = jnp.ones((2, 2), jnp.float32), jnp.ones((1, 2, 1), jnp.float32)
    e = jnp.full((2, 1), 1e-9, jnp.float64)
    got = tr.grouped_matmul(x, w, [2], jnp.float64, existing_out=e, backend=backend)
    np.testing.assert_array_equal(got, np.full((2, 1), 2 + 1e-9))


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int16", "uint8", "int32"])
def test_other_integers(backend, rng, dtype):
    x, w = (rng.integers(0, 7, shape).astype(jnp.dtype(dtype)) for shape in ((M, K), (G, K, N)))
    got = tr.grouped_matmul(x, w, SIZES, jnp.int32, backend=backend)
    wide = [a.astype(np.float64) for a in (x, w)]
    np.testing.assert_array_equal(got, oracle.rows(*wide, SIZES))


def test_x64_changes_nothing_for_narrow_operands(backend, xwy, x64):
    x, w, y = xwy
    oracle.check(tr.grouped_matmul(x, w, SIZES, backend=backend), oracle.rows(x, w, SIZES))
    oracle.check(tr.transposed_grouped_matmul(x.T, y, SIZES, backend=backend), oracle.contraction(x, y, SIZES))
    grads = jax.jit(jax.grad(lambda x, w: tr.grouped_matmul(x, w, SIZES, backend=backend).sum(), (0, 1)))(x, w)
    assert {g.dtype for g in grads} == {jnp.dtype("float32")}


def test_under_strict_promotion(backend, xwy):
    """As JAX's own tests run: no implicit broadcast of ranks, no implicit conversion of dtypes."""
    x, w, y = xwy
    b = jnp.ones((G, N), jnp.bfloat16)
    f = functools.partial(tr.grouped_matmul, backend=backend)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        loss = lambda x, w, b: f(x, w, SIZES, bias=b, activation=jax.nn.silu).sum()
        jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, w, b)  # which traces all that is asked
        jax.jit(jax.vmap(f, in_axes=(None, 0, None))).lower(x, jnp.stack([w, w]), SIZES)
        f(x.astype(jnp.bfloat16), w, SIZES, existing_out=y)
        tr.ragged_dot(x, w, SIZES)
        got = jax.jit(jax.grad(lambda y: tr.transposed_grouped_matmul(x.T, y, SIZES, backend=backend).sum()))(y)
    oracle.check(got, oracle.rows(x, np.ones((G, K, N)), SIZES))


def test_a_value_inside_the_activation_gets_no_gradient_from_unowned_rows(backend, xwy):
    """sqrt(a z) at z = 0 has an infinite slope in a: only rows that somebody owns count."""
    x, w, _ = (np.abs(np.asarray(v)) + 0.5 for v in xwy)
    loss = lambda a, x: tr.grouped_matmul(x, w, SIZES, activation=lambda z: jnp.sqrt(a * z), backend=backend).sum()
    dense = lambda a: sum(jnp.sqrt(a * (x[i:j] @ w[g])).sum() for g, (i, j) in enumerate(oracle.bounds(SIZES, M)))
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(2.0, x), jax.jit(jax.grad(dense))(2.0), rtol=1e-4)
    nothing = lambda a: tr.grouped_matmul(x, w, SIZES * 0, activation=lambda z: jnp.sqrt(a * z), backend=backend).sum()
    assert jax.jit(jax.grad(nothing))(2.0) == 0


def test_without_jit(backend, xwy):
    x, w, _ = xwy
    with jax.disable_jit():
        got = tr.grouped_matmul(x, w, SIZES, backend=backend)
    oracle.check(got, oracle.rows(x, w, SIZES))


def test_a_bias_is_added_whatever_the_precision_of_the_product(backend, xwy):
    x, w, _ = (np.round(np.asarray(v)) for v in xwy)
    b = np.full((G, N), 1 / 3, np.float32)
    f = lambda x, b: tr.grouped_matmul(x, w, SIZES, bias=b, precision="default", backend=backend)
    mapped = jax.jit(jax.vmap(f, in_axes=(0, None)))
    np.testing.assert_array_equal(np.asarray(mapped(x[None], b))[0], f(x, b))
    assert "HIGHEST" in mapped.lower(x[None], b).as_text()


@dataclasses.dataclass
class Scale:
    a: float

    def __call__(self, z):
        return z * self.a


def test_an_activation_without_a_hash(backend, xwy):
    x, w, _ = xwy
    got = tr.grouped_matmul(x, w, SIZES, activation=Scale(2.0), backend=backend)
    oracle.check(got, oracle.rows(x, w, SIZES, activation=lambda z: 2 * z))


def test_integers_meet_a_float_activation_when_the_result_is_float(backend):
    x, w = np.full((3, 2), 2, np.int8), np.ones((1, 2, 2), np.int8)
    got = tr.grouped_matmul(x, w, [2], activation=jnp.sqrt, backend=backend)
    np.testing.assert_array_equal(got, [[2.0] * 2, [2.0] * 2, [0.0] * 2])


def test_a_real_operand_beside_a_complex_one(backend, xwy):
    x, w, _ = xwy
    f = lambda x, w: tr.grouped_matmul(x, w * (1 + 2j), SIZES, jnp.complex64, backend=backend).sum().real
    dx, dw = jax.jit(jax.grad(f, (0, 1)))(x, w)
    oracle.check(dx, oracle.rows(np.ones((M, N)), w, SIZES, transpose_rhs=True))
    oracle.check(dw, oracle.contraction(x, np.ones((M, N)), SIZES))


def test_unowned_rows_of_existing_out_are_kept_bit_for_bit(backend, xwy):
    x, w, _ = map(np.asarray, xwy)
    e = np.full((M, N), -0.0, np.float32)
    e[34:] = 1e-40
    f = lambda x: tr.grouped_matmul(x, w, SIZES, existing_out=e, backend=backend)
    for out in (f(x), jax.vmap(f)(x[None])):
        kept = np.asarray(out).reshape(M, N)[33:]
        np.testing.assert_array_equal(kept.view(np.int32), e[33:].view(np.int32))
