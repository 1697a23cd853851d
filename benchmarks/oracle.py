"""The float64 answer that every contender is held against before it is timed."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.peers import Operands
from benchmarks.problems import PASSES

WHOLE = 2e10  # FLOPs up to which the whole result is checked; past it, SAMPLE rows and columns of each matrix are
SAMPLE = 64


@dataclasses.dataclass(frozen=True)
class Oracle:
    """Part of the right answer: `result[index] == values`, but for rounding."""

    index: Any
    values: np.ndarray  # float64
    tolerance: float


def answers(x: Operands, which: str, *, one_group: bool = False) -> tuple[Oracle, ...]:
    """One for each result of a pass; a step has those of all three passes."""
    parts = PASSES if which == "step" else (which,)
    return tuple(oracle(x, part, one_group=one_group) for part in parts)


def oracle(x: Operands, which: str, *, one_group: bool = False) -> Oracle:
    """The answer of one pass; with one_group, that of the dense matmul that has rhs[0] for all rows."""
    sizes = np.asarray([x.problem.m]) if one_group else x.sizes
    whole = x.problem.flops <= WHOLE
    if which == "d_rhs":
        at, cols = _sample(x.problem.k, whole, []), _sample(x.problem.n, whole, [])
        lhs, ct = (np.asarray(a).astype(np.float64) for a in (x.lhs[:, at], x.ct[:, cols]))
        values = np.stack([lhs[s:e].T @ ct[s:e] for s, e in _spans(sizes)])
        index = (at[:, None], cols)
        return Oracle(
            index if one_group else (slice(None), *index), values[0] if one_group else values, tolerance(x.dtype)
        )
    left = x.ct if which == "d_lhs" else x.lhs
    at = _sample(x.problem.m, whole, [r for s, e in _spans(sizes) if e > s for r in (s, e - 1)])
    cols = _sample(x.problem.k if which == "d_lhs" else x.problem.n, whole, [])
    rows, rhs = np.asarray(left[at]).astype(np.float64), x.rhs[:1] if one_group else x.rhs
    # rhs is large: only the columns that count leave the device
    matrices = np.asarray(rhs[:, cols].transpose(0, 2, 1) if which == "d_lhs" else rhs[:, :, cols])
    values = np.zeros((len(at), len(cols)))
    for i, (start, end) in enumerate(_spans(sizes)):
        mine = (at >= start) & (at < end)
        if mine.any():
            values[mine] = rows[mine] @ matrices[i].astype(np.float64)
    return Oracle((at[:, None], cols), values, tolerance(x.dtype))


def worst(results: Any, right: tuple[Oracle, ...]) -> float:
    """The largest error of the results of a call."""
    return max(error(*pair) for pair in zip(results if isinstance(results, tuple) else (results,), right, strict=True))


def error(result: Any, right: Oracle) -> float:
    """The largest difference, as a share of the largest value; inf if anything anywhere is not finite."""
    finite = np.isfinite(result).all() if isinstance(result, np.ndarray) else bool(_finite(result))
    got = np.asarray(result[right.index]).astype(np.float64)
    if not finite or got.shape != right.values.shape:
        return float("inf")
    return float(np.abs(got - right.values).max(initial=0) / max(np.abs(right.values).max(initial=0), 1e-30))


_finite = jax.jit(lambda x: jnp.isfinite(x).all())  # as one kernel, without an array of flags


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
    return np.unique(
        np.concatenate([rng.choice(count, SAMPLE, replace=False), np.asarray([0, count - 1, *borders], int)])
    )
