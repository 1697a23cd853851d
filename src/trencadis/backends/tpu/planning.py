"""The plan of a TPU kernel: its layout, what is peeled off the problem, and the reason; or a refusal."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from trencadis.backends.prepare import PREPARE, int4_as_int8
from trencadis.backends.tpu import gating, k_parts
from trencadis.backends.tpu.choose import chip_for, choose, choose_for_tile, padded, reason
from trencadis.backends.tpu.indexing import LANES, Ref
from trencadis.backends.tpu.layout import Layout
from trencadis.backends.tpu.passes import notes, precision_of, without_float16
from trencadis.backends.tpu.products import FLOAT4, conversion_note, exact_in_operand
from trencadis.core.activation import Activation, elementwise
from trencadis.core.decision import Dtypes, Plan, Refusal, peel, unknown_dtype
from trencadis.core.epilogue import Gate
from trencadis.core.jax_compat import apart
from trencadis.core.problem import Form, Problem
from trencadis.core.target import Target
from trencadis.core.tiling import Overrides, Tiling

Array = jax.Array

OPERANDS = ("bfloat16", "float32", "int8", "float8_e4m3fn", "float8_e5m2")
RESULTS = ("bfloat16", "float32", "int8", "int32")
GATED_DTYPES = ("bfloat16", "float32")  # of all operands and results of a gated activation
MAX_GROUP_SIZES = 2**16  # group sizes that fit into SMEM

K_LAST = "weights are stored [g, n, k], and the kernel multiplies by their scales only weights stored [g, k, n]"

_refusal = functools.partial(Refusal, "tpu")


def plan(problem: Problem, target: Target, overrides: Overrides) -> Plan | Refusal:
    """The plan of a kernel for a TPU that `elsewhere` does not refuse, or why there is none."""
    chip = chip_for(target)
    inner = problem if problem.gate is not None else int4_as_int8(without_float16(problem), weights=False)
    inner = as_stored(peel(inner, _lowers), tiled=overrides.tilings.forward is not None)
    refusal = _arithmetic(inner) or _gated(inner) or _countable(inner)
    if refusal is not None:
        return refusal
    seen, tile = padded(inner), overrides.tilings.forward
    parts = None if tile is not None else k_parts.choose_parts(inner, chip)
    if parts is not None:
        inner = k_parts.peeled(inner)
        seen = padded(k_parts.part_of(inner, parts.block_k))
    try:
        layout = parts or (choose(seen, chip) if tile is None else choose_for_tile(seen, chip, tile))
    except ValueError as error:  # the caller's tile does not fit; an error only if this backend was asked for
        if overrides.backend == "tpu" and problem.gate is None:
            raise
        return _refusal(str(error))
    if layout is None:
        fits = f"no block of k = {problem.k} columns fits into the {chip.vmem >> 20} MiB of VMEM of a {chip.name}"
        return _refusal(fits)
    said = [*notes(problem, seen, chip.name), conversion_note(seen, chip, layout.weight_parts)]
    said += [] if parts is None else [k_parts.note(inner, parts)]
    slow = overrides.advise and exact_in_operand(seen) and not layout.weight_parts
    return Plan(
        asked=problem, problem=inner, target=target, backend="tpu", interpret=overrides.interpret,
        tiling=_tiling(problem, inner, layout), layout=layout,
        because=reason(seen, layout, chip), notes=tuple(filter(None, said)),
        slow=K_LAST if slow else "", advice=PREPARE if slow else "",
    )  # fmt: skip


def as_stored(problem: Problem, *, tiled: bool) -> Problem:
    """The problem with weights, or a result of their shape, in the order in which TPUs store them in the fewest bytes.

    That has an axis of whole lanes last: without one the last axis is padded, so that XLA stores `[g, 2048, 352]` as
    `[g, 352, 2048]`, and would have to copy it before a kernel that reads `[g, 2048, 352]`. A contraction computes the
    transposed result then, from exchanged operands, unless it has a tile that the caller asked for.
    """
    if problem.form is Form.ROWS:
        last, other = (problem.k, problem.n) if problem.transpose_rhs else (problem.n, problem.k)
        transposed = last % LANES and other % LANES == 0 and problem.rhs.itemsize > 1
        return problem.replace(transpose_rhs=not problem.transpose_rhs) if transposed else problem
    plain = problem.gate is None and not problem.epilogue and not problem.transpose_lhs and not tiled
    if not plain or problem.n % LANES == 0 or problem.k % LANES:
        return problem
    return problem.replace(k=problem.n, n=problem.k, lhs=problem.rhs, rhs=problem.lhs)


def exchanged(asked: Problem, problem: Problem) -> bool:
    """Whether a contraction has exchanged operands, and so the transposed result."""
    return problem.form is Form.CONTRACTION and (asked.k, asked.n) != (problem.k, problem.n)


def _tiling(asked: Problem, problem: Problem, layout: Layout) -> Tiling:
    """The tile of a layout in the caller's units of m, k and n."""
    tiling = Tiling(layout.block_m, layout.block_k, layout.block_n)
    return Tiling(tiling.m, tiling.n, tiling.k) if exchanged(asked, problem) else tiling


def _arithmetic(problem: Problem) -> Refusal | None:
    """The refusal of a problem whose dtypes, scales or precision the kernels do not have; None if they have them."""
    weights = (*OPERANDS, "int4", FLOAT4) if problem.form is Form.ROWS else OPERANDS
    unknown = unknown_dtype("tpu", problem, Dtypes(OPERANDS, weights, RESULTS, bias=("bfloat16", "float32")))
    if unknown is not None:
        return unknown
    if problem.epilogue.along_k and (reason := _along_k(problem)):
        return _refusal(reason)
    if precision_of(problem) is None:
        return _refusal(
            f"precision is {problem.asked}; the tpu backend has DEFAULT, HIGH and HIGHEST: passes over bfloat16 parts",
            "pass one of these, or bfloat16 operands",
        )
    return None


def _along_k(problem: Problem) -> str:
    """Why the kernel cannot apply scales that change along k; nothing if it can."""
    length, unit = problem.epilogue.column_block[0], 16 if exact_in_operand(problem) else 32
    if problem.form is not Form.ROWS or problem.epilogue.row_block:
        return "scales of rows change along k, and the tpu backend applies only those of weights"
    if length % unit:
        return f"scales change along k every {length}; the tpu backend applies those per multiple of {unit}"
    return ""


def _gated(problem: Problem) -> Refusal | None:
    """The refusal of a gated activation that the kernel does not apply; None if it does, or if there is none."""
    gate, epilogue = problem.gate, problem.epilogue
    if gate is None:
        return None
    unknown = unknown_dtype("tpu", problem, Dtypes(*(GATED_DTYPES,) * 4))
    if unknown is not None:
        return unknown
    if gate.gather is not None:
        return _refusal("rows are gathered before the kernel", costly=False)
    if gate.activation is None:
        return _refusal("the second of two products is added to the first as existing_out", costly=False)
    if problem.batch > 1 or epilogue.scaled or epilogue.activation is not None or epilogue.accumulate:
        return _refusal("a gated activation in the kernel goes with a bias and no batch, scales or existing_out")
    if not _gate_lowers(gate, problem.out):
        return _refusal(f"{gate} does not lower inside a kernel", "use operations that Pallas has on TPU")
    return None


def _countable(problem: Problem) -> Refusal | None:
    """The refusal of a problem that is empty, or whose sizes do not fit into SMEM; None if there is none."""
    if problem.empty:
        return _refusal("there is nothing to multiply", costly=False)
    sizes = problem.batch * problem.groups
    if sizes > MAX_GROUP_SIZES:
        return _refusal(f"{sizes} group sizes are too many for scalar memory, which holds {MAX_GROUP_SIZES}")
    return None


@functools.lru_cache(maxsize=256)
def _lowers(activation: Activation, dtype: np.dtype[Any]) -> bool:
    """Whether Mosaic can lower the activation of a tile of this dtype inside a kernel."""
    return _kernel_lowers(lambda x: [elementwise(activation)(x)], (dtype,))


@functools.lru_cache(maxsize=256)
def _gate_lowers(gate: Gate, out: np.dtype[Any]) -> bool:
    """Whether Mosaic can lower a gated activation, or its pullback, inside a kernel."""

    def apply(*tiles: Array) -> list[Array]:
        if not gate.pullback:
            return gating.activated(gate, out, tiles)
        d_h, z_gate, z_up, weight = tiles
        return gating.pulled_back(gate, d_h, (z_gate, z_up), weight[:, :1], None)

    dtypes = (np.float32, out, out, np.float32) if gate.pullback else (np.float32, np.float32)
    return _kernel_lowers(apply, dtypes)


def _kernel_lowers(fn: Callable[..., list[Array]], dtypes: Sequence[DTypeLike]) -> bool:
    """Whether Mosaic can lower a function of native tiles of these dtypes inside a kernel."""

    def body(*refs: Ref) -> None:
        *given, out = refs
        out[...] = sum(each.astype(jnp.float32) for each in fn(*(ref[...] for ref in given)))

    tiles = [jax.ShapeDtypeStruct((16, LANES), dtype) for dtype in dtypes]
    apply = pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct((16, LANES), jnp.float32))
    try:
        apart(lambda: jax.jit(apply).trace(*tiles).lower(lowering_platforms=("tpu",)))
    except Exception:
        return False
    return True
