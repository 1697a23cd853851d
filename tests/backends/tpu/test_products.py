"""The dtypes in which tiles are multiplied."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from poisoned import rows_problem

import trencadis as tr
from trencadis.backends.tpu.choose import choose, padded
from trencadis.backends.tpu.products import mxu_dtypes
from trencadis.core.devices import CHIPS
from trencadis.core.epilogue import Epilogue
from trencadis.quant import quantize

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
        ("e4 e5", "v6e", "bf16 e5"),  # no faster as float8, of which an MXU takes 32 rows at a time
        ("bf16 e4", "v5e", "bf16 b11"),
        ("e4 bf16", "v6e", "bf16 bf16"),
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


@pytest.mark.parametrize(
    ("m", "out", "change", "parts"),
    [
        (8192, "bf16", {}, 1),  # a pass for each 32 of k would be eight times the products
        (8192, "f32", {}, 2),  # would show that weights were rounded
        (256, "f32", {}, 0),  # few rows: it takes longer to multiply weights by their scales than to multiply sums
        (8192, "bf16", {"precision": "high"}, 2),
        (8192, "bf16", {"precision": "highest"}, 0),
        (8192, "f32", {"precision": "BF16_BF16_F32"}, 1),
        (8192, "bf16", {"precision": "BF16_BF16_F32_X6"}, 0),
        (8192, "bf16", {"transpose_rhs": True}, 0),
    ],
)
def test_scales_along_k_are_applied_in_the_fastest_way_that_the_precision_allows(m, out, change, parts):
    scales = Epilogue(by_column=True, column_block=(32, 1), column_scales=np.dtype("float32"))
    problem = rows_problem(m, 2048, 1024, 32, f"bf16 s4 {out}", epilogue=scales, **change)
    assert choose(padded(problem), CHIPS["v6e"]).weight_parts == parts


def test_why_tells_how_scales_along_k_are_applied():
    w = jax.eval_shape(lambda: quantize(jnp.zeros((2, 2048, 512)), "int4", (1, 32, 1), contracting=-1))
    x, sizes = jax.ShapeDtypeStruct((4096, 2048), jnp.bfloat16), jax.ShapeDtypeStruct((2,), jnp.int32)
    why = functools.partial(tr.why, x, w, sizes, target="v6e")
    assert "multiplies weights by their scales per 32 of k, rounded to bfloat16" in str(why(jnp.bfloat16))
    assert "multiplies weights by their scales per 32 of k, to 16 bits, in two passes" in str(why())
    assert "the sums of each 32 of k are multiplied by their scales" in str(why(precision="highest"))
