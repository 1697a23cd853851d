"""The general grouped GEMM as Triton kernels on GPUs: one for the products, and one for each operand before it.

Where each group starts, the length of its rows and its tiles are a table, which XLA computes from the sizes. A matrix
whose rows do not start at multiples of 16 bytes is copied first to rows that do (`aligned_copy`): the copies into
shared memory that run beside the products need that. Of matrices with short rows, of less than SHORT bytes, the copy
could be many times as large; groups that have one are multiplied from where they are, entry by entry (ADR 0038).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trencadis.backends import triton as backend
from trencadis.backends.triton.choose import (
    mma_dtype,
    precision,
    programs_per_sm,
    split_operand,
    step_bytes,
    tiling_of,
)
from trencadis.backends.triton.layout import Layout
from trencadis.core.decision import Plan, Refusal
from trencadis.core.devices import card_for
from trencadis.core.problem import Problem, cdiv
from trencadis.core.target import Target
from trencadis.core.tiling import Overrides
from trencadis.gemm.matrices import COMPARED, Matrices, inside, matrices, mean_problem, places, running_sum
from trencadis.gemm.problem import Buffer, GemmProblem, Groups, Packing

Array = jax.Array

ALIGNMENT = 16  # bytes: rows that start at multiples of it are copied into shared memory while products run
LINE = 128  # bytes: a cache line, at which the rows of a copy start if they are LONG
SHORT, LONG = 64, 512  # bytes: rows shorter than SHORT are not copied; the copies of others are at most 1 / 4 longer
COPY_BLOCK, COPY_WIDTHS = 4096, (128, 1024)  # entries of a tile of a copy, and of its rows
COPIES_PER_SM = 8  # programs of the copy
HALVED = 2048  # entries of a tile for each warp, above which it is stored in halves
CLEAR_BLOCK = 4096  # entries that are cleared at a time


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GemmLayout:
    """The tiles of the products, with the number of programs, and the programs of a copy."""

    tile: Layout
    copy_programs: int


def plan(problem: GemmProblem, target: Target, overrides: Overrides = Overrides()) -> Plan | Refusal:
    """The plan of the kernels, or why there is none: the layout is that of a product of groups of the mean size."""
    asked: Any = problem  # a plan's problem is any that has an epilogue; this one has none
    if problem.empty:
        return Refusal("triton", "there is nothing to multiply", costly=False)
    card, mean = card_for(target), mean_problem(problem)
    mean = mean if card is None else backend.readable(mean, card)
    answer = backend.plan(mean, target, Overrides())
    if isinstance(answer, Refusal):
        return answer
    # XLA converts operands that the kernel does not read, and lhs where the kernel must not convert it
    lhs, rhs = (
        dataclasses.replace(x, dtype=dtype) for x, dtype in ((problem.lhs, answer.problem.lhs), (problem.rhs, mean.rhs))
    )
    inner: Any = dataclasses.replace(problem, lhs=lhs, rhs=rhs)
    like = mean_problem(inner)
    if problem.scaled and problem.sum != np.float32:
        return Refusal(
            "triton", f"alpha, beta and bias are {problem.sum.name}; the triton backend computes them in float32"
        )
    entries = max(math.prod(buffer.shape) for buffer in (problem.lhs, problem.rhs, problem.out))
    if _room(entries) >= 2**31:
        return Refusal("triton", f"an array has {entries} entries, and entries are counted in 32 bits")
    assert card is not None  # or the backend had refused
    chosen: Layout = answer.layout
    plain = chosen.replace(programs=0, peeled=False, short_m=0, tma=False)
    if mma_dtype(like).itemsize == 4:  # both branches of the kernel, aligned and not, have buffers of their own then
        plain = plain.replace(stages=max(min(plain.stages, int(card.shared // (2 * step_bytes(like, card, plain)))), 1))
    tile = plain.replace(programs=card.cores * programs_per_sm(like, card, plain))
    return Plan(
        asked=asked, problem=inner, target=target, backend="triton", interpret=overrides.interpret,
        tiling=tiling_of(like, tile), layout=GemmLayout(tile=tile, copy_programs=card.cores * COPIES_PER_SM),
        because=_reason(inner, like, tile),
    )  # fmt: skip


def _reason(problem: GemmProblem, like: Problem, tile: Layout) -> str:
    copied = [name for name in ("lhs", "rhs") if not _aligned(getattr(problem, name))]
    copies = f"; {' and '.join(copied)} copied to rows at multiples of {ALIGNMENT} bytes" if copied else ""
    return (
        f"{tile} for {problem.groups} groups of {like.m // like.groups} x {like.k} x {like.n} (m, k, n) on the mean, "
        f"as the arrays have room for{copies}"
    )


def run(plan: Plan, *operands: Array) -> Array:
    """The result of a plan's problem: operands are lhs, rhs, the six arrays of `Groups`, and those of `Extras`."""
    problem, card = plan.problem, card_for(plan.target)
    assert isinstance(problem, GemmProblem) and card is not None
    return execute(problem, plan.layout, card.arch, *operands, interpret=plan.interpret)


def execute(
    problem: GemmProblem, layout: GemmLayout, arch: str, lhs: Array, rhs: Array, *rest: Array, interpret: bool = False
) -> Array:
    """The product of a problem by kernels of this layout, for an architecture or in the interpreter."""
    # here, so that a machine without Triton can import the plan
    from trencadis.backends.triton import bridge, interpreter

    call = interpreter.call if interpret else bridge.call
    lhs, rhs = lhs.astype(problem.lhs.dtype), rhs.astype(problem.rhs.dtype)
    found = tables(problem, layout.tile, Groups(*rest[:6]))
    copies = []
    for name, data, table in (("lhs", lhs, found.lhs), ("rhs", rhs, found.rhs)):
        if table is not None:
            room = jax.ShapeDtypeStruct((_room(data.size),), data.dtype)
            kernel = copy_kernel(problem, layout, arch, name)
            copies.append(call(kernel, layout.copy_programs, [table, data], room))
    gaps = [] if found.gaps is None else [found.gaps]
    before = [found.products, *gaps, lhs, rhs, *copies]
    out = jax.ShapeDtypeStruct(problem.out.shape, problem.out.dtype)
    kernel, alias = gemm_kernel(problem, layout, arch), len(before) if problem.accumulate else None
    return call(kernel, layout.tile.programs, [*before, *rest[6:]], out, alias=alias)


# ---------------------------------------------------------------------------------------------------------------------
# The kernels


def copy_kernel(problem: GemmProblem, layout: GemmLayout, arch: str, name: str) -> Any:
    """The kernel that copies the matrices of "lhs" or "rhs" to aligned rows."""
    from trencadis.backends.triton import ragged
    from trencadis.backends.triton.bridge import Kernel

    dtype, (rows, columns) = getattr(problem, name).dtype.name, copy_tile(problem, name)
    constants = {
        **_search(problem.groups), "PROGRAMS": layout.copy_programs, "BLOCK_ROWS": rows, "BLOCK_COLUMNS": columns
    }  # fmt: skip
    return Kernel(
        function=ragged.aligned_copy, pointers=(("table", "int32"), ("source", dtype), ("out", dtype)),
        constants=tuple(constants.items()), arch=arch, warps=4, stages=1,
    )  # fmt: skip


def copy_tile(problem: GemmProblem, name: str) -> tuple[int, int]:
    """The rows and columns of a tile of the copy of "lhs" or "rhs": about as wide as the rows of a group."""
    like, (least, most) = mean_problem(problem), COPY_WIDTHS
    first, second = (like.m // like.groups, like.k) if name == "lhs" else (like.k, like.n)
    length = first if getattr(problem, name).transposed else second
    columns = max(least, min(most, 1 << (length - 1).bit_length()))
    return COPY_BLOCK // columns, columns


def gemm_kernel(problem: GemmProblem, layout: GemmLayout, arch: str) -> Any:
    """The kernel of the products."""
    from trencadis.backends.triton import ragged
    from trencadis.backends.triton.bridge import TYPES, Kernel

    lhs, rhs, out, tile = problem.lhs, problem.rhs, problem.out, layout.tile
    like, integer = mean_problem(problem), np.dtype(np.int32)
    arrays = [("table", integer)] + [("gaps", integer)] * (not problem.accumulate)
    arrays += [("lhs", lhs.dtype), ("rhs", rhs.dtype)]
    arrays += [(f"{name}_copy", x.dtype) for name, x in (("lhs", lhs), ("rhs", rhs)) if not _aligned(x)]
    given = {"existing": problem.accumulate, "alpha": problem.alpha, "bias": problem.bias, "beta": problem.beta}
    arrays += [(name, out.dtype if name == "existing" else problem.sum) for name, on in given.items() if on]
    arrays += [("out", out.dtype)]
    gap_rows, gap_stride, gap_block = _gap_shape(out)
    constants = {
        **_search(problem.groups), "PROGRAMS": tile.programs, "RASTER": tile.raster_group,
        "ALWAYS": _aligned(lhs) and _aligned(rhs),
        "LHS_T": lhs.transposed, "RHS_T": rhs.transposed, "OUT_T": out.transposed,
        "LHS_ALIGN": _align(lhs), "RHS_ALIGN": _align(rhs),
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "SLOW_K": min(tile.block_k, 32),
        "N": problem.n.size,
        "DOT": TYPES[mma_dtype(like).name], "ACC": TYPES[problem.acc.name], "SUM": TYPES[problem.sum.name],
        "PRECISION": "tf32x3" if split_operand(like, arch) else precision(like, arch) or "tf32",
        "HALVES": tile.block_m * tile.block_n > HALVED * tile.warps,
        "GAP_STEPS": _search(problem.groups + 1)["STEPS"], "GAP_ROWS": gap_rows, "GAP_STRIDE": gap_stride,
        "GAP_BLOCK_ROWS": gap_block[0], "GAP_BLOCK_COLUMNS": gap_block[1],
    }  # fmt: skip
    pointers = tuple((name, dtype.name) for name, dtype in arrays)
    return Kernel(
        function=ragged.ragged_gemm, pointers=pointers, constants=tuple(constants.items()), arch=arch,
        warps=tile.warps, stages=tile.stages,
    )  # fmt: skip


def _gap_shape(out: Buffer) -> tuple[int, int, tuple[int, int]]:
    """The rows of a gap, from one to the next in entries, and the tile in which it is cleared.

    A gap between columns has a piece in each row of the array; any other is a piece of memory.
    """
    if out.packing is Packing.CONCATENATED and out.group_axis == 1:
        return out.shape[0], out.shape[1], (CLEAR_BLOCK // 128, 128)
    return 1, 0, (1, CLEAR_BLOCK)


def _search(groups: int) -> dict[str, int]:
    """The constants of the search for the group of a tile."""
    return {"GROUPS": groups, "STEPS": (groups - 1).bit_length()}


def _align(buffer: Buffer) -> int:
    """The entries of ALIGNMENT bytes."""
    return ALIGNMENT // buffer.dtype.itemsize


def _aligned(buffer: Buffer) -> bool:
    """Whether the rows of all groups start at aligned entries, whatever the sizes are."""
    whole = buffer.packing is not Packing.FLAT and buffer.group_axis == 0
    return whole and buffer.shape[-1] % _align(buffer) == 0


def _room(entries: int) -> int:
    """The entries of a buffer for the copies of matrices with as many: rows grow by less than 1 / 4."""
    return max(1, entries * (SHORT + ALIGNMENT) // SHORT)


# ---------------------------------------------------------------------------------------------------------------------
# The tables


class Tables(NamedTuple):
    """The table of the products, those of the copies of operands that may need one, and that of the gaps to clear.

    They are i32[fields, g], and i32[fields, g + 1].
    """

    products: Array
    lhs: Array | None
    rhs: Array | None
    gaps: Array | None


def tables(problem: GemmProblem, tile: Layout, groups: Groups) -> Tables:
    """The tables of a problem, from where its groups start and their sizes; groups with longer sums come first."""
    gaps = None if problem.accumulate else _gaps(problem, groups)
    order = longest_first(groups.k)
    groups = Groups(*(each[order] for each in groups))
    m, k, n = inside(problem, groups)
    lhs, rhs, out = places(problem, groups, (m, k, n))
    reads = [(problem.lhs, lhs), (problem.rhs, rhs)]
    there = [_rows_aligned(*each) for each in reads]
    long = [x.columns * buffer.dtype.itemsize >= SHORT for buffer, x in reads]
    fast = (there[0] | long[0]) & (there[1] | long[1])
    wide = [_copied_stride(*each) for each in reads]
    copied = [fast & ~each & (x.rows > 0) for each, (_, x) in zip(there, reads, strict=True)]
    counts = [cdiv(m, tile.block_m) * cdiv(n, tile.block_n)]
    for name, on, width, (_, x) in zip(("lhs", "rhs"), copied, wide, reads, strict=True):
        down, across = copy_tile(problem, name)
        counts += [jnp.where(on, cdiv(x.rows, down) * cdiv(width, across), 0)]
        counts += [jnp.where(on, x.rows * width, 0)]
    past = running_sum(jnp.stack(counts))
    before = past - jnp.stack(counts)
    starts, strides, copies = [], [], []
    for i, ((buffer, x), on, width) in enumerate(zip(reads, copied, wide, strict=True)):
        tiles, room = 1 + 2 * i, before[2 + 2 * i]
        moved = [past[tiles], before[tiles], x.rows, x.columns, x.start, x.stride, room, width]
        copies.append(None if _aligned(buffer) else jnp.stack(moved))
        starts.append(jnp.where(on, room, x.start))
        strides.append(jnp.where(on, width, x.stride))
    rows = [past[0], before[0], m, k, n, starts[0], strides[0], starts[1], strides[1], out.start, out.stride]
    flags = [each.astype(jnp.int32) for each in (fast, *copied, order)]
    return Tables(jnp.stack([*rows, *flags]), copies[0], copies[1], gaps)


def _copied_stride(buffer: Buffer, x: Matrices) -> Any:
    """The length of the rows of a copy: i32[g]."""
    size = buffer.dtype.itemsize
    line, least = (cdiv(x.columns, bytes_ // size) * np.int32(bytes_ // size) for bytes_ in (LINE, ALIGNMENT))
    return jnp.where(x.columns * np.int32(size) >= LONG, line, least)


def _gaps(problem: GemmProblem, groups: Groups) -> Array:
    """The table of what no group owns: before each group, and after the last."""
    buffer, (m, _, n) = problem.out, inside(problem, groups)
    x = matrices(buffer, groups.out, (groups.m, groups.n), (m, n))
    rows, stride, block = _gap_shape(buffer)
    end, last = (x.start + x.columns, stride) if stride else (x.start + x.rows * x.stride, math.prod(buffer.shape))
    begins = jnp.concatenate([jnp.zeros((1,), jnp.int32), end])
    lengths = jnp.maximum(jnp.concatenate([x.start, jnp.full((1,), last, jnp.int32)]) - begins, 0)
    counts = cdiv(lengths, block[1]) * cdiv(rows, block[0])
    past = running_sum(counts)
    return jnp.stack([past, past - counts, begins, lengths])


def _rows_aligned(buffer: Buffer, x: Matrices) -> Any:
    """Whether all rows of each group start at aligned entries, and end at one: bool[g]."""
    if _aligned(buffer):
        return jnp.ones_like(x.start, bool)
    return (x.start | x.stride | x.columns) & np.int32(_align(buffer) - 1) == 0


def longest_first(k: Array) -> Array:
    """The groups from the longest sum to the shortest: tiles that run together take as long, and the last are short."""
    if k.shape[0] > COMPARED:
        return jnp.argsort(-k)
    index = np.arange(k.shape[0], dtype=np.int32)
    ahead = (k[None, :] > k[:, None]) | ((k[None, :] == k[:, None]) & (index[None, :] < index[:, None]))
    rank = jnp.sum(ahead, axis=1, dtype=jnp.int32)
    return jnp.sum(jnp.where(rank[None, :] == index[:, None], index[None, :], 0), axis=1, dtype=jnp.int32)
