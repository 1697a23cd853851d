"""Loaders of checkpoints: every number equals that of an unpacker written from the definition of the format."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from oracle import close

import trencadis as tr
from trencadis.quant import from_awq, from_fp8_blocks, from_gptq, from_mxfp4

pytestmark = pytest.mark.core

G, SIZES = 2, np.array([4, 5])


def rows(rng, k):
    """Rows for both groups and two that are unowned, which are NaN."""
    x = rng.normal(size=(11, k)).astype(np.float32)
    x[9:] = np.nan
    return x


def check(got, want, rng):
    """The weights stand for exactly these numbers, are stored with k last, and are multiplied as that."""
    assert got.shape == want.shape and got.transposed
    np.testing.assert_array_equal(np.asarray(got.dequantize(), np.float64), want)
    x = rows(rng, want.shape[1])
    close(jax.jit(tr.grouped_matmul)(x, got, SIZES), oracle.rows(x, np.nan_to_num(want), SIZES))


# ---------------------------------------------------------------------------------------------------------------------
# Floats


def small_float(code, exponent_bits, mantissa_bits, bias):
    """The number of a code of sign, exponent and mantissa, without Inf and NaN."""
    mantissa = code & (2**mantissa_bits - 1)
    exponent = (code >> mantissa_bits) & (2**exponent_bits - 1)
    sign = -1.0 if code >> (mantissa_bits + exponent_bits) else 1.0
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)


@pytest.fixture
def mxfp4(rng):
    n, k = 5, 96
    blocks = rng.integers(0, 256, (G, n, k // 32, 16), dtype=np.uint8)
    return blocks, rng.integers(110, 130, (G, n, k // 32), dtype=np.uint8)


def unpacked_mxfp4(blocks, scales):
    g, n, count, _ = blocks.shape
    out = np.zeros((g, 32 * count, n))
    for i, j, b in np.ndindex(g, n, count):
        for k in range(32):
            byte = int(blocks[i, j, b, k // 2])
            code = byte >> 4 if k % 2 else byte & 15
            out[i, 32 * b + k, j] = small_float(code, 2, 1, 1) * 2.0 ** (int(scales[i, j, b]) - 127)
    return out


def test_mxfp4(mxfp4, rng):
    blocks, scales = mxfp4
    want = unpacked_mxfp4(blocks, scales)
    got = from_mxfp4(blocks, scales)
    assert got.format == "mxfp4" and got.block == (1, 32, 1) and got.nbytes == blocks.size + scales.size
    check(got, want, rng)
    again = from_mxfp4([jnp.asarray(x) for x in blocks], list(scales))  # one array for each expert
    np.testing.assert_array_equal(again.dequantize(), want)
    lost = from_mxfp4(blocks, np.full_like(scales, 255))  # the NaN of e8m0
    assert np.isnan(lost.dequantize()).all()


@pytest.mark.parametrize(("n", "k"), [(130, 200), (7, 300), (128, 128)])
def test_fp8_blocks(n, k, rng):
    codes = rng.integers(0, 256, (G, n, k), dtype=np.uint8)
    codes[codes & 127 == 127] = 0  # NaN
    scales = rng.random((G, -(-n // 128), -(-k // 128)), np.float32)
    table = np.array([small_float(code, 4, 3, 7) for code in range(256)])
    want = np.zeros((G, k, n), np.float32)
    for i, j in np.ndindex(G, n):
        for a in range(k):
            want[i, a, j] = np.float32(table[codes[i, j, a]]) * scales[i, j // 128, a // 128]
    got = from_fp8_blocks(codes.view(jnp.float8_e4m3fn), scales)
    assert got.tree_flatten()[0][0].shape == (G, n, k)  # as it lies in the file
    if n == 7:
        check(got, want, rng)
    for same in (got, from_fp8_blocks(codes, scales), from_fp8_blocks(list(codes.view(jnp.float8_e4m3fn)), scales)):
        np.testing.assert_array_equal(same.dequantize(), want)


# ---------------------------------------------------------------------------------------------------------------------
# Integers of 4 bits


def nibble(word, i):
    return (int(word) >> (4 * i)) & 15


@pytest.fixture
def four(rng):
    """Words of values and zero points, and scales, for k = 96 in blocks of 32 and n = 16."""
    words = lambda *shape: rng.integers(-(2**31), 2**31, shape).astype(np.int32)
    return words, rng.random((G, 3, 16)).astype(np.float16)


def unpacked_awq(qweight, qzeros, scales, block):
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    out = np.zeros((G, qweight.shape[1], scales.shape[2]), np.float32)
    for g, k, word, i in np.ndindex(*qweight.shape, 8):
        n, b = 8 * word + order[i], k // block
        zero = nibble(qzeros[g, b, word], i)
        out[g, k, n] = (nibble(qweight[g, k, word], i) - zero) * np.float32(scales[g, b, n])
    return out


def unpacked_gptq(qweight, qzeros, scales, block, stored_minus):
    out = np.zeros((G, 8 * qweight.shape[1], qweight.shape[2]), np.float32)
    for g, k, n in np.ndindex(*out.shape):
        b = k // block
        zero = (nibble(qzeros[g, b, n // 8], n % 8) + stored_minus) % 16
        out[g, k, n] = (nibble(qweight[g, k // 8, n], k % 8) - zero) * np.float32(scales[g, b, n])
    return out


def test_awq(four, rng):
    words, scales = four
    qweight, qzeros = words(G, 96, 2), words(G, 3, 2)
    got = from_awq(qweight, qzeros, scales)
    assert (
        repr(got) == "Scaled(int4[2,96,16], scales float16[2,3,16] and zero points int4[2,3,16] of blocks 1 x 32 x 1)"
    )
    assert got.nbytes == 4 * qweight.size + 4 * qzeros.size + 2 * scales.size
    want = unpacked_awq(qweight, qzeros, scales, 32)
    check(got, want, rng)
    in_jit = jax.jit(from_awq)(list(map(jnp.asarray, qweight)), qzeros.view(np.uint32), scales)
    np.testing.assert_array_equal(in_jit.dequantize(), want)


@pytest.mark.parametrize("version", [1, 2])
def test_gptq(version, four, rng):
    words, scales = four
    qweight, qzeros = words(G, 12, 16), words(G, 3, 2)
    order = np.tile(np.arange(96) // 32, (G, 1)).astype(np.int32)
    got = from_gptq(qweight, qzeros, scales, order, version=version)
    want = unpacked_gptq(qweight, qzeros, scales, 32, 2 - version)
    check(got, want, rng) if version == 1 else np.testing.assert_array_equal(got.dequantize(), want)


def test_symmetric_checkpoints_have_no_zero_points(four):
    words, scales = four
    qweight, middle = words(G, 12, 16), np.full((G, 3, 2), 0x77777777, np.int32)
    got = from_gptq(qweight, middle, scales)
    assert got.zeros is None
    np.testing.assert_array_equal(got.dequantize(), unpacked_gptq(qweight, middle, scales, 32, 1))


def test_a_last_block_may_be_shorter(four):
    words, scales = four
    qweight, qzeros = words(G, 10, 16), words(G, 3, 2)  # k = 80 in blocks of 32
    got = from_gptq(qweight, qzeros, scales, group_size=32)
    np.testing.assert_array_equal(got.dequantize(), unpacked_gptq(qweight, qzeros, scales, 32, 1))
    one = from_awq(words(G, 96, 2), words(G, 1, 2), scales[:, :1], group_size=-1)
    assert one.block == (1, 96, 1)


# ---------------------------------------------------------------------------------------------------------------------
# What is refused


def u8(*shape):
    return np.zeros(shape, np.uint8)


def i32(*shape):
    return np.zeros(shape, np.int32)


F16 = np.ones((2, 3, 16), np.float16)
SHUFFLED = np.tile(np.arange(96) % 3, (2, 1))
WRONG = [
    (lambda: from_mxfp4(u8(2, 5, 3, 8), u8(2, 5, 3)), r"blocks: want 16 bytes along the last axis, .*\(2, 5, 3, 8\)"),
    (
        lambda: from_mxfp4(u8(2, 5, 48), u8(2, 5, 3)),
        r"blocks: want 4 dimensions \[g, n, k / 32, 16\]; got .*\(2, 5, 48",
    ),
    (lambda: from_mxfp4(u8(2, 5, 3, 16), u8(2, 5, 2)), r"scales: want shape \(2, 5, 3\), .*; got \(2, 5, 2\)"),
    (lambda: from_mxfp4(i32(2, 5, 3, 16), u8(2, 5, 3)), "blocks: want uint8; got int32"),
    (lambda: from_mxfp4("blocks", u8(2, 5, 3)), "blocks: want an array, or a list of arrays, .*; got str"),
    (lambda: from_mxfp4([], u8(2, 5, 3)), "blocks: want an array, or a list of arrays, .*; got list"),
    (lambda: from_mxfp4([u8(5, 3, 16), u8(4, 3, 16)], u8(2, 5, 3)), "blocks: want arrays of one shape and dtype"),
    (lambda: from_fp8_blocks(np.ones((2, 4, 4), np.float32), F16), "weight: want float8_e4m3fn; got float32"),
    (lambda: from_fp8_blocks(u8(2, 200, 4), F16[:, :1, :1]), r"weight_scale_inv: want shape \(2, 2, 1\), one for each"),
    (lambda: from_fp8_blocks(u8(2, 4, 4), i32(2, 1, 1)), "weight_scale_inv: want a float dtype; got int32"),
    (lambda: from_awq(u8(2, 96, 2), i32(2, 3, 2), F16), "qweight: want int32, eight numbers .*; got uint8"),
    (lambda: from_awq(i32(2, 96, 2), i32(2, 2, 2), F16), r"qzeros: want shape \(2, 3, 16\), .*; got \(2, 2, 16\)"),
    (lambda: from_awq(i32(2, 96, 3), i32(2, 3, 3), F16), r"scales: want shape \(2, 3, 24\), .*; got \(2, 3, 16\)"),
    (lambda: from_awq(i32(2, 80, 2), i32(2, 3, 2), F16), "scales: 3 blocks do not divide k = 80; want group_size"),
    (lambda: from_awq(i32(2, 96, 2), i32(2, 3, 2), F16, group_size=64), "group_size: 64 rows of k = 96 are 2 blocks"),
    (lambda: from_awq(i32(2, 96, 2), i32(2, 3, 2), F16, group_size=0), "group_size: want None or a positive int"),
    (lambda: from_gptq(i32(2, 12, 16), i32(2, 3, 2), F16, SHUFFLED), "g_idx: .* row 1 of group 0 belongs to block 1"),
    (lambda: from_gptq(i32(2, 12, 16), i32(2, 3, 2), F16, SHUFFLED[0]), r"g_idx: want 2 dimensions \[g, k\]"),
    (lambda: from_gptq(i32(2, 12, 16), i32(2, 3, 2), F16, version=3), "version: want 1 .* or 2; got 3"),
]


@pytest.mark.parametrize(("call", "words"), WRONG, ids=[words[:20] for _, words in WRONG])
def test_errors_name_the_argument(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call()
