"""`moe`: the MoE layer against the sum of its grouped matmuls, compositions of them, and torch.

On a GPU also what is not a product, against a copy, and decode steps with quantized experts.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks import tables, timing
from benchmarks.commands.run import failed, names
from benchmarks.moe import cpu, gpu
from benchmarks.moe.prepared import DENSE, PRODUCTS, SEQUENCE
from benchmarks.moe.shapes import FORWARD, select
from benchmarks.problems import STEP, known
from benchmarks.report import OURS, Record, Results, Writer, cells, environment
from benchmarks.schedules import line

PEERS = {"gpu": ("torch", "composed", "ragged_dot"), "cpu": ("ragged_dot", "composed")}
DEFAULT_PEERS = {"gpu": ("torch", "composed"), "cpu": ("ragged_dot",)}
COPY = "copy"


def main(asked: argparse.Namespace) -> int:
    """Measure, print and write; 1 if one of our own results is missing or wrong."""
    shapes = select(asked.shapes, asked.device)
    peers = known("peers", names(asked.peers, DEFAULT_PEERS[asked.device]), PEERS[asked.device])
    pinned = asked.pin is not None
    clock = timing.device_clock(asked.device, pinned=pinned)
    results = Results(command="moe", environment=environment(asked.words, clock.name, pinned=pinned))
    results.shapes = {shape.name: shape.shape() for shape in shapes}
    write = Writer(results, asked.json)

    def keep(record: Record) -> None:
        results.records.append(record)
        print(line(record), flush=True)
        write()

    if asked.device == "gpu":
        gpu.measure_all(shapes, peers, asked.jobs, keep)
        results.records.sort(key=lambda record: list(results.shapes).index(record.problem))
    else:
        for shape in shapes:
            for record in cpu.records(shape, peers, clock, asked.rounds):
                keep(record)
    show(results)
    write.close()
    return failed(results.records)


def show(results: Results) -> None:
    """Print the tables: milliseconds, ratios, the products, and what is not a product."""
    rows = [cell for cell in cells(results.records) if _which(cell) in (FORWARD, STEP)]
    tables.show(f"milliseconds ({results.environment['clock']})", tables.milliseconds(rows))
    tables.show("ratios of times", ratios(rows))
    tables.show("milliseconds of each product", products(rows))
    tables.show("what is not a product, and its share of the rate of a copy", others(results.records), words=3)


def _which(cell: tables.Cell) -> str:
    return next(iter(cell.values())).which


def ratios(rows: Sequence[tables.Cell]) -> tables.Table:
    """Ours over the sum of its products, these and dense ones in sequence, and each other layer over ours."""
    there, products = tables.contenders(rows), (PRODUCTS, SEQUENCE, DENSE)
    pairs = [(OURS, name) for name in products if name in there]
    pairs += [(name, OURS) for name in there if name not in (OURS, *products)]
    body = []
    for cell in rows:
        seconds = {name: record.seconds for name, record in cell.items() if record.seconds}
        figures = [f"{seconds[a] / seconds[b]:.3f}" if a in seconds and b in seconds else "-" for a, b in pairs]
        first = next(iter(cell.values()))
        body.append([first.problem, first.dtype, first.which, *figures])
    return [*tables.NAMES, *(f"{a} / {b}" for a, b in pairs)], body


def products(rows: Sequence[tables.Cell]) -> tables.Table:
    """The milliseconds of each product of the longest pass of a layer."""
    found = {cell[PRODUCTS].problem: cell[PRODUCTS] for cell in rows if PRODUCTS in cell and cell[PRODUCTS].time}
    columns = list(dict.fromkeys(name for record in found.values() for name in record.details["seconds"]))
    body = []
    for r in found.values():
        each = r.details["seconds"]
        figures = [f"{1e3 * each[name]:.4g}" if name in each else "-" for name in columns]
        body.append([r.problem, r.dtype, r.which, *figures])
    return [*tables.NAMES, *columns], body


def others(records: Sequence[Record]) -> tables.Table:
    """Microseconds, megabytes and TB/s of what is not a product, and its rate over that of a copy of the rows."""
    timed = [(r, r.seconds) for r in records if r.seconds and "bytes" in r.details]
    rates = {(r.problem, r.which): r.details["bytes"] / seconds / 1e12 for r, seconds in timed}
    body = []
    for r, seconds in timed:
        rate, copy = rates[r.problem, r.which], rates.get((r.problem, COPY))
        figures = (f"{1e6 * seconds:.1f}", f"{r.details['bytes'] / 1e6:.1f}", f"{rate:.2f}")
        body.append([r.problem, r.dtype, r.which, *figures, f"{rate / copy:.2f}" if copy else "-"])
    return ["problem", "dtype", "operation", "us", "MB", "TB/s", "/ copy"], body
