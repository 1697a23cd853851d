"""The meaning in float64 numpy, a loop over groups; nothing here is shared with the package."""

import jax.numpy as jnp
import numpy as np


def bounds(sizes, m):
    """Row range of each group: negative sizes count as 0, ends stop at m."""
    ends = np.minimum(np.cumsum(np.maximum(np.asarray(sizes, np.int64), 0)), m).tolist()
    return list(zip([0, *ends][: len(ends)], ends, strict=True))


def wide(x):
    x = np.asarray(jnp.asarray(x).astype(jnp.float32)) if jnp.asarray(x).dtype.itemsize < 4 else np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


def rows(
    lhs, rhs, sizes, *, first=0, transpose_rhs=False, existing_out=None, bias=None, activation=None, scales=(None, None)
):
    """Scales are those of rows [m] and of columns [g, n]."""
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


def contraction(lhs, rhs, sizes, *, first=0, local=None, existing_out=None, scales=(None, None)):
    """Lhs is [m, k] here; scales are [g, k] and [g, n]. What an empty group has is 0."""
    lhs, rhs = wide(lhs), wide(rhs)
    local = len(sizes) - first if local is None else local
    out = np.zeros((local, lhs.shape[1], rhs.shape[1]), np.result_type(lhs, rhs))
    for i, (start, end) in enumerate(bounds(sizes, lhs.shape[0])):
        if first <= i < first + local and start < end:
            z = lhs[start:end].T @ rhs[start:end]
            z = z if scales[0] is None else z * wide(scales[0])[i - first][:, None]
            out[i - first] = z if scales[1] is None else z * wide(scales[1])[i - first]
    return out if existing_out is None else out + wide(existing_out)


# Unit roundoff of what is stored, times some room for sums of a few hundred products.
TOLERANCE = {
    "float64": 1e-12, "float32": 2e-5, "bfloat16": 2e-2, "float16": 2e-3, "complex64": 2e-5, "complex128": 1e-12,
}  # fmt: skip


def check(got, want, *, dtype=None, scale=None):
    """Equal within the precision of the narrowest dtype involved; exactly equal for integers."""
    name = str(dtype or got.dtype)
    got = wide(got)
    if name not in TOLERANCE:
        np.testing.assert_array_equal(got, want)
        return
    scale = scale if scale is not None else max(1.0, float(np.max(np.abs(want), initial=0.0)))
    np.testing.assert_allclose(got, want, rtol=TOLERANCE[name], atol=TOLERANCE[name] * scale)


def close(got, want, limit=1e-6):
    """Off by no more than a part of the largest entry."""
    assert got.shape == want.shape and np.abs(wide(got) - want).max() <= limit * np.abs(want).max()


def check_adjoints(x, w, sizes, c, dx, dw):
    """<f(x, w), c> = <x, dx> = <w, dw>, and each gradient equals its formula."""
    inner = np.vdot(rows(x, w, sizes), wide(c))
    scale = max(1.0, np.abs(inner))
    np.testing.assert_allclose(np.vdot(wide(x), wide(dx)), inner, atol=2e-4 * scale)
    np.testing.assert_allclose(np.vdot(wide(w), wide(dw)), inner, atol=2e-4 * scale)
    check(dx, rows(c, w, sizes, transpose_rhs=True))
    check(dw, contraction(x, c, sizes))
