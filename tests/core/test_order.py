"""Integers that wait for other arrays are the same integers, whatever these hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trencadis.core.order import after, hidden_zero

pytestmark = pytest.mark.core


@pytest.mark.parametrize("value", [0.0, -1.5, np.nan, -np.inf, 3 - 4j])
def test_nothing_changes(value):
    sizes, other = jnp.array([3, 0, 5], jnp.int32), jnp.full((2, 2), value)
    assert hidden_zero(other, nth=2) == 0
    np.testing.assert_array_equal(jax.jit(after)(sizes, other, jnp.full(3, -7)), sizes)
    np.testing.assert_array_equal(after(sizes, other[:0]), sizes)
