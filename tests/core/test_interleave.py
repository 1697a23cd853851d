"""The interleaved order: what the word of each lane holds, and the way there and back."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trencadis.core import interleave as module
from trencadis.core.interleave import FLOAT4_MOVES, deinterleave, interleave, interleaves, run_length

pytestmark = pytest.mark.core

TO_NIBBLES = module._to_nibbles, module._to_nibbles_by_value
FROM_NIBBLES = module._from_nibbles, module._from_nibbles_by_value
DTYPES = ("int8", "float8_e4m3fn", "float8_e5m2", "int4", "float4_e2m1fn")


def drawn(rng, dtype, *shape):
    """Every bit pattern of a dtype, at random places."""
    four = dtype in ("int4", "float4_e2m1fn")
    raw = jnp.asarray(rng.integers(0, 16 if four else 256, shape), jnp.uint8)
    return jax.lax.bitcast_convert_type(raw.astype(jnp.uint4) if four else raw, jnp.dtype(dtype))


def raw(x):
    return np.asarray(x).view(np.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_inverse(dtype, rng):
    x = drawn(rng, dtype, 2, 3, 2 * run_length(jnp.dtype(dtype)))
    y = interleave(x)
    assert y.shape == x.shape and y.dtype == x.dtype and (raw(y) != raw(x)).any()
    np.testing.assert_array_equal(raw(deinterleave(y)), raw(x))
    np.testing.assert_array_equal(raw(interleave(x[1, 2])), raw(y[1, 2]))
    assert interleave(x[:0]).shape == deinterleave(x[:0]).shape == (0, *x.shape[1:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_stay_zeros(dtype):
    """TMA copies read zeros past the end of an array."""
    zeros = jnp.zeros(run_length(jnp.dtype(dtype)), dtype)
    assert not raw(interleave(zeros)).any()


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_the_word_of_a_lane_holds_its_pairs(dtype):
    """Pair p of lane l is 8 p + 2 l and the next, in the same bits of both halves of the word."""
    run = run_length(jnp.dtype(dtype))
    order = np.array([8 * p + 2 * lane + h for lane in range(4) for h in range(2) for p in range(run // 8)])
    values = np.random.default_rng(0).integers(-8, 8, run)
    np.testing.assert_array_equal(interleave(jnp.asarray(values, dtype)).astype(jnp.int32), values[order])


def test_a_word_of_4_bit_floats_is_unpacked_by_its_moves(rng):
    x = drawn(rng, "float4_e2m1fn", 64)
    nibbles = raw(interleave(x)).reshape(2, 4, 8).astype(np.uint64)
    words = sum(nibbles[..., i] << np.uint64(4 * i) for i in range(8))  # [run, lane]
    for pair, moves in enumerate(FLOAT4_MOVES):
        found = np.zeros_like(words)
        for by, keep in moves:
            twice = words << np.uint64(by)
            found |= (twice | twice >> np.uint64(32)) & np.uint64(keep << 16 | keep)
        numbers = np.ascontiguousarray(found.astype(np.uint32)).view(jnp.bfloat16).astype(np.float64) * 2.0**126
        want = np.asarray(x).astype(np.float64).reshape(2, 4, 8)[:, pair]  # eight neighbours, two for each lane
        np.testing.assert_array_equal(numbers.reshape(2, 8), want)


def test_bits_of_4_bit_floats_on_any_platform():
    """On a CPU they go by way of float32 numbers, elsewhere by way of bytes."""
    nibbles = jnp.arange(16, dtype=jnp.uint32)
    for there, back in itertools.product(TO_NIBBLES, FROM_NIBBLES):
        np.testing.assert_array_equal(raw(back(nibbles)), np.arange(16))
        np.testing.assert_array_equal(there(back(nibbles)), nibbles)


def test_whole_runs_of_low_precision():
    assert interleaves(jnp.int4, 96) and not interleaves(jnp.int4, 48) and interleaves(jnp.float8_e5m2, 48)
    assert not interleaves(jnp.int8, 40) and not interleaves(jnp.bfloat16, 64)
