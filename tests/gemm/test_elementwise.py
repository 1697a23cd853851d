"""Elementwise functions of grouped tensors: those of each group alone, 0 in unowned entries, and errors that name a group."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import trencadis as tr
from trencadis import GroupedTensor
from trencadis.gemm import grouped_quantize

pytestmark = pytest.mark.core

FIRST, LAST = [2, 0, 3], [1, 4, 2]
KINDS = {  # shape of the data, and the constructor
    "rows": ((7, 2), lambda x, given: GroupedTensor.ragged_rows(x, given(FIRST))),
    "columns": ((2, 9), lambda x, given: GroupedTensor.ragged_cols(x, given(LAST))),
    "stacked": ((3, 2, 2), lambda x, given: GroupedTensor.stacked(x)),
    "flat": ((11,), lambda x, given: GroupedTensor.fully_ragged(x, given(FIRST), given(LAST))),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
both = pytest.mark.parametrize("given", [list, jnp.asarray], ids=["static", "traced"])


def pair(kind, given, rng, unowned=np.nan):
    """Two tensors of the same groups, and which of their entries are owned."""
    shape, make = KINDS[kind]
    mine = np.ones(shape, bool)
    if kind != "stacked":
        end = {"rows": (slice(5, None),), "columns": (slice(None), slice(7, None)), "flat": (slice(8, None),)}[kind]
        mine[end] = False
    data = (np.where(mine, rng.normal(size=shape), unowned).astype(np.float32) for _ in range(2))
    return *(make(jnp.asarray(x), given) for x in data), mine


@both
@every_kind
def test_operators_are_those_of_the_groups(kind, given, rng):
    """With NaN in unowned entries, which become 0; sizes and static structure stay."""
    a, b, mine = pair(kind, given, rng)
    half = np.float32(0.5)
    calls = [
        *(lambda a, b, op=op: op(a, b) for op in (operator.add, operator.sub, operator.mul, operator.truediv)),
        *(lambda a, b, op=op: op(a, 2) for op in (operator.add, operator.sub, operator.mul, operator.truediv)),
        *(lambda a, b, op=op: op(half, a) for op in (operator.add, operator.sub, operator.mul, operator.truediv)),
        lambda a, b: jnp.float32(3) * a - b * jnp.float32(2),
        lambda a, b: -a,
    ]
    results = jax.jit(lambda a, b: [each(a, b) for each in calls])(a, b)
    for call, found in zip(calls, results, strict=True):
        assert jax.tree.structure(found) == jax.tree.structure(a) and found.dtype == np.float32
        np.testing.assert_allclose(found.data, np.where(mine, call(a.data, b.data), 0), 1e-6, 1e-6)
        for x, y in zip((found.first_dims, found.last_dims), (a.first_dims, a.last_dims), strict=True):
            np.testing.assert_array_equal(x, y) if y is not None else None
    np.testing.assert_array_equal((a + b).data, jnp.where(mine, a.data + b.data, 0))  # outside of jit, too


@both
@every_kind
def test_map_does_not_see_unowned_entries(kind, given, rng):
    """A slope that is infinite at 0, and NaN: neither the gradient of the data nor of a parameter gets any of it."""
    a, _, mine = pair(kind, given, rng, unowned=0.0)
    a = a.with_data(jnp.abs(a.data))
    loss = lambda data, scale: jnp.sum(a.with_data(data).map(lambda x: jnp.sqrt(x * scale) / x).data)
    (value, (slope, scaled)) = jax.jit(jax.value_and_grad(loss, (0, 1)))(a.data, 4.0)
    x = np.asarray(a.data, np.float64)[mine]
    np.testing.assert_allclose(value, np.sum(2 / np.sqrt(x)), 1e-5)
    np.testing.assert_allclose(slope[mine], -(x**-1.5), 1e-4)
    np.testing.assert_array_equal(slope[~mine], 0)
    np.testing.assert_allclose(scaled, np.sum(2 / np.sqrt(x)) / 8, 1e-5)


def test_maps_of_groups_that_are_all_empty_and_of_no_entries():
    for sizes, shape in (([0, 0], (3, 2)), ([0, 0], (0, 2))):
        x = GroupedTensor.ragged_rows(jnp.zeros(shape), sizes)
        np.testing.assert_array_equal(x.map(lambda a: 1 / a).data, jnp.zeros(shape))


def test_dtypes_promote_as_in_jax():
    x = GroupedTensor.stacked(jnp.ones((2, 2), jnp.bfloat16))
    assert (2.5 * x).dtype == jnp.bfloat16 and (x + x.map(jnp.float32)).dtype == jnp.float32
    assert x.map(lambda a: a > 0).dtype == bool


def test_gradients_with_float0_sizes_follow_the_tensor():
    """As `jax.grad(..., allow_int=True)` returns them for sizes that are an array."""
    x = GroupedTensor.ragged_rows(jnp.arange(8.0).reshape(4, 2), jnp.array([1, 2]))
    slope = jax.grad(lambda t: (t.data**2).sum(), allow_int=True)(x)
    step = x - 0.25 * slope
    np.testing.assert_array_equal(step.data, jnp.where(jnp.arange(4)[:, None] < 3, x.data / 2, 0))
    assert step.first_dims.tolist() == [1, 2] and "2 groups" in repr(slope)


def test_traced_sizes_that_differ_are_found_by_debug_checks():
    def add(s, t):
        return (GroupedTensor.ragged_rows(jnp.ones((4, 1)), s) + GroupedTensor.ragged_rows(jnp.ones((4, 1)), t)).data

    with tr.debug_checks():
        good, _ = checkify.checkify(jax.jit(add))(jnp.array([1, 2]), jnp.array([1, 2]))
        bad, _ = checkify.checkify(jax.jit(add))(jnp.array([1, 2]), jnp.array([1, 3]))
    assert good.get() is None
    assert "right.first_dims: group 1 has size 3, and 2 in left.first_dims; want the same" in bad.get()


X = GroupedTensor.ragged_rows(jnp.ones((4, 2)), [1, 3])
Q = grouped_quantize(X, "int8")


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: X + GroupedTensor.ragged_rows(X.data, [1, 2]), ValueError, "right.first_dims: group 1 has size 2, and 3 in left.first_dims; want the same"),
        (lambda: X * GroupedTensor.ragged_rows(X.data, [1, 2, 1]), ValueError, "right.first_dims: want 2 groups, as left.first_dims has; got 3"),
        (lambda: X - GroupedTensor.stacked(X.data), ValueError, "-: want tensors that are ragged in the same axes"),
        (lambda: X / GroupedTensor.ragged_rows(X.data[:, :1], [1, 3]), ValueError, r"/: want data of one shape, \(4, 2\); got \(4, 1\)"),
        (lambda: X + X.data, TypeError, r"\+: want grouped tensors of the same groups, or scalars; got GroupedTensor and ArrayImpl"),
        (lambda: X.data * X, TypeError, r"\*: want grouped tensors of the same groups, or scalars; got ArrayImpl and GroupedTensor"),
        (lambda: np.ones((4, 2)) * X, TypeError, r"\*: want grouped tensors of the same groups, or scalars; got ndarray and GroupedTensor"),
        (lambda: X + "x", TypeError, r"\+: want grouped tensors of the same groups, or scalars; got GroupedTensor and str"),
        (lambda: X + None, TypeError, r"\+: want grouped tensors of the same groups, or scalars; got GroupedTensor and NoneType"),
        (lambda: X + Q, TypeError, r"\+: want tensors that are not quantized; got GroupedTensor\(Scaled"),
        (lambda: Q.map(jnp.exp), TypeError, "map: want tensors that are not quantized"),
        (lambda: X.map(jnp.sum), ValueError, r"fn: want a result of shape \(4, 2\), as the data have; got \(\)"),
        (lambda: X.with_data(jnp.ones((3, 2))), ValueError, r"data: want shape \(4, 2\), as the tensor has; got \(3, 2\)"),
        (lambda: X.with_data("x"), TypeError, "data: want an array; got str"),
    ],
)  # fmt: skip
def test_errors_say_what_is_wanted(make, error, words):
    with pytest.raises(error, match=words):
        make()
