"""Running a plan: the backend's kernel, as a whole or for each part of k, then what was peeled off the epilogue."""

from __future__ import annotations

import jax

from trencadis.backends import BACKENDS
from trencadis.core import unfused
from trencadis.core.decision import Plan
from trencadis.core.interleave import deinterleave
from trencadis.core.split import sum_of_parts

Array = jax.Array


def execute(plan: Plan, *operands: Array) -> Array:
    """The result of the problem that was asked: operands are lhs, rhs, group sizes, first group, then extras."""
    asked, kept, backend = plan.asked, plan.problem.epilogue, BACKENDS[plan.backend]
    lhs, rhs, sizes, first, *rest = operands
    if asked.interleaved and not plan.problem.interleaved:
        asked, rhs = asked.replace(interleaved=False), deinterleave(rhs)
    extras = asked.epilogue.split(tuple(rest))
    fused = extras._replace(
        bias=extras.bias if kept.bias else None, existing=extras.existing if kept.accumulate else None
    )
    if plan.split:
        sums = sum_of_parts(asked, lambda _, *part: backend.run(plan, *part), lhs, rhs, sizes, first, *fused.given)
    else:
        sums = backend.run(plan, lhs, rhs, sizes, first, *fused.given)
        if not plan.peeled:
            return sums
    bias, existing = (None if done else x for done, x in ((kept.bias, extras.bias), (kept.accumulate, extras.existing)))
    bias = None if bias is None else unfused.bias_rows(asked, bias, sizes, first)
    return unfused.finish(asked, sums, sizes, first, bias=bias, existing=existing)
