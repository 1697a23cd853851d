"""Honest timing: all contenders take turns in one run; medians, spreads and ratios are of those turns.

Only the standard library is imported here at the top: `pin` must come before numpy and jax start their threads.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

ENOUGH_S = 0.005  # a turn lasts at least this long: shorter calls are repeated
MOST_REPEATS = 2000
# After a call OpenBLAS's and XLA's threads spin for a while, and would take a core from whoever comes next.
SETTLE_S = 0.05
WARM, TIMED = 2, 10  # calls of a burst: few, since a card that is busy for longer gets hot and slow


class Call(Protocol):
    """A contender on its operands: calling it runs it once, to the end."""

    def __call__(self) -> Any: ...


class Clock(Protocol):
    """Seconds per call of `repeats` calls in a row."""

    name: str
    settle_s: float

    def __call__(self, call: Call, repeats: int) -> float: ...


def pin(core: int) -> None:
    """Keep this process on one core, and OpenBLAS on one thread. Only before numpy and jax are imported."""
    early = [name for name in ("numpy", "jax") if name in sys.modules]
    if early:
        raise RuntimeError(f"pin: {' and '.join(early)} is imported already and has made its threads; pin first")
    if not hasattr(os, "sched_setaffinity"):
        raise RuntimeError("pin: this system has no os.sched_setaffinity")
    os.sched_setaffinity(0, {core})
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"


def no_tpu_here() -> None:
    """Tell jax not to look for a TPU or GPU where there is none: libtpu complains at length about its absence."""
    present = any(pathlib.Path("/dev").glob("accel*")) or pathlib.Path("/dev/vfio").exists()
    cuda = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
    if not present and not cuda:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


@dataclasses.dataclass(frozen=True)
class HostClock:
    """Reads a clock of the host before and after."""

    name: str
    read: Callable[[], float]
    settle_s: float = 0.0

    def __call__(self, call: Call, repeats: int) -> float:
        start = self.read()
        for _ in range(repeats):
            call()
        return (self.read() - start) / repeats

    def each(self, call: Call, count: int) -> list[float]:
        """Seconds of each of some calls."""
        return [self(call, 1) for _ in range(count)]


def cpu_clock() -> HostClock:
    """CPU time of the whole process: on a pinned core it does not count what neighbours take.

    It counts every thread, and XLA gives memory back after it has answered: a contender that follows one with large
    temporaries would pay for unmapping them. So it settles too.
    """
    return HostClock("cpu time", time.process_time, SETTLE_S)


def wall_clock() -> HostClock:
    """Wall time on all cores."""
    return HostClock("wall time", time.perf_counter, SETTLE_S)


@dataclasses.dataclass(frozen=True)
class CuptiClock:
    """Time of all kernels of a jax call on an NVIDIA GPU."""

    name: str = "cupti kernel time"
    settle_s: float = 0.0

    def __call__(self, call: Any, repeats: int) -> float:
        return statistics.median(self.each(call, repeats))

    def each(self, call: Any, count: int) -> list[float]:
        """Seconds of each of some calls in a row. The profiler makes one more before them."""
        from jax.experimental.mosaic.gpu import profiler

        _, ms = profiler.measure(call.fn, iterations=count)(*call.args)
        if ms is None:
            raise RuntimeError("CUPTI saw no kernel")
        return [one / 1e3 for one in (ms if isinstance(ms, list) else [ms])]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Seconds per call over the turns of one contender."""

    median: float
    min: float
    q1: float
    q3: float
    samples: int
    repeats: int  # calls in a row in each turn

    @property
    def spread(self) -> float:
        """Distance between the quartiles, as a share of the median."""
        return (self.q3 - self.q1) / self.median if self.median else 0.0


def stats(samples: Sequence[float], repeats: int = 1) -> Stats:
    """Median, quartiles and least of the samples."""
    if len(samples) == 1:
        q1 = q3 = samples[0]
    else:
        q1, _, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return Stats(
        median=statistics.median(samples), min=min(samples), q1=q1, q3=q3, samples=len(samples), repeats=repeats
    )


def plan_turns(seconds: float, rounds: int, budget_s: float) -> tuple[int, int]:
    """(turns, calls per turn) of a contender whose call takes this long: slow ones get fewer turns, at least one."""
    repeats = max(1, min(MOST_REPEATS, math.ceil(ENOUGH_S / max(seconds, 1e-9))))
    turns = max(1, min(rounds, int(budget_s / max(seconds * repeats, 1e-9))))
    return turns, repeats


def race(calls: Mapping[str, Call], clock: Clock, *, rounds: int = 7, budget_s: float = 10.0) -> dict[str, Stats]:
    """Let the contenders take turns and say how long each one's calls take.

    Every call must have run before (compiled and checked). Here it runs once more, which tells how many calls make a
    turn long enough to read, and how many turns fit the budget. Who starts a round changes from round to round.
    """
    turns = {name: plan_turns(clock(call, 1), rounds, budget_s) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(rounds):
        first = turn % max(len(names), 1)
        for name in names[first:] + names[:first]:
            wanted, repeats = turns[name]
            if turn < wanted:
                if clock.settle_s:
                    time.sleep(clock.settle_s)
                samples[name].append(clock(calls[name], repeats))
    return {name: stats(taken, turns[name][1]) for name, taken in samples.items()}


def burst(call: Call, clock: HostClock | CuptiClock) -> Stats:
    """A few calls to warm up, then a few that are timed one by one. Every call must have been compiled before."""
    for _ in range(WARM):
        call()
    return stats(clock.each(call, TIMED))


def reason_of(failure: BaseException) -> str:
    """Why a contender is not here, in a line."""
    first_line = (str(failure).splitlines() or [""])[0]
    return f"failed: {type(failure).__name__}: {first_line[:200]}"


def ratios(times: Mapping[str, Stats], base: str) -> dict[str, float]:
    """Time of the base over the time of each other contender, by medians: below 1 the base is faster."""
    if base not in times:
        return {}
    return {name: times[base].median / t.median for name, t in times.items() if name != base and t.median}


def slope(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """The exponent p of `seconds ~ sizes**p`, by least squares on logarithms; 1 is linear."""
    x, y = [math.log(s) for s in sizes], [math.log(s) for s in seconds]
    return statistics.linear_regression(x, y).slope
