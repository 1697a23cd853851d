"""Ours and the peers by the TPU compiler's own schedules, with no TPU: `python -m benchmarks.tpu --help`.

A peer that wants another version of jax is compiled by another interpreter (`--python`), which runs this same module.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks import tpu_table
from benchmarks.tpu_table import BASE, FORMS, GENERATIONS, NAMES, Case, Record, Schedules

if TYPE_CHECKING:
    from benchmarks.tpu_peers import Tiling, TpuPeer
    from trencadis.inspect import Inspection

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "tpu-schedule"
PAGE = ROOT / "docs" / "performance.md"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    ask = argparse.ArgumentParser(prog="python -m benchmarks.tpu", description=__doc__.split("\n")[0])
    ask.add_argument("--generations", default=",".join(GENERATIONS), metavar="G,G", help="default: %(default)s")
    ask.add_argument("--problems", default=",".join(NAMES), metavar="P,P", help="default: %(default)s")
    ask.add_argument("--forms", default=",".join(FORMS), metavar="F,F", help="default: %(default)s")
    ask.add_argument("--peers", metavar="P,P", help="default: ours and all that can be imported")
    ask.add_argument("--python", action="append", default=[], metavar="PATH",
                     help="another interpreter too, with other versions or peers: all that it can import")  # fmt: skip
    ask.add_argument("--reuse", type=pathlib.Path, action="append", default=[], metavar="JSON",
                     help="take from there what is not compiled now, such as the peers with --peers ours")  # fmt: skip
    ask.add_argument("--timeout", type=float, default=300, metavar="S", help="per compile (default: %(default)s)")
    ask.add_argument("--out", metavar="PATH", help="default: results/tpu-schedule/<date>-...; 'none' writes nothing")
    ask.add_argument("--page", type=pathlib.Path, default=PAGE, help="renew the table there (default: %(default)s)")
    return ask


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 1 if ours is missing anywhere."""
    words = sys.argv[1:] if argv is None else list(argv)
    asked = parser().parse_args(words)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    made = [said(record) for record in measure(asked)]
    for python in asked.python:
        made += elsewhere(python, asked)
    for path in asked.reuse:
        made += kept(Schedules.from_json(path.read_text()).records, made)
    from benchmarks import report

    today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    command = " ".join(["python -m benchmarks.tpu", *report.scrubbed(words)])
    publish(Schedules(date=today, command=command, records=made), asked.out, asked.page)
    return 1 if any(r.peer == BASE and r.seconds is None for r in made) else 0


def kept(records: Sequence[Record], made: Sequence[Record]) -> list[Record]:
    """Of earlier records those that were not made anew; a peer counts with each version of jax, ours with one."""

    def task(r: Record) -> tuple[object, ...]:
        return r.peer, r.case, None if r.peer == BASE else r.versions.get("jax")

    again = {task(r) for r in made}
    return [r for r in records if task(r) not in again]


def publish(made: Schedules, out: str | None, page: pathlib.Path) -> None:
    """Print the table, keep the records, and renew the page."""
    from benchmarks import report

    print(report.plain("microseconds of one device", *tpu_table.rows(made.records)))
    if out == "none":
        return
    ours = next((r.versions for r in made.records if r.peer == BASE and r.versions), {})
    stem = "-".join([made.date, *(f"{name}{ours[name]}" for name in ("jax", "libtpu") if name in ours)])
    path = report.write_beside(pathlib.Path(out) if out else RESULTS / f"{stem}.json", made.to_json())
    print("written:", path)
    if page.name != "none" and not tpu_table.renew(page, tpu_table.markdown(made)):
        print(f"not in {page.name}: it has no {tpu_table.BEGIN} and {tpu_table.END}", file=sys.stderr)


def _asked_for(case: Case, asked: argparse.Namespace) -> bool:
    lists = (asked.generations, case.generation), (asked.problems, case.name), (asked.forms, case.form)
    return all(value in names.split(",") for names, value in lists)


def said(record: Record) -> Record:
    """Print how it went, as it goes."""
    c = record.case
    time = record.why if record.seconds is None else f"{record.seconds * 1e6:.0f} us"
    print(c.generation, c.name, c.form, c.dtype, record.peer, record.tiling or "", time, flush=True)
    return record


def chosen(asked: argparse.Namespace) -> list[TpuPeer]:
    """The peers that were asked for and can be imported here."""
    from benchmarks.tpu_peers import PEERS

    names = list(PEERS) if asked.peers is None else asked.peers.split(",")
    if missing := [name for name in names if name not in PEERS]:
        parser().error(f"peers: {', '.join(missing)} not among {', '.join(PEERS)}")
    return [PEERS[name] for name in names if PEERS[name].version() is not None]


def measure(asked: argparse.Namespace) -> Iterator[Record]:
    """Every case that was asked for, by everyone here."""
    for case in (c for c in tpu_table.cases() if _asked_for(c, asked)):
        for peer in chosen(asked):
            for tiling in peer.tilings(case) if peer.takes(case) else ():
                yield one(peer, case, tiling, asked.timeout)


def elsewhere(python: str, asked: argparse.Namespace) -> list[Record]:
    """The peers of another interpreter, which needs neither ours nor benchmarks installed."""
    from benchmarks.tpu_peers import PEERS

    paths = [str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    names = [name for name in (asked.peers.split(",") if asked.peers else PEERS) if name != BASE]
    if not names:
        return []
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "there.json"
        options = {
            "generations": asked.generations, "problems": asked.problems, "forms": asked.forms,
            "peers": ",".join(names), "timeout": str(asked.timeout), "out": str(out), "page": "none",
        }  # fmt: skip
        command = [python, "-m", "benchmarks.tpu", *(f"--{name}={value}" for name, value in options.items())]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        subprocess.run(command, cwd=ROOT, env=env, check=True)
        return Schedules.from_json(out.read_text()).records


def one(peer: TpuPeer, case: Case, tiling: Tiling | None, timeout: float) -> Record:
    """Compile one, and say what its schedule takes; a failure is a record too."""
    import jax

    from benchmarks.tpu_peers import operands
    from trencadis import inspect as tpu
    from trencadis.inspect.bundles import libtpu_version

    versions = {"jax": jax.__version__, "libtpu": libtpu_version(), peer.package: peer.version() or "?"}
    task = Record(peer=peer.name, case=case, tiling=tiling, versions=versions)
    begin = time.monotonic()
    try:
        fn = peer.build(case, tiling)
        found = tpu.inspect(
            fn, *operands(case), generation=case.generation, xla=True, flops=case.flops, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return dataclasses.replace(task, why=f"not compiled within {timeout:.0f} s")
    except tpu.CompilerMissing:
        raise
    except Exception as error:  # whatever a peer raises when it is traced
        return dataclasses.replace(task, why=reason(f"{type(error).__name__}: {error}"))
    finally:
        jax.clear_caches()  # some ask for the chip when they are traced, which the cache does not know
    return dataclasses.replace(task, taken=round(time.monotonic() - begin, 1), **figures(found))


def figures(found: Inspection) -> dict[str, Any]:
    """The fields of a record that an inspection tells."""
    if not found.compiled:
        return {"why": reason(found.message or "does not compile")}
    if not found.kernels:  # loops of XLA's own, whose length nobody knows, or all groups densely
        return {"why": "no kernel: left to XLA's general operations"}
    kernels = [warning for kernel in found.kernels for warning in kernel.warnings]
    if guessed := [warning for warning in kernels if "not known" in warning or "lower bound" in warning]:
        return {"why": reason(f"no figure to believe: {guessed[0]}")}
    total = sum(kernel.seconds * kernel.runs for kernel in found.kernels)
    return {
        "seconds": found.seconds,
        "kernel_seconds": total,
        "vmem": max(kernel.vmem_bytes for kernel in found.kernels),
        "spills": sum(kernel.spill_bytes for kernel in found.kernels),
        "mxu": sum(kernel.mxu_busy * kernel.seconds * kernel.runs for kernel in found.kernels) / total,
        "warnings": tuple(map(reason, (*found.warnings, *kernels))),
    }


def reason(text: str) -> str:
    """A message in one line, without paths."""
    return re.sub(r"(/[\w.\-]+){2,}", "...", " ".join(text.split()))[:300]


if __name__ == "__main__":
    sys.exit(main())
