"""The float64 oracle: what the operations mean, as a loop over groups in numpy. It shares nothing with the package.

Tests compare with it directly; `benchmarks/oracle.py` compares parts of large results with it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Scales = tuple[Any, Any]  # of lhs and of rhs; None is no scale


def bounds(sizes: Any, m: int) -> list[tuple[int, int]]:
    """The row range of each group: negative sizes count as 0, and ends are clamped to m."""
    ends = np.minimum(np.cumsum(np.maximum(np.asarray(sizes, np.int64), 0)), m).tolist()
    return list(zip([0, *ends][: len(ends)], ends, strict=True))


def wide(x: Any) -> np.ndarray:
    """The array in float64, or in complex128 where it is complex; every other dtype converts exactly."""
    x = np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def rows(
    lhs: Any,
    rhs: Any,
    sizes: Sequence[int] | np.ndarray,
    *,
    first: int = 0,
    transpose_rhs: bool = False,
    existing_out: Any = None,
    bias: Any = None,
    activation: Callable[[np.ndarray], np.ndarray] | None = None,
    scales: Scales = (None, None),
) -> np.ndarray:
    """lhs [m, k] x rhs [g, k, n] -> [m, n]; scales are those of the rows [m] and of the columns [g, n]."""
    lhs, rhs = wide(lhs), wide(rhs)
    if transpose_rhs:
        rhs = rhs.swapaxes(1, 2)
    out = np.zeros((lhs.shape[0], rhs.shape[2]), np.result_type(lhs, rhs))
    for i, (start, end) in enumerate(bounds(sizes, lhs.shape[0])):
        if first <= i < first + rhs.shape[0]:
            z = lhs[start:end] @ rhs[i - first]
            z = z if scales[0] is None else z * wide(scales[0])[start:end, None]
            z = z if scales[1] is None else z * wide(scales[1])[i - first]
            if bias is not None:
                z = z + wide(bias)[i - first]
            out[start:end] = z if activation is None else activation(z)
    return out if existing_out is None else out + wide(existing_out)


def contraction(
    lhs: Any,
    rhs: Any,
    sizes: Sequence[int] | np.ndarray,
    *,
    first: int = 0,
    local: int | None = None,
    existing_out: Any = None,
    scales: Scales = (None, None),
) -> np.ndarray:
    """lhs [m, k] x rhs [m, n] -> [g, k, n]: an empty group gives 0; scales are [g, k] and [g, n]."""
    lhs, rhs = wide(lhs), wide(rhs)
    local = len(sizes) - first if local is None else local
    out = np.zeros((local, lhs.shape[1], rhs.shape[1]), np.result_type(lhs, rhs))
    for i, (start, end) in enumerate(bounds(sizes, lhs.shape[0])):
        if first <= i < first + local and start < end:
            z = lhs[start:end].T @ rhs[start:end]
            z = z if scales[0] is None else z * wide(scales[0])[i - first][:, None]
            out[i - first] = z if scales[1] is None else z * wide(scales[1])[i - first]
    return out if existing_out is None else out + wide(existing_out)


# The unit roundoff of the stored dtype, times some room for sums of a few hundred products.
TOLERANCE = {
    "float64": 1e-12, "float32": 2e-5, "bfloat16": 2e-2, "float16": 2e-3, "complex64": 2e-5, "complex128": 1e-12,
}  # fmt: skip


def check(got: Any, want: np.ndarray, *, dtype: Any = None, scale: float | None = None) -> None:
    """Assert equality within the precision of the narrowest dtype involved; integers must be equal exactly."""
    name = str(dtype or got.dtype)
    got = wide(got)
    if name not in TOLERANCE:
        np.testing.assert_array_equal(got, want)
        return
    scale = scale if scale is not None else max(1.0, float(np.max(np.abs(want), initial=0.0)))
    np.testing.assert_allclose(got, want, rtol=TOLERANCE[name], atol=TOLERANCE[name] * scale)


def close(got: Any, want: np.ndarray, limit: float = 1e-6) -> None:
    """Assert that no element is off by more than this share of the largest element."""
    assert got.shape == want.shape and np.abs(wide(got) - want).max() <= limit * np.abs(want).max()


def check_adjoints(x: Any, w: Any, sizes: Any, c: Any, dx: Any, dw: Any) -> None:
    """Assert that <f(x, w), c> = <x, dx> = <w, dw>, and that each gradient equals its formula."""
    inner = np.vdot(rows(x, w, sizes), wide(c))
    scale = max(1.0, np.abs(inner))
    np.testing.assert_allclose(np.vdot(wide(x), wide(dx)), inner, atol=2e-4 * scale)
    np.testing.assert_allclose(np.vdot(wide(w), wide(dw)), inner, atol=2e-4 * scale)
    check(dx, rows(c, w, sizes, transpose_rhs=True))
    check(dw, contraction(x, c, sizes))
