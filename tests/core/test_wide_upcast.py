"""8-bit numbers as bfloat16 numbers, four at a time: every byte, every scale, and where loops of XLA do so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sweep import sweep

import trencadis as tr
from tests.backends.gpu.ahead import lowered
from trencadis.core.wide_upcast import takes, upcast
from trencadis.quant import quantize

pytestmark = pytest.mark.core

KINDS = ("float8_e4m3fn", "float8_e5m2", "int8")


def every_byte(kind):
    return np.stack([np.roll(np.arange(256, dtype=np.uint8), 37 * i) for i in range(255)]).view(jnp.dtype(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_every_byte(kind):
    """Also subnormal numbers, Inf and NaN, at every place of a word."""
    x = every_byte(kind)
    with np.errstate(invalid="ignore"):
        want = x.astype(np.float32)
    np.testing.assert_array_equal(np.asarray(jax.jit(upcast)(x), np.float32), want)


@pytest.mark.parametrize("kind", KINDS)
def test_every_power_of_two(kind):
    """Each row has another scale in each half; those of which products are subnormal differ from CPU to CPU."""
    x, exponents = every_byte(kind), np.stack([np.arange(-100, 110), np.arange(-100, 110)[::-1]], 1)
    x, scales = x[: len(exponents)], 2.0 ** exponents.astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        want = (x.astype(np.float32) * np.repeat(scales, 128, axis=1)).astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(np.asarray(jax.jit(upcast)(x, scales), np.float32), want)


def test_nothing_else_is_64_bits_wide():
    """The result of `upcast` is bfloat16, and integers around it have 32 bits."""
    x = jnp.zeros((2, 3, 8), jnp.int8)
    assert takes(x) and upcast(x).shape == x.shape and upcast(x).dtype == jnp.bfloat16
    assert jax.jit(lambda x: (upcast(x), jnp.arange(3)))(x)[1].dtype == jnp.int32
    assert upcast(x[:0]).shape == (0, 3, 8)


ROWS = [("mxfp8", (1, 32)), ("float8_e4m3fn", "row")]


@pytest.mark.parametrize(("name", "granularity"), sweep(ROWS, ROWS[:1]))
def test_rows_of_a_gpu_are_upcast_four_at_a_time(name, granularity):
    """Beside weights that the kernel upcasts, as 64-bit numbers; on a CPU they are not."""
    m, k, n, g = 512, 128, 256, 2
    x = jax.eval_shape(lambda: quantize(jnp.zeros((m, k)), name, granularity))
    w = jax.eval_shape(lambda: quantize(jnp.zeros((g, k, n)), "mxfp4", (1, 32, 1)))
    leaves, tree = jax.tree.flatten((x, w, jax.ShapeDtypeStruct((g,), jnp.int32)))

    def call(*leaves):
        return tr.grouped_matmul(*jax.tree.unflatten(tree, leaves), jnp.bfloat16)

    text = lowered(call, *((leaf.shape, leaf.dtype) for leaf in leaves))
    assert f"tensor<{m}x{k // 4}xui64>" in text
    assert "ui64" not in jax.jit(call).lower(*leaves).as_text()


def test_products_of_mxfp8_rows(rng):
    """They are those of the rows that are meant, and of the numbers that `upcast` makes of them."""
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((48, 96), (2, 96, 40)))
    sizes, rows, w = jnp.array([17, 20]), quantize(x, "mxfp8", (1, 32)), w.astype(jnp.bfloat16)
    got, want = (tr.grouped_matmul(each, w, sizes) for each in (rows, rows.dequantize()))
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-5, atol=1e-5)
    numbers = upcast(rows.values, rows.scale.astype(jnp.float32))
    np.testing.assert_array_equal(np.asarray(numbers, np.float32), np.asarray(rows.dequantize()))
