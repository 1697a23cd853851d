"""How a general grouped GEMM will run: as a kernel where there is one, else in XLA's operations."""

from __future__ import annotations

import dataclasses

import jax

from trencadis.backends import INTERPRETED, KERNELS
from trencadis.backends.tpu import elsewhere
from trencadis.core.decision import Plan, Refusal
from trencadis.core.plan import warn_slow
from trencadis.core.target import Target
from trencadis.core.tiling import Overrides
from trencadis.gemm import cpu, triton, xla
from trencadis.gemm.problem import GemmProblem

Array = jax.Array

NAMES = ("tpu", "triton", "cpu", "xla")  # the backends, in the order of preference


def answers(problem: GemmProblem, target: Target, overrides: Overrides = Overrides()) -> dict[str, Plan | Refusal]:
    """What each backend says of a problem, in the order of preference: its plan, or why it refuses."""
    return {name: _answer(name, problem, target, overrides) for name in NAMES}


def _answer(name: str, problem: GemmProblem, target: Target, overrides: Overrides = Overrides()) -> Plan | Refusal:
    if name == "xla":
        return xla.plan(problem, target)
    if name == "cpu":
        return cpu.plan(problem, target, overrides)
    if overrides.interpret and target.platform != INTERPRETED[name].platform:  # planned for their own device
        target = INTERPRETED[name]
    if name == "triton":
        return triton.plan(problem, target, overrides)
    refusal = elsewhere(target)
    if refusal is not None:
        return refusal
    from trencadis.gemm import tpu  # Pallas for TPUs takes long to import, and few programs need it

    return tpu.plan(problem, target, overrides)


def plan(problem: GemmProblem, target: Target, overrides: Overrides = Overrides()) -> Plan:
    """The plan of the first backend that takes the problem, or of the one that the caller asked for."""
    asked = overrides.backend
    for name in NAMES if asked is None else (asked,):
        answer = _answer(name, problem, target, overrides)
        if isinstance(answer, Plan):
            more = "" if asked is None else "; backend as asked for"
            return dataclasses.replace(answer, because=answer.because + more)
    raise ValueError(f"backend: {asked!r} cannot run {problem} on {target} ({answer})")


def warn_if_slow(chosen: Plan, overrides: Overrides) -> None:
    """Issue a `PerformanceWarning` if loops over tiles run on an accelerator, and the caller did not ask for them."""
    problem, platform = chosen.problem, chosen.target.platform
    assert isinstance(problem, GemmProblem)
    looped = chosen.backend == "xla" and not chosen.layout.unrolled and not problem.empty
    if not looped or platform not in KERNELS or overrides.backend is not None:
        return
    refusal = _answer("tpu" if platform == "tpu" else "triton", problem, chosen.target)
    if isinstance(refusal, Refusal) and refusal.costly:
        warn_slow(f"a grouped GEMM runs as XLA loops instead of a kernel: {refusal.reason}", refusal.advice)


def run(plan: Plan, *operands: Array) -> Array:
    """The product of a plan's problem, from lhs, rhs and the six arrays i32[g] of `Groups`."""
    if plan.backend == "tpu":
        from trencadis.gemm import tpu

        return tpu.run(plan, *operands)
    return {"triton": triton, "cpu": cpu, "xla": xla}[plan.backend].run(plan, *operands)
