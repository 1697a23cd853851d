"""Pallas kernels for TPU: a group's weights or sums stay in VMEM, and copies run beside the arithmetic.

run         operands as the kernel wants them; the kernel; the result as the problem wants it
choose      layouts that fit into VMEM, and the fastest of them by model
kernel      the body of both forms: walk, streams, and what the form does at each place (rows, contraction)
products    in which dtypes tiles are multiplied; nans, scales: what some chips and epilogues add to that
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from trencadis.backends.prepare import filled, flat_sizes, up
from trencadis.backends.tpu import products
from trencadis.backends.tpu.choose import chip_for, choose, obey, padded
from trencadis.backends.tpu.kernel import call
from trencadis.backends.tpu.layout import Layout
from trencadis.backends.tpu.scales import laid
from trencadis.core.devices import CHIPS, Chip
from trencadis.core.dtypes import accumulator
from trencadis.core.epilogue import IN_PARTS, elementwise
from trencadis.core.jax_compat import apart
from trencadis.core.problem import Form, Problem
from trencadis.core.target import Target
from trencadis.core.tiling import Tiling

Array = jax.Array

OPERANDS = ("bfloat16", "float32", "int8", "float8_e4m3fn", "float8_e5m2")
RESULTS = ("bfloat16", "float32", "int8", "int32")
SCALARS = 2**16  # group sizes that scalar memory takes


def supports(problem: Problem, target: Target) -> str | None:
    """Problems in dtypes that the MXU multiplies, with operands that fit into VMEM by blocks."""
    if target.platform != "tpu":
        return f"it runs on TPU; the target is {target}"
    if target.partitioned:
        return "XLA cannot partition a kernel over devices; wrap the call in jax.shard_map"
    if target.kind is not None and target.kind not in {kind for chip in CHIPS.values() for kind in chip.kinds}:
        return f"it knows no TPU of the kind {target.kind!r}"
    return _arithmetic(problem) or _size(problem, chip_for(target))


def _arithmetic(problem: Problem) -> str | None:
    """Why the kernels cannot compute it."""
    weights = (*OPERANDS, "int4") if problem.form is Form.ROWS else OPERANDS
    dtypes = [("lhs", problem.lhs, OPERANDS), ("rhs", problem.rhs, weights), ("the result", problem.out, RESULTS)]
    if problem.epilogue.bias is not None:
        dtypes.append(("bias", problem.epilogue.bias, ("bfloat16", "float32")))
    for name, dtype, known in dtypes:
        if dtype.name not in known:
            return f"{name} is {dtype.name}; it takes {', '.join(known)}"
    if problem.epilogue.blocks:
        return IN_PARTS
    if _precision(problem) is None:
        return f"precision is {problem.asked}; it has DEFAULT and HIGHEST"
    return None if problem.epilogue.activation is None else _unable(problem)


def _size(problem: Problem, chip: Chip) -> str | None:
    """Why it does not fit the kernels."""
    if 0 in (problem.k, *problem.out_shape, problem.rows, problem.spans, problem.groups):
        return "there is nothing to multiply"
    if problem.batch * problem.groups > SCALARS:
        return f"{problem.batch * problem.groups} group sizes are too many for scalar memory; it takes {SCALARS}"
    if choose(padded(problem), chip) is None:
        return f"no block of k = {problem.k} columns fits into the {chip.vmem >> 20} MiB of VMEM of a {chip.name}"
    return None


def tiling(problem: Problem, target: Target) -> Tiling:
    """Rows of the tallest tile, and the columns of k and n that a block holds."""
    layout = choose(padded(problem), chip_for(target))
    return Tiling(layout.tallest, layout.deep, layout.wide)


def note(problem: Problem, target: Target) -> str | None:
    """How operands of few bits are multiplied."""
    return products.note(padded(problem), chip_for(target))


def run(problem: Problem, plan: Any, *operands: Array) -> Array:
    """The result of a problem."""
    chip, inner = chip_for(plan.target), padded(problem)
    layout = choose(inner, chip)
    if plan.tiling != Tiling(layout.tallest, layout.deep, layout.wide):
        layout = obey(inner, chip, plan.tiling)
    options = {
        "compiler_params": pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=chip.vmem - (1 << 19)
        )
    }
    if plan.interpret:
        options = {"interpret": pltpu.InterpretParams(uninitialized_memory="nan")}
    return execute(problem, inner, layout, *operands, **options)


def execute(problem: Problem, inner: Problem, layout: Layout, *operands: Array, **options: Any) -> Array:
    """The result of a problem by a kernel of this layout; `inner` is the problem as the kernel sees it."""
    lhs, rhs, sizes, first, *extras = operands
    by_row, by_column, bias, existing = problem.epilogue.split(tuple(extras))
    rows = up(problem.rows, layout.slab)
    k, n = inner.k, inner.n
    out_shape = (rows, n) if problem.form is Form.ROWS else (problem.spans, k, n)
    lhs = filled(lhs, (k, rows) if problem.transpose_lhs else (rows, k))
    if problem.form is Form.CONTRACTION:
        rhs = filled(rhs, (rows, n))
    else:
        rhs = filled(rhs, (problem.weights, n, k) if problem.transpose_rhs else (problem.weights, k, n))
    named = {
        "sizes": flat_sizes(sizes, problem.m),
        "first": first,
        "table": jnp.asarray(layout.table, jnp.int32),
        "lhs": lhs,
        "rhs": rhs,
    }
    if by_row is not None:
        named["by_row"] = laid(inner, layout, by_row)
    for name, vector in (("by_column", by_column), ("bias", bias)):
        if vector is not None:
            named[name] = filled(vector, (problem.local_groups, n))[:, None, :]  # [g, 1, n]
    if existing is not None:
        named["existing"] = filled(existing, out_shape)
    out = call(inner.replace(precision=_precision(problem)), layout, named, out_shape, **options)
    return out if out_shape == problem.out_shape else lax.slice(out, (0,) * out.ndim, problem.out_shape)


def _precision(problem: Problem) -> lax.Precision | None:
    """The precision as the kernel spells it, or None if it has no such. Only float32 operands have one.

    It is always spelt: a product in the kernel would take the setting otherwise, which may be one it does not have.
    """
    if jnp.float32 not in (problem.lhs, problem.rhs):
        return lax.Precision.DEFAULT
    known = problem.precisions
    return next(iter(known)) if known in ({lax.Precision.DEFAULT}, {lax.Precision.HIGHEST}) else None


@functools.lru_cache(maxsize=256)
def _lowers(activation: Any, dtype: Any) -> str | None:
    """None if a kernel can apply the activation to a tile, else what the compiler's front end says."""

    def body(x: Any, out: Any) -> None:
        out[...] = elementwise(activation)(x[...]).astype(jnp.float32)

    tile = jax.ShapeDtypeStruct((8, 128), dtype)
    apply = pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32))
    try:
        apart(lambda: jax.jit(apply).trace(tile).lower(lowering_platforms=("tpu",)))
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return None


def _unable(problem: Problem) -> str | None:
    reason = _lowers(problem.epilogue.activation, accumulator(problem.sum, problem.out))
    name = getattr(problem.epilogue.activation, "__name__", problem.epilogue.activation)
    return None if reason is None else f"activation {name} does not lower in a kernel ({reason})"
