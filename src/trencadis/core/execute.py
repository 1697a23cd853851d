"""Running a plan: the backend's kernel, whole or for each part of k, then what was peeled off the epilogue."""

from __future__ import annotations

import functools

import jax

from trencadis.backends import BACKENDS
from trencadis.core import unfused
from trencadis.core.decision import Plan
from trencadis.core.interleave import deinterleave
from trencadis.core.problem import Problem
from trencadis.core.split import sums_by_parts

Array = jax.Array


def execute(plan: Plan, *operands: Array) -> Array:
    """The result of the problem that was asked: operands are lhs, rhs, group sizes, first group, then extras."""
    asked, kept = plan.asked, plan.problem.epilogue
    lhs, rhs, sizes, first, *rest = operands
    if asked.interleaved and not plan.problem.interleaved:
        asked, rhs = asked.replace(interleaved=False), deinterleave(rhs)
    extras = asked.epilogue.split(tuple(rest))
    fused = extras._replace(
        bias=extras.bias if kept.bias else None, existing=extras.existing if kept.accumulate else None
    )
    if plan.split:
        multiply = functools.partial(_scaled, plan)
        sums = sums_by_parts(asked, multiply, lhs, rhs, sizes, first, *fused.given)
    else:
        sums = _scaled(plan, asked, lhs, rhs, sizes, first, *fused.given)
        if not plan.peeled:
            return sums
    bias, existing = (None if done else x for done, x in ((kept.bias, extras.bias), (kept.accumulate, extras.existing)))
    bias = None if bias is None else unfused.bias_rows(asked, bias, sizes, first)
    return unfused.finish(asked, sums, sizes, first, bias=bias, existing=existing)


def _scaled(plan: Plan, problem: Problem, *operands: Array) -> Array:
    """The sums of a problem, or of a part of it, by the backend's kernel; times their scales, if that has none."""
    run = BACKENDS[plan.backend].run
    if plan.problem.epilogue.scaled or not problem.epilogue.scaled:
        return unfused.summed(problem, run(plan, *operands))
    sums = unfused.summed(problem, run(plan, *operands[:4]))
    return unfused.scale(problem, sums, problem.epilogue.scaling.split(operands[4:]), *operands[2:4])
