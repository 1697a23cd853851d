"""`run`: a race of ours against the peers on the problems of the platform that jax finds."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import jax

from benchmarks import measure, peers, problems, tables, timing
from benchmarks.measure import How
from benchmarks.problems import PASSES, STEP
from benchmarks.report import OURS, Record, Results, Writer, environment

SCALING_PEERS = "numpy,dense"  # ragged_dot takes g times as long: ask for it by name


def main(asked: argparse.Namespace) -> int:
    """Measure, print and write; 1 if ours is missing or wrong anywhere."""
    platform = jax.default_backend()
    clock = timing.device_clock(platform, pinned=asked.pin is not None)
    how = How(
        clock=clock, rounds=asked.rounds, budget_s=asked.budget, memory=asked.memory,
        bursts=asked.bursts or platform == "gpu", alone=asked.alone,
    )  # fmt: skip
    where = environment(asked.words, clock.name, pinned=asked.pin is not None)
    results = Results(command="run", environment=where)
    if asked.scaling:
        chosen, contenders = [*problems.SCALING_G, *problems.SCALING_M], peers.select(asked.peers or SCALING_PEERS)
    else:
        chosen, contenders = problems.select(asked.problems, asked.tag or platform), peers.select(asked.peers)
    dtypes = problems.known("dtypes", names(asked.dtypes, default_dtypes(platform)), peers.DTYPES)
    passes = known_passes(asked.passes, PASSES if platform == "cpu" and not asked.alone else (*PASSES, STEP))
    return measure_all(results, Writer(results, asked.json), chosen, dtypes, passes, contenders, how)


def names(asked: str | None, default: Sequence[str]) -> list[str]:
    """The comma-separated names of an option, or its default."""
    return asked.split(",") if asked else list(default)


def default_dtypes(platform: str) -> tuple[str, ...]:
    """Both dtypes on a CPU, bf16 elsewhere."""
    return ("f32", "bf16") if platform == "cpu" else ("bf16",)


def known_passes(asked: str | None, default: Sequence[str], among: Sequence[str] = (*PASSES, STEP)) -> list[str]:
    """The passes of the option, all of which must exist."""
    return problems.known("passes", names(asked, default), among)


def measure_all(
    results: Results,
    keep: Writer,
    chosen: Sequence[problems.BenchProblem],
    dtypes: Sequence[str],
    passes: Sequence[str],
    contenders: Sequence[peers.Peer],
    how: How,
) -> int:
    """Measure every problem, write after each, and print the tables; 1 if ours is missing or wrong anywhere."""
    for problem in chosen:
        print(problem, flush=True)
        results.shapes[problem.name] = problem.shape()
        records = measure.alone_records if how.alone else measure.problem_records
        results.records += records(problem, dtypes, passes, contenders, how)
        keep()
    tables.print_run(results)
    keep.close()
    return failed(results.records)


def failed(records: Sequence[Record]) -> int:
    """1 if one of our own results is missing or wrong, which is printed; otherwise 0."""
    wrong = [record for record in records if record.contender == OURS and record.why]
    for r in wrong:
        print(f"OURS {r.why} ({r.problem} {r.dtype} {r.which} {r.device})", file=sys.stderr)
    return 1 if wrong else 0
