"""Race trencadis against its peers: `python -m benchmarks.run --help`.

Nothing heavy is imported before the arguments are read: pinning to a core must come before numpy and jax.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import itertools
import os
import pathlib
import sys
import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from benchmarks import problems, timing

if TYPE_CHECKING:
    from benchmarks.cells import Cell, How
    from benchmarks.peers import Peer
    from benchmarks.report import Report
    from benchmarks.torch_peer import Key, Outside

RESULTS = pathlib.Path(__file__).parent / "results"
SCALING_PEERS = "numpy,dense"  # ragged_dot takes g times as long: ask for it by name
GPU_PEERS = "torch,mgpu,tokamax"  # likewise
JAX_NAMES = {"gpu": "cuda", "cpu": "cpu"}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    ask = argparse.ArgumentParser(prog="python -m benchmarks.run", description="Race trencadis against its peers.")
    ask.add_argument("--problems", metavar="A,B", help=f"names, of {', '.join(problems.PROBLEMS)}")
    ask.add_argument("--tag", choices=problems.TAGS, help="all problems with this tag; by default the platform's")
    ask.add_argument("--dtypes", default=None, metavar="f32,bf16", help="default: both on CPU, bf16 elsewhere")
    ask.add_argument(
        "--passes",
        default=None,
        metavar="P,P",
        help="of forward, d_lhs, d_rhs and step, ours by autodiff; default: all, or the first three on CPU",
    )
    ask.add_argument(
        "--peers",
        metavar="P,P",
        help="default: all that can run, but ragged_dot on GPU; ours is always there, dense on GPU, too",
    )
    ask.add_argument("--device", choices=JAX_NAMES, help="run there, or not at all; gpu measures torch, too")
    ask.add_argument(
        "--burst", action="store_true", help="2 warm-ups and 10 timed calls of each, as on GPU, instead of rounds"
    )
    ask.add_argument("--jobs", type=int, default=8, help="compiles at a time before bursts (default: %(default)s)")
    ask.add_argument("--pin", type=int, metavar="CORE", help="one core, CPU time; otherwise all cores, wall time")
    ask.add_argument("--rounds", type=int, default=7, help="turns of each contender (default: %(default)s)")
    ask.add_argument("--budget", type=float, default=10.0, metavar="S",
                     help="seconds of turns a slow contender may take in a cell (default: %(default)s)")  # fmt: skip
    ask.add_argument("--scaling", action="store_true", help="time against g and against m instead of problems")
    ask.add_argument("--memory", action="store_true", help="temporary bytes, by the compiler's own account")
    ask.add_argument("--out", metavar="PATH", help="default: results/<device>/<date>.json; 'none' writes nothing")
    ask.add_argument("--list", action="store_true", help="print the problems and stop")
    return ask


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 1 if our own results are missing or wrong anywhere."""
    words = sys.argv[1:] if argv is None else list(argv)
    asked = parser().parse_args(words)
    if asked.list:
        print(*problems.PROBLEMS.values(), sep="\n")
        return 0
    if asked.pin is not None:
        timing.pin(asked.pin)
    if asked.device:
        os.environ["JAX_PLATFORMS"] = JAX_NAMES[asked.device]
    timing.no_tpu_here()
    elsewhere = run_elsewhere(asked)  # before jax takes the device's memory

    import jax  # only now

    from benchmarks import report
    from benchmarks.cells import BASE, How

    on_gpu = jax.default_backend() == "gpu"
    if on_gpu:
        clock: timing.HostClock | timing.CuptiClock = timing.CuptiClock()
    else:
        clock = timing.wall_clock() if asked.pin is None else timing.cpu_clock()
    how = How(clock=clock, rounds=asked.rounds, budget_s=asked.budget, memory=asked.memory,
              burst=on_gpu or asked.burst, jobs=asked.jobs)  # fmt: skip
    made = report.Report(environment=report.environment(report.scrubbed(words), clock.name, asked.pin))
    keep = Keep(made, asked.out)
    try:
        if asked.scaling:
            run_scaling(asked, how, made, keep)
        else:
            run_problems(asked, how, made, keep, elsewhere)
    except ValueError as mistake:  # a name that does not exist
        parser().error(str(mistake))
    tables(made, how.burst)
    if keep.path is not None:
        print("written:", keep.path)
    cells = [*made.cells, *itertools.chain(*made.scaling.values())]
    wrong = [cell for cell in cells if BASE in cell.skipped]
    for cell in wrong:
        print(f"OURS {cell.skipped[BASE]} ({cell.problem} {cell.dtype} {cell.which})", file=sys.stderr)
    return 1 if wrong else 0


class Keep:
    """Writes what was measured so far, after each problem: a run that is cut off leaves what it has."""

    def __init__(self, made: Report, out: str | None) -> None:
        self.made, self.out = made, out
        self.path: pathlib.Path | None = None

    def __call__(self) -> None:
        from benchmarks import report

        if self.out == "none":
            return
        if self.path is None:
            today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
            default = RESULTS / report.device_slug(self.made.environment) / f"{today}.json"
            self.path = report.beside(pathlib.Path(self.out) if self.out else default)
        self.made.environment["load_after"] = report.load()
        whole = self.path.with_suffix(".part")  # first beside it: a write may be cut off, too
        whole.write_text(self.made.to_json())
        whole.replace(self.path)


def run_elsewhere(asked: argparse.Namespace) -> dict[Key, Outside]:
    """What torch takes, in a process that ends before ours begins; nothing unless a GPU was asked for."""
    from benchmarks import torch_peer

    peers = (asked.peers or GPU_PEERS).split(",")
    if asked.device != "gpu" or asked.scaling or torch_peer.NAME not in peers or asked.dtypes not in (None, "bf16"):
        return {}
    print("torch", flush=True)
    try:
        chosen = problems.select(asked.problems, asked.tag or asked.device)
    except ValueError as mistake:
        parser().error(str(mistake))
    passes = asked.passes.split(",") if asked.passes else problems.PASSES
    found = torch_peer.outside(chosen, passes)
    for why in dict.fromkeys(one.why for one in found.values() if one.why):
        print(f"  torch {why}", flush=True)
    return found


def join(cell: Cell, elsewhere: Mapping[Key, Outside]) -> Cell:
    """The cell with torch's times, if there are any."""
    from benchmarks import cells, torch_peer

    found = elsewhere.get((cell.problem, cell.which))
    return cell if found is None else cells.joined(cell, torch_peer.NAME, found.times, found.error, found.why)


def run_problems(asked: argparse.Namespace, how: How, made: Report, keep: Keep, elsewhere: dict[Key, Outside]) -> None:
    """Every problem, dtype and pass that was asked for."""
    import jax

    from benchmarks import peers

    chosen = problems.select(asked.problems, asked.tag or jax.default_backend())
    on_gpu = jax.default_backend() == "gpu"
    dtypes = _dtypes(asked)
    contenders = peers.select(asked.peers or GPU_PEERS, ("ours", "dense")) if on_gpu else peers.select(asked.peers)
    contenders = [peer for peer in contenders if not (asked.device == "gpu" and peer.name == "torch")]  # elsewhere
    for problem in chosen:
        print(problem, flush=True)
        made.cells += measure_problem(problem, dtypes, _passes(asked), contenders, how, elsewhere)
        keep()


def run_scaling(asked: argparse.Namespace, how: How, made: Report, keep: Keep) -> None:
    """The two families of problems that differ in g or in m alone."""
    from benchmarks import peers

    contenders = peers.select(asked.peers or SCALING_PEERS)
    for axis, family in (("g", problems.SCALING_G), ("m", problems.SCALING_M)):
        for problem in family:
            print(problem, flush=True)
            cells = measure_problem(problem, _dtypes(asked), _passes(asked), contenders, how)
            made.scaling.setdefault(axis, []).extend(cells)
            keep()


def measure_problem(
    problem: problems.BenchProblem,
    dtypes: Sequence[str],
    passes: Sequence[str],
    contenders: Sequence[Peer],
    how: How,
    elsewhere: Mapping[Key, Outside] = types.MappingProxyType({}),
) -> list[Cell]:
    """The cells of one problem; says who does not take part, and why."""
    from benchmarks import cells, peers

    made: list[Cell] = []
    said: set[tuple[str, str]] = set()
    for dtype in dtypes:
        x = peers.operands(problem, dtype)
        ahead = cells.Ahead(x, passes, contenders, how.jobs) if how.burst else None
        for which in passes:
            cell = join(cells.measure(x, dtype, which, contenders, how, ahead), elsewhere)
            made.append(cell)
            if how.burst:  # now, and not only in the table: a run that hangs later has said it
                print(
                    f"  {which}:", ", ".join(f"{a} {t.median * 1e3:.3f} ms" for a, t in cell.times.items()), flush=True
                )
            for name, reason in cell.skipped.items():
                if (name, reason) not in said:
                    print(f"  {name} {reason}", flush=True)
                said.add((name, reason))
        del x, ahead  # the operands, before those of the next problem are made
        gc.collect()
    return made


def tables(made: Report, rates: bool = False) -> None:
    """Print everything that was measured."""
    from benchmarks import report

    where = f"{made.environment['device']}, {made.environment['clock']}"
    if made.cells and any(cell.times for cell in made.cells):
        title = f"ours / peer ({where}): below 1 ours is faster; ~ noisy, * fewer than 3 turns"
        report.show(title, *report.ratio_rows(made.cells))
    if rates and made.cells:
        title = f"useful rates ({where}): dense is one matmul of the same FLOPs; / peer is time, below 1 ours is faster"
        report.show(title, *report.rate_rows(made.cells))
    for axis, cells in made.scaling.items():
        report.show(f"time against {axis} ({where})", *report.scaling_rows(cells, axis))
        for line in growth(cells, axis):
            print(line)
    with_memory = [cell for cell in [*made.cells, *itertools.chain(*made.scaling.values())] if cell.memory]
    if with_memory:
        report.show("temporary memory, MiB", *report.memory_rows(with_memory))


def growth(cells: Sequence[Cell], axis: str) -> list[str]:
    """How time grows along the axis: last over first for g, the exponent for m; one line per pass and contender."""
    lines = []
    for which, dtype in dict.fromkeys((cell.which, cell.dtype) for cell in cells):
        mine = [cell for cell in cells if (cell.which, cell.dtype) == (which, dtype)]
        for name in dict.fromkeys(name for cell in mine for name in cell.times):
            points = [(cell.shape[axis], cell.times[name].median) for cell in mine if name in cell.times]
            if len(points) < 2:
                continue
            (low, first), (high, last) = points[0], points[-1]
            if axis == "g":
                lines.append(f"{which} {dtype} {name}: time at g={high} / g={low} is {last / first:.2f}")
            else:
                lines.append(f"{which} {dtype} {name}: time grows as m^{timing.slope(*zip(*points, strict=True)):.2f}")
    return lines


def _dtypes(asked: argparse.Namespace) -> list[str]:
    import jax

    from benchmarks.peers import DTYPES

    chosen = (asked.dtypes or ("f32,bf16" if jax.default_backend() == "cpu" else "bf16")).split(",")
    return _known("dtypes", chosen, DTYPES)


def _passes(asked: argparse.Namespace) -> list[str]:
    import jax

    known = (*problems.PASSES, "step")
    default = problems.PASSES if jax.default_backend() == "cpu" else known
    return _known("passes", asked.passes.split(",") if asked.passes else list(default), known)


def _known(what: str, chosen: list[str], known: Sequence[str] | dict[str, object]) -> list[str]:
    missing = [name for name in chosen if name not in known]
    if missing:
        raise ValueError(f"{what}: {', '.join(missing)} not among {', '.join(known)}")
    return chosen


if __name__ == "__main__":
    sys.exit(main())
