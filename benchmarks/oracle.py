"""The float64 answer that every contender is held against before it is timed."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.peers import Operands

WHOLE = 2e10  # FLOPs up to which the whole result is checked; past it, SAMPLE rows of each matrix are
SAMPLE = 64


@dataclasses.dataclass(frozen=True)
class Oracle:
    """Part of the right answer: `result[index] == values`, but for rounding."""

    index: Any
    values: np.ndarray  # float64
    tolerance: float


def oracle(x: Operands, which: str, *, one_group: bool = False) -> Oracle:
    """The answer of one pass; with one_group, that of the dense matmul that has rhs[0] for all rows."""
    sizes = np.asarray([x.problem.m]) if one_group else x.sizes
    whole = x.problem.flops <= WHOLE
    if which == "d_rhs":
        at = _sample(x.problem.k, whole, [])
        lhs, ct = np.asarray(x.lhs[:, at]).astype(np.float64), np.asarray(x.ct)
        values = np.stack([lhs[s:e].T @ ct[s:e].astype(np.float64) for s, e in _spans(sizes)])
        return Oracle(at if one_group else (slice(None), at), values[0] if one_group else values, tolerance(x.dtype))
    left = x.ct if which == "d_lhs" else x.lhs
    at = _sample(x.problem.m, whole, [r for s, e in _spans(sizes) if e > s for r in (s, e - 1)])
    values = np.zeros((len(at), x.problem.k if which == "d_lhs" else x.problem.n))
    for i, (start, end) in enumerate(_spans(sizes)):
        mine = (at >= start) & (at < end)
        if mine.any():
            w = np.asarray(x.rhs[i]).astype(np.float64)
            values[mine] = np.asarray(left[at[mine]]).astype(np.float64) @ (w.T if which == "d_lhs" else w)
    return Oracle(at, values, tolerance(x.dtype))


def error(result: Any, right: Oracle) -> float:
    """The largest difference, as a share of the largest value; inf if anything anywhere is not finite."""
    if hasattr(result, "detach"):  # torch
        result = result.detach().float().cpu().numpy()
    finite = np.isfinite(result).all() if isinstance(result, np.ndarray) else bool(jnp.isfinite(result).all())
    got = np.asarray(result[right.index]).astype(np.float64)
    if not finite or got.shape != right.values.shape:
        return float("inf")
    return float(np.abs(got - right.values).max(initial=0) / max(np.abs(right.values).max(initial=0), 1e-30))


def tolerance(dtype: Any) -> float:
    """What rounding explains: of the result in bf16; of float32 sums, or of tf32 products where a GPU makes them."""
    if dtype == jnp.bfloat16:
        return 1e-2
    return 1e-5 if jax.default_backend() == "cpu" else 5e-3


def _spans(sizes: np.ndarray) -> list[tuple[int, int]]:
    ends = np.cumsum(sizes)
    return list(zip((ends - sizes).tolist(), ends.tolist(), strict=True))


def _sample(count: int, whole: bool, borders: list[int]) -> np.ndarray:
    """All of range(count), or some of it, the first and last rows of groups among them: errors live there."""
    if whole or count <= SAMPLE:
        return np.arange(count)
    rng = np.random.default_rng(0)
    return np.unique(np.concatenate([rng.choice(count, SAMPLE, replace=False), np.asarray(borders, int)]))
