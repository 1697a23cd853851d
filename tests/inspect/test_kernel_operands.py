"""The integers that kernels are handed, computed from the caller's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trencadis.core.devices import CHIPS
from trencadis.inspect.aot import export_for
from trencadis.inspect.kernel_operands import integer_operands

from .kernels import array, copy, first_tiles

pytestmark = pytest.mark.core

X = array(512, 128)


def values(fn, *args):
    return [call.values for call in integer_operands(*export_for(CHIPS["v6e"], fn, args))]


def test_through_arithmetic_and_functions():
    inner = jax.jit(lambda s, x: first_tiles(s + 100, x))
    assert values(lambda x, s: inner(s, x), X, np.array([1, 2], np.int32)) == [{0: [2]}]


def test_beside_an_array_of_a_dtype_that_older_programs_do_not_have():
    inner = jax.jit(lambda s, x, w: first_tiles(s, x) + w.astype(jnp.float32))
    w = jax.ShapeDtypeStruct(X.shape, jnp.float4_e2m1fn)
    assert values(inner, np.array([1, 2], np.int32), X, w) == [{0: [1]}]


def test_each_call_has_its_own():
    def twice(s, x):
        one = jax.jit(first_tiles)
        return one(s, x) + one(s * 2, x)

    assert values(twice, np.array([100, 100], np.int16), X) == [{0: [2]}, {0: [4]}]


def test_what_depends_on_described_arrays_is_not_known():
    assert values(first_tiles, jax.ShapeDtypeStruct((2,), jnp.int32), X) == [{}]
    assert values(lambda x: first_tiles(jnp.argsort(x[0])[:2], x), X) == [{}]
    assert values(lambda s, x: first_tiles(s + (x[0, :2] > 0), x), np.array([1, 2], np.int32), X) == [{}]


def test_what_depends_on_a_kernels_result_is_not_known():
    def chain(s, x):
        y = first_tiles(s, x)
        return first_tiles(y[0, :2].astype(jnp.int32), x)

    assert values(chain, np.array([1, 2], np.int32), X) == [{0: [1]}, {}]


def test_values_captured_by_loops():
    def looped(s, x):
        total = jax.lax.fori_loop(0, 3, lambda i, t: t + s, jnp.zeros_like(s))
        masked = jax.lax.fori_loop(0, 3, lambda i, t: t + x[0, :2].astype(jnp.int32), jnp.zeros_like(s))
        return first_tiles(total, x) + first_tiles(masked, x)

    assert values(looped, np.array([64, 64], np.int32), X) == [{0: [3]}, {}]


def test_a_kernel_after_a_kernel():
    """What the first one yields is not known; the sizes of the second are."""
    assert values(lambda s, x: first_tiles(s * 2, first_tiles(s, x)), np.array([100, 28], np.int32), X) == [
        {0: [1]},
        {0: [2]},
    ]


def test_an_operation_that_the_host_need_not_know():
    """A ragged dot is written as one operation, which older versions of the interchange format do not have."""
    rhs = array(2, 128, 128)

    @jax.jit
    def both(s, x, rhs):
        return first_tiles(s, x), jax.lax.ragged_dot(x, rhs, s)

    assert values(lambda s, x, rhs: both(s, x, rhs), np.array([100, 100], np.int32), X, rhs) == [{0: [2]}]
    assert values(lambda s, x, rhs: jax.lax.ragged_dot(x, rhs, s), np.array([100, 100], np.int32), X, rhs) == []


def test_without_integers():
    assert values(copy, X) == [{}]


def test_trees_scalars_and_unused_arguments():
    def fn(tree, unused, count):
        return first_tiles(tree["s"] + count, tree["x"])

    assert values(fn, {"s": np.array([1, 2], np.int32), "x": X}, array(3), 64) == [{0: [2]}]
