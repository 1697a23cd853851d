"""A plan of a TPU kernel carried out: operands padded to what it reads, its call, and results cut to their shapes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from trencadis.backends.prepare import flat_sizes, pad_to, round_up
from trencadis.backends.tpu import block_scales, gating, k_parts
from trencadis.backends.tpu.choose import chip_for, padded
from trencadis.backends.tpu.epilogue_vectors import as_lane_vectors
from trencadis.backends.tpu.kernel import call
from trencadis.backends.tpu.layout import Layout
from trencadis.backends.tpu.passes import precision_of
from trencadis.backends.tpu.planning import exchanged
from trencadis.backends.tpu.realign import native_rows
from trencadis.core.decision import Plan
from trencadis.core.jax_compat import vary_alike
from trencadis.core.problem import Form, Problem
from trencadis.core.spans import owned

Array = jax.Array


def run(plan: Plan, *operands: Array) -> Any:
    """The result of a plan's problem, computed by one kernel; with a gated activation a list of its results."""
    options = call_options(plan, dimension_semantics=("parallel",))
    operands = tuple(_as_stored(plan, *operands))
    if plan.problem.gate is not None:
        return execute(plan.problem, padded(plan.problem), plan.layout, *operands, **options)
    given = zip(operands, plan.problem.operands, strict=True)
    wide = [x.astype(dtype) if x.dtype in (jnp.float16, jnp.int4) else x for x, (_, dtype) in given]
    compute = execute_parts if k_parts.in_parts(plan.problem, plan.layout) else execute
    (out,) = compute(plan.problem, padded(plan.problem), plan.layout, *wide, **options)
    out = in_memory_order(out) if exchanged(plan.asked, plan.problem) else out
    return out if plan.peeled or plan.split else out.astype(plan.asked.out)


def _as_stored(plan: Plan, *operands: Array) -> list[Array]:
    """The operands of a plan's problem, whose weights may be in another order than was asked, which costs no copy."""
    problem, (lhs, rhs, *rest) = plan.problem, operands
    if exchanged(plan.asked, problem):
        return [rhs, lhs, *rest]
    if plan.asked.transpose_rhs == problem.transpose_rhs:
        return [lhs, rhs, *rest]
    if problem.gate is not None and not problem.gate.pullback:
        up = len(problem.epilogue.split(tuple(rest[2:])).given) + 2
        rest[up] = in_memory_order(rest[up])
    return [lhs, in_memory_order(rhs), *rest]


@jax.jit
def in_memory_order(x: Array) -> Array:
    """Transposed matrices, as XLA stores them already, so that nothing is moved; `why` leaves it out by its name."""
    return x.mT


def call_options(plan: Plan, **params: Any) -> dict[str, Any]:
    """The options of a kernel's call: the limit of VMEM and other parameters of the compiler, or the interpreter."""
    if plan.interpret:
        return {"interpret": pltpu.InterpretParams(uninitialized_memory="nan")}
    limit = chip_for(plan.target).vmem - (1 << 19)
    return {"compiler_params": pltpu.CompilerParams(vmem_limit_bytes=limit, **params)}


def execute(problem: Problem, inner: Problem, layout: Layout, *operands: Array, **options: Any) -> list[Array]:
    """The results of a problem by a kernel of this layout; `inner` is the problem with padded k and n.

    Operands are padded to what the kernel reads, and its results are sliced to the shape of the problem.
    """
    cut = "interpret" not in options and copies_cut(problem, inner, layout)
    layout = dataclasses.replace(layout, columns=problem.n, cut=cut)
    _, _, sizes, first, *_ = operands
    named = _operands(problem, inner, layout, *operands)
    if "interpret" in options:  # the interpreter does not bitcast references
        named = {name: block_scales.as_integers(x) for name, x in named.items()}
    found = call(inner.replace(precision=precision_of(problem)), layout, named, **options)
    sums = found.pop("row_sums", None)
    outs = [
        x if x.shape == problem.out_shape else lax.slice(x, (0,) * x.ndim, problem.out_shape) for x in found.values()
    ]
    if sums is not None:
        mine = owned(problem, sizes, first)
        outs.append(jnp.where(mine, jnp.sum(sums[: problem.rows], axis=1), 0))
    return outs


def copies_cut(problem: Problem, inner: Problem, layout: Layout) -> bool:
    """Whether arrays keep columns that are not whole lanes, where the kernel has a copy that begins at the last ones.

    An array in HBM is padded to whole tiles, up to which copies may read and write; Pallas's own pipelines do so. The
    interpreter has no such padding.
    """
    several = layout.chunk < inner.n and problem.n != inner.n
    whole = not problem.transpose_rhs or problem.n % native_rows(problem.rhs.itemsize) == 0
    return problem.form is Form.ROWS and several and whole


def execute_parts(problem: Problem, inner: Problem, layout: Layout, *operands: Array, **options: Any) -> list[Array]:
    """The sums of a problem by a kernel for each part of k, in a list of one; `inner` has padded n."""
    length, count = layout.block_k, -(-problem.k // layout.block_k)
    part = k_parts.part_of(inner, length).replace(precision=precision_of(problem))
    layout = dataclasses.replace(layout, columns=problem.n)
    named = _operands(problem, inner.replace(k=length * count), layout, *operands)

    def add(sums: Array, start: Array) -> tuple[Array, None]:
        found = call(part, layout, {**named, "k_start": start, "existing": sums}, **options)
        return found["out"], None

    # inside shard_map a loop carries arrays that vary over the same mesh axes
    rows = named["lhs"].shape[0]
    sums, *_ = vary_alike(jnp.zeros((rows, inner.n), part.out), *named.values())
    starts = length * jnp.arange(count, dtype=jnp.int32)[:, None]
    return [lax.slice(lax.scan(add, sums, starts)[0], (0, 0), problem.out_shape)]


def _operands(problem: Problem, inner: Problem, layout: Layout, *operands: Array) -> dict[str, Array]:
    """All operands of the kernel, by name."""
    _, _, sizes, first, *_ = operands
    return {
        "sizes": flat_sizes(sizes, problem.m),
        "first": first,
        "height_table": jnp.asarray(layout.height_table, jnp.int32),
        **_padded_operands(problem, inner, layout, *operands),
    }


def _padded_operands(problem: Problem, inner: Problem, layout: Layout, *operands: Array) -> dict[str, Array]:
    """The operands that the kernel copies to VMEM, by name, in the shapes that it reads."""
    lhs, rhs, _, _, *rest = operands
    extras = problem.epilogue.split(tuple(rest))
    rows, k, n = round_up(problem.rows, max(layout.sublane_tile, layout.dma_align)), inner.k, inner.n
    if problem.form is Form.CONTRACTION:
        rhs_shape: tuple[int, ...] = (rows, n)
    else:
        n = problem.n if layout.cut else n
        rhs_shape = (problem.weights, n, k) if problem.transpose_rhs else (problem.weights, k, n)
    named = {
        "lhs": pad_to(lhs, (k, rows) if problem.transpose_lhs else (rows, k)),
        "rhs": block_scales.padded(rhs, rhs_shape),
    }
    vectors, by_row = {"by_column": extras.by_column, "bias": extras.bias}, extras.by_row
    if block_scales.applies(problem):
        vectors["by_column"], scales = None, extras.by_column
        assert scales is not None
        named["block_scales"] = block_scales.in_columns(problem, inner, layout, scales)
    matrices = {"existing": extras.existing}
    own = rest[len(extras.given) :]
    if gating.is_pullback(problem):
        matrices["z_gate"], matrices["z_up"], by_row = own
    elif own:
        named["rhs_up"] = pad_to(own[0], rhs_shape)
        vectors["bias_up"] = own[1] if len(own) > 1 else None
    if by_row is not None:
        named["by_row"] = as_lane_vectors(inner, layout, by_row)
    out_shape: tuple[int, ...] = (problem.spans, k, n)
    if problem.form is Form.ROWS:
        out_shape = (round_up(problem.rows, layout.sublane_tile), n)
    named |= {
        name: pad_to(x, (problem.local_groups, inner.n))[:, None, :] for name, x in vectors.items() if x is not None
    }
    return named | {name: pad_to(x, out_shape) for name, x in matrices.items() if x is not None}
