"""Sums are kept wide enough."""

import jax.numpy as jnp
import pytest

from trencadis.core.dtypes import accumulator

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    "lhs, rhs, acc",
    [
        ("bfloat16", "bfloat16", "float32"), ("float16", "float32", "float32"), ("float64", "float32", "float64"),
        ("int8", "int8", "int32"), ("int8", "uint8", "int32"), ("uint8", "uint8", "uint32"), ("int64", "int8", "int64"),
        ("int8", "bfloat16", "float32"), ("float8_e4m3fn", "float8_e5m2", "float32"), ("int4", "int8", "int32"),
        ("complex64", "float32", "complex64"), ("complex128", "float32", "complex128"), ("int64", "float32", "float32"),
        ("float64", "complex64", "complex128"),
    ],
)  # fmt: skip
def test_accumulator(lhs, rhs, acc):
    assert accumulator(lhs, rhs) == accumulator(rhs, lhs) == jnp.dtype(acc)
