"""How a problem will run: the one place where a backend, its layout and a split of the product are chosen."""

from __future__ import annotations

import dataclasses
import math
import sys
import warnings

import numpy as np

from trencadis.backends import BACKENDS, GATED, INTERLEAVED, INTERPRETED, KERNELS
from trencadis.backends.prepare import DEINTERLEAVED, PREPARE_IN_ORDER
from trencadis.core.decision import PerformanceWarning, Plan, Refusal
from trencadis.core.epilogue import ALONG_K, Epilogue
from trencadis.core.problem import Form, Problem
from trencadis.core.split import part_length, part_of
from trencadis.core.target import Target
from trencadis.core.tiling import Overrides

__all__ = [
    "PerformanceWarning",
    "Plan",
    "Refusal",
    "answers",
    "check_backend",
    "gated_answers",
    "gated_plan",
    "gathered",
    "plan",
    "warn_if_slow",
    "warn_slow",
]


def plan(problem: Problem, target: Target, overrides: Overrides = Overrides()) -> Plan:
    """The plan of the first backend that takes the problem, or of the one that the caller asked for.

    The first may name one that is `faster` on such problems, whose plan it then is. Where none takes a
    problem whose scales change along k, the plan is that of a part of k, or of scaled weights, and `split` says so.

    >>> from trencadis.core.arguments import problem_of
    >>> print(plan(problem_of((4096, 1024), (8, 1024, 1024), groups=8), Target(platform="cpu")))
    xla, tile 256·1024·1024: loops over row tiles of 16 to 256 rows that start at each group's first row
    """
    target = _seen(target, overrides)
    found = _first(problem, target, overrides)
    if found is not None:
        return found
    if problem.epilogue.along_k:
        part = _first(part_of(problem), target, overrides.untiled)
        if part is not None:
            return dataclasses.replace(part, asked=problem, split=part_length(problem))
    given = answers(problem, target, overrides).values()
    said = "; ".join(f"{each.backend}: {each if isinstance(each, Refusal) else 'supports it'}" for each in given)
    raise ValueError(f"backend: {_wanted(overrides)!r} cannot run {problem} on {target} ({said})")


def gated_plan(problem: Problem, target: Target, overrides: Overrides) -> Plan | None:
    """The plan of the first backend whose kernel applies the gated activation of a problem, or None.

    Without one the products run by themselves, each by its own plan, and the activation as XLA operations.
    """
    name = _wanted(overrides)
    given = gated_answers(problem, target, overrides).values()
    return next((each for each in given if isinstance(each, Plan) and name in (None, each.backend)), None)


def gated_answers(problem: Problem, target: Target, overrides: Overrides) -> dict[str, Plan | Refusal]:
    """What each backend with kernels for gated activations says of a problem with one."""
    target = _seen(target, overrides)
    return {name: _gated_answer(name, problem, target, overrides) for name in GATED}


def _gated_answer(name: str, problem: Problem, target: Target, overrides: Overrides) -> Plan | Refusal:
    """What one of them says; if it does not gather rows, what it says of the problem with rows gathered before."""
    answer = BACKENDS[name].plan(problem, target, overrides)
    if isinstance(answer, Plan) or problem.gather is None:
        return answer
    answer = BACKENDS[name].plan(problem.of_rows, target, overrides)
    return dataclasses.replace(answer, asked=problem) if isinstance(answer, Plan) else answer


def _first(problem: Problem, target: Target, overrides: Overrides) -> Plan | None:
    """The plan of the backend that the caller asked for, or of the first that does not refuse, or that is faster."""
    name = _wanted(overrides)
    for backend in BACKENDS if name is None else (name,):
        answer = _answer(backend, problem, target, overrides)
        if isinstance(answer, Plan) and answer.faster is not None and name is None:
            faster, why = answer.faster
            other = _answer(faster, problem, target, overrides)
            if isinstance(other, Plan):
                answer = dataclasses.replace(other, because=f"{other.because}; faster than {backend} {why}")
        if isinstance(answer, Plan):
            return dataclasses.replace(answer, because=answer.because + _asked(overrides))
    return None


def _answer(backend: str, problem: Problem, target: Target, overrides: Overrides) -> Plan | Refusal:
    """What a backend says of a problem; one that does not read interleaved weights gets them in order."""
    if not problem.interleaved or backend in INTERLEAVED:
        return _for_entries(backend, problem, target, overrides)
    answer = _for_entries(backend, problem.replace(interleaved=False), target, overrides)
    if isinstance(answer, Refusal):
        return answer
    slow, advice = (DEINTERLEAVED, PREPARE_IN_ORDER) if overrides.advise else ("", "")
    return dataclasses.replace(answer, asked=problem, slow=slow, advice=advice)


def _for_entries(backend: str, problem: Problem, target: Target, overrides: Overrides) -> Plan | Refusal:
    """What a backend says of a problem; kernels compute the products of several batch entries and nothing more."""
    if problem.batch == 1 or not (problem.epilogue or problem.summed):
        return BACKENDS[backend].plan(problem.replace(summed=False), target, overrides)
    if problem.epilogue.along_k:
        return Refusal(backend, ALONG_K)
    products = problem.replace(epilogue=Epilogue(), summed=False, out=problem.acc)
    answer = BACKENDS[backend].plan(products, target, overrides)
    return answer if isinstance(answer, Refusal) else dataclasses.replace(answer, asked=problem)


def answers(problem: Problem, target: Target, overrides: Overrides = Overrides()) -> dict[str, Plan | Refusal]:
    """What every backend says of a problem, in the order of preference: its plan, or why it refuses."""
    target = _seen(target, overrides)
    return {name: _answer(name, problem, target, overrides) for name in BACKENDS}


def warn_if_slow(chosen: Plan, overrides: Overrides) -> None:
    """Issue a `PerformanceWarning` if a product on an accelerator misses its kernels, or needs many.

    Nothing is said of a backend that the caller asked for, nor where there is nothing to multiply.
    """
    kernels = KERNELS.get(chosen.target.platform, ())
    if not kernels or overrides.backend is not None or overrides.interpret:
        return
    if chosen.backend not in kernels:
        problem = part_of(chosen.asked) if chosen.split else chosen.asked
        refusals = [_answer(name, problem, chosen.target, overrides) for name in kernels]
        costly = [(each.reason, each.advice) for each in refusals if isinstance(each, Refusal) and each.costly]
        for reason, advice in dict.fromkeys(costly):
            warn_slow(f"a grouped product runs as XLA loops instead of a kernel{gathered(chosen)}: {reason}", advice)
    elif chosen.split:
        how = f"runs one kernel for each block of {chosen.split} along k"
        if chosen.asked.epilogue.columnwise:
            how = f"multiplies weights by their scales before its kernel, into an array of {chosen.problem.rhs}"
        warn_slow(
            f"a quantized product {how}, since no kernel takes its scales as they are",
            "quantize with a scale per row of lhs or per column of rhs",
        )
    elif chosen.slow:
        warn_slow(chosen.slow, chosen.advice)


def gathered(chosen: Plan) -> str:
    """What XLA gathers of a product that it partitions, if its operands are sharded."""
    if not chosen.target.partitioned:
        return ""
    names = ("rhs",) if chosen.asked.form is Form.ROWS else ("lhs", "rhs")
    operands = dict(zip(("lhs", "rhs"), chosen.asked.operands, strict=False))
    total = sum(math.prod(operands[name][0]) * np.dtype(operands[name][1]).itemsize for name in names)
    return f", and gathers {' and '.join(names)} if sharded, {total:,} bytes on each device"


def warn_slow(reason: str, advice: str = "") -> None:
    """Issue a `PerformanceWarning` with a reason and what the caller can do about it, at the line of the caller."""
    hint = "trencadis.why(fn, *args) shows every grouped product of a function and what each runs on"
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("trencadis", "jax"):
        level, frame = level + 1, frame.f_back
    warnings.warn("; ".join(filter(None, (reason, advice, hint))), PerformanceWarning, stacklevel=level)


def check_backend(backend: str | None) -> str | None:
    """The name of a backend, or None; an error that lists the names for anything else."""
    if backend is None or (isinstance(backend, str) and backend in BACKENDS):
        return backend
    raise ValueError(f"backend: want None or one of {', '.join(map(repr, BACKENDS))}; got {backend!r}")


def _asked(overrides: Overrides) -> str:
    """What the caller decided, to be said after the figures of a plan."""
    backend = "; backend as asked for" if _wanted(overrides) is not None else ""
    return backend + ("; tile nearest to the one asked for" if overrides.tilings.forward is not None else "")


def _wanted(overrides: Overrides) -> str | None:
    """The backend that the caller asked for, by name or by interpret=True."""
    return "reference" if overrides.interpret and overrides.backend is None else overrides.backend


def _seen(target: Target, overrides: Overrides) -> Target:
    """The target as a backend sees it: an interpreted kernel is planned for its own device, wherever it runs."""
    name = overrides.backend
    if overrides.interpret and name in INTERPRETED and target.platform != INTERPRETED[name].platform:
        return INTERPRETED[name]
    return target
