"""Products of the rows form whose k is too long for VMEM: a kernel for each part of k adds to the sums of those before.

A row tile is as long as k, and so are the weights that stay in VMEM for it. With a long k, tiles are too low and chunks
too narrow for the MXUs, or nothing fits. Then the same kernel runs for each part of k, in a loop of XLA, and reads its
part out of the whole operands. Between parts the sums are in HBM, in float32; scales are applied to the sums of each
part, and what follows them in the epilogue is peeled off.
"""

from __future__ import annotations

import dataclasses
import math

from trencadis.backends.prepare import round_up
from trencadis.backends.tpu.choose import choose, mxu_model_for, padded
from trencadis.backends.tpu.indexing import LANES
from trencadis.backends.tpu.layout import Layout
from trencadis.backends.tpu.model import predict
from trencadis.core.devices import Chip
from trencadis.core.dtypes import width
from trencadis.core.problem import Form, Problem

LONG = 8192  # a k that is no longer than this is one part if it fits
LENGTHS = (16384, 12288, 8192, 6144, 4096, 3072, 2048)  # the most entries of a part, to be tried
WORTH = 0.97  # of the time without parts, which parts have to save


def peeled(problem: Problem) -> Problem:
    """What a kernel in parts of k computes of a problem: the scaled sums."""
    kept = problem.replace(epilogue=problem.epilogue.scaling)
    return kept.replace(out=kept.sum)


def part_of(problem: Problem, length: int) -> Problem:
    """The problem of one part of k, which is added to the sums of those before."""
    sums = peeled(problem)
    return sums.replace(k=length, epilogue=dataclasses.replace(sums.epilogue, accumulate=True))


def note(problem: Problem, layout: Layout) -> str:
    """A sentence on the parts."""
    count = -(-problem.k // layout.block_k)
    return f"the kernel runs {count} times, for parts of {layout.block_k} of k; the figures are those of one"


def in_parts(problem: Problem, layout: Layout) -> bool:
    """Whether a layout is that of a kernel for parts of k."""
    return problem.form is Form.ROWS and layout.block_k < problem.k


def choose_parts(problem: Problem, chip: Chip) -> Layout | None:
    """The best layout of a kernel for parts of k, of `block_k` entries each; None if k is better multiplied at once."""
    if problem.form is not Form.ROWS or problem.gate is not None or problem.epilogue.along_k:
        return None
    seen = padded(problem)
    whole = choose(seen, chip)
    if whole is not None and problem.k <= LONG:
        return None
    limit = math.inf if whole is None else WORTH * predict(seen, whole, mxu_model_for(seen, chip))
    best = None
    for length in sorted({_length(problem.k, most) for most in LENGTHS if most < problem.k}, reverse=True):
        part = padded(part_of(problem, length))
        layout = choose(part, chip)
        if layout is None:
            continue
        seconds = -(-problem.k // length) * predict(part, layout, mxu_model_for(part, chip))
        seconds += _bytes_around(problem, length) / chip.hbm
        if seconds < limit:
            best, limit = layout, seconds
    return best


def _length(k: int, most: int) -> int:
    """The length of parts of k, of `most` entries at the most: equal parts if some are not much shorter than that."""
    fewest = -(-k // most)
    counts = [count for count in range(fewest, fewest * 5 // 4 + 2) if k % (LANES * count) == 0]
    return round_up(-(-k // min(counts, default=fewest)), LANES)


def _bytes_around(problem: Problem, length: int) -> float:
    """The bytes that XLA moves around the kernels: zeros to start with, the result, and operands that are padded."""
    sums = problem.rows * problem.n
    moved = 2.0 * sums * width(problem.sum) + sums * width(problem.out)
    if problem.k % length:
        operands = problem.rows * width(problem.lhs) + problem.weights * problem.n * width(problem.rhs)
        moved += 2 * problem.k * operands
    return moved
