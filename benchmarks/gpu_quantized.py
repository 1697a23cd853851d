"""Quantized operands on a GPU, through the doors: what each kind takes, and how far it is from float64.

    python -m benchmarks.gpu_quantized [--problems mixtral-8x7b decode-128] [--kinds e4m3 w-int8] [--jobs 4] [--json F]
    python -m benchmarks.gpu_quantized --check    small problems with odd sizes, by value, also in the interpreter

Operands are quantized beforehand. Those that the tensor cores multiply in 8 bits are stored with the axis of the sum
last, which is what they take. Times are those of `benchmarks.run`: two calls, ten timed ones, the median. Jobs compile
beside each other, and have the card to themselves while they measure.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
import os
import pathlib
from typing import Any

import numpy as np

from benchmarks.peers import JaxCall
from benchmarks.problems import PASSES, PROBLEMS, BenchProblem, select
from benchmarks.timing import CuptiClock, burst

ROWS, COLUMNS = 256, 32  # that are checked
OFF = 1e-2  # an error that is none of rounding
WIDE = "bf16"
# format and granularity of lhs and of rhs; None: bfloat16
KINDS: dict[str, tuple[Any, Any]] = {
    WIDE: (None, None),
    "e4m3": (("float8_e4m3fn", "row"), ("float8_e4m3fn", "column")),
    "int8": (("int8", "row"), ("int8", "column")),
    "deepseek": (("float8_e4m3fn", (1, 128)), ("float8_e4m3fn", (1, 128, 128))),
    "w-int8": (None, ("int8", "column")),
    "w-e4m3": (None, ("float8_e4m3fn", "column")),
    "w-int4": (None, ("int4", "column")),
}
BOTH = ("e4m3", "int8")  # kinds that have all passes


def main() -> None:
    """Time each kind in each pass of each problem."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, metavar="NAME", help="as in problems.py")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile beside each other")
    parser.add_argument("--json", help="where to write the results")
    parser.add_argument("--check", action="store_true", help="small problems, by value; nothing is timed")
    args = parser.parse_args()
    if args.check:
        raise SystemExit(_wrong(checks()))
    cases = [
        (problem, which, kind)
        for problem in select(",".join(args.problems) if args.problems else None, "gpu")
        for which in args.passes
        for kind in args.kinds
        if which == "forward" or kind in (WIDE, *BOTH)
    ]
    results: list[dict[str, Any]] = []
    fresh = multiprocessing.get_context("spawn")
    # a process for each case: what one has taken of the memory of the card it does not give back before it ends
    with fresh.Pool(args.jobs, _take, (fresh.Lock(),), maxtasksperchild=1) as jobs:
        for found in jobs.imap(_measure, cases):
            results.append(found)
            print(_row(found), flush=True)
            if args.json:
                pathlib.Path(args.json).write_text(json.dumps({"results": results}, indent=1) + "\n")
    raise SystemExit(sum(not found.get("error", 1) < OFF for found in results))


_card: Any = None  # the lock of the job that measures


def _take(lock: Any) -> None:
    global _card
    _card = lock


def checks() -> dict[str, Any]:
    """Small problems: sizes that are no multiples of tiles, NaN in what nobody owns, a window, a bias.

    By name: a function that gives the error of a result, and its arguments, of which the last is the result's dtype.
    """
    import jax
    import jax.numpy as jnp

    import trencadis as tr
    from trencadis.quant import Scaled, dequantize, quantize

    interpret = jax.default_backend() == "cpu"
    m, k, n = (96, 192, 192) if interpret else (700, 576, 320)
    sizes = np.array([5, m // 3, 0, m // 2])  # of which the first is no local group
    low, high = int(sizes[0]), int(sizes.sum())
    mine = (np.arange(m) >= low) & (np.arange(m) < high)
    keys = jax.random.split(jax.random.key(0), 3)
    x, w, y = (jax.random.normal(key, s) for key, s in zip(keys, ((m, k), (3, k, n), (m, n)), strict=True))
    how: dict[str, Any] = {"backend": "gpu", "interpret": interpret, "group_offset": 1}

    def spoilt(q: Any) -> Any:
        """Rows that nobody owns are NaN."""
        scale = jnp.where(mine[:, None], q.scale, jnp.nan)
        values = q.values if q.format == "int8" else jnp.where(mine[:, None], q.values, jnp.nan).astype(q.dtype)
        return Scaled(values, scale, q.format, q.block)

    def rows(a: Any, b: Any, last: bool, out: Any) -> float:
        b_stored = b.mT if last else b
        got = tr.grouped_matmul(a, b_stored, sizes, out, transpose_rhs=last, bias=y[:3], **how)
        wide = [np.asarray(dequantize(v) if isinstance(v, Scaled) else v, np.float64) for v in (a, b, y)]
        want, start = np.zeros((m, n)), low
        for i, size in enumerate(sizes[1:]):
            part = slice(start, start + size)
            want[part], start = wide[0][part] @ wide[1][i] + wide[2][i], start + size
        return _off(got, want)

    def contraction(name: str, out: Any) -> float:
        a, b = quantize(x.T, name, "row"), quantize(y.T, name, "row")
        got = tr.transposed_grouped_matmul(a, b.mT, sizes, out, num_actual_groups=3, **how)
        wide = [np.asarray(dequantize(v), np.float64) for v in (a, b)]
        bounds = np.cumsum(sizes)
        parts = itertools.pairwise(bounds)
        return _off(got, np.stack([wide[0][:, s:e] @ wide[1][:, s:e].T for s, e in parts]))

    cases: dict[str, Any] = {}
    rounded = jnp.where(mine[:, None], x, jnp.nan).astype(jnp.bfloat16)
    for name in ("int8", "int4", "float8_e4m3fn", "float8_e5m2"):
        for last, out in ((True, jnp.bfloat16), (False, jnp.bfloat16), (True, jnp.float32)):
            weights = quantize(w, name, "column")
            cases[f"bf16 x {name}, last={last}, {out.__name__}"] = (rows, rounded, weights, last, out)
        if name != "int4":
            both = spoilt(quantize(x, name, "row")), quantize(w, name, "column")
            blocks = spoilt(quantize(x, name, (1, 128))), quantize(w, name, (1, 128, 128))
            cases[f"{name} x {name}"] = (rows, *both, True, jnp.bfloat16)
            cases[f"{name} x {name}, blocks"] = (rows, *blocks, True, jnp.float32)
            cases[f"{name}, contraction"] = (contraction, name, jnp.bfloat16)
        if not interpret:
            cases[f"bf16 x {name}, many groups of few rows"] = (_few, name, jnp.bfloat16)
    return cases


def _few(name: str, out: Any) -> float:
    """The error of weights of some format with a few rows each: long sums, and block after block without a pause."""
    import jax
    import jax.numpy as jnp

    import trencadis as tr
    from trencadis.quant import dequantize, quantize

    g, k, n = 64, 2048, 1536
    sizes = np.arange(g) % 8
    x = jax.random.normal(jax.random.key(0), (int(sizes.sum()), k), jnp.bfloat16)
    w = quantize(jax.random.normal(jax.random.key(1), (g, n, k), jnp.bfloat16), name, (1, 1, k))
    got = jax.jit(lambda x, w: tr.grouped_matmul(x, w, sizes, out, transpose_rhs=True, backend="gpu"))(x, w)
    group = np.repeat(np.arange(g), sizes)
    wide = dequantize(w).astype(jnp.float32)
    rows = [jnp.dot(wide[i], row, precision="highest") for i, row in zip(group, x.astype(jnp.float32), strict=True)]
    want = np.stack(rows).astype(np.float64)
    return _off(got, want)


def limit(dtype: Any) -> float:
    """Of an error: that of rounding a result of this dtype, or of sums in the tensor cores."""
    return 3e-3 if np.dtype(dtype).itemsize == 2 else 1e-3


def _wrong(cases: dict[str, Any]) -> int:
    """How many cases are; each is printed."""
    wrong = 0
    for name, (fn, *args) in cases.items():
        error, most = fn(*args), limit(args[-1])
        wrong += not error < most
        print(f"{name:<45}{error:.1e}{'' if error < most else '  WRONG'}", flush=True)
    print(f"{len(cases) - wrong} of {len(cases)} are right", flush=True)
    return wrong


def _row(found: dict[str, Any]) -> str:
    name = f"{found['problem']:<18}{found['pass']:<9}{found['kind']:<10}"
    if "why" in found:
        return name + found["why"]
    wrong = "" if found["error"] < OFF else "  WRONG"
    return f"{name}{found['ms']:9.4f} ms {found['tflops']:7.1f} TFLOP/s  off by {found['error']:.1e}{wrong}"


def _measure(case: tuple[BenchProblem, str, str]) -> dict[str, Any]:
    import jax

    problem, which, kind = case
    found: dict[str, Any] = {"problem": problem.name, "pass": which, "kind": kind}
    try:
        ready = _prepared(problem, which, kind)
        with _card:
            call, check = ready()
            error = check(call())
            seconds = burst(call, CuptiClock()).median
    except Exception as failure:  # the next one may do
        return found | {"why": f"{type(failure).__name__}: {failure}"[:300]}
    about = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    return found | {"ms": seconds * 1e3, "tflops": problem.flops / seconds / 1e12, "error": error} | about


def _prepared(problem: BenchProblem, which: str, kind: str) -> Any:
    """Compile a call; returns a function that makes its operands.

    That returns the call, and a function from its result to its error against the float64 product of what the operands
    stand for.
    """
    import jax
    import jax.numpy as jnp

    import trencadis as tr
    from trencadis.quant import quantize

    sizes = jnp.asarray(problem.group_sizes())
    m, g = problem.m, problem.g
    k, n = (problem.n, problem.k) if which == "d_lhs" else (problem.k, problem.n)
    left, right = KINDS[kind]
    keys = jax.random.split(jax.random.key(0))

    def normal(key: Any, *shape: int) -> Any:
        return jax.random.normal(key, shape, jnp.bfloat16)

    def packed(x: Any, how: Any) -> Any:
        return x if how is None else quantize(x, *how)

    if which == "d_rhs":  # both [., m], quantized along m
        flip = False
        make = [lambda: packed(normal(keys[0], k, m), left), lambda: packed(normal(keys[1], n, m), left)]
        fn = jax.jit(lambda x, y, s: tr.transposed_grouped_matmul(x, y.mT, s, preferred_element_type=jnp.bfloat16))
    else:
        flip = kind != WIDE or which == "d_lhs"

        def weights() -> Any:
            y = packed(normal(keys[1], g, k, n), right)
            return y.mT if flip else y

        make = [lambda: packed(normal(keys[0], m, k), left), weights]
        fn = jax.jit(
            lambda x, y, s: tr.grouped_matmul(x, y, s, preferred_element_type=jnp.bfloat16, transpose_rhs=flip)
        )

    makers = [jax.jit(each).lower().compile() for each in make]
    compiled = fn.lower(*(jax.eval_shape(each) for each in make), sizes).compile()

    def ready() -> tuple[Any, Any]:
        x, y = (each() for each in makers)
        error = _error_of_sums if which == "d_rhs" else _error_of_rows
        return JaxCall(compiled, (x, y, sizes)), functools.partial(error, x, y, np.asarray(sizes), flip)

    return ready


def _error_of_rows(x: Any, y: Any, sizes: np.ndarray, flip: bool, out: Any) -> float:
    """Of the first columns of some rows [m, n]; weights are [g, k, n], or flipped."""
    rows = np.random.default_rng(0).integers(0, out.shape[0], ROWS)
    group = np.searchsorted(np.cumsum(sizes), rows, side="right")
    few = slice(COLUMNS)
    weights = _wide(y, (slice(None), few) if flip else (slice(None), slice(None), few))[group]
    want = np.einsum("rk,rnk->rn" if flip else "rk,rkn->rn", _wide(x, rows), weights)
    return _off(out[rows, few], want)


def _error_of_sums(x: Any, y: Any, sizes: np.ndarray, flip: bool, out: Any) -> float:
    """Of a corner of the largest group's matrix [k, n]; operands are [k, m] and [n, m]."""
    del flip
    group = int(np.argmax(sizes))
    end, few = int(sizes[: group + 1].sum()), slice(COLUMNS)
    a, b = (_wide(each, few)[:, end - sizes[group] : end] for each in (x, y))
    return _off(out[group, few, few], a @ b.T)


def _wide(x: Any, which: Any) -> np.ndarray:
    """Some of what an operand stands for, in float64."""
    import jax

    from trencadis.quant import dequantize

    some = jax.jit(lambda x: (x if isinstance(x, jax.Array) else dequantize(x))[which])(x)
    return np.asarray(some).astype(np.float64)


def _off(got: Any, want: np.ndarray) -> float:
    """How far a result is from what is wanted, over that."""
    return float(np.linalg.norm(np.asarray(got).astype(np.float64) - want) / np.linalg.norm(want))


if __name__ == "__main__":
    main()
