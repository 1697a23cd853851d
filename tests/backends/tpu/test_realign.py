"""Rows that are moved to the top of a tile as they are loaded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from trencadis.backends.tpu.realign import load_rows

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("dtype", "size", "leads"),
    [
        ("int8", 64, range(0, 32, 4)),
        ("float8_e4m3fn", 48, (4, 28)),
        ("bfloat16", 48, (0, 16)),
        ("float32", 40, (8, 24)),
    ],
)
def test_rows_are_those_of_a_slice(dtype, size, leads):
    buffer = np.random.default_rng(0).integers(-8, 8, (160, 256)).astype(jnp.dtype(dtype))

    def body(lead, x, y):
        y[...] = load_rows(x, 32, size, lead[0])

    call = jax.jit(
        pl.pallas_call(
            body,
            out_shape=jax.ShapeDtypeStruct((size, 256), dtype),
            in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pltpu.VMEM)],
            interpret=True,
        )
    )
    for lead in leads:
        got = np.asarray(call(np.array([lead], np.int32), buffer))
        np.testing.assert_array_equal(got.astype(np.float32), buffer[32 + lead :][:size].astype(np.float32))
