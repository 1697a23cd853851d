"""Print the functions that a call passes from the entry point to the kernel, for the page "How it works".

python scripts/rooms.py        the block of docs/how-it-works.md; tests/test_docs.py compares the two
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

import trencadis as tr
from trencadis.core.devices import CARDS, CHIPS
from trencadis.core.jax_compat import abstract_device
from trencadis.core.plan import Refusal

sys.modules["trencadis_cpu"] = None  # type: ignore[assignment]  # the page describes machines without the native package

# the functions that hand a call from one room to the next; all others are details of a room
PATH = {
    "api.matmul": {"grouped_matmul"},
    "api.gemm": {"grouped_gemm"},
    "gemm.forms": {"gemm"},
    "gemm.lowering": {"general_product"},
    "gemm.autodiff": {"run"},
    "gemm.plan": {"plan", "run"},
    "gemm.triton": {"plan", "run"},
    "gemm.xla": {"plan", "run"},
    "quant.product": {"rows_product", "with_scales"},
    "core.arguments": {"rows_problem"},
    "core.sharded": {"run"},
    "core.autodiff": {"run"},
    "core.plan": {"plan"},
    "core.execute": {"execute"},
    "core.split": {"sums_by_parts"},
    "core.spans": {"spans", "bounds_of"},
    "backends.xla": {"plan", "run"},
    "backends.triton.bridge": {"call"},
    "backends.gpu": {"plan", "run"},
    "backends.gpu.kernel": {"call"},
    "backends.tpu": {"plan", "run"},
    "backends.tpu.kernel": {"call"},
}


def struct(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    """A stand-in for an array."""
    return jax.ShapeDtypeStruct(shape, dtype)


def quantized(x: Any, w: Any, s: Any) -> Any:
    """A product with int8 weights that have a scale for every 64 entries of k."""
    values, scale = w.astype(jnp.int8), jnp.ones((4, 2, 128))
    return tr.grouped_matmul(x, tr.quant.Scaled(values, scale, "int8", (1, 64, 1)), s)


def gemm(x: Any, w: Any, s: Any) -> Any:
    """The same product through the general entry point."""
    rows, stack = tr.GroupedTensor.ragged_rows(x, s), tr.GroupedTensor.stacked(w)
    return tr.grouped_gemm(rows, stack, contracting_dims=((1,), (1,))).data


def scores(x: Any, w: Any, s: Any) -> Any:
    """Every row with every other of its group: m and n are ragged."""
    rows, room = tr.GroupedTensor.ragged_rows(x, s), tr.GroupedTensor.fully_ragged(jnp.zeros(4096, x.dtype), s, s)
    return tr.grouped_gemm(rows, rows, contracting_dims=((1,), (1,)), out=room).data


CASES: dict[str, tuple[str, Callable[..., Any]]] = {
    "CPU": ("cpu", tr.grouped_matmul),
    "GPU": ("h200", tr.grouped_matmul),
    "TPU": ("v6e", tr.grouped_matmul),
    "CPU, quantized with scales along k": ("cpu", quantized),
    "TPU, grouped_gemm": ("v6e", gemm),
    "GPU, grouped_gemm with several ragged dimensions": ("h200", scores),
}


def passed(fn: Callable[..., Any], device: str) -> list[str]:
    """The functions of PATH that tracing and lowering a call for a device enters, in order."""
    seen: list[str] = []
    at: dict[int, int] = {}

    def watch(frame: FrameType, event: str, value: Any) -> None:
        module = frame.f_globals.get("__name__", "").removeprefix("trencadis.")
        if frame.f_code.co_name not in PATH.get(module, ()):
            return
        if event == "call":
            at[id(frame)] = len(seen)
            seen.append(f"{module}.{frame.f_code.co_name}")
            if module.endswith((".kernel", ".bridge")):  # the end of the way; what follows is long
                sys.setprofile(None)
        elif event == "return" and isinstance(value, Refusal):  # a backend that refuses is not on the way
            del seen[at[id(frame)]]

    args = struct(64, 128), struct(4, 128, 128), struct(4, dtype=jnp.int32)
    kind, platform = ("cpu", "cpu") if device == "cpu" else (None, "")
    if device in CHIPS:
        kind, platform = CHIPS[device].kind, "tpu"
    elif device in CARDS:
        kind, platform = CARDS[device].kind, "cuda"
    jax.clear_caches()
    with abstract_device(str(kind), 132, platform=platform):
        sys.setprofile(watch)
        try:
            jax.jit(lambda *xs: fn(*xs)).trace(*args).lower(lowering_platforms=(platform,))
        finally:
            sys.setprofile(None)
    return seen


def block() -> str:
    """The text of the page: a line for each function, indented below the name of its case."""
    lines = []
    for name, (device, fn) in CASES.items():
        lines += [name, *(f"  {each}" for each in passed(fn, device)), ""]
    return "\n".join(lines).rstrip()


if __name__ == "__main__":
    print(block())
