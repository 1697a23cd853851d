"""Scales of weights that change along k, in the rows form, applied in VMEM to tiles that were loaded.

How they are applied depends on whether the product of a value and its scale is a bfloat16 number:

    exact       e8m0 scales (mxfp4, mxfp8), e4m3 scales of 4-bit values (nvfp4)    weights are multiplied by them
    otherwise   float32 scales per 32, 64, 128, ... of k                           promotion: the sums of each block are

Either way nothing is rounded but the result. 4-bit floats are read as int4, and are upcast by way of float8_e5m2.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from trencadis.backends.prepare import pad_to, round_up
from trencadis.backends.tpu.indexing import LANES, BlockedAxis, Dma, Index, Ref, Value, aligned_ds, i32
from trencadis.backends.tpu.layout import Layout
from trencadis.backends.tpu.products import FLOAT4, in_operand, multiply, mxu_dtypes
from trencadis.core.devices import Chip
from trencadis.core.problem import Problem

SLAB = 512  # entries of k whose weights are upcast for one product, of one or more passes of an MXU
PACKED = 16  # rows of a native tile of bfloat16
E5M2_SHIFT = 14  # a 4-bit float with its bits in those of a float8_e5m2 is too small by 2**14
E5M2_BITS = np.int32(-0x71717172)  # 0x8e8e8e8e: sign and low exponent and mantissa bits of four float8_e5m2
NO_BFLOAT16_ARITHMETIC = ("v4", "v5e", "v5p")  # chips whose vector units multiply float32 alone


def applies(problem: Problem) -> bool:
    """Whether the weights of a problem have scales that change along k."""
    return problem.epilogue.column_block[0] > 0


def held_weights(problem: Problem) -> np.dtype[Any]:
    """The dtype as which weights are copied to VMEM: not all chips know 4-bit floats."""
    return np.dtype(jnp.int4) if problem.rhs.name == FLOAT4 else problem.rhs


def held_scales(problem: Problem) -> np.dtype[Any]:
    """The dtype as which scales are copied to VMEM: the one in which they are stored, if weights are scaled."""
    if not in_operand(problem):
        return np.dtype(np.float32)
    stored = problem.epilogue.column_scales
    return np.dtype(np.uint8) if stored == jnp.float8_e8m0fnu else stored


def as_held(ref: Ref, dtype: np.dtype[Any]) -> Ref:
    """A reference to an operand in HBM, with its bits taken as those of a dtype of the same width."""
    return ref if ref.dtype == dtype else ref.bitcast(dtype)


def as_integers(x: jax.Array) -> jax.Array:
    """An array of 4-bit floats or e8m0 scales as integers of the same bits; any other array as it is."""
    held = {FLOAT4: jnp.int4, "float8_e8m0fnu": jnp.uint8}.get(x.dtype.name)
    return x if held is None else lax.bitcast_convert_type(x, held)


def padded(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Weights or scales, padded with zeros to a shape; XLA for some chips pads no 4-bit floats."""
    return x if x.shape == shape else pad_to(as_integers(x), shape)


def blocks(problem: Problem) -> int:
    """The number of blocks of k that have scales of their own."""
    return -(-problem.k // problem.epilogue.column_block[0])


def bytes_of(problem: Problem) -> int:
    """The bytes of the scales along k of one group, as the kernel reads them; 0 if there are none."""
    return blocks(problem) * problem.n * held_scales(problem).itemsize if applies(problem) else 0


def in_columns(problem: Problem, inner: Problem, scales: jax.Array) -> jax.Array:
    """Scales `[g, k / block, n]` as the kernel reads them, one for each column."""
    across = problem.epilogue.column_block[1]
    if not in_operand(problem):
        scales = scales.astype(jnp.float32)
    if across > 1:
        scales = jnp.repeat(scales, across, axis=2)[:, :, : problem.n]
    return padded(scales, (*scales.shape[:2], inner.n))


def scratch(problem: Problem, layout: Layout) -> dict[str, Any]:
    """The scratch shapes of the scales, by name; none if they do not change along k."""
    if not applies(problem):
        return {}
    shape = blocks(problem), layout.chunk
    buffers: dict[str, Any] = {
        "block_scales": pltpu.VMEM((2, layout.chunks, *shape), held_scales(problem)),
        "block_scales_sem": pltpu.SemaphoreType.DMA((2, layout.chunks)),
    }
    if in_operand(problem):
        buffers["factors"] = pltpu.VMEM(shape, np.dtype(np.int32 if _pairs(layout.chip) else np.float32))
    return buffers


class BlockScales:
    """Scales along k inside a kernel: their copies to VMEM, and products of rows and weights that have them."""

    def __init__(
        self, problem: Problem, layout: Layout, n: BlockedAxis, hbm: dict[str, Ref], vmem: dict[str, Ref]
    ) -> None:
        self.problem, self.chip, self.n, self.hbm, self.vmem = problem, layout.chip, n, hbm, vmem
        self.length = problem.epilogue.column_block[0]

    def dma(self, which: Index, block: Index, slot: Index, chunk: Index) -> Dma:
        """The copy of the scales of a chunk of the weights of one group."""
        start, size = self.n.chunk_range(block, chunk)
        source = as_held(self.hbm["block_scales"], held_scales(self.problem))
        return pltpu.make_async_copy(
            source.at[which, :, aligned_ds(start, size, LANES)],
            self.vmem["block_scales"].at[slot, chunk, :, aligned_ds(0, size, LANES)],
            self.vmem["block_scales_sem"].at[slot, chunk],
        )

    def product(self, x: Value, w: Ref, at: tuple[Index, Index]) -> Value:
        """The product [h, chunk] of rows and a chunk of weights in a buffer, with the scales at (slot, chunk)."""
        scales = self.vmem["block_scales"].at[at]
        if not in_operand(self.problem):
            return self._total(self._promoted(x, w, scales))
        nans, zero = self._make_factors(scales[...]), at[0] & i32(0)
        rounded = self.problem.replace(rhs=np.dtype(jnp.bfloat16))
        products = (
            multiply(rounded, self.chip, x[:, start:end], self._scaled(w, start, end, zero), (1, 0))
            for start, end in _spans(0, self.problem.k, SLAB)
        )
        total = self._total(products)
        return total if nans is None else total + nans

    def _total(self, products: Iterable[Value]) -> Value:
        """The sum of products, each of which is added as soon as it is made."""
        total = functools.reduce(operator.add, products)
        return total * np.float32(2.0**E5M2_SHIFT) if self._small else total

    def _make_factors(self, scales: Value) -> Value | None:
        """Store scales as what weights are multiplied by: float32, or words that hold a bfloat16 number twice.

        The result is a float32 [1, chunk], NaN in columns where a scale is, or None if the factors hold the NaN.
        """
        factors, nans = self.vmem["factors"], None
        if scales.dtype == jnp.uint8:  # e8m0; 2**-127 becomes 0, as all subnormal numbers do on a TPU
            exponents = scales.astype(jnp.int32)
            largest = jnp.max(exponents, axis=0, keepdims=True)
            nans = jnp.where(largest == np.int32(255), np.float32(np.nan), np.float32(0))
            high = exponents << np.int32(23)
            low = exponents << np.int32(7)
        else:
            high = pltpu.bitcast(scales.astype(jnp.float32), jnp.int32)
            low = lax.shift_right_logical(high, np.int32(16))
        factors[...] = high | low if _pairs(self.chip) else pltpu.bitcast(high, jnp.float32)
        return nans

    def _promoted(self, x: Value, w: Ref, scales: Ref) -> Iterator[Value]:
        """Yield the products of all blocks of k, each multiplied by the scales of its columns."""
        problem, axis = self.problem, 1 if self.problem.transpose_rhs else 0
        _, dtype = mxu_dtypes(problem, self.chip)
        for start, end in _spans(0, problem.k, round_up(SLAB, self.length)):
            weights = self._upcast(w[:, start:end] if problem.transpose_rhs else w[start:end, :], dtype)
            for low, high in _spans(start, end, self.length):
                part = lax.slice_in_dim(weights, low - start, high - start, axis=axis)
                sums = multiply(problem, self.chip, x[:, low:high], part, (1, axis)).astype(jnp.float32)
                at = low // self.length
                yield sums * scales[at : at + 1, :]

    def _scaled(self, w: Ref, start: int, end: int, zero: Index) -> Value:
        """Weights [end - start, chunk] in bfloat16, multiplied by their scales; too small by 2**14 if `_small`."""
        values, parts = self._upcast(w[start:end, :], jnp.bfloat16 if _pairs(self.chip) else jnp.float32), []
        for low, high in _spans(start, end, self.length):
            factors = self._factors_of(low // self.length, high - low, zero)
            parts.append((values[low - start : high - start] * factors).astype(jnp.bfloat16))
        return jnp.concatenate(parts, axis=0)

    def _factors_of(self, at: int, rows: int, zero: Index) -> Value:
        """The factors of a block of k, for so many rows or as one row, [rows or 1, chunk].

        A row is loaded 128 lanes at a time, since such a load can repeat it along sublanes. Its index is a
        sum with a traced zero: JAX lowers thousands of loads in quadratic time if their static indices differ.
        """
        factors, row = self.vmem["factors"], pl.ds(zero + i32(at), 1)
        columns = [factors[row, c : c + LANES] for c in range(0, factors.shape[1], LANES)]
        if not _pairs(self.chip):
            return jnp.concatenate(columns, axis=1)
        # a word holds a factor twice, for the two rows of bfloat16 in a sublane
        words = [jnp.broadcast_to(each, (PACKED // 2, each.shape[1])) for each in columns]
        tile = pltpu.bitcast(jnp.concatenate(words, axis=1), jnp.bfloat16)
        return jnp.concatenate([tile] * (-(-rows // PACKED)), axis=0)[:rows]

    def _upcast(self, w: Value, dtype: DTypeLike) -> Value:
        """Weights in another dtype, which holds them exactly; too small by 2**14 if `_small`."""
        if self.problem.rhs.name != FLOAT4:
            return w.astype(dtype)
        if not self._small:
            return pltpu.bitcast(pltpu.bitcast(w, jnp.int32), jnp.float4_e2m1fn).astype(dtype)
        words = pltpu.bitcast(w.astype(jnp.int8), jnp.int32)  # bytes with their sign in the first five bits
        return pltpu.bitcast((words << np.int32(1)) & E5M2_BITS, jnp.float8_e5m2).astype(dtype)

    @property
    def _small(self) -> bool:
        """Whether weights are upcast to numbers that are too small by 2**14, as 4-bit floats are by float8_e5m2."""
        return self.problem.rhs.name == FLOAT4 and not self.chip.float4


def _pairs(chip: Chip) -> bool:
    """Whether a chip multiplies bfloat16 in its vector units, two numbers to a word."""
    return chip.name not in NO_BFLOAT16_ARITHMETIC


def _spans(start: int, end: int, length: int) -> list[tuple[int, int]]:
    """The range from start to end in pieces that end at multiples of a length."""
    edges = [start, *range(start - start % length + length, end, length), end]
    return list(itertools.pairwise(edges))
