"""Pallas kernels for TPUs: one kernel per call, in which a group's weights or accumulators stay in VMEM.

planning           the plan of a problem, or why there is none; execution: a plan carried out
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
resident           one kernel of it for groups whose rhs fits into VMEM
moe                the kernels around the products of an MoE layer; row_copies: rows copied by their indices
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from trencadis.core.decision import PARTITIONED, Plan, Refusal
from trencadis.core.devices import CHIPS
from trencadis.core.problem import Problem
from trencadis.core.schedule import RowTile
from trencadis.core.target import Target
from trencadis.core.tiling import Overrides

if TYPE_CHECKING:
    from trencadis.backends.tpu.layout import Layout


def plan(problem: Problem, target: Target, overrides: Overrides) -> Plan | Refusal:
    """The plan of a kernel, for dtypes that it multiplies and blocks that fit into VMEM, or why there is none."""
    refusal = elsewhere(target)
    if refusal is not None:
        return refusal
    from trencadis.backends.tpu import planning  # Pallas for TPUs takes long to import, and few programs need it

    return planning.plan(problem, target, overrides)


def run(plan: Plan, *operands: jax.Array) -> Any:
    """The result of a plan's problem, computed by one kernel; with a gated activation a list of its results."""
    from trencadis.backends.tpu import execution

    return execution.run(plan, *operands)


def row_tiles(problem: Problem, layout: Layout, start: int, end: int) -> list[RowTile]:
    """The row tiles of a group that owns the rows [start, end), as the tile scheduler of this layout computes them."""
    from trencadis.backends.tpu import tile_scheduler

    return tile_scheduler.row_tiles(problem, layout, start, end)


def elsewhere(target: Target) -> Refusal | None:
    """The refusal of a target that is not a single TPU of a known kind; None if the kernels run on it."""
    if target.platform != "tpu":
        return Refusal("tpu", f"the tpu backend runs on TPU; the target is {target}")
    if target.partitioned:
        return Refusal("tpu", *PARTITIONED)
    if target.kind is not None and target.kind not in {kind for chip in CHIPS.values() for kind in chip.kinds}:
        return Refusal("tpu", f"the tpu backend knows no TPU of the kind {target.kind!r}")
    return None
