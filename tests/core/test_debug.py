"""debug_checks: sizes that are silently clamped become errors that name the group; and jax_debug_nans."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import trencadis as tr
from trencadis import GroupedTensor
from trencadis.compat import megablox

pytestmark = pytest.mark.core

X, W, Y = (jnp.asarray(np.ones(shape, np.float32)) for shape in ((8, 4), (3, 4, 2), (8, 2)))


def gmm(sizes, first=0):
    return tr.grouped_matmul(X, W[:2], sizes, group_offset=first)


def tgmm(sizes, first=0):
    return tr.transposed_grouped_matmul(X.T, Y, sizes, group_offset=first, num_actual_groups=2)


@pytest.mark.parametrize("f", [gmm, tgmm])
@pytest.mark.parametrize(
    "sizes, first, words",
    [
        ([3, -2, 5], 0, "group_sizes: group 1 has size -2"),
        ([3, 4, 5], 0, "group_sizes: group 2 ends past m = 8 rows"),
        ([2**31 - 1, 2**31 - 1, 0], 0, "group_sizes: group 0 ends past m = 8 rows"),
        ([3, 0, 5], 2, "group_offset: a window of 2 groups from group 2 on leaves the 3 groups"),
        ([3, 0, 5], -1, "from group -1 on"),
        ([3, 0, 5], 1, None),
    ],
)
def test_errors_name_the_group(f, sizes, first, words):
    checked = checkify.checkify(jax.jit(f))
    with tr.debug_checks():
        error, _ = checked(jnp.array(sizes), first)
    assert (error.get() is None) if words is None else (words in error.get())


def test_off_by_default_and_seen_by_jit():
    f = jax.jit(gmm)
    f(jnp.array([3, -2, 5]))  # clamped
    with tr.debug_checks():
        error, _ = checkify.checkify(f)(jnp.array([3, -2, 5]))
    assert "group 1" in error.get()
    f(jnp.array([3, -2, 5]))


def test_under_vmap_and_grad():
    loss = lambda w, s: jnp.sum(tr.grouped_matmul(X, w, s) ** 2)
    f = checkify.checkify(jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0))))
    with tr.debug_checks():
        good, _ = f(W, jnp.array([[3, 0, 5], [1, 1, 1]]))
        bad, _ = f(W, jnp.array([[3, 0, 5], [1, 1, 9]]))
    assert good.get() is None
    assert "group 2 ends past m = 8" in bad.get()


INNER = jax.lax.RaggedDotDimensionNumbers((([2], [1]), ([], [])), [0], [0])
BATCH = jax.lax.RaggedDotDimensionNumbers((([2], [1]), ([0], [0])), [0], [])
OTHERS = [
    jax.jit(lambda s: tr.ragged_dot_general(jnp.ones((4, 2, 3)), jnp.ones((2, 3, 5)), s, INNER)),
    jax.jit(lambda s: tr.ragged_dot_general(jnp.ones((4, 2, 3)), jnp.ones((4, 3, 5)), s, BATCH)),
    jax.jit(lambda s: tr.make_group_metadata(group_sizes=s, m=4, tm=2, start_group=0, num_nonzero_groups=2)),
]


@pytest.mark.parametrize("sizes, words", [([-1, 2], "group 0 has size -1"), ([0, 9], "group 1 ends past m = 4")])
def test_the_other_entry_points_check_too(sizes, words):
    for call in OTHERS:
        with tr.debug_checks():
            error, _ = checkify.checkify(call)(jnp.array(sizes))
        assert words in error.get()


FLAT = jnp.asarray(np.ones(12, np.float32))


def rows(data, sizes):
    return GroupedTensor(data, sizes, None, data.shape)


def flat(data, first, last):
    return GroupedTensor(data, first, last, data.shape)


def by_rows(s, t):
    return tr.grouped_gemm(rows(X, s), GroupedTensor.stacked(W), contracting_dims=((1,), (1,)), out=rows(Y, t))


def by_columns(s, t):
    lhs, rhs = GroupedTensor.stacked(W), GroupedTensor(X.T, None, s, X.T.shape)
    return tr.grouped_gemm(lhs, rhs, contracting_dims=((1,), (0,)), out=GroupedTensor(Y.T, None, t, Y.T.shape))


def summed(s, t):
    return tr.grouped_gemm(rows(X, s), rows(Y, t), contracting_dims=((0,), (0,)))


def scores(s, t):
    return tr.grouped_gemm(rows(X, s), rows(X, t), contracting_dims=((1,), (1,)), out=flat(FLAT, s, t))


def all_ragged(s, t):
    lhs, rhs = flat(FLAT, s, t), flat(FLAT, t, s)
    return tr.grouped_gemm(lhs, rhs, contracting_dims=((1,), (0,)), out=flat(FLAT, s, s))


def two_ragged(s, t):
    return tr.grouped_gemm(flat(FLAT, s, s), rows(Y, t), contracting_dims=((1,), (0,)), out=rows(Y, s))


@functools.cache
def checked(f):
    """One program for all sizes."""
    return checkify.checkify(jax.jit(lambda s, t: jax.tree.leaves(f(s, t))))


@pytest.mark.parametrize(
    "f, s, t, words",
    [
        (by_rows, [3, 0, 5], [3, 0, 5], None),
        (by_rows, [3, -2, 5], [3, 0, 5], "lhs.first_dims: group 1 has size -2; sizes must be >= 0"),
        (by_rows, [3, 0, 6], [3, 0, 5], "lhs.first_dims: group 2 ends past the 8 rows of lhs"),
        (by_rows, [3, 0, 5], [3, 5, 0], "out.first_dims: group 1 has size 5, and 0 in the result; want the same"),
        (by_columns, [3, 0, 5], [3, 0, 5], None),
        (by_columns, [2**31 - 1, 2**31 - 1, 5], [3, 0, 5], "rhs.last_dims: group 0 ends past the 8 columns of rhs"),
        (by_columns, [3, 0, 5], [3, 0, 4], "out.last_dims: group 2 has size 4, and 5 in the result"),
        (summed, [3, 0, 5], [3, 0, 5], None),
        (summed, [3, 0, 5], [3, 5, 0], "lhs.first_dims: group 1 has size 0, and 5 in rhs.first_dims; want the same"),
        (scores, [3, 0, 1], [3, 3, 2], None),
        (scores, [3, 0, 1], [3, 5, -1], "rhs.first_dims: group 2 has size -1"),
        (scores, [3, 1, 2], [3, 1, 2], "out: group 2 ends past the 12 entries of out"),
        (all_ragged, [2, 1, 0], [4, 1, 9], None),
        (all_ragged, [2, 1, 1], [4, 1, 4], "lhs: group 2 ends past the 12 entries of lhs"),
        (all_ragged, [2**16, 1, 1], [2**16, 1, 4], "lhs: group 0 ends past the 12 entries of lhs"),
        (all_ragged, [2, -1, 1], [4, 1, 1], "lhs.first_dims: group 1 has size -1"),
        (two_ragged, [2, 0, 2], [2, 1, 2], "lhs.last_dims: group 1 has size 0, and 1 in rhs.first_dims"),
    ],
)
def test_the_general_form(f, s, t, words):
    """S3-08: sizes of each tensor, room in flat buffers, and sizes that two tensors must share, checked at run time."""
    with tr.debug_checks():
        error, _ = checked(f)(jnp.array(s), jnp.array(t))
    assert (error.get() is None) if words is None else (words in error.get())


def test_the_general_form_under_vmap_and_grad():
    loss = lambda x, s: jnp.sum(tr.grouped_gemm(
        rows(x, s), rows(X, s), contracting_dims=((1,), (1,)), out=flat(jnp.zeros(40), s, s)).data ** 2)  # fmt: skip
    f = checkify.checkify(jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0))))
    with tr.debug_checks():
        good, _ = f(X, jnp.array([[3, 0, 5], [1, 1, 1]]))
        bad, _ = f(X, jnp.array([[3, 0, 5], [1, 7, 0]]))
    assert good.get() is None
    assert "out: group 1 ends past the 40 entries of out" in bad.get()


def test_a_dense_layer_calls_its_sizes_by_their_name():
    with tr.debug_checks():
        error, _ = checkify.checkify(jax.jit(lambda s: tr.grouped_dense(X, W, s)))(jnp.array([3, 6, 0]))
    assert "group_sizes: group 1 ends past the 8 rows of x" in error.get()


def test_sizes_of_64_bits_are_seen_as_they_are(x64):
    """A constructor that clamps sizes keeps their sign."""
    f = lambda s: tr.grouped_gemm(
        GroupedTensor.ragged_rows(X, s), GroupedTensor.stacked(W), contracting_dims=((1,), (1,))
    )
    with tr.debug_checks():
        error, _ = checkify.checkify(jax.jit(lambda s: f(s).data))(jnp.array([3, -(2**40), 5]))
    assert "lhs.first_dims: group 1 has size -2147483648" in error.get()


# ---------------------------------------------------------------------------------------------------------------------
# jax_debug_nans looks at the result of every eager operation

SIZES = np.array([3, 0, 3])  # the last two rows are unowned
SPOILT = jnp.asarray(np.where(np.arange(8)[:, None] < 6, X, np.float32("nan")))


@pytest.mark.parametrize("call", [
    lambda x, w: tr.grouped_matmul(x, w, SIZES),
    lambda x, w: tr.grouped_matmul(x, w, SIZES, backend="reference"),
    lambda x, w: tr.grouped_matmul(x, w, SIZES, bias=jnp.ones((3, 2)), activation=jax.nn.silu),
    lambda x, w: tr.transposed_grouped_matmul(x, Y, SIZES, transpose_lhs=True) * w,
    lambda x, w: tr.ragged_dot(x, w, SIZES),
    lambda x, w: tr.grouped_gemm(rows(x, SIZES), GroupedTensor.stacked(w), contracting_dims=((1,), (1,))).data,
    lambda x, w: megablox.gmm(x, w, SIZES, existing_out=Y),
])  # fmt: skip
def test_nan_in_unowned_rows_is_in_no_result(call):
    """Neither the values nor the gradients, computed eagerly, raise; and they are those of unowned rows without NaN."""
    both = jax.value_and_grad(lambda x, w: jnp.sum(call(x, w) ** 2), (0, 1))
    want = both(X, W)
    with jax.debug_nans(True):
        got = both(SPOILT, W)
    jax.tree.map(np.testing.assert_array_equal, got, want)
