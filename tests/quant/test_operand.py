"""The dtype of a product for which the caller names none: that of `jax.lax.dot`, as in `ragged_dot`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trencadis as tr

pytestmark = pytest.mark.core

M, K, N = 11, 32, 5
SIZES = np.array([4, 0, 6], np.int32)
SPANS = [slice(0, 4), slice(4, 4), slice(4, 10)]


@pytest.mark.parametrize(
    ("lhs", "rhs", "want"),
    [
        ("bfloat16", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "float32"),
        ("int8", "int8", "int8"),  # whose sums wrap, as those of lax
        ("int8", "bfloat16", "bfloat16"),
    ],
)
def test_none_is_the_dtype_of_lax_dot(rng, lhs, rhs, want):
    """The values are those of sums in int32 or float32, which are exact here, rounded once."""
    x = jnp.asarray(rng.integers(-99, 99, (M, K)), lhs)
    w, y = (jnp.asarray(rng.integers(-99, 99, shape), rhs) for shape in ((len(SIZES), K, N), (M, N)))
    out, summed = tr.grouped_matmul(x, w, SIZES, None), tr.transposed_grouped_matmul(x.T, y, SIZES, None)
    assert out.dtype == summed.dtype == jax.lax.dot(x, w[0]).dtype == jnp.dtype(want)
    acc = jnp.int32 if want == "int8" else jnp.float32
    for i, span in enumerate(SPANS):
        rows = jax.lax.dot(x[span], w[i], preferred_element_type=acc)
        products = jax.lax.dot(x[span].T, y[span], preferred_element_type=acc)
        np.testing.assert_array_equal(out[span], rows.astype(want))
        np.testing.assert_array_equal(summed[i], products.astype(want))


@pytest.mark.parametrize(("format", "want"), [("int8", "float32"), ("mxfp8", "bfloat16")])
def test_none_counts_the_scales_of_a_quantized_operand(rng, format, want):
    x = jnp.asarray(rng.normal(size=(M, K)), jnp.bfloat16)
    w = tr.quant.quantize(rng.normal(size=(len(SIZES), K, N)).astype(np.float32), format)
    got = tr.grouped_matmul(x, w, SIZES, None)
    assert got.dtype == jnp.dtype(want)
    np.testing.assert_array_equal(got, tr.ragged_dot(x, w, SIZES))
