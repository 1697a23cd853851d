"""The general grouped GEMM as Pallas kernels on TPUs.

Groups whose rhs fits into VMEM are computed by one kernel (`gemm.resident`), which reads and writes the arrays as they
are. For others there is one for the products, and one for each array around it: operands are copied to blocks of
128 x 128 entries, and the results are written from such blocks, with the epilogue (`backends.tpu.ragged`, ADR 0047).
Where each group is in each array is a table, which XLA computes from the sizes.

Blocks have room for twice the entries of a flat buffer, and for four of them in each group: enough for groups of any
size that are at most ten times as long as wide. Groups that do not fit, and those with very long rows, are left to the
loops of XLA. What is for groups that another kernel left out runs only if there are any.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from trencadis.backends.tpu.choose import chip_for
from trencadis.backends.tpu.execution import call_options
from trencadis.backends.tpu.passes import precision_of
from trencadis.backends.tpu.ragged import align, collect, multiply
from trencadis.backends.tpu.ragged.blocks import BLOCK, Room
from trencadis.backends.tpu.resident.sizes import COLUMNS, Sizes
from trencadis.core.decision import Plan, Refusal
from trencadis.core.devices import Chip
from trencadis.core.problem import cdiv
from trencadis.core.target import Target
from trencadis.core.tiling import Overrides, Tiling
from trencadis.gemm import resident, xla
from trencadis.gemm.flat import flat_buffer, flat_operands, flattened, shaped
from trencadis.gemm.matrices import Matrices, inside, mean_problem, places, running_sum
from trencadis.gemm.problem import Buffer, GemmProblem, Groups, Packing

Array = jax.Array

DTYPES = ("bfloat16", "float32")
PRECISIONS = (lax.Precision.DEFAULT, lax.Precision.HIGHEST)
MAX_GROUPS = 2**13  # whose tables fit into SMEM
LARGE = 512  # mean size of groups from which matrices are padded to multiples of 256
PARTS = (4, 2, 1)  # sizes of a product, in granules
VMEM_SHARE = 0.75  # of VMEM that buffers may take
LONGEST = 2**14  # entries of a row that fits into the buffers of a copy, by 128 MiB of VMEM
WINDOW = 2**18  # entries of the result that are written at a time

_refusal = functools.partial(Refusal, "tpu")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GemmLayout:
    """The sizes of tiles and products, the longest row that is copied, and the entries of a window of the result.

    `resident` has the sizes of the kernel for groups whose rhs fits into VMEM; None if most would not fit.
    """

    parts: multiply.Parts
    longest: int
    window: int
    resident: Sizes | None = None


def plan(problem: GemmProblem, target: Target, overrides: Overrides = Overrides()) -> Plan | Refusal:
    """The plan of the kernels for a TPU that `backends.tpu.elsewhere` does not refuse, or why there is none."""
    asked: Any = problem  # a plan's problem is any that has an epilogue; this one has none
    if problem.empty:
        return _refusal("there is nothing to multiply", costly=False)
    chip = chip_for(target)
    refusal = _arithmetic(problem) or _size(problem, chip)
    if refusal is not None:
        return refusal
    layout = layout_for(problem, chip)
    parts = layout.parts
    m, k, n = parts.tile_m, parts.k[0], parts.tile_n
    return Plan(
        asked=asked, problem=asked, target=target, backend="tpu", interpret=overrides.interpret,
        tiling=Tiling(*(size * parts.granule for size in (m, k, n))), layout=layout,
        because=_reason(problem, layout),
    )  # fmt: skip


def _reason(problem: GemmProblem, layout: GemmLayout) -> str:
    like, part, sizes = mean_problem(problem), layout.parts.granule * layout.parts.m[0], layout.resident
    groups = (
        f"{problem.groups} groups of {like.m // like.groups} x {like.k} x {like.n} (m, k, n) on the mean, "
        "as the arrays have room for"
    )
    blocks = (
        f"products of up to {part} x {layout.parts.granule * layout.parts.k[0]} x {part}, "
        f"lhs, rhs and the result copied to and from blocks of {BLOCK} x {BLOCK}, padded to {layout.parts.granule}"
    )
    if sizes is None:
        return f"{groups}: {blocks}"
    one = f"one kernel with products of {sizes.rows} x {sizes.depth} x {COLUMNS} for groups whose rhs fits into VMEM"
    return f"{groups}: {one}; for others {blocks}"


def _arithmetic(problem: GemmProblem) -> Refusal | None:
    """The refusal of a problem whose dtypes or precision the kernels do not have; None if they have them."""
    for name in ("lhs", "rhs", "out"):
        dtype = getattr(problem, name).dtype.name
        if dtype not in DTYPES:
            return _refusal(f"{name} is {dtype}; kernels take {' and '.join(DTYPES)}", "convert it to one of these")
    if problem.sum != np.float32:
        return _refusal(f"alpha, beta and bias are {problem.sum.name}; the tpu backend computes them in float32")
    if precision_of(mean_problem(problem)) not in PRECISIONS:
        return _refusal(
            f"precision is {problem.precision}; the tpu backend has DEFAULT and HIGHEST", "pass one of these"
        )
    return None


def _size(problem: GemmProblem, chip: Chip) -> Refusal | None:
    """The refusal of a problem that is too large for SMEM or VMEM; None if it fits."""
    if problem.groups > MAX_GROUPS:
        return _refusal(f"{problem.groups} groups are too many for scalar memory, which holds {MAX_GROUPS}")
    entries = max(math.prod(buffer.shape) for buffer in (problem.lhs, problem.rhs, problem.out))
    if entries >= 2**30:
        return _refusal(f"an array has {entries} entries, and entries are counted in 32 bits")
    flat = flattened(problem)
    for name in ("lhs", "rhs", "out"):
        buffer: Buffer = getattr(flat, name)
        if buffer.packing is not Packing.FLAT and buffer.shape[-1] > longest(chip):
            return _refusal(f"rows of {name} have {buffer.shape[-1]} entries; kernels take at most {longest(chip)}")
    if flat.bias and flat.out != flat_buffer(problem.out):
        return _refusal("kernels compute the transposed result, and add no bias to whole rows of it")
    return None


# ---------------------------------------------------------------------------------------------------------------------
# The layout


def longest(chip: Chip) -> int:
    """The entries of the longest row that is copied."""
    return min(LONGEST, LONGEST * chip.vmem // (128 << 20))


def layout_for(problem: GemmProblem, chip: Chip) -> GemmLayout:
    """The layout for groups of the mean size: the largest tiles whose buffers fit into VMEM."""
    like = mean_problem(problem)
    granule = 256 if min(like.m // like.groups, like.k, like.n) >= LARGE else BLOCK
    depth = PARTS[1:] if granule == 256 else PARTS
    tile = 1
    while _vmem(problem, granule, tile + 1, depth[0]) <= chip.vmem * VMEM_SHARE and tile * granule < 2560:
        tile += 1
    sizes = tuple(size for size in PARTS if size <= tile)
    parts = multiply.Parts(granule=granule, tile_m=tile, tile_n=tile, m=sizes, n=sizes, k=depth)
    window = min(WINDOW, WINDOW * chip.vmem // (64 << 20))
    return GemmLayout(parts=parts, longest=longest(chip), window=window, resident=resident.layout_for(problem, chip))


def _vmem(problem: GemmProblem, granule: int, tile: int, depth: int) -> int:
    """The bytes of the buffers of the products: two of the sums of a tile, and two of each operand."""
    size = problem.lhs.dtype.itemsize + problem.rhs.dtype.itemsize
    return 2 * granule**2 * tile * (4 * tile + depth * size)


# ---------------------------------------------------------------------------------------------------------------------
# The blocks


def room_for(buffer: Buffer, groups: int, layout: GemmLayout) -> Room:
    """The room for the blocks of an array: of a flat one twice its entries, and four granules for each group."""
    granule = layout.parts.granule
    if buffer.packing is Packing.FLAT:
        count, longest = 2 * buffer.shape[0] // granule**2 + 4 * groups, min(layout.longest, buffer.shape[0])
    else:
        rows, columns = buffer.shape[-2:]
        per = -(-rows // granule) * groups if buffer.packing is Packing.STACKED else rows // granule + groups
        count, longest = per * -(-columns // granule), columns
    return Room(blocks=count * (granule // BLOCK) ** 2, granule=granule, longest=max(longest, 1))


# ---------------------------------------------------------------------------------------------------------------------
# The tables


class Tables(NamedTuple):
    """The tables of the kernels, i32[fields, g], and which groups have products that the kernels do not compute."""

    lhs: Array
    rhs: Array
    products: Array
    out: Array
    left: Array  # bool[g]


def tables(problem: GemmProblem, layout: GemmLayout, groups: Groups) -> Tables:
    """The tables of a problem of flat buffers, from where its groups start and their sizes."""
    parts = layout.parts
    sizes = inside(problem, groups)
    found = places(problem, groups, sizes)
    rooms = [room_for(buffer, problem.groups, layout) for buffer in (problem.lhs, problem.rhs, problem.out)]
    counts = jnp.stack([cdiv(x.rows, parts.granule) * cdiv(x.columns, parts.granule) for x in found])
    blocks = counts * np.int32((parts.granule // BLOCK) ** 2)
    room = np.asarray([[each.blocks] for each in rooms], np.int32)
    longest = np.asarray([[each.longest] for each in rooms], np.int32)
    # a group that does not fit by itself leaves the room to the others
    alone = jnp.all((jnp.stack([x.stride for x in found]) <= longest) & (blocks <= room), axis=0)
    past = running_sum(jnp.where(alone, blocks, 0))
    kept = alone & jnp.all(past <= room, axis=0)
    first = past - blocks
    m, k, n = (jnp.where(kept, cdiv(size, parts.granule), 0) for size in sizes)
    tile_m, tile_n = (_even(*each) for each in ((m, parts.tile_m), (n, parts.tile_n)))
    products = jnp.stack([m, k, n, tile_m, tile_n, *first])
    lhs, rhs = (_align_table(layout, x, first[i], kept) for i, x in enumerate(found[:2]))
    out, there = found[2], kept & (sizes[0] > 0) & (sizes[2] > 0)
    owned = jnp.where(there, jnp.where(sizes[1] > 0, collect.COMPUTED, collect.EMPTY_SUM), 0)
    lanes = n * np.int32(parts.granule // BLOCK)
    stored = jnp.stack([*out, first[2], lanes, owned])
    return Tables(lhs, rhs, products, stored, ~kept & (sizes[0] > 0) & (sizes[2] > 0))


def _even(size: Array, most: int) -> Array:
    """The size of tiles of at most `most` that are as equal as they can be; at least 1."""
    tiles = jnp.maximum(cdiv(size, most), 1)
    return jnp.maximum((size + tiles - 1) // tiles, 1)


def _align_table(layout: GemmLayout, x: Matrices, first: Array, kept: Array) -> Array:
    granule, per = layout.parts.granule, np.int32(layout.parts.granule // BLOCK)
    lanes = cdiv(x.columns, granule) * per
    row_blocks = jnp.where(kept & (x.columns > 0), cdiv(x.rows, granule) * per, 0)
    return jnp.stack([x.start, x.stride, x.rows, x.columns, first, row_blocks, lanes])


# ---------------------------------------------------------------------------------------------------------------------
# The run


def run(plan: Plan, *operands: Array) -> Array:
    """The result of a plan's problem: operands are lhs, rhs, the six arrays of `Groups`, and those of `Extras`."""
    problem, layout = plan.problem, plan.layout
    assert isinstance(problem, GemmProblem)
    options = call_options(plan)

    def in_blocks(problem: GemmProblem, *operands: Array) -> Array:
        out, left = execute(problem, layout, *operands, **options)
        return with_others(problem, functools.partial(loops, plan.target), out, left, *operands)

    if layout.resident is None:
        return in_blocks(problem, *operands)
    out, left = resident.execute(
        problem, layout.resident, *operands, **call_options(plan, dimension_semantics=("parallel",))
    )
    return with_others(problem, in_blocks, out, left, *operands)


def loops(target: Target, problem: GemmProblem, *operands: Array) -> Array:
    """The result of XLA's loops."""
    asked: Any = problem
    return xla.run(xla.plan(asked, target), *operands)


def with_others(
    problem: GemmProblem, run: Callable[..., Array], out: Array, left: Array, lhs: Array, rhs: Array, *rest: Array
) -> Array:
    """The result `out` of a kernel, with what `run(problem, *operands)` adds for groups that it left out, if any."""
    groups, extras = Groups(*rest[:6]), problem.extras(rest[6:])._replace(existing=out)
    others = groups._replace(**{name: jnp.where(left, getattr(groups, name), 0) for name in "mkn"})
    adding = problem.replace(accumulate=True, known=None)
    return lax.cond(
        jnp.any(left), lambda *given: run(adding, *given), lambda *given: given[8], lhs, rhs, *others, *extras.given
    )


def execute(problem: GemmProblem, layout: GemmLayout, *operands: Array, **options: Any) -> Any:
    """The result by kernels of this layout, and bool[g]: groups that are left out, as if they owned nothing."""
    flat, (lhs, rhs, groups, extras) = flattened(problem), flat_operands(problem, *operands)
    found = tables(flat, layout, groups)
    blocks = []
    for name, x, table in zip(("lhs", "rhs"), (lhs, rhs), (found.lhs, found.rhs), strict=True):
        buffer = getattr(flat, name)
        aligner = align.Aligner(
            length=x.shape[0], dtype=buffer.dtype, groups=problem.groups,
            room=room_for(buffer, problem.groups, layout),
        )  # fmt: skip
        blocks.append(aligner.run(x, table, **options))
    room = room_for(flat.out, problem.groups, layout)
    products = multiplier(flat, layout, room).run(blocks[0], blocks[1], found.products, **options)
    collector = collect.Collector(
        length=math.prod(problem.out.shape), dtype=problem.out.dtype, groups=problem.groups, room=room,
        window=layout.window, accumulate=problem.accumulate, alpha=problem.alpha, beta=problem.beta,
        bias=problem.n.size if problem.bias else 0,
    )  # fmt: skip
    return shaped(problem, collector.run(products, found.out, extras, **options)), found.left


def multiplier(flat: GemmProblem, layout: GemmLayout, room: Room) -> multiply.Multiplier:
    """The kernel of the products of a problem of flat buffers."""
    like = mean_problem(flat)
    dims = {"lhs": ("k", "m") if flat.lhs.transposed else ("m", "k")}
    dims["rhs"] = ("n", "k") if flat.rhs.transposed else ("k", "n")
    lhs, rhs = (
        multiply.Operand(name=name, dtype=getattr(flat, name).dtype, rows=rows, lanes=lanes)
        for name, (rows, lanes) in dims.items()
    )
    return multiply.Multiplier(
        lhs=lhs, rhs=rhs, groups=flat.groups, parts=layout.parts, room=room,
        precision=precision_of(like), flops=2 * like.m * like.k * like.n,
    )  # fmt: skip
