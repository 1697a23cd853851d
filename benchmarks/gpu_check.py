"""Are the GPU kernels right? By value, on the machine: `PYTHONPATH=src python benchmarks/gpu_check.py --help`.

Only the public doors are called, under jit, and compared with float64 sums on the host: all of a result, or sampled
rows and columns where it is large. Before each call the memory that its result will get is filled with NaN, and each
call is made again and must give the same bits. Exits with 1 if a case fails, and with 2 if one hangs.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

if not __package__:  # run as a file: benchmarks is not installed
    sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import trencadis
from benchmarks.gpu_cases import Call, Case, cases, group_sizes

DTYPES = {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32}
ACTIVATIONS: dict[str, tuple[Any, Callable[[np.ndarray], np.ndarray]]] = {
    "silu": (jax.nn.silu, lambda x: x / (1 + np.exp(-x))),
    "gelu": (jax.nn.gelu, lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))),
    "relu": (jax.nn.relu, lambda x: np.maximum(x, 0)),
}
SAMPLE = 48  # rows and columns of a large result that are compared
LARGE = 2**24  # elements from which data is made, and looked through, on the device
OUTLIER = 16  # one element may be off by so many times the limit, in units of the result's rms: normal data has tails
HANG_S = 60


# ---------------------------------------------------------------------------------------------------------------------
# The doors


def door(call: Call, backend: str) -> Callable[..., Any]:
    """The function of a call, of the arguments that it has."""

    def product(given: dict[str, Any]) -> Any:
        extras = {"group_offset": given.get("first"), "existing_out": given.get("existing")}
        extras |= {"backend": backend, "tiling": call.tile if backend == "gpu" else None}
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
    return jax.jit(door(call, backend), donate_argnums=donated).lower(*like).compile()


# ---------------------------------------------------------------------------------------------------------------------
# Values


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _normal(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, DTYPES[dtype])


def values(case: Case) -> dict[str, Any]:
    """Arguments by name: numpy's, or the device's own where they are large. Normal data, then the poison."""
    call = case.call
    rng = np.random.default_rng(case.seed + 7)
    sizes = group_sizes(case.sizes, call.m, call.g, case.seed)
    found: dict[str, Any] = {}
    for i, (name, (shape, dtype)) in enumerate(call.shapes().items()):
        if dtype == "i32":
            found[name] = sizes if name == "sizes" else np.int32(case.first)
        elif np.prod(shape, dtype=np.int64) >= LARGE:
            found[name] = _normal(i, shape, dtype)
        else:
            found[name] = rng.standard_normal(shape, np.float32).astype(DTYPES[dtype])
    _poison(case, found)
    return found


def spans(case: Case, sizes: np.ndarray) -> list[tuple[int, int]]:
    """First and last row (exclusive) of each group of the window."""
    ends = np.cumsum(sizes)
    window = slice(case.first, case.first + case.call.local)
    return list(zip((ends - sizes)[window].tolist(), ends[window].tolist(), strict=True))


def _poison(case: Case, found: dict[str, Any]) -> None:
    """NaN and Inf, in place."""
    call, bounds = case.call, spans(case, found["sizes"])
    left = found["lhs"] if call.form == "rows" or call.flipped else found["lhs"].T  # a view: [m, k]
    if case.poison == "unowned":
        alone = np.ones(call.m, bool)
        for start, end in bounds:
            alone[start:end] = False
        by_row = [left, *([found["rhs"]] if call.form == "contraction" else [])]
        for rows, bad in zip(by_row, (np.nan, np.inf), strict=False):
            rows[alone] = bad
            rows[alone, ::2] = np.inf if np.isnan(bad) else np.nan
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


# ---------------------------------------------------------------------------------------------------------------------
# float64


def _f64(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def _some(count: int, large: bool, borders: Sequence[int] = ()) -> np.ndarray:
    """All indices, or some: the first, the last, those at borders, and a random sample."""
    if not large:
        return np.arange(count)
    chosen = np.random.default_rng(0).choice(count, min(SAMPLE, count), replace=False)
    return np.unique([0, count - 1, *chosen.tolist(), *borders])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Right:
    """Part of a right answer: `pick(result)` should be `values`, and exactly so where nothing was summed."""

    pick: Callable[[Any], Any]
    values: np.ndarray
    exact: np.ndarray  # bool, broadcasts against values


def rows_right(left: Any, right: Any, bounds: list[tuple[int, int]], flipped: bool, **extras: Any) -> Right:
    """Of the rows form: left [m, k], right [g, k, n]; extras are bias, existing and activation."""
    m, n = left.shape[0], right.shape[1 if flipped else 2]
    large = max(m * n, right.size) >= LARGE
    at = _some(m, large, [row for s, e in bounds[:: 1 + len(bounds) // 32] if s < e for row in (s, e - 1)])
    cols = _some(n, large)
    matrices = _f64(right[:, cols].transpose(0, 2, 1) if flipped else right[:, :, cols])
    rows = _f64(left[at])
    found, owned = np.zeros((len(at), len(cols))), np.zeros(len(at), bool)
    for i, (start, end) in enumerate(bounds):
        mine = (at >= start) & (at < end)
        if mine.any():
            found[mine] = rows[mine] @ matrices[i]
            found[mine] += 0 if extras.get("bias") is None else _f64(extras["bias"])[i, cols]
            owned |= mine
    if extras.get("activation"):
        found[owned] = ACTIVATIONS[extras["activation"]][1](found[owned])
    if extras.get("existing") is not None:
        found += _f64(extras["existing"][at][:, cols])
    return Right(pick=lambda out: out[at][:, cols], values=found, exact=~owned[:, None])


def summed_right(left: Any, right: Any, bounds: list[tuple[int, int]], existing: Any = None) -> Right:
    """Of the contraction form: left [m, k], right [m, n]."""
    k, n = left.shape[1], right.shape[1]
    large = max(left.size, right.size, len(bounds) * k * n) >= LARGE
    ks, ns = _some(k, large), _some(n, large)
    a, b = _f64(left[:, ks]), _f64(right[:, ns])
    found = np.stack([a[start:end].T @ b[start:end] for start, end in bounds])
    if existing is not None:
        found += _f64(existing[:, ks][:, :, ns])
    empty = np.asarray([start == end for start, end in bounds])
    return Right(pick=lambda out: out[:, ks][:, :, ns], values=found, exact=empty[:, None, None])


def right_answers(case: Case, given: dict[str, Any]) -> list[Right]:
    """One for each result of the call."""
    call, bounds = case.call, spans(case, given["sizes"])
    left, right, c = given["lhs"], given["rhs"], given.get("c")
    if call.form == "rows":
        if not call.grad:
            extras = {"bias": given.get("bias"), "existing": given.get("existing"), "activation": call.activation}
            return [rows_right(left, right, bounds, call.flipped, **extras)]
        summed = summed_right(left, c, bounds) if not call.flipped else summed_right(c, left, bounds)
        return [rows_right(c, right, bounds, not call.flipped), summed]
    left = left if call.flipped else left.T
    if call.grad:  # with lhs as [m, k]
        return [rows_right(right, c, bounds, True), rows_right(left, c, bounds, False)]
    return [summed_right(left, right, bounds, given.get("existing"))]


# ---------------------------------------------------------------------------------------------------------------------
# Judging


_finite = jax.jit(lambda x: jnp.isfinite(x).all())


@jax.jit
def _same_bits(a: jax.Array, b: jax.Array) -> jax.Array:
    words = {2: jnp.uint16, 4: jnp.uint32}[a.dtype.itemsize]
    return (lax.bitcast_convert_type(a, words) == lax.bitcast_convert_type(b, words)).all()


def error(result: jax.Array, right: Right, poisoned: bool) -> float:
    """‖out - right‖ / ‖right‖, or the worst element's share of the limit if that is more; inf for what must not be."""
    got, want = _f64(right.pick(result)), right.values
    finite = np.isfinite(want)
    if got.shape != want.shape or (np.isfinite(got) != finite).any():
        return float("inf")
    exact = np.broadcast_to(right.exact, want.shape)
    if (got[exact] != want[exact]).any() or not (poisoned or bool(_finite(result))):
        return float("inf")
    summed = finite & ~exact
    off, norm = got[summed] - want[summed], float(np.linalg.norm(want[summed]))
    if norm == 0:
        return 0.0 if (off == 0).all() else float("inf")
    rms = norm / np.sqrt(off.size)
    return max(float(np.linalg.norm(off)) / norm, float(np.abs(off).max() / rms) / OUTLIER)


def spoil(call: Call) -> None:
    """Fill the memory that the results will be given with NaN, and free it."""
    shapes = call.shapes()
    results = [shapes["lhs"], shapes["rhs"]] if call.grad else [call.result()] * 2
    fill = [_spoiled(*like) for like in results]
    jax.block_until_ready(fill)
    for x in fill:
        x.delete()


def _spoiled(shape: tuple[int, ...], dtype: str) -> jax.Array:
    if np.prod(shape, dtype=np.int64) < LARGE:
        return jax.device_put(np.full(shape, np.nan, DTYPES[dtype]))  # nothing to compile
    return jnp.full(shape, jnp.nan, DTYPES[dtype])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """Of the table."""

    name: str
    error: float
    limit: float
    why: str = ""

    @property
    def ok(self) -> bool:
        return not self.why and bool(self.error <= self.limit)

    def to_json(self) -> dict[str, Any]:
        """As plain values; JSON has no inf, nor NaN."""
        return dataclasses.asdict(self) | {"ok": self.ok, "error": self.error if np.isfinite(self.error) else None}

    def __str__(self) -> str:
        said = "ok" if self.ok else f"FAILED {self.why}"
        return f"{self.name:56} {self.error:9.1e} {self.limit:9.1e}  {said}"


def judge(case: Case, run: Callable[..., Any], backend: str) -> Row:
    """Run a case and hold it against float64 and against itself."""
    given = values(case)

    def once() -> list[jax.Array]:
        return jax.tree.leaves(run(*(jnp.array(x) if name == "existing" else x for name, x in placed.items())))

    placed = {name: jnp.asarray(x) for name, x in given.items()}
    spoil(case.call)
    first = once()
    again = [once() for _ in range(case.repeats)]  # no pause between them
    same = all(bool(_same_bits(a, b)) for other in again for a, b in zip(first, other, strict=True))
    rights = right_answers(case, given)
    off = max(error(out, right, bool(case.poison)) for out, right in zip(first, rights, strict=True))
    why = "" if same else "another call gave other bits"
    return Row(name=case.name, error=off, limit=case.call.limit(given["sizes"], backend), why=why)


def watched(name: str) -> threading.Timer:
    """A timer that ends the process: a kernel that hangs cannot be stopped otherwise."""

    def stop() -> None:
        print(f"HUNG: {name} takes more than {HANG_S} s", flush=True)
        os._exit(2)

    timer = threading.Timer(HANG_S, stop)
    timer.daemon = True
    timer.start()
    return timer


def check(chosen: Sequence[Case], backend: str, jobs: int) -> Iterator[Row]:
    """Judge each case, after all calls are compiled: tracing them takes the interpreter that the judge needs."""
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        calls = {call: pool.submit(compiled, call, backend) for call in dict.fromkeys(case.call for case in chosen)}
    for case in chosen:
        timer, start = watched(case.name), time.perf_counter()
        try:
            row = judge(case, calls[case.call].result(), backend)
        except Exception as failure:  # the other cases are worth knowing, too
            why = f"{type(failure).__name__}: {' '.join(str(failure).split())[:400]}"
            row = Row(name=case.name, error=float("nan"), limit=0.0, why=why)
        timer.cancel()
        print(f"{time.perf_counter() - start:6.2f} s  {row}", flush=True)
        yield row


def part_of(chosen: Sequence[Case], part: str) -> list[Case]:
    """The cases of every Nth call from the Ith on, for "I/N": no two processes compile the same."""
    at, parts = (int(number) for number in part.split("/"))
    if not 0 <= at < parts:
        raise SystemExit(f"--part is {part}: I counts from 0 to N - 1")
    mine = set(list(dict.fromkeys(case.call for case in chosen))[at::parts])
    return [case for case in chosen if case.call in mine]


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 1 if a case fails."""
    ask = argparse.ArgumentParser(description="Check the GPU kernels by value.")
    ask.add_argument("--quick", action="store_true", help="leave out the large cases")
    ask.add_argument("--only", default="", metavar="WORDS", help="cases whose names contain this")
    ask.add_argument("--part", default="0/1", metavar="I/N", help="every Nth call from the Ith on: for N processes")
    ask.add_argument("--backend", default="gpu", help="another one, to try the script itself (default: %(default)s)")
    ask.add_argument("--jobs", type=int, default=4, help="compiles at a time (default: %(default)s)")
    ask.add_argument("--json", type=pathlib.Path, metavar="PATH", help="write the table there")
    asked = ask.parse_args(argv)
    start = time.perf_counter()
    device = jax.devices()[0]
    print(f"jax {jax.__version__}, {device.device_kind}, backend {asked.backend}", flush=True)
    chosen = [case for case in cases() if asked.only in case.name and not (asked.quick and case.large)]
    rows = list(check(part_of(chosen, asked.part), asked.backend, asked.jobs))
    print(f"\n{'case':56} {'error':>9} {'limit':>9}", *rows, sep="\n")
    failed = [row for row in rows if not row.ok]
    print(f"{len(rows) - len(failed)} of {len(rows)} right, {time.perf_counter() - start:.0f} s")
    if asked.json:
        table = [row.to_json() for row in rows]
        found = {"jax": jax.__version__, "device": device.device_kind, "backend": asked.backend, "cases": table}
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
