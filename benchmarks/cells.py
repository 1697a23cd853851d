"""One cell of the table: a problem, a dtype and a pass; every contender checked, then all of them raced."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import oracle as right
from benchmarks.peers import Call, Operands, Peer
from benchmarks.timing import CuptiClock, HostClock, Stats, burst, race, ratios, reason_of

BASE = "ours"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """What came out; seconds per call."""

    problem: str
    dtype: str
    which: str  # the pass
    shape: dict[str, int]
    flops: int
    times: dict[str, Stats]
    errors: dict[str, float]
    skipped: dict[str, str]  # contender -> why
    memory: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)

    @property
    def ratios(self) -> dict[str, float]:
        """Our time over each peer's; below 1 we are faster."""
        return ratios(self.times, BASE)

    def to_json(self) -> dict[str, Any]:
        """As plain values; the ratios are there for readers, and are not read back."""
        return dataclasses.asdict(self) | {"ratios": self.ratios}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Cell:
        """The inverse of `to_json`."""
        fields = {field.name: found[field.name] for field in dataclasses.fields(cls)}
        fields["times"] = {name: Stats(**t) for name, t in found["times"].items()}
        return cls(**fields)


def joined(cell: Cell, name: str, times: Stats | None, error: float | None, why: str | None) -> Cell:
    """The cell with what was measured elsewhere."""
    return dataclasses.replace(
        cell,
        times=cell.times | ({} if times is None else {name: times}),
        errors=cell.errors | ({} if error is None else {name: error}),
        skipped={other: reason for other, reason in cell.skipped.items() if other != name}
        | ({name: why} if why else {}),
    )


Prepare = Callable[[Peer, Operands, str], Call]


def measure(
    x: Operands, dtype: str, which: str, peers: Sequence[Peer], how: How, prepare: Prepare | None = None
) -> Cell:
    """Check every contender against float64, then time those that are right."""
    calls, errors, skipped = entrants(x, which, peers, prepare)
    p = x.problem
    memory = {}
    if how.memory:
        found = {name: call.memory() for name, call in calls.items() if hasattr(call, "memory")}
        memory = {name: account for name, account in found.items() if account}
    times: Mapping[str, Stats] = {}
    if how.rounds and how.burst:
        times, failed = bursts(calls, how.clock)
        skipped |= failed
    elif how.rounds:
        times = race(calls, how.clock, rounds=how.rounds, budget_s=how.budget_s)
    shape = {
        "m": p.m,
        "k": p.k,
        "n": p.n,
        "g": p.g,
        "nonempty": int((x.sizes > 0).sum()),
        "largest": int(x.sizes.max()),
    }
    return Cell(
        problem=p.name, dtype=dtype, which=which, shape=shape, flops=p.flops * (3 if which == "step" else 1),
        times=dict(times), errors=errors, skipped=skipped, memory=memory,
    )  # fmt: skip


def bursts(calls: Mapping[str, Call], clock: Any) -> tuple[dict[str, Stats], dict[str, str]]:
    """(times, why there is none): one contender after the other. One that cannot be timed does not end the run."""
    times: dict[str, Stats] = {}
    failed: dict[str, str] = {}
    for name, call in calls.items():
        try:
            times[name] = burst(call, clock)
        except Exception as failure:
            failed[name] = reason_of(failure)
    return times, failed


@dataclasses.dataclass(frozen=True, kw_only=True)
class How:
    """How to measure: the clock, rounds at most (0: none), and seconds a contender may take in a cell."""

    clock: HostClock | CuptiClock
    rounds: int = 7
    budget_s: float = 10.0
    memory: bool = False
    burst: bool = False  # few calls of each, instead of rounds and a budget
    jobs: int = 1  # compiles at a time, before a burst


class Ahead:
    """Calls that were compiled ahead, several at a time: a GPU kernel takes seconds, most of them on one core.

    It ends when all of them are there, so that nothing else runs while a contender is timed.
    """

    def __init__(self, x: Operands, passes: Sequence[str], peers: Sequence[Peer], jobs: int) -> None:
        wanted = [(peer, which) for which in passes for peer in peers if which in peer.passes and not peer.absent(x)]
        wanted.sort(key=lambda pair: not pair[0].one_group)  # XLA times matmuls as it compiles them: before the others
        with concurrent.futures.ThreadPoolExecutor(1) as alone, concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            first = [alone.submit(self.made, peer, x, which) for peer, which in wanted if peer.one_group]
            concurrent.futures.wait(first)
            others = [pool.submit(self.made, peer, x, which) for peer, which in wanted if not peer.one_group]
        self.calls = {(peer.name, which): call for (peer, which), call in zip(wanted, first + others, strict=True)}

    @staticmethod
    def made(peer: Peer, x: Operands, which: str) -> Call:
        """The call, compiled if it is jax's."""
        call = peer.prepare(x, which)
        return call.compiled() if hasattr(call, "compiled") else call

    def __call__(self, peer: Peer, x: Operands, which: str) -> Call:
        """As `peer.prepare`; raises what that raised."""
        return self.calls[peer.name, which].result()


def entrants(
    x: Operands, which: str, peers: Sequence[Peer], prepare: Prepare | None = None
) -> tuple[dict[str, Call], dict[str, float], dict[str, str]]:
    """(calls that are right, their errors, why the others are not here)."""
    calls: dict[str, Call] = {}
    errors: dict[str, float] = {}
    skipped: dict[str, str] = {}
    answers: dict[bool, tuple[right.Oracle, ...]] = {}
    for peer in (peer for peer in peers if which in peer.passes):
        reason = peer.absent(x)
        if reason is None:
            if peer.one_group not in answers:
                answers[peer.one_group] = right.answers(x, which, one_group=peer.one_group)
            answer = answers[peer.one_group]
            try:
                call = peer.prepare(x, which) if prepare is None else prepare(peer, x, which)
                errors[peer.name] = right.worst(call(), answer)
            except Exception as failure:  # a peer may fail in any way it likes; the run goes on and says so
                reason = reason_of(failure)
            else:
                if errors[peer.name] <= answer[0].tolerance:
                    calls[peer.name] = call
                else:
                    reason = f"wrong: off by {errors[peer.name]:.1e} of the largest value"
        if reason is not None:
            skipped[peer.name] = reason
    return calls, errors, skipped
