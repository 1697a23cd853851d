"""Pallas kernels for Hopper GPUs: persistent and warp-specialized, with tiles that are as tall as a group needs.

choose           the layout (tile, stages, swap-AB, scheduling) for a problem
layout           what a layout holds
operands         arrays as the kernel reads them, which XLA casts, transposes and pads
kernel           the warpgroups of a CTA and their barriers
rows             the mainloop of the rows form; contraction: that of the other form, with its mask
consumer         the consumer warpgroups; mma_shapes: the products that they issue
parts            float32 as a sum of bfloat16 parts, whose products are added
gather           loads of gathered rows; arrivals: the barriers of their copies
gated            gated activations and their pullback; registers: what they need beside the operations of Pallas
scales           which operand is upcast, and where scales that change along k are applied
upcast           low-precision weights as a register (RS) operand; block_scales, operand_scales: their scales along k
transpose        8-bit weights transposed in shared memory; unpack: int4 weights as 8-bit numbers
short_sums       sums over 32 or 64 of k, each of which is scaled by itself
store            the epilogue, and the stores to global memory
tile_scheduler   the order of tiles; tile_queue: how the producer publishes them to the other warpgroups
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from trencadis.backends.gpu.choose import (
    choose,
    choose_for_tile,
    few_rows,
    mma_dtype,
    reason,
    tiling_of,
)
from trencadis.backends.gpu.layout import CONSUMERS, ROW_ALIGN, SHORT_PART, WGMMA_M, Layout
from trencadis.backends.gpu.operands import execute, padded
from trencadis.backends.gpu.parts import products
from trencadis.backends.gpu.scales import (
    in_operand,
    needs_upcast,
    promoted_part,
    shared_by_tile,
    steps_in_parts,
    unpacks,
    unpacks_in_registers,
    with_bfloat16_rows,
)
from trencadis.backends.gpu.tile_scheduler import row_tiles
from trencadis.backends.prepare import (
    DEINTERLEAVED,
    PREPARE,
    PREPARE_IN_ORDER,
    in_order,
    int4_as_int8,
    round_up,
    with_k_last,
)
from trencadis.core.activation import elementwise, inlined
from trencadis.core.decision import PARTITIONED, Dtypes, Plan, Refusal, missing, peel, unknown_dtype
from trencadis.core.devices import card_for
from trencadis.core.dtypes import bits
from trencadis.core.epilogue import Gate
from trencadis.core.interleave import FLOAT4
from trencadis.core.jax_compat import apart, gpu_interpreter
from trencadis.core.problem import Form, Problem
from trencadis.core.target import Target
from trencadis.core.tiling import Overrides

__all__ = ["plan", "row_tiles", "run"]

Array = jax.Array

RESULTS = ("bfloat16", "float16", "float32")
OPERANDS = (*RESULTS, "float8_e4m3fn", "float8_e5m2", "int8")
TMA_BOX = 256  # entries that one TMA copy takes along an axis
GATHER_ROWS = 128  # mean rows of a group up to which rows of a contraction are gathered before it
LARGE_COPY = 2**25  # bytes of weights, from which on it is worth a warning that they are copied
GATED_SAVES = 2.5  # reads or writes of all rows that a gated activation in a kernel saves, about

_refusal = functools.partial(Refusal, "gpu")


def plan(problem: Problem, target: Target, overrides: Overrides) -> Plan | Refusal:
    """The plan of a kernel for a product that the tensor cores of a Hopper GPU can multiply, or why there is none."""
    return _elsewhere(target) or _plan_here(problem, target, overrides)


def _plan_here(problem: Problem, target: Target, overrides: Overrides) -> Plan | Refusal:
    """The plan for a Hopper GPU, or why there is none."""
    card, inner = card_for(target), with_bfloat16_rows(with_k_last(int4_as_int8(peel(problem, _lowers), weights=False)))
    assert card is not None  # or `_elsewhere` had refused
    inner = int4_as_int8(inner, weights=not (needs_upcast(inner) or unpacks(inner)))
    inner = inner.replace(precision=problem.asked)  # layouts are remembered by problem, which depends on no setting
    refusal = _arithmetic(inner) or _size(inner) or _missing() or _gated(inner)
    if refusal is not None:
        return refusal
    if overrides.interpret and needs_upcast(inner) and inner.epilogue.along_k:
        return _refusal("scales of weights change along k, and the interpreter has no register operands")
    tile = overrides.tilings.forward
    layout = choose(inner, card) if tile is None else choose_for_tile(inner, card, tile)
    if problem.gate is not None and _copies_much(inner, layout):
        return _refusal(f"n = {inner.n} or k = {inner.k} is no multiple of 64: weights would be copied", costly=False)
    as_stored = inner.rhs == problem.rhs and _reads_interleaved(problem, layout, overrides.interpret)
    inner = inner.replace(interleaved=as_stored)
    slow, advice = _slow(problem, inner, layout) if overrides.advise else ("", "")
    return Plan(
        asked=problem, problem=inner, target=target, backend="gpu", interpret=overrides.interpret,
        tiling=tiling_of(inner, layout), layout=layout,
        because=reason(inner, layout, card), slow=slow, advice=advice,
        faster=_faster(inner, layout),
    )  # fmt: skip


def _faster(problem: Problem, layout: Layout) -> tuple[str, str] | None:
    """The backend whose kernels take less time for a problem, and why; None if these are the fastest."""
    if few_rows(problem, layout):
        return "triton", "with so few rows"
    if problem.gate is None and any(_copied(problem, layout)):
        return "triton", "where n or k is no multiple of 64, to which it would copy weights or the result"
    return None


def _copied(problem: Problem, layout: Layout) -> tuple[bool, bool]:
    """Whether weights are copied to align them, and whether the result is, where Triton's kernels would not need it.

    Those read rows of 16-bit numbers that start at multiples of 16 bytes; others they read too slowly.
    """
    sixteen = problem.lhs == problem.rhs and problem.lhs.itemsize == 2
    aligned = problem.k % ROW_ALIGN == 0 and problem.n % ROW_ALIGN == 0
    return padded(problem, layout) if sixteen and aligned else (False, False)


def _copies_much(problem: Problem, layout: Layout) -> bool:
    """Whether to align weights, or gradients of them, moves more bytes than a gated activation saves in its kernel."""
    if not _copied(problem, layout)[problem.form is Form.CONTRACTION]:
        return False
    return 4 * problem.local_groups * problem.k * problem.n > GATED_SAVES * problem.rows * max(problem.k, problem.n)


def _reads_interleaved(problem: Problem, layout: Layout, interpret: bool) -> bool:
    """Whether the kernel takes interleaved weights as they are: stored K-major, and 4-bit floats in registers alone."""
    if not (problem.interleaved and problem.transpose_rhs):
        return False
    return problem.rhs.name != FLOAT4 or (layout.upcast and not layout.upcast_in_smem and not interpret)


def _slow(problem: Problem, inner: Problem, layout: Layout) -> tuple[str, str]:
    """What a plan says of weights whose order or size costs time, or nothing, and its advice."""
    if problem.interleaved and not inner.interleaved:
        return DEINTERLEAVED, PREPARE_IN_ORDER
    if problem.interleaved and unpacks_in_registers(problem.replace(interleaved=False)):
        return "int4 weights are interleaved; in order, many 8-bit rows would be multiplied in 8 bits", PREPARE_IN_ORDER
    copied = padded(inner, layout)[0] and inner.weights * inner.k * inner.n * bits(inner.rhs) // 8 >= LARGE_COPY
    if copied and not _not_k_major(problem, layout):
        what = f"k = {inner.k} or n = {inner.n} is no multiple of 64: weights are copied before each product"
        return what, "store them padded with zeros, and slice the result"
    return _not_k_major(problem, layout), PREPARE


def _not_k_major(problem: Problem, layout: Layout) -> str:
    """What happens to low-precision weights that are not stored K-major; nothing where they are."""
    if problem.form is not Form.ROWS or problem.transpose_rhs or bits(problem.rhs) > 8:
        return ""
    how = "they are transposed before each product"
    if layout.rewrites:
        what = "transposes" if layout.transpose_in_smem else "converts"
        how = f"the kernel {what} them in shared memory"
    elif not layout.k_major and not layout.upcast:
        return ""
    return f"{problem.rhs.name} weights are stored [g, k, n], and tensor cores read them with k last: {how}"


def run(plan: Plan, *operands: Array) -> Any:
    """The result of a plan's problem, computed by one kernel; with a gated activation a list of its results."""
    lhs, rhs, *rest = operands
    interpret = gpu_interpreter() if plan.interpret else None
    return execute(plan.problem, plan.layout, lhs, in_order(plan.asked, plan.problem, rhs), *rest, interpret=interpret)


def _elsewhere(target: Target) -> Refusal | None:
    """The refusal of a target on which the kernels do not run; None if they do."""
    if target.platform != "cuda":
        return _refusal(f"the gpu backend runs on NVIDIA GPUs; the target is {target}")
    if target.partitioned:
        return _refusal(*PARTITIONED)
    if target.kind is None:
        return _refusal(
            "kernels of the gpu backend are for Hopper GPUs, and which GPU this is for is not known here",
            'lower in a process that has the GPU, or in a context such as trencadis.target("h200")',
            costly=False,  # the Triton backend, which is for every GPU, says the same
        )
    card = card_for(target)
    if card is None or not card.hopper:
        return _refusal(
            f"kernels of the gpu backend are for Hopper GPUs; the target is {target}", costly=False
        )  # others have Triton's
    return None


def _missing() -> Refusal | None:
    """The refusal if Pallas for GPUs does not import: with jax < 0.11 it needs a package that jax does not install."""
    advice = "pip install 'trencadis[cuda]', or in a checkout: pip install '.[cuda]'"
    return missing("gpu", "trencadis.backends.gpu.kernel", "Pallas for GPUs", advice)


def _arithmetic(problem: Problem) -> Refusal | None:
    """The refusal of dtypes, scales or a precision that the kernels do not have; None if they can compute it."""
    weights = (*OPERANDS, "int4", *["float4_e2m1fn"] * needs_upcast(problem))  # int4 is left where it is unpacked
    # integer sums are stored as they are, and an epilogue has float32 numbers
    results = (*RESULTS, "int32") if problem.acc == jnp.int32 and not problem.epilogue else RESULTS
    unknown = unknown_dtype("gpu", problem, Dtypes(OPERANDS, weights, results, bias=RESULTS))
    if unknown is not None:
        return unknown
    if problem.epilogue.along_k:
        return _along_k(problem)
    hi_lo = len(products(problem)) == 2
    if (mma_dtype(problem) == jnp.float32 or hi_lo) and problem.float32_precision is not lax.Precision.DEFAULT:
        how = "a bf16 hi/lo split" if hi_lo else "tf32"
        return _refusal(
            f"precision is {problem.asked}; the gpu backend multiplies float32 as {how}",
            "use bfloat16 operands, or precision=None; for the gradient of a bias, preferred_element_type=bfloat16",
        )
    return None


def _along_k(problem: Problem) -> Refusal | None:
    """The refusal of scales along k that the kernel does not apply; None if it does."""
    part, (length, across) = promoted_part(problem), problem.epilogue.column_block
    if not needs_upcast(problem):
        if (part % WGMMA_M and not steps_in_parts(problem)) or mma_dtype(problem).itemsize > 2:
            return _refusal(f"scales change along k every {part}; kernels take multiples of {WGMMA_M}, and no float32")
        if shared_by_tile(problem) and problem.k > TMA_BOX * length:
            return _refusal(f"scales change along k; kernels take at most {TMA_BOX}, and k = {problem.k} has more")
        return None
    if problem.out.itemsize != 2 or problem.n <= WGMMA_M * CONSUMERS:
        return _refusal(
            f"scales of weights change along k, and n is at most {WGMMA_M * CONSUMERS}, or the result is "
            f"{problem.out.name}",
            "pass preferred_element_type=bfloat16",
        )
    if across != 1 and across % WGMMA_M:
        return _refusal(
            f"scales of weights change along k, and {across} columns share one; kernels take 1, 64, 128, ..."
        )
    if part % (2 * WGMMA_M) and part != SHORT_PART and (part != WGMMA_M or in_operand(problem)):
        return _refusal(f"float32 scales change along k every {part}; kernels take 32, 64 and multiples of 128")
    if length % 16:
        return _refusal(f"scales of weights change along k every {length}; kernels take multiples of 16")
    return None


def _gated(problem: Problem) -> Refusal | None:
    """The refusal of a gated activation that the kernel does not apply; None if it does, or if there is none."""
    gate, epilogue = problem.gate, problem.epilogue
    if gate is None:
        return None
    if problem.batch > 1 or epilogue.scaled or epilogue.activation is not None or epilogue.accumulate:
        return _refusal("a gated activation in the kernel goes with a bias and no batch, scales or existing_out")
    if problem.lhs != problem.rhs or problem.lhs.itemsize != 2:
        return _refusal("operands of a gated layer are not of 16 bits, or of two dtypes")
    if problem.form is Form.CONTRACTION:
        if problem.transpose_lhs or (gate.pair and gate.gather is not None and gate.gather.operand == "rhs"):
            return _refusal("lhs of a contraction is stored [k, m], or rows of two operands are gathered", costly=False)
        return _gathered(problem)
    if problem.out.itemsize != 2:
        return _refusal("results of a gated activation are not of 16 bits")
    if _gathered(problem) is not None:
        return _gathered(problem)
    if gate.pullback and (problem.out != problem.lhs or not problem.transpose_rhs):
        return _refusal("a pullback has weights that are not stored [g, n, k], or results of another dtype")
    if gate.activation is not None and not _gate_lowers(gate):
        return _refusal(f"{gate} does not lower inside a kernel", "use operations that Pallas has on GPUs")
    return None


def _gathered(problem: Problem) -> Refusal | None:
    """The refusal to gather rows in the kernel: it cannot, or a gather before it takes less time; None if it does."""
    if problem.gather is None:
        return None
    if problem.form is Form.CONTRACTION:
        short = problem.m <= GATHER_ROWS * problem.groups
        return _refusal("sums are so short that tiles wait for their tokens", costly=False) if short else None
    if round_up(problem.k, WGMMA_M) * problem.gather.tokens * problem.lhs.itemsize >= 2**32:
        return _refusal("lhs, whose rows are to be gathered, has more bytes than 32 bits count", costly=False)
    return None


def _size(problem: Problem) -> Refusal | None:
    """The refusal of a problem without work, or with more tiles than 32 bits count; None if there is neither."""
    if problem.empty:
        return _refusal("there is nothing to multiply", costly=False)
    down = -(-problem.rows // WGMMA_M) + 3 * problem.spans  # an upper bound of the tiles in a column
    if problem.form is Form.CONTRACTION:
        down = problem.spans * -(-problem.k // WGMMA_M)
    tiles = down * -(-problem.n // WGMMA_M)
    return None if tiles < 2**31 else _refusal(f"{tiles} tiles are too many to count in 32 bits")


@functools.lru_cache(maxsize=256)
def _lowers(activation: Any, dtype: Any) -> bool:
    """Whether a kernel can apply the activation to a tile; where it cannot, XLA applies it after the kernel."""
    return _kernel_lowers(lambda x: [elementwise(inlined(activation))(x.astype(dtype))], 1)


@functools.lru_cache(maxsize=256)
def _gate_lowers(gate: Gate) -> bool:
    """Whether a kernel can apply a gated activation, or its pullback, to tiles."""
    from trencadis.backends.gpu.gated import activated, pulled_back

    if gate.pullback:
        return _kernel_lowers(functools.partial(pulled_back, gate), 4)
    return _kernel_lowers(lambda *z: [activated(gate, *z)], 2)


def _kernel_lowers(function: Callable[..., list[Array]], tiles: int) -> bool:
    """Whether Mosaic can lower a function of some float32 tiles inside a kernel."""

    def body(x: Any, out: Any) -> None:
        out[...] = sum(each.astype(jnp.float32) for each in function(*(x[...],) * tiles))

    def lower() -> None:
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import mosaic_gpu as mgpu

        from trencadis.backends.gpu.kernel import PARAMS

        tile = jax.ShapeDtypeStruct((WGMMA_M, WGMMA_M), jnp.float32)
        mesh = mgpu.Mesh(grid=(1,), grid_names=("cta",), num_threads=1, thread_name="warpgroup")
        apply = pl.kernel(body, out_type=tile, mesh=mesh, compiler_params=PARAMS)
        jax.jit(apply).trace(tile).lower(lowering_platforms=("cuda",))

    try:
        apart(lower)
    except Exception:
        return False
    return True
