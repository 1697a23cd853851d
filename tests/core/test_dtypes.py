"""Sums are kept wide enough, and every dtype that JAX has gives the numbers of float64 on every backend."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from sweep import marked

import trencadis as tr
from trencadis.core.dtypes import accumulator, bits

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


# dtypes that no other test multiplies
FLOATS = [
    "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
    "float4_e2m1fn",
]  # fmt: skip
INTEGERS = ["int2", "uint2", "uint4", "uint16", "uint32"]


def numbers(dtype, shape, rng):
    """Numbers that the dtype holds exactly, as are all sums of their products in float32; signed where it is."""
    if dtype in INTEGERS:
        bound = jnp.iinfo(dtype)
        drawn = rng.integers(max(int(bound.min), -9), min(int(bound.max), 9) + 1, shape)
    else:
        drawn = rng.choice([0.5, 1.0, 2.0] if dtype == "float8_e8m0fnu" else [-2.0, -0.5, 0.0, 1.0, 1.5], shape)
    return jnp.asarray(drawn).astype(dtype)


@pytest.mark.parametrize("backend", ["xla", marked("reference")])
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_every_dtype_equals_float64_in_both_forms(backend, dtype, rng):
    """Masks are exact for dtypes that have no 0 (float8_e8m0fnu), and for dtypes of which a byte holds several."""
    sizes, out = np.array([2, 0, 3]), jnp.int32 if dtype in INTEGERS else jnp.float32
    x, w, y = (numbers(dtype, shape, rng) for shape in ((6, 5), (3, 5, 3), (6, 3)))
    rows = tr.grouped_matmul(x, w, sizes, out, backend=backend)
    np.testing.assert_array_equal(oracle.wide(rows), oracle.rows(x, w, sizes))
    sums = tr.transposed_grouped_matmul(x, y, sizes, out, transpose_lhs=True, backend=backend)
    np.testing.assert_array_equal(oracle.wide(sums), oracle.contraction(x, y, sizes))


@pytest.mark.parametrize("dtype", ["float8_e8m0fnu", "float4_e2m1fn", "int2", "uint4"])
def test_a_ragged_batch_of_every_dtype(dtype, rng):
    """The third mode of `ragged_dot_general` masks and multiplies these dtypes too."""
    dims = jax.lax.RaggedDotDimensionNumbers((([2], [1]), ([0], [0])), [0], [])
    a, b = numbers(dtype, (4, 2, 3), rng), numbers(dtype, (4, 3, 2), rng)
    want = np.matmul(oracle.wide(a), oracle.wide(b))
    want[3:] = 0
    got = tr.ragged_dot_general(a, b, np.array([1, 2]), dims, preferred_element_type=jnp.float32)
    np.testing.assert_array_equal(oracle.wide(got), want)


def test_a_dtype_without_zero_is_no_result():
    with pytest.raises(TypeError, match=r"preferred_element_type: want a dtype that has 0 .*; got float8_e8m0fnu"):
        tr.grouped_matmul(jnp.ones((4, 2)), jnp.ones((1, 2, 2)), [3], jnp.float8_e8m0fnu)


def test_bits():
    """Bits of a number where several share a byte, and of all others."""
    found = {"int2": 2, "uint4": 4, "float4_e2m1fn": 4, "float8_e5m2": 8, "bfloat16": 16, "float64": 64}
    assert {name: bits(name) for name in found} == found
