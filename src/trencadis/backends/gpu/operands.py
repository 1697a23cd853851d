"""Operands as the kernel reads them: cast, transposed and padded by XLA, each by the name that it has in the kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from trencadis.backends.gpu.choose import mma_dtype
from trencadis.backends.gpu.layout import ROW_ALIGN, WGMMA_M, Layout, swizzle_elements
from trencadis.backends.gpu.parts import OPERANDS, hi_lo, part_name, three_parts
from trencadis.backends.gpu.scales import column_scales_by_step, shared_by_tile
from trencadis.backends.prepare import flat_sizes, pad_to, round_up
from trencadis.core.dtypes import bits
from trencadis.core.interleave import interleave_columns
from trencadis.core.problem import Form, Problem
from trencadis.core.wide_upcast import takes, upcast

Array = jax.Array
LEAST_SWIZZLE = 32  # bytes of the shortest swizzle row


def execute(problem: Problem, layout: Layout, *operands: Array, interpret: Any = None) -> Any:
    """The result of a problem, or a list of them, by a kernel of this layout.

    Each operand is padded where a TMA copy wants it.
    """
    from trencadis.backends.gpu.kernel import call  # here, so that a machine without a GPU need not import it
    from trencadis.backends.gpu.upcast import permute_k

    lhs, rhs, sizes, first_group, *extras = operands
    weights = problem.rhs
    given = problem.epilogue.split(tuple(extras))
    if interpret is not None:
        problem, layout, rhs = _interpreted(problem, layout, rhs)
    inner, named = _prepared(problem, layout, lhs, rhs, interpret is not None)
    in_registers = layout.upcast and not layout.upcast_in_smem
    if inner.interleaved and not in_registers:
        named["lhs"] = interleave_columns(named["lhs"], weights)
    elif in_registers and not inner.interleaved and inner.lhs.itemsize > 1:
        named["lhs"] = permute_k(named["lhs"], inner.rhs)
    named["sizes"] = flat_sizes(sizes, problem.m)
    named["first_group"] = first_group
    out_shape = (*problem.out_shape[:-1], inner.n)
    if given.by_row is not None:  # TMA wants rows of a multiple of 16 bytes, and those of a step to be neighbours
        length = problem.epilogue.row_block
        by_row = given.by_row.mT if length else given.by_row
        lead = (-(-inner.k // length),) if length else by_row.shape[:-1]
        named["by_row"] = pad_to(by_row, (*lead, round_up(by_row.shape[-1], 4)))
    if given.by_column is not None:
        named["by_column"] = _column_scales(problem, inner, layout, given.by_column)
    if given.bias is not None:
        named["bias"] = pad_to(given.bias, (problem.local_groups, inner.n))
    if given.existing is not None:
        named["existing"] = pad_to(given.existing, out_shape)
    named |= _gate_operands(problem, named, inner.n, *extras[len(given.given) :])
    outs = call(inner, layout.replace(columns=problem.n), named, interpret)
    sums = [jnp.sum(outs.pop(), axis=0)] if problem.gate is not None and problem.gate.pullback else []
    outs = [x if out_shape == problem.out_shape else lax.slice(x, (0,) * x.ndim, problem.out_shape) for x in outs]
    return outs[0] if problem.gate is None else outs + sums


def _gate_operands(problem: Problem, product: dict[str, Array], n: int, *operands: Array) -> dict[str, Array]:
    """The operands of a gated activation by name, padded like those of the product."""
    if problem.gate is None:
        return {}
    lhs, rhs, given, named = product["lhs"].shape, product["rhs"].shape, list(operands), {}
    if problem.gather is not None:
        *given, named["token"], _ = given
    if problem.gate.pullback:
        *z, weight = given
        rows = round_up(problem.rows, ROW_ALIGN)
        named |= {name: pad_to(each, (rows, n)) for name, each in zip(("z_gate", "z_up"), z, strict=True)}
        return {**named, "weight": pad_to(weight, (round_up(problem.rows, 4),))}
    shapes = {"up": rhs, "bias_up": (problem.local_groups, n)}
    if problem.gate.activation is None and problem.form is Form.ROWS:
        shapes = {"lhs_up": lhs, "up": rhs}
    return named | {name: pad_to(x, shape) for x, (name, shape) in zip(given, shapes.items(), strict=False)}


def _interpreted(problem: Problem, layout: Layout, rhs: Array) -> tuple[Problem, Layout, Array]:
    """A problem, its layout and weights for the interpreter: it has no atomics, register operands and inlined PTX."""
    eight = problem.lhs.itemsize == 1
    if layout.upcast and eight:
        problem, rhs = problem.replace(rhs=problem.lhs), rhs.astype(problem.lhs)
    layout = layout.replace(
        dynamic=False, num_ctas=min(layout.num_ctas, 2), upcast=layout.upcast and not eight,
        upcast_in_smem=layout.upcast and not eight, transpose_in_smem=False, k_major=layout.k_major or eight,
        pipelines=1 if layout.upcast else layout.pipelines, interpreted=True,
    )  # fmt: skip
    return problem, layout, rhs


def _column_scales(problem: Problem, inner: Problem, layout: Layout, scales: Array) -> Array:
    """The scales of columns, as the kernel of the inner problem reads them."""
    from trencadis.backends.gpu.block_scales import stored
    from trencadis.backends.gpu.store import vectors

    _, across = problem.epilogue.column_block
    if shared_by_tile(inner):
        length, _ = vectors(inner, layout)["by_column"]
        return pad_to(scales.mT.astype(jnp.float32), (scales.shape[0], scales.shape[2], length))
    if column_scales_by_step(inner):
        scales = jnp.repeat(scales.astype(jnp.float32), across, axis=2) if across > 1 else scales.astype(jnp.float32)
        return pad_to(scales[..., : problem.n], (*scales.shape[:2], inner.n))
    if problem.epilogue.column_block[0]:
        return stored(inner.replace(n=problem.n, k=problem.k), layout, scales)
    return pad_to(scales, (problem.local_groups, inner.n))


def _prepared(
    problem: Problem, layout: Layout, lhs: Array, rhs: Array, interpret: bool
) -> tuple[Problem, dict[str, Array]]:
    """The problem as the kernel sees it, and its operands cast, transposed and padded for it.

    A TMA copy takes whole swizzle rows and starts at multiples of a few rows, so that dimensions are padded to those.
    Past the end of an array it reads 0, but the interpreter reads NaN. Tensor cores multiply all but 16-bit dtypes only
    K-major.
    """
    dtype = mma_dtype(problem)
    k, n = _aligned(problem, layout)
    problem = problem.replace(lhs=dtype, rhs=problem.rhs if layout.upcast else dtype)
    run, rows = swizzle_elements(dtype, layout.swizzle), round_up(problem.rows, ROW_ALIGN)
    if problem.form is Form.ROWS:
        k_major = problem.transpose_rhs or layout.k_major
        rhs = rhs.mT if layout.k_major and not problem.transpose_rhs else rhs
        shape: tuple[int, ...] = _weights_shape(problem, layout)
        if interpret:
            k = round_up(problem.k, layout.block_k)
            shape = (problem.weights, n, k) if k_major else (problem.weights, k, n)
        shapes: list[tuple[int, ...]] = [(rows, k), shape]
        inner = problem.replace(k=k, n=n, transpose_rhs=k_major)
    else:
        k_major = problem.transpose_lhs or layout.k_major
        lhs = lhs.mT if layout.k_major and not problem.transpose_lhs else lhs
        rhs = rhs.mT if layout.k_major else rhs
        whole = round_up(problem.rows, run)
        shapes = [(round_up(problem.k, ROW_ALIGN), whole) if k_major else (rows, k)]
        shapes += [(n, whole) if layout.k_major else (rows, n)]
        inner = problem.replace(n=n)
    if problem.gather is not None:
        at = OPERANDS.index(problem.gather.operand)
        shapes[at] = (problem.gather.tokens, shapes[at][1])
    named = {}
    for name, x, shape, dtype in zip(OPERANDS, (lhs, rhs), shapes, (problem.lhs, problem.rhs), strict=True):
        parts = {pair[OPERANDS.index(name)] for pair in layout.products}
        if len(parts) == 2:
            named[name], named[part_name(name, 1)] = hi_lo(pad_to(x, shape))
        elif len(parts) == 3:
            named |= {part_name(name, i): part for i, part in enumerate(three_parts(pad_to(x, shape)))}
        else:
            named[name] = pad_to(_cast(x, dtype, interpret), shape)
    return inner, named


def _aligned(problem: Problem, layout: Layout) -> tuple[int, int]:
    """The k and n of operands and of the result in whole swizzle rows."""
    run, out_run = swizzle_elements(mma_dtype(problem), layout.swizzle), swizzle_elements(problem.out)
    k_run = max(run, 8 * LEAST_SWIZZLE // bits(problem.rhs)) if layout.upcast else run
    n_run = out_run if layout.k_major else max(WGMMA_M if layout.transpose_in_smem else run, out_run)
    return round_up(problem.k, k_run), round_up(problem.n, n_run)


def _weights_shape(problem: Problem, layout: Layout) -> tuple[int, int, int]:
    """The shape of weights: a copy of rows past the end reads 0, so that only rows have to be whole swizzle rows."""
    k, n = _aligned(problem, layout)
    if problem.transpose_rhs or layout.k_major:
        return problem.weights, round_up(problem.n, ROW_ALIGN), k
    return problem.weights, round_up(problem.k, ROW_ALIGN), n


def padded(problem: Problem, layout: Layout) -> tuple[bool, bool]:
    """Whether weights are copied to align them, and whether the result is."""
    k_major = problem.transpose_rhs or layout.k_major
    shape = (problem.weights, *((problem.n, problem.k) if k_major else (problem.k, problem.n)))
    weights = problem.form is Form.ROWS and shape != _weights_shape(problem, layout)
    return weights, problem.n != _aligned(problem, layout)[1]


def _cast(x: Array, dtype: Any, interpret: bool) -> Array:
    """An array in the dtype in which it is multiplied; a CPU, which interprets a kernel, has the plain conversion."""
    return upcast(x) if dtype == jnp.bfloat16 and takes(x) and not interpret else x.astype(dtype)
