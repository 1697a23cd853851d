"""The choice of a layout: the one that a model of the card expects to be the fastest among those that fit.

The model of one program: its mainloop runs at the rate of the tensor cores, or as fast as L2 brings operands, whatever
takes longer, and each step costs some cycles more. Before its first step it waits for memory, and after the last it
stores its tile; a persistent program has the copies of its next tile on their way meanwhile, and does not wait.
Programs that share an SM fill each other's gaps. The model of a kernel: waves of programs over all SMs, but never
faster than memory moves operands and result. Its constants are fitted to measurements on an H200
(docs/performance/gpu.md), as fractions of that card's figures, and are taken to be the same on others.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from trencadis.backends.triton.layout import Layout
from trencadis.core.devices import Card
from trencadis.core.dtypes import width
from trencadis.core.problem import Form, Problem
from trencadis.core.tiling import Tiling

# block_m, block_n and warps of the tiles that are considered, for operands of 16 bits
TILES = (
    (128, 256, 8), (128, 128, 4), (64, 256, 8), (64, 256, 4), (64, 128, 8), (64, 128, 4), (32, 128, 4),
    (16, 256, 4), (16, 128, 4), (128, 64, 4), (64, 64, 4), (16, 64, 4),
)  # fmt: skip
STEP_BYTES = (32, 64, 128, 256)  # bytes of a row of an operand in one step of the mainloop
STAGES = (1, 2, 3, 4, 5)
REGISTERS = 65536  # of an SM, and 2048 threads
FILL = 0.33e-6  # seconds from the start of a program to its first step: two latencies of memory
LATENCY = 0.51e-6  # seconds from the start of a copy to its end
L2 = 57  # bytes that an SM gets from L2 in a cycle
STEP_CYCLES = 78  # beside the products of a step: waiting for its copies, and starting those of a later one
TMA_CYCLES = 20  # the same, if the tensor memory accelerator copies
STORED = 21  # bytes of a tile that are stored in a cycle
TMA_STORED = 65  # bytes of a tile that are handed over to the tensor memory accelerator in a cycle
RATE = 0.91  # of the peak of the tensor cores that a mainloop reaches
HBM = 0.96  # of the bandwidth of memory that kernels reach
RUN = 6  # bytes in whose time memory turns from one run of neighbours to another
OVERLAP = 0.25  # of the shorter one of computing and moving that the longer one does not hide
STALL = 0.72  # of the time to write the result that a program waits for memory; n programs of an SM n times less
LAUNCH = 4e-6  # seconds for the list of tiles and the launch
SHORT = 0.88  # the time of a tile of half the height, relative to the whole
AREA = 0.14  # exponent of the speed of smaller tiles
IN_TURN = 2.0  # the time of six products that wait for one another, relative to their own
SIX_SUMS = 32  # entries of a tile by six products that a thread holds, three sums for each
SWIZZLE = 128  # bytes of a row that TMA copies at once
SMALL_GROUP = 256  # rows of a group, on average, up to which L2 rasterization groups are lower
FEW_STEPS = 8  # a sum of fewer steps than this does not take its last one apart


@functools.lru_cache(maxsize=1024)
def choose(problem: Problem, card: Card) -> Layout:
    """The layout that is expected to be the fastest for a problem on a GPU.

    Of equal ones it is that with more stages, but not of six products, which do not wait for copies.
    """
    sign = 1 if split_operand(problem, card.arch) else -1
    return min(candidates(problem, card), key=lambda one: (estimated_time(problem, card, one), sign * one.stages))


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
    for block_m, block_n, warps in TILES:
        if (block_n > 64 and block_n >= 2 * problem.n) or (block_m > 16 and block_m >= 2 * down):
            continue
        if problem.form is Form.CONTRACTION and block_m < 64 <= down:
            continue
        if split_operand(problem, card.arch) and block_m * block_n > SIX_SUMS * 32 * warps:
            continue
        for step, stages in itertools.product(STEP_BYTES, STAGES if card.platform == "cuda" else (2, 3)):
            block_k = int(step / max(width(problem.lhs), width(problem.rhs), mma_dtype(problem).itemsize))
            if block_k < _least_k(problem) or not _deep(problem, card, block_m, block_k, stages):
                continue
            plain = Layout(
                block_m=block_m, block_n=block_n, block_k=block_k, warps=warps, stages=stages,
                peeled=_peeled(problem, block_k), raster_group=_raster_group(problem),
            )  # fmt: skip
            for layout in (plain, *_variants(problem, card, plain)):
                if shared_memory(problem, card, layout) <= card.shared:
                    yield layout


def _deep(problem: Problem, card: Card, block_m: int, block_k: int, stages: int) -> bool:
    """Whether a pipeline has enough stages to copy while it multiplies, but none that its few steps do not fill."""
    steps = math.ceil((problem.k if problem.form is Form.ROWS else problem.m / problem.groups) / block_k)
    return min(2 + _from_shared(card, block_m), steps) <= stages <= max(steps + 1, 2)


def _variants(problem: Problem, card: Card, plain: Layout) -> Iterator[Layout]:
    """A layout with short tiles for the last rows of a group, and the same as persistent programs."""
    if problem.form is Form.ROWS and plain.block_m >= (128 if _from_shared(card, plain.block_m) else 32):
        yield plain.replace(short_m=plain.block_m // 2)
    if _from_shared(card, plain.block_m) and not split_operand(problem, card.arch) and plain.stages > 2:
        persistent = plain.replace(peeled=False, tma=_tma(problem))
        long = plain.block_k * problem.lhs.itemsize >= SWIZZLE
        if problem.form is Form.CONTRACTION or (persistent.tma and long):
            together = programs_per_sm(problem, card, persistent.replace(programs=1))
            yield persistent.replace(programs=card.cores * together)


def _raster_group(problem: Problem) -> int:
    """The tiles of a column that run before the next: fewer where those of a group are few."""
    if problem.m > SMALL_GROUP * problem.groups:
        return 8
    return 5 if problem.form is Form.ROWS else 4


def _tma(problem: Problem) -> bool:
    """Whether the tensor memory accelerator copies operands of the rows form, or the result of a contraction.

    Rows of its arrays start at multiples of 16 bytes. An empty group with existing_out has a result that is not stored.
    """
    if problem.form is Form.CONTRACTION:
        return not problem.epilogue.accumulate and problem.n * problem.out.itemsize % 16 == 0
    n = problem.k if problem.transpose_rhs else problem.n
    sixteen = problem.lhs == problem.rhs and problem.lhs.itemsize == 2  # others were not measured
    return sixteen and problem.k % 8 == 0 and n % 8 == 0


def _least_k(problem: Problem) -> int:
    """The entries of one product of the tensor cores along the sum."""
    return 32 if mma_dtype(problem).itemsize == 1 else 16


def _peeled(problem: Problem, block_k: int) -> bool:
    """Whether the last step of a sum stands apart: not where it would be one of few, since it cannot be overlapped."""
    return problem.form is Form.ROWS and (problem.k % block_k == 0 or problem.k >= FEW_STEPS * block_k)


def shared_memory(problem: Problem, card: Card, layout: Layout) -> int:
    """The bytes of shared memory: for steps that are on their way, and in persistent programs for a tile of results."""
    bytes_ = step_bytes(problem, card, layout) * max(layout.stages - (not _from_shared(card, layout.block_m)), 1)
    tile = layout.block_m * layout.block_n * problem.out.itemsize
    if layout.programs and not (problem.form is Form.CONTRACTION and layout.tma):
        tile = tile if problem.out.itemsize > 2 else min(tile, 32768)  # what Triton 3.6 was seen to take
    return int(bytes_) + (tile if layout.programs else 0) + 1024


def step_bytes(problem: Problem, card: Card, layout: Layout) -> float:
    """The bytes of both operands in one step of the mainloop."""
    split, three = split_operand(problem, card.arch), 6.0  # three parts of 2 bytes
    lhs, rhs = width(problem.lhs), width(problem.rhs)
    lhs, rhs = three if split == "lhs" else lhs, three if split == "rhs" else rhs
    return layout.block_k * (layout.block_m * lhs + layout.block_n * rhs)


def _from_shared(card: Card, block_m: int) -> bool:
    """Whether the tensor cores read operands from shared memory (wgmma, tcgen05), and not from registers."""
    return card.tma and block_m >= 64


def tiling_of(problem: Problem, layout: Layout) -> Tiling:
    """The tile of a layout in the caller's units of m, k and n."""
    if problem.form is Form.ROWS:
        return Tiling(layout.block_m, layout.block_k, layout.block_n)
    return Tiling(layout.block_k, layout.block_m, layout.block_n)


def reason(problem: Problem, layout: Layout, card: Card) -> str:
    """The figures behind a layout: its tiles, how many waves of them there are, and its steps."""
    waves = tile_count(problem, layout) / (card.cores * programs_per_sm(problem, card, layout))
    how = "; float32 as six products of its bfloat16 parts" if split_operand(problem, card.arch) else ""
    return (
        f"{layout.block_m} x {layout.block_n} tiles of {layout.warps} warps, {waves:.2f} waves over {card.cores} "
        f"{card.units}, {layout.stages} stages of {layout.block_k} along the sum{how}; "
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


def precision(problem: Problem, arch: str) -> str | None:
    """How float32 factors are multiplied, in Triton's words; None if the precision asked for is none of these.

    Six bfloat16 products of three parts each have the error of float32. AMD has products of float32 itself. Products of
    other factors are exact, whatever the precision.
    """
    asked = problem.float32_precision if mma_dtype(problem) == jnp.float32 else lax.Precision.DEFAULT
    if asked is None:
        return None
    if arch.startswith("gfx"):
        return "ieee"
    return "tf32" if asked is lax.Precision.DEFAULT else "bf16x6"


def split_operand(problem: Problem, arch: str) -> str:
    """The operand that XLA splits in three for six products, "lhs" or "rhs"; "" if there are no such products.

    It is the right factor of the tensor cores: a kernel splits the left one in registers, but would have to write a
    right one back to shared memory. In the rows form weights are the left factor, since there are more of them.
    """
    if precision(problem, arch) != "bf16x6":
        return ""
    return "lhs" if problem.form is Form.ROWS else "rhs"


# ---------------------------------------------------------------------------------------------------------------------
# The model


def tile_count(problem: Problem, layout: Layout) -> float:
    """The tiles that a kernel is expected to compute: the sizes of groups are not known here, but their mean is.

    A short tile counts as SHORT tiles. Half of the last tiles of groups are short, or all if a group has few rows.
    """
    across = math.ceil(problem.n / layout.block_n)
    if problem.form is Form.CONTRACTION:
        return problem.spans * math.ceil(problem.k / layout.block_m) * across
    mean = problem.m / problem.groups
    some = 1 - math.exp(-mean)  # the share of groups that have a row
    count = max(some, mean / layout.block_m + some / 2)
    if layout.short_m:
        count -= some * (1 - SHORT) * (1 if mean < layout.short_m / 2 else 0.5)
    return problem.spans * count * across


def programs_per_sm(problem: Problem, card: Card, layout: Layout) -> int:
    """The programs that an SM holds at a time, by their shared memory and registers."""
    whole = card.shared + 1024
    by_memory = whole // max(shared_memory(problem, card, layout), 1)
    threads = 32 * layout.warps
    sums = layout.block_m * layout.block_n // threads
    each = min(255, 3 * sums + 30 if split_operand(problem, card.arch) else sums + 40)  # registers of a thread
    return max(1, min(by_memory, REGISTERS // (threads * each), 4))


def estimated_time(problem: Problem, card: Card, layout: Layout) -> float:
    """The seconds that a kernel is expected to take."""
    rows_form = problem.form is Form.ROWS
    length = problem.k if rows_form else problem.m / problem.groups + layout.block_k / 2
    steps = max(math.ceil(length / layout.block_k) if rows_form else length / layout.block_k, 1)
    products = 2 * layout.block_m * layout.block_n * layout.block_k
    sm_rate = card.mma_rate * RATE * speed(problem, card, layout)
    beside = TMA_CYCLES if layout.tma and rows_form else STEP_CYCLES
    busy = (max(products / sm_rate, step_bytes(problem, card, layout) / L2) + beside) / card.clock
    tile = layout.block_m * layout.block_n * width(problem.out)
    stored = tile / (TMA_STORED if layout.tma and not rows_form else STORED) / card.clock
    in_flight = layout.stages - 1 - _from_shared(card, layout.block_m)  # copies of later steps during one
    one = busy * IN_TURN if split_operand(problem, card.arch) else busy
    step = max(one, LATENCY / in_flight) if in_flight > 0 else one + LATENCY
    together = layout.programs // card.cores or programs_per_sm(problem, card, layout)
    alone = steps * step + stored + (0 if layout.programs else FILL)
    wave = max(alone, together * (steps * busy + stored))
    count = tile_count(problem, layout) / (card.cores * together)
    waves = math.ceil(count) if count < 4 else count + 0.5
    computed = waves * wave + (2 * FILL if layout.programs else 0)  # it writes descriptors of its copies first
    run = layout.block_k if rows_form and problem.transpose_rhs else layout.block_n
    run_bytes = run * width(problem.rhs)
    moved = moved_bytes(problem) / (card.hbm * HBM) * (1 + RUN / run_bytes)
    stall = STALL / together * result_bytes(problem) / (card.hbm * HBM)
    return max(computed, moved) + OVERLAP * min(computed, moved) + stall + LAUNCH


def moved_bytes(problem: Problem) -> float:
    """The bytes of operands and result, each moved once; weights of groups without rows are not."""
    if problem.form is Form.ROWS:
        some = 1 - math.exp(-problem.m / problem.groups)
        weights = problem.spans * problem.k * problem.n * some
        return problem.rows * problem.k * width(problem.lhs) + weights * width(problem.rhs) + result_bytes(problem)
    read = problem.rows * (problem.k * width(problem.lhs) + problem.n * width(problem.rhs))
    return read + result_bytes(problem)


def result_bytes(problem: Problem) -> float:
    """The bytes of the result."""
    return math.prod(problem.out_shape) * width(problem.out)


def speed(problem: Problem, card: Card, layout: Layout) -> float:
    """The speed of a tile's products, relative to the largest tiles' in bfloat16."""
    dtype = mma_dtype(problem)
    by_dtype = {1: 2.0, 2: 1.0, 4: 0.5}[dtype.itemsize]
    if dtype.itemsize == 4 and precision(problem, card.arch) != "tf32":
        by_dtype /= 3
    if dtype != problem.rhs or dtype != problem.lhs:  # one is converted in registers
        by_dtype *= 0.6
    area = min(1.0, (layout.block_m * layout.block_n / 32768) ** AREA)
    if _from_shared(card, layout.block_m) or card.arch.split(".")[0] not in ("9", "10"):
        return by_dtype * area
    return (
        by_dtype * area * 0.6 * (9 if card.arch.startswith("9") else 4) / 10
    )  # mma.sync on tensor cores made for more
