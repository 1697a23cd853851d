"""The general grouped GEMM as one Pallas kernel on TPUs (`backends.tpu.resident`, ADR 0051).

Where each matrix is in its array is a table, which XLA computes from the sizes. An entry of the table is the product of
one group, or, if lhs is stored with k along its rows and is large, of some columns of lhs.

Groups whose rhs does not fit into VMEM, and those with very long rows, are left out.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trencadis.backends.tpu.passes import precision_of
from trencadis.backends.tpu.resident.align import Operand
from trencadis.backends.tpu.resident.epilogue import Epilogue
from trencadis.backends.tpu.resident.kernel import Kernel
from trencadis.backends.tpu.resident.layout import sizes_for
from trencadis.backends.tpu.resident.sizes import COLUMNS, Sizes
from trencadis.backends.tpu.resident.table import FIELDS
from trencadis.core.devices import Chip
from trencadis.core.problem import cdiv
from trencadis.gemm.flat import flat_operands, flattened, shaped
from trencadis.gemm.matrices import inside, mean_problem, places, running_sum
from trencadis.gemm.problem import GemmProblem, Groups

Array = jax.Array

MAX_GROUPS = 2**11  # whose table fits into SMEM
APART = 2**16  # entries of the result from which on each core has some of the groups
SPREAD = 1.5  # times the mean size: groups up to it fit, or the kernel is not used


def layout_for(problem: GemmProblem, chip: Chip) -> Sizes | None:
    """The layout for groups of the mean size, or None if many of them would not fit into VMEM."""
    flat = flattened(problem)
    like = mean_problem(flat)
    dtype = operand_dtype(flat)
    m, k, n = like.m // like.groups, like.k, like.n
    out = problem.out.dtype.itemsize
    cores = chip.cores if problem.groups > 1 and math.prod(flat.out.shape) >= APART else 1
    sizes = sizes_for(chip, dtype.itemsize, out, min(m, k, n), streamed=not flat.lhs.transposed, cores=cores)
    left, right = operands(flat, sizes)
    wide_m, wide_k, wide_n = (int(SPREAD * size) for size in (m, k, n))
    steps, blocks = -(-wide_k // sizes.depth), -(-wide_n // COLUMNS)
    rows = wide_n, wide_m if flat.lhs.transposed else wide_k, wide_k if flat.rhs.transposed else wide_n
    if max(rows) > sizes.longest or steps * blocks * right.tile > sizes.rhs or steps * left.tile > sizes.lhs:
        return None
    too_many = problem.groups > MAX_GROUPS or (flat.bias and flat.n.size > sizes.longest)
    return None if too_many else sizes


# ---------------------------------------------------------------------------------------------------------------------
# The table


class Tables(NamedTuple):
    """The table of the kernel, and which groups have products that it does not compute."""

    table: Array  # i32[fields * entries + cores + 1]
    left: Array  # bool[g]


def entries_of(problem: GemmProblem) -> int:
    """The entries that a table has room for: parts of a group are entries of their own."""
    return problem.groups if not problem.lhs.transposed else 2 * problem.groups + 16


def tables(problem: GemmProblem, sizes: Sizes, groups: Groups) -> Tables:
    """The table of a problem of flat buffers, from where its groups start and their sizes."""
    m, k, n = inside(problem, groups)
    lhs, rhs, out = places(problem, groups, (m, k, n))
    left, right = operands(problem, sizes)
    steps, blocks, panels = jnp.maximum(cdiv(k, sizes.depth), 1), cdiv(n, COLUMNS), cdiv(m, sizes.rows)
    longest = jnp.maximum(jnp.maximum(lhs.stride, rhs.stride), n)
    fits = (longest <= sizes.longest) & (steps <= sizes.rhs // right.tile) & (steps <= sizes.lhs // left.tile)
    # 32-bit products of what fits do not overflow: both factors are below 2**16
    fits = fits & (jnp.where(fits, steps * blocks, 0) <= sizes.rhs // right.tile) & (out.stride == n)
    most = jnp.maximum(panels if left.streamed else np.int32(sizes.lhs // left.tile) // steps, 1)  # panels of a part
    owns = (m > 0) & (n > 0)
    parts = jnp.where(fits & owns, (panels + most - 1) // most, 0)
    past = running_sum(parts)
    kept = fits & (past <= entries_of(problem))
    group, part = _entries(problem, jnp.where(kept, parts, 0))
    fields = dict(zip(FIELDS, (*lhs, *rhs, out.start, m, n, panels, steps, blocks, _strip(sizes, n)), strict=False))
    chosen = _chosen(jnp.stack([*fields.values(), most]), group)
    of = dict(zip((*fields, "most"), chosen, strict=True))
    first = part * of.pop("most") * np.int32(sizes.rows)  # row of the result
    if not left.streamed:
        rows = jnp.minimum(chosen[-1] * np.int32(sizes.rows), of["m"] - first)
        of |= {"lhs_start": of["lhs_start"] + first, "lhs_columns": rows, "m": rows, "panels": cdiv(rows, sizes.rows)}
        of["start"] = of["start"] + first * of["n"]
    count = jnp.sum(jnp.where(kept, parts, 0), dtype=jnp.int32)
    work = jnp.where(jnp.arange(entries_of(problem)) < count, of["panels"] * of["steps"] * of["blocks"], 0)
    ends = jnp.append(_first_entries(work, sizes.cores), count)
    return Tables(jnp.concatenate([jnp.stack([*of.values(), group]).reshape(-1), ends]), ~kept & owns)


def _first_entries(work: Array, cores: int) -> Array:
    """The first entry of each core, so that their sums of work are as equal as whole entries allow: i32[cores]."""
    work = work.astype(jnp.float32)
    middle = running_sum(work) - work / 2
    shares = jnp.sum(work) / cores * np.arange(cores, dtype=np.float32)
    return jnp.sum(middle[None, :] < shares[:, None], axis=1, dtype=jnp.int32)


def _strip(sizes: Sizes, n: Array) -> Array:
    """The rows that are collected at a time: a power of two of them, whose entries fit into the buffers."""
    rows = jnp.full_like(n, sizes.rows)
    for _ in range(sizes.rows.bit_length() - 1):
        rows = jnp.where(rows * jnp.minimum(n, sizes.longest) > sizes.strip, rows >> 1, rows)
    return rows


def _entries(problem: GemmProblem, parts: Array) -> tuple[Array, Array]:
    """The group of each entry of a table, and which part of it the entry is: i32[entries]."""
    number = jnp.arange(entries_of(problem), dtype=jnp.int32)
    past = running_sum(parts)
    group = jnp.sum(past[None, :] <= number[:, None], axis=1, dtype=jnp.int32)
    group = jnp.minimum(group, np.int32(problem.groups - 1))
    first = _chosen((past - parts)[None], group)[0]
    return group, number - first


def _chosen(fields: Array, group: Array) -> Array:
    """The columns of a table [fields, g] of some groups."""
    here = group[:, None] == np.arange(fields.shape[1], dtype=np.int32)
    return jnp.sum(jnp.where(here, fields[:, None, :], 0), axis=-1, dtype=jnp.int32)


# ---------------------------------------------------------------------------------------------------------------------
# The run


def execute(problem: GemmProblem, layout: Sizes, *given: Array, **options: Any) -> Any:
    """The result by the kernel of this layout, and bool[g]: groups that are left out, as if they owned nothing."""
    flat, (lhs, rhs, groups, extras) = flattened(problem), flat_operands(problem, *given)
    found, dtype = tables(flat, layout, groups), operand_dtype(flat)
    out = kernel_of(flat, layout).run(lhs.astype(dtype), rhs.astype(dtype), found.table, extras, **options)
    return shaped(problem, out), found.left


def operand_dtype(flat: GemmProblem) -> np.dtype[Any]:
    """The dtype that both operands have in the kernel."""
    return flat.lhs.dtype if flat.lhs.dtype == flat.rhs.dtype else np.dtype(np.float32)


def operands(flat: GemmProblem, layout: Sizes) -> tuple[Operand, Operand]:
    """lhs and rhs of a problem of flat buffers, as the kernel takes them: in one dtype."""
    dtype = operand_dtype(flat)
    lhs = Operand(
        name="lhs", dtype=dtype, length=math.prod(flat.lhs.shape), along_k="rows" if flat.lhs.transposed else "lanes",
        streamed=not flat.lhs.transposed, sizes=layout,
    )  # fmt: skip
    rhs = Operand(
        name="rhs", dtype=dtype, length=math.prod(flat.rhs.shape), along_k="lanes" if flat.rhs.transposed else "rows",
        streamed=False, sizes=layout,
    )  # fmt: skip
    return lhs, rhs


def kernel_of(flat: GemmProblem, layout: Sizes) -> Kernel:
    """The kernel of a problem of flat buffers."""
    like = mean_problem(flat)
    lhs, rhs = operands(flat, layout)
    epilogue = Epilogue(
        length=math.prod(flat.out.shape), dtype=flat.out.dtype, groups=flat.groups, accumulate=flat.accumulate,
        alpha=flat.alpha, beta=flat.beta, bias=flat.n.size if flat.bias else 0,
    )  # fmt: skip
    return Kernel(
        lhs=lhs, rhs=rhs, epilogue=epilogue, entries=entries_of(flat), sizes=layout,
        precision=precision_of(like), flops=2 * like.m * like.k * like.n,
    )  # fmt: skip
