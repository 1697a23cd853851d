"""`compile`: the seconds from a function to an executable, in a fresh process for each, and the size of the program.

What is imported when the first kernel is lowered, such as Pallas, counts; jax and trencadis are imported before. A
stack is the gradient of layers of three products each: gate and up [g, k, n], a product of both, and down [g, n, k].
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import trencadis
from benchmarks import problems, processes, tables
from benchmarks.commands.run import failed, known_passes
from benchmarks.peers import DTYPES, PEERS, JaxCall, Operands, select
from benchmarks.problems import PASSES, PROBLEMS, BenchProblem
from benchmarks.processes import ChildFailed, Job
from benchmarks.report import Record, Results, Writer, cells, environment
from benchmarks.timing import Stats

SILENCE_S = 600.0
PRODUCTS: dict[str, Callable[..., Any]] = {
    "ours": lambda x, w, sizes: trencadis.grouped_matmul(x, w, sizes, x.dtype),
    "triton": lambda x, w, sizes: trencadis.grouped_matmul(x, w, sizes, x.dtype, backend="triton"),
    "ragged_dot": lambda x, w, sizes: lax.ragged_dot(x, w, sizes, preferred_element_type=x.dtype),
}  # of a stack, by contender


def main(asked: argparse.Namespace) -> int:
    """Compile each function in a process of its own, one after the other, print and write."""
    contenders = [peer.name for peer in select(asked.peers or "ours")]
    wanted = [f"stack of {n}" for n in asked.layers] if asked.layers else known_passes(asked.passes, PASSES, PASSES)
    if asked.layers:
        problems.known("peers", contenders, PRODUCTS)
    chosen = problems.select(asked.problems, asked.tag)
    results = Results(command="compile", environment=environment(asked.words, "wall"))
    results.shapes = {problem.name: problem.shape() for problem in chosen}
    keep = Writer(results, asked.json)
    for problem in chosen:
        for which in wanted:
            for name in contenders:
                results.records.append(compiled(problem, which, name, asked.dtype))
                print(line(results.records[-1]), flush=True)
                keep()
    tables.show("seconds, from a function to an executable", seconds(results))
    keep.close()
    return failed(results.records)


def compiled(problem: BenchProblem, which: str, contender: str, dtype: str) -> Record:
    """The record of one function, by a child."""
    job = Job(function="benchmarks.commands.compile:measure", arguments=(problem.name, which, contender, dtype))
    try:
        (value,) = processes.run(job, silence_s=SILENCE_S)
    except ChildFailed as failure:
        return Record(problem=problem.name, dtype=dtype, which=which, contender=contender, why=f"failed: {failure}")
    return Record.from_json(value)


def line(record: Record) -> str:
    """A record as a line: seconds to lower and to compile, and the size of the module."""
    name = f"{record.problem:<18}{record.which:<12}{record.contender:<12}"
    if not record.time:
        return name + record.why
    lowering, size = record.details["lowering"], record.details["module bytes"]
    rest = record.time.median - lowering
    return f"{name}{lowering:7.2f} s lowering {rest:7.2f} s compiling, module of {size / 1e6:.2f} MB"


def seconds(results: Results) -> tables.Table:
    """A row for each function, a column for each contender."""
    rows = cells(results.records)
    names = list(dict.fromkeys(record.contender for record in results.records))
    figures = [
        [f"{cell[name].seconds:.2f}" if name in cell and cell[name].time else "-" for name in names] for cell in rows
    ]
    heads = [next(iter(cell.values())) for cell in rows]
    return [*tables.NAMES, *names], [[r.problem, r.dtype, r.which, *f] for r, f in zip(heads, figures, strict=True)]


# ---------------------------------------------------------------------------------------------------------------------
# The child


def measure(name: str, which: str, contender: str, dtype: str) -> Iterator[dict[str, Any]]:
    """Yield the record of one function, as JSON."""
    call = _call(PROBLEMS[name], which, contender, dtype)
    jax.block_until_ready(jnp.zeros(1))  # the device is there
    start = time.perf_counter()
    lowered = call.fn.lower(*call.args)
    between = time.perf_counter()
    lowered.compile()
    details = {"lowering": between - start, "module bytes": len(lowered.as_text())}
    took = Stats(median=time.perf_counter() - start)
    yield Record(problem=name, dtype=dtype, which=which, contender=contender, time=took, details=details).to_json()


def _call(problem: BenchProblem, which: str, contender: str, dtype: str) -> JaxCall:
    """The function of a pass or of a stack, and the shapes of its arguments."""
    m, k, n, g = problem.m, problem.k, problem.n, problem.g

    def struct(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, DTYPES[dtype])

    if not which.startswith("stack"):
        shapes = {"lhs": struct(m, k), "rhs": struct(g, k, n), "ct": struct(m, n)}
        call = PEERS[contender].prepare(Operands(problem=problem, **shapes, sizes=problem.group_sizes()), which)
        assert isinstance(call, JaxCall)
        return call
    multiply, layers = PRODUCTS[contender], int(which.split()[-1])

    def loss(weights: Any, x: Any, sizes: Any) -> Any:
        for gate, up, down in weights:
            x = multiply(multiply(x, gate, sizes) * multiply(x, up, sizes), down, sizes)
        return x.astype(jnp.float32).sum()

    weights = [(struct(g, k, n), struct(g, k, n), struct(g, n, k)) for _ in range(layers)]
    return JaxCall(
        jax.jit(jax.grad(loss, argnums=(0, 1))), (weights, struct(m, k), jax.ShapeDtypeStruct((g,), "int32"))
    )
