"""The dtypes in which tiles are multiplied."""

import functools

import jax
import jax.numpy as jnp
import pytest
from poisoned import rows_problem

import trencadis as tr
from trencadis.backends.tpu.products import mxu_dtypes
from trencadis.core.devices import CHIPS

pytestmark = pytest.mark.core


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
    assert mxu_dtypes(problem, CHIPS[chip]) == (wanted.lhs, wanted.rhs)


def test_why_tells_how_8_bit_operands_are_multiplied():
    x, w = jax.ShapeDtypeStruct((64, 128), jnp.int8), jax.ShapeDtypeStruct((2, 128, 128), jnp.int8)
    why = functools.partial(tr.why, x, w, jax.ShapeDtypeStruct((2,), jnp.int32))
    assert "a v6e multiplies int8 as stored" in str(why(target="v6e"))
    assert "the kernel converts int8 to bfloat16 in VMEM, which a v7x multiplies" in str(why(target="v7x"))
