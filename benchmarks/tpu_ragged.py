"""32 groups of 512 to 4096 in each of m, k and n, for `trencadis inspect benchmarks/tpu_ragged.py:forward`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import trencadis as tr
from trencadis import GroupedTensor

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]

_RNG = np.random.default_rng(0)
M, K, N = (_RNG.integers(512, 4097, 32).astype(np.int32) for _ in range(3))
FLOPS = 2 * int((M.astype(np.int64) * K * N).sum())


def _product(lhs: Any, rhs: Any, out: Any, m: Any, k: Any, n: Any) -> Any:
    x, y, z = (GroupedTensor.fully_ragged(*each) for each in ((lhs, m, k), (rhs, k, n), (out, m, n)))
    return tr.grouped_gemm(x, y, contracting_dims=((1,), (0,)), out=z).data


def _gradients(lhs: Any, rhs: Any, ct: Any, m: Any, k: Any, n: Any) -> Any:
    return jax.vjp(lambda x, y: _product(x, y, jnp.zeros_like(ct), m, k, n), lhs, rhs)[1](ct)


def _arguments() -> tuple[Any, ...]:
    pairs = ((M, K), (K, N), (M, N))
    rooms = [int((a.astype(np.int64) * b).sum()) for a, b in pairs]
    return *(jax.ShapeDtypeStruct((room,), jnp.bfloat16) for room in rooms), M, K, N


def forward() -> Call:
    """The product, added to `out`, with traced sizes."""
    return _product, _arguments(), {"flops": FLOPS}


def gradients() -> Call:
    """The gradients of lhs and rhs."""
    return _gradients, _arguments(), {"flops": 2 * FLOPS}
