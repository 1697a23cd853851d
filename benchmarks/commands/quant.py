"""`quant`: quantized operands, timed on a CPU, on a GPU or by the TPU compiler's schedules; or their errors."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp

from benchmarks import formats, oracle, problems, quant_errors, tables, timing
from benchmarks.commands.run import failed, known_passes, names
from benchmarks.commands.tpu import where
from benchmarks.measure import ROOM
from benchmarks.problems import PASSES, BenchProblem
from benchmarks.report import RESULTS, Record, Results, Writer, cells, environment
from benchmarks.schedules import line, scheduled
from benchmarks.timing import ScheduleClock, Stats
from benchmarks.tpu_table import GENERATIONS

DEFAULTS = {"cpu": "D", "gpu": None, "tpu": "dsv3-tpu,dsv3-decode-tpu"}
FORMATS = {"cpu": formats.CPU, "gpu": formats.GPU, "tpu": formats.TPU}
DECODE_PASSES = ("forward",)


def main(asked: argparse.Namespace) -> int:
    """Measure, print and write; 1 if a result is missing or wrong."""
    if asked.errors:
        return _errors(asked)
    device = asked.device
    chosen = problems.select(asked.problems or (None if asked.tag else DEFAULTS[device]), asked.tag or "gpu")
    passes = known_passes(asked.passes, DECODE_PASSES if device == "cpu" else PASSES, PASSES)
    wanted = problems.known("formats", names(asked.formats, FORMATS[device]), formats.FORMATS)
    clock = "" if device == "tpu" else timing.device_clock(device, pinned=asked.pin is not None).name
    about = where(asked.words) if device == "tpu" else environment(asked.words, clock, pinned=asked.pin is not None)
    results = Results(command="quant", environment=about, shapes={p.name: p.shape() for p in chosen})
    keep = Writer(results, asked.json)
    for record in _records(asked, chosen, passes, wanted):
        results.records.append(record)
        print(line(record), flush=True)
        keep()
    show(results)
    keep.close()
    return failed(results.records)


def _records(
    asked: argparse.Namespace, chosen: list[BenchProblem], passes: list[str], wanted: list[str]
) -> Iterator[Record]:
    cases = [(p.name, which, each) for p in chosen for which in passes for each in wanted if _has(p, which, each)]
    if asked.device == "gpu":
        yield from formats.records(cases, asked.jobs)
    elif asked.device == "tpu":
        chips = problems.known("generations", asked.generations.split(","), GENERATIONS)
        yield from (schedule(*case, chip) for case in cases for chip in chips)
    else:
        for problem in chosen:
            yield from race(problem, [case for case in cases if case[0] == problem.name], asked)


def _has(problem: BenchProblem, which: str, format: str) -> bool:
    decode = problems.is_decode(problem.shape()) and problem.name.endswith("-tpu")
    return formats.has_pass(format, which) and (which == "forward" or not decode)


def race(problem: BenchProblem, cases: list[formats.Case], asked: argparse.Namespace) -> Iterator[Record]:
    """Yield the records of the formats on the host, which take turns; weights are stored [g, k, n]."""
    for which in dict.fromkeys(case[1] for case in cases):
        calls, made = {}, {}
        for _, _, format in (case for case in cases if case[1] == which):
            call, right = formats.prepared(problem, which, format, k_last=False)()
            error, limit = oracle.error(call(), right), ROOM * oracle.limit(jnp.bfloat16)
            made[format] = Record(problem=problem.name, dtype=format, which=which, error=error, limit=limit)
            if error <= limit:
                calls[format] = call
        clock = timing.device_clock("cpu", pinned=asked.pin is not None)
        times: dict[str, Stats] = timing.race(calls, clock, rounds=asked.rounds) if asked.rounds else {}
        for format, record in made.items():
            yield _with(record, times.get(format))


def _with(record: Record, time: Stats | None) -> Record:
    wrong = record.error is not None and record.limit is not None and not record.error <= record.limit
    return dataclasses.replace(record, time=time, why=f"wrong: relative error {record.error:.1e}" if wrong else "")


def schedule(problem: str, which: str, format: str, chip: str) -> Record:
    """The record of a format by the TPU compiler's schedule."""
    record = Record(problem=problem, dtype=format, which=which, device=chip)
    made = problems.PROBLEMS[problem]
    return scheduled(record, lambda: formats.scheduled(made, which, format), ScheduleClock(generation=chip), {})


def show(results: Results) -> None:
    """Print the tables: TFLOP/s and, for decode problems, milliseconds; microseconds by generation for a TPU."""
    if results.environment["platform"] == "tpu":
        tables.show("microseconds of one device", by_generation(results.records))
        return
    by_format = [{r.dtype: r for r in row} for row in _rows(results.records)]
    decode = [cell for cell in by_format if problems.is_decode(results.shapes[next(iter(cell.values())).problem])]
    others = [cell for cell in by_format if cell not in decode]
    if results.environment["platform"] == "gpu":
        tables.show("TFLOP/s, useful FLOPs over time", _by_format(tables.rates(others, results.shapes)), words=2)
    else:
        tables.show("milliseconds", _by_format(tables.milliseconds(others)), words=2)
    tables.show("milliseconds, decode problems", _by_format(tables.milliseconds(decode)), words=2)


def _by_format(table: tables.Table) -> tables.Table:
    """The table without its column of dtypes: the formats have columns of their own."""
    header, rows = table
    at = header.index("dtype")
    return [*header[:at], *header[at + 1 :]], [[*row[:at], *row[at + 1 :]] for row in rows]


def _rows(records: list[Record]) -> list[list[Record]]:
    keys = dict.fromkeys((r.problem, r.which) for r in records)
    return [[r for r in records if (r.problem, r.which) == key] for key in keys]


def by_generation(records: list[Record]) -> tables.Table:
    """The microseconds of each format, with a column for each generation."""
    chips = list(dict.fromkeys(r.device for r in records))
    rows: dict[tuple[str, str, str], dict[str, Record]] = {}
    for cell in cells(records):
        (record,) = cell.values()
        rows.setdefault((record.problem, record.dtype, record.which), {})[record.device] = record
    figures = [
        [f"{1e6 * seconds:.0f}" if chip in row and (seconds := row[chip].seconds) else "-" for chip in chips]
        for row in rows.values()
    ]
    return [*tables.NAMES, *chips], [[*key, *each] for key, each in zip(rows, figures, strict=True)]


def _errors(asked: argparse.Namespace) -> int:
    results = quant_errors.formats(asked.words) if asked.errors == "formats" else quant_errors.gradients(asked.words)
    print(quant_errors.table(results) if asked.errors == "formats" else quant_errors.gradient_table(results))
    default = RESULTS / "quantized-errors" / f"{results.environment['date']}-{asked.errors}.json"
    Writer(results, asked.json or str(default)).close()
    return 0
