"""NaNs of float8_e4m3fn are found in every byte of a tile."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from trencadis.backends.tpu.nans import nan_marks

pytestmark = pytest.mark.core


@pytest.mark.parametrize("as_row", [False, True])
@pytest.mark.parametrize("contracted", [0, 1])
def test_every_nan_is_marked_and_nothing_else(contracted, as_row):
    """All 256 bytes, each in a row or column of its own, among the largest and the smallest numbers."""
    tile = np.tile(np.array([0x7E, 0xFE, 0x80, 0x00, 0x01, 0x81, 0x78, 0x08], np.uint8), (256, 16))
    tile[np.arange(256), np.random.default_rng(0).integers(0, 128, 256)] = np.arange(256)
    tile = (tile if contracted else tile.T).view(jnp.float8_e4m3fn)
    out = jax.ShapeDtypeStruct((1, 256) if as_row else (256, 1), jnp.float32)

    def body(x, y):
        y[...] = nan_marks(x[...], contracted, as_row)

    got = np.asarray(pl.pallas_call(body, out_shape=out, interpret=True)(tile)).ravel()
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(got)), [0x7F, 0xFF])
    assert not got[~np.isnan(got)].any()
