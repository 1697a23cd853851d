"""Transformations of the public operations over interpreted kernels give the values of the reference backend."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from grouped_cases import check_both_forms
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

import trencadis as tr
from trencadis.quant import quantize

pytestmark = pytest.mark.core

M, K, N, G = 24, 12, 20, 3
SIZES = np.array([7, 0, 12], np.int32)  # the last five rows are unowned


@pytest.fixture(autouse=True)
def clean():
    yield
    pltpu.reset_tpu_interpret_mode_state()


def rows(x, w, sizes=SIZES, **options):
    return tr.grouped_matmul(x, w, sizes, **options)


def summed(x, y, sizes=SIZES, **options):
    return tr.transposed_grouped_matmul(x, y, sizes, transpose_lhs=True, **options)


@pytest.fixture
def xwy(rng):
    return tuple(rng.normal(size=s).astype(np.float32) for s in ((M, K), (G, K, N), (M, N)))


def check_against_reference(transform, *args):
    """The kernels and the reference backend agree on `transform(options)`, a function of the arguments.

    Without jit, a kernel is compiled once for all tests that call it.
    """
    got = transform(dict(backend="tpu", interpret=True))(*args)
    want = jax.jit(transform(dict(backend="reference")))(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        oracle.check(a, oracle.wide(b))


def test_gradient(xwy):
    x, w, c = xwy
    x[sum(SIZES) :] = c[sum(SIZES) :] = np.nan
    out, back = jax.vjp(lambda x, w: rows(x, w, backend="tpu", interpret=True), x, w)
    dx, dw = back(c)
    oracle.check(out, oracle.rows(x, w, SIZES))
    oracle.check(dx, oracle.rows(c, w, SIZES, transpose_rhs=True))
    oracle.check(dw, oracle.contraction(x, c, SIZES))


@pytest.mark.sweep
def test_quantized_operands(xwy):
    """Unowned rows are 0 although their scales are NaN."""
    x, w, y = xwy
    mine, how = np.arange(M)[:, None] < sum(SIZES), dict(backend="tpu", interpret=True)
    q, p = quantize(np.where(mine, x, np.nan), "int8", "row"), quantize(w, "int8", "column")
    oracle.check(rows(q, p, **how), oracle.rows(np.where(mine, q.dequantize(), 0), p.dequantize(), SIZES))
    q, p = quantize(x, "float8_e4m3fn", "column"), quantize(y, "float8_e5m2")
    oracle.check(summed(q, p, **how), oracle.contraction(q.dequantize(), p.dequantize(), SIZES))


@pytest.mark.sweep
def test_forward_mode(xwy):
    x, _, y = xwy
    check_against_reference(
        lambda how: lambda x, y, dx: jax.jvp(lambda x: summed(x, y, **how), (x,), (dx,)), x, y, x[::-1]
    )


def test_second_order(xwy):
    """The derivative, along a direction, of a gradient that depends on every operand."""
    x, w, _ = xwy

    def transform(how):
        loss = lambda x, w: jnp.sum(jnp.sin(rows(x, w, **how)))
        return lambda x, w: jax.jvp(jax.grad(loss), (x, w), (x[::-1], w[::-1]))[1]

    check_against_reference(transform, x, w)


@pytest.mark.sweep
def test_bias_activation_and_existing_out(xwy):
    x, w, y = xwy

    def transform(how):
        def f(x, w, b, y):
            return rows(x, w, bias=b, activation=jax.nn.silu, **how) + rows(x, w, existing_out=y, **how)

        return f

    check_against_reference(transform, x, w, w[:, 0], y)


@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, 0)])
def test_vmap(axes, xwy):
    """Batch entries with weights of their own, and with shared weights."""
    given = (*xwy[:2], SIZES)
    stacked = [np.stack([a, a[::-1]]) if axis == 0 else a for a, axis in zip(given, axes, strict=True)]
    check_against_reference(lambda how: jax.vmap(functools.partial(rows, **how), in_axes=axes), *stacked)


@pytest.mark.sweep
def test_shard_map(xwy):
    """Experts over two devices, with check_vma on: each has a window, and the sum over devices is the whole result."""
    x, w, _ = xwy
    w, sizes = np.concatenate([w, w[:1]]), np.array([7, 0, 12, 2], np.int32)
    mesh = jax.make_mesh((2,), ("e",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])

    def transform(how):
        @jax.jit
        @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("e")), out_specs=P())
        def f(x, w):
            return jax.lax.psum(rows(x, w, sizes, group_offset=2 * jax.lax.axis_index("e"), **how), "e")

        return f

    check_against_reference(transform, x, w)


@pytest.mark.sweep
def test_64_bits(x64, rng):
    """With x64 on, scalars of the kernel stay int32, and int64 group sizes are clamped."""
    x, w = rng.normal(size=(M, K)).astype(np.float32), rng.normal(size=(G, K, N)).astype(np.float32)
    f = jax.jit(functools.partial(rows, backend="tpu", interpret=True))
    for sizes in (SIZES, [7, -(2**40), 2**40]):
        out = f(x, w, jnp.asarray(sizes, jnp.int64))
        assert out.dtype == jnp.float32
        oracle.check(out, oracle.rows(x, w, sizes))


def test_grouped_gemm(xwy):
    """Both forms through `grouped_gemm`, with gradients."""
    x, w, y = xwy
    x[sum(SIZES) :] = y[sum(SIZES) :] = np.nan
    check_both_forms(x, w, y, SIZES, backend="tpu", interpret=True)


@pytest.mark.parametrize("flip", [False, True])
def test_weights_are_read_in_the_order_in_which_tpus_store_them(rng, flip):
    """The axis of whole lanes is last there: weights, and results of their shape, are transposed for nothing."""
    k, n = (20, 128) if flip else (128, 20)
    x, w, c = (rng.normal(size=shape).astype(np.float32) for shape in ((M, k), (G, k, n), (M, n)))
    x[sum(SIZES) :] = c[sum(SIZES) :] = np.nan

    def call(x, w):
        return rows(x, w.mT if flip else w, backend="tpu", interpret=True, transpose_rhs=flip)

    out, back = jax.vjp(call, x, w)
    dx, dw = back(c)
    oracle.check(out, oracle.rows(x, w, SIZES))
    oracle.check(dx, oracle.rows(c, w, SIZES, transpose_rhs=True))
    oracle.check(dw, oracle.contraction(x, c, SIZES))
