"""Owned rows of arrays are replaced in place, block by block, and others are 0."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trencadis.core.row_blocks import BLOCK, replace_rows

pytestmark = pytest.mark.core

M = 2 * BLOCK + 88  # the last block overlaps the one before it


def test_replaces_the_rows_between_two():
    """Each once, so that a function of the old rows sees no new ones; NaN of other rows reaches nothing."""
    x, y = np.arange(2.0 * M, dtype=np.float32).reshape(M, 2), np.full(M, np.nan, np.float32)
    both = jax.jit(
        lambda low, high, x, y: replace_rows(lambda a, b, c: [2 * a + c[:, None], b + c], (low, high), [x, x[:, 0]], y)
    )
    for low, high in ((0, M), (3, 3), (5, BLOCK + 1), (BLOCK, M - 1), (M - 2, M)):
        y[:], poisoned = np.nan, np.full_like(x, np.nan)
        y[low:high], poisoned[low:high] = 1, x[low:high]
        got = both(jnp.int32(low), jnp.int32(high), poisoned, y)
        want = [np.zeros_like(x), np.zeros(M, np.float32)]
        want[0][low:high], want[1][low:high] = 2 * x[low:high] + 1, x[low:high, 0] + 1
        jax.tree.map(np.testing.assert_array_equal, got, want)
