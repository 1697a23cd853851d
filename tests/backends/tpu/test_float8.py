"""float8_e4m3fn as the float8 format that chips before v7x know."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from trencadis.backends.tpu.float8 import B11, B11_SHIFT, as_b11

pytestmark = pytest.mark.core


def test_every_byte_is_the_same_number_but_for_the_exponent():
    """-0 becomes 0, since its bits are those of NaN in the other format; NaN stays NaN."""
    bits = np.arange(256, dtype=np.uint8).repeat(16).reshape(32, 128)

    def body(x, y):
        y[...] = as_b11(x[...])

    out = jax.ShapeDtypeStruct(bits.shape, B11)
    got = np.asarray(pl.pallas_call(body, out_shape=out, interpret=True)(bits.view(jnp.float8_e4m3fn)))
    np.testing.assert_array_equal(
        got.astype(np.float32) * 2.0**B11_SHIFT, bits.view(jnp.float8_e4m3fn).astype(np.float32)
    )
    assert not np.signbit(got.astype(np.float32)[bits == 0x80]).any()
