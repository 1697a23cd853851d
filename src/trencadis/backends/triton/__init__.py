"""Triton kernels for NVIDIA GPUs from Ampere to Blackwell and for AMD CDNA: products that Hopper's own do not take.

choose           the layout (tile, warps, stages) for a problem, by a cost model
layout           what a layout holds
tile_scheduler   the list of tiles, computed before the kernel by tile_kernels
kernels          the kernels of both forms; products: the product of two blocks; activation: activations in them
weights          the kernel that unpacks low-precision weights; weights_layout: its layouts and its call
unpack           PTX of that kernel; ragged: the kernels of the general grouped GEMM
moe              the calls of the kernels around the products of an MoE layer: row_kernels, sort_kernels, route_kernels
bridge           from JAX to Triton: compilation, and jaxlib's custom call
interpreter      the same kernels in numpy, on any machine
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trencadis.backends.prepare import (
    DEINTERLEAVED,
    PREPARE,
    PREPARE_IN_ORDER,
    in_order,
    int4_as_int8,
    with_k_last,
)
from trencadis.backends.triton import weights_layout
from trencadis.backends.triton.activation import source
from trencadis.backends.triton.choose import (
    choose,
    choose_for_tile,
    mma_dtype,
    precision,
    reason,
    split_operand,
    tiling_of,
)
from trencadis.backends.triton.layout import Layout
from trencadis.backends.triton.tile_scheduler import align_of, most_tiles, row_tiles, tiles
from trencadis.core.decision import PARTITIONED, Dtypes, Plan, Refusal, missing, peel, unknown_dtype
from trencadis.core.devices import Card, card_for
from trencadis.core.dtypes import bits
from trencadis.core.epilogue import ALONG_K
from trencadis.core.problem import Form, Problem
from trencadis.core.target import Target
from trencadis.core.tiling import Overrides

__all__ = ["plan", "row_tiles", "run"]

Array = jax.Array

FLOATS = ("bfloat16", "float16", "float32")
OPERANDS = (*FLOATS, "float8_e4m3fn", "float8_e5m2", "int8")

DESCRIPTORS = 2 * 128  # bytes of the descriptors of copies that a program writes, at most
SPLIT_BLOCK = 2048  # numbers that one program splits into three parts

_refusal = functools.partial(Refusal, "triton")


def plan(problem: Problem, target: Target, overrides: Overrides) -> Plan | Refusal:
    """The plan of a kernel for a product that the tensor cores of a GPU can multiply, or why there is none."""
    card = card_for(target)
    elsewhere = _elsewhere(target, card)
    if elsewhere is not None:
        return elsewhere
    assert card is not None  # or `_elsewhere` had refused
    inner = peel(problem, lambda activation, _: source(activation) is not None and problem.out.name in FLOATS)
    inner = _converted(with_k_last(inner), card)
    # layouts are remembered by problem, which must not depend on a setting
    inner = inner.replace(interleaved=_reads_interleaved(problem, inner, card), precision=problem.asked)
    inner = _lhs_for_wgmma(inner) if card.hopper else inner
    refusal = _arithmetic(inner, card) or _size(inner) or _missing()
    if refusal is not None:
        return refusal
    tile = overrides.tilings.forward
    if weights_layout.taken(inner):
        layout = weights_layout.choose(inner, card, tile)
        because = weights_layout.reason(inner, layout, card)
    else:
        layout = choose(inner, card) if tile is None else choose_for_tile(inner, card, tile)
        because = reason(inner, layout, card)
    return Plan(
        asked=problem, problem=inner, target=target, backend="triton", interpret=overrides.interpret,
        tiling=tiling_of(inner, layout), layout=layout,
        because=because, slow=_slow_order(problem, inner, overrides),
        advice=PREPARE if problem.interleaved == inner.interleaved else PREPARE_IN_ORDER,
    )  # fmt: skip


def _reads_interleaved(asked: Problem, problem: Problem, card: Card) -> bool:
    """Whether the kernel takes interleaved weights as they are: unpacked for wgmma, for which they are interleaved."""
    as_stored = asked.interleaved and asked.transpose_rhs and problem.transpose_rhs and asked.rhs == problem.rhs
    return as_stored and card.hopper and weights_layout.taken(problem)


def _slow_order(asked: Problem, problem: Problem, overrides: Overrides) -> str:
    """What a plan says of weights that are reordered before the kernel; nothing where they are not."""
    if asked.interleaved and not problem.interleaved and overrides.advise:
        return DEINTERLEAVED
    if not overrides.advise:
        return ""
    if asked.transpose_rhs != problem.transpose_rhs:
        return f"{asked.rhs.name} weights are stored [g, k, n], and are transposed before each product"
    if asked.rhs != problem.rhs and weights_layout.taken(problem.replace(rhs=asked.rhs, transpose_rhs=True)):
        return f"{asked.rhs.name} weights are stored [g, k, n], and become {problem.rhs.name} before each product"
    return ""


def run(plan: Plan, *operands: Array) -> Array:
    """The result of a plan's problem, computed by one kernel."""
    card = card_for(plan.target)
    assert card is not None
    lhs, rhs, *rest = operands
    operands = (lhs, in_order(plan.asked, plan.problem, rhs).astype(plan.problem.rhs), *rest)
    if weights_layout.taken(plan.problem):
        return weights_layout.execute(plan.problem, plan.layout, card.arch, *operands, interpret=plan.interpret)
    return execute(plan.problem, plan.layout, card.arch, *operands, interpret=plan.interpret)


def _elsewhere(target: Target, card: Card | None) -> Refusal | None:
    """The refusal of a target on which the kernels do not run; None if they do."""
    if target.platform not in ("cuda", "rocm"):
        return _refusal(f"the triton backend runs on GPUs; the target is {target}")
    if target.partitioned:
        return _refusal(*PARTITIONED)
    if target.kind is None and target.arch is None:
        return _refusal(
            "which GPU this is for is not known here",
            'lower in a process that has the GPU, or in a context such as trencadis.target("h200")',
        )
    if card is None:
        return _refusal(f"the triton backend knows neither {target} nor its compute capability")
    if not card.tensor_cores:
        return _refusal(
            "kernels of the triton backend are for NVIDIA GPUs since Ampere and AMD CDNA since MI300; the target "
            f"is {target}"
        )
    return None


def card_of(target: Target) -> Card | Refusal:
    """The card of a target on which the kernels run, if Triton is here to compile them, or why there are none.

    Only that Triton is missing is costly: products warn of targets on which there are no kernels.
    """
    card = card_for(target)
    elsewhere = _elsewhere(target, card)
    if elsewhere is not None:
        return dataclasses.replace(elsewhere, costly=False)
    assert card is not None  # or `_elsewhere` had refused
    return _missing() or card


def readable(problem: Problem, card: Card) -> Problem:
    """The problem with int8 for int4 operands, and bfloat16 for float8 ones on a card that has no products of float8.

    XLA converts them to these before the kernel.
    """
    problem = int4_as_int8(problem)
    if card.float8:
        return problem
    wide = np.dtype(jnp.bfloat16)
    lhs, rhs = (wide if x.name in ("float8_e4m3fn", "float8_e5m2") else x for x in (problem.lhs, problem.rhs))
    return problem.replace(lhs=lhs, rhs=rhs)


def _converted(problem: Problem, card: Card) -> Problem:
    """The problem with operands that XLA converts where no kernel reads them; one kernel unpacks weights itself."""
    unpacked = weights_layout.with_16_bit_rows(int4_as_int8(problem, weights=False), card)
    return unpacked if weights_layout.taken(unpacked) else readable(unpacked, card)


def _lhs_for_wgmma(problem: Problem) -> Problem:
    """The problem with lhs in the dtype in which it is multiplied, which XLA converts it to.

    A kernel would convert it in registers, from which wgmma reads a left factor while the next is written there.
    """
    if weights_layout.taken(problem) or problem.rhs != mma_dtype(problem):
        return problem
    return problem.replace(lhs=mma_dtype(problem))


def _missing() -> Refusal | None:
    """The refusal if Triton does not import: jax does not install it."""
    advice = "pip install 'trencadis[cuda]' or 'trencadis[rocm]', or in a checkout: pip install '.[cuda]' or '.[rocm]'"
    return missing("triton", "trencadis.backends.triton.bridge", "Triton", advice)


def _arithmetic(problem: Problem, card: Card) -> Refusal | None:
    """The refusal of dtypes, scales or a precision that the kernels do not have; None if they can compute it."""
    if weights_layout.taken(problem):
        return None
    if problem.epilogue.along_k:
        unpacked = f"; weights are not unpacked: {weights_layout.refused(problem)}" if bits(problem.rhs) < 16 else ""
        return _refusal(ALONG_K + unpacked)
    results = (*FLOATS, "int32") if problem.acc == np.int32 else FLOATS
    unknown = unknown_dtype("triton", problem, Dtypes(OPERANDS, OPERANDS, results, bias=FLOATS))
    if unknown is not None:
        return unknown
    if precision(problem, card.arch) is None:
        return _refusal(
            f"precision is {problem.asked}; the triton backend multiplies float32 as tf32, or with its full precision"
        )
    return None


def _size(problem: Problem) -> Refusal | None:
    """The refusal of a problem without work, or with more tiles than 32 bits count; None if there is neither."""
    if problem.empty:
        return _refusal("there is nothing to multiply", costly=False)
    smallest = Layout(block_m=16, block_n=32, block_k=16, warps=1, stages=1)
    tiles = _grid(problem, smallest)
    return None if tiles < 2**31 else _refusal(f"{tiles} tiles are too many to count in 32 bits")


def in_three(x: Array, arch: str, interpret: bool) -> Array:
    """The three bfloat16 parts of a float32 array, `[3, ...]`; XLA takes twice the time for it."""
    from trencadis.backends.triton import bridge, interpreter, products

    kernel = bridge.Kernel(
        function=products.split, pointers=(("x", x.dtype.name), ("out", "bfloat16")),
        constants=(("SIZE", x.size), ("BLOCK", SPLIT_BLOCK)), arch=arch, warps=4, stages=1,
    )  # fmt: skip
    call = interpreter.call if interpret else bridge.call
    return call(kernel, -(-x.size // SPLIT_BLOCK), [x], jax.ShapeDtypeStruct((3, *x.shape), jnp.bfloat16))


def _grid(problem: Problem, layout: Layout) -> int:
    """The programs of a kernel: one for each tile that there may be, or as many as the layout says."""
    count = most_tiles(problem, layout) * -(-problem.n // layout.block_n)
    if problem.form is Form.CONTRACTION:
        count *= -(-problem.k // layout.block_m)
    return min(layout.programs, count) if layout.programs else count


def execute(problem: Problem, layout: Layout, arch: str, *operands: Array, interpret: bool = False) -> Array:
    """The result of a problem by a kernel of this layout, for an architecture or in the interpreter."""
    # here, so that a machine without Triton can import the plan
    from trencadis.backends.triton import bridge, interpreter

    lhs, rhs, sizes, first, *extras = operands
    lhs = lhs.astype(problem.lhs)
    split = split_operand(problem, arch)
    if split:
        parts = in_three(lhs if split == "lhs" else rhs, arch, interpret)
        lhs, rhs = (parts, rhs) if split == "lhs" else (lhs, parts)
    listed = tiles(problem, layout, sizes, first, arch, interpret=interpret)
    alias = 5 + len(extras) if problem.epilogue.accumulate else None
    out = jax.ShapeDtypeStruct(problem.out_shape, problem.out)
    call = interpreter.call if interpret else bridge.call
    kernel = kernel_of(problem, layout, arch, interpret=interpret)
    return call(kernel, _grid(problem, layout), [*listed, lhs, rhs, *extras], out, alias=alias)


def kernel_of(problem: Problem, layout: Layout, arch: str, *, interpret: bool = False) -> Any:
    """The kernel of a problem: what the compiler of an architecture, or the interpreter, is given."""
    from trencadis.backends.triton.bridge import Kernel

    lists = [(name, "int32") for name in ("count", "group_of", "row_of", "end_of")]
    steps = problem.epilogue
    there = {
        "by_row": steps.by_row,
        "by_column": steps.by_column,
        "bias": steps.bias is not None,
        "existing": steps.accumulate,
    }
    names = ["lhs", "rhs", *(name for name, given in there.items() if given)]
    _, _, _, _, *extras = problem.operands  # the two between are sizes and the first group
    dtypes = [problem.lhs, problem.rhs, *(dtype for _, dtype in extras)]
    if split := split_operand(problem, arch):
        dtypes[names.index(split)] = jnp.dtype(jnp.bfloat16)
    arrays = [(name, np.dtype(dtype).name) for name, dtype in zip(names, dtypes, strict=True)]
    return Kernel(
        function=_function(problem.form), pointers=(*lists, *arrays, ("out", problem.out.name)),
        constants=constants(problem, layout, arch, interpret), arch=arch, warps=layout.warps, stages=layout.stages,
        scratch=DESCRIPTORS if layout.tma else 0,
    )  # fmt: skip


def _function(form: Form) -> Any:
    """The kernel of a form."""
    from trencadis.backends.triton import kernels

    return kernels.rows if form is Form.ROWS else kernels.contraction


def constants(problem: Problem, layout: Layout, arch: str, interpret: bool = False) -> tuple[tuple[str, Any], ...]:
    """The constants of a kernel, by name."""
    import triton

    from trencadis.backends.triton.activation import function
    from trencadis.backends.triton.bridge import TYPES
    from trencadis.backends.triton.interpreter import rewritten

    rows_form, epilogue = problem.form is Form.ROWS, problem.epilogue
    common = {
        "K": problem.k, "N": problem.n, "TRANSPOSED": problem.transpose_rhs if rows_form else problem.transpose_lhs,
        "BLOCK_M": layout.block_m, "BLOCK_N": layout.block_n, "BLOCK_K": layout.block_k,
        "RASTER": layout.raster_group, "PROGRAMS": layout.programs, "ROWS": problem.rows,
        "DOT": TYPES[mma_dtype(problem).name], "ACC": TYPES[problem.acc.name],
        "PRECISION": precision(problem, arch) or "tf32",
        "FLOAT": any((epilogue.scaled, epilogue.bias is not None, epilogue.activation is not None)),
    }  # fmt: skip
    if rows_form:
        text = source(epilogue.activation) if epilogue.activation is not None else None
        decorate = rewritten if interpret else triton.jit
        common |= {
            "WEIGHTS": problem.weights, "GROUPS": problem.local_groups, "SHORT_M": layout.short_m,
            "PEELED": layout.peeled,
            "ACTIVATION": None if text is None else function(text, decorate),
        }  # fmt: skip
    else:
        common |= {"ALIGN": align_of(problem, layout), "SPANS": problem.spans, "TMA": layout.tma}
    return tuple(common.items())
