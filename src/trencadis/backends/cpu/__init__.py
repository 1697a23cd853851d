"""Native kernels for CPUs, from the optional package `trencadis-cpu` (`native/`): one custom call for each product.

The kernels use the threads of XLA. They find the rows of each group in the sizes themselves, so that a product is one
operation of a program, however many groups it has. `xla` runs what they do not take, and wherever they are missing.

bridge    from JAX to the custom calls
programs  activations and their pullbacks as programs of the kernels
gated     products with a gated activation
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from trencadis.backends.cpu import programs
from trencadis.core.decision import PARTITIONED, Dtypes, Plan, Refusal, missing, peel, unknown_dtype
from trencadis.core.epilogue import ALONG_K
from trencadis.core.problem import Form, Problem
from trencadis.core.schedule import RowTile
from trencadis.core.target import Target
from trencadis.core.tiling import Overrides, Tiling

Array = jax.Array

FLOATS = ("float32", "bfloat16")
ROWS, SUMMED, COLUMNS = 512, 256, 512  # the largest tile of a thread: of the result, and of what is summed at a time

INSTALL = "pip install ./native, in a checkout of trencadis"
PACKAGE = "trencadis-cpu, which has faster products than XLA,"

_refusal = functools.partial(Refusal, "cpu")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The rows that are multiplied together in registers, and the instructions that do it."""

    panel: int
    instructions: str


def plan(problem: Problem, target: Target, overrides: Overrides) -> Plan | Refusal:
    """The plan of a native kernel for a product of floats on a CPU, or why there is none."""
    refusal = elsewhere(target) or _arithmetic(problem) or _gated(problem)
    if refusal is not None:
        return refusal
    inner = peel(problem, lambda activation, _: programs.of_activation(activation) is not None)
    largest = (ROWS, SUMMED, COLUMNS) if problem.form is Form.ROWS else (SUMMED, ROWS, COLUMNS)
    asked, layout = overrides.tilings.forward or Tiling(*largest), layout_here()
    sizes = zip((asked.m, asked.k, asked.n), largest, (inner.m, inner.k, inner.n), strict=True)
    tile = Tiling(*(max(min(each), 1) for each in sizes))
    because = f"a native kernel ({layout.instructions}): panels of at most {layout.panel} rows of a group in registers"
    return Plan(asked=problem, problem=inner, target=target, backend="cpu", tiling=tile, layout=layout, because=because)


def elsewhere(target: Target) -> Refusal | None:
    """The refusal of a target, or of a program, in which the kernels do not run; None if they do."""
    if target.platform != "cpu":
        return _refusal(f"the cpu backend runs on CPUs; the target is {target}")
    if target.partitioned:
        return _refusal(*PARTITIONED)
    if target.exported:
        return _refusal("the program is exported, and may run where the kernels are not installed")
    absent = missing("cpu", "trencadis.backends.cpu.bridge", PACKAGE, INSTALL)
    if absent is not None:
        return absent
    return None if layout_here().instructions else _refusal("XLA is faster than kernels for CPUs without AVX2")


@functools.cache
def layout_here() -> Layout:
    """The layout on this machine, which is the one that programs for CPUs are compiled on."""
    from trencadis.backends.cpu.bridge import INSTRUCTIONS

    return Layout(panel=6 if INSTRUCTIONS == "AVX2" else 12, instructions=INSTRUCTIONS)


def _arithmetic(problem: Problem) -> Refusal | None:
    """The refusal of dtypes, scales or a precision that the kernels do not have; None if they can compute it."""
    if problem.epilogue.scaled:
        return _refusal(ALONG_K if problem.epilogue.along_k else "the cpu backend applies no scales")
    unknown = unknown_dtype("cpu", problem, Dtypes(FLOATS, FLOATS, FLOATS, bias=(*FLOATS, "float16")))
    if unknown is not None:
        return unknown
    if not problem.precisions:
        return _refusal(f"precision is {problem.asked}; the cpu backend multiplies floats as they are")
    return None


def _gated(problem: Problem) -> Refusal | None:
    """The refusal of a gated activation that is no program of the kernels; None if it is, or if there is none."""
    gate = problem.gate
    if gate is None or gate.activation is None or programs.of_gate(dataclasses.replace(gate, gather=None)) is not None:
        return None
    return _refusal(f"{gate} has operations that the cpu backend lacks")


def run(plan: Plan, *operands: Array) -> Any:
    """The result of a plan's problem, or a list of them, by custom calls."""
    from trencadis.backends.cpu import bridge, gated

    problem = plan.problem
    if problem.gate is not None:
        return gated.run(plan, *operands)
    extras, activation = problem.epilogue.split(operands[4:]), problem.epilogue.activation
    if activation is None:
        return bridge.grouped(problem, plan.tiling, operands[:4], extras)
    program = programs.of_activation(activation)
    assert program is not None  # or the plan had peeled it off
    biases = [] if extras.bias is None else [extras.bias]
    return bridge.fused(problem, plan.tiling, program, operands[:4], biases=biases)[0]


def row_tiles(problem: Problem, layout: Layout, start: int, end: int) -> list[RowTile]:
    """The panels of a group that owns the rows [start, end): as few as there can be, of about equal height."""
    if start >= end or 0 in problem.out_shape:
        return []
    if problem.form is Form.CONTRACTION:
        return [RowTile(range(start, end), range(start, end))]
    count = -(-(end - start) // layout.panel)
    height = -(-(end - start) // count)
    panels = (range(top, min(top + height, end)) for top in range(start, end, height))
    return [RowTile(rows, rows) for rows in panels]
