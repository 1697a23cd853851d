"""One GPU kernel with several layouts, timed one by one: what to look at before the choice of a layout changes.

A layout is a set of fields that differ from those that the plan chooses; the empty one is that choice. Cases run in a
child process, since a kernel with a bad layout may hang.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import processes, tables
from benchmarks.problems import PROBLEMS, BenchProblem, known
from benchmarks.report import Record, Results, Writer, cells, environment

SILENCE_S = 60  # a compile takes a few seconds, a measurement less than one
DENSE = "dense"
Case = tuple[str, str, str, str, str]  # problem, pass, fields of the layout, format and backend


def main(asked: argparse.Namespace, chosen: Sequence[BenchProblem], passes: Sequence[str]) -> int:
    """Time each layout on each pass of each problem, beside a dense matmul."""
    from benchmarks.kernels import FORMATS

    known("format", [asked.format], FORMATS)
    how = asked.format, asked.backend
    cases = [(p.name, which, fields, *how) for p in chosen for which in passes for fields in asked.layouts]
    cases = [(p.name, "forward", DENSE, "bf16", "") for p in chosen] + cases
    records = []
    for case, value, why in processes.each("benchmarks.layouts:measure", cases, silence_s=SILENCE_S):
        records.append(Record.from_json(value) if value else _record(case, why=why))
        print(_line(records[-1]), flush=True)
    results = Results(command="layouts", environment=environment(asked.words, "cupti kernel time"), records=records)
    results.shapes = {problem.name: problem.shape() for problem in chosen}
    tables.show("TFLOP/s by layout", tables.rates(cells(records), results.shapes))
    Writer(results, asked.json).close()
    return 0


def _record(case: Case, **more: Any) -> Record:
    name, which, fields, format, _ = case
    return Record(problem=name, dtype=format, which=which, contender=fields or "planned", **more)


def _line(record: Record) -> str:
    name = f"{record.problem:<18}{record.which:<9}{record.contender:<44}"
    if not record.time:
        return f"{name}{record.why}"
    apart = record.details["apart"]
    return f"{name}{record.time.median * 1e3:9.4f} ms" + (f"  differs by {apart:.1e}" if apart else "")


# ---------------------------------------------------------------------------------------------------------------------
# The child


def measure(cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Yield the record of each case, as JSON."""
    from benchmarks import kernels
    from benchmarks.peers import JaxCall
    from benchmarks.timing import burst, device_clock, reason_of

    first: dict[tuple[str, ...], Any] = {}  # the result of the first layout of a pass: the others should equal it
    for case in map(tuple, cases):
        name, which, fields, *how = case
        product = name, DENSE if fields == DENSE else which
        try:
            problem = PROBLEMS[name]
            made = dense(problem) if fields == DENSE else kernels.with_layout(problem, which, fields, *how)
            call = JaxCall(made[0], tuple(made[1]))
            time, result = burst(call, device_clock("gpu")), call()
            first = first if product in first else {product: result}  # one at a time: they are large
            apart = difference(result, first[product])
            yield _record(case, time=time, details={"layout": made[2], "apart": apart}).to_json()
        except Exception as failure:  # the next layout may do
            yield _record(case, why=reason_of(failure)).to_json()


def dense(problem: BenchProblem) -> Any:
    """One matmul of the same FLOPs, by cuBLAS."""
    import jax

    from benchmarks.kernels import BF16, random

    shapes = ((problem.m, problem.k), (problem.k, problem.n))
    return jax.jit(lambda a, b: a @ b), [random(i, shape, BF16) for i, shape in enumerate(shapes)], "cuBLAS"


def difference(a: Any, b: Any) -> float:
    """The norm of the difference of two results over the norm of the second."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def norms(a: Any, b: Any) -> Any:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.linalg.norm((a - b).ravel()), jnp.linalg.norm(b.ravel())

    off, whole = norms(a, b)
    return float(off / whole)
