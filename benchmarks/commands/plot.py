"""`plot`: files of results as SVG, in the style of the library's pictures."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable, Mapping, Sequence

from benchmarks import charts, tables
from benchmarks.charts import LOOKS, OTHER, Curves, Dots, Line, Look, Mark, Panel, Point
from benchmarks.problems import STEP, is_decode, useful_flops
from benchmarks.report import OURS, Record, Results, cells, device_slug, ratios
from trencadis.viz.palette import colour

PASS_NAMES = {"forward": "forward", "d_lhs": "d lhs", "d_rhs": "d rhs"}
BOTH, WEIGHTS = Look(colour(0), "disc"), Look(colour(1), "ring")


def main(asked: argparse.Namespace) -> int:
    """Draw each file of results."""
    asked.out.mkdir(parents=True, exist_ok=True)
    for path in asked.results:
        for name, document in draw(Results.read(path)).items():
            out: pathlib.Path = asked.out / f"{name}.svg"
            out.write_text(document, encoding="utf-8")
            print(out)
    return 0


def draw(results: Results) -> dict[str, str]:
    """The pictures that the results have data for, by the name of their file."""
    if "data" in results.notes:
        return {"quantized-errors": errors(results)}
    slug = device_slug(results.environment)
    timed = [record for record in results.records if record.time and record.which in PASS_NAMES]
    named = [record for record in timed if record.problem not in tables.SCALING_NAMES]
    series = [record for record in timed if record.problem in tables.SCALING_NAMES]
    found = {}
    if named and results.environment["platform"] == "gpu":
        found[f"{'quantized-' * (results.command == 'quant')}rates-{slug}"] = rates(named, results)
    elif len({record.contender for record in named}) > 1:
        found[f"ratios-{slug}"] = ratio_chart(named, results)
    if series:
        found[f"scaling-{slug}"] = scaling(series, results)
    return found


def _about(results: Results) -> str:
    where = results.environment
    return f"{where['cpu'] if where['platform'] == 'cpu' else where['device']}  ·  {where['clock']}  ·  {where['date']}"


def _looks(names: Sequence[str]) -> dict[str, Look]:
    return {name: LOOKS.get(name, OTHER) for name in names}


Figures = Callable[[Mapping[str, Record]], Mapping[str, float]]  # of a cell, by contender


def _lines(records: Sequence[Record], figures: Figures, words: str) -> list[Line]:
    """A line for each pass and problem, with a panel for each dtype."""
    found: dict[tuple[str, str], dict[str, list[Mark]]] = {}
    for cell in cells(records):
        record = next(iter(cell.values()))
        marks = [
            Mark(value, LOOKS.get(name, OTHER), f"{record.problem}, {record.dtype}, {name}: {value:.3g} {words}")
            for name, value in figures(cell).items()
        ]
        found.setdefault((PASS_NAMES[record.which], record.problem), {})[record.dtype] = marks
    order = list(PASS_NAMES.values())
    keys = sorted(found, key=lambda pair: order.index(pair[0]))
    return [Line(heading, name, found[heading, name]) for heading, name in keys]


def ratio_chart(records: Sequence[Record], results: Results) -> str:
    """The time of each peer over the time of ours, on a log axis: right of 1 ours is faster."""

    def figures(cell: Mapping[str, Record]) -> dict[str, float]:
        return {name: 1 / ratio for name, ratio in ratios(cell).items()}

    values = [value for cell in cells(records) for value in figures(cell).values()]
    peers = [name for name in tables.contenders(cells(records)) if name != OURS]
    return Dots(
        title="Time of each peer over the time of ours",
        about=f"right of 1 ours is faster  ·  {_about(results)}",
        panels=dict.fromkeys((record.dtype for record in records), ""),
        lines=_lines(records, figures, "times our time"),
        axis=charts.log_axis([*values, 1.0]), key=_looks(peers), columns=(110.0, 0.0, 250.0), reference=1.0,
    ).draw()  # fmt: skip


def rates(records: Sequence[Record], results: Results) -> str:
    """The useful TFLOP/s of all contenders, on a linear axis; decode problems are left out."""
    shapes = results.shapes
    records = [record for record in records if not is_decode(shapes[record.problem]) and record.which != STEP]

    def figures(cell: Mapping[str, Record]) -> dict[str, float]:
        return {
            name: useful_flops(shapes[r.problem], r.which) / r.seconds / 1e12 for name, r in cell.items() if r.seconds
        }

    values = [value for cell in cells(records) for value in figures(cell).values()]
    return Dots(
        title="Useful TFLOP/s",
        about=f"2mkn over the time of all kernels of a call  ·  {_about(results)}",
        panels=dict.fromkeys((record.dtype for record in records), ""),
        lines=_lines(records, figures, "TFLOP/s"),
        axis=charts.linear_axis(values, 200.0), key=_looks(tables.contenders(cells(records))),
        columns=(110.0, 0.0, 250.0),
    ).draw()  # fmt: skip


def scaling(records: Sequence[Record], results: Results) -> str:
    """The milliseconds against g, and against m, in each pass; the band spans the quartiles."""
    rows = []
    for axis in ("g", "m"):
        mine = tables.along(records, axis)
        for dtype in dict.fromkeys(record.dtype for record in mine):
            alike = [record for record in mine if record.dtype == dtype]
            rows.append([_panel(alike, which, axis, results) for which in dict.fromkeys(r.which for r in alike)])
    names = tables.contenders(cells(records))
    title = "Time against the number of groups, and of rows"
    return Curves(title=title, about=_about(results), rows=rows, unit="ms", key=_looks(names)).draw()


def _panel(records: Sequence[Record], which: str, axis: str, results: Results) -> Panel:
    curves: dict[str, list[Point]] = {}
    for r in records:
        if r.which == which and r.time is not None:
            low, high = r.time.q1 or r.time.median, r.time.q3 or r.time.median
            point = Point(results.shapes[r.problem][axis], 1e3 * r.time.median, 1e3 * low, 1e3 * high)
            curves.setdefault(r.contender, []).append(point)
    return Panel(f"{PASS_NAMES[which]}, {records[0].dtype}", axis, curves)


def errors(results: Results) -> str:
    """The errors of quantized operands: a line for each format and granularity, a panel for each kind of data."""
    from benchmarks.quant_errors import percent, rows

    lines = []
    for format, scales, bits, found in rows(results):
        marks = {
            name: [
                Mark(each["both"], BOTH, f"{format}, {scales}: both quantized, {percent(each['both'])} %"),
                Mark(each["weights"], WEIGHTS, f"{format}, {scales}: weights alone, {percent(each['weights'])} %"),
            ]
            for name, each in found.items()
        }
        lines.append(Line(format, scales, marks, f"{bits:.2f}"))
    k = next(iter(results.shapes.values()))["k"]
    ticks = tuple((tick, f"{100 * tick:g} %") for tick in (0.001, 0.01, 0.1, 1.0))
    return Dots(
        title="Errors of products of quantized operands",
        about=f"error of a row of the result, in its norm, against float64  ·  k = {k:,}",
        panels=results.notes["data"], lines=lines, axis=charts.Axis(0.001, 1.0, ticks),
        key={"both quantized": BOTH, "weights alone": WEIGHTS}, heads=("format", "scales", "bits"), joined=True,
    ).draw()  # fmt: skip
