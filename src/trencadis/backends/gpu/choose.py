"""Which layout: from what a problem is bound by, and what fits into a multiprocessor.

    turned tiles   192 x 256   rows as columns of instructions: the least padding (ADR 0027)
    small ones      64 x 256   the most bytes of weights under way; where reading them is what takes the time
    packed ones    192 x 128   and less tall: weights of few bits, which take shared memory twice
    tall tiles     256 x 192   where there is no padding to speak of, or the result is float32; contraction
    lesser ones    128 x 128   and sizes in between: where there are too few tiles to keep all multiprocessors at work

The figures behind the choice are in docs/performance.md.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from trencadis.backends.gpu.layout import BLOCK, CONSUMERS, LINE, TOLD, UNIT, WIDENED, Layout, line
from trencadis.core.devices import Card
from trencadis.core.dtypes import bits
from trencadis.core.problem import Form, Problem
from trencadis.core.tiling import Tiling

DEEPEST = 8  # stages; more of them hide nothing more
TALL = 256  # rows of a tile, and
WIDE = 192  # columns, or in turned tiles the other way round: two consumers have registers for no more sums
WIDEST = {Form.ROWS: 256, Form.CONTRACTION: WIDE}  # columns of one instruction; a blanker leaves registers for fewer
BLOCKED = 128  # columns of a tile whose scales change along the sum: those of one block
PACKED = 128  # columns of a tile whose weights are widened
FEW = 64  # rows of a group that make one block: reading its weights is all there is to do
FEWER = 16  # rows that make one unit
LARGE = 1024  # rows of a group above which it hardly matters how its last tile is cut
HOT = 2  # contraction is prepared for a group that has half of the rows: one tile sums over all of them
CLAIMS = 10**11  # operations from which on it pays to give out tiles one by one: that costs one small kernel

# time for the same work in tiles of each size, over that in the largest: what is smaller reads more
PACES: dict[Form, dict[tuple[int, int], float]] = {
    Form.ROWS: {(TALL, WIDE): 1.0, (TALL, 128): 1.03, (128, 256): 1.1, (128, 128): 1.15},
    Form.CONTRACTION: {(TALL, WIDE): 1.0, (TALL, 128): 1.035, (128, WIDE): 1.07, (128, 128): 1.11},
}


@functools.lru_cache(maxsize=1024)
def choose(problem: Problem, card: Card) -> Layout:
    """The layout for a problem."""
    return _layout(problem, card, *_tile(problem, card.cores))


def obey(problem: Problem, card: Card, tiling: Tiling) -> Layout:
    """The layout nearest to a tile that a caller asks for: no larger, if the machine has one that small."""
    widest = WIDEST[problem.form]
    tall, wide = (tiling.m if problem.form is Form.ROWS else tiling.k), tiling.n
    if packed(problem):
        return _layout(problem, card, *_packed_tile(problem, tall))
    if _turned(problem) and tall < TALL and wide >= widest:
        return _layout(problem, card, max(tall // BLOCK * BLOCK, BLOCK), widest)
    if problem.epilogue.blocks:
        return _layout(problem, card, CONSUMERS * BLOCK, BLOCKED)
    tall = TALL if tall >= TALL else BLOCK * CONSUMERS
    widest = min(widest, TALL * WIDE // tall)
    wide = max(min(wide, widest) // BLOCK * BLOCK, BLOCK)
    return _layout(problem, card, tall, wide)


def tiling_of(problem: Problem, layout: Layout) -> Tiling:
    """A layout in the units of the caller."""
    if problem.form is Form.ROWS:
        return Tiling(layout.tall, layout.deep, layout.wide)
    return Tiling(layout.deep, layout.tall, layout.wide)


def reason(problem: Problem, layout: Layout, card: Card) -> str:
    """The figures behind a layout: its tiles, how many waves of them there are, and how they are scheduled."""
    across = -(-problem.n // layout.wide)
    if problem.form is Form.ROWS:  # the last tile of a group is half full, on average
        tiles = (problem.rows / layout.tall + problem.spans / 2) * across
    else:
        tiles = problem.spans * -(-problem.k // layout.tall) * across
    swapped = "swap-AB " if layout.turned else ""
    order = "dynamic" if layout.claim else "static"
    return (
        f"{layout.tall} x {layout.wide} {swapped}tiles, {tiles / card.cores:.2f} waves of {card.cores} SMs, "
        f"{layout.stages} stages of {layout.deep} along the sum, {order} persistent scheduling"
    )


def _tile(problem: Problem, cores: int) -> tuple[int, int]:
    """Rows and columns of a tile of the result."""
    if packed(problem):
        return _packed_tile(problem, 2 * UNIT if problem.m / problem.groups <= FEWER else WIDE)
    if problem.epilogue.blocks:  # their sums take registers twice
        return CONSUMERS * BLOCK, BLOCKED
    if problem.n <= 128:
        return TALL, BLOCK if problem.n <= BLOCK else 128
    rows = problem.m / problem.groups
    if _turned(problem):
        return BLOCK if rows <= FEWER else 128 if rows <= FEW else WIDE, WIDEST[Form.ROWS]
    if rows <= FEW:
        return (128, 256) if problem.form is Form.ROWS else (TALL, 128)
    # weights stored with k last come in lines from as many rows as a tile is wide: the more of them, the better
    if problem.form is Form.ROWS and problem.transpose_rhs and rows >= LARGE:
        return 128, 256
    return min(PACES[problem.form], key=lambda tile: _time(problem, cores, *tile))


def _packed_tile(problem: Problem, tall: int) -> tuple[int, int]:
    """A tile of at most so many rows, if there is one, whose weights are packed."""
    if _turned(problem):
        most = WIDE if problem.transpose_rhs else 2 * BLOCK  # beside weights that are widened in shared memory
        return min(max(tall // UNIT * UNIT, UNIT), most), PACKED
    return CONSUMERS * BLOCK, PACKED if problem.n > BLOCK else BLOCK


def _time(problem: Problem, cores: int, tall: int, wide: int) -> float:
    """How long the busiest multiprocessor multiplies, in units that do not depend on the tile."""
    pace = PACES[problem.form][tall, wide] * tall * wide
    if problem.form is Form.ROWS:  # each group's last tile is half full, on average
        tiles = (problem.rows / tall + problem.spans / 2) * problem.n / wide
        return math.ceil(tiles / cores) * pace * problem.k
    each, hot = problem.m / problem.groups, problem.m / min(HOT, problem.groups)
    tiles = problem.spans * math.ceil(problem.k / tall) * problem.n / wide
    return max(math.ceil(tiles / cores) * each, hot) * pace  # a tile's sum is as long as its group


def _turned(problem: Problem) -> bool:
    """Whether padding is worth avoiding, and the result is of a width that an instruction transposes on its way out."""
    if problem.epilogue.blocks:
        return False
    rows = 0 if packed(problem) else problem.m / problem.groups
    return problem.form is Form.ROWS and problem.out.itemsize == 2 and problem.n > 128 and rows < LARGE


def multiplied(problem: Problem) -> np.dtype[Any]:
    """The dtype in which the operands are multiplied: their own, or one that holds both.

    A float32 operand that meets a bfloat16 one is taken as the sum of two of those (ADR 0026).
    """
    kinds = {problem.lhs.name, problem.rhs.name}
    if len(kinds) == 1:
        return problem.lhs
    if split(problem):
        return np.dtype(jnp.bfloat16)
    if "float32" in kinds or kinds == {"bfloat16", "float16"}:
        return np.dtype(np.float32)
    return np.dtype(np.float16 if "float16" in kinds else jnp.bfloat16)  # either holds all numbers of 8 bits


def packed(problem: Problem) -> bool:
    """Whether weights are widened by the kernel: those that no instruction multiplies with rows of 16 bits."""
    narrow = problem.rhs.name in ("int8", "int4", "float8_e4m3fn", "float8_e5m2")
    return problem.form is Form.ROWS and problem.lhs == jnp.bfloat16 and narrow


def split(problem: Problem) -> str:
    """The operand that is taken as a sum of two, if there is one."""
    kinds = (problem.lhs.name, problem.rhs.name)
    return {("float32", "bfloat16"): "lhs", ("bfloat16", "float32"): "rhs"}.get(kinds, "")


def _layout(problem: Problem, card: Card, tall: int, wide: int) -> Layout:
    dtype, narrow = multiplied(problem), packed(problem)
    lines = _lines(problem)
    turned = _turned(problem) and (narrow or wide == WIDEST[Form.ROWS])
    widened = narrow and not (turned and problem.transpose_rhs)  # a factor in registers is the first, with k last
    deep = _deep(problem, lines, tall > BLOCK or widened)
    stage = deep * (tall * bits(dtype) + wide * bits(problem.rhs if narrow else dtype)) // 8
    slots, buffer = (1, tall) if turned else (_slots(problem, wide), BLOCK)
    besides = _besides(problem, wide, slots, buffer) + widened * WIDENED * deep * wide * dtype.itemsize
    stages = min((card.shared - besides) // stage, DEEPEST)
    operations = 2 * problem.rows * problem.k * problem.n
    return Layout(
        tall=tall,
        wide=wide,
        deep=deep,
        stages=stages,
        panel=8 if tall > 128 else 16,
        blocks=card.cores,
        lines=lines,
        slots=slots,
        split=split(problem),
        turned=turned,
        packed=narrow,
        widened=widened,
        flat=dtype.itemsize != 2,
        claim=operations >= CLAIMS,
    )


def _deep(problem: Problem, lines: int, short: bool) -> int:
    """Entries of the sum in one step: a line of each operand, and two of rows, or more, whose weights are packed."""
    if packed(problem):
        return 2 * line(problem.lhs) if short else line(problem.rhs)
    return line(multiplied(problem), LINE if problem.form is Form.ROWS else lines)


def _lines(problem: Problem) -> int:
    """Bytes of a line of operands that are stored with the axis of the sum last, and of others."""
    size = multiplied(problem).itemsize
    if size == 2:
        return LINE
    if problem.form is Form.CONTRACTION:
        return LINE // 2 if size == 1 else LINE
    return LINE // 2 if problem.k * size % LINE == LINE // 2 else LINE


def _slots(problem: Problem, wide: int) -> int:
    """Buffers on the way out: a row of them, half of one, or two where what they are added to is fetched into them."""
    most = 4 if problem.epilogue.accumulate else 3
    lines = wide // line(problem.out)
    return max(slots for slots in range(1, most + 1) if lines % slots == 0 or slots % lines == 0)


def _besides(problem: Problem, wide: int, slots: int, rows: int) -> int:
    """Bytes of shared memory that are not stages. Buffers have so many rows; arrays start at multiples of 1024."""
    staged = CONSUMERS * slots * rows * LINE
    epilogue = problem.epilogue
    vectors = [4 * TALL] * epilogue.by_row + [4 * wide] * epilogue.by_column
    if epilogue.blocks:  # scales of the rows of each stage, and of the weights of all steps
        vectors = [2 * BLOCK * DEEPEST * 4 // CONSUMERS, 4 * -(-problem.k // epilogue.blocks) + 128]
    vectors += [] if epilogue.bias is None else [wide * epilogue.bias.itemsize]
    noted = sum(-(-CONSUMERS * size // 1024) * 1024 for size in vectors)
    barriers = 8 * (4 * DEEPEST + 2 * WIDENED + 2 * TOLD + (1 + slots) * CONSUMERS + 1)
    return staged + noted + 1024 + barriers
