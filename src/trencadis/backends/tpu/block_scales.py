"""Scales of weights that change along k, in the rows form, applied in VMEM to tiles that were loaded.

There are three ways, and the layout says which: `weight_parts` is the number of bfloat16 parts of a weight that was
multiplied by its scale.

    1   weights are multiplied    exact: e8m0 scales (mxfp4, mxfp8), e4m3 scales of 4-bit values (nvfp4)
    2   weights are multiplied    float32 scales: two parts hold 16 bits of a product, and take two passes
    0   promotion                 the sums of each block of k are multiplied, exactly, and take a pass for each block

4-bit floats are read as int4, and are upcast by way of float8_e5m2; float8_e4m3fn by way of float8_e4m3b11fnuz.
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

from trencadis.backends.prepare import pad_to, round_up
from trencadis.backends.tpu.float8 import B11_SHIFT, E4M3
from trencadis.backends.tpu.indexing import LANES, BlockedAxis, Dma, Index, Ref, Value, aligned_ds, i32
from trencadis.backends.tpu.layout import Layout
from trencadis.backends.tpu.passes import UPPER
from trencadis.backends.tpu.products import (
    FLOAT4,
    as_multiplied,
    converted,
    exact_in_operand,
    multiply,
    mxu_dtypes,
    rescaled,
)
from trencadis.core.problem import Problem

SLAB = 512  # entries of k whose weights are upcast for one product, of one or more passes of an MXU
PACKED = 16  # rows of a native tile of bfloat16
E5M2_SHIFT = 14  # a 4-bit float with its bits in those of a float8_e5m2 is too small by 2**14
E5M2_BITS = np.int32(-0x71717172)  # 0x8e8e8e8e: sign and low exponent and mantissa bits of four float8_e5m2
NO_BFLOAT16_ARITHMETIC = ("v4", "v5e", "v5p")  # chips whose vector units multiply float32 alone
BFLOAT16, FLOAT32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)


def applies(problem: Problem) -> bool:
    """Whether the weights of a problem have scales that change along k."""
    return problem.epilogue.column_block[0] > 0


def held_weights(problem: Problem) -> np.dtype[Any]:
    """The dtype as which weights are copied to VMEM: not all chips know 4-bit floats."""
    return np.dtype(jnp.int4) if problem.rhs.name == FLOAT4 else problem.rhs


def held_scales(problem: Problem) -> np.dtype[Any]:
    """The dtype as which scales are copied to VMEM: the one in which they are stored, if they are bytes."""
    if not exact_in_operand(problem):
        return FLOAT32
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
    if not applies(problem):
        return 0
    return blocks(problem) * -(-problem.n // problem.epilogue.column_block[1]) * held_scales(problem).itemsize


def _columns(problem: Problem, layout: Layout) -> int:
    """The scales of a block of k in a chunk: one for each column, or one for several, which the kernel repeats."""
    across = problem.epilogue.column_block[1]
    return -(-layout.chunk // across) if _repeats(problem, layout) else layout.chunk


def _repeats(problem: Problem, layout: Layout) -> bool:
    """Whether the kernel repeats scales that columns share: those of a chunk have to be its own."""
    across = problem.epilogue.column_block[1]
    return across > 1 and (layout.chunk % across == 0 or layout.chunk >= problem.n)


def in_columns(problem: Problem, inner: Problem, layout: Layout, scales: jax.Array) -> jax.Array:
    """Scales `[g, k / block, n]` or `[g, k / block, n / block]` as the kernel reads them: `[g, chunks, k / block, n]`.

    Where it repeats them, those of each chunk are contiguous; otherwise there is one chunk, with one for each column.
    """
    across, g, length = problem.epilogue.column_block[1], scales.shape[0], scales.shape[1]
    if held_scales(problem) == FLOAT32:
        scales = scales.astype(jnp.float32)
    if _repeats(inner, layout):
        chunks, columns = -(-inner.n // layout.chunk), _columns(inner, layout)
        scales = padded(scales, (g, length, chunks * columns))
        return jnp.swapaxes(as_integers(scales).reshape(g, length, chunks, columns), 1, 2)
    if across > 1:
        scales = jnp.repeat(scales, across, axis=2)[:, :, : problem.n]
    return padded(scales, (g, length, inner.n))[:, None]


def scratch(problem: Problem, layout: Layout) -> dict[str, Any]:
    """The scratch shapes of the scales, by name; none if they do not change along k."""
    if not applies(problem):
        return {}
    shape = blocks(problem), _columns(problem, layout)
    buffers: dict[str, Any] = {
        "block_scales": pltpu.VMEM((2, layout.chunks, *shape), held_scales(problem)),
        "block_scales_sem": pltpu.SemaphoreType.DMA((2, layout.chunks)),
    }
    if _has_factors(problem, layout):
        words = np.dtype(np.int32) if _in_pairs(problem, layout) else FLOAT32
        buffers["factors"] = pltpu.VMEM((blocks(problem), layout.chunk), words)
    return buffers


def _has_factors(problem: Problem, layout: Layout) -> bool:
    """Whether scales are converted or repeated before they are used."""
    return held_scales(problem) != FLOAT32 or _repeats(problem, layout)


def _in_pairs(problem: Problem, layout: Layout) -> bool:
    """Whether weights are multiplied by their scales in bfloat16, two numbers to a word."""
    exact = layout.weight_parts == 1 and exact_in_operand(problem)
    return exact and layout.chip.name not in NO_BFLOAT16_ARITHMETIC


class BlockScales:
    """Scales along k inside a kernel: their copies to VMEM, and products of rows and weights that have them."""

    def __init__(
        self, problem: Problem, layout: Layout, n: BlockedAxis, hbm: dict[str, Ref], vmem: dict[str, Ref]
    ) -> None:
        self.problem, self.layout, self.n, self.hbm, self.vmem = problem, layout, n, hbm, vmem
        self.chip, self.parts, self.length = layout.chip, layout.weight_parts, problem.epilogue.column_block[0]

    def dma(self, which: Index, block: Index, slot: Index, chunk: Index) -> Dma:
        """The copy of the scales of a chunk of the weights of one group."""
        source = as_held(self.hbm["block_scales"], held_scales(self.problem))
        target = self.vmem["block_scales"].at[slot, chunk]
        if _repeats(self.problem, self.layout):
            source = source.at[which, self.n.chunk_index(block, chunk)]
        else:
            start, size = self.n.chunk_range(block, chunk)
            source = source.at[which, 0, :, aligned_ds(start, size, LANES)]
            target = target.at[:, aligned_ds(0, size, LANES)]
        return pltpu.make_async_copy(source, target, self.vmem["block_scales_sem"].at[slot, chunk])

    def product(self, x: Value, w: Ref, at: tuple[Index, Index]) -> Value:
        """The product [h, chunk] of rows and a chunk of weights in a buffer, with the scales at (slot, chunk)."""
        scales, zero = self.vmem["block_scales"].at[at], at[0] & i32(0)
        nans, factors = None, scales
        if _has_factors(self.problem, self.layout):
            nans, factors = self._make_factors(scales[...]), self.vmem["factors"]
        total = self._of_scaled(x, w, factors, zero) if self.parts else _sum(self._promoted(x, w, factors))
        total = rescaled(as_multiplied(self.problem, self.parts), self.chip, total)
        total = total * np.float32(2.0**self._shift) if self._shift else total
        return total if nans is None else total + nans

    def _make_factors(self, scales: Value) -> Value | None:
        """Store scales as what is multiplied by them: float32, or words that hold a bfloat16 number twice.

        The result is a float32 [1, chunk], NaN in columns where a scale is, or None if the factors hold the NaN.
        """
        factors, nans = self.vmem["factors"], None
        if scales.dtype == jnp.uint8:  # e8m0; 2**-127 becomes 0, as all subnormal numbers do on a TPU
            exponents = scales.astype(jnp.int32)
            largest = jnp.max(exponents, axis=0, keepdims=True)
            nans = self._repeated(jnp.where(largest == np.int32(255), np.float32(np.nan), np.float32(0)))
            high, low = exponents << np.int32(23), exponents << np.int32(7)
        else:
            high = pltpu.bitcast(scales.astype(jnp.float32), jnp.int32)
            low = lax.shift_right_logical(high, np.int32(16))
        words = high | low if _in_pairs(self.problem, self.layout) else pltpu.bitcast(high, jnp.float32)
        factors[...] = self._repeated(words)
        return nans

    def _repeated(self, scales: Value) -> Value:
        """Scales [rows, columns] that were loaded as [rows, chunk], one for each column."""
        if not _repeats(self.problem, self.layout):
            return scales
        rows, across = scales.shape[0], self.problem.epilogue.column_block[1]
        columns = [jnp.broadcast_to(scales[:, c : c + 1], (rows, across)) for c in range(scales.shape[1])]
        return jnp.concatenate(columns, axis=1)[:, : self.layout.chunk]

    def _promoted(self, x: Value, w: Ref, factors: Ref) -> Iterator[Value]:
        """Yield the products of all blocks of k, each multiplied by the scales of its columns."""
        problem, axis = self.problem, 1 if self.problem.transpose_rhs else 0
        _, dtype = mxu_dtypes(problem, self.chip)
        for start, end in _spans(0, problem.k, round_up(SLAB, self.length)):
            weights = self._upcast(w[:, start:end] if problem.transpose_rhs else w[start:end, :], dtype)
            for low, high in _spans(start, end, self.length):
                part = lax.slice_in_dim(weights, low - start, high - start, axis=axis)
                sums = multiply(problem, self.chip, x[:, low:high], part, (1, axis)).astype(jnp.float32)
                at = low // self.length
                yield sums * factors[at : at + 1, :]

    def _of_scaled(self, x: Value, w: Ref, factors: Ref, zero: Index) -> Value:
        """The product of rows and weights that were multiplied by their scales, a slab of them at a time."""
        seen = as_multiplied(self.problem, self.parts)

        def products() -> Iterator[Value]:
            for start, end in _spans(0, self.problem.k, SLAB):
                scaled = self._scaled(w, factors, start, end, zero)
                for part in [scaled] if self.parts == 1 else _two_parts(scaled):
                    yield multiply(seen, self.chip, x[:, start:end], part.astype(BFLOAT16), (1, 0))

        return _sum(products())

    def _scaled(self, w: Ref, factors: Ref, start: int, end: int, zero: Index) -> Value:
        """Weights [end - start, chunk] multiplied by their scales; too small by 2**`_shift`."""
        values = self._upcast(w[start:end, :], BFLOAT16 if _in_pairs(self.problem, self.layout) else FLOAT32)
        spans = _spans(start, end, self.length)
        rows = [self._factors_of(factors, low // self.length, high - low, zero) for low, high in spans]
        return values * jnp.concatenate(rows, axis=0)

    def _factors_of(self, factors: Ref, at: int, rows: int, zero: Index) -> Value:
        """The factors of a block of k, repeated for so many rows, [rows, chunk].

        A row is loaded 128 lanes at a time, since such a load can repeat it along sublanes. Its index is a
        sum with a traced zero: JAX lowers thousands of loads in quadratic time if their static indices differ.
        """
        row = pl.ds(zero + i32(at), 1)
        columns = [factors[row, c : c + LANES] for c in range(0, factors.shape[1], LANES)]
        if not _in_pairs(self.problem, self.layout):
            return jnp.broadcast_to(jnp.concatenate(columns, axis=1), (rows, factors.shape[1]))
        # a word holds a factor twice, for the two rows of bfloat16 in a sublane
        words = [jnp.broadcast_to(each, (PACKED // 2, each.shape[1])) for each in columns]
        tile = pltpu.bitcast(jnp.concatenate(words, axis=1), jnp.bfloat16)
        return jnp.concatenate([tile] * (-(-rows // PACKED)), axis=0)[:rows]

    def _upcast(self, w: Value, dtype: np.dtype[Any]) -> Value:
        """Weights in another dtype, which holds them exactly; too small by 2**`_shift`."""
        if self.problem.rhs.name != FLOAT4:
            if dtype == FLOAT32 and w.dtype == jnp.int4 and self.chip.name not in NO_BFLOAT16_ARITHMETIC:
                w = w.astype(BFLOAT16)  # fewer operations than by way of int8 and int32
            return converted(w, dtype, self.chip)
        if not self._shift:
            return pltpu.bitcast(pltpu.bitcast(w, jnp.int32), jnp.float4_e2m1fn).astype(dtype)
        words = pltpu.bitcast(w.astype(jnp.int8), jnp.int32)  # bytes with their sign in the first five bits
        return pltpu.bitcast((words << np.int32(1)) & E5M2_BITS, jnp.float8_e5m2).astype(dtype)

    @property
    def _shift(self) -> int:
        """The power of two by which upcast weights are too small: the chip has no instruction for their own dtype."""
        if self.problem.rhs.name == FLOAT4:
            return 0 if self.chip.float4 else E5M2_SHIFT
        return B11_SHIFT if self.parts and self.problem.rhs == E4M3 and self.chip.b11 else 0


def _two_parts(x: Value) -> list[Value]:
    """A tile of float32 as two, whose sum it is: the first eight bits of each number, and the rest."""
    first = pltpu.bitcast(pltpu.bitcast(x, jnp.int32) & UPPER, jnp.float32)
    return [first, x - first]


def _sum(products: Iterable[Value]) -> Value:
    """The sum of products, each of which is added as soon as it is made."""
    return functools.reduce(operator.add, products)


def _spans(start: int, end: int, length: int) -> list[tuple[int, int]]:
    """The range from start to end in pieces that end at multiples of a length."""
    edges = [start, *range(start - start % length + length, end, length), end]
    return list(itertools.pairwise(edges))
