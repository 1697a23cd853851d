"""The cost model that ranks layouts: the predicted time of a problem, from arithmetic on its shapes.

A basic block of straight-line code costs its products, and a fixed number of cycles while the MXUs fill and drain.
Copies cost their bytes. The time of a group is the larger of the two sums. The constants are read off the compiler's
schedules (docs/performance/tpu.md), and `tests/backends/tpu/test_model.py` compares the model with those schedules.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from trencadis.backends.prepare import round_up
from trencadis.backends.tpu import block_scales, gating
from trencadis.backends.tpu.layout import Layout
from trencadis.backends.tpu.realign import native_rows
from trencadis.core.devices import Chip
from trencadis.core.dtypes import width
from trencadis.core.problem import Form, Problem

HBM_EFFICIENCY = 0.9  # share of the HBM bandwidth that copies reach
CHUNK_OVERHEAD = 260  # cycles around each chunk: waits, and the copy of its result
TILE_OVERHEAD = 420  # cycles around each row tile: its scalar code, and the copies of its operands
ACTIVATION = 1.5 / 1024  # cycles to apply a gated activation to a number; SwiGLU stands for all
PULLBACK = 4 / 1024  # cycles for the pullback of one

# Vector operations for 4096 numbers, as the compiler counts them; a bundle has four. By the dtype in which numbers are
# stored and the one in which they are multiplied, on v5e and older chips, on v6e, and on v7x.
SLOTS = 3.9  # operations in a cycle, where they are the bound: not all four slots can be filled
CONVERT = {
    ("int8", "bfloat16"): (10, 4, 4), ("int4", "bfloat16"): (11, 4, 4), ("int4", "int8"): (1, 1, 1),
    ("float4_e2m1fn", "bfloat16"): (9, 9, 4), ("float8_e5m2", "bfloat16"): (6, 6, 4),
    ("float8_e4m3fn", "float8_e4m3b11fnuz"): (7, 7, 7), ("float8_e4m3fn", "bfloat16"): (13, 13, 4),
}  # fmt: skip
SCALE = (5, 3, 3)  # operations to multiply 4096 weights by their scales
SCALE_FLOAT32 = (7, 10, 10)  # by float32 scales, rounded to bfloat16
SPLIT = (15, 24, 24)  # by float32 scales, in two parts
ADD_PARTS = 0.5 / 1024  # cycles to multiply a number of the sums of a part of k by its scale, and to add it

DtypePair = tuple[np.dtype[Any], np.dtype[Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class MxuModel:
    """The figures of a chip for one pair of operand dtypes."""

    chip: Chip
    size: int  # rows and columns of an MXU, to which products are padded
    rate: float  # multiply-adds per cycle of all MXUs together
    fill_drain: int  # cycles to fill and drain the MXUs around a basic block
    convert: tuple[float, float]  # cycles to convert an element of lhs and one of rhs, in parallel to the products
    min_rows: int  # a tile of fewer rows takes as long as this many, since its weights have to be loaded
    row_unit: int  # rows of lhs that an MXU takes at a time
    part: int = 0  # entries of k that are multiplied at a time where weights have scales along k; 0: all of k

    @classmethod
    def of(
        cls, chip: Chip, dtypes: DtypePair, stored: DtypePair | None = None, *, transposed: bool = False
    ) -> MxuModel:
        """The model for operands multiplied in these dtypes; transposed weights take twice as long to load."""
        rate = chip.peak_bf16 / chip.clock / 2
        large = rate / chip.mxus > 2**15
        itemsize = max(dtype.itemsize for dtype in dtypes)
        if itemsize == 1:
            rate *= 2 * chip.vmatmul_cycles["bf16"] / chip.vmatmul_cycles["s8" if dtypes[0] == jnp.int8 else "f8"]
        if itemsize == 4:
            rate /= 2 if large else 1.5
        lhs, rhs = (
            _operations(CONVERT.get((held.name, dtype.name), (0, 0, 0)), chip)
            for dtype, held in zip(dtypes, stored or dtypes, strict=True)
        )
        min_rows = (125 if large else 34) * (2 if transposed else 1)
        size, fill_drain, row_unit = 256 if large else 128, 300 if large else 220, native_rows(dtypes[0].itemsize)
        return cls(chip, size, rate, fill_drain, (lhs, rhs), min_rows, row_unit)

    def rows_cycles(self, height: int, k: int, chunk: int) -> float:
        """The cycles of a product `[height, k] x [k, chunk]`, whose weights are loaded for it."""
        parts, depth = 0, round_up(k, self.size)
        if self.part:  # each of which is padded to the size of an MXU
            parts, rows = -(-k // self.part), height * round_up(self.part, self.size) / self.part
        else:
            rows = height
        product = max(rows, self.min_rows) * depth * round_up(chunk, self.size) / self.rate
        vectors = k * (height * self.convert[0] + chunk * self.convert[1]) + height * chunk * parts * ADD_PARTS
        return self.fill_drain + max(product, vectors)

    def with_block_scales(self, part: int, parts: int, *, exact: bool) -> MxuModel:
        """The same model for weights whose scales change along k, multiplied a part of k at a time.

        The weights are multiplied by their scales, and are so many bfloat16 parts; 0: the sums of each part of k are.
        """
        lhs, rhs = self.convert
        scale = ((0, 0, 0), SCALE if exact else SCALE_FLOAT32, SPLIT)[parts]
        return dataclasses.replace(self, part=part, convert=(lhs, rhs + _operations(scale, self.chip)))

    def step_cycles(self, block_k: int, rows: int, chunk: int) -> float:
        """The cycles of a product `[rows, block_k]ᵀ x [rows, chunk]` that is added to an accumulator."""
        product = block_k * round_up(rows, self.size) * round_up(chunk, self.size) / self.rate
        return self.fill_drain + max(product, rows * (block_k * self.convert[0] + chunk * self.convert[1]))

    def seconds(self, cycles: float, moved: float, tiles: int, buffers: int) -> float:
        """The time of arithmetic with copies in parallel; with several tiles per group, copies delay each other."""
        compute, copy = cycles / self.chip.clock, moved / (self.chip.hbm * HBM_EFFICIENCY)
        return max(compute, copy) + ((0.03 if buffers > 2 else 0.08) * min(compute, copy) if tiles > 1 else 0)


def _operations(counts: tuple[int, int, int], chip: Chip) -> float:
    """The cycles for one number, given operations for 4096 on v5e and older chips, on v6e, and on v7x."""
    return counts[{"v6e": 1, "v7x": 2}.get(chip.name, 0)] / SLOTS / 4096


def likely_sizes(problem: Problem) -> list[tuple[float, float]]:
    """The group sizes to plan for, as pairs (size, share of the groups): near the mean, and some far from it."""
    mean = problem.m / max(problem.groups, 1)
    spread = math.sqrt(mean)
    return [(0.3 * mean, 0.08), (mean - spread, 0.25), (mean, 0.34), (mean + spread, 0.25), (3 * mean, 0.08)]


def predict(problem: Problem, layout: Layout, model: MxuModel) -> float:
    """The predicted seconds of a problem for its `likely_sizes`."""
    group = _rows if problem.form is Form.ROWS else _contraction
    total = sum(share * group(problem, layout, model, size) for size, share in likely_sizes(problem))
    return problem.spans * total + _prologue(problem, layout, model)


def _prologue(problem: Problem, layout: Layout, model: MxuModel) -> float:
    """The seconds that overlap with nothing: the first copies, and the last product."""
    if problem.form is Form.ROWS:
        cycles = _products(problem, layout, model, layout.block_m)
        moved = problem.k * (layout.block_m * width(problem.lhs) + _columns(problem, layout) * width(problem.rhs))
    else:
        cycles = model.step_cycles(layout.block_k, 2 * layout.step_m, layout.chunk)
        moved = layout.block_m * (layout.block_k * width(problem.lhs) + layout.chunk * width(problem.rhs))
        moved += layout.block_k * layout.chunk * width(problem.out)
    return cycles / model.chip.clock + moved / (model.chip.hbm * HBM_EFFICIENCY)


def code_cycles(problem: Problem, layout: Layout, model: MxuModel) -> float:
    """The cycles of all basic blocks of the kernel, each run once: a measure of its code size."""
    if problem.form is Form.ROWS:
        return sum(_products(problem, layout, model, h) for h in layout.heights)
    return 3 * sum(model.step_cycles(layout.block_k, i * layout.step_m, layout.chunk) for i in (1, 2))


def longest_block_cycles(problem: Problem, layout: Layout, model: MxuModel) -> float:
    """The cycles of the longest basic block of the kernel."""
    if problem.form is Form.ROWS:
        return _products(problem, layout, model, layout.block_m)
    return model.step_cycles(layout.block_k, 2 * layout.step_m, layout.chunk)


def _columns(problem: Problem, layout: Layout) -> int:
    """The columns of a chunk, of all weights together."""
    return layout.chunk * len(gating.weights(problem))


def _products(problem: Problem, layout: Layout, model: MxuModel, height: int) -> float:
    """The cycles of the products of one chunk of a row tile, and of a gated activation, which follows them."""
    gate = 0.0 if problem.gate is None else PULLBACK if problem.gate.pullback else ACTIVATION
    return model.rows_cycles(height, problem.k, _columns(problem, layout)) + height * layout.chunk * gate


def _rows(problem: Problem, layout: Layout, model: MxuModel, size: float) -> float:
    """The seconds of one group of this size in the rows form."""
    unit, table = layout.sublane_tile, layout.height_table
    units = math.ceil(size / unit) + 1
    blocks, chunks = layout.num_blocks(problem), -(-problem.n // layout.chunk)

    def tile_cycles(height: int) -> float:
        product = _products(problem, layout, model, height)
        return (product + CHUNK_OVERHEAD) * chunks + TILE_OVERHEAD * blocks

    tiles = max(0, units - len(table)) * unit // layout.block_m  # of the tallest, beyond the table
    cycles, left = tiles * tile_cycles(layout.block_m), units - tiles * layout.block_m // unit
    while left > 0:
        height = table[min(left, len(table) - 1)]
        cycles += tile_cycles(height)
        tiles, left = tiles + 1, left - height // unit
    lhs_reads = blocks if tiles > 1 else layout.cores
    moved = len(gating.weights(problem)) * problem.k * problem.n * width(problem.rhs)
    moved += block_scales.bytes_of(problem)
    moved += lhs_reads * (size + layout.dma_align) * problem.k * width(problem.lhs)
    written = sum(result.axis.total * width(result.dtype) for result in gating.results(problem, layout).values())
    moved += size * (written + len(gating.matrices(problem)) * problem.n * width(problem.out))
    return model.seconds(cycles * _busiest_share(blocks, layout), moved, tiles, layout.lhs_buffers)


def _contraction(problem: Problem, layout: Layout, model: MxuModel, size: float) -> float:
    """The seconds of one group of this size in the contraction form."""
    rows = math.ceil(size) + layout.sublane_tile
    k_blocks, n_blocks = -(-problem.k // layout.block_k), -(-problem.n // layout.block_n)
    blocks, tiles = k_blocks * n_blocks, -(-rows // layout.block_m)
    steps = -(-rows // layout.step_m)
    long, short = divmod(steps, 2)
    cycles = long * model.step_cycles(layout.block_k, 2 * layout.step_m, layout.chunk)
    cycles += short * model.step_cycles(layout.block_k, layout.step_m, layout.chunk)
    cycles = blocks * layout.chunks * (cycles + CHUNK_OVERHEAD) + blocks * tiles * TILE_OVERHEAD
    lhs_reads, rhs_reads = n_blocks, k_blocks
    if tiles == 1:  # the operand of the outer loop stays in its buffer
        lhs_reads, rhs_reads = (1, rhs_reads) if layout.k_outer else (lhs_reads, 1)
    moved = problem.k * problem.n * width(problem.out) * (2 if problem.epilogue.accumulate else 1)
    moved += rows * (lhs_reads * problem.k * width(problem.lhs) + rhs_reads * problem.n * width(problem.rhs))
    stall = 1.02 if layout.out_buffers < 3 else 1.0  # the next sum may have to wait for an output buffer
    return stall * model.seconds(cycles * _busiest_share(blocks, layout), moved, tiles, layout.lhs_buffers)


def _busiest_share(blocks: int, layout: Layout) -> float:
    """The share of the column blocks that the busiest core has."""
    return -(-blocks // layout.cores) / blocks
