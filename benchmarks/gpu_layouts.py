"""Layouts of the GPU kernels, timed one by one: what to look at before the choice in `backends/gpu/choose.py` changes.

    python -m benchmarks.gpu_layouts --problems qwen3-30b-a3b --passes d_rhs --layouts "" "stages=3 store_buffers=4"

A layout is a set of fields that differ from those the plan would choose; the empty one is that choice. Cases run in a
child process that is ended when it says nothing for a while: a kernel that waits for itself must not keep the card.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import queue
import statistics
import subprocess
import sys
import threading
from typing import Any

from benchmarks.problems import PASSES, PROBLEMS, BenchProblem
from benchmarks.timing import TIMED, WARM

# dtypes of the operands, and whether weights are stored with the axis of the sum last
KINDS = {
    "bf16": ("bfloat16", "bfloat16", False),
    "e4m3": ("float8_e4m3fn", "float8_e4m3fn", True),
    "deepseek": ("float8_e4m3fn", "float8_e4m3fn", True),
    "int8": ("int8", "int8", True),
    "w-int8": ("bfloat16", "int8", True),
    "w-int8-kn": ("bfloat16", "int8", False),
    "w-e4m3": ("bfloat16", "float8_e4m3fn", True),
    "w-int4": ("bfloat16", "int4", True),
}
SILENCE_S = 30  # a compile takes about three seconds, a measurement less than one


def main() -> None:
    """Time each layout on each pass of each problem."""
    args = _parse()
    cases = [
        (problem, each, fields)
        for problem in args.problems
        for each in ("dense", *args.passes)
        for fields in (args.layouts if each != "dense" else [""])
    ]
    if args.child is not None:
        for i, case in enumerate(cases[args.child :], start=args.child):
            print(f"case {i}", flush=True)
            print(json.dumps(_measure(*case, args.kind)), flush=True)
        return
    results = _watch(len(cases))
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(results, indent=1))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--problems", nargs="+", required=True, choices=PROBLEMS, metavar="NAME", help="names, as in problems.py"
    )
    parser.add_argument("--passes", nargs="+", default=list(PASSES), choices=PASSES)
    parser.add_argument("--kind", default="bf16", choices=KINDS, help="dtypes of the operands; bf16 has no scales")
    parser.add_argument("--layouts", nargs="+", default=[""], help='e.g. "block_m=128 block_n=256 raster_group=16"')
    parser.add_argument("--json", help="where to write the results")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def _watch(cases: int) -> list[dict[str, Any]]:
    """Run the cases in children; go on behind the one in which a child hangs or dies."""
    results: list[dict[str, Any]] = []
    at = 0
    while at < cases:
        command = [sys.executable, "-u", "-m", "benchmarks.gpu_layouts", *sys.argv[1:], "--child", str(at)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_read, args=(child, lines), daemon=True).start()
        while (line := _next(lines)) is not None:
            if line.startswith("case "):
                at = int(line.split()[1])
            elif line.startswith("{"):
                results.append(json.loads(line))
                print(_row(results[-1]), flush=True)
        child.kill()
        if child.wait() == 0:
            break
        print(f"case {at} hung or died", flush=True)
        at += 1
    return results


def _read(child: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        lines.put(line.strip())
    child.wait()
    lines.put(None)


def _next(lines: queue.Queue[str | None]) -> str | None:
    try:
        return lines.get(timeout=SILENCE_S)
    except queue.Empty:
        return None


def _row(result: dict[str, Any]) -> str:
    name = f"{result['problem']:<18}{result['pass']:<9}{result['layout']:<44}"
    if "error" in result:
        return f"{name}{result['error']}"
    apart = f"  apart by {result['apart']:.1e}" if result["apart"] else ""
    return f"{name}{result['ms']:9.4f} ms {result['tflops']:7.1f} TFLOP/s{apart}"


def _measure(name: str, which: str, fields: str, kind: str) -> dict[str, Any]:
    """One case, in the child."""
    problem = PROBLEMS[name]
    try:
        call, operands, layout = _dense(problem) if which == "dense" else _kernel(problem, which, fields, kind)
        milliseconds = _burst(call, operands)
        apart = _apart((name, which), call(*operands))
    except Exception as error:  # the next case may do
        return {"problem": name, "pass": which, "layout": fields, "error": f"{type(error).__name__}: {error}"[:300]}
    tflops = problem.flops / milliseconds / 1e9
    figures = {"ms": milliseconds, "tflops": tflops, "apart": apart}
    return {"problem": name, "pass": which, "layout": fields or layout, **figures}


def _apart(case: tuple[str, str], result: Any) -> float:
    """How far a result is from that of the first layout of its case, which is kept."""
    import jax
    import jax.numpy as jnp

    if case not in _first:
        _first.clear()
        _first[case] = result
    norms = jax.jit(lambda a, b: (jnp.linalg.norm((a - b).ravel()), jnp.linalg.norm(b.ravel())))
    difference, whole = norms(result.astype(jnp.float32), _first[case].astype(jnp.float32))
    return float(difference / whole)


_first: dict[tuple[str, str], Any] = {}


def _burst(call: Any, operands: Any) -> float:
    import jax
    from jax.experimental.mosaic.gpu import profiler

    for _ in range(WARM):
        jax.block_until_ready(call(*operands))
    _, times = profiler.measure(call, iterations=TIMED)(*operands)
    return statistics.median(times)


def _random(*arrays: tuple[tuple[int, ...], str]) -> Any:
    import jax
    import jax.numpy as jnp

    def normal(key: Any, shape: tuple[int, ...], dtype: str) -> Any:
        x = jax.random.normal(key, shape, jnp.bfloat16)
        return (x * {"int8": 30, "int4": 2}.get(dtype, 1)).astype(dtype)

    make = jax.jit(normal, static_argnums=(1, 2))
    return [make(jax.random.key(i), *array) for i, array in enumerate(arrays)]


def _dense(problem: BenchProblem) -> tuple[Any, Any, str]:
    import jax

    return (
        jax.jit(lambda a, b: a @ b),
        _random(((problem.m, problem.k), "bfloat16"), ((problem.k, problem.n), "bfloat16")),
        "cuBLAS",
    )


def _kernel(problem: BenchProblem, which: str, fields: str, kind: str) -> tuple[Any, Any, str]:
    import jax
    import jax.numpy as jnp

    from trencadis.backends.gpu import execute
    from trencadis.backends.gpu.choose import choose
    from trencadis.core.devices import card_for
    from trencadis.core.epilogue import Epilogue
    from trencadis.core.problem import Form, Problem
    from trencadis.core.target import Target

    card = card_for(Target.of(jax.devices()[0]))
    if card is None:
        raise RuntimeError(f"want a Hopper GPU; got {jax.devices()[0].device_kind}")
    k, n = (problem.n, problem.k) if which == "d_lhs" else (problem.k, problem.n)
    lhs, rhs, last = KINDS[kind]
    narrow = lhs == rhs != "bfloat16"
    asked = Problem(
        form=Form.CONTRACTION if which == "d_rhs" else Form.ROWS,
        m=problem.m, k=k, n=n, groups=problem.g, local_groups=problem.g,
        lhs=jnp.dtype(lhs), rhs=jnp.dtype(rhs), out=jnp.dtype(jnp.bfloat16),
        transpose_rhs=which != "d_rhs" and (which == "d_lhs" or last), transpose_lhs=which == "d_rhs" and narrow,
        epilogue=Epilogue(by_row=narrow, by_column=kind != "bf16", blocks=128 if kind == "deepseek" else 0),
    )  # fmt: skip
    changes = {key: int(value) for key, value in (field.split("=") for field in fields.split())}
    layout = choose(asked, card).replace(**changes)
    sizes = jnp.asarray(problem.group_sizes()).reshape(1, -1)
    turned = which == "d_rhs" and narrow
    right = asked.rhs_shape[::-1] if turned else asked.rhs_shape
    operands = [*_random((asked.lhs_shape, lhs), (right, rhs)), sizes, jnp.zeros((1,), jnp.int32)]
    down = (problem.g, k) if which == "d_rhs" else (problem.m,)
    across = (problem.g, n)
    if asked.epilogue.blocks:
        down, across = (problem.m, -(-k // 128)), (problem.g, -(-k // 128), -(-n // 128))
    operands += [jnp.full(down, 0.5)] if asked.epilogue.by_row else []
    operands += [jnp.full(across, 0.5)] if asked.epilogue.by_column else []

    def call(x: Any, y: Any, *rest: Any) -> Any:
        return execute(asked, layout, x, y.mT if turned else y, *rest)

    return jax.jit(call), operands, str(layout)


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    main()
