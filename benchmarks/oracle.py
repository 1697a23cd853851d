"""Results against the float64 oracle of the tests: all of a small result, sampled rows and columns of a large one.

Sampled rows keep their order: they are a grouped matmul with smaller groups, whose result the tests' oracle gives.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.support import oracle as float64

if TYPE_CHECKING:
    from benchmarks.peers import Operands

LARGE = 2**24  # elements of an operand or a result from which it is sampled
SAMPLE = 64
BORDERS = 32  # groups whose first and last rows are in a sample: errors are found there
OUTLIER = 16  # limits that one element may be off by, in units of the result's rms: normal data has tails
ROUNDING = {"bfloat16": 3e-3, "float16": 4e-4, "float32": 0.0}  # of the result, in the norm


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """Part of a right answer: `pick(result)` equals `values` up to rounding, and exactly where `exact` is true."""

    pick: Callable[[Any], Any]
    values: np.ndarray  # float64
    exact: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros((), bool))  # broadcasts; nothing is summed


def rows(
    lhs: Any,
    rhs: Any,
    sizes: np.ndarray,
    *,
    first: int = 0,
    transpose_rhs: bool = False,
    activation: Callable[[np.ndarray], np.ndarray] | None = None,
    **extras: Any,
) -> Answer:
    """The answer of lhs [m, k] x rhs [g, k, n] -> [m, n]; extras are `bias` [g, n] and `existing_out` [m, n]."""
    m, n = lhs.shape[0], rhs.shape[1 if transpose_rhs else 2]
    large = max(m * n, _count(lhs), _count(rhs)) >= LARGE
    bounds = float64.bounds(sizes, m)
    busy = [pair for pair in bounds if pair[0] < pair[1]]
    at = sample(m, large, [row for start, end in busy[:: 1 + len(busy) // BORDERS] for row in (start, end - 1)])
    cols = sample(n, large)
    counts = [int(np.searchsorted(at, end) - np.searchsorted(at, start)) for start, end in bounds]
    bias, existing = extras.get("bias"), extras.get("existing_out")
    with np.errstate(all="ignore"):  # NaN and Inf are part of some cases
        values = float64.rows(
            part(lhs, at), part(rhs, slice(None), *([cols] if transpose_rhs else [slice(None), cols])), counts,
            first=first, transpose_rhs=transpose_rhs, activation=activation,
            bias=None if bias is None else part(bias, slice(None), cols),
            existing_out=None if existing is None else part(existing, at, cols),
        )  # fmt: skip
    group = np.repeat(np.arange(len(counts) + 1), [*counts, len(at) - sum(counts)])
    owned = (group >= first) & (group < min(first + rhs.shape[0], len(counts)))
    return Answer(pick=lambda out: out[at][:, cols], values=values, exact=~owned[:, None])


def contraction(
    lhs: Any, rhs: Any, sizes: np.ndarray, *, first: int = 0, local: int | None = None, existing_out: Any = None
) -> Answer:
    """The answer of lhs [m, k] x rhs [m, n] -> [local, k, n]."""
    (m, k), n = lhs.shape, rhs.shape[1]
    local = len(sizes) - first if local is None else local
    large = max(_count(lhs), _count(rhs), local * k * n) >= LARGE
    ks, ns = sample(k, large), sample(n, large)
    existing = None if existing_out is None else part(existing_out, slice(None), ks, ns)
    with np.errstate(all="ignore"):
        values = float64.contraction(
            part(lhs, slice(None), ks), part(rhs, slice(None), ns), sizes,
            first=first, local=local, existing_out=existing,
        )  # fmt: skip
    empty = np.asarray([start == end for start, end in float64.bounds(sizes, m)[first : first + local]])
    return Answer(pick=lambda out: out[:, ks][:, :, ns], values=values, exact=empty[:, None, None])


def sample(count: int, large: bool, borders: Sequence[int] = ()) -> np.ndarray:
    """All indices below the count, or of a large one the first, the last, those at borders and some at random."""
    if not large or count <= SAMPLE:
        return np.arange(count)
    chosen = np.random.default_rng(0).choice(count, SAMPLE, replace=False)
    return np.unique([0, count - 1, *chosen.tolist(), *borders])


def part(x: Any, *index: Any) -> np.ndarray:
    """Some of an operand in float64, by an index for each axis; only that leaves the device, dequantized if need be."""
    if hasattr(x, "dequantize"):
        import jax

        return float64.wide(jax.jit(lambda x: _cut(x.dequantize(), index))(x))
    return float64.wide(_cut(x, index))


def _cut(x: Any, index: Sequence[Any]) -> Any:
    for axis, each in enumerate(index):
        x = x[(slice(None),) * axis + (each,)] if isinstance(each, np.ndarray) else x
    return x


def _count(x: Any) -> int:
    return int(np.prod(x.shape, dtype=np.int64))


# ---------------------------------------------------------------------------------------------------------------------
# The passes of a problem


def answers(x: Operands, which: str, *, one_group: bool = False) -> tuple[Answer, ...]:
    """One answer for each result of a pass; with one_group, of the dense matmul that has rhs[0] for all rows."""
    from benchmarks.problems import PASSES, STEP

    parts = PASSES if which == STEP else (which,)
    return tuple(_answer(x, each, one_group) for each in parts)


def _answer(x: Operands, which: str, one_group: bool) -> Answer:
    sizes, rhs = (np.asarray([x.problem.m]), x.rhs[:1]) if one_group else (x.sizes, x.rhs)
    if which != "d_rhs":
        left = x.ct if which == "d_lhs" else x.lhs
        return rows(left, rhs, sizes, transpose_rhs=which == "d_lhs")
    grouped = contraction(x.lhs, x.ct, sizes)
    return dataclasses.replace(grouped, pick=lambda out: grouped.pick(out[None])) if one_group else grouped


# ---------------------------------------------------------------------------------------------------------------------
# Errors


def worst(results: Any, right: Sequence[Answer], *, poisoned: bool = False) -> float:
    """The largest error of the results of a call; poisoned: some of the right results are not finite."""
    found = results if isinstance(results, tuple | list) else (results,)
    return max(error(*pair, poisoned=poisoned) for pair in zip(found, right, strict=True))


def error(result: Any, right: Answer, *, poisoned: bool = False) -> float:
    """‖result - right‖ / ‖right‖, or the worst element over its own, wider limit if that is more.

    It is inf if a result is not finite where it should be, or differs at all where nothing is summed.
    """
    got, want = float64.wide(right.pick(result)), right.values
    finite = np.isfinite(want)
    if got.shape != want.shape or (np.isfinite(got) != finite).any():
        return float("inf")
    exact = np.broadcast_to(right.exact, want.shape)
    if (got[exact] != want[exact]).any() or not (poisoned or all_finite(result)):
        return float("inf")
    summed = finite & ~exact
    return relative(got[summed], want[summed])


def relative(got: np.ndarray, want: np.ndarray) -> float:
    """The relative error in the norm, or the largest element's in units of `OUTLIER` times the rms if that is more."""
    off, norm = got - want, float(np.linalg.norm(want))
    if norm == 0:
        return 0.0 if (off == 0).all() else float("inf")
    return max(float(np.linalg.norm(off)) / norm, float(np.abs(off).max()) * np.sqrt(off.size) / norm / OUTLIER)


def all_finite(result: Any) -> bool:
    """True if every element is finite; on a device without an array of flags."""
    if isinstance(result, np.ndarray):
        return bool(np.isfinite(result).all())
    return bool(_finite()(result))


@functools.cache
def _finite() -> Callable[[Any], Any]:
    import jax
    import jax.numpy as jnp

    return jax.jit(lambda x: jnp.isfinite(x).all())


def limit(dtype: Any, *, depth: int = 0, tf32: bool = False) -> float:
    """The error that rounding explains: of a result of this dtype, of tf32 products, and of sums of `depth` products.

    Tensor cores truncate sums where they should round, so that the error of a sum grows with its length.
    """
    return max(ROUNDING[str(np.dtype(dtype))], 1e-3 if tf32 else 0.0, 1e-5 + 2e-9 * depth)


def depths(shape: Mapping[str, int], which: str) -> int:
    """The number of products in the longest sum of a pass."""
    longest = {"forward": shape["k"], "d_lhs": shape["n"], "d_rhs": shape["largest"]}
    return max(longest.values()) if which not in longest else longest[which]
