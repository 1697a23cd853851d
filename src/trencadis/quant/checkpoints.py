"""Loaders of quantized checkpoints: the arrays of gpt-oss, AWQ, GPTQ and DeepSeek files as `Scaled` weights.

    loader            values in the file                      scales in the file           as weights
    from_mxfp4        uint8 [g, n, k / 32, 16], two a byte    uint8 [g, n, k / 32]         mxfp4, blocks of 32 along k
    from_awq          int32 [g, k, n / 8], interleaved        float [g, k / block, n]      int4 with zero points
    from_gptq         int32 [g, k / 8, n]                     float [g, k / block, n]      int4 with zero points
    from_fp8_blocks   float8_e4m3fn [g, n, k]                 float32, one per 128 x 128   float8_e4m3fn

All of them return weights `[g, k, n]`, the rhs of `grouped_matmul`, stored with k last. Arrays are those of numpy or of
JAX; a list or a tuple has one array for each group. `prepare`, called on the machine that serves, stores them in the
order that this machine reads fastest.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trencadis.core import arguments
from trencadis.quant.scaled import Scaled

Array = jax.Array

FP8_BLOCK = 128
MXFP4_BLOCK = 32


def from_mxfp4(blocks: Any, scales: Any) -> Scaled:
    """Weights `[g, k, n]` from the mxfp4 tensors of gpt-oss, such as `gate_up_proj_blocks` and `gate_up_proj_scales`.

    Args:
      blocks: uint8 `[g, n, k / 32, 16]`: two e2m1 numbers in each byte, that of the lower k in the low nibble.
      scales: uint8 `[g, n, k / 32]`: the exponents of e8m0, a scale of 2**(s - 127) for each 32 numbers along k.
        Where devices flush subnormal numbers, that of an exponent of 0 is 0, and so are its numbers, below 2**-124.

    Returns:
      A `Scaled` in the format "mxfp4". Its bytes are those of the checkpoint.

    >>> w = from_mxfp4(np.full((1, 1, 2, 16), 0x21, np.uint8), np.array([[[127, 128]]], np.uint8))  # 0.5 and 1.0
    >>> w
    Scaled(mxfp4: float4_e2m1fn[1,64,1], scales float8_e8m0fnu[1,2,1] of blocks 1 x 32 x 1)
    >>> w.dequantize()[0, 30:34, 0].tolist()
    [0.5, 1.0, 1.0, 2.0]
    """
    packed = _stacked("blocks", blocks, 4, "[g, n, k / 32, 16]")
    exponents = _stacked("scales", scales, 3, "[g, n, k / 32]")
    for name, x in (("blocks", packed), ("scales", exponents)):
        _want_dtype(name, x, "uint8")
    g, n, count, width = packed.shape
    if width != MXFP4_BLOCK // 2:
        raise ValueError(f"blocks: want 16 bytes along the last axis, 32 numbers; got shape {packed.shape}")
    _want_shape("scales", exponents, (g, n, count), f"one for each 16 bytes of blocks {packed.shape}")
    values = jax.lax.bitcast_convert_type(packed, jnp.float4_e2m1fn).reshape(g, n, MXFP4_BLOCK * count)
    scale = jax.lax.bitcast_convert_type(exponents, jnp.float8_e8m0fnu)
    return Scaled(values, scale, "mxfp4", (1, 1, MXFP4_BLOCK)).mT


def from_fp8_blocks(weight: Any, weight_scale_inv: Any) -> Scaled:
    """Weights `[g, k, n]` from the tensors `weight` and `weight_scale_inv` of DeepSeek's float8 checkpoints.

    Args:
      weight: float8_e4m3fn `[g, n, k]`, or its bytes as uint8.
      weight_scale_inv: float32 `[g, n / 128, k / 128]`, rounded up: one for each block of 128 x 128. Despite its name,
        the numbers of a block are multiplied by it.

    Returns:
      A `Scaled` in the format "float8_e4m3fn". Nothing is moved in memory.

    >>> w = from_fp8_blocks(jnp.ones((2, 130, 200), jnp.float8_e4m3fn), jnp.full((2, 2, 2), 0.5))
    >>> w
    Scaled(float8_e4m3fn[2,200,130], scales float32[2,2,2] of blocks 1 x 128 x 128)
    """
    values = _stacked("weight", weight, 3, "[g, n, k]")
    scale = _stacked("weight_scale_inv", weight_scale_inv, 3, "[g, n / 128, k / 128]")
    if values.dtype == jnp.uint8:
        values = jax.lax.bitcast_convert_type(values, jnp.float8_e4m3fn)
    _want_dtype("weight", values, "float8_e4m3fn")
    _want_float("weight_scale_inv", scale)
    counts = (values.shape[0], *(-(-size // FP8_BLOCK) for size in values.shape[1:]))
    _want_shape("weight_scale_inv", scale, counts, f"one for each 128 x 128 of weight {values.shape}")
    lengths = (1, *(min(FP8_BLOCK, max(size, 1)) for size in values.shape[1:]))
    return Scaled(values, scale, "float8_e4m3fn", lengths).mT


def from_awq(qweight: Any, qzeros: Any, scales: Any, *, group_size: int | None = None) -> Scaled:
    """Weights `[g, k, n]` from the 4-bit tensors of AWQ checkpoints (the "gemm" version).

    Args:
      qweight: int32 `[g, k, n / 8]`: eight numbers from 0 to 15 along n in each word. From the lowest nibble on, these
        are columns 0, 2, 4, 6, 1, 3, 5, 7.
      qzeros: int32 `[g, k / block, n / 8]`: the zero points, packed likewise.
      scales: float `[g, k / block, n]`; block is often 128.
      group_size: the rows of a block, as the configuration of the checkpoint has it. It is needed only where the
        number of blocks does not divide k.

    Returns:
      A `Scaled` in the format "int4", with zero points: a number is (q - zero) * scale. Values and zero points are
      stored minus 8, so that int4 holds them. Without zero points, if all of them are 8.

    >>> word = np.array([[[0x75316420]]]).astype(np.int32)  # column j holds j
    >>> from_awq(word, np.zeros((1, 1, 1), np.int32), np.ones((1, 1, 8), np.float16)).dequantize().tolist()
    [[[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]]]
    """
    words = _stacked("qweight", qweight, 3, "[g, k, n / 8]")
    points = _stacked("qzeros", qzeros, 3, "[g, k / block, n / 8]")
    scale = _stacked("scales", scales, 3, "[g, k / block, n]")
    _want_words(qweight=words, qzeros=points)
    return _four_bits(_awq_columns(_nibbles(words)), _awq_columns(_nibbles(points)), scale, group_size)


def from_gptq(
    qweight: Any, qzeros: Any, scales: Any, g_idx: Any = None, *, version: int = 1, group_size: int | None = None
) -> Scaled:
    """Weights `[g, k, n]` from the 4-bit tensors of GPTQ checkpoints.

    Args:
      qweight: int32 `[g, k / 8, n]`: eight numbers from 0 to 15 along k in each word, the lowest nibble first.
      qzeros: int32 `[g, k / block, n / 8]`: the zero points, eight along n in each word.
      scales: float `[g, k / block, n]`; block is often 128.
      g_idx: int32 `[g, k]`: which block a row belongs to. Rows must be in the order of the blocks, as they are without
        `desc_act`. With it, each expert has rows in an order of its own, and would need its own order of the columns
        of x: such a checkpoint is refused.
      version: 1 if zero points are stored minus one, which is what checkpoint_format "gptq" means; 2 if they are
        stored as they are, "gptq_v2". Version 1 wraps: a stored 15 is the zero point 0.
      group_size: the rows of a block, as the configuration of the checkpoint has it. It is needed only where the
        number of blocks does not divide k.

    Returns:
      A `Scaled` in the format "int4", with zero points: a number is (q - zero) * scale. Values and zero points are
      stored minus 8, so that int4 holds them. Without zero points, if all of them are 8, as in symmetric checkpoints.

    >>> word = np.full((1, 1, 8), 0x76543210, np.int32)  # row i holds i
    >>> w = from_gptq(word, np.full((1, 1, 1), 0x77777777, np.int32), np.ones((1, 1, 8), np.float16))
    >>> w
    Scaled(int4[1,8,8], scales float16[1,1,8] of blocks 1 x 8 x 1)
    >>> w.dequantize()[0, :, 3].tolist()
    [-8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0]
    """
    words = _stacked("qweight", qweight, 3, "[g, k / 8, n]")
    points = _stacked("qzeros", qzeros, 3, "[g, k / block, n / 8]")
    scale = _stacked("scales", scales, 3, "[g, k / block, n]")
    _want_words(qweight=words, qzeros=points)
    if isinstance(version, bool) or version not in (1, 2):
        raise ValueError(f"version: want 1 (zero points stored minus one) or 2; got {version!r}")
    g, rows, n = words.shape
    values = jnp.moveaxis(_nibbles(words), 3, 2).reshape(g, 8 * rows, n)
    zeros = _nibbles(points).reshape(*points.shape[:2], 8 * points.shape[2])
    if version == 1:
        zeros = jnp.where(zeros == 7, -8, zeros.astype(jnp.int8) + 1).astype(jnp.int4)
    found = _four_bits(values, zeros, scale, group_size)
    if g_idx is not None:
        _check_order(_stacked("g_idx", g_idx, 2, "[g, k]"), found)
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Numbers of 4 bits


def _nibbles(words: Array) -> Array:
    """The eight numbers from 0 to 15 in each int32, minus 8, from the lowest nibble on along a new last axis; int4."""
    flipped = jnp.asarray(words).astype(jnp.uint32) ^ np.uint32(0x88888888)  # the bits of q - 8, where q has 4 bits
    return jax.lax.bitcast_convert_type(flipped, jnp.int4)


def _awq_columns(nibbles: Array) -> Array:
    """Numbers `[g, rows, n / 8, 8]` as `[g, rows, n]`, whose nibbles hold the columns 0, 2, 4, 6, 1, 3, 5, 7."""
    g, rows, count, _ = nibbles.shape
    return nibbles.reshape(g, rows, count, 2, 4).swapaxes(3, 4).reshape(g, rows, 8 * count)


def _four_bits(values: Array, zeros: Array, scale: Array, group_size: int | None) -> Scaled:
    """int4 weights from values `[g, k, n]`, zero points and scales `[g, k / block, n]`; both minus 8 already."""
    g, k, n = values.shape
    count = scale.shape[1]
    _want_float("scales", scale)
    _want_shape("scales", scale, (g, count, n), f"one for each block of k and each column of qweight, n = {n}")
    _want_shape("qzeros", zeros, (g, count, n), f"of zero points, one for each of scales {scale.shape}")
    block = _block(k, count, group_size)
    known = arguments.concrete(zeros)
    symmetric = known is not None and not known.any()
    return Scaled(values.mT, scale.mT, "int4", (1, 1, block), zeros=None if symmetric else zeros.mT).mT


def _block(k: int, count: int, group_size: Any) -> int:
    """The rows of a block: as given, or k divided by the number of blocks."""
    if group_size is None or group_size == -1:  # -1 means all of k in the configuration of a checkpoint
        if k and (not count or k % count):
            raise ValueError(f"scales: {count} blocks do not divide k = {k}; want group_size, the rows of a block")
        return max(k // count, 1) if count else 1
    if isinstance(group_size, bool) or not isinstance(group_size, (int, np.integer)) or group_size < 1:
        raise ValueError(f"group_size: want None or a positive int; got {group_size!r}")
    if -(-k // int(group_size)) != count:
        raise ValueError(f"group_size: {group_size} rows of k = {k} are {-(-k // int(group_size))} blocks; got {count}")
    return int(group_size)


def _check_order(g_idx: Array, w: Scaled) -> None:
    """Raise unless each row belongs to the block that its place says."""
    g, k, _ = w.shape
    _want_shape("g_idx", g_idx, (g, k), f"one for each row of qweight, k = {k}")
    known = arguments.concrete(g_idx)
    if known is None:
        raise TypeError("g_idx: want an array whose numbers are known, to check the order of rows; got a traced one")
    want = np.arange(k) // w.block[1]
    if (known != want).any():
        group, row = (int(x) for x in np.argwhere(known != want)[0])
        raise ValueError(
            f"g_idx: want rows in the order of their blocks; row {row} of group {group} belongs to block "
            f"{known[group, row]}, not {want[row]}. With desc_act=True each expert has an order of its own, which no "
            "one order of the columns of x fits; want a checkpoint made with desc_act=False"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Arguments


def _stacked(name: str, x: Any, ndim: int, axes: str) -> Array:
    """An argument as an array with this many axes; a list or a tuple of arrays, one for each group, is stacked."""
    if isinstance(x, (list, tuple)):
        if not x or not all(hasattr(each, "dtype") and hasattr(each, "shape") for each in x):
            raise TypeError(f"{name}: want an array, or a list of arrays, one for each group; got {type(x).__name__}")
        if len({(tuple(each.shape), np.dtype(each.dtype)) for each in x}) > 1:
            raise ValueError(f"{name}: want arrays of one shape and dtype; got {_listed(x)}")
        x = np.stack(x) if all(isinstance(each, np.ndarray) for each in x) else jnp.stack([jnp.asarray(e) for e in x])
    elif not isinstance(x, (np.ndarray, jax.Array)):
        raise TypeError(f"{name}: want an array, or a list of arrays, one for each group; got {type(x).__name__}")
    if x.ndim != ndim:
        raise ValueError(f"{name}: want {ndim} dimensions {axes}; got shape {tuple(x.shape)}")
    return jnp.asarray(x)


def _listed(xs: Any) -> str:
    return ", ".join(f"{np.dtype(x.dtype).name}{list(x.shape)}" for x in xs[:4]) + (", ..." if len(xs) > 4 else "")


def _want_dtype(name: str, x: Array, dtype: str) -> None:
    if x.dtype.name != dtype:
        raise TypeError(f"{name}: want {dtype}; got {x.dtype.name}")


def _want_words(**words: Array) -> None:
    for name, x in words.items():
        if x.dtype.name not in ("int32", "uint32"):
            raise TypeError(f"{name}: want int32, eight numbers of 4 bits in each; got {x.dtype.name}")


def _want_float(name: str, x: Array) -> None:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name}: want a float dtype; got {x.dtype.name}")


def _want_shape(name: str, x: Array, shape: tuple[int, ...], reason: str) -> None:
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name}: want shape {tuple(shape)}, {reason}; got {tuple(x.shape)}")
