"""Pallas kernels for TPUs: one kernel per call, in which a group's weights or accumulators stay in VMEM.

choose             the layout for a problem: the fastest by the cost `model` of those that fit into VMEM
layout             what a layout holds: block sizes, heights of row tiles, numbers of buffers
kernel             the Pallas call, and the loop over tiles of both forms
rows               the body of the rows form; contraction: that of the other form
row_results        results of the rows form on their way to HBM; gating: gated activations and their pullback
tile_scheduler     the order of tiles, computed from group sizes in SMEM; indexing: blocks and chunks of an axis
pipeline           prefetched operands, and results that are written back asynchronously
products           the product of two tiles and its dtypes; float8: float8_e4m3fn on chips that know another format
realign            rows of 8 bits that start between the rows at which copies from HBM can
k_parts            k that is too long for VMEM, in parts
passes             float32 as bfloat16 parts, for precise products; float16, which XLA converts
epilogue_vectors   scales and bias in VMEM; block_scales: scales of weights that change along k
ragged             the kernels of the general grouped GEMM, in which more than one of m, k and n differs by group
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from trencadis.backends.prepare import PREPARE, flat_sizes, pad_to, round_up
from trencadis.backends.tpu import block_scales, gating, k_parts
from trencadis.backends.tpu.choose import chip_for, choose, choose_for_tile, padded, reason
from trencadis.backends.tpu.epilogue_vectors import as_lane_vectors
from trencadis.backends.tpu.indexing import LANES, Ref
from trencadis.backends.tpu.kernel import call
from trencadis.backends.tpu.layout import Layout
from trencadis.backends.tpu.passes import notes, precision_of, without_float16
from trencadis.backends.tpu.products import FLOAT4, conversion_note, exact_in_operand
from trencadis.core.decision import PARTITIONED, Dtypes, Plan, Refusal, unknown_dtype
from trencadis.core.devices import CHIPS
from trencadis.core.dtypes import accumulator
from trencadis.core.epilogue import Activation, Gate, elementwise
from trencadis.core.jax_compat import apart, vary_alike
from trencadis.core.problem import Form, Problem
from trencadis.core.spans import owned
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
    """The plan of a kernel, for dtypes that it multiplies and blocks that fit into VMEM, or why there is none."""
    refusal = elsewhere(target)
    if refusal is not None:
        return refusal
    chip = chip_for(target)
    inner = _peeled(problem if problem.gate is not None else without_float16(problem))
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
        tiling=Tiling(layout.block_m, layout.block_k, layout.block_n), layout=layout,
        because=reason(seen, layout, chip), notes=tuple(filter(None, said)),
        slow=K_LAST if slow else "", advice=PREPARE if slow else "",
    )  # fmt: skip


def run(plan: Plan, *operands: Array) -> Any:
    """The result of a plan's problem, computed by one kernel; with a gated activation a list of its results."""
    options = call_options(plan, dimension_semantics=("parallel",))
    if plan.problem.gate is not None:
        return execute(plan.problem, padded(plan.problem), plan.layout, *operands, **options)
    given = zip(operands, plan.problem.operands, strict=True)
    wide = [x.astype(dtype) if x.dtype == jnp.float16 else x for x, (_, dtype) in given]
    compute = execute_parts if k_parts.in_parts(plan.problem, plan.layout) else execute
    (out,) = compute(plan.problem, padded(plan.problem), plan.layout, *wide, **options)
    return out if plan.peeled or plan.split else out.astype(plan.asked.out)


def call_options(plan: Plan, **params: Any) -> dict[str, Any]:
    """The options of a kernel's call: the limit of VMEM and other parameters of the compiler, or the interpreter."""
    if plan.interpret:
        return {"interpret": pltpu.InterpretParams(uninitialized_memory="nan")}
    limit = chip_for(plan.target).vmem - (1 << 19)
    return {"compiler_params": pltpu.CompilerParams(vmem_limit_bytes=limit, **params)}


def elsewhere(target: Target) -> Refusal | None:
    """The refusal of a target that is not a single TPU of a known kind; None if the kernels run on it."""
    if target.platform != "tpu":
        return _refusal(f"it runs on TPU; the target is {target}")
    if target.partitioned:
        return _refusal(*PARTITIONED)
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
    weights = (*OPERANDS, "int4", FLOAT4) if problem.form is Form.ROWS else OPERANDS
    unknown = unknown_dtype("tpu", problem, Dtypes(OPERANDS, weights, RESULTS, bias=("bfloat16", "float32")))
    if unknown is not None:
        return unknown
    if problem.epilogue.along_k and (reason := _along_k(problem)):
        return _refusal(reason)
    if precision_of(problem) is None:
        return _refusal(
            f"precision is {problem.asked}; it has DEFAULT, HIGH and HIGHEST, as passes over bfloat16 parts",
            "pass one of these, or bfloat16 operands",
        )
    return None


def _along_k(problem: Problem) -> str:
    """Why the kernel cannot apply scales that change along k; nothing if it can."""
    length, unit = problem.epilogue.column_block[0], 16 if exact_in_operand(problem) else 32
    if problem.form is not Form.ROWS or problem.epilogue.row_block:
        return "scales of rows change along k, and it applies only those of weights"
    if length % unit:
        return f"scales change along k every {length}; it applies those per multiple of {unit}"
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
    if 0 in (problem.k, *problem.out_shape, problem.rows, problem.spans, problem.groups):
        return _refusal("there is nothing to multiply", costly=False)
    if problem.batch * problem.groups > MAX_GROUP_SIZES:
        return _refusal(
            f"{problem.batch * problem.groups} group sizes are too many for scalar memory; it takes {MAX_GROUP_SIZES}"
        )
    return None


def execute(problem: Problem, inner: Problem, layout: Layout, *operands: Array, **options: Any) -> list[Array]:
    """The results of a problem by a kernel of this layout; `inner` is the problem with padded k and n.

    Operands are padded to what the kernel reads, and its results are sliced to the shape of the problem.
    """
    layout = dataclasses.replace(layout, columns=problem.n)
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
    named |= {name: pad_to(x, (problem.local_groups, n))[:, None, :] for name, x in vectors.items() if x is not None}
    return named | {name: pad_to(x, out_shape) for name, x in matrices.items() if x is not None}


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
