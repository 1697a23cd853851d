"""Results as tables, each in one unit: TFLOP/s, milliseconds, ratios of times, or MiB."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks import problems, timing
from benchmarks.problems import PASSES, STEP, is_decode, useful_flops
from benchmarks.report import OURS, Record, Results, cells, ratios

NOISY = 0.25  # the spread from which a time is marked
FEW = 3  # turns below which a time is marked
NAMES = ("problem", "dtype", "pass")  # columns that name a row; the others are numbers
SUM = "sum of passes"

Table = tuple[list[str], list[list[str]]]  # header and rows
Cell = Mapping[str, Record]


def print_run(results: Results) -> None:
    """Print everything that `run` or `gpu` measured."""
    where = f"{results.environment['device']}, {results.environment['clock']}"
    series = {axis: along(results.records, axis) for axis in ("g", "m")}
    order = list(results.shapes)
    named = [cell for cell in cells(results.records) if _any(cell).problem not in SCALING_NAMES]
    named.sort(key=lambda cell: order.index(_any(cell).problem))
    timed = [cell for cell in named if any(record.time for record in cell.values())]
    decode = [cell for cell in timed if is_decode(results.shapes[_any(cell).problem])]
    if results.environment["platform"] == "gpu":
        others = [cell for cell in timed if cell not in decode]
        show(f"TFLOP/s, useful FLOPs over time ({where})", rates(others, results.shapes))
        show(f"milliseconds, decode problems ({where})", milliseconds(decode))
    else:
        show(f"milliseconds ({where}); ~ noisy, * fewer than {FEW} turns", milliseconds(timed))
    show("time of ours over time of each contender: below 1 ours is faster", ratio_table(timed))
    for axis, found in series.items():
        show(f"milliseconds against {axis} ({where})", milliseconds(cells(found)))
        for line in growth(found, results.shapes, axis):
            print(line)
    show("temporary memory, MiB", memory(cells(results.records)))


SCALING = {axis: {p.name for p in family} for axis, family in (("g", problems.SCALING_G), ("m", problems.SCALING_M))}
SCALING_NAMES = frozenset().union(*SCALING.values())


def along(records: Iterable[Record], axis: str) -> list[Record]:
    """The records of the problems that differ in g, or in m, alone."""
    return [record for record in records if record.problem in SCALING[axis]]


def _any(cell: Cell) -> Record:
    return next(iter(cell.values()))


def _table(rows: Sequence[Cell], figure: Callable[[Cell, str], str], names: Sequence[str], prefix: str = "") -> Table:
    """A row for each cell, with a figure for each name; names that have none are left out."""
    body = {name: [figure(cell, name) for cell in rows] for name in names}
    kept = [name for name in names if any(text != "-" for text in body[name])]
    heads = [[_any(cell).problem, _any(cell).dtype, _any(cell).which.replace("_", " ")] for cell in rows]
    return [*NAMES, *(prefix + name for name in kept)], [
        [*head, *(body[name][i] for name in kept)] for i, head in enumerate(heads)
    ]


def contenders(rows: Sequence[Cell]) -> list[str]:
    """The names of all contenders, ours first."""
    names = dict.fromkeys(name for cell in rows for name in cell)
    return [OURS, *(name for name in names if name != OURS)] if OURS in names else list(names)


def milliseconds(rows: Sequence[Cell]) -> Table:
    """The median times of all contenders."""
    return _table(rows, _milliseconds, contenders(rows))


def _milliseconds(cell: Cell, name: str) -> str:
    time = cell[name].time if name in cell else None
    if time is None:
        return "-"
    few = time.samples is not None and time.samples < FEW
    return f"{time.median * 1e3:.3g}{'*' if few else '~' if time.spread > NOISY else ''}"


def rates(rows: Sequence[Cell], shapes: Mapping[str, Mapping[str, int]]) -> Table:
    """The useful TFLOP/s of all contenders."""

    def figure(cell: Cell, name: str) -> str:
        seconds = cell[name].seconds if name in cell else None
        flops = useful_flops(shapes[_any(cell).problem], _any(cell).which)
        return f"{flops / seconds / 1e12:.3g}" if seconds else "-"

    return _table(rows, figure, contenders(rows))


def ratio_table(rows: Sequence[Cell], base: str = OURS) -> Table:
    """The time of ours over that of each other contender; a step is compared with the sum of its three passes."""

    def figure(cell: Cell, name: str) -> str:
        if name == SUM:
            return _over_sum(cell, rows)
        return f"{found[name]:.3f}" if name in (found := ratios(cell, base)) else "-"

    return _table(rows, figure, [*(name for name in contenders(rows) if name != base), SUM], prefix="/ ")


def _over_sum(step: Cell, rows: Sequence[Cell]) -> str:
    record = step.get(OURS)
    if record is None or record.which != STEP or not record.seconds:
        return "-"
    same = [cell[OURS] for cell in rows if OURS in cell]
    parts = [r.seconds for r in same if (r.problem, r.dtype) == (record.problem, record.dtype) and r.which in PASSES]
    return f"{record.seconds / sum(filter(None, parts)):.3f}" if all(parts) and len(parts) == len(PASSES) else "-"


def memory(rows: Sequence[Cell]) -> Table:
    """The MiB of operands and result, and those of the temporaries of each contender."""
    rows = [cell for cell in rows if any(record.memory for record in cell.values())]

    def figure(cell: Cell, name: str) -> str:
        if name == "operands":
            held = cell[OURS].memory if OURS in cell else {}
            return f"{(held['arguments'] + held['result']) / 2**20:.1f}" if held else "-"
        held = cell[name].memory if name in cell else {}
        return f"{held['temporary'] / 2**20:.1f}" if held else "-"

    return _table(rows, figure, ["operands", *contenders(rows)])


def growth(records: Sequence[Record], shapes: Mapping[str, Mapping[str, int]], axis: str) -> list[str]:
    """How the time grows along the axis: last over first for g, the exponent for m; a line per pass and contender."""
    lines = []
    for which, dtype, name in dict.fromkeys((r.which, r.dtype, r.contender) for r in records if r.time):
        mine = [r for r in records if (r.which, r.dtype, r.contender) == (which, dtype, name) and r.seconds]
        points = [(shapes[r.problem][axis], r.seconds or 0.0) for r in mine]
        if len(points) < 2:
            continue
        (low, first), (high, last) = points[0], points[-1]
        if axis == "g":
            lines.append(f"{which} {dtype} {name}: time at g={high} / g={low} is {last / first:.2f}")
        else:
            lines.append(f"{which} {dtype} {name}: time grows as m^{timing.slope(*zip(*points, strict=True)):.2f}")
    return lines


# ---------------------------------------------------------------------------------------------------------------------
# Printing


def show(title: str, table: Table, words: int = len(NAMES)) -> None:
    """Print a table that has rows; with colours if this is a terminal and rich is installed."""
    header, rows = table
    if not rows:
        return
    console: Any = None
    try:
        from rich.console import Console
        from rich.table import Table as RichTable
    except ImportError:
        pass
    else:
        console = Console()
    if console is None or not console.is_terminal:
        print(plain(title, table, words))
        return
    pretty = RichTable(title=title or None, title_justify="left")
    for i, column in enumerate(header):
        pretty.add_column(column, justify="left" if i < words else "right")
    for row in rows:
        pretty.add_row(*(_coloured(text, header[i]) for i, text in enumerate(row)))
    console.print(pretty)


def _coloured(text: str, column: str) -> str:
    """A ratio in green where ours is faster, in red where it is slower by more than noise."""
    if not column.startswith("/ ") or text == "-":
        return text
    value = float(text)
    return f"[green]{text}[/]" if value <= 1 else f"[red]{text}[/]" if value > 1.1 else text


def plain(title: str, table: Table, words: int = len(NAMES)) -> str:
    """The table in plain characters; the first columns are words, the others numbers."""
    header, rows = table
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = []
    for row in (header, ["-" * width for width in widths], *rows):
        texts = zip(row, widths, strict=True)
        lines.append("  ".join(text.ljust(w) if i < words else text.rjust(w) for i, (text, w) in enumerate(texts)))
    return "\n".join([*([title] if title else []), *(line.rstrip() for line in lines)])


def markdown(table: Table, words: int = len(NAMES)) -> str:
    """The table in Markdown."""
    header, rows = table
    rule = ["---" if i < words else "--:" for i in range(len(header))]
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, rule, *rows))
