"""A register operand of low-precision weights: the order of k, and the PTX that unpacks them, for every value."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.ptx import pairs, run
from trencadis.backends.gpu import upcast
from trencadis.backends.gpu.operand_scales import e4m3_to_bf16, powers_of_two, split_powers
from trencadis.backends.gpu.upcast import permute_k
from trencadis.core.interleave import FLOAT4_MOVES, interleave_columns

pytestmark = pytest.mark.core


def _operand_a(weights, bits):
    """Weights [n, k] as the lanes upcast their words, at the places along k where wgmma reads them."""
    n, k = weights.shape
    word = 32 // bits
    words = weights.reshape(n, -1, 4, word)  # [n, run, lane, element]: a lane loads neighbours
    operand = np.empty((n, words.shape[1], 4 * word))
    for i in range(word // 2):
        for lane in range(4):
            for j, element in enumerate((i, i + word // 2)):  # the register fragment of an m64k16 operand A
                operand[:, :, 8 * i + 2 * lane + j] = words[:, :, lane, element]
    return operand.reshape(n, k)


@pytest.mark.parametrize(("dtype", "bits"), [("int4", 4), ("int8", 8), ("float8_e4m3fn", 8), ("float8_e5m2", 8)])
def test_columns_meet_their_weights(dtype, bits):
    """Those of lhs are permuted, or the weights are interleaved."""
    rng = np.random.default_rng(0)
    x, w = rng.integers(-8, 8, (3, 192)), rng.integers(-8, 8, (5, 192))
    rows = np.asarray(permute_k(jnp.asarray(x), jnp.dtype(dtype)))
    np.testing.assert_array_equal(rows @ _operand_a(w, bits).T, x @ w.T)
    np.testing.assert_array_equal(np.sort(rows), np.sort(x))
    stored = np.asarray(interleave_columns(jnp.asarray(w), jnp.dtype(dtype)))
    np.testing.assert_array_equal(_operand_a(stored, bits), w)


ROWS = pytest.mark.parametrize("rows", ["bfloat16", "float16"])


def _unpacked(text, words, rows="bfloat16"):
    return pairs(run(text, **{"$1": words})["$0"], rows)


def _pairs_of_nibbles():
    low, high = (each.ravel().astype(np.uint64) for each in np.meshgrid(np.arange(16), np.arange(16)))
    return low, high


@ROWS
def test_every_pair_of_int4(rows):
    low, high = _pairs_of_nibbles()
    want = np.stack([(each.astype(np.int64) ^ 8) - 8 for each in (low, high)], 1)
    for by in (0, 4, 8, 12):  # the other nibbles of the word are set
        word = np.uint64(0xFFFFFFFF ^ 0x000F000F << by) | (low | high << np.uint64(16)) << np.uint64(by)
        np.testing.assert_array_equal(_unpacked(upcast.int4_to_floats(by, rows == "float16"), word, rows), want)


@ROWS
def test_every_int8(rows):
    data = np.arange(256, dtype=np.uint8)
    words = np.stack([data, data[::-1], np.roll(data, 7), np.roll(data, 77)], 1)
    for by in (0, 8):
        got = _unpacked(upcast.int8_to_floats(by, rows == "float16"), words.view(np.uint32).ravel(), rows)
        np.testing.assert_array_equal(got, words.view(np.int8)[:, [by // 8, by // 8 + 2]])


@ROWS
@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
def test_every_float8(kind, rows):
    data = np.arange(256, dtype=np.uint8)
    words = np.stack([data, data[::-1], np.roll(data, 7), np.roll(data, 77)], 1)
    text = upcast.float8_to_floats(kind[7:11], rows == "float16")
    known = run(text, **{"$2": words.view(np.uint32).ravel()})
    with np.errstate(invalid="ignore"):
        want = words.view(jnp.dtype(kind)).astype(np.float64)
    for i in range(2):
        np.testing.assert_array_equal(pairs(known[f"${i}"], rows), want[:, [i, i + 2]])


@ROWS
@pytest.mark.parametrize("moves", [FLOAT4_MOVES, upcast.FLOAT4_NEIGHBOURS], ids=["interleaved", "neighbours"])
def test_every_pair_of_float4(moves, rows):
    """Whatever the other bits of the word are; numbers are too small by a power of two."""
    low, high = _pairs_of_nibbles()
    number = np.arange(16, dtype=np.uint8).view(jnp.float4_e2m1fn).astype(np.float64)
    want = np.stack([number[low.astype(int)], number[high.astype(int)]], 1)
    for own in moves:
        bits = [(each & np.uint64(8)) << np.uint64(12) | (each & np.uint64(7)) << np.uint64(6) for each in (low, high)]
        both, word, used = bits[0] | bits[1] << np.uint64(16), np.uint64(0), 0
        for by, keep in own:
            mask = keep << 16 | keep
            word |= _rotated(both & np.uint64(mask), 32 - by)
            used |= int(_rotated(np.uint64(mask), 32 - by))
        text, power = upcast.float4_to_floats(own, rows == "float16"), 2.0 ** (14 if rows == "float16" else 126)
        for others in (0, 0xFFFFFFFF ^ used):
            np.testing.assert_array_equal(_unpacked(text, word | np.uint64(others), rows) * power, want)


def _rotated(word, by):
    both = word << np.uint64(by % 32)
    return (both | both >> np.uint64(32)) & np.uint64(0xFFFFFFFF)


@pytest.mark.parametrize("up", [0, 126])
def test_every_power_of_two(up):
    words, want = _every_e8m0(129 if up else 256)
    np.testing.assert_array_equal(_unpacked(powers_of_two(up), words), want * 2.0**up)


def test_every_power_of_two_as_two_factors():
    """Both are made of what the instructions for one make, also where that is no number."""
    words, want = _every_e8m0(256)
    first, second = (_unpacked(text, run(powers_of_two(126), **{"$1": words})["$0"]) for text in split_powers())
    np.testing.assert_array_equal(first * second, want * 2.0**126)


def _every_e8m0(count):
    """Words of two e8m0 scales below some number, and their values."""
    scales = np.stack([np.arange(count), np.arange(count)[::-1]], 1)
    words = scales[:, 0].astype(np.uint64) | scales[:, 1].astype(np.uint64) << np.uint64(16)
    return words, np.where(scales == 255, np.nan, 2.0 ** (scales - 127))


@pytest.mark.parametrize("half", ["low", "high"])
@pytest.mark.parametrize("small", [False, True])
def test_every_float8_scale(half, small):
    data = np.arange(256, dtype=np.uint8)
    both = data.astype(np.uint64) | data[::-1].astype(np.uint64) << np.uint64(8)
    words = both | np.uint64(0x55660000) if half == "low" else both << np.uint64(16) | np.uint64(0x5566)
    with np.errstate(invalid="ignore"):
        number = data.view(jnp.float8_e4m3fn).astype(np.float64)
    want = np.stack([number, number[::-1]], 1) * (2.0**118 if small else 1)
    np.testing.assert_array_equal(_unpacked(e4m3_to_bf16(half, small), words), want)
