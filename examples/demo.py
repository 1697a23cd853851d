"""A tour: grouped matmuls, an MoE layer, and a model that learns; checked, timed, drawn. About a minute on a CPU.

    python examples/demo.py [--quick] [--svg demo.svg]

Every result is checked against float64 or `backend="reference"`, a plain loop over groups; the exit code is 1 if a
check fails. Times are wall times on all cores. OpenBLAS and XLA have threads of their own, and disturb each other: so
contenders of both kinds run in different processes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # for benchmarks, which is not installed

import jax
import jax.numpy as jnp
import numpy as np
import train_moe
from jax import lax

import trencadis
from benchmarks import processes
from benchmarks.measure import BUSY
from benchmarks.peers import JaxCall
from benchmarks.problems import BenchProblem
from benchmarks.report import Record
from benchmarks.tables import show
from benchmarks.timing import Stats, steady, wall_clock
from trencadis import moe

TOLERANCE = 1e-4  # float32: largest difference, as a share of the largest value


@dataclasses.dataclass
class Checks:
    """The number of checks made, and the names of those that failed."""

    count: int = 0
    failed: list[str] = dataclasses.field(default_factory=list)

    def same(self, what: str, got: Any, want: Any, tolerance: float = TOLERANCE) -> None:
        """Check that two pytrees of arrays are equal within a tolerance."""
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            self.that(what, a.shape == b.shape and bool(np.abs(a - b).max() <= tolerance * max(np.abs(b).max(), 1e-30)))

    def that(self, what: str, holds: bool) -> None:
        """Count a check, and record its name if it fails."""
        self.count += 1
        if not holds:
            self.failed.append(what)
            print(f"  FAILED: {what}")


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    """Show what is running: a spinner on a terminal if rich is installed, otherwise a line of text."""
    try:
        from rich.console import Console
    except ImportError:
        console = None
    else:
        console = Console()
    if console is not None and console.is_terminal:
        with console.status(what):
            yield
    else:
        print(f"  {what} ...", flush=True)
        yield


def heading(text: str) -> None:
    print(f"\n{text}\n{'=' * len(text)}")


# ---------------------------------------------------------------------------------------------------------------------
# 1. One grouped matmul


CONTENDERS = {
    "ours": "ours",
    "numpy": "numpy loop",
    "ragged_dot": "lax.ragged_dot",
    "dense": "one dense matmul",
}
PASSES = {"forward": "value", "step": "value and gradients"}
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def matmuls(checks: Checks, quick: bool) -> None:
    """Check and time few and many groups, and print the table."""
    m, k, n = (256, 64, 64) if quick else (2048, 512, 512)
    heading(f"1. Grouped matmul, float32, m={m} k={k} n={n}")
    print("Each contender has a process of its own, and calls follow each other, as in a training loop. JAX's have")
    print("GLIBC_TUNABLES=glibc.malloc.hugetlb=1: huge pages, as numpy asks for them. See docs/performance/cpu.md.")
    problems = [
        BenchProblem(name=f"{g} groups", m=m, k=k, n=n, g=g, sizes="random") for g in ((8,) if quick else (8, 64))
    ]
    records: list[Record] = []
    contenders = {name: CONTENDERS[name] for name in (("ours", "numpy") if quick else CONTENDERS)}
    for name, title in contenders.items():
        with doing(f"{title}: compile, check, time"):
            records += timed_alone(name, problems, budget_s=0.05 if quick else 1.0)
    for record in records:
        checks.that(f"{CONTENDERS[record.contender]}, {record.problem}, {record.which}: {record.why}", not record.why)
    rows = []
    for problem in problems:
        sizes = problem.group_sizes()
        for which, what in PASSES.items():
            mine = {r.contender: r.time for r in records if (r.problem, r.which) == (problem.name, which) and r.time}
            rows.append([f"{problem.name} of {sizes.min()} to {sizes.max()} rows", what, *times(mine)])
    table(["problem", "what", *contenders.values()], rows)
    print("In brackets: how many times as long as ours. The dense matmul has the same FLOPs, and a single matrix.")
    if importlib.util.find_spec("trencadis_cpu") is None:
        print("Ours are loops of XLA here. Native kernels (pip install ./native) are faster than numpy's loop in every")
        print("row, see docs/performance/cpu.md.")
    others = max((record.details.get("others") or 0.0 for record in records), default=0.0)
    if others > BUSY:
        print(
            f"Note: other processes took up to {others:.1f} of {os.cpu_count()} cores meanwhile, so these times say\n"
            "little. OpenBLAS suffers most. On one core, by CPU time: python -m benchmarks run --pin 0"
        )


def timed_alone(name: str, problems: Sequence[BenchProblem], budget_s: float) -> list[Record]:
    """The records of a contender of the benchmarks on some problems, checked against float64, from another process."""
    given = [dataclasses.asdict(problem) for problem in problems], ["f32"], list(PASSES), 5, budget_s
    job = processes.Job(function="benchmarks.measure:alone", arguments=(name, *given))
    return [Record.from_json(value) for value in processes.run(job, more_env={} if name == "numpy" else HUGE_PAGES)]


def times(found: dict[str, Stats]) -> list[str]:
    """The milliseconds of each contender, and how many times as long as ours that is."""
    ours = found["ours"].median
    return [
        f"{found[name].median * 1e3:.2f} ms" + ("" if name == "ours" else f" ({found[name].median / ours:.1f}x)")
        for name in CONTENDERS
        if name in found
    ]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print()
    show("", (list(header), [list(row) for row in rows]), words=2)
    print()


# ---------------------------------------------------------------------------------------------------------------------
# 2. A layer


def ours(config: moe.Config, params: dict[str, Any], x: Any, backend: str | None = None) -> Any:
    """An MoE layer in two calls: the routing, and the experts with a backward pass of their own."""
    routing = moe.route(x @ params["router"], config.k)
    return trencadis.moe_mlp(x, routing, params["w_gate"], params["w_up"], params["w_down"], backend=backend)


def by_hand(config: moe.Config, params: dict[str, Any], x: Any) -> Any:
    """The same layer as people write it: sort, gather, `lax.ragged_dot` three times, scatter."""
    weights, experts = lax.top_k(jax.nn.softmax(x @ params["router"]), config.k)
    order = jnp.argsort(experts.ravel())
    sizes = jnp.bincount(experts.ravel(), length=config.experts)
    rows = x[order // config.k]
    gate, up = (lax.ragged_dot(rows, params[name], sizes) for name in ("w_gate", "w_up"))
    y = lax.ragged_dot(jax.nn.silu(gate) * up, params["w_down"], sizes)
    weights = (weights / weights.sum(axis=-1, keepdims=True)).ravel()[order, None]
    return jnp.zeros_like(x).at[order // config.k].add(weights * y)


def layers(checks: Checks, quick: bool) -> None:
    """Check the value and the gradients of an MoE layer, and time them."""
    tokens, config = 1024, moe.Config(d=256, f=512, experts=16, k=2)
    if quick:
        tokens, config = 64, moe.Config(d=32, f=32, experts=8, k=2)
    heading(f"2. MoE layer, {tokens} tokens, {config.k} of {config.experts} experts each, {config.d} x {config.f}")
    x, params = jax.random.normal(jax.random.key(0), (tokens, config.d)), moe.init(jax.random.key(1), config)

    def step(layer: Callable[..., Any]) -> JaxCall:
        def value(params: Any, x: Any) -> Any:
            return jnp.mean(jnp.sin(layer(config, params, x)))

        return JaxCall(jax.jit(jax.value_and_grad(value, argnums=(0, 1))), (params, x))

    with doing("value and gradients: compile, check, time"):
        want = step(functools.partial(ours, backend="reference"))()
        calls = {"ours": step(ours), "ragged_dot": step(by_hand)}
        for name, call in calls.items():
            checks.same(f"{CONTENDERS[name]}, MoE layer", call(), want)
        found = {
            name: steady(call, wall_clock(), rounds=3, budget_s=0.05 if quick else 2) for name, call in calls.items()
        }
    table(["problem", "what", "ours", CONTENDERS["ragged_dot"]], [["MoE layer", "value and gradients", *times(found)]])


# ---------------------------------------------------------------------------------------------------------------------
# 3. A model


def training(checks: Checks, quick: bool) -> np.ndarray:
    """Train the language model of train_moe for some steps, and return the last sizes of the experts of a layer."""
    heading("3. A small language model of such layers, on the text of this documentation (examples/train_moe.py)")
    text, characters = train_moe.corpus()
    model = train_moe.Model(vocabulary=len(characters), layers=2, length=64, d=64, f=128, experts=8)
    steps, batch = 60, 16
    if quick:
        model, steps, batch = dataclasses.replace(model, layers=1, length=32, d=32, f=32, experts=4), 15, 8
    _, losses, loads = train_moe.train(model, text, steps, batch)
    train_moe.show(losses, loads)
    checks.that("the loss falls", losses[-1] < losses[0] - 0.1)
    checks.that("no row is dropped", bool((np.sum(loads, axis=-1) == batch * model.length * model.k).all()))
    return loads[-1][0]


# ---------------------------------------------------------------------------------------------------------------------
# 4. The schedule


def picture(checks: Checks, sizes: np.ndarray, path: pathlib.Path) -> None:
    """Draw the row tiles that the routing gets with which training ended."""
    heading("4. The row tiles of its last routing")
    mosaic = trencadis.show(sizes, k=64, n=128, dtype=np.float32)
    print(mosaic)
    mosaic.save(path)
    checks.that("the picture is an SVG", path.read_text().lstrip().startswith(("<svg", "<?xml")))
    print(f"\nThe picture: {path}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tour; the exit code is 0 if every check passed."""
    ask = argparse.ArgumentParser(description="A tour of trencadis.")
    ask.add_argument("--quick", action="store_true", help="tiny shapes: that it runs, not how fast")
    ask.add_argument("--svg", type=pathlib.Path, default=pathlib.Path("demo.svg"), help="default: %(default)s")
    asked = ask.parse_args(argv)
    checks = Checks()
    print(
        f"trencadis {trencadis.__version__}, jax {jax.__version__}, {jax.devices()[0].platform}, {os.cpu_count()} cores"
    )
    matmuls(checks, asked.quick)
    layers(checks, asked.quick)
    sizes = training(checks, asked.quick)
    picture(checks, sizes, asked.svg)
    verdict = f"FAILED: {', '.join(checks.failed)}" if checks.failed else f"{checks.count} checks held"
    print(f"\n{verdict}")
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
