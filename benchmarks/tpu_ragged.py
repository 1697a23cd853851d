"""32 groups that differ in all of m, k and n, for `trencadis inspect benchmarks/tpu_ragged.py:forward`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import trencadis as tr
from trencadis import GroupedTensor

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


def _product(lhs: Any, rhs: Any, out: Any, m: Any, k: Any, n: Any) -> Any:
    x, y, z = (GroupedTensor.fully_ragged(*each) for each in ((lhs, m, k), (rhs, k, n), (out, m, n)))
    return tr.grouped_gemm(x, y, contracting_dims=((1,), (0,)), out=z).data


def _gradients(lhs: Any, rhs: Any, ct: Any, m: Any, k: Any, n: Any) -> Any:
    return jax.vjp(lambda x, y: _product(x, y, jnp.zeros_like(ct), m, k, n), lhs, rhs)[1](ct)


def _call(function: Any, low: int, high: int, products: int) -> Call:
    """A call with random sizes, and the operations of its products."""
    rng = np.random.default_rng(0)
    m, k, n = (rng.integers(low, high + 1, 32).astype(np.int32) for _ in range(3))
    rooms = [int((a.astype(np.int64) * b).sum()) for a, b in ((m, k), (k, n), (m, n))]
    buffers = [jax.ShapeDtypeStruct((room,), jnp.bfloat16) for room in rooms]
    return function, (*buffers, m, k, n), {"flops": 2 * products * int((m.astype(np.int64) * k * n).sum())}


def forward() -> Call:
    """The product of groups of 512 to 4096, added to `out`, with traced sizes."""
    return _call(_product, 512, 4096, 1)


def gradients() -> Call:
    """The gradients of its lhs and rhs."""
    return _call(_gradients, 512, 4096, 2)


def small() -> Call:
    """The product of groups of 64 to 512, added to `out`."""
    return _call(_product, 64, 512, 1)


def small_gradients() -> Call:
    """The gradients of its lhs and rhs."""
    return _call(_gradients, 64, 512, 2)
