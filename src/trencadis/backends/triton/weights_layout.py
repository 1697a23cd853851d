"""Products of 16-bit rows and low-precision weights: which of them the kernel takes, in what layout, and its call."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from trencadis.backends.prepare import pad_to, round_up
from trencadis.backends.triton.activation import source
from trencadis.backends.triton.choose import (
    HBM,
    L2,
    LATENCY,
    LAUNCH,
    OVERLAP,
    RATE,
    REGISTERS,
    moved_bytes,
    tile_count,
)
from trencadis.backends.triton.layout import Layout
from trencadis.backends.triton.tile_scheduler import most_tiles, tiles
from trencadis.backends.triton.unpack import product, unpack, unpack_words
from trencadis.core.devices import Card
from trencadis.core.dtypes import bits, width
from trencadis.core.problem import Form, Problem
from trencadis.core.tiling import Tiling

Array = jax.Array

ROWS = ("bfloat16", "float16")
RESULTS = (*ROWS, "float32")
# significant bits of the values, and of scales that are bytes
DIGITS = {"int8": 7, "int4": 3, "float8_e4m3fn": 4, "float8_e5m2": 3, "float4_e2m1fn": 2}
BYTES = {"float8_e8m0fnu": 0, "float8_e4m3fn": 4}
LEAST_K = 16  # entries of k of one product of the tensor cores
# block_m, block_n and warps
TILES = (
    (16, 64, 4), (16, 64, 2), (16, 128, 4), (16, 128, 8), (32, 64, 4), (32, 64, 2), (32, 128, 4), (64, 64, 4),
    (64, 128, 4), (64, 128, 8), (128, 64, 4), (128, 128, 8), (256, 128, 8),
)  # fmt: skip
STEPS = (32, 64, 128, 256)  # of k, in bytes of weights
LONG_STEP = 32  # bytes of weights along k in a step: a shorter one reads parts of sectors of memory
MOST_BYTES = 4096  # of weights in a step, for each warp: they are unpacked in registers
MOST_BLOCKS = 4  # of k in a step that are scaled one by one
SHORT_BLOCK = 64  # bytes of weights: shorter blocks of scales are too short for a step
MOST_PROMOTED = 2048  # sums of a tile for each warp that are promoted: there are registers for no more
MOST_ROWS = 128  # of a tile beside interleaved weights: of more, an SM has one program, which waits for each product
STAGES = (3, 4, 5)
UNPACK = 2.8  # instructions for one weight
WORDS = 2.3  # for one that is interleaved
SCALE = 1.5  # more for one that is multiplied by its scale
BLOCK_SCALE = 72  # more for all weights that share a scale
FLOAT8 = 1.75  # more for one of float8, whose NaN stays NaN
PAIRS = 6.2  # more for wgmma and tcgen05, which programs of fewer than 4 warps do not use: bytes are loaded in pairs
PROMOTE = 0.56  # instructions for one sum of a block of k that is scaled and added up
LANES = 128  # instructions of an SM in a cycle
WAIT = 530  # cycles of a step of one program beside products and unpacking: each waits for the one before
STEP = 148  # cycles of a step of one program in which no other one runs
IN_TURN = 0.76  # of the shorter one of products and unpacking that other programs of an SM do not hide
WARPGROUP = 4  # warps
MOST_WARPS = 16  # of all programs that share an SM
OTHERS = 60  # registers of a thread beside its sums
FEW_WAVES = 4  # of tiles, from which on the last one is not counted as whole


def taken(problem: Problem) -> bool:
    """Whether the kernel multiplies a problem.

    >>> from trencadis.core.arguments import problem_of
    >>> plain = problem_of((64, 64), (2, 64, 64), dtype="bfloat16", transpose_rhs=True)
    >>> taken(plain), taken(plain.replace(rhs=np.dtype("int4")))
    (False, True)
    """
    return not refused(problem)


def refused(problem: Problem) -> str:
    """Why the kernel does not multiply a problem; nothing where it does."""
    epilogue = problem.epilogue
    if problem.form is not Form.ROWS or problem.lhs.name not in ROWS or problem.rhs.name not in DIGITS:
        return "it unpacks low-precision weights beside rows of bfloat16 or float16"
    if problem.out.name not in RESULTS or (epilogue.bias is not None and epilogue.bias.name not in RESULTS):
        return f"the result and bias are to be {', '.join(RESULTS)}"
    if bits(problem.rhs) == 4 and (problem.k % 2 or not problem.transpose_rhs):
        return "4-bit weights are unpacked where they are stored [g, n, k], and k is even"
    if epilogue.column_scales.name not in (*RESULTS, *BYTES):
        return f"scales of weights are {epilogue.column_scales.name}"
    if not list(_steps(problem)) or (problem.interleaved and epilogue.column_block[0] == 1):
        return f"scales change along k every {epilogue.part}"
    return ""


def in_factors(problem: Problem) -> bool:
    """Whether weights times their scales along k are exact in the dtype of the rows."""
    scales, digits = problem.epilogue.column_scales.name, DIGITS.get(problem.rhs.name, 24)
    if not problem.epilogue.column_block[0] or scales not in BYTES:
        return False
    if problem.lhs == np.float16:  # whose exponents reach products of 4-bit values and e4m3 scales, and no others
        return scales == "float8_e4m3fn" and bits(problem.rhs) == 4
    return digits + BYTES[scales] <= 8


def _steps(problem: Problem) -> Iterator[int]:
    """The entries of k that a step may have: whole blocks of scales, or parts of one."""
    length, pack = problem.epilogue.column_block[0], 8 // bits(problem.rhs)
    several = MOST_BLOCKS * length if LONG_STEP * pack <= length < SHORT_BLOCK * pack else 0
    most = STEPS[-1] * pack if in_factors(problem) else several
    for step in (LEAST_K, *STEPS):
        block_k = step * pack
        if problem.epilogue.row_block % block_k:
            continue
        if not length or length % block_k == 0 or (block_k % length == 0 and block_k <= most):
            yield block_k


def at_once(problem: Problem, layout: Layout) -> int:
    """The entries of k that are multiplied at once: a step, or a block of it whose sum is scaled."""
    length = problem.epilogue.column_block[0]
    return min(layout.block_k, length) if length and not in_factors(problem) else layout.block_k


def _scales_at_once(problem: Problem, layout: Layout) -> int:
    """The scales along k of what is multiplied at once: half of a step's where the nibbles of a byte have their own."""
    length = problem.epilogue.column_block[0]
    each = 8 // bits(problem.rhs) if length == 1 else 1
    return max(layout.block_k // max(length, 1) // each, 1)


def with_16_bit_rows(problem: Problem, card: Card) -> Problem:
    """The problem with 8-bit rows as bfloat16, which is exact, beside weights that this kernel is for."""
    if problem.form is not Form.ROWS or problem.lhs.itemsize > 1 or problem.rhs.name not in DIGITS:
        return problem
    unknown = not card.float8 and any(x.name.startswith("float8") for x in (problem.lhs, problem.rhs))
    unpacked = problem.epilogue.along_k or bits(problem.rhs) == 4 or unknown
    return problem.replace(lhs=np.dtype(jnp.bfloat16)) if unpacked else problem


@functools.lru_cache(maxsize=1024)
def choose(problem: Problem, card: Card, tiling: Tiling | None = None) -> Layout:
    """The layout that is expected to be the fastest for a problem on a GPU, of those that a tile has room for."""
    some = list(candidates(problem, card))
    if tiling is not None:
        some = [one for one in some if _inside(one, tiling)] or [min(some, key=_volume)]
        return max(some, key=_volume)
    return min(some, key=lambda layout: (estimated_time(problem, card, layout), layout.stages))


def _inside(layout: Layout, tiling: Tiling) -> bool:
    return layout.block_m <= tiling.m and layout.block_n <= tiling.n and layout.block_k <= tiling.k


def _volume(layout: Layout) -> tuple[int, int, int]:
    return layout.block_m * layout.block_n, layout.block_k, layout.stages


def candidates(problem: Problem, card: Card) -> Iterator[Layout]:
    """All layouts of a problem whose stages fit into shared memory, and whose tile is not larger than it needs."""
    steps, pack = list(_steps(problem)), 8 // bits(problem.rhs)
    longest = max(problem.k, LONG_STEP * pack)
    steps = [step for step in steps if LONG_STEP * pack <= step <= longest] or steps[-1:]
    for block_m, block_n, warps in TILES:
        if (block_n > 64 and block_n >= 2 * problem.n) or (block_m > 16 and block_m >= 2 * problem.m):
            continue
        if problem.interleaved and (warps < WARPGROUP or block_m > MOST_ROWS):
            continue
        if _promoted(problem) and block_m * block_n > MOST_PROMOTED * warps:
            continue
        for block_k in steps:
            if block_n * block_k // pack > MOST_BYTES * warps:
                continue
            for stages in STAGES if card.platform == "cuda" else (2, 3):
                layout = Layout(block_m=block_m, block_n=block_n, block_k=block_k, warps=warps, stages=stages)
                if shared_memory(problem, card, layout) <= card.shared:
                    yield layout


def shared_memory(problem: Problem, card: Card, layout: Layout) -> int:
    """The bytes of shared memory for steps on their way, and for the unpacked weights of one where these go there."""
    rows, weights = layout.block_m * layout.block_k * 2, layout.block_n * layout.block_k
    steps = int(layout.stages * (rows + weights * width(problem.rhs)))
    return steps + 4096 + (0 if card.hopper else 2 * weights)  # wgmma takes them from registers


def estimated_time(problem: Problem, card: Card, layout: Layout) -> float:
    """The seconds that a kernel is expected to take, by the model of `choose` with the time to unpack weights."""
    steps, weights = math.ceil(problem.k / layout.block_k), layout.block_n * layout.block_k
    products = 2 * layout.block_m * weights / (card.mma_rate * RATE)
    unpacked = _instructions(problem, card, layout) / LANES
    loaded = (layout.block_m * layout.block_k * 2 + weights * width(problem.rhs)) / L2
    alone = max((products + unpacked + WAIT) / card.clock, LATENCY / (layout.stages - 1))
    shared = max(products, unpacked, loaded) + IN_TURN * min(products, unpacked) + STEP
    together = _programs_per_sm(problem, card, layout)
    wave = max(LATENCY + steps * alone, together * steps * shared / card.clock)
    count = tile_count(problem, layout) / (card.cores * together)
    waves = math.ceil(count) if count < FEW_WAVES else count + 0.5
    computed, moved = waves * wave, moved_bytes(problem) / (card.hbm * HBM)
    return max(computed, moved) + OVERLAP * min(computed, moved) + LAUNCH


def _instructions(problem: Problem, card: Card, layout: Layout) -> float:
    """The instructions of a step that unpack weights and scale sums."""
    pairs = layout.warps >= WARPGROUP and card.platform == "cuda" and card.arch.split(".")[0] in ("9", "10")
    each = UNPACK + PAIRS * pairs + FLOAT8 * problem.rhs.name.startswith("float8")
    if problem.interleaved:
        each = WORDS
    if in_factors(problem):
        each += SCALE + BLOCK_SCALE / problem.epilogue.column_block[0]
    scaled = layout.block_m * layout.block_n * _promoted(problem) * (layout.block_k // at_once(problem, layout))
    return layout.block_n * layout.block_k * each + PROMOTE * scaled


def _promoted(problem: Problem) -> bool:
    """Whether the sum of each block of k is scaled and added to other sums."""
    return problem.epilogue.row_block > 0 or (problem.epilogue.along_k and not in_factors(problem))


def _programs_per_sm(problem: Problem, card: Card, layout: Layout) -> int:
    """The programs of an SM that run side by side, by their shared memory, registers and threads.

    More of them than have room for their unpacked weights, too, were seen to be no faster.
    """
    threads = 32 * layout.warps
    sums = layout.block_m * layout.block_n // threads * (1 + _promoted(problem))
    by_registers = REGISTERS // (threads * min(255, sums + OTHERS))
    by_memory = card.shared // (
        shared_memory(problem, card, layout) + 2 * layout.block_n * layout.block_k * card.hopper
    )
    return max(1, min(by_memory, by_registers, MOST_WARPS // layout.warps))


def reason(problem: Problem, layout: Layout, card: Card) -> str:
    """The figures behind a layout, and where scales along k are applied."""
    waves = tile_count(problem, layout) / (card.cores * _programs_per_sm(problem, card, layout))
    where = ""
    if problem.epilogue.along_k:
        inside = in_factors(problem) and not problem.epilogue.row_block
        where = ", times their scales" if inside else "; scales multiply the sum of each block of k"
    return (
        f"{layout.block_m} x {layout.block_n} tiles of {layout.warps} warps, {waves:.2f} waves over {card.cores} "
        f"{card.units}, {layout.stages} stages of {layout.block_k} along k, weights unpacked in registers{where}; "
        f"{1e3 * estimated_time(problem, card, layout):.3g} ms by the model of the card"
    )


# ---------------------------------------------------------------------------------------------------------------------
# The call


def execute(problem: Problem, layout: Layout, arch: str, *operands: Array, interpret: bool = False) -> Array:
    """The result of a problem by a kernel of this layout, for an architecture or in the interpreter."""
    from trencadis.backends.triton import bridge, interpreter

    lhs, rhs, sizes, first, *extras = operands
    lhs = lhs.astype(problem.lhs)
    listed = tiles(problem, layout, sizes, first, arch, interpret=interpret)
    given = problem.epilogue.split(tuple(extras))
    if bits(problem.rhs) == 4 and not problem.interleaved:
        lhs = even_odd(lhs, at_once(problem, layout), layout.block_k)
    # a custom call takes packed values as they are; XLA would convert two of 4 bits to a byte in a pass over memory
    arrays: dict[str, Any] = {"lhs": lhs, "rhs": _interpreted(problem, rhs) if interpret else rhs, **given._asdict()}
    if problem.epilogue.column_block[0] and given.by_column is not None:
        scales = given.by_column.mT  # as they are stored
        arrays["scales"] = as_bytes(scales) if scales.dtype.itemsize == 1 else scales
    names = [name for name, _ in pointers(problem)]
    out = jax.ShapeDtypeStruct(problem.out_shape, problem.out)
    call = interpreter.call if interpret else bridge.call
    alias = len(names) - 2 if problem.epilogue.accumulate else None
    kernel = kernel_of(problem, layout, arch, interpret=interpret)
    grid = most_tiles(problem, layout) * -(-problem.n // layout.block_n)
    return call(kernel, grid, [*listed, *(arrays[name] for name in names[4:-1])], out, alias=alias)


def even_odd(x: Array, length: int, block_k: int) -> Array:
    """Rows of whole steps, with entries in the order of the kernel: in each block the even ones, then the odd ones.

    >>> even_odd(jnp.arange(6)[None], 4, 8)
    Array([[0, 2, 1, 3, 4, 0, 5, 0]], dtype=int32)
    """
    x = pad_to(x, (x.shape[0], round_up(x.shape[1], block_k)))
    return x.reshape(x.shape[0], -1, length // 2, 2).swapaxes(-1, -2).reshape(x.shape)


def as_bytes(x: Array) -> Array:
    """Numbers of 8 bits, or two of 4 along the last axis, as bytes."""
    if bits(x.dtype) == 4:
        x = x.reshape(*x.shape[:-1], -1, 2)
    return lax.bitcast_convert_type(x, jnp.uint8)


def _interpreted(problem: Problem, rhs: Array) -> Array:
    """Weights as the interpreter reads them: bytes, or words of four if they are interleaved."""
    octets = as_bytes(rhs)
    if not problem.interleaved:
        return octets
    return lax.bitcast_convert_type(octets.reshape(*octets.shape[:-1], -1, 4), jnp.int32)


def pointers(problem: Problem) -> tuple[tuple[str, str], ...]:
    """The names and dtypes of the arrays of a kernel, in the order of its call."""
    steps = problem.epilogue
    found = [(name, "int32") for name in ("count", "group_of", "row_of", "end_of")]
    found += [("lhs", problem.lhs.name), ("rhs", "int32" if problem.interleaved else "uint8")]
    if steps.by_column and steps.column_block[0]:
        found.append(("scales", "uint8" if steps.column_scales.itemsize == 1 else steps.column_scales.name))
    found += [("by_row", "float32")] * steps.by_row
    found += [("by_column", "float32")] * (steps.by_column and not steps.column_block[0])
    found += [] if steps.bias is None else [("bias", steps.bias.name)]
    found += [("existing", problem.out.name)] * steps.accumulate
    return (*found, ("out", problem.out.name))


def kernel_of(problem: Problem, layout: Layout, arch: str, *, interpret: bool = False) -> Any:
    """The kernel of a problem: what the compiler of an architecture, or the interpreter, is given."""
    import triton

    from trencadis.backends.triton.activation import function
    from trencadis.backends.triton.bridge import TYPES, Kernel
    from trencadis.backends.triton.interpreter import rewritten
    from trencadis.backends.triton.weights import weights

    epilogue, pack = problem.epilogue, 8 // bits(problem.rhs)
    text = source(epilogue.activation) if epilogue.activation is not None else None
    ptx = not interpret and not arch.startswith("gfx")
    low, high = (unpack(problem.rhs.name, problem.lhs.name, high=high) for high in (False, True))
    if problem.interleaved and ptx:
        low = unpack_words(problem.rhs.name, problem.lhs.name)
    constants = {
        "K": problem.k, "N": problem.n, "TRANSPOSED": problem.transpose_rhs,
        "K_LHS": problem.k if pack == 1 or problem.interleaved else round_up(problem.k, layout.block_k),
        "WEIGHTS": problem.weights, "GROUPS": problem.local_groups,
        "BLOCK_M": layout.block_m, "BLOCK_N": layout.block_n, "BLOCK_K": layout.block_k,
        "RASTER": layout.raster_group,
        "FORMAT": problem.rhs.name, "PACK": pack, "INTERLEAVED": problem.interleaved,
        "DOT": TYPES[problem.lhs.name],
        "UNPACK": low if ptx else None, "UNPACK_HIGH": high if ptx else None,
        "PRODUCT": product(problem.lhs.name) if ptx else None,
        "SCALES": epilogue.column_scales.name, "LENGTH": epilogue.column_block[0],
        "ACROSS": epilogue.column_block[1], "PER": _scales_at_once(problem, layout),
        "IN_FACTORS": in_factors(problem), "ROW_LENGTH": epilogue.row_block,
        "WAIT": "" if ptx and arch.startswith("9.") else None,
        "ACTIVATION": None if text is None else function(text, rewritten if interpret else triton.jit),
    }  # fmt: skip
    return Kernel(
        function=weights, pointers=pointers(problem), constants=tuple(constants.items()), arch=arch,
        warps=layout.warps, stages=layout.stages,
    )  # fmt: skip
