"""The choice of a layout for a problem on a chip: of the candidates that fit into VMEM, the fastest by cost model."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from trencadis.backends.prepare import round_up
from trencadis.backends.tpu import block_scales, contraction, gating, rows
from trencadis.backends.tpu.indexing import LANES
from trencadis.backends.tpu.layout import Layout, cheapest_heights
from trencadis.backends.tpu.model import MxuModel, code_cycles, longest_block_cycles, predict
from trencadis.backends.tpu.passes import passes, precision_of
from trencadis.backends.tpu.products import as_multiplied, exact_in_operand, mxu_dtypes, weight_parts
from trencadis.backends.tpu.realign import ROWS_IN_SUBLANE, native_rows
from trencadis.core.devices import CHIPS, Chip, chip_of
from trencadis.core.dtypes import width
from trencadis.core.problem import Form, Problem
from trencadis.core.target import Target
from trencadis.core.tiling import Tiling

VMEM_SHARE = 0.96  # of VMEM that a kernel may take
# Sets of row tile heights to try, by the size of an MXU. 544: a group of 1024 rows that starts inside of a sublane tile
# touches one sublane tile more.
HEIGHTS = {
    256: [(128,), (128, 192), (128, 192, 256), (128, 256, 320), (128, 192, 320, 512), (128, 256, 384, 512, 544)],
    128: [(32, 64), (64, 128), (64, 128, 160), (64, 128, 256), (64, 128, 256, 320), (64, 128, 256, 352)],
}
SHORT_HEIGHTS = [(32,), (32, 64), (32, 64, 128), (64, 128, 256)]  # and where weights have scales along k
FEW_ROWS = 64  # mean rows of a group up to which it takes longer to upcast and scale weights than to multiply them
# Most cycles of a basic block, by the size of an MXU: longer ones gain little, and take the compiler long.
MAX_BLOCK_CYCLES = {256: 9_200.0, 128: 24_000.0}
WHOLE_WEIGHTS = 16 << 20  # bytes of a group's weights, double buffered, up to which they may be held as one block
CHUNKS = (256, 512, 768, 1024, 1536, 2048)


def chip_for(target: Target) -> Chip:
    """The chip of a target; if its kind is not known, v7x, which has no more VMEM than any of the newer ones."""
    return CHIPS["v7x"] if target.kind is None else chip_of(target.kind)


def padded(problem: Problem) -> Problem:
    """The problem with k and n padded to multiples of 128 lanes where they are too large to be a single chunk.

    Its precision is that of the kernel's products, or with scales along k that which was asked for: it says how weights
    are multiplied by them. It no longer depends on a setting, as layouts are remembered by problem.
    """

    def pad(size: int, large: bool = False) -> int:
        return round_up(size, LANES) if size > CHUNKS[-1] or large else size

    problem = problem.replace(precision=problem.asked if block_scales.applies(problem) else precision_of(problem))
    if problem.form is Form.CONTRACTION:
        return problem.replace(n=pad(problem.n), k=pad(problem.k))
    held = 2 * len(gating.weights(problem)) * problem.k * problem.n * width(problem.rhs)
    return problem.replace(n=pad(problem.n, large=held > WHOLE_WEIGHTS))


@functools.lru_cache(maxsize=1024)
def choose(problem: Problem, chip: Chip) -> Layout | None:
    """The best layout for a padded problem, or None if none fits into VMEM."""
    return _best(problem, chip, list(_layouts(problem, chip, None)))


@functools.lru_cache(maxsize=1024)
def choose_for_tile(problem: Problem, chip: Chip, tiling: Tiling) -> Layout:
    """The best layout with the tile that the caller asked for, or an error if it does not fit into VMEM."""
    found = _best(problem, chip, list(_layouts(problem, chip, tiling)))
    if found is None:
        raise ValueError(f"tiling: {tiling} does not fit into the {chip.vmem >> 20} MiB of VMEM of a {chip.name}")
    return found


def _best(problem: Problem, chip: Chip, layouts: list[Layout]) -> Layout | None:
    models = {parts: mxu_model_for(problem, chip, parts) for parts in weight_parts(problem)}
    fit = [layout for layout in layouts if vmem(problem, layout) <= chip.vmem * VMEM_SHARE]

    def longest(layout: Layout) -> float:
        return longest_block_cycles(problem, layout, models[layout.weight_parts])

    # long basic blocks take too long to compile; if all are too long, the shortest are better than none
    limit = MAX_BLOCK_CYCLES[next(iter(models.values())).size]
    if _mostly_upcasts(problem):
        limit *= 4 / 3  # a single height has half the code
    short = [layout for layout in fit if longest(layout) <= limit]
    fit = short or sorted(fit, key=longest)[:8]

    def score(layout: Layout) -> float:  # among layouts of equal speed, less code compiles sooner
        model = models[layout.weight_parts]
        size = code_cycles(problem, layout, model) / limit + len(layout.heights)
        return predict(problem, layout, model) * (1 + size / 500)

    return min(fit, key=score, default=None)


def reason(problem: Problem, layout: Layout, chip: Chip) -> str:
    """The figures behind a layout: the time that the model predicts, its row tiles, and its share of VMEM."""
    time = predict(problem, layout, mxu_model_for(problem, chip, layout.weight_parts))
    heights = ", ".join(map(str, layout.heights))
    held = f"{vmem(problem, layout) / (1 << 20):.3g} of {chip.vmem >> 20} MiB of VMEM"
    return f"{time * 1e3:.3g} ms predicted for a {chip.name}, row tiles of {heights}, {held}"


def mxu_model_for(problem: Problem, chip: Chip, parts: int = 0) -> MxuModel:
    """The cost model of a chip for the dtypes in which it multiplies the problem's operands.

    `parts` is the number of bfloat16 parts of weights that are multiplied by their scales along k.
    """
    seen = as_multiplied(problem, parts)
    model = MxuModel.of(chip, mxu_dtypes(seen, chip), (problem.lhs, problem.rhs), transposed=problem.transpose_rhs)
    model = dataclasses.replace(model, rate=model.rate / len(passes(seen)) / max(parts, 1))
    if not block_scales.applies(problem):
        return model
    exact, length = exact_in_operand(problem), block_scales.SLAB if parts else problem.epilogue.column_block[0]
    return model.with_block_scales(length, parts, exact=exact)


# ---------------------------------------------------------------------------------------------------------------------
# VMEM


def vmem(problem: Problem, layout: Layout) -> int:
    """The bytes of VMEM that a kernel takes: all buffers, and an estimate for what the compiler spills."""
    form = rows if problem.form is Form.ROWS else contraction
    buffers = sum(_bytes(shape) for shape in form.scratch(problem, layout).values())
    if len(passes(problem)) > 1:
        return buffers + _parts_bytes(problem, layout) + (1 << 20)
    if layout.weight_parts > 1:  # a slab of scaled weights, and its parts
        buffers += 8 * block_scales.SLAB * layout.chunk
    itemsize = max(dtype.itemsize for dtype in mxu_dtypes(as_multiplied(problem, layout.weight_parts), layout.chip))
    # the compiler keeps the streamed operand of a basic block in VMEM, converted; on v7x not if it is bfloat16 already
    if problem.form is Form.CONTRACTION:
        return buffers + int(1.3 * layout.block_k * 2 * layout.step_m * itemsize) + (1 << 20)
    # beside it, with a gated activation, sums that have to wait for one another
    sums = 0 if problem.gate is None else len(gating.weights(problem)) * layout.block_m * layout.chunk * 4
    kept = layout.chip.name != "v7x" or problem.lhs != jnp.bfloat16
    return buffers + kept * layout.block_m * problem.k * itemsize + sums + (1 << 20)


def _parts_bytes(problem: Problem, layout: Layout) -> int:
    """The bytes of both operands of a basic block in bfloat16 parts, and of their sums, which the compiler spills."""
    parts = 1 + max(map(max, passes(problem)))
    kept = 2 * parts + (4 if parts > 2 else 0)  # with three parts, what is left for the last two as well
    if problem.form is Form.ROWS:
        free, summed = (layout.block_m, layout.chunk), problem.k
    else:
        free, summed = (layout.block_k, layout.chunk), 2 * layout.step_m
    return int(1.25 * sum(free) * summed * kept) + 4 * math.prod(free)


def _bytes(shape: Any) -> int:
    """The bytes of a scratch buffer with its padding to native tiles; 0 if it is not in VMEM."""
    if getattr(shape, "memory_space", None) != pltpu.VMEM:
        return 0
    *lead, sublanes, lanes = shape.shape
    size = width(shape.dtype)
    return int(math.prod(lead) * round_up(sublanes, int(32 / size)) * round_up(lanes, LANES) * size)


# ---------------------------------------------------------------------------------------------------------------------
# Candidates


def _layouts(problem: Problem, chip: Chip, tiling: Tiling | None) -> Iterator[Layout]:
    sublane_tile, dma_align = alignment(problem, chip)
    form = _rows_layouts if problem.form is Form.ROWS else _contraction_layouts
    for parts in weight_parts(problem):
        model = mxu_model_for(problem, chip, parts)
        for layout in form(problem, model, tiling, sublane_tile, dma_align):
            yield dataclasses.replace(layout, chip=chip, weight_parts=parts)


def alignment(problem: Problem, chip: Chip) -> tuple[int, int]:
    """The alignment of rows: of row tiles (the largest native tile of the arrays), and of copies from HBM.

    Row tiles of 8-bit operands may start at any of their sublanes: they are moved as they are loaded.
    """
    if problem.transpose_lhs:  # rows are the lanes of lhs
        return LANES, LANES
    copied, written = [problem.lhs], [problem.out]
    if problem.form is Form.CONTRACTION:
        copied, written = [problem.lhs, problem.rhs], []
    fixed = [dtype.itemsize for dtype in copied if dtype.itemsize > 1] + [dtype.itemsize for dtype in written]
    sublane_tile = max(map(native_rows, fixed), default=ROWS_IN_SUBLANE)
    # 16-bit arrays are tiled by 8 rows in HBM, and on all chips but v7x in VMEM too
    align = max(32 if dtype.itemsize == 1 else 8 if chip.name != "v7x" else 32 // dtype.itemsize for dtype in copied)
    return sublane_tile, align


def _rows_layouts(
    problem: Problem, model: MxuModel, tiling: Tiling | None, sublane_tile: int, dma_align: int
) -> Iterator[Layout]:
    unit = max(sublane_tile, model.row_unit)
    most = round_up(problem.rows, sublane_tile)  # the rows of the result, which are written a tile at a time
    tried = _height_sets(problem, model, sublane_tile)
    sets = {tuple(sorted({min(round_up(h, unit), most) for h in heights})) for heights in tried}
    if tiling is not None:
        tallest = min(round_up(tiling.m, unit), most)
        sets = {tuple(sorted({h for heights in sets for h in heights if h < tallest} | {tallest}))[-5:]}

    @functools.cache
    def height_table(chunk: int, heights: tuple[int, ...]) -> tuple[int, ...]:
        price = functools.partial(model.rows_cycles, k=problem.k, chunk=chunk * len(gating.weights(problem)))
        return cheapest_heights(heights, sublane_tile, price)

    for chunk, block_n in _n_blocks(problem.n, None if tiling is None else tiling.n):
        for heights in sorted(sets):
            table = height_table(chunk, heights)
            cores = model.chip.cores if block_n < problem.n else 1
            for lhs_buffers in (2, 3):
                yield Layout(
                    sublane_tile=sublane_tile, dma_align=dma_align, heights=heights, height_table=table,
                    block_k=problem.k, block_n=block_n, chunk=chunk, lhs_buffers=lhs_buffers,
                    out_buffers=min(8, max(4, 2 * (block_n // chunk))), cores=cores,
                )  # fmt: skip


def _mostly_upcasts(problem: Problem) -> bool:
    """Whether it takes longer to upcast weights and multiply them by their scales than to multiply them by rows."""
    return weight_parts(problem) == (1,) and problem.m < FEW_ROWS * problem.groups


def _height_sets(problem: Problem, model: MxuModel, sublane_tile: int) -> list[tuple[int, ...]]:
    """The sets of row tile heights to try.

    To upcast weights takes as long for a short tile as for a tall one. So where that is most of the work, there is one
    height, for a group of the mean size wherever it starts; a second one would only be more code.
    """
    if _mostly_upcasts(problem):
        return [(round_up(problem.m // problem.groups + sublane_tile, 32),)]
    found = list(HEIGHTS[model.size])
    if 1 in (problem.lhs.itemsize, problem.rhs.itemsize):  # what the MXUs do is the bound, more than for wider operands
        found += _fitted_heights(problem.m // problem.groups, model, sublane_tile)
    return found + (SHORT_HEIGHTS if block_scales.applies(problem) else [])


def _fitted_heights(mean: int, model: MxuModel, sublane_tile: int) -> Iterator[tuple[int, ...]]:
    """Sets of row tile heights for groups of the mean size, which one to four tiles of nearly equal height cover."""
    rows = round_up(mean + sublane_tile, sublane_tile)  # wherever the group starts
    for tiles in range(1, 5):
        height = round_up(-(-rows // tiles), sublane_tile)
        if 64 <= height <= HEIGHTS[model.size][-1][-1]:
            yield model.size // 2, height - sublane_tile, height
            yield model.size // 2, height, height + sublane_tile


def _n_blocks(n: int, asked: int | None) -> Iterator[tuple[int, int]]:
    """The candidates (chunk, block_n) for the rows form; `asked` is the block_n of the caller's tile."""
    if n % LANES or n <= LANES:
        yield n, n
        return
    limit = n if asked is None else min(round_up(asked, LANES), n)
    chunks = sorted({c for c in (*CHUNKS, limit) if c <= min(limit, CHUNKS[-1])})
    for chunk in chunks:
        if asked is not None:
            yield chunk, round_up(limit, chunk)
            continue
        for count in (1, 2, 3, 4, 7, 8):
            if chunk * count < n + chunk:
                yield chunk, chunk * count


def _contraction_layouts(
    problem: Problem, model: MxuModel, tiling: Tiling | None, sublane_tile: int, dma_align: int
) -> Iterator[Layout]:
    step_m = max(model.size, sublane_tile)
    most = round_up(round_up(problem.rows, sublane_tile) + sublane_tile, 2 * step_m)
    block_ms = {min(2 * step_m * i, most) for i in (1, 2, 3, 4, 6)}
    block_ks, block_ns = _block_sizes(problem.k), _block_sizes(problem.n)
    if tiling is not None:
        block_ms = {min(round_up(tiling.m, 2 * step_m), most)}
        block_ks = [problem.k if problem.k % LANES else min(round_up(tiling.k, LANES), problem.k)]
        block_ns = [problem.n if problem.n % LANES else min(round_up(tiling.n, LANES), problem.n)]
    for block_m, block_k, block_n in itertools.product(sorted(block_ms), block_ks, block_ns):
        k_blocks, n_blocks = -(-problem.k // block_k), -(-problem.n // block_n)
        lhs_bytes, rhs_bytes = problem.k * problem.lhs.itemsize, problem.n * problem.rhs.itemsize
        for buffers in (2, 3):
            yield Layout(
                sublane_tile=sublane_tile, dma_align=dma_align, heights=(block_m,), height_table=(block_m,),
                block_k=block_k, block_n=block_n, chunk=block_n, step_m=step_m,
                k_outer=lhs_bytes + k_blocks * rhs_bytes <= n_blocks * lhs_bytes + rhs_bytes,
                out_buffers=buffers, lhs_buffers=buffers, cores=model.chip.cores if k_blocks * n_blocks > 1 else 1,
            )  # fmt: skip


def _block_sizes(size: int) -> list[int]:
    """The candidates for block_k or block_n of a contraction: the whole axis, and nearly equal parts of it."""
    if size % LANES or size <= LANES:
        return [size]
    return sorted({round_up(-(-size // parts), LANES) for parts in range(1, 33) if -(-size // parts) <= 4096})
