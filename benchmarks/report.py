"""The one format of results, and the environment that a file says it was made in: no host names and no paths.

A file holds records, one for each contender on each problem in each dtype and pass. A record has a time, an error, or
the reason why it has none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib
import json
import math
import os
import pathlib
import platform
import re
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from benchmarks.timing import Stats

SCHEMA = 2
OURS = "ours"
RESULTS = pathlib.Path(__file__).parent / "results"
PACKAGES = ("jax", "jaxlib", "numpy", "trencadis", "trencadis-cpu", "tokamax", "torch")
PATHS = ("--json", "--python", "--reuse", "--page", "--out")  # options whose values are paths


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """What one contender gave on one problem, in one dtype and pass."""

    problem: str
    dtype: str = ""  # of the operands, or the name of a quantized format
    which: str = ""  # the pass; "pass" in JSON
    contender: str = OURS
    device: str = ""  # where one file holds results for several
    time: Stats | None = None
    error: float | None = None  # against float64
    limit: float | None = None  # up to which the result counts as right
    why: str = ""  # there is no time, or the result is wrong
    memory: Mapping[str, int] = dataclasses.field(default_factory=dict)  # bytes, as the compiler counts them
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # what only one command knows

    @property
    def cell(self) -> tuple[str, str, str, str]:
        """What the records of different contenders share: problem, dtype, pass and device."""
        return self.problem, self.dtype, self.which, self.device

    @property
    def seconds(self) -> float | None:
        """The median time, or None."""
        return self.time.median if self.time else None

    def to_json(self) -> dict[str, Any]:
        """The record as JSON values; fields that say nothing are left out, and so is an error that is not finite."""
        found = dataclasses.asdict(self) | {"time": _filled(dataclasses.asdict(self.time)) if self.time else None}
        found["error"] = self.error if self.error is not None and math.isfinite(self.error) else None
        found = {"pass" if name == "which" else name: value for name, value in found.items()}
        return {name: value for name, value in found.items() if value not in (None, "", {})}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Record:
        """The inverse of `to_json`."""
        fields = {"which" if name == "pass" else name: value for name, value in found.items()}
        return cls(**fields | ({"time": Stats(**found["time"])} if "time" in found else {}))


def _filled(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if value is not None}


@dataclasses.dataclass(kw_only=True)
class Results:
    """All records of one run of one command."""

    command: str  # of `python -m benchmarks`
    environment: dict[str, Any]
    shapes: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)  # of the problems, by name
    records: list[Record] = dataclasses.field(default_factory=list)
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)

    def to_json(self) -> str:
        """The text of a file, with one line for each record."""
        head = {"schema": SCHEMA, "command": self.command, "environment": self.environment, "notes": self.notes}
        parts = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
        shapes = [f"  {json.dumps(name)}: {json.dumps(shape)}" for name, shape in self.shapes.items()]
        records = [f"  {json.dumps(record.to_json())}" for record in self.records]
        parts.append(' "shapes": {\n' + ",\n".join(shapes) + "\n }" if shapes else ' "shapes": {}')
        parts.append(' "records": [\n' + ",\n".join(records) + "\n ]" if records else ' "records": []')
        return "{\n" + ",\n".join(parts) + "\n}\n"

    @classmethod
    def from_json(cls, text: str) -> Results:
        """The inverse of `to_json`."""
        found = json.loads(text)
        if found.pop("schema", None) != SCHEMA:
            raise ValueError(f"schema: want results of schema {SCHEMA}; got {text[:60]!r}...")
        return cls(**found | {"records": [Record.from_json(record) for record in found["records"]]})

    @classmethod
    def read(cls, path: pathlib.Path) -> Results:
        """The results of a file."""
        return cls.from_json(path.read_text())


def cells(records: Sequence[Record]) -> list[dict[str, Record]]:
    """The records that differ in the contender alone, by contender; of several of one contender the fastest counts."""
    found: dict[tuple[str, ...], dict[str, Record]] = {}
    for record in records:
        cell = found.setdefault(record.cell, {})
        best = cell.get(record.contender)
        if best is None or (record.seconds or math.inf) < (best.seconds or math.inf):
            cell[record.contender] = record
    return list(found.values())


def ratios(cell: Mapping[str, Record], base: str = OURS) -> dict[str, float]:
    """The time of the base over the time of each other contender: below 1 the base is faster."""
    ours = cell[base].seconds if base in cell else None
    times = {name: record.seconds for name, record in cell.items() if name != base and record.seconds}
    return {name: ours / theirs for name, theirs in times.items() if theirs} if ours else {}


# ---------------------------------------------------------------------------------------------------------------------
# Files


class Writer:
    """Writes what was measured so far: a run that is cut off leaves a whole file of what it has."""

    def __init__(self, results: Results, out: str | None) -> None:
        """Out is a path, "none" to write nothing, or None for `results/<device>/<date>-<command>.json`."""
        self.results, self.out = results, out
        self.path: pathlib.Path | None = None

    def __call__(self) -> None:
        """Write the file; the first time, choose a path that is free."""
        if self.out == "none":
            return
        where = self.results.environment
        if self.path is None:
            self.path = free_path(pathlib.Path(self.out) if self.out else self.default())
        if "load_before" in where:
            where["load_after"] = load()
        part = self.path.with_suffix(".part")  # a write may be cut off, too
        part.write_text(self.results.to_json())
        part.replace(self.path)

    def default(self) -> pathlib.Path:
        """The path of a file that has no other."""
        where = self.results.environment
        return RESULTS / device_slug(where) / f"{where['date']}-{self.results.command}.json"

    def close(self) -> None:
        """Write the file and print its path."""
        self()
        if self.path is not None:
            print("written:", self.path)


def free_path(path: pathlib.Path) -> pathlib.Path:
    """The path, or one with a number if it is taken: results are never overwritten. Its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    free, number = path, 2
    while free.exists():
        free, number = path.with_stem(f"{path.stem}-{number}"), number + 1
    return free


# ---------------------------------------------------------------------------------------------------------------------
# Where it was made


def environment(words: Sequence[str], clock: str, *, pinned: bool = False) -> dict[str, Any]:
    """The device, the versions, the command line without paths, and how busy the machine is."""
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
    with contextlib.suppress(ImportError):  # likewise
        versions.setdefault("trencadis-cpu", importlib.import_module("trencadis_cpu").__version__)
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "command": " ".join(["python -m benchmarks", *scrubbed(words)]),
        "platform": device.platform,
        "device": device.device_kind,
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "pinned": pinned,
        "clock": clock,
        "huge_pages": "hugetlb=1" in os.environ.get("GLIBC_TUNABLES", ""),  # for what XLA:CPU allocates
        "load_before": load(),
        "versions": versions,
    }


def load() -> list[float] | None:
    """The load averages, where the system has them."""
    return [round(v, 2) for v in os.getloadavg()] if hasattr(os, "getloadavg") else None


def cpu_model() -> str:
    """The model of the processor, by its own name."""
    info = pathlib.Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    return found[1].strip() if found else platform.machine()


def device_slug(environment: Mapping[str, Any]) -> str:
    """The device as the name of a folder."""
    name = environment["device"]
    if environment["platform"] == "cpu" and name == "cpu":
        name = f"cpu {environment['cpu']} {environment['cores']}c"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def scrubbed(words: Sequence[str]) -> list[str]:
    """The command line without values that may contain a path."""
    kept: list[str] = []
    hide = False
    for word in words:
        option, _, value = word.partition("=")
        if hide:
            kept[-1] += " ..."
        elif option in PATHS and value:
            kept.append(f"{option}=...")
        else:
            kept.append(word)
        hide = not hide and word in PATHS
    return kept
