"""`check`: the kernels by value, on the machine; in the tests those of a GPU are interpreted.

Only the public API is called, under jit, and compared with float64. Before each call the memory that its result will
get is filled with NaN, and each call is repeated and must give the same bits. A case that hangs is ended, and fails.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import trencadis
from benchmarks import oracle, processes, quantized_cases
from benchmarks.cases import Call, Case, cases, group_sizes
from benchmarks.report import Record, Results, Writer, environment
from tests.support import oracle as float64

DTYPES = {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32}
ACTIVATIONS: dict[str, tuple[Any, Callable[[np.ndarray], np.ndarray]]] = {
    "silu": (jax.nn.silu, lambda x: x / (1 + np.exp(-x))),
    "gelu": (jax.nn.gelu, lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))),
    "relu": (jax.nn.relu, lambda x: np.maximum(x, 0)),
}
HANG_S = 120
QUANTIZED = "quantized "  # begins the names of the quantized cases


def main(asked: argparse.Namespace) -> int:
    """Judge all cases, print and write; 1 if one fails."""
    start = time.perf_counter()
    backend = asked.backend or ("xla" if asked.device == "cpu" else "gpu")
    results = Results(command="check", environment=environment(asked.words, ""), notes={"backend": backend})
    print(f"{results.environment['device']}, backend {backend}", flush=True)
    chosen = selected(asked.only, backend, quick=asked.quick)
    print(f"{'case':64} {'error':>9} {'limit':>9}", flush=True)
    results.records = judge_all(chosen, backend, asked.jobs)
    wrong = [record for record in results.records if record.why]
    total = len(results.records)
    print(f"{total - len(wrong)} of {total} right, {time.perf_counter() - start:.0f} s", *map(line, wrong), sep="\n")
    Writer(results, asked.json).close()
    return 1 if wrong or not total else 0


def selected(only: str, backend: str, *, quick: bool) -> list[str]:
    """The names of the cases that contain these words; quick leaves out the large ones."""
    named = [case.name for case in cases() if not (quick and case.large)]
    named += [QUANTIZED + name for name in quantized_cases.checks(backend)]
    return [name for name in named if only in name]


def judge_all(names: Sequence[str], backend: str, jobs: int) -> list[Record]:
    """A record for each case. Processes share the cases so that no two compile the same call."""
    order = {name: i for i, name in enumerate(names)}
    calls = {case.name: case.call for case in cases()}
    distinct = list(dict.fromkeys(calls.get(name, name) for name in names))
    part = {each: i % max(jobs, 1) for i, each in enumerate(distinct)}
    parts = [[name for name in names if part[calls.get(name, name)] == i] for i in range(max(jobs, 1))]

    def task(mine: list[str]) -> list[Record]:
        found = []
        for name, value, why in processes.each(
            "benchmarks.commands.check:judge_each", mine, backend, silence_s=HANG_S, child=jobs > 0
        ):
            found.append(Record.from_json(value) if value else Record(problem=name, why=why))
            print(line(found[-1]), flush=True)
        return found

    tasks = [functools.partial(task, mine) for mine in parts if mine]
    every = [record for found in processes.in_parallel(tasks, workers=jobs) for record in found]
    return sorted(every, key=lambda record: order[record.problem])


def line(record: Record) -> str:
    """The record as a line of the table."""
    error = float("nan") if record.error is None else record.error
    said = f"FAILED {record.why}" if record.why else "ok"
    return f"{record.problem:64} {error:9.1e} {record.limit or 0:9.1e}  {said}"


# ---------------------------------------------------------------------------------------------------------------------
# The child


def judge_each(names: Sequence[str], backend: str) -> Iterator[dict[str, Any]]:
    """Yield the record of each case, as JSON."""
    by_name = {case.name: case for case in cases()}
    quantized = quantized_cases.checks(backend) if any(name.startswith(QUANTIZED) for name in names) else {}
    made = functools.cache(compiled)
    for name in names:
        try:
            if name in by_name:
                record = judge(by_name[name], made(by_name[name].call, backend), backend)
            else:
                check = quantized[name.removeprefix(QUANTIZED)]
                record = judged(Record(problem=name, limit=check.limit), check.error())
        except Exception as failure:  # the other cases are worth knowing, too
            why = f"{type(failure).__name__}: {' '.join(str(failure).split())[:400]}"
            record = Record(problem=name, why=why)
        yield record.to_json()


def judged(record: Record, error: float) -> Record:
    """The record with its error; a reason, if that is over the limit."""
    wrong = record.limit is None or not error <= record.limit
    return dataclasses.replace(record, error=error, why=f"wrong: relative error {error:.1e}" if wrong else record.why)


def judge(case: Case, run: Callable[..., Any], backend: str) -> Record:
    """Run a case, and compare it with float64 and with itself."""
    call, given = case.call, values(case)

    def once() -> list[jax.Array]:
        return jax.tree.leaves(run(*(jnp.array(x) if name == "existing" else x for name, x in placed.items())))

    placed = {name: jnp.asarray(x) for name, x in given.items()}
    spoil(call)
    first = once()
    again = [once() for _ in range(case.repeats)]  # without a pause between them
    same = all(bool(_same_bits(a, b)) for other in again for a, b in zip(first, other, strict=True))
    error = oracle.worst(first, answers(case, given), poisoned=bool(case.poison))
    out = DTYPES[call.dtype if call.grad else call.out]
    limit = oracle.limit(out, depth=call.depth(given["sizes"]), tf32=call.dtype == "f32" and backend != "xla")
    why = "" if same else "another call gave other bits"
    which = call.form + (" gradients" if call.grad else "")
    return judged(Record(problem=case.name, dtype=call.dtype, which=which, limit=limit, why=why), error)


@jax.jit
def _same_bits(a: jax.Array, b: jax.Array) -> jax.Array:
    words = {2: jnp.uint16, 4: jnp.uint32}[a.dtype.itemsize]
    return (lax.bitcast_convert_type(a, words) == lax.bitcast_convert_type(b, words)).all()


def spoil(call: Call) -> None:
    """Fill the memory that the results will get with NaN, and free it."""
    shapes = call.shapes()
    results = [shapes["lhs"], shapes["rhs"]] if call.grad else [call.result()] * 2
    fill = [_spoiled(*like) for like in results]
    jax.block_until_ready(fill)
    for x in fill:
        x.delete()


def _spoiled(shape: tuple[int, ...], dtype: str) -> jax.Array:
    if np.prod(shape, dtype=np.int64) < oracle.LARGE:
        return jax.device_put(np.full(shape, np.nan, DTYPES[dtype]))  # nothing to compile
    return jnp.full(shape, jnp.nan, DTYPES[dtype])


# ---------------------------------------------------------------------------------------------------------------------
# Calls of the public API


def entry_point(call: Call, backend: str) -> Callable[..., Any]:
    """The function of a call, of the arguments that `call.shapes()` lists."""

    def product(given: dict[str, Any]) -> Any:
        extras: dict[str, Any] = {"group_offset": given.get("first"), "existing_out": given.get("existing")}
        extras |= {"backend": backend, "tiling": None if backend == "xla" else call.tile}
        operands = (given["lhs"], given["rhs"], given["sizes"], DTYPES[call.out])
        if call.form == "rows":
            activation = ACTIVATIONS[call.activation][0] if call.activation else None
            return trencadis.grouped_matmul(
                *operands, transpose_rhs=call.flipped, bias=given.get("bias"), activation=activation, **extras
            )
        return trencadis.transposed_grouped_matmul(
            *operands, transpose_lhs=call.flipped, num_actual_groups=call.window or None, **extras
        )

    def run(*arguments: Any) -> Any:
        given = dict(zip(call.shapes(), arguments, strict=True))
        if not call.grad:
            return product(given)

        def loss(lhs: Any, rhs: Any) -> Any:
            return (product(given | {"lhs": lhs, "rhs": rhs}) * given["c"]).sum(dtype=jnp.float32)

        return jax.grad(loss, argnums=(0, 1))(given["lhs"], given["rhs"])

    return run


def compiled(call: Call, backend: str) -> Any:
    """The executable of a call."""
    names = call.shapes()
    like = [jax.ShapeDtypeStruct(shape, DTYPES.get(dtype, jnp.int32)) for shape, dtype in names.values()]
    donated = (list(names).index("existing"),) if call.existing == "donated" else ()
    return jax.jit(entry_point(call, backend), donate_argnums=donated).lower(*like).compile()


# ---------------------------------------------------------------------------------------------------------------------
# Values and right answers


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _normal(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, DTYPES[dtype])


def values(case: Case) -> dict[str, Any]:
    """The arguments by name, with the poison: numpy arrays, or arrays on the device where they are large."""
    call = case.call
    rng = np.random.default_rng(case.seed + 7)
    sizes = group_sizes(case.sizes, call.m, call.g, case.seed)
    found: dict[str, Any] = {}
    for i, (name, (shape, dtype)) in enumerate(call.shapes().items()):
        if dtype == "i32":
            found[name] = sizes if name == "sizes" else np.int32(case.first)
        elif np.prod(shape, dtype=np.int64) >= oracle.LARGE:
            found[name] = _normal(i, shape, dtype)
        else:
            found[name] = rng.standard_normal(shape, np.float32).astype(DTYPES[dtype])
    _poison(case, found)
    return found


def _poison(case: Case, found: dict[str, Any]) -> None:
    """Put NaN and Inf into the arguments, in place."""
    call = case.call
    bounds = float64.bounds(found["sizes"], call.m)[case.first : case.first + call.local]
    left = found["lhs"] if call.form == "rows" or call.flipped else found["lhs"].T  # a view: [m, k]
    if case.poison == "unowned":
        unowned = np.ones(call.m, bool)
        for start, end in bounds:
            unowned[start:end] = False
        by_row = [left, *([found["rhs"]] if call.form == "contraction" else [])]
        for rows, bad in zip(by_row, (np.nan, np.inf), strict=False):
            rows[unowned] = bad
            rows[unowned, ::2] = np.inf if np.isnan(bad) else np.nan
    elif case.poison == "empty":
        found["rhs"][[i for i, (start, end) in enumerate(bounds) if start == end]] = np.nan
    elif case.poison == "groups":
        busy = [i for i, (start, end) in enumerate(bounds) if end - start > 2]
        (start, end), other = bounds[busy[0]], busy[-1]
        left[start, 3] = np.nan
        left[end - 1, 0] = np.inf
        if call.form == "rows":
            found["rhs"][other, 5, 1] = np.nan
        else:
            found["rhs"][bounds[other][0], 1] = np.nan


def answers(case: Case, given: dict[str, Any]) -> list[oracle.Answer]:
    """The right answer for each result of the call."""
    call, sizes = case.call, given["sizes"]
    left, right, c = given["lhs"], given["rhs"], given.get("c")
    if call.form == "rows":
        if not call.grad:
            activation = ACTIVATIONS[call.activation][1] if call.activation else None
            extras = {"bias": given.get("bias"), "existing_out": given.get("existing"), "activation": activation}
            return [oracle.rows(left, right, sizes, first=case.first, transpose_rhs=call.flipped, **extras)]
        d_rhs = oracle.contraction(c, left, sizes) if call.flipped else oracle.contraction(left, c, sizes)
        return [oracle.rows(c, right, sizes, transpose_rhs=not call.flipped), d_rhs]
    left = left if call.flipped else left.T
    if call.grad:  # lhs is [m, k]
        return [oracle.rows(right, c, sizes, transpose_rhs=True), oracle.rows(left, c, sizes)]
    window: dict[str, Any] = {"first": case.first, "local": call.local, "existing_out": given.get("existing")}
    return [oracle.contraction(left, right, sizes, **window)]
