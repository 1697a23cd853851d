"""The cases of the TPU compiler's schedules, and their table in docs/performance/tpu.md."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

from benchmarks import tables
from benchmarks.problems import PASSES, PROBLEMS, BenchProblem, known, select
from benchmarks.report import OURS, Record, Results, cells

GENERATIONS = ("v5e", "v5p", "v6e", "v7x")
FORMS = {"forward": "rows", "d_lhs": "d lhs", "d_rhs": "contraction"}  # passes as the page calls them
TWO_CORES = (
    "A v5p device has two cores. A kernel that splits its grid over them is timed by one core and its half of\n"
    "the work; one that does not, by one core and all of it. The tool gives that core all of the memory bandwidth,\n"
    "which flatters a split kernel where it waits for memory."
)
BEGIN, END = "<!-- tpu-schedule: begin -->", "<!-- tpu-schedule: end -->"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One pass of one problem, for one generation."""

    problem: BenchProblem
    which: str
    generation: str
    dtype: str = "bf16"  # or "int8": without scales, with an int32 result

    @classmethod
    def of(cls, record: Record) -> Case:
        """The case that a record belongs to."""
        return cls(problem=PROBLEMS[record.problem], which=record.which, generation=record.device, dtype=record.dtype)

    @property
    def bytes(self) -> int:
        """The bytes of both operands and of the result, each once."""
        p, narrow = self.problem, 2 if self.dtype == "bf16" else 1
        sizes = {"lhs": p.m * p.k, "rhs": p.g * p.k * p.n, "ct": p.m * p.n}
        result = {"forward": "ct", "d_lhs": "lhs", "d_rhs": "rhs"}[self.which]
        wide = 2 if self.dtype == "bf16" else 4
        return sum(size * (wide if name == result else narrow) for name, size in sizes.items())

    def roofline(self) -> float:
        """The seconds below which no kernel can be on one device of JAX."""
        from benchmarks.kernels import roofline

        return roofline(self.generation, self.problem.flops, self.bytes, int8=self.dtype == "int8")


def cases(problems: str | None = None, passes: str | None = None, generations: str | None = None) -> list[Case]:
    """The cases of these names, or all of them, in the order of the table: first those that have peers."""
    chosen = select(problems, "tpu")
    which = known("passes", passes.split(",") if passes else PASSES, PASSES)
    chips = [] if generations == "none" else known("generations", (generations or _ALL).split(","), GENERATIONS)
    every = [Case(problem=p, which=w, generation=g) for p in chosen for w in ("forward", "d_rhs") for g in GENERATIONS]
    every += [Case(problem=p, which="d_lhs", generation=g) for p in chosen for g in GENERATIONS]
    int8 = [p for p in chosen if p.name == "mixtral-tpu"]
    every += [Case(problem=p, which="forward", generation=g, dtype="int8") for p in int8 for g in ("v5e", "v6e")]
    return [case for case in every if case.which in which and case.generation in chips]


_ALL = ",".join(GENERATIONS)


# ---------------------------------------------------------------------------------------------------------------------
# The table


def _microseconds(record: Record | None) -> str:
    if record is None:
        return "-"
    return f"{record.seconds * 1e6:.0f}" if record.seconds else "fails"


def table(records: Sequence[Record]) -> tables.Table:
    """The microseconds of the roofline, of ours and of each peer at its best, and ours over the best peer."""
    names = list(dict.fromkeys(r.contender for r in records if r.contender != OURS))
    found = {Case.of(next(iter(cell.values()))): cell for cell in cells(records)}
    made = []
    for case in (case for case in cases() if case in found):
        cell = found[case]
        ours, peers = cell.get(OURS), [cell.get(name) for name in names]
        seconds = [r.seconds for r in peers if r is not None and r.seconds]
        ratio = f"{ours.seconds / min(seconds):.2f}" if ours and ours.seconds and seconds else "-"
        form = FORMS[case.which] + ("" if case.dtype == "bf16" else f", {case.dtype}")
        times = [f"{case.roofline() * 1e6:.0f}", *map(_microseconds, (ours, *peers))]
        made.append([case.problem.name.removesuffix("-tpu"), form, case.generation, *times, ratio])
    return ["problem", "form", "chip", "roofline", OURS, *names, "ours / best peer"], made


def versions(records: Sequence[Record]) -> str:
    """Which compiler made the figures of whom: `jax 0.10.2, libtpu 0.0.42.1: ours, megablox; jax ...`."""
    by: dict[str, list[str]] = {}
    for r in records:
        if r.time:
            found = r.details.get("versions", {})
            compiler = ", ".join(f"{name} {found[name]}" for name in ("jax", "libtpu") if name in found)
            own = "".join(f" {v}" for name, v in found.items() if name not in ("jax", "libtpu", "trencadis"))
            by.setdefault(compiler, []).append(r.contender + own)
    return "; ".join(f"{compiler}: {', '.join(dict.fromkeys(names))}" for compiler, names in by.items())


def markdown(results: Results) -> str:
    """The table and the versions, in Markdown."""
    notes = [TWO_CORES] if any(r.device == "v5p" for r in results.records) else []
    made_by = f"{results.environment['date']}. {versions(results.records)}."
    return "\n".join([tables.markdown(table(results.records)), "", made_by, *(f"\n{note}" for note in notes)])


def renew(path: pathlib.Path, text: str) -> bool:
    """Put the text between the two marks in a page; False if it has no marks."""
    before, begin, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if begin and end:
        path.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")
    return bool(begin and end)
