"""What the TPU compiler's schedules say, as records that JSON keeps, and as the table of docs/performance.md."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from benchmarks.problems import PROBLEMS, BenchProblem

SCHEMA = 1
BASE = "ours"
GENERATIONS = ("v5e", "v5p", "v6e", "v7x")
NAMES = {"mixtral": "mixtral-tpu", "dsv3": "dsv3-tpu", "qwen3": "qwen3-tpu"}
FORMS = {"rows": "rows", "d_lhs": "d lhs", "contraction": "contraction"}
TWO_CORES = (
    "A v5p device has two cores. A kernel that splits its grid over them is timed by one core and its half of\n"
    "the work; one that does not, by one core and all of it. The tool gives that core all of the memory bandwidth,\n"
    "which flatters a split kernel where it waits for memory."
)
BEGIN, END = "<!-- tpu-schedule: begin -->", "<!-- tpu-schedule: end -->"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One problem in one form, for one generation."""

    name: str  # of the problem, in short
    form: str
    generation: str
    dtype: str = "bf16"

    @property
    def problem(self) -> BenchProblem:
        return PROBLEMS[NAMES[self.name]]

    @property
    def flops(self) -> int:
        return self.problem.flops

    @property
    def bytes(self) -> int:
        """Each operand and the result once."""
        p, narrow = self.problem, 2 if self.dtype == "bf16" else 1
        sizes = {"lhs": p.m * p.k, "rhs": p.g * p.k * p.n, "ct": p.m * p.n}
        result = {"rows": "ct", "d_lhs": "lhs", "contraction": "rhs"}[self.form]
        wide = 2 if self.dtype == "bf16" else 4
        return sum(size * (wide if name == result else narrow) for name, size in sizes.items())

    def roofline(self) -> float:
        """Seconds below which no kernel can be on one device of JAX, by arithmetic or by memory.

        That is one TensorCore; on v5p two, and some peers use both.
        """
        from trencadis.core.devices import chip_of

        chip = chip_of(self.generation)
        peak = chip.peak_bf16 * chip.cores * (2 if self.dtype == "int8" else 1)
        return max(self.flops / peak, self.bytes / chip.hbm)


def cases() -> list[Case]:
    """All of them, in the order of the table: first those that have peers."""
    both = [Case(name=n, form=f, generation=g) for n in NAMES for f in ("rows", "contraction") for g in GENERATIONS]
    d_lhs = [Case(name=n, form="d_lhs", generation=g) for n in NAMES for g in GENERATIONS]
    int8 = [Case(name="mixtral", form="rows", generation=g, dtype="int8") for g in ("v5e", "v6e")]
    return both + d_lhs + int8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """What one compile gave; without seconds, why there are none."""

    peer: str
    case: Case
    tiling: tuple[int, ...] | None = None  # None: its own choice
    seconds: float | None = None  # with the XLA operations around the kernel
    kernel_seconds: float | None = None
    vmem: int | None = None  # bytes
    spills: int | None = None  # bytes
    mxu: float | None = None  # share of the time in which the MXUs are busy
    taken: float | None = None  # seconds to compile and to read
    versions: dict[str, str] = dataclasses.field(default_factory=dict)  # of jax, libtpu and the peer's package
    warnings: tuple[str, ...] = ()  # what the figures do not know
    why: str | None = None

    def to_json(self) -> dict[str, Any]:
        found = dataclasses.asdict(self)
        return {key: value for key, value in found.items() if value not in (None, (), {})}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Record:
        tuples = {key: tuple(found[key]) for key in ("tiling", "warnings") if key in found}
        return cls(**{**found, **tuples, "case": Case(**found["case"])})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedules:
    """All records of one run."""

    date: str
    command: str
    records: list[Record]

    def to_json(self) -> str:
        records = [record.to_json() for record in self.records]
        found = {"schema": SCHEMA, "date": self.date, "command": self.command, "records": records}
        return json.dumps(found, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Schedules:
        found = json.loads(text)
        if found.get("schema") != SCHEMA:
            raise ValueError(f"schema: {found.get('schema')!r} is not {SCHEMA}")
        records = [Record.from_json(record) for record in found["records"]]
        return cls(date=found["date"], command=found["command"], records=records)


# ---------------------------------------------------------------------------------------------------------------------
# The table


def best(records: Sequence[Record], peer: str, case: Case) -> Record | None:
    """The fastest of a peer's tilings and versions; one that failed only if all did; None if none was tried."""
    mine = [r for r in records if r.peer == peer and r.case == case]
    return min(mine, key=lambda r: math.inf if r.seconds is None else r.seconds, default=None)


def _microseconds(record: Record | None) -> str:
    if record is None:
        return "-"
    return "fails" if record.seconds is None else f"{record.seconds * 1e6:.0f}"


def rows(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: microseconds of the roofline, of ours and of each peer, and ours over the best peer."""
    names = list(dict.fromkeys(r.peer for r in records if r.peer != BASE))
    tried = {r.case for r in records}
    made = []
    for case in (c for c in cases() if c in tried):
        ours, peers = best(records, BASE, case), [best(records, name, case) for name in names]
        seconds = [r.seconds for r in peers if r is not None and r.seconds is not None]
        ratio = f"{ours.seconds / min(seconds):.2f}" if ours and ours.seconds and seconds else "-"
        form = FORMS[case.form] + ("" if case.dtype == "bf16" else f", {case.dtype}")
        times = [f"{case.roofline() * 1e6:.0f}", *map(_microseconds, (ours, *peers))]
        made.append([case.name, form, case.generation, *times, ratio])
    return ["problem", "form", "chip", "roofline", BASE, *names, "ours / best peer"], made


def versions(records: Sequence[Record]) -> str:
    """Who was compiled by what: `jax 0.10.2, libtpu 0.0.42.1: ours, megablox; jax ...`."""
    by: dict[str, list[str]] = {}
    for r in records:
        if r.seconds is not None:
            compiler = ", ".join(f"{name} {r.versions[name]}" for name in ("jax", "libtpu") if name in r.versions)
            own = "".join(f" {v}" for name, v in r.versions.items() if name not in ("jax", "libtpu", "trencadis"))
            by.setdefault(compiler, []).append(r.peer + own)
    return "; ".join(f"{compiler}: {', '.join(dict.fromkeys(names))}" for compiler, names in by.items())


def markdown(made: Schedules) -> str:
    """The table, and what it was made by."""
    header, body = rows(made.records)
    rule = ["---" if i < 3 else "--:" for i in range(len(header))]
    lines = ["| " + " | ".join(row) + " |" for row in (header, rule, *body)]
    notes = [TWO_CORES] if any(r.case.generation == "v5p" for r in made.records) else []
    return "\n".join([*lines, "", f"{made.date}. {versions(made.records)}.", *(f"\n{note}" for note in notes)])


def renew(path: pathlib.Path, table: str) -> bool:
    """Put the table between the two marks in a page; whether they were there."""
    text = path.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if begin and end:
        path.write_text(f"{before}{begin}\n\n{table}\n\n{end}{after}")
    return bool(begin and end)
