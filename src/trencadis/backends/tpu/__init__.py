"""Pallas kernels for TPU: a group's weights or sums stay in VMEM, and copies run beside the arithmetic.

run         operands as the kernel wants them; the kernel; the result as the problem wants it
choose      layouts that fit into VMEM, and the fastest of them by model
kernel      the body of both forms: walk, streams, and what the form does at each place (rows, contraction)
products    in which dtypes tiles are multiplied; nans, scales: what some chips and epilogues add to that
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from trencadis.backends.prepare import filled, flat_sizes, up
from trencadis.backends.tpu import products
from trencadis.backends.tpu.choose import chip_for, choose, obey, padded, reason
from trencadis.backends.tpu.kernel import call
from trencadis.backends.tpu.layout import Layout
from trencadis.backends.tpu.scales import laid
from trencadis.core.decision import Plan, Refusal
from trencadis.core.devices import CHIPS, Chip
from trencadis.core.dtypes import accumulator
from trencadis.core.epilogue import ALONG_K, Activation, elementwise
from trencadis.core.jax_compat import apart
from trencadis.core.problem import Form, Problem
from trencadis.core.target import Target
from trencadis.core.tiling import Overrides, Tiling

Array = jax.Array

OPERANDS = ("bfloat16", "float32", "int8", "float8_e4m3fn", "float8_e5m2")
RESULTS = ("bfloat16", "float32", "int8", "int32")
SCALARS = 2**16  # group sizes that scalar memory takes


def plan(problem: Problem, target: Target, overrides: Overrides) -> Plan | Refusal:
    """The layout of a kernel for dtypes that the MXU multiplies and blocks that fit into VMEM, or why there is none."""
    elsewhere = _elsewhere(target)
    if elsewhere is not None:
        return elsewhere
    chip, inner = chip_for(target), _peeled(problem)
    refusal = _arithmetic(inner) or _size(inner, chip)
    if refusal is not None:
        return refusal
    seen, tile = padded(inner), overrides.tilings.forward
    layout = choose(seen, chip) if tile is None else obey(seen, chip, tile)
    assert layout is not None  # or `_size` had refused
    said = products.note(seen, chip)
    return Plan(
        asked=problem,
        problem=inner,
        target=target,
        backend="tpu",
        tiling=Tiling(layout.tallest, layout.deep, layout.wide),
        layout=layout,
        interpret=overrides.interpret,
        because=reason(seen, layout, chip),
        notes=() if said is None else (said,),
    )


def run(plan: Plan, *operands: Array) -> Array:
    """The result of a plan's problem, by one kernel."""
    options: dict[str, Any] = {
        "compiler_params": pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=chip_for(plan.target).vmem - (1 << 19)
        )
    }
    if plan.interpret:
        options = {"interpret": pltpu.InterpretParams(uninitialized_memory="nan")}
    return execute(plan.problem, padded(plan.problem), plan.layout, *operands, **options)


def _refusal(reason: str, advice: str = "", costly: bool = True) -> Refusal:
    return Refusal(backend="tpu", reason=reason, advice=advice, costly=costly)


def _elsewhere(target: Target) -> Refusal | None:
    """Why the kernels do not run on a target."""
    if target.platform != "tpu":
        return _refusal(f"it runs on TPU; the target is {target}")
    if target.partitioned:
        return _refusal("XLA cannot partition a kernel over devices", "wrap the call in jax.shard_map")
    if target.kind is not None and target.kind not in {kind for chip in CHIPS.values() for kind in chip.kinds}:
        return _refusal(f"it knows no TPU of the kind {target.kind!r}")
    return None


def _peeled(problem: Problem) -> Problem:
    """The problem without an activation that does not lower in a kernel: XLA applies that to the finished sum."""
    activation = problem.epilogue.activation
    if activation is None or _lowers(activation, accumulator(problem.sum, problem.out)):
        return problem
    return problem.replace(epilogue=dataclasses.replace(problem.epilogue, activation=None), out=problem.sum)


def _arithmetic(problem: Problem) -> Refusal | None:
    """Why the kernels cannot compute a problem."""
    weights = (*OPERANDS, "int4") if problem.form is Form.ROWS else OPERANDS
    dtypes = [("lhs", problem.lhs, OPERANDS), ("rhs", problem.rhs, weights), ("the result", problem.out, RESULTS)]
    if problem.epilogue.bias is not None:
        dtypes.append(("bias", problem.epilogue.bias, ("bfloat16", "float32")))
    for name, dtype, known in dtypes:
        if dtype.name not in known:
            return _refusal(f"{name} is {dtype.name}; it takes {', '.join(known)}", "cast it to one of these")
    if problem.epilogue.along_k:
        return _refusal(ALONG_K)
    if _precision(problem) is None:
        return _refusal(
            f"precision is {problem.asked}; it has DEFAULT and HIGHEST", "pass one of these, or bfloat16 operands"
        )
    return None


def _size(problem: Problem, chip: Chip) -> Refusal | None:
    """Why a problem does not fit the kernels."""
    if 0 in (problem.k, *problem.out_shape, problem.rows, problem.spans, problem.groups):
        return _refusal("there is nothing to multiply", costly=False)
    if problem.batch * problem.groups > SCALARS:
        return _refusal(
            f"{problem.batch * problem.groups} group sizes are too many for scalar memory; it takes {SCALARS}"
        )
    if choose(padded(problem), chip) is None:
        return _refusal(
            f"no block of k = {problem.k} columns fits into the {chip.vmem >> 20} MiB of VMEM of a {chip.name}"
        )
    return None


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
def _lowers(activation: Activation, dtype: Any) -> bool:
    """Whether a kernel can apply the activation to a tile of this dtype."""

    def body(x: Any, out: Any) -> None:
        out[...] = elementwise(activation)(x[...]).astype(jnp.float32)

    tile = jax.ShapeDtypeStruct((8, 128), dtype)
    apply = pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32))
    try:
        apart(lambda: jax.jit(apply).trace(tile).lower(lowering_platforms=("tpu",)))
    except Exception:
        return False
    return True
