"""Sizes of groups: what is known in numpy is what the traced program computes, and static sizes are hashable."""

import copy
import pickle

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from trencadis.gemm.sizes import StaticSizes, checked_sizes, flat_places, starts_and_sizes

pytestmark = pytest.mark.core

sizes = st.lists(st.integers(0, 5), min_size=4, max_size=4)
traced_places = jax.jit(lambda rows, columns: flat_places(rows, columns, 100))
traced_starts = jax.jit(lambda sizes: starts_and_sizes(sizes, 20))


@hypothesis.given(rows=sizes, columns=sizes)
def test_known_places_are_the_traced_ones(rows, columns):
    rows, columns = np.asarray(rows, np.int32), np.asarray(columns, np.int32)
    for known, traced in (
        (flat_places(rows, columns, 100), traced_places(rows, columns)),
        (starts_and_sizes(rows, 20), traced_starts(rows)),
    ):
        for x, y in zip(known, traced, strict=True):
            assert isinstance(x, np.ndarray)
            np.testing.assert_array_equal(x, y, strict=True)


def test_flat_buffers_that_are_too_small_end_the_last_matrix():
    """Known sizes are checked elsewhere; here they are clamped as traced ones are."""
    rows, columns = np.array([30, 30], np.int32), np.array([3, 3], np.int32)
    starts, inside = flat_places(rows, columns, 100)
    assert starts.tolist() == [0, 90] and inside.tolist() == [30, 3]


def test_python_ints_are_static_and_arrays_are_not():
    for given in ([2, 0, 3], (2, 0, 3), [np.int64(2), 0, 3]):
        found = checked_sizes("sizes", given, 5, "rows")
        assert isinstance(found, StaticSizes) and found.key == (2, 0, 3) and found.dtype == np.int32
        assert not found.flags.writeable
        assert checked_sizes("sizes", found, 5, "rows") is found
    for given in (np.array([2, 0, 3]), jnp.array([2, 0, 3]), [jnp.int32(2), 0, 3]):
        found = checked_sizes("sizes", given, 5, "rows")
        assert not isinstance(found, StaticSizes) and found.dtype == np.int32


def test_static_sizes_can_be_copied_and_computed_with():
    found = StaticSizes([2, 0, 3])
    for each in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert isinstance(each, StaticSizes) and each.key == found.key
    np.testing.assert_array_equal(jax.jit(lambda s: s + found)(found), [4, 0, 6])
