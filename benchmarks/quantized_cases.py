"""The quantized cases of `check`: group sizes that are no multiples of tiles, NaN in unowned rows, a window, a bias.

On a CPU the GPU kernels run in the interpreter, on smaller operands.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import trencadis as tr
from benchmarks import oracle
from trencadis.quant import Scaled, prepare, quantize

ALONG_K = (
    ("int4", 128), ("int4", 64), ("int8", 128), ("float8_e4m3fn", 128), ("float8_e5m2", 256),
    ("mxfp4", 32), ("mxfp8", 32), ("nvfp4", 16),
)  # fmt: skip
E4M3 = "float8_e4m3fn"
# both operands quantized, each with a format and what shares a scale
PAIRS = {
    "float8_e4m3fn per 128 of k x float8_e4m3fn": ((E4M3, (1, 128)), (E4M3, "column")),
    "float8_e4m3fn per 64 of k x float8_e4m3fn": ((E4M3, (1, 64)), (E4M3, "column")),
    "float8_e4m3fn per 32 of k x float8_e4m3fn": ((E4M3, (1, 32)), (E4M3, "column")),
    "int8 per 128 of k x int8 per 128 of k": (("int8", (1, 128)), ("int8", (1, 128, 1))),
    "float8_e4m3fn x float8_e4m3fn per 128 x 128": ((E4M3, "row"), (E4M3, (1, 128, 128))),
    "float8_e4m3fn per 128 of k x bf16": ((E4M3, (1, 128)), None),
}
UPCAST_PAIRS = {
    "mxfp8 x mxfp8": (("mxfp8", (1, 32)), ("mxfp8", (1, 32, 1))),
    "nvfp4 x mxfp4": (("nvfp4", (1, 16)), ("mxfp4", (1, 32, 1))),
    "int8 x int4": (("int8", "row"), ("int4", "column")),
    "float8_e4m3fn per 128 of k x int8 per 128 of k": ((E4M3, (1, 128)), ("int8", (1, 128, 1))),
    "float8_e4m3fn per 128 of k x int4 per 64 of k": ((E4M3, (1, 128)), ("int4", (1, 64, 1))),
    "float8_e4m3fn per 32 of k x float8_e4m3fn": ((E4M3, (1, 32)), (E4M3, "column")),
    "float8_e4m3fn per 128 of k x int4 per 128 of k": ((E4M3, (1, 128)), ("int4", (1, 128, 1))),
    "int8 x int4 per 128 of k": (("int8", "row"), ("int4", (1, 128, 1))),
    "float8_e4m3fn per 32 of k x mxfp4": ((E4M3, (1, 32)), ("mxfp4", (1, 32, 1))),
    "float8_e4m3fn per 128 of k x mxfp4": ((E4M3, (1, 128)), ("mxfp4", (1, 32, 1))),
}
FIRST, LOCAL = 1, 3  # the window: group 0 is not held here


@dataclasses.dataclass(frozen=True)
class Check:
    """A call, the error of its result against float64, and the error that rounding explains."""

    error: Callable[[], float]
    out: Any  # the result's dtype

    @property
    def limit(self) -> float:
        """The error of rounding the result, or of summing in the tensor cores."""
        return 3e-3 if np.dtype(self.out).itemsize == 2 else 1e-3


def checks(backend: str = "gpu") -> dict[str, Check]:
    """The cases by name, of the kernels of "gpu" or "triton"; their operands are made when they run."""
    backend = "triton" if backend == "triton" else "gpu"
    interpret = jax.default_backend() == "cpu"
    data = functools.cache(lambda: Data(backend, interpret=interpret))

    def check(method: str, out: Any, *how: Any) -> Check:
        return Check(lambda: getattr(data(), method)(*how, out), out)

    found: dict[str, Check] = {}
    for name in ("int8", "int4", "float8_e4m3fn", "float8_e5m2"):
        for last, out in ((True, jnp.bfloat16), (False, jnp.bfloat16), (True, jnp.float32)):
            if backend == "triton" and name == "int4" and not last:
                continue  # its kernel unpacks 4-bit weights along k alone
            found[f"bf16 x {name}, last={last}, {out.__name__}"] = check("weights", out, name, last)
        if name != "int4":
            found[f"{name} x {name}"] = check("both", jnp.bfloat16, name)
            found[f"{name} x {name}, blocks"] = check("blocks", jnp.float32, name)
            found[f"{name}, contraction"] = check("contraction", jnp.bfloat16, name)
        if not interpret:
            few = functools.partial(few_rows, backend, name, None, jnp.bfloat16)
            found[f"bf16 x {name}, many groups of few rows"] = Check(few, jnp.bfloat16)
    found["int8 x int8, last=True, int32"] = check("sums", jnp.int32, True)
    found["int8 x int8, last=False, int32"] = check("sums", jnp.int32, False)
    for name, how in _pairs(backend, interpret=interpret).items():
        found[name] = check("pair", jnp.bfloat16, *how)
    for name, length in ALONG_K:
        found[f"bf16 x {name} per {length} of k"] = check("along_k", jnp.bfloat16, name, length)
        if not interpret:
            few = functools.partial(few_rows, backend, name, length, jnp.bfloat16)
            found[f"bf16 x {name} per {length} of k, many groups of few rows"] = Check(few, jnp.bfloat16)
        if name == "int4" and backend == "gpu" and not interpret:  # scales of rows along k, in the smallest tiles
            few = functools.partial(few_rows, backend, name, length, jnp.bfloat16, (E4M3, (1, length)))
            found[f"{E4M3} x {name}, both per {length} of k, many groups of few rows"] = Check(few, jnp.bfloat16)
        if backend == "triton":  # the Hopper kernel upcasts to bfloat16 alone
            found[f"f16 x {name} per {length} of k"] = check("along_k", jnp.float32, name, length, jnp.float16)
    return found


def _pairs(backend: str, *, interpret: bool) -> dict[str, tuple[Any, ...]]:
    """Formats of both operands by name, and whether weights are stored with k last: what the kernels are checked by."""
    if backend == "triton":
        return UPCAST_PAIRS
    if interpret:
        return PAIRS
    lying = {f"{name} x {name}, last=False": ((name, "row"), (name, "column"), False) for name in ("int8", E4M3)}
    return {**PAIRS, **UPCAST_PAIRS, **lying}


class Data:
    """Normal rows x [m, k], weights w [3, k, n] and y [m, n], and calls on them."""

    def __init__(self, backend: str, *, interpret: bool) -> None:
        """Make the data: small, if the kernels are interpreted."""
        self.interpret = interpret
        self.m, self.k, self.n = (96, 192, 192) if interpret else (700, 576, 328)
        self.sizes = np.array([5, self.m // 3, 0, self.m // 2])
        low, high = int(self.sizes[0]), int(self.sizes.sum())
        self.owned = (np.arange(self.m) >= low) & (np.arange(self.m) < high)
        shapes = ((self.m, self.k), (LOCAL, self.k, self.n), (self.m, self.n))
        keys = jax.random.split(jax.random.key(0), 3)
        self.x, self.w, self.y = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
        self.how: dict[str, Any] = {"backend": backend, "interpret": interpret, "group_offset": FIRST}

    def weights(self, name: str, last: bool, out: Any) -> float:
        """The error with bfloat16 rows, NaN in unowned ones, and weights of a format."""
        rows = jnp.where(self.owned[:, None], self.x, jnp.nan).astype(jnp.bfloat16)
        return self.rows(rows, quantize(self.w, name, "column"), last, out)

    def along_k(self, name: str, length: int, *dtypes: Any) -> float:
        """The error with NaN in unowned rows and a scale for each block of k; rows are bfloat16, or as given."""
        *given, out = dtypes
        rows = jnp.where(self.owned[:, None], self.x, jnp.nan).astype(*given or (jnp.bfloat16,))
        across = 128 if name == "float8_e4m3fn" else 1
        return self.rows(rows, quantize(self.w, name, (1, length, across)), True, out)

    def both(self, name: str, out: Any) -> float:
        """The error with both operands quantized, by rows and columns."""
        return self.rows(self.spoiled(quantize(self.x, name, "row")), quantize(self.w, name, "column"), True, out)

    def sums(self, last: bool, out: Any) -> float:
        """The error of products of integers that have no scales."""
        a, b = quantize(self.x, "int8", "row").values, quantize(self.w, "int8", "column").values
        lying = b.mT if last else b
        got = tr.grouped_matmul(a, lying, self.sizes, out, transpose_rhs=last, **self.how)
        return oracle.error(got, oracle.rows(a, b, self.sizes, first=FIRST))

    def pair(self, left: Any, right: Any, *last_and_out: Any) -> float:
        """The error with both operands quantized, each in its own format and by its own blocks."""
        *last, out = last_and_out
        w = self.w.astype(jnp.bfloat16) if right is None else quantize(self.w, *right)
        return self.rows(self.spoiled(quantize(self.x, *left)), w, *last or (True,), out)

    def blocks(self, name: str, out: Any) -> float:
        """The error with both operands quantized, by blocks of 128 along k and n."""
        x, w = self.spoiled(quantize(self.x, name, (1, 128))), quantize(self.w, name, (1, 128, 128))
        return self.rows(x, w, True, out)

    def spoiled(self, q: Scaled) -> Scaled:
        """The rows with NaN in unowned ones, in the values where their format has NaN, and in the scales."""
        scale = jnp.where(self.owned[:, None], q.scale, jnp.nan).astype(q.scale.dtype)
        spoiled = q.dtype not in (jnp.int8, jnp.float4_e2m1fn)
        values = jnp.where(self.owned[:, None], q.values, jnp.nan).astype(q.dtype) if spoiled else q.values
        return Scaled(values, scale, q.format, q.block, total=q.total)

    def rows(self, a: Any, b: Any, last: bool, out: Any) -> float:
        """The error of rows times weights, plus a bias."""
        bias, b = self.y[:LOCAL], prepare(b, contracting=-2 if last else -1) if isinstance(b, Scaled) else b
        got = tr.grouped_matmul(a, b.mT if last else b, self.sizes, out, transpose_rhs=last, bias=bias, **self.how)
        return oracle.error(got, oracle.rows(a, b, self.sizes, first=FIRST, bias=bias))

    def contraction(self, name: str, out: Any) -> float:
        """The error of a contraction of two operands that are quantized along m."""
        a, b = quantize(self.x.T, name, "row"), quantize(self.y.T, name, "row")
        got = tr.transposed_grouped_matmul(a, b.mT, self.sizes, out, num_actual_groups=LOCAL, **self.how)
        return oracle.error(got, oracle.contraction(a.mT, b.mT, self.sizes, first=FIRST, local=LOCAL))


def few_rows(backend: str, name: str, length: int | None, out: Any, rows: Any = None) -> float:
    """The error of quantized weights with a few rows each: long sums, and one tile after the other without a pause.

    Scales are per column, or per column and block of k. With the latter, weights are interleaved. Rows may be quantized
    in a format and by blocks.
    """
    g, k, n = 64, 2048, 1536
    sizes = np.arange(g) % 8
    x: Any = jax.random.normal(jax.random.key(0), (int(sizes.sum()), k), jnp.bfloat16)
    x = x if rows is None else quantize(x, *rows)
    w = quantize(jax.random.normal(jax.random.key(1), (g, n, k), jnp.bfloat16), name, (1, 1, length or k))
    w = prepare(w, contracting=-1, interleave=length is not None)
    call: Callable[..., Any] = jax.jit(
        lambda x, w: tr.grouped_matmul(x, w, sizes, out, transpose_rhs=True, backend=backend)
    )
    return oracle.error(call(x, w), oracle.rows(x, w, sizes, transpose_rhs=True))
