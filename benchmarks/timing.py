"""The clocks, one for each kind of device, and how contenders are timed by them.

On a host all contenders take turns in one run, and medians, spreads and ratios are of those turns (`race`). On a GPU
each has one short burst of calls (`burst`). For a TPU the compiler's schedule is read, and nothing runs.

Only the standard library is imported at the top: `pin` must come before numpy and jax start their threads.
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
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from trencadis.inspect import Inspection

ENOUGH_S = 0.005  # a turn lasts at least this long: shorter calls are repeated
MOST_REPEATS = 2000
# After a call OpenBLAS's and XLA's threads spin for a while, and would take a core from whoever comes next.
SETTLE_S = 0.05
WARM_S, MOST_TURNS = 0.3, 101  # alone: seconds of calls before the first that counts, and how many count at most
WARM, TIMED = 2, 10  # calls of a burst: few, since a GPU that is busy for longer gets hot and slow

Name = TypeVar("Name", bound=Hashable)


class Call(Protocol):
    """A contender with its operands: a call runs it once and waits for the result."""

    def __call__(self) -> Any: ...


class Clock(Protocol):
    """What a race is timed by: called, it gives the seconds per call of `repeats` calls in a row."""

    @property
    def name(self) -> str: ...
    @property
    def settle_s(self) -> float: ...
    def __call__(self, call: Any, repeats: int) -> float: ...


def pin(core: int) -> None:
    """Keep this process on one core, and OpenBLAS on one thread; numpy and jax must not be imported yet."""
    early = [name for name in ("numpy", "jax") if name in sys.modules]
    if early:
        raise RuntimeError(f"pin: want it before numpy and jax start their threads; got {' and '.join(early)} imported")
    if not hasattr(os, "sched_setaffinity"):
        raise RuntimeError("pin: want a system that has os.sched_setaffinity; this one has not")
    os.sched_setaffinity(0, {core})
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[variable] = "1"


def default_platform() -> None:
    """Tell jax not to look for a TPU or GPU where there is none: libtpu would print warnings about it."""
    present = any(pathlib.Path("/dev").glob("accel*")) or pathlib.Path("/dev/vfio").exists()
    cuda = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
    if not present and not cuda:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


@dataclasses.dataclass(frozen=True)
class HostClock:
    """A clock of the host, read before and after the calls."""

    name: str
    read: Callable[[], float]
    settle_s: float = 0.0

    def __call__(self, call: Call, repeats: int) -> float:
        start = self.read()
        for _ in range(repeats):
            call()
        return (self.read() - start) / repeats

    def each(self, call: Call, count: int) -> list[float]:
        """The seconds of each of `count` calls."""
        return [self(call, 1) for _ in range(count)]


def cpu_clock() -> HostClock:
    """The CPU time of the whole process, which leaves out what other processes take of a pinned core.

    It counts every thread, and XLA frees memory after it has answered: a contender that follows one with large
    temporaries would pay for unmapping them. So there is a pause before each turn too.
    """
    return HostClock("cpu time", time.process_time, SETTLE_S)


def wall_clock() -> HostClock:
    """The wall time of calls on all cores."""
    return HostClock("wall time", time.perf_counter, SETTLE_S)


@dataclasses.dataclass(frozen=True)
class CuptiClock:
    """The time of all kernels of a jax call on an NVIDIA GPU, by CUPTI."""

    name: str = "cupti kernel time"
    settle_s: float = 0.0
    kept: int = TIMED  # calls that are profiled at a time: the profiler keeps the results of all of them

    def __call__(self, call: Any, repeats: int) -> float:
        return statistics.median(self.each(call, repeats))

    def each(self, call: Any, count: int) -> list[float]:
        """The seconds of each of `count` calls in a row; the profiler makes one more before them."""
        from jax.experimental.mosaic.gpu import profiler

        seconds: list[float] = []
        while len(seconds) < count:
            _, ms = profiler.measure(call.fn, iterations=min(self.kept, count - len(seconds)))(*call.args)
            if ms is None:
                raise RuntimeError("CUPTI saw no kernel")
            seconds += [one / 1e3 for one in (ms if isinstance(ms, list) else [ms])]
        return seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleClock:
    """The time that the TPU compiler's own schedule of a call takes on a generation; nothing runs."""

    generation: str
    timeout_s: float = 300.0
    name: str = "TPU compiler schedule"

    def __call__(self, fn: Callable[..., Any], *operands: Any, flops: int | None = None) -> Inspection:
        """Compile a function ahead of time for these operands, and run through its schedule."""
        from trencadis import inspect

        chip, limit = self.generation, self.timeout_s
        return inspect.inspect(fn, *operands, generation=chip, xla=True, flops=flops, timeout=limit)


def device_clock(platform: str, *, pinned: bool = False) -> HostClock | CuptiClock:
    """The clock for calls on a platform; on a CPU it is CPU time where the process is pinned to a core."""
    if platform == "gpu":
        return CuptiClock()
    return cpu_clock() if pinned else wall_clock()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """The seconds per call of one contender; a schedule has only the median, and so have some older results."""

    median: float
    min: float | None = None
    q1: float | None = None
    q3: float | None = None
    samples: int | None = None
    repeats: int | None = None  # calls in a row in each turn

    @property
    def spread(self) -> float:
        """The distance between the quartiles as a share of the median."""
        return (self.q3 - self.q1) / self.median if self.median and self.q1 and self.q3 else 0.0


def stats(samples: Sequence[float], repeats: int = 1) -> Stats:
    """The median, the quartiles and the minimum of the samples."""
    if len(samples) == 1:
        q1 = q3 = samples[0]
    else:
        q1, _, q3 = statistics.quantiles(samples, n=4, method="inclusive")
    return Stats(
        median=statistics.median(samples), min=min(samples), q1=q1, q3=q3, samples=len(samples), repeats=repeats
    )


def plan_turns(seconds: float, rounds: int, budget_s: float) -> tuple[int, int]:
    """The turns, and the calls per turn, for calls of this length: a slow contender gets fewer turns, at least one."""
    repeats = max(1, min(MOST_REPEATS, math.ceil(ENOUGH_S / max(seconds, 1e-9))))
    turns = max(1, min(rounds, int(budget_s / max(seconds * repeats, 1e-9))))
    return turns, repeats


def race(calls: Mapping[str, Call], clock: Clock, *, rounds: int = 7, budget_s: float = 10.0) -> dict[str, Stats]:
    """Let the contenders take turns, and return the times of each.

    Every call must have run before (compiled and checked). It runs once more here, to find how many calls make a turn
    long enough to read, and how many turns fit the budget. Another contender starts in each round.
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
    """The times of a few calls after a few to warm up; the call must be compiled already."""
    return stats(_burst(call, clock))


def bursts(
    calls: Mapping[Name, tuple[Call, HostClock | CuptiClock]], turns: int = 1
) -> tuple[dict[Name, Stats], dict[Name, str]]:
    """The times of contenders that take turns, a burst each, and why some have none: a failure does not end the run.

    How fast a GPU is depends on what ran before, so that each turn starts with another contender.
    """
    samples: dict[Name, list[float]] = {name: [] for name in calls}
    why: dict[Name, str] = {}
    for turn in range(turns):
        first = turn * len(calls) // turns
        for name in [*calls][first:] + [*calls][:first]:
            try:
                samples[name] += _burst(*calls[name])
            except Exception as failure:
                why[name] = reason_of(failure)
    return {name: stats(samples[name]) for name in calls if name not in why}, why


def _burst(call: Call, clock: HostClock | CuptiClock) -> list[float]:
    for _ in range(WARM):
        call()
    return clock.each(call, TIMED)


def steady(call: Call, clock: HostClock, *, rounds: int = 7, budget_s: float = 10.0) -> Stats:
    """The times of one contender alone, call after call, as a training loop makes them.

    The call must have run before. The first calls only warm up: memory is allocated, threads find their cores.
    """
    start = time.perf_counter()
    while time.perf_counter() - start < min(WARM_S, budget_s):
        call()
    turns, repeats = plan_turns(clock(call, 1), MOST_TURNS, budget_s)
    return stats([clock(call, repeats) for _ in range(max(turns, rounds))], repeats)


class Others:
    """Counts the cores that other processes keep busy, from when it is made on; None where the system does not say."""

    def __init__(self) -> None:
        self.start = self._read()

    def __call__(self) -> float | None:
        """The cores, on average: 0.0 on a machine that does nothing else."""
        if self.start is None or (now := self._read()) is None:
            return None
        wall, busy, mine = (after - before for after, before in zip(now, self.start, strict=True))
        return round(max(busy - mine, 0.0) / wall, 2) if wall else 0.0

    @staticmethod
    def _read() -> tuple[float, float, float] | None:
        """Seconds: of the clock, of all processes, of this one."""
        try:
            _, *ticks = pathlib.Path("/proc/stat").read_text().splitlines()[0].split()
            used = [int(ticks[i]) for i in (0, 1, 2, 5, 6, 7)]  # user, nice, system, irq, softirq, steal
            return time.perf_counter(), sum(used) / os.sysconf("SC_CLK_TCK"), time.process_time()
        except (OSError, ValueError, IndexError):
            return None


def reason_of(failure: BaseException) -> str:
    """The first line of an exception, as the reason why a contender takes no part."""
    first_line = (str(failure).splitlines() or [""])[0]
    return f"failed: {type(failure).__name__}: {first_line[:200]}"


def slope(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """The exponent p of `seconds ~ sizes**p`, by least squares on the logarithms; 1 is linear."""
    x, y = [math.log(s) for s in sizes], [math.log(s) for s in seconds]
    return statistics.linear_regression(x, y).slope
