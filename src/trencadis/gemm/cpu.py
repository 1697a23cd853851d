"""The general grouped GEMM as one native kernel on CPUs, which finds the matrices of all groups by their sizes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trencadis.backends import cpu as backend
from trencadis.core.decision import Plan, Refusal
from trencadis.core.target import Target
from trencadis.core.tiling import Overrides
from trencadis.gemm.matrices import mean_problem
from trencadis.gemm.problem import GemmProblem, Groups

Array = jax.Array


def plan(problem: GemmProblem, target: Target, overrides: Overrides = Overrides()) -> Plan | Refusal:
    """The plan of the kernel, or why there is none; tiles are those of a product of groups of the mean size."""
    if problem.empty:
        return Refusal("cpu", "there is nothing to multiply", costly=False)
    answer = backend.plan(mean_problem(problem), target, Overrides())
    if isinstance(answer, Refusal):
        return answer
    if problem.sum != problem.acc:
        return Refusal(
            "cpu", f"alpha, beta and bias are {problem.sum.name}; the cpu backend computes them in {problem.acc.name}"
        )
    asked: Any = problem  # a plan's problem is any that has an epilogue; this one has none
    return dataclasses.replace(answer, asked=asked, problem=asked, because=f"{answer.because}, whatever its sizes are")


def run(plan: Plan, lhs: Array, rhs: Array, *rest: Array) -> Array:
    """The result of a plan's problem, from lhs, rhs, the six arrays i32[g] of `Groups`, and those of `Extras`."""
    from trencadis.backends.cpu import bridge

    problem, tile = plan.problem, plan.tiling
    assert isinstance(problem, GemmProblem)
    table, extras = jnp.stack(Groups(*rest[:6])), problem.extras(rest[6:])  # i32[6, g]
    buffers = (problem.lhs, problem.rhs, problem.out)
    attributes = {
        "kinds": [each.packing.value for each in buffers],
        "axes": [each.group_axis for each in buffers],
        "transposed": [each.transposed for each in buffers],
        "given": [problem.alpha, 0 if extras.bias is None else extras.bias.size, problem.beta],
        "tile": [tile.m, tile.k, tile.n],
    }
    numbers = {name: np.array(each, np.int64) for name, each in attributes.items()}
    out = jax.ShapeDtypeStruct(problem.out.shape, problem.out.dtype)
    found: Array = bridge.call(
        "ragged", [lhs, rhs, table, *extras.given], out, {"accumulate": problem.accumulate, **numbers},
        {3: 0} if problem.accumulate else None,
    )  # fmt: skip
    return found
