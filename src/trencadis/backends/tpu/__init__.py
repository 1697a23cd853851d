"""Pallas kernels for TPUs: one kernel per call, in which a group's weights or accumulators stay in VMEM.

choose             the layout for a problem: the fastest by the cost `model` of those that fit into VMEM
layout             what a layout holds: block sizes, heights of row tiles, numbers of buffers
kernel             the Pallas call, and the loop over tiles of both forms
rows               the body of the rows form; contraction: that of the other form
tile_scheduler     the order of tiles, computed from group sizes in SMEM; indexing: blocks and chunks of an axis
pipeline           prefetched operands, and results that are written back asynchronously
products           the product of two tiles and its dtypes; nans: NaNs of float8_e4m3fn, which some MXUs drop
epilogue_vectors   scales and bias in VMEM
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from trencadis.backends.prepare import flat_sizes, pad_to, round_up
from trencadis.backends.tpu.choose import chip_for, choose, choose_for_tile, padded, reason
from trencadis.backends.tpu.epilogue_vectors import as_lane_vectors
from trencadis.backends.tpu.indexing import Ref
from trencadis.backends.tpu.kernel import call
from trencadis.backends.tpu.layout import Layout
from trencadis.backends.tpu.products import conversion_note
from trencadis.core.decision import Dtypes, Plan, Refusal, unknown_dtype
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
MAX_GROUP_SIZES = 2**16  # group sizes that fit into SMEM

_refusal = functools.partial(Refusal, "tpu")


def plan(problem: Problem, target: Target, overrides: Overrides) -> Plan | Refusal:
    """The plan of a kernel, for dtypes that it multiplies and blocks that fit into VMEM, or why there is none."""
    elsewhere = _elsewhere(target)
    if elsewhere is not None:
        return elsewhere
    chip, inner = chip_for(target), _peeled(problem)
    refusal = _arithmetic(inner) or _size(inner, chip)
    if refusal is not None:
        return refusal
    seen, tile = padded(inner), overrides.tilings.forward
    try:
        layout = choose(seen, chip) if tile is None else choose_for_tile(seen, chip, tile)
    except ValueError as error:  # the caller's tile does not fit; an error only if this backend was asked for
        if overrides.backend == "tpu":
            raise
        return _refusal(str(error))
    assert layout is not None  # otherwise `_size` had refused
    note = conversion_note(seen, chip)
    return Plan(
        asked=problem, problem=inner, target=target, backend="tpu", interpret=overrides.interpret,
        tiling=Tiling(layout.block_m, layout.block_k, layout.block_n), layout=layout,
        because=reason(seen, layout, chip), notes=() if note is None else (note,),
    )  # fmt: skip


def run(plan: Plan, *operands: Array) -> Array:
    """The result of a plan's problem, computed by one kernel."""
    options: dict[str, Any] = {
        "compiler_params": pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=chip_for(plan.target).vmem - (1 << 19)
        )
    }
    if plan.interpret:
        options = {"interpret": pltpu.InterpretParams(uninitialized_memory="nan")}
    return execute(plan.problem, padded(plan.problem), plan.layout, *operands, **options)


def _elsewhere(target: Target) -> Refusal | None:
    """The refusal of a target that is not a single TPU of a known kind; None if the kernels run on it."""
    if target.platform != "tpu":
        return _refusal(f"it runs on TPU; the target is {target}")
    if target.partitioned:
        return _refusal("XLA cannot partition a kernel over devices", "wrap the call in jax.shard_map")
    if target.kind is not None and target.kind not in {kind for chip in CHIPS.values() for kind in chip.kinds}:
        return _refusal(f"it knows no TPU of the kind {target.kind!r}")
    return None


def _peeled(problem: Problem) -> Problem:
    """The problem without an activation that does not lower inside a kernel: XLA applies it to the finished sum."""
    activation = problem.epilogue.activation
    if activation is None or _lowers(activation, accumulator(problem.sum, problem.out)):
        return problem
    return problem.replace(epilogue=dataclasses.replace(problem.epilogue, activation=None), out=problem.sum)


def _arithmetic(problem: Problem) -> Refusal | None:
    """The refusal of a problem whose dtypes, scales or precision the kernels do not have; None if they have them."""
    weights = (*OPERANDS, "int4") if problem.form is Form.ROWS else OPERANDS
    unknown = unknown_dtype("tpu", problem, Dtypes(OPERANDS, weights, RESULTS, bias=("bfloat16", "float32")))
    if unknown is not None:
        return unknown
    if problem.epilogue.along_k:
        return _refusal(ALONG_K)
    if _precision(problem) is None:
        return _refusal(
            f"precision is {problem.asked}; it has DEFAULT and HIGHEST", "pass one of these, or bfloat16 operands"
        )
    return None


def _size(problem: Problem, chip: Chip) -> Refusal | None:
    """The refusal of a problem that is empty, or too large for SMEM or VMEM; None if it fits."""
    if 0 in (problem.k, *problem.out_shape, problem.rows, problem.spans, problem.groups):
        return _refusal("there is nothing to multiply", costly=False)
    if problem.batch * problem.groups > MAX_GROUP_SIZES:
        return _refusal(
            f"{problem.batch * problem.groups} group sizes are too many for scalar memory; it takes {MAX_GROUP_SIZES}"
        )
    if choose(padded(problem), chip) is None:
        return _refusal(
            f"no block of k = {problem.k} columns fits into the {chip.vmem >> 20} MiB of VMEM of a {chip.name}"
        )
    return None


def execute(problem: Problem, inner: Problem, layout: Layout, *operands: Array, **options: Any) -> Array:
    """The result of a problem by a kernel of this layout; `inner` is the problem with padded k and n.

    Operands are padded to what the kernel reads, and its result is sliced to the shape of the problem.
    """
    lhs, rhs, sizes, first, *extras = operands
    by_row, by_column, bias, existing = problem.epilogue.split(tuple(extras))
    rows = round_up(problem.rows, layout.sublane_tile)
    k, n = inner.k, inner.n
    out_shape = (rows, n) if problem.form is Form.ROWS else (problem.spans, k, n)
    lhs = pad_to(lhs, (k, rows) if problem.transpose_lhs else (rows, k))
    if problem.form is Form.CONTRACTION:
        rhs = pad_to(rhs, (rows, n))
    else:
        rhs = pad_to(rhs, (problem.weights, n, k) if problem.transpose_rhs else (problem.weights, k, n))
    named = {
        "sizes": flat_sizes(sizes, problem.m),
        "first": first,
        "height_table": jnp.asarray(layout.height_table, jnp.int32),
        "lhs": lhs,
        "rhs": rhs,
    }
    if by_row is not None:
        named["by_row"] = as_lane_vectors(inner, layout, by_row)
    for name, vector in (("by_column", by_column), ("bias", bias)):
        if vector is not None:
            named[name] = pad_to(vector, (problem.local_groups, n))[:, None, :]  # [g, 1, n]
    if existing is not None:
        named["existing"] = pad_to(existing, out_shape)
    out = call(inner.replace(precision=_precision(problem)), layout, named, out_shape, **options)
    return out if out_shape == problem.out_shape else lax.slice(out, (0,) * out.ndim, problem.out_shape)


def _precision(problem: Problem) -> lax.Precision | None:
    """The precision of the products inside the kernel, or None if it does not have the one that was asked for.

    Only float32 operands have a choice. The precision is always explicit: otherwise a product inside the kernel would
    take it from jax_default_matmul_precision, which may name one that the kernel does not have.
    """
    if jnp.float32 not in (problem.lhs, problem.rhs):
        return lax.Precision.DEFAULT
    known = problem.precisions
    return next(iter(known)) if known in ({lax.Precision.DEFAULT}, {lax.Precision.HIGHEST}) else None


@functools.lru_cache(maxsize=256)
def _lowers(activation: Activation, dtype: np.dtype[Any]) -> bool:
    """Whether Mosaic can lower the activation of a tile of this dtype inside a kernel."""

    def body(x: Ref, out: Ref) -> None:
        out[...] = elementwise(activation)(x[...]).astype(jnp.float32)

    tile = jax.ShapeDtypeStruct((8, 128), dtype)
    apply = pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32))
    try:
        apart(lambda: jax.jit(apply).trace(tile).lower(lowering_platforms=("tpu",)))
    except Exception:
        return False
    return True
