"""Results: where they were made, as a table, and as JSON that can be read back. No host names and no paths."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import pathlib
import platform
import re
from collections.abc import Sequence
from typing import Any

from benchmarks.cells import BASE, Cell
from benchmarks.problems import PASSES

SCHEMA = 1
PACKAGES = ("jax", "jaxlib", "numpy", "trencadis", "tokamax", "torch")
PATHS = ("--out", "--python", "--reuse", "--page")  # options whose values are paths
NOISY = 0.25  # spread from which a cell's time is marked
WORDS = 3  # columns that name a row; the others are numbers


@dataclasses.dataclass(kw_only=True)
class Report:
    """All of one run."""

    environment: dict[str, Any]
    cells: list[Cell] = dataclasses.field(default_factory=list)
    scaling: dict[str, list[Cell]] = dataclasses.field(default_factory=dict)  # "g" and "m": one cell per size

    def to_json(self) -> str:
        scaling = {axis: [cell.to_json() for cell in cells] for axis, cells in self.scaling.items()}
        cells = [cell.to_json() for cell in self.cells]
        found = {"schema": SCHEMA, "environment": self.environment, "cells": cells, "scaling": scaling}
        return json.dumps(found, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Report:
        found = json.loads(text)
        if found.get("schema") != SCHEMA:
            raise ValueError(f"schema: {found.get('schema')!r} is not {SCHEMA}")
        return cls(
            environment=found["environment"],
            cells=[Cell.from_json(cell) for cell in found["cells"]],
            scaling={axis: [Cell.from_json(cell) for cell in cells] for axis, cells in found["scaling"].items()},
        )


def write_beside(path: pathlib.Path, text: str) -> pathlib.Path:
    """Write to path, or beside it if it is taken: results are never overwritten."""
    free = beside(path)
    free.write_text(text)
    return free


def beside(path: pathlib.Path) -> pathlib.Path:
    """The path, or one beside it if it is taken, in a folder that is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    free, number = path, 2
    while free.exists():
        free, number = path.with_stem(f"{path.stem}-{number}"), number + 1
    return free


def environment(command: Sequence[str], clock: str, pinned: int | None) -> dict[str, Any]:
    """Where and how: device, versions, and how busy the machine is."""
    from importlib import metadata

    import jax

    import trencadis

    device = jax.devices()[0]
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    versions.setdefault("trencadis", trencadis.__version__)  # run from a checkout
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "command": " ".join(["python -m benchmarks.run", *command]),
        "platform": device.platform,
        "device": device.device_kind,
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "pinned": pinned is not None,
        "clock": clock,
        "load_before": load(),
        "versions": versions,
    }


def load() -> list[float] | None:
    """Load averages, where the system has them."""
    return [round(v, 2) for v in os.getloadavg()] if hasattr(os, "getloadavg") else None


def cpu_model() -> str:
    """The model as the processor gives it."""
    info = pathlib.Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found[1].strip() if found else platform.machine()


def device_slug(environment: dict[str, Any]) -> str:
    """The device as the name of a folder."""
    name = environment["device"]
    if environment["platform"] == "cpu":
        name = f"cpu {environment['cpu']} {environment['cores']}c"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def scrubbed(argv: Sequence[str]) -> list[str]:
    """The command line without values that may tell a path."""
    kept: list[str] = []
    hide = False
    for word in argv:
        option, _, value = word.partition("=")
        if hide:
            kept[-1] += " ..."
        elif option in PATHS and value:
            kept.append(f"{option}=...")
        else:
            kept.append(word)
        hide = not hide and word in PATHS
    return kept


# ---------------------------------------------------------------------------------------------------------------------
# Tables


def ratio_rows(cells: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: our time and its spread, our rate, and our time over each peer's."""
    peers = list(dict.fromkeys(name for cell in cells for name in cell.times if name != BASE))
    rows = []
    for cell in cells:
        ours = cell.times.get(BASE)
        mine = "-" if ours is None else f"{ours.median * 1e3:.3g}{'~' if ours.spread > NOISY else ''}"
        spread = "-" if ours is None else f"{ours.spread:.0%}"
        rate = "-" if ours is None else f"{cell.flops / ours.median / 1e9:.3g}"
        rows.append([cell.problem, cell.dtype, cell.which, mine, spread, rate, *(_ratio(cell, p) for p in peers)])
    return ["problem", "dtype", "pass", "ours ms", "spread", "GFLOP/s", *(f"/ {p}" for p in peers)], rows


def _ratio(cell: Cell, peer: str) -> str:
    if peer not in cell.ratios:
        return "-"
    few = "*" if cell.times[peer].samples < 3 else ""  # a slow peer: too few turns for a median
    return f"{cell.ratios[peer]:.3g}{few}"


def rate_rows(cells: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: our time and rate, that as a share of the dense matmul's, and the best peer's.

    A step has no peer: it is held against the sum of its three passes.
    """
    rows = []
    for cell in cells:
        ours, dense = cell.times.get(BASE), cell.times.get("dense")
        peers = {name: t.median for name, t in cell.times.items() if name not in (BASE, "dense")}
        if cell.which == "step" and (parts := _sum_of_passes(cell, cells)):
            peers = {"sum of passes": parts}
        best = min(peers, key=peers.__getitem__, default=None)
        share = f"{dense.median / ours.median:.0%}" if ours and dense else "-"
        theirs = (best, *_time_and_rate(cell, peers[best])) if best else ("-", "-", "-")
        ratio = f"{ours.median / peers[best]:.3f}" if ours and best else "-"
        mine = _time_and_rate(cell, ours.median if ours else None)
        rows.append([cell.problem, cell.which, theirs[0], *mine, share, *theirs[1:], ratio])
    return ["problem", "pass", "best peer", "ms", "TFLOP/s", "of dense", "peer ms", "peer TFLOP/s", "/ peer"], rows


def _time_and_rate(cell: Cell, seconds: float | None) -> tuple[str, str]:
    return ("-", "-") if not seconds else (f"{seconds * 1e3:.3f}", f"{cell.flops / seconds / 1e12:.3g}")


def _sum_of_passes(step: Cell, cells: Sequence[Cell]) -> float | None:
    """Seconds of the three passes of a step, each by itself; None if one is missing."""
    mine = [c for c in cells if (c.problem, c.dtype) == (step.problem, step.dtype) and c.which in PASSES]
    times = [c.times[BASE].median for c in mine if BASE in c.times]
    return sum(times) if len(times) == len(PASSES) else None


def scaling_rows(cells: Sequence[Cell], axis: str) -> tuple[list[str], list[list[str]]]:
    """Header and rows: milliseconds of each contender by size."""
    names = list(dict.fromkeys(name for cell in cells for name in cell.times))
    rows = []
    for cell in cells:
        times = [f"{cell.times[name].median * 1e3:.3g}" if name in cell.times else "-" for name in names]
        rows.append([cell.which, cell.dtype, str(cell.shape[axis]), *times])
    return ["pass", "dtype", axis, *(f"{name} ms" for name in names)], rows


def memory_rows(cells: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: MiB of operands and result, and of temporaries of each contender."""
    names = list(dict.fromkeys(name for cell in cells for name in cell.memory))
    rows = []
    for cell in cells:
        held = cell.memory.get(BASE, {"arguments": 0, "result": 0})
        temps = [f"{cell.memory[n]['temporary'] / 2**20:.1f}" if n in cell.memory else "-" for n in names]
        operands = f"{(held['arguments'] + held['result']) / 2**20:.1f}"
        rows.append([cell.problem, cell.dtype, cell.which, operands, *temps])
    return ["problem", "dtype", "pass", "operands MiB", *(f"{n} temp" for n in names)], rows


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; by rich, if it is installed and this is a terminal, else plainly."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(plain(title, header, rows))
        return
    console = Console()
    if not console.is_terminal:
        print(plain(title, header, rows))
        return
    table = Table(title=title or None, title_justify="left")
    for i, column in enumerate(header):
        table.add_column(column, justify="left" if i < WORDS else "right")
    for row in rows:
        table.add_row(*(_coloured(text, header[i]) for i, text in enumerate(row)))
    console.print(table)


def _coloured(text: str, column: str) -> str:
    """Ratios: green where we are faster, red where we are slower by more than noise."""
    if not column.startswith("/ ") or text == "-":
        return text
    value = float(text.rstrip("*"))
    return f"[green]{text}[/]" if value <= 1 else f"[red]{text}[/]" if value > 1.1 else text


def plain(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table in plain characters."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = []
    for row in (header, ["-" * width for width in widths], *rows):
        cells = zip(row, widths, strict=True)
        lines.append("  ".join(text.ljust(w) if i < WORDS else text.rjust(w) for i, (text, w) in enumerate(cells)))
    return "\n".join([*([title] if title else []), *(line.rstrip() for line in lines)])
