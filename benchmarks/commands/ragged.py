"""`ragged`: groups that differ in m, k and n, against a loop over numpy, forward and both gradients by autodiff.

`known`: the sizes are known when the program is compiled; `traced`: they are not. On a GPU only `traced` is timed.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import trencadis as tr
from benchmarks import oracle, tables, timing
from benchmarks.measure import ROOM
from benchmarks.peers import DTYPES, JaxCall
from benchmarks.problems import PASSES, RAGGED, RAGGED_LARGE, RaggedProblem
from benchmarks.report import Record, Results, Writer, cells, environment
from tests.support import oracle as float64

AXES = ((1,), (0,))
CHECKED = 4  # groups whose values are compared on a GPU
LIKE = {"forward": 2, "d_lhs": 0, "d_rhs": 1}  # which of lhs, rhs and ct the result of a pass is like


def main(asked: argparse.Namespace) -> int:
    """Race each pass in each dtype, print and write."""
    if asked.device == "gpu":
        return main_gpu(asked)
    clock = timing.device_clock("cpu", pinned=asked.pin is not None)
    results = Results(command="ragged", environment=environment(asked.words, clock.name, pinned=asked.pin is not None))
    results.notes["problem"] = f"{RAGGED.groups} groups of {RAGGED.least} to {RAGGED.most} in m, k and n"
    for dtype in DTYPES:
        for which in PASSES:
            results.records += race(dtype, which, clock, asked.rounds)
    rows = cells(results.records)
    tables.show(f"{results.notes['problem']}; {clock.name}, milliseconds", tables.milliseconds(rows))
    for name in ("known", "traced"):
        tables.show(f"time of {name} over time of", tables.ratio_table(rows, base=name))
    Writer(results, asked.json).close()
    return 1 if any(record.why for record in results.records) else 0


def main_gpu(asked: argparse.Namespace) -> int:
    """Time a burst of each pass with traced sizes, print and write."""
    clock = timing.device_clock("gpu")
    results = Results(command="ragged", environment=environment(asked.words, clock.name))
    write = Writer(results, asked.json)
    for problem in (RAGGED, RAGGED_LARGE):
        results.notes[problem.name] = f"{problem.groups} groups of {problem.least} to {problem.most} in m, k and n"
        for which in PASSES:
            record = timed(problem, which, clock)
            results.records.append(record)
            said = f"{1e3 * record.seconds:.4f} ms, {record.details['TFLOP/s']:.0f} TFLOP/s" if record.seconds else ""
            print(f"{problem.name:<16} {which:<8} {said}{record.why}", flush=True)
            write()
    write.close()
    return 1 if any(record.why for record in results.records) else 0


def timed(problem: RaggedProblem, which: str, clock: timing.HostClock | timing.CuptiClock) -> Record:
    """The record of one pass in bf16 with traced sizes, whose first groups are compared with float64."""
    _, sizes = problem.draw()
    m, k, n = (x.astype(np.int64) for x in sizes)
    keys = jax.random.split(jax.random.key(problem.seed), 3)
    shapes = [int((x * y).sum()) for x, y in ((m, k), (k, n), (m, n))]
    data = [jax.random.normal(key, (shape,), jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]
    fn = jax.jit(lambda data, room, *sizes: ours(which, sizes, data, room))
    call = JaxCall(fn, (data, jnp.zeros_like(data[2]), *map(jnp.asarray, sizes)))
    few = [size[:CHECKED] for size in sizes]
    first = [x[: int((a[:CHECKED] * b[:CHECKED]).sum())] for x, a, b in zip(data, (m, k, m), (k, n, n), strict=True)]
    values = exact(which, few, first)
    right = oracle.Answer(pick=lambda out: out[: len(values)], values=values)
    limit, found = ROOM * oracle.limit(jnp.bfloat16, depth=problem.most), oracle.error(call(), right)
    good = found <= limit
    time = timing.burst(call, clock) if good else None
    rate = {"TFLOP/s": float(2 * (m * k * n).sum()) / time.median / 1e12} if time else {}
    return Record(
        problem=problem.name, dtype="bf16", which=which, contender="traced", time=time, error=found, limit=limit,
        why="" if good else f"wrong: relative error {found:.1e}", details=rate,
    )  # fmt: skip


def race(dtype: str, which: str, clock: timing.HostClock | timing.CuptiClock, rounds: int) -> list[Record]:
    """The records of numpy and of ours with known and with traced sizes, in turns."""
    rng, sizes = RAGGED.draw()
    m, k, n = sizes
    data = [
        jnp.asarray(rng.standard_normal(int((x * y).sum()), np.float32), DTYPES[dtype])
        for x, y in ((m, k), (k, n), (m, n))
    ]
    known = jax.jit(functools.partial(ours, which, sizes))
    traced = jax.jit(lambda data, room, *sizes: ours(which, sizes, data, room))
    room = jnp.zeros_like(data[2])
    calls: dict[str, Callable[[], Any]] = {
        "numpy": functools.partial(numpy_loop, which, sizes, [np.asarray(x) for x in data]),
        "known": lambda: known(data).block_until_ready(),
        "traced": lambda: traced(data, room, *sizes).block_until_ready(),
    }
    limit = ROOM * oracle.limit(DTYPES[dtype], depth=RAGGED.most)
    right = oracle.Answer(pick=lambda out: out, values=exact(which, sizes, data))
    errors = {name: oracle.error(call(), right) for name, call in calls.items()}
    good = {name: call for name, call in calls.items() if errors[name] <= limit}
    times = timing.race(good, clock, rounds=rounds) if rounds else {}
    return [
        Record(
            problem=RAGGED.name, dtype=dtype, which=which, contender=name, time=times.get(name), error=error,
            limit=limit, why="" if name in good else f"wrong: relative error {error:.1e}",
        )
        for name, error in errors.items()
    ]  # fmt: skip


def ours(which: str, sizes: Sequence[Any], data: Sequence[Any], room: Any = None) -> Any:
    """One pass by `grouped_gemm`; room is zeros, as many as the result has, where the sizes are traced."""
    (m, k, n), (a, b, c) = sizes, data
    out = None if room is None else tr.GroupedTensor.fully_ragged(room, m, n)

    def forward(a: Any, b: Any) -> Any:
        lhs, rhs = tr.GroupedTensor.fully_ragged(a, m, k), tr.GroupedTensor.fully_ragged(b, k, n)
        product: Any = tr.grouped_gemm(lhs, rhs, contracting_dims=AXES, out=out)
        return product.data

    if which == "forward":
        return forward(a, b)
    if which == "d_lhs":
        return jax.vjp(lambda a: forward(a, b), a)[1](c)[0]
    return jax.vjp(lambda b: forward(a, b), b)[1](c)[0]


Matrices = list[np.ndarray]


def pairs(which: str, sizes: Sequence[np.ndarray], data: Sequence[Any]) -> list[tuple[np.ndarray, np.ndarray]]:
    """The two matrices whose product is each group's result."""
    m, k, n = sizes
    a, b, c = (matrices(np.asarray(x), *dims) for x, dims in zip(data, ((m, k), (k, n), (m, n)), strict=True))
    if which == "forward":
        return list(zip(a, b, strict=True))
    if which == "d_lhs":
        return [(y, x.T) for y, x in zip(c, b, strict=True)]
    return [(x.T, y) for x, y in zip(a, c, strict=True)]


def matrices(x: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> Matrices:
    """The matrices that lie one after the other in a flat buffer."""
    ends = np.cumsum(rows * columns)
    parts = np.split(x, ends[:-1])
    return [part.reshape(r, c) for part, r, c in zip(parts, rows.tolist(), columns.tolist(), strict=True)]


def numpy_loop(which: str, sizes: Sequence[np.ndarray], data: Sequence[np.ndarray]) -> np.ndarray:
    """One matmul for each group, into a fresh result; bfloat16 goes through float32."""
    out, at = np.empty_like(data[LIKE[which]]), 0
    for x, y in pairs(which, sizes, data):
        room = out[at : at + x.shape[0] * y.shape[1]].reshape(x.shape[0], y.shape[1])
        if out.dtype == np.float32:
            np.matmul(x, y, out=room)
        else:
            room[...] = np.matmul(x.astype(np.float32), y.astype(np.float32)).astype(out.dtype)
        at += room.size
    return out


def exact(which: str, sizes: Sequence[np.ndarray], data: Sequence[Any]) -> np.ndarray:
    """The result in float64: each group by itself is a grouped matmul with one group."""
    return np.concatenate([float64.rows(x, y[None], [len(x)]).ravel() for x, y in pairs(which, sizes, data)])
