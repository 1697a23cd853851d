"""The choice of a layout: the one that a model of the card expects to be the fastest among those that fit.

The model of one program: its mainloop runs at the rate of the tensor cores, or as fast as L2 brings operands, whatever
takes longer, and each step costs some cycles more. Before its first step it waits for memory, and after the last it
stores its tile. Programs that share an SM fill each other's gaps. The model of a kernel: waves of programs over all
SMs, but never faster than memory moves operands and result. Its constants are estimates that no measurement has fitted.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from trencadis.backends.triton.layout import Layout
from trencadis.core.devices import Card
from trencadis.core.dtypes import width
from trencadis.core.problem import Form, Problem
from trencadis.core.tiling import Tiling

# block_m, block_n and warps of the tiles that are considered, for operands of 16 bits
TILES = (
    (256, 128, 8), (128, 256, 8), (128, 128, 8), (128, 128, 4), (64, 256, 8), (64, 256, 4), (64, 128, 4), (32, 128, 4),
    (16, 256, 4), (16, 128, 4), (128, 64, 4), (64, 64, 4), (16, 64, 4),
)  # fmt: skip
STEP_BYTES = (64, 128, 256)  # bytes of a row of an operand in one step of the mainloop
STAGES = (2, 3, 4, 5)
REGISTERS = 65536  # of an SM, and 2048 threads
LATENCY = 0.8e-6  # seconds from the start of a copy to its end
L2 = 48  # bytes that an SM gets from L2 in a cycle
STEP_CYCLES = 40  # beside the products of a step: waiting for its copies, and starting those of a later one
RATE = 0.88  # of the peak of the tensor cores that a mainloop reaches
HBM = 0.85  # of the bandwidth of memory that kernels reach
OVERLAP = 0.1  # of the shorter one of computing and moving that the longer one does not hide
LAUNCH = 4e-6  # seconds for the list of tiles and the launch
FEW_STEPS = 8  # a sum of fewer steps than this does not take its last one apart


@functools.lru_cache(maxsize=1024)
def choose(problem: Problem, card: Card) -> Layout:
    """The layout that is expected to be the fastest for a problem on a GPU."""
    return min(candidates(problem, card), key=lambda layout: estimated_time(problem, card, layout))


def choose_for_tile(problem: Problem, card: Card, tiling: Tiling) -> Layout:
    """The layout nearest to a tile that the caller asks for: the largest that is no larger, or else the smallest."""
    down, step = (tiling.m, tiling.k) if problem.form is Form.ROWS else (tiling.k, tiling.m)
    some = list(candidates(problem, card))
    fits = [one for one in some if one.block_m <= down and one.block_n <= tiling.n and one.block_k <= step]
    if fits:
        return max(fits, key=lambda one: (one.block_m * one.block_n, one.block_k, one.stages))
    return min(some, key=lambda one: (one.block_m * one.block_n, one.block_k, one.stages))


def candidates(problem: Problem, card: Card) -> Iterator[Layout]:
    """All layouts of a problem whose stages fit into shared memory, and whose tile is not larger than it needs."""
    down = problem.m if problem.form is Form.ROWS else problem.k
    widest = max(width(problem.lhs), width(problem.rhs), mma_dtype(problem).itemsize)
    for block_m, block_n, warps in TILES:
        if (block_n > 64 and block_n >= 2 * problem.n) or (block_m > 16 and block_m >= 2 * down):
            continue
        if problem.form is Form.CONTRACTION and block_m < 64 <= down:
            continue
        for step in STEP_BYTES:
            block_k = int(step / widest)
            for stages in STAGES if card.platform == "cuda" else (2, 3):
                layout = Layout(
                    block_m=block_m, block_n=block_n, block_k=block_k, warps=warps, stages=stages,
                    peeled=_peeled(problem, block_k), longest_first=problem.form is Form.CONTRACTION,
                )  # fmt: skip
                if block_k >= _least_k(problem) and shared_memory(problem, card, layout) <= card.shared:
                    yield layout


def _least_k(problem: Problem) -> int:
    """The entries of one product of the tensor cores along the sum."""
    return 32 if mma_dtype(problem).itemsize == 1 else 16


def _peeled(problem: Problem, block_k: int) -> bool:
    """Whether the last step of a sum stands apart: not where it would be one of few, since it cannot be overlapped."""
    if problem.form is Form.ROWS:
        return problem.k % block_k == 0 or problem.k >= FEW_STEPS * block_k
    return problem.m / problem.groups >= FEW_STEPS * block_k


def shared_memory(problem: Problem, card: Card, layout: Layout) -> int:
    """The bytes of shared memory for the steps of a layout that are on their way."""
    bytes_ = layout.block_k * (layout.block_m * width(problem.lhs) + layout.block_n * width(problem.rhs))
    return int(bytes_ * max(layout.stages - (not _from_shared(card, layout)), 1)) + 1024


def _from_shared(card: Card, layout: Layout) -> bool:
    """Whether the tensor cores read operands from shared memory (wgmma, tcgen05), and not from registers."""
    return card.platform == "cuda" and card.arch.split(".")[0] in ("9", "10") and layout.block_m >= 64


def tiling_of(problem: Problem, layout: Layout) -> Tiling:
    """The tile of a layout in the caller's units of m, k and n."""
    if problem.form is Form.ROWS:
        return Tiling(layout.block_m, layout.block_k, layout.block_n)
    return Tiling(layout.block_k, layout.block_m, layout.block_n)


def reason(problem: Problem, layout: Layout, card: Card) -> str:
    """The figures behind a layout: its tiles, how many waves of them there are, and its steps."""
    waves = tile_count(problem, layout) / (card.cores * programs_per_sm(problem, card, layout))
    return (
        f"{layout.block_m} x {layout.block_n} tiles of {layout.warps} warps, {waves:.2f} waves over {card.cores} SMs, "
        f"{layout.stages} stages of {layout.block_k} along the sum; "
        f"{1e3 * estimated_time(problem, card, layout):.3g} ms by the model of the card"
    )


def mma_dtype(problem: Problem) -> np.dtype[Any]:
    """The dtype in which operands are multiplied: their own, or one that holds the values of both."""
    kinds = {problem.lhs.name, problem.rhs.name}
    if len(kinds) == 1:
        return problem.lhs
    if "float32" in kinds or kinds == {"bfloat16", "float16"}:
        return np.dtype(np.float32)
    return np.dtype(np.float16 if "float16" in kinds else jnp.bfloat16)  # either holds every 8-bit number


# ---------------------------------------------------------------------------------------------------------------------
# The model


def tile_count(problem: Problem, layout: Layout) -> float:
    """The tiles that a kernel is expected to compute: the sizes of groups are not known here, but their mean is."""
    across = math.ceil(problem.n / layout.block_n)
    if problem.form is Form.CONTRACTION:
        return problem.spans * math.ceil(problem.k / layout.block_m) * across
    mean = problem.m / problem.groups
    some = 1 - math.exp(-mean)  # the share of groups that have a row
    return problem.spans * max(some, mean / layout.block_m + some / 2) * across


def programs_per_sm(problem: Problem, card: Card, layout: Layout) -> int:
    """The programs that an SM holds at a time, by their shared memory and registers."""
    whole = card.shared + 1024
    by_memory = whole // max(shared_memory(problem, card, layout), 1)
    threads = 32 * layout.warps
    each = min(255, layout.block_m * layout.block_n // threads + 64)  # registers of a thread: its sums, and the rest
    return max(1, min(by_memory, REGISTERS // (threads * each), 4))


def estimated_time(problem: Problem, card: Card, layout: Layout) -> float:
    """The seconds that a kernel is expected to take."""
    length = problem.k if problem.form is Form.ROWS else problem.m / problem.groups
    steps = max(math.ceil(length / layout.block_k), 1)
    products = 2 * layout.block_m * layout.block_n * layout.block_k
    sm_rate = card.mma_rate * card.clock * RATE * speed(problem, card, layout)
    loaded = layout.block_k * (layout.block_m * width(problem.lhs) + layout.block_n * width(problem.rhs))
    busy = max(products / sm_rate, loaded / (L2 * card.clock)) + STEP_CYCLES / card.clock
    stored = layout.block_m * layout.block_n * width(problem.out) / (L2 * card.clock)
    in_flight = max(
        layout.stages - 1 - _from_shared(card, layout), 0.5
    )  # copies of later steps while one is multiplied
    alone = LATENCY + steps * max(busy, LATENCY / in_flight) + stored
    together = programs_per_sm(problem, card, layout)
    wave = max(alone, together * (steps * busy + stored))
    count = tile_count(problem, layout) / (card.cores * together)
    waves = math.ceil(count) if count < 4 else count + 0.5
    computed, moved = waves * wave, moved_bytes(problem) / (card.hbm * HBM)
    return max(computed, moved) + OVERLAP * min(computed, moved) + LAUNCH


def moved_bytes(problem: Problem) -> float:
    """The bytes of operands and result, each moved once; weights of groups without rows are not."""
    weights, some = problem.spans * problem.k * problem.n, 1 - math.exp(-problem.m / problem.groups)
    if problem.form is Form.ROWS:
        read = problem.rows * problem.k * width(problem.lhs) + weights * some * width(problem.rhs)
        return read + problem.rows * problem.n * width(problem.out)
    read = problem.rows * (problem.k * width(problem.lhs) + problem.n * width(problem.rhs))
    return read + weights * width(problem.out)


def speed(problem: Problem, card: Card, layout: Layout) -> float:
    """The speed of a tile's products, relative to the largest tiles' in bfloat16."""
    dtype = mma_dtype(problem)
    by_dtype = {1: 2.0, 2: 1.0, 4: 0.5}[dtype.itemsize]
    if dtype.itemsize == 4 and _full_float32(problem):
        by_dtype /= 3
    if dtype != problem.rhs or dtype != problem.lhs:  # one is converted in registers
        by_dtype *= 0.6
    area = min(1.0, (layout.block_m * layout.block_n / 32768) ** 0.15)
    if _from_shared(card, layout) or card.arch.split(".")[0] not in ("9", "10"):
        return by_dtype * area
    return (
        by_dtype * area * 0.6 * (9 if card.arch.startswith("9") else 4) / 10
    )  # mma.sync on tensor cores made for more


def _full_float32(problem: Problem) -> bool:
    """Whether float32 is multiplied as such, or as several products."""
    return any(one.value for one in problem.precisions) or problem.asked == "float32"
