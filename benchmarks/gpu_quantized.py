"""Quantized operands on a GPU, through the doors: what each kind takes, and how far it is from float64.

    python -m benchmarks.gpu_quantized [--problems mixtral-8x7b decode-128] [--kinds e4m3 w-int8] [--json FILE]

Operands are quantized beforehand. Those that the tensor cores multiply in 8 bits are stored with the axis of the sum
last, which is what they take. Times are those of `benchmarks.run`: two calls, ten timed ones, the median.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
from typing import Any

import numpy as np

from benchmarks.peers import JaxCall
from benchmarks.problems import PASSES, PROBLEMS, BenchProblem, select
from benchmarks.timing import CuptiClock, burst

ROWS = 256  # that are checked
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
    parser.add_argument("--json", help="where to write the results")
    args = parser.parse_args()
    results = []
    for problem in select(",".join(args.problems) if args.problems else None, "gpu"):
        for which in args.passes:
            for kind in args.kinds:
                if which == "forward" or kind in (WIDE, *BOTH):
                    results.append(_measure(problem, which, kind))
                    print(_row(results[-1]), flush=True)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(results, indent=1))


def _row(found: dict[str, Any]) -> str:
    name = f"{found['problem']:<18}{found['pass']:<9}{found['kind']:<10}"
    if "why" in found:
        return name + found["why"]
    return f"{name}{found['ms']:9.4f} ms {found['tflops']:7.1f} TFLOP/s  off by {found['error']:.1e}"


def _measure(problem: BenchProblem, which: str, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {"problem": problem.name, "pass": which, "kind": kind}
    try:
        call, check = _prepared(problem, which, kind)
        error = check(call())
        seconds = burst(call, CuptiClock()).median
    except Exception as failure:  # the next one may do
        return found | {"why": f"{type(failure).__name__}: {failure}"[:300]}
    return found | {"ms": seconds * 1e3, "tflops": problem.flops / seconds / 1e12, "error": error}


def _prepared(problem: BenchProblem, which: str, kind: str) -> tuple[Any, Any]:
    """A call, and a function from its result to its error against the float64 product of what operands stand for."""
    import jax
    import jax.numpy as jnp

    import trencadis as tr
    from trencadis.quant import dequantize, quantize

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
        x = jax.jit(lambda: packed(normal(keys[0], k, m), left))()
        y = jax.jit(lambda: packed(normal(keys[1], n, m), left))()
        fn = jax.jit(lambda x, y, s: tr.transposed_grouped_matmul(x, y.mT, s, preferred_element_type=jnp.bfloat16))
    else:
        flip = kind != WIDE or which == "d_lhs"
        x = jax.jit(lambda: packed(normal(keys[0], m, k), left))()
        y = jax.jit(lambda: packed(normal(keys[1], g, k, n), right))()
        y = jax.jit(lambda y: y.mT)(y) if flip else y
        fn = jax.jit(
            lambda x, y, s: tr.grouped_matmul(x, y, s, preferred_element_type=jnp.bfloat16, transpose_rhs=flip)
        )

    def wide(x: Any) -> np.ndarray:
        return np.asarray(x if isinstance(x, jax.Array) else dequantize(x)).astype(np.float64)

    def check(out: Any) -> float:
        ends = np.cumsum(sizes)
        if which == "d_rhs":
            group = int(np.argmax(sizes))
            rows = slice(int(ends[group] - sizes[group]), int(ends[group]))
            want = wide(x[:32])[:, rows] @ wide(y[:32])[:, rows].T
            got = np.asarray(out[group, :32, :32]).astype(np.float64)
        else:
            rows = np.random.default_rng(0).integers(0, m, ROWS)
            group = np.searchsorted(ends, rows, side="right")
            some = np.asarray((dequantize(x) if left else x)[rows]).astype(np.float64)
            if flip:
                w = np.asarray(jnp.asarray(_head(y))[group, :32]).astype(np.float64)  # [rows, 32, k]
                want = np.einsum("rk,rnk->rn", some, w)
            else:
                want = np.einsum("rk,rkn->rn", some, np.asarray(y[group, :, :32]).astype(np.float64))
            got = np.asarray(out[rows, :32]).astype(np.float64)
        return float(np.linalg.norm(got - want) / np.linalg.norm(want))

    return JaxCall(fn, (x, y, sizes)).compiled(), check


def _head(y: Any) -> Any:
    """The first columns of weights [g, n, k], as what they stand for."""
    import jax

    from trencadis.quant import dequantize

    if isinstance(y, jax.Array):
        return y[:, :32]
    return jax.jit(lambda y: dequantize(y)[:, :32])(y)


if __name__ == "__main__":
    main()
