"""In which dtypes tiles are multiplied, and what an MXU that knows no NaN would lose."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from poisoned import rows_problem

import trencadis as tr
from trencadis.backends.tpu.nans import marks
from trencadis.backends.tpu.products import kinds
from trencadis.core.devices import CHIPS

pytestmark = pytest.mark.core

E4 = jnp.float8_e4m3fn


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("summed", [0, 1])
def test_every_nan_is_marked_and_nothing_else(summed, turned):
    """All 256 bytes, each in a row or column of its own, among the largest and the smallest numbers."""
    tile = np.tile(np.array([0x7E, 0xFE, 0x80, 0x00, 0x01, 0x81, 0x78, 0x08], np.uint8), (256, 16))
    tile[np.arange(256), np.random.default_rng(0).integers(0, 128, 256)] = np.arange(256)
    tile = (tile if summed else tile.T).view(E4)
    out = jax.ShapeDtypeStruct((1, 256) if turned else (256, 1), jnp.float32)

    def body(x, y):
        y[...] = marks(x[...], summed, turned)

    got = np.asarray(pl.pallas_call(body, out_shape=out, interpret=True)(tile)).ravel()
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(got)), [0x7F, 0xFF])
    assert not got[~np.isnan(got)].any()


@pytest.mark.parametrize(
    ("operands", "chip", "want"),
    [
        ("bf16 bf16", "v4", "bf16 bf16"),
        ("f32 bf16", "v6e", "f32 f32"),
        ("s8 s8", "v6e", "s8 s8"),
        ("s8 s8", "v7x", "bf16 bf16"),
        ("s8 s4", "v6e", "s8 s8"),
        ("bf16 s4", "v6e", "bf16 bf16"),
        ("e4 e4", "v4", "bf16 bf16"),
        ("e4 e5", "v7x", "e4 e5"),
        ("bf16 e4", "v5e", "bf16 e4"),
        ("bf16 s8", "v5e", "bf16 bf16"),
        ("s8 e4", "v7x", "bf16 bf16"),
        ("f32 e4", "v7x", "f32 f32"),
    ],
)
def test_operands_are_multiplied_as_stored_where_the_chip_can(operands, chip, want):
    problem, wanted = (rows_problem(64, 128, 128, 2, f"{names} f32") for names in (operands, want))
    assert kinds(problem, CHIPS[chip]) == (wanted.lhs, wanted.rhs)


def test_why_tells_how_bytes_are_multiplied():
    x, w = jax.ShapeDtypeStruct((64, 128), jnp.int8), jax.ShapeDtypeStruct((2, 128, 128), jnp.int8)
    why = functools.partial(tr.why, x, w, jax.ShapeDtypeStruct((2,), jnp.int32))
    assert "a v6e multiplies int8 as stored" in str(why(target="v6e"))
    assert "the kernel makes int8 bfloat16 in VMEM; a v7x multiplies that" in str(why(target="v7x"))
