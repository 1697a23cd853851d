"""How long a layout would take, by arithmetic: what the plan minimises.

A block of straight-line code costs its products and a ramp, while the MXUs fill and drain; copies cost their bytes; the
larger of the two is the time of a group. The constants are read off the compiler's schedules (docs/performance.md), and
`tests/backends/tpu/test_model.py` holds the sum against predictions from those schedules.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from trencadis.backends.prepare import up
from trencadis.backends.tpu.layout import Layout
from trencadis.core.devices import Chip
from trencadis.core.dtypes import width
from trencadis.core.problem import Form, Problem

HBM_SHARE = 0.9  # of the bandwidth that copies reach
CHUNK = 260  # cycles around a chunk: waits, and the copy of its result
UNPACK = 1 / 480  # cycles for a float8_e4m3fn to become a bfloat16, where the chip does not know its NaN
TILE = 420  # cycles around a tile: three walkers, and the copies of its operands

Pair = tuple[np.dtype[Any], np.dtype[Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """What the model knows of a chip for one pair of operand dtypes."""

    chip: Chip
    side: int  # of an MXU: depth and width in which products are padded
    rate: float  # multiply-adds in a cycle, of all MXUs
    ramp: int  # cycles to fill and drain
    unpack: tuple[float, float]  # cycles to convert a number of lhs and one of rhs, beside the products
    least: int  # rows below which a tile takes as long as this many, as its weights have to be loaded

    @classmethod
    def of(cls, chip: Chip, kinds: Pair, stored: Pair | None = None, *, transposed: bool = False) -> Machine:
        """The machine for operands multiplied as `kinds`; transposed weights take twice as long to load."""
        rate = chip.peak_bf16 / chip.clock / 2
        large = rate / chip.mxus > 2**15
        wide = max(kind.itemsize for kind in kinds)
        if wide == 1:
            rate *= 2 * chip.mm["bf16"] / chip.mm["s8" if kinds[0] == jnp.int8 else "f8"]
        if wide == 4:
            rate /= 2 if large else 1.5
        left, right = (
            UNPACK if kind != held and held.name == chip.blind else 0.0
            for kind, held in zip(kinds, stored or kinds, strict=True)
        )
        least = (125 if large else 34) * (2 if transposed else 1)
        return cls(chip, 256 if large else 128, rate, 300 if large else 220, (left, right), least)

    def rows(self, height: int, k: int, chunk: int) -> float:
        """Cycles of a product `[height, k] x [k, chunk]`, the weights of which are loaded for it."""
        product = max(height, self.least) * up(k, self.side) * up(chunk, self.side) / self.rate
        return self.ramp + max(product, k * (height * self.unpack[0] + chunk * self.unpack[1]))

    def step(self, deep: int, rows: int, chunk: int) -> float:
        """Cycles of a product `[rows, deep]ᵀ x [rows, chunk]`, added to a sum."""
        product = deep * up(rows, self.side) * up(chunk, self.side) / self.rate
        return self.ramp + max(product, rows * (deep * self.unpack[0] + chunk * self.unpack[1]))

    def seconds(self, cycles: float, moved: float, tiles: int, slots: int) -> float:
        """Arithmetic beside copies; where a group takes several tiles, copies of the next group get in their way."""
        compute, copy = cycles / self.chip.clock, moved / (self.chip.hbm * HBM_SHARE)
        return max(compute, copy) + ((0.03 if slots > 2 else 0.08) * min(compute, copy) if tiles > 1 else 0)


def likely_sizes(problem: Problem) -> list[tuple[float, float]]:
    """Group sizes to plan for, with their weights: about even, and some that are not."""
    mean = problem.m / max(problem.groups, 1)
    spread = math.sqrt(mean)
    return [(0.3 * mean, 0.08), (mean - spread, 0.25), (mean, 0.34), (mean + spread, 0.25), (3 * mean, 0.08)]


def predict(
    problem: Problem, layout: Layout, machine: Machine, sizes: Sequence[tuple[float, float]] | None = None
) -> float:
    """Seconds for the problem, if its groups had these sizes, each with its share; by default likely ones."""
    group = _rows if problem.form is Form.ROWS else _contraction
    total = sum(weight * group(problem, layout, machine, size) for size, weight in sizes or likely_sizes(problem))
    return problem.spans * total + _start(problem, layout, machine)


def _start(problem: Problem, layout: Layout, machine: Machine) -> float:
    """Seconds before the first product, and those of the last one."""
    if problem.form is Form.ROWS:
        cycles = machine.rows(layout.tallest, problem.k, layout.chunk)
        moved = problem.k * (layout.tallest * width(problem.lhs) + layout.chunk * width(problem.rhs))
    else:
        cycles = machine.step(layout.deep, 2 * layout.fine, layout.chunk)
        moved = layout.tallest * (layout.deep * width(problem.lhs) + layout.chunk * width(problem.rhs))
        moved += layout.deep * layout.chunk * width(problem.out)
    return cycles / machine.chip.clock + moved / (machine.chip.hbm * HBM_SHARE)


def code(problem: Problem, layout: Layout, machine: Machine) -> float:
    """Cycles of all straight-line code, run once."""
    if problem.form is Form.ROWS:
        return sum(machine.rows(h, problem.k, layout.chunk) for h in layout.heights)
    return 3 * sum(machine.step(layout.deep, i * layout.fine, layout.chunk) for i in (1, 2))


def longest(problem: Problem, layout: Layout, machine: Machine) -> float:
    """Cycles of the longest run of straight-line code."""
    if problem.form is Form.ROWS:
        return machine.rows(layout.tallest, problem.k, layout.chunk)
    return machine.step(layout.deep, 2 * layout.fine, layout.chunk)


def _rows(problem: Problem, layout: Layout, machine: Machine, size: float) -> float:
    """Seconds of one group."""
    slabs = math.ceil(size / layout.slab) + 1
    blocks, chunks = layout.blocks(problem), -(-problem.n // layout.chunk)
    each = (machine.rows(layout.tallest, problem.k, layout.chunk) + CHUNK) * chunks + TILE * blocks
    tiles = max(0, slabs - len(layout.table)) * layout.slab // layout.tallest  # of the tallest, beyond the table
    cycles, left = tiles * each, slabs - tiles * layout.tallest // layout.slab
    while left > 0:
        height = layout.table[min(left, len(layout.table) - 1)]
        cycles += (machine.rows(height, problem.k, layout.chunk) + CHUNK) * chunks + TILE * blocks
        tiles, left = tiles + 1, left - height // layout.slab
    turns = blocks if tiles > 1 else layout.cores
    moved = problem.k * problem.n * width(problem.rhs)
    moved += turns * (size + layout.grain) * problem.k * width(problem.lhs)
    moved += size * problem.n * width(problem.out) * (2 if problem.epilogue.accumulate else 1)
    return machine.seconds(cycles * _share(blocks, layout), moved, tiles, layout.x_slots)


def _contraction(problem: Problem, layout: Layout, machine: Machine, size: float) -> float:
    """Seconds of one group."""
    rows = math.ceil(size) + layout.slab
    k_blocks, n_blocks = -(-problem.k // layout.deep), -(-problem.n // layout.wide)
    blocks, tiles = k_blocks * n_blocks, -(-rows // layout.tallest)
    steps = -(-rows // layout.fine)
    long, short = divmod(steps, 2)
    cycles = long * machine.step(layout.deep, 2 * layout.fine, layout.chunk)
    cycles += short * machine.step(layout.deep, layout.fine, layout.chunk)
    cycles = blocks * layout.chunks * (cycles + CHUNK) + blocks * tiles * TILE
    x_turns, y_turns = n_blocks, k_blocks
    if tiles == 1:
        x_turns, y_turns = (1, y_turns) if layout.k_outside else (x_turns, 1)
    moved = problem.k * problem.n * width(problem.out) * (2 if problem.epilogue.accumulate else 1)
    moved += rows * (x_turns * problem.k * width(problem.lhs) + y_turns * problem.n * width(problem.rhs))
    behind = 1.02 if layout.out_slots < 3 else 1.0  # the next sum may have to wait for a buffer
    return behind * machine.seconds(cycles * _share(blocks, layout), moved, tiles, layout.x_slots)


def _share(blocks: int, layout: Layout) -> float:
    """The part of the blocks that the busiest core has."""
    return -(-blocks // layout.cores) / blocks
