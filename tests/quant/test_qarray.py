"""Arrays of qwix as operands of every entry point: their tiles, every order of the axes, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.lax import RaggedDotDimensionNumbers as Numbers
from oracle import close
from stand_in import QArray, meaning, qarray

import trencadis as tr
from trencadis.compat import ejkernel, megablox
from trencadis.quant import quantize
from trencadis.quant.qarray import from_qarray

pytestmark = pytest.mark.core

M, K, N, SIZES = 16, 32, 24, np.array([6, 0, 7])  # the last three rows are unowned


@pytest.fixture
def x(rng):
    return rng.normal(size=(M, K)).astype(np.float32)


@pytest.fixture
def w(rng):
    return rng.normal(size=(3, K, N)).astype(np.float32) * np.array([1, 100, 0.01], np.float32)[:, None, None]


def test_values_are_not_copied(w):
    q = qarray(w, "int8", (1, 16, 0))
    found = from_qarray("rhs", q)
    assert found.values is q.qvalue and found.scale is q.scale
    assert (found.format, found.block) == ("int8", (1, 16, N))


# the tiles of tokamax's tests, for smaller axes (None is an operand that is not quantized), then those of qwix's
TILES = [
    ("int8", None, (1, 1, 4)), ("int4", (1, 4), (1, 4, 1)), ("int8", (8, 1), (1, 16, 1)), ("int4", (4, 1), (1, 1, 8)),
    ("int8", (0, 0), (0, 0, 0)), ("float8_e5m2", (1, 0), (1, 0, 1)), ("float8_e4m3fn", (1, 16), (1, 16, 8)),
    ("float4_e2m1fn", (1, 16), (1, 16, 1)),
]  # fmt: skip


@pytest.mark.parametrize(("format", "left", "right"), TILES, ids=str)
def test_ragged_dot_is_that_of_what_the_operands_stand_for(format, left, right, x, w):
    q, r = x if left is None else qarray(x, format, left), qarray(w, format, right)
    close(jax.jit(tr.ragged_dot)(q, r, SIZES), oracle.rows(meaning(q), meaning(r), SIZES))


def transposed(a, order):
    return jax.tree.map(lambda leaf: leaf.transpose(order), a)


@pytest.mark.parametrize(("left", "order"), [((0, 1), (0, 2, 1)), ((1, 0), (1, 0, 2))])
def test_rows_with_axes_in_any_order(left, order, x, w):
    q, r = qarray(x, "int8", (1, 0)), qarray(w, "int8", (1, 0, 1))
    numbers = Numbers((([left.index(1)], [order.index(1)]), ([], [])), [left.index(0)], [order.index(0)])
    dot = jax.jit(lambda a, b: tr.ragged_dot_general(a, b, SIZES, numbers))
    close(dot(transposed(q, left), transposed(r, order)), oracle.rows(meaning(q), meaning(r), SIZES))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_sums_with_axes_in_any_order(order, x, rng):
    """Either side quantized, or both, in tiles of rows and columns; from a group on, too."""
    y = rng.normal(size=(M, N)).astype(np.float32)
    q, r = qarray(x, "int8", (1, 16)), qarray(y, "int8", (4, 8))
    numbers = Numbers((([order.index(0)], [order[::-1].index(0)]), ([], [])), [order.index(0)], [])
    dot = jax.jit(
        lambda a, b, **to: tr.ragged_dot_general(transposed(a, order), transposed(b, order[::-1]), SIZES, numbers, **to)
    )
    a, b = (q, r) if order == (0, 1) else (x, r)
    close(dot(a, b), oracle.contraction(meaning(a), meaning(b), SIZES))
    got = dot(q, y, group_offset=jnp.array(2))
    close(got[:1], oracle.contraction(meaning(q), y, SIZES, first=2))
    assert got.shape == (3, K, N) and not got[1:].any()


def test_gradients_of_what_is_not_quantized(x, w, rng):
    """By value, past NaN in unowned rows; what is quantized is a constant, scales too."""
    ct, q, r = rng.normal(size=(M, N)).astype(np.float32), qarray(x, "int8", (1, 16)), qarray(w, "int8", (1, 16, 1))
    x[13:] = np.nan
    dot = lambda a, b: (tr.ragged_dot(a, b, SIZES)[:13] * ct[:13]).sum()
    ct[13:] = 0
    dx, d_scale = jax.jit(jax.grad(lambda x, s: dot(x, QArray(r.qvalue, s)), (0, 1)))(x, r.scale)
    close(dx, oracle.rows(ct, meaning(r), SIZES, transpose_rhs=True))
    assert not d_scale.any()
    close(jax.jit(jax.grad(lambda w: dot(q, w)))(w), oracle.contraction(meaning(q), ct, SIZES))


def test_vmap_takes_arrays_of_qwix_as_it_takes_others(x, w):
    each = [qarray(x * c, "int8", (1, 0)) for c in (1, 3)]
    got = jax.jit(jax.vmap(lambda q: tr.ragged_dot(q, w, SIZES)))(
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    )
    close(got[1], oracle.rows(meaning(each[1]), w, SIZES))


def test_an_axis_without_entries(w):
    """Of either operand: what has no entries needs no scales."""
    none, dot = QArray(jnp.ones((0, K), jnp.int8), jnp.ones((1, 1))), jax.jit(tr.ragged_dot)
    assert dot(none, w, SIZES * 0).shape == (0, N)
    assert dot(quantize(np.ones((0, K), np.float32), "int8", "row"), w, SIZES * 0).shape == (0, N)
    for x, w in ((jnp.ones((2, 0)), QArray(jnp.ones((1, 0, 3), jnp.int8), jnp.ones((1, 1, 3)))),
                 (quantize(jnp.ones((2, 0)), "int8", "row"), jnp.ones((1, 0, 3)))):  # fmt: skip
        assert dot(x, w, np.array([2])).tolist() == [[0] * 3] * 2


def test_scales_say_the_dtype_of_the_result(x, w):
    x, f8 = x.astype(jnp.bfloat16), x.astype(jnp.float8_e4m3fn)
    short, full = (qarray(w, "int8", (1, 0, 1), dtype) for dtype in (jnp.bfloat16, jnp.float32))
    dtype = lambda *operands: jax.eval_shape(tr.ragged_dot, *operands, SIZES).dtype
    assert [dtype(a, short) for a in (x, f8, x.astype(jnp.float32))] == ["bfloat16", "bfloat16", "float32"]
    eight, four = (
        jax.eval_shape(lambda w, f=f, b=b: quantize(w, f, (1, b, 1)), w) for f, b in (("mxfp8", 32), ("nvfp4", 16))
    )
    assert [dtype(x, b) for b in (full, eight, four)] == ["float32", "bfloat16", "float32"]


ODD = {
    "zero point": (lambda q: QArray(q.qvalue, q.scale, q.scale), ValueError, "want a QArray without a zero_point"),
    "table": (lambda q: QArray(q.qvalue.astype(jnp.uint4), q.scale, None, "nf4"), TypeError,
              "want a QArray with values of int8, int4, .*; got uint4, of qtype nf4"),
    "rank": (lambda q: QArray(q.qvalue, q.scale[0]), ValueError, r"a number of scales along each axis that divides"),
    "uneven": (lambda q: QArray(q.qvalue, jnp.concatenate([q.scale] * 5, -2)), ValueError, r"divides it, .*; got "),
    "none": (lambda q: QArray(q.qvalue, q.scale[..., :0, :]), ValueError, r"divides it, .*; got "),
}  # fmt: skip
ENTRY_POINTS = {
    "grouped_matmul": (tr.grouped_matmul, False), "transposed": (tr.transposed_grouped_matmul, True),
    "ragged_dot": (tr.ragged_dot, False), "gmm": (megablox.gmm, False), "tgmm": (megablox.tgmm, True),
    "ejkernel": (ejkernel.grouped_matmul, False), "ejkernel transposed": (ejkernel.transposed_grouped_matmul, True),
}  # fmt: skip


@pytest.mark.parametrize("which", ODD)
@pytest.mark.parametrize("entry", ENTRY_POINTS)
def test_what_is_not_understood_is_refused_by_name(which, entry, x, w):
    (spoil, error, words), (call, sums) = ODD[which], ENTRY_POINTS[entry]
    lhs, rhs = (x.T, x) if sums else (x, w)
    with pytest.raises(error, match="rhs: .*" + words):
        call(lhs, spoil(qarray(rhs, "int8", (0,) * rhs.ndim)), SIZES)
    with pytest.raises(error, match="lhs: .*" + words):
        call(spoil(qarray(lhs, "int8", (0, 0))), rhs, SIZES)


@pytest.mark.parametrize(
    ("lhs", "rhs", "numbers", "words"),
    [
        ((2, 8, 4), (2, 3, 4, 5), Numbers((([2], [2]), ([0], [0])), [1], [1]), r"lhs: .* want 2 dimensions, .* \(2, 8"),
        ((8, 4), (3, 4, 5, 6), Numbers((([1], [1]), ([], [])), [0], [0]), r"rhs: .* want 3 dimensions, .* \(3, 4, 5"),
        ((8, 4), (8, 4, 5), Numbers((([0, 1], [0, 1]), ([], [])), [0], []), "one of them contracted"),
        ((8, 4), (8, 4), Numbers((([1], [1]), ([0], [0])), [0], []), "none a batch"),
    ],
)
def test_axes_that_scales_cannot_follow_are_refused(lhs, rhs, numbers, words):
    x, w = np.ones(lhs, np.float32), np.ones(rhs, np.float32)
    for a, b in ((x, qarray(w, "int8", (0,) * w.ndim)), (quantize(x, "int8"), w)):
        with pytest.raises(ValueError, match=words):
            tr.ragged_dot_general(a, b, jnp.array([3, 0, 5]), numbers)
