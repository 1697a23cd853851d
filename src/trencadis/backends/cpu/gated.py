"""Products with a gated activation: native products that gather their rows, with the activation in their epilogue."""

from __future__ import annotations

import dataclasses
import functools

import jax

from trencadis.backends.cpu import bridge, programs
from trencadis.core.decision import Plan
from trencadis.core.problem import Form

Array = jax.Array


def run(plan: Plan, *operands: Array) -> list[Array]:
    """The results of a plan's problem, which has a gate: operands are those of a plain one, then those of the gate."""
    problem, (lhs, rhs, sizes, first, *rest) = plan.problem, operands
    gate = problem.gate
    assert gate is not None
    token = None if problem.gather is None else rest[-2]
    rest = rest if problem.gather is None else rest[:-2]
    if problem.form is Form.CONTRACTION:
        return [bridge.grouped(problem, plan.tiling, (lhs, each, sizes, first), token=token) for each in (rhs, *rest)]
    program = programs.of_gate(dataclasses.replace(gate, gather=None))
    assert program is not None  # or the plan had refused
    fused = functools.partial(bridge.fused, problem, plan.tiling, program, (lhs, rhs, sizes, first), token=token)
    if gate.activation is None:  # the sum of two products
        return fused(second=rest)
    if gate.pullback:  # of z_gate, z_up and the weights of rows, the first two become the first results
        return fused(inputs=rest)
    bias_gate, up, bias_up = rest if problem.epilogue.bias is not None else (None, rest[0], None)
    return fused(second=[up], biases=[bias for bias in (bias_gate, bias_up) if bias is not None])
