"""`tpu`: ours and the peers by the TPU compiler's own schedules, without a TPU.

A peer that needs another version of jax is compiled by another interpreter (`--python`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import processes, tables, tpu_peers, tpu_table
from benchmarks.commands.run import failed, names
from benchmarks.problems import known
from benchmarks.report import OURS, RESULTS, Record, Results, Writer, environment
from benchmarks.schedules import line, scheduled
from benchmarks.timing import ScheduleClock
from benchmarks.tpu_peers import Tiling, TpuPeer
from benchmarks.tpu_table import Case

CLOCK = "TPU compiler schedule"


def main(asked: argparse.Namespace) -> int:
    """Compile, print and write, and renew the table in a page; 1 if ours is missing anywhere."""
    peers = known("peers", names(asked.peers, list(tpu_peers.PEERS)), tpu_peers.PEERS)
    what = (asked.problems, asked.passes, asked.generations)
    made = [_said(value) for value in schedules(*what, peers, asked.timeout)]
    if others := [name for name in peers if name != OURS]:
        job = processes.Job(function="benchmarks.commands.tpu:schedules", arguments=(*what, others, asked.timeout))
        for python in asked.python:
            made += [_said(value) for value in processes.run(job, silence_s=2 * asked.timeout, python=python)]
    for path in asked.reuse:
        made += kept(Results.read(path).records, made)
    results = Results(command="tpu", environment=where(asked.words), records=made)
    results.shapes = {case.problem.name: case.problem.shape() for case in map(Case.of, made)}
    publish(results, asked)
    return failed(made)


def where(words: Sequence[str]) -> dict[str, Any]:
    """The environment of schedules, which are the same on every host."""
    found = environment(words, CLOCK)
    kept = {name: found[name] for name in ("date", "command", "clock", "versions")}
    return {**kept, "platform": "tpu", "device": "tpu-schedule"}


def kept(records: Sequence[Record], made: Sequence[Record]) -> list[Record]:
    """The earlier records that were not made anew; a peer counts with each version of jax, ours with one."""

    def task(r: Record) -> tuple[object, ...]:
        return r.contender, r.cell, None if r.contender == OURS else r.details.get("versions", {}).get("jax")

    again = {task(r) for r in made}
    return [r for r in records if task(r) not in again]


def publish(results: Results, asked: argparse.Namespace) -> None:
    """Print the table, write the records, and renew the page."""
    tables.show("microseconds of one device", tpu_table.table(results.records))
    if asked.json == "none":
        return
    found: dict[str, str] = next((r.details["versions"] for r in results.records if r.contender == OURS and r.time), {})
    stem = "-".join([results.environment["date"], *(f"{n}{found[n]}" for n in ("jax", "libtpu") if n in found)])
    Writer(results, asked.json or str(RESULTS / "tpu-schedule" / f"{stem}.json")).close()
    if asked.page.name != "none" and not tpu_table.renew(asked.page, tpu_table.markdown(results)):
        print(f"not in {asked.page.name}: it has no {tpu_table.BEGIN} and {tpu_table.END}", file=sys.stderr)


def _said(found: dict[str, Any]) -> Record:
    record = Record.from_json(found)
    print(line(record), flush=True)
    return record


def schedules(
    problems: str | None, passes: str | None, generations: str, peers: Sequence[str], timeout_s: float
) -> Iterator[dict[str, Any]]:
    """Yield a record of each case for each peer that is installed here, as JSON; also a job for another interpreter."""
    here = [tpu_peers.PEERS[name] for name in peers if tpu_peers.PEERS[name].version() is not None]
    for case in tpu_table.cases(problems, passes, generations):
        for peer in here:
            for tiling in peer.tilings(case) if peer.takes(case) else ():
                yield one(peer, case, tiling, timeout_s).to_json()


def one(peer: TpuPeer, case: Case, tiling: Tiling | None, timeout_s: float) -> Record:
    """Compile one case for one peer, and return what its schedule says."""
    record = Record(
        problem=case.problem.name, dtype=case.dtype, which=case.which, contender=peer.name, device=case.generation,
        details={} if tiling is None else {"tiling": list(tiling)},
    )  # fmt: skip
    return scheduled(
        record,
        lambda: (peer.build(case, tiling), tpu_peers.operands(case)),
        ScheduleClock(generation=case.generation, timeout_s=timeout_s),
        {peer.package: peer.version() or "?"},
        flops=case.problem.flops,
    )
