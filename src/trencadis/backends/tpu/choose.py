"""From a problem and a chip to a layout: the fastest by the model of those that fit into VMEM."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

from jax.experimental.pallas import tpu as pltpu

from trencadis.backends.prepare import up
from trencadis.backends.tpu import contraction, rows
from trencadis.backends.tpu.columns import LANES
from trencadis.backends.tpu.layout import Layout, heights_table
from trencadis.backends.tpu.model import Machine, code, longest, predict
from trencadis.backends.tpu.products import kinds
from trencadis.core.devices import CHIPS, Chip, chip_of
from trencadis.core.dtypes import width
from trencadis.core.problem import Form, Problem
from trencadis.core.target import Target
from trencadis.core.tiling import Tiling

VMEM_SHARE = 0.96  # of VMEM that a kernel may take
# Heights of row tiles, by the side of an MXU. 544: a group of 1024 rows, begun inside a slab, has a slab more.
MENUS = {
    256: [(128,), (128, 192), (128, 192, 256), (128, 256, 320), (128, 192, 320, 512), (128, 256, 384, 512, 544)],
    128: [(32, 64), (64, 128), (64, 128, 160), (64, 128, 256), (64, 128, 256, 320), (64, 128, 256, 352)],
}
# Cycles of straight-line code, by the side of an MXU: beyond, the ramp is small already and the compiler slow.
LONGEST = {256: 9_200, 128: 24_000}
LARGE = 16 << 20  # bytes of a group's weights, twice, that are not held in one piece
CHUNKS = (256, 512, 768, 1024, 1536, 2048)


def chip_for(target: Target) -> Chip:
    """The chip of a target; where the kind is not known, one with no more VMEM than any of the newer ones has."""
    return CHIPS["v7x"] if target.kind is None else chip_of(target.kind)


def padded(problem: Problem) -> Problem:
    """The problem with k and n filled up to whole lanes, where they are too large to be one chunk as they are."""

    def whole(size: int, large: bool = False) -> int:
        return up(size, LANES) if size > CHUNKS[-1] or large else size

    if problem.form is Form.CONTRACTION:
        return problem.replace(n=whole(problem.n), k=whole(problem.k))
    return problem.replace(n=whole(problem.n, large=2 * problem.k * problem.n * width(problem.rhs) > LARGE))


@functools.lru_cache(maxsize=1024)
def choose(problem: Problem, chip: Chip) -> Layout | None:
    """The best layout for a padded problem, or None if none fits."""
    return _best(problem, chip, list(_layouts(problem, chip, None)))


@functools.lru_cache(maxsize=1024)
def obey(problem: Problem, chip: Chip, tiling: Tiling) -> Layout:
    """The best layout with this tile, or an error if it does not fit."""
    found = _best(problem, chip, list(_layouts(problem, chip, tiling)))
    if found is None:
        raise ValueError(f"tiling: {tiling} does not fit into the {chip.vmem >> 20} MiB of VMEM of a {chip.name}")
    return found


def _best(problem: Problem, chip: Chip, layouts: list[Layout]) -> Layout | None:
    machine = machine_for(problem, chip)
    fit = [layout for layout in layouts if vmem(problem, layout) <= chip.vmem * VMEM_SHARE]
    # a program that is too long takes too long to compile; the shortest is better than none
    short = [layout for layout in fit if longest(problem, layout, machine) <= LONGEST[machine.side]]
    fit = short or sorted(fit, key=lambda layout: longest(problem, layout, machine))[:8]

    def score(layout: Layout) -> float:  # less code compiles sooner
        less = code(problem, layout, machine) / LONGEST[machine.side] + len(layout.heights)
        return predict(problem, layout, machine) * (1 + less / 500)

    return min(fit, key=score, default=None)


def reason(problem: Problem, layout: Layout, chip: Chip) -> str:
    """The figures behind a layout: the time that the model predicts, its tiles, and how much of VMEM it takes."""
    time = predict(problem, layout, machine_for(problem, chip))
    heights = ", ".join(map(str, layout.heights))
    held = f"{vmem(problem, layout) / (1 << 20):.3g} of {chip.vmem >> 20} MiB of VMEM"
    return f"{time * 1e3:.3g} ms predicted for a {chip.name}, row tiles of {heights}, {held}"


def machine_for(problem: Problem, chip: Chip) -> Machine:
    """The model's machine for the dtype in which the problem is multiplied."""
    return Machine.of(chip, kinds(problem, chip), (problem.lhs, problem.rhs), transposed=problem.transpose_rhs)


# ---------------------------------------------------------------------------------------------------------------------
# What fits


def vmem(problem: Problem, layout: Layout) -> int:
    """Bytes of all buffers, and about what the compiler needs besides: it keeps the streamed operand of a program."""
    form = rows if problem.form is Form.ROWS else contraction
    held = sum(_bytes(shape) for shape in form.scratch(problem, layout).values())
    wide = max(kind.itemsize for kind in kinds(problem, layout.chip))
    if problem.form is Form.CONTRACTION:
        return held + int(1.3 * layout.deep * 2 * layout.fine * wide) + (1 << 20)
    return held + layout.tallest * problem.k * wide + (1 << 20)


def _bytes(shape: Any) -> int:
    if getattr(shape, "memory_space", None) != pltpu.VMEM:
        return 0
    *lead, sub, lane = shape.shape
    size = width(shape.dtype)
    return int(math.prod(lead) * up(sub, int(32 / size)) * up(lane, LANES) * size)


# ---------------------------------------------------------------------------------------------------------------------
# Candidates


def _layouts(problem: Problem, chip: Chip, tiling: Tiling | None) -> Iterator[Layout]:
    machine = machine_for(problem, chip)
    slab, grain = alignment(problem, chip)
    form = _row_layouts if problem.form is Form.ROWS else _sum_layouts
    for layout in form(problem, machine, tiling, slab, grain):
        yield dataclasses.replace(layout, chip=chip)


def alignment(problem: Problem, chip: Chip) -> tuple[int, int]:
    """Slab and grain: rows that are stored together, and rows that a copy may start and end at."""
    tall = [problem.lhs, problem.out if problem.form is Form.ROWS else problem.rhs]
    if problem.transpose_lhs:  # rows are lanes of lhs
        return LANES, LANES
    slab = max(32 // dtype.itemsize for dtype in tall)
    moved = tall if problem.form is Form.CONTRACTION else tall[:1]
    # two-byte rows are stored by eights in HBM, in all but v7x also in VMEM
    grain = max(32 if dtype.itemsize == 1 else 8 if chip.name != "v7x" else 32 // dtype.itemsize for dtype in moved)
    return slab, grain


def _row_layouts(problem: Problem, machine: Machine, tiling: Tiling | None, slab: int, grain: int) -> Iterator[Layout]:
    most = up(problem.rows, slab)
    menus = {tuple(sorted({min(up(h, slab), most) for h in menu})) for menu in MENUS[machine.side]}
    if tiling is not None:
        tall = min(up(tiling.m, slab), most)
        menus = {tuple(sorted({h for menu in menus for h in menu if h < tall} | {tall}))[-5:]}
    for chunk, wide in _widths(problem.n, tiling and tiling.n):
        for heights in sorted(menus):
            table = heights_table(heights, slab, lambda h, c=chunk: machine.rows(h, problem.k, c))
            cores = machine.chip.cores if wide < problem.n else 1
            for x_slots in (2, 3):
                yield Layout(
                    slab=slab, grain=grain, heights=heights, table=table, deep=problem.k, wide=wide, chunk=chunk,
                    x_slots=x_slots, out_slots=min(8, max(4, 2 * (wide // chunk))), cores=cores,
                )  # fmt: skip


def _widths(n: int, asked: int | None) -> Iterator[tuple[int, int]]:
    """Chunks and blocks of n: (chunk, wide)."""
    if n % LANES or n <= LANES:
        yield n, n
        return
    limit = n if asked is None else min(up(asked, LANES), n)
    chunks = sorted({c for c in (*CHUNKS, limit) if c <= min(limit, CHUNKS[-1])})
    for chunk in chunks:
        if asked is not None:
            yield chunk, up(limit, chunk)
            continue
        for count in (1, 2, 3, 4, 7, 8):
            if chunk * count < n + chunk:
                yield chunk, chunk * count


def _sum_layouts(problem: Problem, machine: Machine, tiling: Tiling | None, slab: int, grain: int) -> Iterator[Layout]:
    fine = max(machine.side, slab)
    most = up(up(problem.rows, slab) + slab, 2 * fine)
    talls = {min(2 * fine * i, most) for i in (1, 2, 3, 4, 6)}
    deeps, wides = _depths(problem.k), _depths(problem.n)
    if tiling is not None:
        talls = {min(up(tiling.m, 2 * fine), most)}
        deeps = [problem.k if problem.k % LANES else min(up(tiling.k, LANES), problem.k)]
        wides = [problem.n if problem.n % LANES else min(up(tiling.n, LANES), problem.n)]
    for tall in sorted(talls):
        for deep in deeps:
            for wide in wides:
                k_blocks, n_blocks = -(-problem.k // deep), -(-problem.n // wide)
                x_bytes, y_bytes = problem.k * problem.lhs.itemsize, problem.n * problem.rhs.itemsize
                for slots in (2, 3):
                    yield Layout(
                        slab=slab, grain=grain, heights=(tall,), table=(tall,), deep=deep, wide=wide, chunk=wide,
                        fine=fine, k_outside=x_bytes + k_blocks * y_bytes <= n_blocks * x_bytes + y_bytes,
                        out_slots=slots, x_slots=slots, cores=machine.chip.cores if k_blocks * n_blocks > 1 else 1,
                    )  # fmt: skip


def _depths(size: int) -> list[int]:
    """Blocks of an axis: all of it, and nearly equal parts of it."""
    if size % LANES or size <= LANES:
        return [size]
    return sorted({up(-(-size // parts), LANES) for parts in range(1, 33) if -(-size // parts) <= 4096})
