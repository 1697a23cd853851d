"""Quantized operands by the name of their format: calls of the public API on them, timed and checked.

Operands are quantized beforehand. By default those of 8 bits are stored with the contracted axis last, as tensor cores
take them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import trencadis as tr
from benchmarks import oracle, processes
from benchmarks.measure import ROOM
from benchmarks.peers import JaxCall
from benchmarks.problems import PROBLEMS, BenchProblem
from benchmarks.report import Record
from benchmarks.timing import burst, device_clock, reason_of
from trencadis.quant import prepare, quantize

Quantization = tuple[str, Any] | None  # a format and what shares a scale; None is bfloat16
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


@dataclasses.dataclass(frozen=True)
class Operands:
    """How lhs and rhs are quantized; the dtype of one that is not, and of the result; and how weights are stored."""

    lhs: Quantization
    rhs: Quantization
    dtype: str = "bfloat16"
    k_last: bool = True  # weights are stored [g, n, k]; otherwise [g, k, n], as those of 16 bits always are
    interleave: bool | None = None  # how `prepare` is asked to store weights beside quantized rows


FORMATS = {
    "bf16": Operands(None, None),
    "e4m3": Operands((E4M3, "row"), (E4M3, "column")),
    "e5m2": Operands((E5M2, "row"), (E5M2, "column")),
    "int8": Operands(("int8", "row"), ("int8", "column")),
    "deepseek": Operands((E4M3, (1, 128)), (E4M3, (1, 128, 128))),
    "w-int8": Operands(None, ("int8", "column")),
    "w-e4m3": Operands(None, (E4M3, "column")),
    "w-int4": Operands(None, ("int4", "column")),
    # weights with scales along k
    "w-int4-128": Operands(None, ("int4", (1, 128, 1))),
    "w-int8-128": Operands(None, ("int8", (1, 128, 1))),
    "w-e4m3-128x128": Operands(None, (E4M3, (1, 128, 128))),
    "w-mxfp4": Operands(None, ("mxfp4", (1, 32, 1))),
    "w-mxfp8": Operands(None, ("mxfp8", (1, 32, 1))),
    "w-nvfp4": Operands(None, ("nvfp4", (1, 16, 1))),
}
ROWS_128 = (E4M3, (1, 128))  # rows as in DeepSeek
PAIRS = {  # both operands quantized, in different formats or with scales along k
    "mxfp8": Operands(("mxfp8", (1, 32)), ("mxfp8", (1, 32, 1))),
    "mxfp8-mxfp4": Operands(("mxfp8", (1, 32)), ("mxfp4", (1, 32, 1))),
    "e4m3-nvfp4": Operands((E4M3, "row"), ("nvfp4", (1, 16, 1))),
    "e4m3-128": Operands(ROWS_128, (E4M3, "column")),
    "e4m3-64": Operands((E4M3, (1, 64)), (E4M3, "column")),
    "e4m3-32": Operands((E4M3, (1, 32)), (E4M3, "column")),
    "e4m3-128-e4m3-128": Operands(ROWS_128, (E4M3, (1, 128, 1))),
    "e4m3-128-int8-128": Operands(ROWS_128, ("int8", (1, 128, 1)), interleave=True),
    "e4m3-128-int4-128": Operands(ROWS_128, ("int4", (1, 128, 1)), interleave=False),
    "int8-int8-128": Operands(("int8", "row"), ("int8", (1, 128, 1))),
    "int8-int4-128": Operands(("int8", "row"), ("int4", (1, 128, 1)), interleave=False),
    "int8-int4": Operands(("int8", "row"), ("int4", "column")),
}
MORE_WEIGHTS = {
    "w-int4-32": Operands(None, ("int4", (1, 32, 1))),
    "w-int8-32": Operands(None, ("int8", (1, 32, 1))),
    "w-e4m3-32": Operands(None, (E4M3, (1, 32, 1))),
}
FLOAT16 = ("w-int8", "w-int4", "w-int4-128", "w-int8-128", "w-e4m3-128x128", "w-mxfp4", "w-mxfp8", "w-nvfp4")
AS_THEY_LIE = ("e4m3", "int8", "w-int8", "w-int8-128", "w-int4-128", "e4m3-128")
MORE = {  # measured where they are named
    **PAIRS,
    **MORE_WEIGHTS,
    "f16": Operands(None, None, "float16"),
    **{f"f16-{name}": dataclasses.replace(FORMATS[name], dtype="float16") for name in FLOAT16},
    **{f"{name}-kn": dataclasses.replace((FORMATS | PAIRS)[name], k_last=False) for name in AS_THEY_LIE},
}
FORMATS |= MORE
BOTH = ("e4m3", "e5m2", "int8")  # formats of both operands with all three passes
ALONG_K = ("w-int4-128", "w-int8-128", "w-e4m3-128x128", "w-mxfp4", "w-mxfp8", "w-nvfp4")
GPU = ("bf16", "e4m3", "int8", "deepseek", "w-int8", "w-e4m3", "w-int4", *ALONG_K)
CPU = ("bf16", "w-int8", "w-e4m3", "w-int4")
TPU = ("bf16", "int8", "e4m3", "e5m2", "w-int8", "w-e4m3", "w-int4", *ALONG_K, *MORE_WEIGHTS)


def has_pass(format: str, which: str) -> bool:
    """True if the format is measured in this pass: weight-only formats and blocks are in the forward pass alone."""
    return which == "forward" or format in ("bf16", *BOTH)


# ---------------------------------------------------------------------------------------------------------------------
# On a device

Ready = Callable[[], tuple[JaxCall, oracle.Answer]]
Case = tuple[str, str, str]  # problem, pass and format


def prepared(problem: BenchProblem, which: str, format: str, *, k_last: bool = True) -> Ready:
    """Compile a call with a 16-bit result; the function that comes back makes its operands and the right answer."""
    sizes = problem.group_sizes()
    m, g = problem.m, problem.g
    k, n = (problem.n, problem.k) if which == "d_lhs" else (problem.k, problem.n)
    how = FORMATS[format]
    transpose = which == "d_lhs" or (k_last and how.k_last and how.rhs is not None)

    def lhs() -> Any:
        return _operand(0, (k, m) if which == "d_rhs" else (m, k), how.lhs, how.dtype)

    def rhs() -> Any:
        if which == "d_rhs":  # [n, m]: both operands are quantized along m
            return _operand(1, (n, m), how.lhs)
        weights = _operand(1, (g, k, n), how.rhs, how.dtype)
        if how.rhs is not None:
            weights = prepare(weights, contracting=-2 if transpose else -1, interleave=_interleave(how, transpose))
        return weights.mT if transpose else weights

    def call(x: Any, y: Any, group_sizes: Any) -> jax.Array:
        if which == "d_rhs":
            return tr.transposed_grouped_matmul(x, y.mT, group_sizes, jnp.bfloat16)
        return tr.grouped_matmul(x, y, group_sizes, how.dtype, transpose_rhs=transpose)

    makers = [jax.jit(make).lower().compile() for make in (lhs, rhs)]
    shapes = [jax.eval_shape(make) for make in (lhs, rhs)]
    compiled = jax.jit(call).lower(*shapes, jax.ShapeDtypeStruct((g,), jnp.int32)).compile()

    def ready() -> tuple[JaxCall, oracle.Answer]:
        x, y = (make() for make in makers)
        if which == "d_rhs":
            right = oracle.contraction(x.mT, y.mT, sizes)
        else:
            right = oracle.rows(x, y, sizes, transpose_rhs=transpose)
        return JaxCall(compiled, (x, y, jnp.asarray(sizes))), right

    return ready


def _interleave(how: Operands, k_last: bool) -> bool | None:
    """How to store weights: on a GPU those that a kernel upcasts interleaved, others as `prepare` does by default."""
    if not k_last:
        return False
    return (True if how.lhs is None else how.interleave) if jax.default_backend() == "gpu" else None


def _operand(seed: int, shape: tuple[int, ...], how: Quantization, dtype: Any = jnp.bfloat16) -> Any:
    x = jax.random.normal(jax.random.split(jax.random.key(0))[seed], shape, dtype)
    return x if how is None else quantize(x, *how, contracting=-1)  # stored as it comes


def measure(cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Yield the record of each case as JSON: a job for a process of its own, which frees its GPU memory at the end."""
    for case in cases:
        yield _record(*case).to_json()


def _record(problem: str, which: str, format: str) -> Record:
    record = Record(problem=problem, dtype=format, which=which, limit=ROOM * oracle.limit(jnp.bfloat16))
    try:
        ready = prepared(PROBLEMS[problem], which, format)
        with processes.alone():
            call, right = ready()
            return timed(dataclasses.replace(record, error=oracle.error(call(), right)), call)
    except Exception as failure:  # the other formats are worth measuring
        return dataclasses.replace(record, why=reason_of(failure))


def timed(record: Record, call: JaxCall) -> Record:
    """The record with the time of a burst, or with the reason why the result is wrong."""
    if record.error is None or record.limit is None or not record.error <= record.limit:
        return dataclasses.replace(record, why=f"wrong: relative error {record.error:.1e}")
    return dataclasses.replace(record, time=burst(call, device_clock(jax.default_backend())))


def records(cases: Sequence[Case], jobs: int) -> Iterator[Record]:
    """Yield the record of each case. As many jobs compile at a time, and they are timed one by one."""

    def task(case: Case) -> Record:
        ((_, found, why),) = processes.each("benchmarks.formats:measure", [case], child=jobs > 0)
        name, which, format = case
        return Record.from_json(found) if found else Record(problem=name, dtype=format, which=which, why=why)

    yield from processes.in_parallel([functools.partial(task, case) for case in cases], workers=jobs)


# ---------------------------------------------------------------------------------------------------------------------
# For the TPU compiler


def scheduled(problem: BenchProblem, which: str, format: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A call with a bfloat16 result and the shapes of its operands; weights are stored [g, k, n]."""
    m, k, n, g = problem.m, problem.k, problem.n, problem.g
    how = FORMATS[format]
    shapes = ((m, k), (m, n)) if which == "d_rhs" else ((m, k), (g, k, n))
    lhs, rhs = (
        # along m in d_rhs, where lhs and rhs are [m, k] and [m, n]
        _abstract(shape, each and (each[0], (m, 1) if which == "d_rhs" else each[1]))
        for shape, each in zip(shapes, (how.lhs, how.rhs), strict=True)
    )

    def call(x: Any, y: Any, sizes: Any) -> jax.Array:
        if which == "d_rhs":
            return tr.transposed_grouped_matmul(x, y, sizes, jnp.bfloat16, transpose_lhs=True, backend="tpu")
        return tr.grouped_matmul(x, y, sizes, jnp.bfloat16, backend="tpu")

    return call, (lhs, rhs, problem.group_sizes())


def _abstract(shape: tuple[int, ...], how: Quantization) -> Any:
    return jax.eval_shape(functools.partial(_operand, 0, shape, how))
