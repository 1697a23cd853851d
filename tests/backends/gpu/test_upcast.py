"""The order in which weights of few bits are unpacked: what lanes hold, against what an instruction takes it for."""

import jax.numpy as jnp
import numpy as np
import pytest

from trencadis.backends.gpu.upcast import ordered


def _factor(weights, bits):
    """Rows of weights [n, k], as the lanes unpack their words, in the places where an instruction looks for k."""
    n, k = weights.shape
    word = 32 // bits
    words = weights.reshape(n, -1, 4, word)  # [n, run, lane, entry]: a lane loads entries that are neighbours
    halves = [(i, i + 4) for i in range(4)] if bits == 4 else [(0, 1), (2, 3)]  # entries of one shift, or conversion
    factor = np.empty((n, words.shape[1], 4 * word))
    for i, pair in enumerate(halves):
        for lane in range(4):
            for half, entry in enumerate(pair):
                factor[:, :, 8 * i + 2 * lane + half] = words[:, :, lane, entry]  # the fragment of an m64k16 factor
    return factor.reshape(n, k)


@pytest.mark.parametrize(("dtype", "bits"), [("int4", 4), ("int8", 8), ("float8_e4m3fn", 8), ("float8_e5m2", 8)])
def test_rows_meet_the_weights_they_belong_to(dtype, bits):
    rng = np.random.default_rng(0)
    x, w = rng.integers(-8, 8, (3, 192)), rng.integers(-8, 8, (5, 192))
    rows = np.asarray(ordered(jnp.asarray(x), jnp.dtype(dtype)))
    np.testing.assert_array_equal(rows @ _factor(w, bits).T, x @ w.T)
    np.testing.assert_array_equal(np.sort(rows), np.sort(x))
