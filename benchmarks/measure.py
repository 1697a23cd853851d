"""A problem in a dtype and a pass: every contender is checked against float64, and those that are right are timed."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import gc
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import oracle, peers, processes
from benchmarks.peers import Call, Operands, Peer
from benchmarks.problems import BenchProblem
from benchmarks.report import Record
from benchmarks.timing import CuptiClock, HostClock, Others, Stats, bursts, race, reason_of, steady, wall_clock

BUSY = 0.2  # cores that other processes take, from which times of calls on all cores say little
ROOM = 3  # times the error of one rounding: a peer may round more than once

Prepare = Callable[[Peer, Operands, str], Call]


@dataclasses.dataclass(frozen=True, kw_only=True)
class How:
    """How to measure: the clock, the rounds of a race (0: nothing is timed), and the seconds of one contender in it."""

    clock: HostClock | CuptiClock
    rounds: int = 7
    budget_s: float = 10.0
    memory: bool = False
    bursts: bool = False  # a few calls of each contender instead of a race
    alone: bool = False  # each contender in a process of its own, one after the other
    jobs: int = 1  # functions compiled at a time, before bursts


def problem_records(
    problem: BenchProblem, dtypes: Sequence[str], passes: Sequence[str], contenders: Sequence[Peer], how: How
) -> list[Record]:
    """The records of one problem; prints which contenders take no part, and why."""
    made: list[Record] = []
    said: set[tuple[str, str]] = set()
    for dtype in dtypes:
        x = peers.operands(problem, dtype)
        ahead = Ahead(x, passes, contenders, how.jobs) if how.bursts else None
        for which in passes:
            found = pass_records(x, dtype, which, contenders, how, ahead)
            if how.bursts:  # at once: the table would be lost if a later kernel hangs
                times = [f"{r.contender} {r.time.median * 1e3:.3f} ms" for r in found if r.time]
                print(f"  {which}: {', '.join(times)}", flush=True)
            for record in found:
                if record.why and (record.contender, record.why) not in said:
                    print(f"  {record.contender} {record.why}", flush=True)
                said.add((record.contender, record.why))
            made += found
        del x, ahead  # the operands, before those of the next problem are made
        gc.collect()
    return made


def pass_records(
    x: Operands,
    dtype: str,
    which: str,
    contenders: Sequence[Peer],
    how: How,
    prepare: Prepare | None = None,
) -> list[Record]:
    """Check every contender, time those that are right, and return a record for each."""
    takers = [peer for peer in contenders if which in peer.passes]
    calls, found = entrants(x, dtype, which, takers, prepare)
    if how.memory:
        for name, call in calls.items():
            memory = call.memory() if isinstance(call, peers.JaxCall) else None
            found[name] = dataclasses.replace(found[name], memory=memory or {})
    times: Mapping[str, Stats] = {}
    if how.rounds and how.bursts:
        times, failed = bursts({name: (call, how.clock) for name, call in calls.items()})
        found |= {name: dataclasses.replace(found[name], why=why) for name, why in failed.items()}
    elif how.rounds:
        times = race(calls, how.clock, rounds=how.rounds, budget_s=how.budget_s)
    found |= {name: dataclasses.replace(found[name], time=time) for name, time in times.items()}
    return list(found.values())


def entrants(
    x: Operands, dtype: str, which: str, contenders: Sequence[Peer], prepare: Prepare | None = None
) -> tuple[dict[str, Call], dict[str, Record]]:
    """The calls of the contenders that are right, and a record of every contender without its time."""
    calls: dict[str, Call] = {}
    found: dict[str, Record] = {}
    right: dict[bool, tuple[oracle.Answer, ...]] = {}
    limit = tolerance(x, which)
    for peer in contenders:
        record = Record(problem=x.problem.name, dtype=dtype, which=which, contender=peer.name, limit=limit)
        why = peer.absent(x)
        if why is None:
            if peer.one_group not in right:
                right[peer.one_group] = oracle.answers(x, which, one_group=peer.one_group)
            try:
                call = prepare(peer, x, which) if prepare else peer.prepare(x, which)
                error = oracle.worst(call(), right[peer.one_group])
            except Exception as failure:  # a peer may fail in any way; the run goes on and says so
                why = reason_of(failure)
            else:
                record = dataclasses.replace(record, error=error)
                if error <= limit:
                    calls[peer.name] = call
                else:
                    why = f"wrong: relative error {error:.1e}"
        found[peer.name] = dataclasses.replace(record, why=why or "")
    return calls, found


def tolerance(x: Operands, which: str) -> float:
    """The largest error with which a contender is timed."""
    tf32 = x.dtype == jnp.float32 and jax.default_backend() != "cpu"
    return ROOM * oracle.limit(x.dtype, depth=oracle.depths(x.problem.shape(), which), tf32=tf32)


def alone(
    name: str,
    problems: Sequence[Mapping[str, Any]],
    dtypes: Sequence[str],
    passes: Sequence[str],
    rounds: int,
    budget_s: float,
) -> Iterator[dict[str, Any]]:
    """Yield the records of one contender, as JSON values; for a process that has no other contender in it."""
    peer = peers.PEERS[name]
    wanted = [which for which in passes if which in peer.passes]
    for problem, dtype in itertools.product(problems, dtypes):
        x = peers.operands(BenchProblem(**problem), dtype)
        for which in wanted:
            calls, found = entrants(x, dtype, which, [peer])
            record = found[name]
            if calls:
                others = Others()
                time = steady(calls[name], wall_clock(), rounds=rounds, budget_s=budget_s)
                record = dataclasses.replace(record, time=time, details={"others": others()})
            yield record.to_json()


def alone_records(
    problem: BenchProblem, dtypes: Sequence[str], passes: Sequence[str], contenders: Sequence[Peer], how: How
) -> list[Record]:
    """The records of one problem, with a process for each contender: the threads of two libraries would compete."""
    made: list[Record] = []
    for dtype, peer in itertools.product(dtypes, contenders):
        given = (peer.name, [dataclasses.asdict(problem)], [dtype], list(passes), how.rounds, how.budget_s)
        try:
            for value in processes.run(processes.Job(function="benchmarks.measure:alone", arguments=given)):
                made.append(Record.from_json(value))
        except processes.ChildFailed as failure:
            made.append(Record(problem=problem.name, dtype=dtype, contender=peer.name, why=str(failure)))
        mine = [record for record in made if (record.contender, record.dtype) == (peer.name, dtype)]
        times = [f"{r.which} {r.time.median * 1e3:.2f} ms" if r.time else f"{r.which} {r.why}" for r in mine]
        others = max((r.details.get("others") or 0.0 for r in mine), default=0.0)
        note = f"; other processes took up to {others:.1f} cores" if others > BUSY else ""
        print(f"  {dtype} {peer.name}: {', '.join(times)}{note}", flush=True)
    return made


class Ahead:
    """Calls compiled ahead, several at a time: a GPU kernel takes seconds to compile, most of them on one core.

    All are compiled before the first is timed, so that nothing else runs meanwhile.
    """

    def __init__(self, x: Operands, passes: Sequence[str], contenders: Sequence[Peer], jobs: int) -> None:
        """Compile each pass of each contender that can run."""
        wanted = [(p, which) for which in passes for p in contenders if which in p.passes and not p.absent(x)]
        wanted.sort(key=lambda pair: not pair[0].one_group)  # XLA times dense matmuls as it compiles them: these alone
        with concurrent.futures.ThreadPoolExecutor(1) as alone, concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            first = [alone.submit(self.compiled, peer, x, which) for peer, which in wanted if peer.one_group]
            concurrent.futures.wait(first)
            others = [pool.submit(self.compiled, peer, x, which) for peer, which in wanted if not peer.one_group]
        self.calls = {(peer.name, which): call for (peer, which), call in zip(wanted, first + others, strict=True)}

    @staticmethod
    def compiled(peer: Peer, x: Operands, which: str) -> Call:
        """The call of a contender, compiled if it is a jax function."""
        call = peer.prepare(x, which)
        return call.compiled() if isinstance(call, peers.JaxCall) else call

    def __call__(self, peer: Peer, x: Operands, which: str) -> Call:
        """The compiled call, or the exception that preparing it raised."""
        return self.calls[peer.name, which].result()
