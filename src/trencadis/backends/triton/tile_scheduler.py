"""The list of tiles of a kernel, computed from the group sizes by a small kernel before it, or by XLA for many groups.

    rows           sizes [3, 0, 5], block_m 2          contraction
    group     0 0 2 2 2                                0 1 2      a tile of the list is the whole sum of a group, of
    row       0 2 3 5 7                                0 3 3      which the kernel computes all tiles of [k, n]
    end       3 3 8 8 8                                3 3 8

Tiles start at the first row of their group, so that none of them holds rows of two groups. Unowned rows are spans of
their own at the end of the list, with the group -1; with existing_out they have no tiles, since their values stay.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from trencadis.backends.triton.layout import Layout
from trencadis.core.problem import Form, Problem
from trencadis.core.schedule import RowTile
from trencadis.core.spans import First, Sizes, clamped, spans

MOST_GROUPS = 4096  # that the programs of a kernel hold in their registers
STEP = 128  # tiles of a span that a program stores at a time


class Tiles(NamedTuple):
    """The tiles of a kernel; in the rows form the first of these are there, and the rest is arbitrary."""

    number: Int32[Array, " numbers"]  # rows: of tiles with a group, and of all; contraction: of steps of each program
    group: Int32[Array, " tiles"]  # the local group, counted over all batch entries; -1 for unowned rows
    row: Int32[Array, " tiles"]  # the first row
    end: Int32[Array, " tiles"]  # the last row of the group, exclusive


def most_tiles(problem: Problem, layout: Layout) -> int:
    """The length of the list of tiles: an upper bound of their number, whatever the sizes are."""
    if problem.form is Form.CONTRACTION:
        return problem.spans
    pieces = min(problem.spans + 2 * problem.batch * (not problem.epilogue.accumulate), problem.rows)
    return (problem.rows + pieces * (layout.block_m - 1)) // layout.block_m


def tiles(problem: Problem, layout: Layout, sizes: Sizes, first: First, arch: str, *, interpret: bool = False) -> Tiles:
    """The list of tiles of a problem, by a kernel for an architecture, or in the interpreter."""
    from trencadis.backends.triton import bridge, interpreter, tile_kernels  # a plan does not need Triton

    if max(problem.groups, problem.local_groups) > MOST_GROUPS:
        return tiles_by_xla(problem, layout, sizes, first)
    contraction = problem.form is Form.CONTRACTION
    length, programs = most_tiles(problem, layout), layout.programs if contraction else 0
    shapes = {"number": programs or 1 if contraction else 2, "group_of": length, "row_of": length, "end_of": length}
    kernel = bridge.Kernel(
        function=tile_kernels.list_contraction if contraction else tile_kernels.list_rows,
        pointers=tuple((name, "int32") for name in ("sizes", "first", *shapes)),
        constants=tuple(_constants(problem, layout).items()), arch=arch, warps=4, stages=1,
    )  # fmt: skip
    listed = problem.spans + 2 * problem.batch * (not contraction and not problem.epilogue.accumulate)
    sizes = jnp.asarray(sizes)
    given = [sizes if sizes.dtype == jnp.int32 else clamped(sizes, problem.m), jnp.asarray(first, jnp.int32)]
    call = interpreter.call_for_several if interpret else bridge.call_for_several
    outs = [jax.ShapeDtypeStruct((size,), jnp.int32) for size in shapes.values()]
    return Tiles(*call(kernel, max(listed, programs), given, outs))


def _constants(problem: Problem, layout: Layout) -> dict[str, Any]:
    """What a kernel that lists tiles is compiled for."""
    import triton
    import triton.language as tl

    common = {
        "M": problem.m, "BATCH": problem.batch, "GROUPS": problem.groups, "LOCAL": problem.local_groups,
        "ALL": triton.next_power_of_2(problem.groups), "BLOCK": triton.next_power_of_2(problem.local_groups),
        "SUM": tl.int32 if problem.groups * problem.m < 2**31 else tl.int64,
    }  # fmt: skip
    if problem.form is Form.ROWS:
        return common | {"BLOCK_M": layout.block_m, "UNOWNED": not problem.epilogue.accumulate, "STEP": STEP}
    return common | {
        "BLOCK_K": layout.block_k, "ALIGN": align_of(problem, layout), "TILES": _tiles_of_group(problem, layout),
        "PROGRAMS": layout.programs,
    }  # fmt: skip


def tiles_by_xla(problem: Problem, layout: Layout, sizes: Sizes, first: First) -> Tiles:
    """The same list by operations of XLA: row tiles, or in a contraction the sums of all groups."""
    starts, ends = spans(problem, sizes, first)
    groups = np.arange(problem.spans, dtype=np.int32)
    if problem.form is Form.CONTRACTION:
        return Tiles(_steps(problem, layout, starts, ends), jnp.asarray(groups), starts, ends)
    if not problem.epilogue.accumulate:
        groups, starts, ends = _with_unowned(problem, starts, ends)
    rows = ends - starts
    here = (rows + (layout.block_m - 1)) // layout.block_m  # tiles of each span
    past = jnp.cumsum(here, dtype=jnp.int32)  # tiles of all spans up to its end
    index = np.arange(most_tiles(problem, layout), dtype=np.int32)
    # a comparison with every span: one fusion, where a binary search is a loop of kernels
    span = jnp.sum(past[None, :] <= index[:, None], axis=1, dtype=jnp.int32)  # [tiles]
    span = jnp.minimum(span, len(groups) - 1)
    nth = index - (past - here)[span]
    number = jnp.stack([past[problem.spans - 1], past[-1]])
    return Tiles(number, jnp.asarray(groups)[span], starts[span] + nth * layout.block_m, ends[span])


def _with_unowned(problem: Problem, starts: Array, ends: Array) -> tuple[np.ndarray, Array, Array]:
    """The spans of all groups, and after them those of the unowned rows before and after each window."""
    batch, local = problem.batch, problem.local_groups
    entry = np.arange(batch, dtype=np.int32) * problem.m  # [batch]
    before = starts.reshape(batch, local).min(axis=1)  # [batch]
    after = ends.reshape(batch, local).max(axis=1)
    groups = np.concatenate([np.arange(batch * local), np.full(2 * batch, -1)]).astype(np.int32)
    return groups, jnp.concatenate([starts, entry, after]), jnp.concatenate([ends, before, entry + problem.m])


def _steps(problem: Problem, layout: Layout, starts: Array, ends: Array) -> Array:
    """The steps of all tiles of each persistent program in a contraction, int32[programs]; without programs, [1]."""
    if not layout.programs:
        return jnp.zeros((1,), jnp.int32)
    align = align_of(problem, layout)
    rows = ends - starts // align * align
    steps = jnp.maximum((rows + layout.block_k - 1) // layout.block_k, 1)  # an empty group is zero in one step
    tiles = _tiles_of_group(problem, layout)
    programs, edges = np.arange(layout.programs)[:, None], np.arange(problem.spans + 1)[None, :] * tiles
    before = (edges + layout.programs - 1 - programs) // layout.programs  # tiles of a program before a group
    return jnp.sum(np.diff(before, axis=1).astype(np.int32) * steps[None, :], axis=1, dtype=jnp.int32)


def _tiles_of_group(problem: Problem, layout: Layout) -> int:
    """The tiles of the result of one group, in a contraction."""
    return math.ceil(problem.k / layout.block_m) * math.ceil(problem.n / layout.block_n)


def align_of(problem: Problem, layout: Layout) -> int:
    """Rows at multiples of this many start the steps of a contraction."""
    return math.gcd(layout.block_k, 16) if problem.transpose_lhs else 1


def row_tiles(problem: Problem, layout: Layout, start: int, end: int) -> list[RowTile]:
    """The row tiles of a group that owns the rows [start, end); in a contraction, the steps of its sum.

    >>> from trencadis.core.arguments import problem_of
    >>> layout = Layout(block_m=16, block_n=64, block_k=32, warps=4, stages=3)
    >>> [tile.rows for tile in row_tiles(problem_of((64, 8), (2, 8, 8), groups=2), layout, 3, 21)]
    [range(3, 19), range(19, 35)]
    """
    height = layout.block_m if problem.form is Form.ROWS else layout.block_k
    align = align_of(problem, layout) if problem.form is Form.CONTRACTION else 1
    tops = range(start - start % align, end, height) if end > start else range(0)
    return [RowTile(range(top, top + height), range(max(top, start), min(top + height, end))) for top in tops]
