"""`gpu`: ours and the peers on an NVIDIA GPU, a burst of calls each; or one kernel with several layouts.

torch and quantized formats run in child processes, before this one takes the memory of the GPU.
"""

from __future__ import annotations

import argparse

from benchmarks import formats, layouts, peers, problems, timing, torch_peer
from benchmarks.commands.run import known_passes, measure_all, names
from benchmarks.measure import How
from benchmarks.problems import PASSES, STEP
from benchmarks.report import Record, Results, Writer, environment

PEERS = "torch,mgpu,tokamax"  # ragged_dot takes up to 50 times as long: ask for it by name


def main(asked: argparse.Namespace) -> int:
    """Measure, print and write; 1 if ours is missing or wrong anywhere."""
    chosen = problems.select(asked.problems, asked.tag)
    passes = known_passes(asked.passes, (*PASSES, STEP))
    if asked.layouts:
        return layouts.main(asked, chosen, [which for which in passes if which != STEP])
    contenders = peers.select(asked.peers or PEERS, ("ours", "dense"))
    further = problems.known("formats", names(asked.formats, ()), formats.FORMATS)
    elsewhere: list[Record] = []
    if any(peer.name == torch_peer.NAME for peer in contenders):
        print("torch, in another process", flush=True)
        elsewhere += said(torch_peer.records(chosen, passes))
    if further:
        print(f"formats {', '.join(further)}, in other processes", flush=True)
        cases = [(problem.name, "forward", each) for problem in chosen for each in further]
        elsewhere += said(list(formats.records(cases, asked.jobs)))
    clock = timing.device_clock("gpu")
    results = Results(command="gpu", environment=environment(asked.words, clock.name), records=elsewhere)
    contenders = [peer for peer in contenders if peer.name != torch_peer.NAME]
    how = How(clock=clock, bursts=True, jobs=asked.jobs)
    return measure_all(results, Writer(results, asked.json), chosen, ["bf16"], passes, contenders, how)


def said(records: list[Record]) -> list[Record]:
    """Print why some records have no time."""
    for contender, why in dict.fromkeys((record.contender, record.why) for record in records if record.why):
        print(f"  {contender} {why}", flush=True)
    return records
