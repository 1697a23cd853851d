"""How it will be done: the one place where a backend and a tiling are chosen."""

from __future__ import annotations

import dataclasses

from trencadis.backends import BACKENDS, INTERPRETED
from trencadis.core.problem import Problem
from trencadis.core.target import Target
from trencadis.core.tiling import Pins, Tiling


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A decision, and the reason for it."""

    target: Target
    backend: str
    tiling: Tiling
    interpret: bool = False
    because: str

    def __str__(self) -> str:
        return f"{self.backend}, tile {self.tiling}: {self.because}"


def plan(problem: Problem, target: Target, pins: Pins = Pins()) -> Plan:
    """Obey the caller's pins, or take the first backend that supports the problem on the target.

    >>> from trencadis.api.matmul import problem_of
    >>> print(plan(problem_of((4096, 1024), (8, 1024, 1024), groups=8), Target(platform="cpu")))
    xla, tile 256·1024·1024: first of xla, reference
    """
    target = _seen(target, pins)
    reasons = refusals(problem, target)
    name, because = pins.backend, "asked for"
    if name is None and pins.interpret:
        name, because = "reference", "interpret=True"
    if name is None:
        able = [backend for backend, reason in reasons.items() if reason is None]
        name, because = able[0], f"first of {', '.join(able)}"
    elif reasons[name] is not None:
        said = "; ".join(f"{backend}: {reason or 'supports it'}" for backend, reason in reasons.items())
        raise ValueError(f"backend: {name!r} cannot run {problem} on {target} ({said})")
    tiling = BACKENDS[name].tiling(problem, target)
    if pins.tilings.forward is not None:
        tiling, because = pins.tilings.forward, f"{because}; tiling as given"
    return Plan(target=target, backend=name, tiling=tiling, interpret=pins.interpret, because=because)


def taken(problem: Problem, target: Target, pins: Pins) -> bool:
    """Whether a backend that may be chosen takes the problem as it is, and not in parts."""
    reasons = refusals(problem, _seen(target, pins))
    name = "reference" if pins.interpret and pins.backend is None else pins.backend
    return None in (reasons.values() if name is None else [reasons[name]])


def _seen(target: Target, pins: Pins) -> Target:
    """The target as a backend sees it: a kernel is interpreted as it is, wherever that happens."""
    if pins.interpret and pins.backend in INTERPRETED and target.platform != INTERPRETED[pins.backend].platform:
        return INTERPRETED[pins.backend]
    return target


def refusals(problem: Problem, target: Target) -> dict[str, str | None]:
    """For every backend, in the order of preference: None if it can, else why it cannot."""
    return {name: backend.supports(problem, target) for name, backend in BACKENDS.items()}


def check_backend(backend: str | None) -> str | None:
    """A backend's name, or an error that lists them."""
    if backend is None or (isinstance(backend, str) and backend in BACKENDS):
        return backend
    raise ValueError(f"backend: want None or one of {', '.join(map(repr, BACKENDS))}; got {backend!r}")
