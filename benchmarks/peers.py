"""The contenders behind one interface: what a user could write instead of a call of trencadis.

Each takes the same operands and gives the same result, in the dtype of the operands, in three passes:

    forward   lhs [m, k] x rhs [g, k, n] -> [m, n]
    d_lhs     ct [m, n] x rhs [g, k, n] -> [m, k]       rhs is contracted along n
    d_rhs     lhs [m, k] x ct [m, n] -> [g, k, n]       lhs as training has it, not transposed

Some have a fourth, `step`: the three results of one call, by autodiff where there is any.

A contender that cannot run says why. Each is written the way its own users would write it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import trencadis
from benchmarks.problems import PASSES, STEP, BenchProblem, known

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
MOST_TEMP = 6 << 30  # bytes of temporary memory that a contender may need


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operands:
    """The arrays of one problem in one dtype."""

    problem: BenchProblem
    lhs: jax.Array  # [m, k]
    rhs: jax.Array  # [g, k, n]
    ct: jax.Array  # [m, n]: the cotangent of the result
    sizes: np.ndarray  # [g]

    @property
    def dtype(self) -> Any:
        return self.lhs.dtype

    def host(self, *names: str) -> list[np.ndarray]:
        """Some of the arrays as numpy arrays; on a CPU they share memory."""
        return [np.asarray(getattr(self, name)) for name in names]


def operands(problem: BenchProblem, dtype: str) -> Operands:
    """Standard normal operands, the same for every contender."""
    keys = jax.random.split(jax.random.key(problem.seed), 3)
    m, k, n, g = problem.m, problem.k, problem.n, problem.g
    lhs, rhs, ct = (
        jax.random.normal(key, shape, DTYPES[dtype])
        for key, shape in zip(keys, ((m, k), (g, k, n), (m, n)), strict=True)
    )
    return Operands(problem=problem, lhs=lhs, rhs=rhs, ct=ct, sizes=problem.group_sizes())


# ---------------------------------------------------------------------------------------------------------------------
# Calls


@dataclasses.dataclass(frozen=True)
class JaxCall:
    """A jitted function with its arguments; a call waits for the result."""

    fn: Any
    args: tuple[Any, ...]

    def __call__(self) -> Any:
        return jax.block_until_ready(self.fn(*self.args))

    def compiled(self) -> JaxCall:
        """The same call with the function compiled."""
        return self if hasattr(self.fn, "memory_analysis") else JaxCall(self.fn.lower(*self.args).compile(), self.args)

    def memory(self) -> dict[str, int] | None:
        """The bytes of arguments, result and temporaries, as the compiler counts them; None where it does not."""
        found = self.compiled().fn.memory_analysis()
        if found is None:
            return None
        return {
            "arguments": found.argument_size_in_bytes,
            "result": found.output_size_in_bytes,
            "temporary": found.temp_size_in_bytes,
        }


@dataclasses.dataclass(frozen=True)
class HostCall:
    """A plain function with numpy arrays as its arguments."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]

    def __call__(self) -> Any:
        return self.fn(*self.args)


Call = JaxCall | HostCall


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer:
    """A contender: `prepare(operands, pass)` gives the call; `absent(operands)` says why it cannot run here."""

    name: str
    what: str
    prepare: Callable[[Operands, str], Call]
    absent: Callable[[Operands], str | None] = lambda _: None
    one_group: bool = False  # a dense matmul of the same FLOPs: rhs is one matrix
    passes: tuple[str, ...] = PASSES


# ---------------------------------------------------------------------------------------------------------------------
# Contenders


def _ours(x: Operands, which: str, backend: str | None = None) -> Call:
    dtype = x.dtype  # the functions must not keep the arrays alive

    def forward(lhs: Any, rhs: Any, sizes: Any) -> Any:
        return trencadis.grouped_matmul(lhs, rhs, sizes, dtype, backend=backend)

    def d_lhs(ct: Any, rhs: Any, sizes: Any) -> Any:
        return trencadis.grouped_matmul(ct, rhs, sizes, dtype, transpose_rhs=True, backend=backend)

    def d_rhs(lhs: Any, ct: Any, sizes: Any) -> Any:
        return trencadis.transposed_grouped_matmul(lhs, ct, sizes, dtype, transpose_lhs=True, backend=backend)

    if which == STEP:
        return _step(x, forward, x.rhs)
    return _jitted(x, which, forward, d_lhs, d_rhs)


def _step(x: Operands, forward: Callable[..., Any], rhs: jax.Array) -> JaxCall:
    """The result of a function of lhs, rhs and the sizes, and its gradients, in one call."""

    def step(lhs: Any, rhs: Any, ct: Any, sizes: Any) -> Any:
        out, pullback = jax.vjp(lambda a, b: forward(a, b, sizes), lhs, rhs)
        return out, *pullback(ct)

    return JaxCall(jax.jit(step), (x.lhs, rhs, x.ct, jnp.asarray(x.sizes)))


def _triton(x: Operands, which: str) -> Call:
    return _ours(x, which, "triton")


def _triton_absent(x: Operands) -> str | None:
    del x
    if jax.default_backend() != "gpu":
        return f"is compiled for GPUs only, and this is {jax.default_backend()}"
    return None if importlib.util.find_spec("triton") else "is not installed"


def _xla(x: Operands, which: str) -> Call:
    return _ours(x, which, "xla")


def _xla_absent(x: Operands) -> str | None:
    del x
    if jax.default_backend() != "cpu":
        return f"stands beside native kernels of CPUs only, and this is {jax.default_backend()}"
    return None if importlib.util.find_spec("trencadis_cpu") else "is ours, without native kernels"


# the three passes as lax's own derivative of ragged_dot has them
LAX_DIMS = {
    "forward": lax.RaggedDotDimensionNumbers((([1], [1]), ([], [])), [0], [0]),
    "d_lhs": lax.RaggedDotDimensionNumbers((([1], [2]), ([], [])), [0], [0]),
    "d_rhs": lax.RaggedDotDimensionNumbers((([0], [0]), ([], [])), [0], []),
}


def _ragged_dot_like(general: Callable[..., Any], x: Operands, which: str) -> Call:
    dtype = x.dtype

    def run(a: Any, b: Any, sizes: Any) -> Any:
        return general(a, b, sizes, LAX_DIMS[which], preferred_element_type=dtype)

    return _jitted(x, which, run, run, run)


def _lax(x: Operands, which: str) -> Call:
    if which == STEP:
        dtype = x.dtype
        return _step(x, lambda a, b, sizes: lax.ragged_dot(a, b, sizes, preferred_element_type=dtype), x.rhs)
    return _ragged_dot_like(lax.ragged_dot_general, x, which)


def _lax_absent(x: Operands) -> str | None:
    temp = x.problem.g * x.problem.m * max(x.problem.k, x.problem.n) * x.dtype.itemsize
    if jax.default_backend() == "cpu" and temp > MOST_TEMP:
        return f"makes a g-fold copy of its rows: {temp / 2**30:.0f} GiB of temporary memory"
    return None


def _jitted(x: Operands, which: str, forward: Any, d_lhs: Any, d_rhs: Any) -> JaxCall:
    sizes = jnp.asarray(x.sizes)
    fn, args = {
        "forward": (forward, (x.lhs, x.rhs, sizes)),
        "d_lhs": (d_lhs, (x.ct, x.rhs, sizes)),
        "d_rhs": (d_rhs, (x.lhs, x.ct, sizes)),
    }[which]
    return JaxCall(jax.jit(fn), args)


def numpy_rows(lhs: np.ndarray, rhs: np.ndarray, sizes: list[int], transpose_rhs: bool) -> np.ndarray:
    """lhs [m, k] x rhs [g, k, n] -> [m, n], one matmul per group; bf16 goes through float32, which BLAS knows."""
    out = np.empty((lhs.shape[0], rhs.shape[1 if transpose_rhs else 2]), lhs.dtype)
    narrow, row = lhs.dtype.itemsize < 4, 0
    for w, size in zip(rhs, sizes, strict=True):
        if size:
            mine, w = slice(row, row + size), w.T if transpose_rhs else w
            if narrow:
                out[mine] = lhs[mine].astype(np.float32) @ w.astype(np.float32)
            else:
                np.matmul(lhs[mine], w, out=out[mine])
        row += size
    out[row:] = 0
    return out


def numpy_contraction(lhs: np.ndarray, ct: np.ndarray, sizes: list[int]) -> np.ndarray:
    """lhs [m, k] x ct [m, n] -> [g, k, n], one matmul per group."""
    out = np.empty((len(sizes), lhs.shape[1], ct.shape[1]), lhs.dtype)
    narrow, row = lhs.dtype.itemsize < 4, 0
    for i, size in enumerate(sizes):
        x, y = lhs[row : row + size], ct[row : row + size]
        if not size:
            out[i] = 0
        elif narrow:
            out[i] = x.astype(np.float32).T @ y.astype(np.float32)
        else:
            np.matmul(x.T, y, out=out[i])
        row += size
    return out


def numpy_step(
    lhs: np.ndarray, rhs: np.ndarray, ct: np.ndarray, sizes: list[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The result and both gradients, one matmul per group and result."""
    return numpy_rows(lhs, rhs, sizes, False), numpy_rows(ct, rhs, sizes, True), numpy_contraction(lhs, ct, sizes)


def _numpy(x: Operands, which: str) -> Call:
    sizes = x.sizes.tolist()
    if which == STEP:
        return HostCall(numpy_step, (*x.host("lhs", "rhs", "ct"), sizes))
    if which == "forward":
        return HostCall(numpy_rows, (*x.host("lhs", "rhs"), sizes, False))
    if which == "d_lhs":
        return HostCall(numpy_rows, (*x.host("ct", "rhs"), sizes, True))
    return HostCall(numpy_contraction, (*x.host("lhs", "ct"), sizes))


def _dense(x: Operands, which: str) -> Call:
    dtype = x.dtype
    if which == STEP:
        return _step(x, lambda a, w, sizes: jnp.dot(a, w, preferred_element_type=dtype), x.rhs[0])
    fn, args = {
        "forward": (lambda a, w: jnp.dot(a, w, preferred_element_type=dtype), (x.lhs, x.rhs[0])),
        "d_lhs": (lambda c, w: jnp.dot(c, w.T, preferred_element_type=dtype), (x.ct, x.rhs[0])),
        "d_rhs": (lambda a, c: jnp.dot(a.T, c, preferred_element_type=dtype), (x.lhs, x.ct)),
    }[which]
    # cuBLAS only: XLA would autotune a Triton kernel as well, for a quarter of a minute
    options: Any = {"xla_gpu_enable_triton_gemm": False} if jax.default_backend() == "gpu" else None
    return JaxCall(jax.jit(fn, compiler_options=options), args)


def _megablox(x: Operands, which: str) -> Call:
    from jax.experimental.pallas.ops.tpu.megablox import gmm as megablox

    kernels = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")
    # tiles near the best of a search on v5e, v6e and v7x; the default of 128 cubed is 5 to 30 times slower
    k, n = (x.problem.n, x.problem.k) if which == "d_lhs" else (x.problem.k, x.problem.n)
    rows, summed = (256, min(k, 4096), min(n, 1024)), (256, min(k, 1024), min(n, 1024))
    return _jitted(
        x,
        which,
        lambda a, w, s: megablox(a, w, s, x.dtype, rows),
        lambda c, w, s: megablox(c, w, s, x.dtype, rows, transpose_rhs=True),
        lambda a, c, s: kernels.tgmm(a.T, c, s, x.dtype, summed),
    )


def _megablox_absent(x: Operands) -> str | None:
    if jax.default_backend() != "tpu":
        return f"is compiled for TPU only, and this is {jax.default_backend()}"
    return None if x.problem.m % 256 == 0 else f"wants m to be a multiple of its tile, and m is {x.problem.m}"


def _tokamax(x: Operands, which: str) -> Call:
    import tokamax

    return _ragged_dot_like(tokamax.ragged_dot_general, x, which)


def _tokamax_absent(x: Operands) -> str | None:
    del x
    if importlib.util.find_spec("tokamax") is None:
        return "is not installed"
    return "has no CPU kernel: there it is lax.ragged_dot" if jax.default_backend() == "cpu" else None


def _mgpu(grid_block_n: int) -> Callable[[Operands, str], Call]:
    """JAX's example kernels for Hopper with the best tiles of a search: 128 x 128 x 64 in four stages."""

    def block(size: int) -> int:
        return 128 if size % 128 == 0 else 64  # the contraction wants a divisor

    def prepare(x: Operands, which: str) -> Call:
        rows, summed = _mgpu_kernels()
        k, n = x.problem.k, x.problem.n
        how = {"block_k": 64, "max_concurrent_steps": 4, "grid_block_n": grid_block_n}
        if which == "d_rhs":
            how |= {"block_m": block(k), "block_n": block(n)}
            return _jitted(x, which, None, None, lambda a, c, s: summed(a, c, group_sizes=s, **how))
        how |= {"block_m": 128, "block_n": 128}
        return _jitted(
            x,
            which,
            lambda a, w, s: rows(a, w, group_sizes=s, **how),
            lambda c, w, s: rows(c, w, group_sizes=s, transpose_rhs=True, **how),
            None,
        )

    return prepare


def _mgpu_kernels() -> tuple[Any, Any]:
    """The functions `ragged_dot` and `transposed_ragged_dot` of JAX's examples."""
    if importlib.util.find_spec("absl") is None:  # the examples import jax's test tools without using them
        sys.modules.setdefault("jax._src.test_util", types.ModuleType("jax._src.test_util"))
    room = "jax.experimental.pallas.ops.gpu"
    rows = importlib.import_module(f"{room}.ragged_dot_mgpu")
    summed = importlib.import_module(f"{room}.transposed_ragged_dot_mgpu")
    return rows.ragged_dot, summed.transposed_ragged_dot


def _mgpu_absent(x: Operands) -> str | None:
    if jax.default_backend() != "gpu":
        return f"is compiled for Hopper GPUs only, and this is {jax.default_backend()}"
    return None if x.dtype == jnp.bfloat16 else "is timed in bf16 only"


def _torch(x: Operands, which: str) -> Call:
    raise NotImplementedError("torch runs in a process of its own: see torch_peer.py")


def _torch_absent(x: Operands) -> str | None:
    del x
    return "is timed by `python -m benchmarks gpu` only, in bf16"


def _host_absent(x: Operands) -> str | None:
    del x
    return None if jax.default_backend() == "cpu" else "runs on the host, not on the device"


ALL = (*PASSES, STEP)
PEERS = {
    peer.name: peer
    for peer in (
        Peer(name="ours", what="trencadis, default settings", prepare=_ours, passes=ALL),
        Peer(name="triton", what='trencadis, backend="triton"', prepare=_triton, absent=_triton_absent),
        Peer(name="xla", what='trencadis, backend="xla"', prepare=_xla, absent=_xla_absent, passes=ALL),
        Peer(name="numpy", what="a loop over groups of numpy matmuls", prepare=_numpy, absent=_host_absent, passes=ALL),
        Peer(name="dense", what="one jnp matmul of the same FLOPs", prepare=_dense, one_group=True, passes=ALL),
        Peer(name="ragged_dot", what="jax.lax.ragged_dot", prepare=_lax, absent=_lax_absent, passes=ALL),
        Peer(name="megablox", what="jax's megablox, tiled", prepare=_megablox, absent=_megablox_absent),
        Peer(name="tokamax", what="tokamax.ragged_dot, as shipped", prepare=_tokamax, absent=_tokamax_absent),
        Peer(name="mgpu8", what="JAX's Hopper examples, grid_block_n=8", prepare=_mgpu(8), absent=_mgpu_absent),
        Peer(name="mgpu4", what="JAX's Hopper examples, grid_block_n=4", prepare=_mgpu(4), absent=_mgpu_absent),
        Peer(name="torch", what="torch grouped_mm", prepare=_torch, absent=_torch_absent),
    )
}


FAMILIES = {"mgpu": ("mgpu8", "mgpu4")}


def select(names: str | None, always: tuple[str, ...] = ("ours",)) -> list[Peer]:
    """The peers named (`"numpy,dense"`), after those that always take part; None is all of them."""
    asked = list(PEERS) if names is None else [one for name in names.split(",") for one in FAMILIES.get(name, (name,))]
    return [PEERS[name] for name in dict.fromkeys([*always, *known("peers", asked, PEERS)])]
