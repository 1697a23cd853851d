"""The order of k in a register operand of low-precision weights: what lanes hold, against what wgmma reads."""

import jax.numpy as jnp
import numpy as np
import pytest

from trencadis.backends.gpu.upcast import permute_k


def _operand_a(weights, bits):
    """Weights [n, k] as the lanes upcast their words, at the places along k where wgmma reads them."""
    n, k = weights.shape
    word = 32 // bits
    words = weights.reshape(n, -1, 4, word)  # [n, run, lane, element]: a lane loads neighbours
    pairs = (
        [(i, i + 4) for i in range(4)] if bits == 4 else [(0, 1), (2, 3)]
    )  # elements of one shift, or of one conversion
    operand = np.empty((n, words.shape[1], 4 * word))
    for i, pair in enumerate(pairs):
        for lane in range(4):
            for j, element in enumerate(pair):  # the register fragment of an m64k16 operand A
                operand[:, :, 8 * i + 2 * lane + j] = words[:, :, lane, element]
    return operand.reshape(n, k)


@pytest.mark.parametrize(("dtype", "bits"), [("int4", 4), ("int8", 8), ("float8_e4m3fn", 8), ("float8_e5m2", 8)])
def test_permuted_columns_meet_their_weights(dtype, bits):
    rng = np.random.default_rng(0)
    x, w = rng.integers(-8, 8, (3, 192)), rng.integers(-8, 8, (5, 192))
    rows = np.asarray(permute_k(jnp.asarray(x), jnp.dtype(dtype)))
    np.testing.assert_array_equal(rows @ _operand_a(w, bits).T, x @ w.T)
    np.testing.assert_array_equal(np.sort(rows), np.sort(x))
