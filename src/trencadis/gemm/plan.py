"""How a general grouped GEMM will run: as a kernel where there is one, else in XLA's operations."""

from __future__ import annotations

import dataclasses
from typing import Protocol

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


class GemmBackend(Protocol):
    """What a backend of a general grouped GEMM has: `plan` and `run`, which mean the same as in `backends.Backend`."""

    def plan(self, problem: GemmProblem, target: Target, overrides: Overrides = ...) -> Plan | Refusal:
        """The whole decision for a problem on a target, or the reason why this backend cannot run it."""

    def run(self, plan: Plan, lhs: Array, rhs: Array, *rest: Array) -> Array:
        """The result of a plan's problem, from lhs, rhs, the six arrays i32[g] of `Groups`, and those of `Extras`."""


class _Tpu:
    """`gemm.tpu`, imported where it is needed: Pallas for TPUs takes long to import, and few programs need it."""

    @staticmethod
    def plan(problem: GemmProblem, target: Target, overrides: Overrides = Overrides()) -> Plan | Refusal:
        refusal = elsewhere(target)
        if refusal is not None:
            return refusal
        from trencadis.gemm import tpu

        return tpu.plan(problem, target, overrides)

    @staticmethod
    def run(plan: Plan, lhs: Array, rhs: Array, *rest: Array) -> Array:
        from trencadis.gemm import tpu

        return tpu.run(plan, lhs, rhs, *rest)


# in the order of preference
BACKENDS: dict[str, GemmBackend] = {"tpu": _Tpu(), "triton": triton, "cpu": cpu, "xla": xla}


def answers(problem: GemmProblem, target: Target, overrides: Overrides = Overrides()) -> dict[str, Plan | Refusal]:
    """What each backend says of a problem, in the order of preference: its plan, or why it refuses."""
    return {name: _answer(name, problem, target, overrides) for name in BACKENDS}


def _answer(name: str, problem: GemmProblem, target: Target, overrides: Overrides = Overrides()) -> Plan | Refusal:
    stand_in = INTERPRETED.get(name)
    if overrides.interpret and stand_in is not None and target.platform != stand_in.platform:
        target = stand_in  # kernels are planned for their own device
    return BACKENDS[name].plan(problem, target, overrides)


def plan(problem: GemmProblem, target: Target, overrides: Overrides = Overrides()) -> Plan:
    """The plan of the first backend that takes the problem, or of the one that the caller asked for."""
    asked = overrides.backend
    for name in BACKENDS if asked is None else (asked,):
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
    return BACKENDS[plan.backend].run(plan, *operands)
