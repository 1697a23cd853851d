"""The choice of a layout, from what bounds a problem and from what fits into an SM.

    swap-AB tiles     192 x 256   rows are the N of wgmma, in units of 16: the least padding (ADR 0027)
    for small groups   64 x 256   the most bytes of weights in flight, where reading them is what takes the time
    with an upcast    192 x 128   low-precision weights; 176 rows of those of 8 bits whose sums are promoted
                      192 x 192   if they are multiplied by scales along k, by three consumers
                       32 x 192   the same for few rows of a group
                       32 x 256   if they are 4-bit floats for few rows, by four
                       16 x 128   weights of 4 bits for the fewest rows, two tiles at a time by two pipelines
    large tiles       256 x 192   where there is little padding or the result is float32, and in contractions
    smaller tiles     128 x 128   and sizes in between, where there are too few tiles to occupy all SMs

The measurements behind the choice are in docs/performance/gpu.md.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from trencadis.backends.gpu.layout import (
    CONSUMERS,
    QUEUE_SLOTS,
    REWRITE_STAGES,
    SCALE_BLOCK,
    SHORT_PART,
    SLICE,
    SLICE_SLOTS,
    SWAP_AB_UNIT,
    SWIZZLE,
    WGMMA_M,
    Layout,
    swizzle_elements,
)
from trencadis.backends.gpu.parts import products
from trencadis.backends.gpu.scales import (
    column_scales_by_step,
    in_operand,
    needs_upcast,
    promoted_part,
    row_scales_of_step,
    shared_by_tile,
    steps_in_parts,
    transposes,
    unpacks,
    unpacks_in_registers,
)
from trencadis.core.devices import Card
from trencadis.core.dtypes import bits
from trencadis.core.epilogue import Gate
from trencadis.core.interleave import FLOAT4
from trencadis.core.problem import Form, Problem
from trencadis.core.tiling import Tiling

PLACE = 1024  # bytes: Mosaic places every array in shared memory at a multiple of these
MAX_STAGES = 8  # more stages hide no more latency
LARGE_M, LARGE_N = 256, 192  # the largest tile, exchanged in swap-AB: two consumers have registers for no more sums
MAX_N = {Form.ROWS: 256, Form.CONTRACTION: LARGE_N}  # of one wgmma; a mask warpgroup leaves fewer registers
PULLBACK_M = 160  # rows of a tile with the pullback of a gated activation
PROMOTED_M = 176  # rows of a tile with 8-bit weights that are upcast beside promoted sums
SHORTER_K = 192  # entries of k in a step of 4-bit weights, where that divides k and 256 does not: 2880
PARTS_OF_STEP = 3, 2, 1  # parts of a step that are unpacked one after the other, of mxfp4 weights for the fewest rows
UPCAST_N = 128  # columns of a tile whose weights are upcast or transposed
SMALL_GROUP = 64  # mean rows of a group up to which the product is bound by reading weights
TINY_GROUP = 16  # mean rows of a group up to which the smallest tiles do
FEW_ROWS, FEW_SUMMED = 16, 8  # mean rows of a group up to which Triton's kernels were faster on an H200
THIN, THIN_SUMMED = 16, 512  # the same of a contraction with few columns of lhs, such as the gradient of a bias
LARGE_GROUP = 1024  # mean rows of a group from which on the padding of its last tile hardly matters
HOT_SHARE = 2  # contraction: prepare for a group that has 1/2 of all rows, which one CTA must sum up for each tile
DYNAMIC_FLOPS = 10**11  # from here on dynamic scheduling pays for its counter, which one small kernel clears

# the time for the same work in tiles of each size, relative to the largest; smaller tiles read operands more often
RELATIVE_TIME: dict[Form, dict[tuple[int, int], float]] = {
    Form.ROWS: {(LARGE_M, LARGE_N): 1.0, (LARGE_M, 128): 1.03, (128, 256): 1.1, (128, 128): 1.15},
    Form.CONTRACTION: {(LARGE_M, LARGE_N): 1.0, (LARGE_M, 128): 1.035, (128, LARGE_N): 1.07, (128, 128): 1.11},
}


@functools.lru_cache(maxsize=1024)
def choose(problem: Problem, card: Card) -> Layout:
    """The layout that is expected to be the fastest for a problem on a GPU."""
    if problem.gate is not None and problem.gate.activation is None:
        plain, card, changes = _without_gate(problem, problem.gate, card)
        layout = choose(plain, card)
        if problem.gather is not None and layout.block_m < LARGE_M:  # or tiles wait for their tokens too often
            layout = choose_for_tile(plain, card, Tiling(layout.block_k, LARGE_M, layout.block_n))
        return layout.replace(**changes)
    return _layout(problem, card, *_tile(problem, card.cores))


def choose_for_tile(problem: Problem, card: Card, tiling: Tiling) -> Layout:
    """The layout nearest to a tile that the caller asks for: no larger than it, unless the smallest one is."""
    if problem.gate is not None and problem.gate.activation is None:
        plain, card, changes = _without_gate(problem, problem.gate, card)
        return choose_for_tile(plain, card, tiling).replace(**changes)
    max_n = MAX_N[problem.form]
    block_m, block_n = (tiling.m if problem.form is Form.ROWS else tiling.k), tiling.n
    if needs_upcast(problem):
        return _layout(problem, card, *_upcast_tile(problem, block_m))
    if problem.gate is not None:
        return _layout(problem, card, *_gated_tile(problem, max(block_m // WGMMA_M * WGMMA_M, WGMMA_M)))
    if (transposes(problem) or unpacks(problem)) and not promoted_part(problem):
        return _layout(problem, card, *_rewrite_tile(problem, block_m))
    if _swap_ab(problem) and block_m < LARGE_M and block_n >= max_n:
        return _layout(problem, card, max(block_m // WGMMA_M * WGMMA_M, WGMMA_M), max_n)
    if promoted_part(problem):
        return _layout(problem, card, CONSUMERS * WGMMA_M, SCALE_BLOCK)
    block_m = LARGE_M if block_m >= LARGE_M else WGMMA_M * CONSUMERS
    max_n = min(max_n, LARGE_M * LARGE_N // block_m)
    block_n = max(min(block_n, max_n) // WGMMA_M * WGMMA_M, WGMMA_M)
    return _layout(problem, card, block_m, block_n)


def _without_gate(problem: Problem, gate: Gate, card: Card) -> tuple[Problem, Card, dict[str, bool]]:
    """The plain problem with as much work as one without an activation, what it has of a card, and of its layout.

    A sum goes on over another k. Two results are as many tiles as those of twice the groups.
    """
    if problem.form is Form.ROWS:
        return problem.replace(gate=None, k=2 * problem.k), card, {"pairs": True}
    card = dataclasses.replace(card, shared=card.shared - (0 if gate.gather is None else PLACE))
    plain = problem.replace(gate=None, local_groups=problem.local_groups * (1 + gate.pair))
    return plain, card, {"two_results": gate.pair}


def tiling_of(problem: Problem, layout: Layout) -> Tiling:
    """The tile of a layout in the caller's units of m, k and n."""
    if problem.form is Form.ROWS:
        return Tiling(layout.block_m, layout.block_k, layout.block_n)
    return Tiling(layout.block_k, layout.block_m, layout.block_n)


def reason(problem: Problem, layout: Layout, card: Card) -> str:
    """The figures behind a layout: its tiles, how many waves of them there are, and how they are scheduled."""
    across = -(-problem.n // layout.block_n)
    if problem.form is Form.ROWS:  # the last tile of a group is half full, on average
        tiles = (problem.rows / layout.block_m + problem.spans / 2) * across
    else:
        tiles = problem.spans * -(-problem.k // layout.block_m) * across
    swapped = "swap-AB " if layout.swap_ab else ""
    order = "dynamic" if layout.dynamic else "static"
    waves, each = tiles / card.cores / layout.pipelines, " with two pipelines" if layout.pipelines == 2 else ""
    return (
        f"{layout.block_m} x {layout.block_n} {swapped}tiles, {waves:.2f} waves of {card.cores} SMs{each}, "
        f"{layout.stages} stages of {layout.block_k} along the sum, {order} persistent scheduling"
    )


def few_rows(problem: Problem, layout: Layout) -> bool:
    """Whether groups have so few rows that Triton's kernels, of which an SM holds several, move more bytes.

    Both are bound by memory there: by the weights, which must be stored K-major, or by the result of a contraction, or
    if that is thin by its rhs. Triton splits float32 rows into parts in registers.
    """
    if len(products(problem)) > 2:
        return problem.m <= FEW_ROWS * problem.groups
    if problem.gate is not None or layout.upcast or {problem.lhs.itemsize, problem.rhs.itemsize} != {2}:
        return False
    if problem.form is Form.CONTRACTION:
        return problem.m <= (THIN_SUMMED if problem.k <= THIN else FEW_SUMMED) * problem.groups
    return problem.transpose_rhs and problem.m <= FEW_ROWS * problem.groups


def mma_dtype(problem: Problem) -> np.dtype[Any]:
    """The dtype in which operands are multiplied: their own, or one that holds the values of both.

    A float32 operand beside a bfloat16 one is multiplied as its bfloat16 parts (ADR 0026), and so are precise sums.
    """
    kinds = {problem.lhs.name, problem.rhs.name}
    if len(products(problem)) > 1:
        return np.dtype(jnp.bfloat16)
    if len(kinds) == 1:
        return problem.lhs
    if unpacks(problem) or unpacks_in_registers(problem):
        return problem.lhs
    if "float32" in kinds or kinds == {"bfloat16", "float16"}:
        return np.dtype(np.float32)
    return np.dtype(np.float16 if "float16" in kinds else jnp.bfloat16)  # either holds every 8-bit number


# ---------------------------------------------------------------------------------------------------------------------
# The tile


def _tile(problem: Problem, cores: int) -> tuple[int, int]:
    """The rows and columns of a tile of the result."""
    if needs_upcast(problem):
        return _upcast_tile(problem, _upcast_rows(problem))
    if promoted_part(problem):  # promoted sums take as many registers again as the accumulators
        return CONSUMERS * WGMMA_M, SCALE_BLOCK
    rows = problem.m / problem.groups
    tall = WGMMA_M if rows <= TINY_GROUP else 128 if rows <= SMALL_GROUP else LARGE_N
    if problem.gate is not None:
        return _gated_tile(problem, tall)
    if transposes(problem) or unpacks(problem):
        return _rewrite_tile(problem, tall if _swap_ab(problem) else LARGE_M)
    if problem.n <= 128:
        return LARGE_M, WGMMA_M if problem.n <= WGMMA_M else 128
    if _swap_ab(problem):
        return tall, MAX_N[Form.ROWS]
    if rows <= SMALL_GROUP:
        return (128, 256) if problem.form is Form.ROWS else (LARGE_M, 128)
    # K-major weights are read in swizzle rows from as many rows of memory as a tile has columns: the more, the better
    if problem.form is Form.ROWS and problem.transpose_rhs and rows >= LARGE_GROUP:
        return 128, 256
    return min(RELATIVE_TIME[problem.form], key=lambda tile: _estimated_time(problem, cores, *tile))


def _rewrite_tile(problem: Problem, block_m: int) -> tuple[int, int]:
    """The tile for weights that are transposed, or unpacked to 8 bits, of at most so many rows if that is possible."""
    if _swap_ab(problem):
        return min(max(block_m // WGMMA_M * WGMMA_M, WGMMA_M), LARGE_N), UPCAST_N
    return LARGE_M if block_m >= LARGE_M else CONSUMERS * WGMMA_M, UPCAST_N


def _upcast_rows(problem: Problem) -> int:
    """The rows of a tile whose weights are upcast: few for small groups, which leaves memory for more stages."""
    rows = problem.m / problem.groups
    if rows <= SWAP_AB_UNIT // 2 and bits(problem.rhs) == 4:
        return SWAP_AB_UNIT
    return 2 * SWAP_AB_UNIT if rows <= TINY_GROUP else LARGE_N


def _upcast_tile(problem: Problem, block_m: int) -> tuple[int, int]:
    """The tile for weights that are upcast, of at most this many rows unless the smallest has more."""
    if _swap_ab(problem):
        most = _most_upcast_rows(problem)
        # scales of rows in a step are copied by TMA, to a multiple of 128 bytes
        unit = 2 * SWAP_AB_UNIT if problem.epilogue.row_block else SWAP_AB_UNIT
        block_m = min(max(block_m // unit * unit, unit), most)
        return block_m, _upcast_consumers(problem, block_m) * WGMMA_M
    return CONSUMERS * WGMMA_M, UPCAST_N if problem.n > WGMMA_M else WGMMA_M


def _most_upcast_rows(problem: Problem) -> int:
    """The most rows of a tile whose weights are upcast: less beside weights that are rewritten in shared memory.

    Sums that are promoted take as many registers again, which are there. Weights of 8 bits have a third stage if rows
    are a few less, which was worth more than these rows unless rows have scales, too. Short parts were not measured.
    """
    part = promoted_part(problem)
    if not problem.transpose_rhs or part % (2 * WGMMA_M):
        return 2 * WGMMA_M
    return PROMOTED_M if part and bits(problem.rhs) == 8 and not problem.epilogue.row_block else LARGE_N


def _upcast_consumers(problem: Problem, block_m: int) -> int:
    """The number of consumers of weights that are upcast, each of which unpacks 64 columns.

    More than two are worth it where weights are multiplied by their scales: for few rows, where unpacking takes the
    time, four of 4-bit floats and three of 8 bits, and for many rows three. Promoted sums would leave them too few
    registers. Each of two pipelines has two.
    """
    if promoted_part(problem) or not in_operand(problem) or not problem.transpose_rhs or not _swap_ab(problem):
        return CONSUMERS
    if _pipelines(problem, block_m) > 1:
        return CONSUMERS
    if block_m <= 2 * SWAP_AB_UNIT:
        return 4 if problem.rhs.name == FLOAT4 else 3 if bits(problem.rhs) == 8 else CONSUMERS
    return 3 if block_m > WGMMA_M else CONSUMERS


def _pipelines(problem: Problem, block_m: int) -> int:
    """The pipelines of a CTA: two where weights of 4 bits are upcast in registers for few rows.

    One stores its tile, or waits for the scales of the next one, while the other multiplies; and SMs are busy for more
    equal times, since tiles are half as wide as those of four consumers. Weights of 8 bits are bound by reading them.
    """
    in_registers = needs_upcast(problem) and problem.transpose_rhs and _swap_ab(problem)
    return 2 if in_registers and bits(problem.rhs) == 4 and block_m <= SWAP_AB_UNIT else 1


def _estimated_time(problem: Problem, cores: int, block_m: int, block_n: int) -> float:
    """The time for which the busiest SM multiplies, in units that do not depend on the tile."""
    per_row = RELATIVE_TIME[problem.form][block_m, block_n] * block_m * block_n
    if problem.form is Form.ROWS:  # each group's last tile is half full, on average
        tiles = (problem.rows / block_m + problem.spans / 2) * problem.n / block_n
        return math.ceil(tiles / cores) * per_row * problem.k
    mean, hot = problem.m / problem.groups, problem.m / min(HOT_SHARE, problem.groups)
    tiles = problem.spans * math.ceil(problem.k / block_m) * problem.n / block_n
    return max(math.ceil(tiles / cores) * mean, hot) * per_row  # the sum of a tile is as long as its group


def _gated_tile(problem: Problem, block_m: int) -> tuple[int, int]:
    """The tile with a gated activation, of at most this many rows: gate and up share the columns of other tiles.

    A pullback is computed beside all sums of a tile, so that these take fewer registers.
    """
    assert problem.gate is not None
    columns = MAX_N[Form.ROWS]
    return (min(block_m, PULLBACK_M), columns) if problem.gate.pullback else (min(block_m, LARGE_N), columns // 2)


def _swap_ab(problem: Problem) -> bool:
    """Whether to swap operands: padding is worth avoiding, and the result is 16 bits wide, as `stmatrix` transposes."""
    if problem.gate is not None:
        return True
    if promoted_part(problem) and not needs_upcast(problem):
        return False
    rows = 0 if needs_upcast(problem) else problem.m / problem.groups
    return problem.form is Form.ROWS and problem.out.itemsize == 2 and problem.n > 128 and rows < LARGE_GROUP


# ---------------------------------------------------------------------------------------------------------------------
# From the tile to the layout


def _layout(problem: Problem, card: Card, block_m: int, block_n: int) -> Layout:
    """The layout with this tile and as many stages as fit into shared memory."""
    dtype, upcast = mma_dtype(problem), needs_upcast(problem) or unpacks(problem)
    swizzle = _swizzle(problem)
    transpose = transposes(problem)
    gated, pullback = (problem.gate is not None and problem.gate.pullback is back for back in (False, True))
    swap_ab = _swap_ab(problem) and (upcast or gated or block_n == (UPCAST_N if transpose else MAX_N[Form.ROWS]))
    # RS wgmma takes weights from registers only as operand A, K-major
    in_smem = unpacks(problem) or (upcast and not (swap_ab and (problem.transpose_rhs or transpose)))
    transpose = transpose and not in_smem
    consumers, pipelines = _upcast_consumers(problem, block_m), _pipelines(problem, block_m)
    part_k = _block_k(problem, swizzle, block_m > WGMMA_M or in_smem)
    block_k = part_k * (_parts_of_step(problem, part_k) if pipelines > 1 else 1)
    stage = block_k * (block_m * bits(dtype) + (1 + gated) * block_n * bits(problem.rhs if upcast else dtype)) // 8
    buffers, rows = (1, block_m) if swap_ab else (_store_buffers(problem, block_n), WGMMA_M)
    rows = 3 * SLICE_SLOTS * SLICE if pullback else rows
    others = _shared_beside_stages(problem, block_n, buffers, rows, consumers * pipelines)
    others += in_smem * REWRITE_STAGES * block_k * block_n * dtype.itemsize
    others += transpose * REWRITE_STAGES * block_k * block_n
    flops = 2 * problem.rows * problem.k * problem.n * (1 + gated)
    return Layout(
        block_m=block_m,
        block_n=block_n,
        block_k=block_k,
        part_k=part_k if block_k > part_k else 0,
        stages=min((card.shared - others) // (stage * pipelines), MAX_STAGES),
        raster_group=8 if block_m > 128 or (problem.transpose_rhs and dtype.itemsize == 2 and not swap_ab) else 16,
        num_ctas=card.cores,
        consumers=consumers,
        pipelines=pipelines,
        swizzle=swizzle,
        store_buffers=buffers,
        products=products(problem),
        swap_ab=swap_ab,
        upcast=upcast,
        upcast_in_smem=in_smem,
        transpose_in_smem=transpose,
        gated=gated,
        epilogue_steps=block_n // WGMMA_M if pullback else 0,
        promoted=promoted_part(problem) > 0,
        k_major=dtype.itemsize != 2 and not transpose,
        dynamic=flops >= DYNAMIC_FLOPS,
    )


def _block_k(problem: Problem, swizzle: int, short: bool) -> int:
    """The entries of the sum in one step: a swizzle row of the operands.

    Where weights are upcast it is two swizzle rows of lhs if steps are to be short, and otherwise one of the weights.
    """
    part = promoted_part(problem)
    if part % (2 * WGMMA_M) and part != SHORT_PART and not steps_in_parts(problem):
        return WGMMA_M
    if needs_upcast(problem) and not unpacks_in_registers(problem):
        # beside promoted sums, registers hold scales of rows or longer steps
        short = short or problem.epilogue.row_block > 0
        if not short and _whole_steps(problem, SHORTER_K):
            return SHORTER_K
        return 2 * swizzle_elements(problem.lhs) if short else swizzle_elements(problem.rhs)
    return swizzle_elements(mma_dtype(problem), SWIZZLE if problem.form is Form.ROWS else swizzle)


def _parts_of_step(problem: Problem, part_k: int) -> int:
    """The parts of a step, of which the weights of one are unpacked at a time, where there are two pipelines.

    The fewer steps, the fewer instructions that wait for stages and release them. Steps divide k. Those of nvfp4, which
    has twice the scales, were slower on an H200.
    """
    if not in_operand(problem) or problem.epilogue.column_scales != jnp.float8_e8m0fnu:
        return 1
    return next(parts for parts in PARTS_OF_STEP if problem.k % (parts * part_k) == 0 or parts == 1)


def _whole_steps(problem: Problem, block_k: int) -> bool:
    """Whether steps of this length divide k, and those of a swizzle row of the weights do not.

    Weights are multiplied by their scales in the operand, and a step starts with a whole word of them.
    """
    if not in_operand(problem) or bits(problem.rhs) != 4 or problem.k % swizzle_elements(problem.rhs) == 0:
        return False
    length = problem.epilogue.column_block[0]
    scales = -(-problem.k // length)
    return problem.k % block_k == 0 and block_k % length == 0 and block_k // length % math.gcd(scales, 4) == 0


def _swizzle(problem: Problem) -> int:
    """The bytes of a swizzle row of the operands; half of the usual where that wastes less of K-major operands."""
    size = mma_dtype(problem).itemsize
    if size == 2:  # so that a part of a step is whole swizzle rows
        return SWIZZLE // 2 if promoted_part(problem) == SHORT_PART else SWIZZLE
    if problem.form is Form.CONTRACTION:
        return SWIZZLE // 2 if size == 1 else SWIZZLE
    short = size == 1 and promoted_part(problem) % SWIZZLE and not steps_in_parts(problem)
    half = problem.k * size % SWIZZLE == SWIZZLE // 2 or short
    return SWIZZLE // 2 if half else SWIZZLE


def _store_buffers(problem: Problem, block_n: int) -> int:
    """The number of store buffers of a consumer, each a swizzle row wide, into which a tile divides evenly.

    There are at most three, or four where existing_out is loaded into them.
    """
    most = 4 if problem.epilogue.accumulate else 3
    rows = block_n // swizzle_elements(problem.out)
    return max(count for count in range(1, most + 1) if rows % count == 0 or count % rows == 0)


def _shared_beside_stages(problem: Problem, block_n: int, buffers: int, rows: int, consumers: int) -> int:
    """The bytes of shared memory beside the stages: store buffers of this many rows, vectors, queue and barriers."""
    stored = consumers * buffers * rows * SWIZZLE
    epilogue = problem.epilogue
    along_k = epilogue.column_block[0]
    vectors = [4 * LARGE_M] * (epilogue.by_row and not epilogue.row_block)
    vectors += [4 * block_n] * (epilogue.by_column and not along_k)
    vectors += [4 * -(-problem.k // along_k) + 128] if shared_by_tile(problem) else []
    by_step = [2 * WGMMA_M * row_scales_of_step(problem, 2 * WGMMA_M)] + [block_n] * column_scales_by_step(problem)
    vectors += [4 * MAX_STAGES * length // consumers for length in by_step]
    vectors += [] if epilogue.bias is None else [block_n * epilogue.bias.itemsize] * (1 if problem.gate is None else 2)
    vectors += [4 * LARGE_M] * (problem.gate is not None and problem.gate.pullback)
    vectors += [PLACE // consumers] * (problem.gather is not None)  # the barriers of gathered rows
    loaded = sum(-(-consumers * size // PLACE) * PLACE for size in vectors)
    barriers = 8 * (4 * MAX_STAGES + 2 * REWRITE_STAGES + 4 * QUEUE_SLOTS + (1 + buffers) * consumers + 1)
    return stored + loaded + PLACE + barriers
