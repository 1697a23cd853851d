"""One cell of the table: a problem, a dtype and a pass; every contender checked, then all of them raced."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from benchmarks import oracle as right
from benchmarks.peers import Call, Operands, Peer
from benchmarks.timing import Clock, Stats, race, ratios

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


def measure(x: Operands, dtype: str, which: str, peers: Sequence[Peer], how: How) -> Cell:
    """Check every contender against float64, then time those that are right."""
    calls, errors, skipped = entrants(x, which, peers)
    p = x.problem
    memory = {}
    if how.memory:
        found = {name: call.memory() for name, call in calls.items() if hasattr(call, "memory")}
        memory = {name: account for name, account in found.items() if account}
    times = race(calls, how.clock, rounds=how.rounds, budget_s=how.budget_s) if how.rounds else {}
    shape = {
        "m": p.m,
        "k": p.k,
        "n": p.n,
        "g": p.g,
        "nonempty": int((x.sizes > 0).sum()),
        "largest": int(x.sizes.max()),
    }
    return Cell(
        problem=p.name, dtype=dtype, which=which, shape=shape, flops=p.flops,
        times=times, errors=errors, skipped=skipped, memory=memory,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class How:
    """How to measure: the clock, rounds at most (0: none), and seconds a contender may take in a cell."""

    clock: Clock
    rounds: int = 7
    budget_s: float = 10.0
    memory: bool = False


def entrants(
    x: Operands, which: str, peers: Sequence[Peer]
) -> tuple[dict[str, Call], dict[str, float], dict[str, str]]:
    """(calls that are right, their errors, why the others are not here)."""
    calls: dict[str, Call] = {}
    errors: dict[str, float] = {}
    skipped: dict[str, str] = {}
    answers: dict[bool, right.Oracle] = {}
    for peer in peers:
        reason = peer.absent(x)
        if reason is None:
            if peer.one_group not in answers:
                answers[peer.one_group] = right.oracle(x, which, one_group=peer.one_group)
            answer = answers[peer.one_group]
            try:
                call = peer.prepare(x, which)
                errors[peer.name] = right.error(call(), answer)
            except Exception as failure:  # a peer may fail in any way it likes; the run goes on and says so
                first_line = (str(failure).splitlines() or [""])[0]
                reason = f"failed: {type(failure).__name__}: {first_line[:200]}"
            else:
                if errors[peer.name] <= answer.tolerance:
                    calls[peer.name] = call
                else:
                    reason = f"wrong: off by {errors[peer.name]:.1e} of the largest value"
        if reason is not None:
            skipped[peer.name] = reason
    return calls, errors, skipped
