"""Problems for kernels, in float64 and with poison: what the tests of all backends with kernels share."""

import jax.numpy as jnp
import numpy as np
import oracle

from trencadis.core.arguments import problem_of
from trencadis.core.problem import Form

NAMES = {
    "f32": "float32", "bf16": "bfloat16", "f16": "float16", "s8": "int8", "s32": "int32",
    "e4": "float8_e4m3fn", "b11": "float8_e4m3b11fnuz", "e5": "float8_e5m2", "s4": "int4", "f4": "float4_e2m1fn",
}  # fmt: skip


def rows_problem(m, k, n, groups, kinds="f32 f32 f32", *, local=None, **changes):
    weights = (local or groups, n, k) if changes.get("transpose_rhs") else (local or groups, k, n)
    asked = problem_of((m, k), weights, groups=groups, transpose_rhs=changes.pop("transpose_rhs", False))
    return asked.replace(**dtypes(kinds), **changes)


def sum_problem(m, k, n, groups, kinds="f32 f32 f32", *, local=None, **changes):
    """Lhs is stored [m, k] unless it is said to be transposed."""
    changes = {"transpose_lhs": False, "local_groups": local or groups, **changes}
    return problem_of((k, m), (m, n), groups=groups).replace(**dtypes(kinds), **changes)


def dtypes(kinds):
    return dict(zip(("lhs", "rhs", "out"), (np.dtype(jnp.dtype(NAMES[kind])) for kind in kinds.split()), strict=True))


def numbers(problem, seed):
    """Operands: lhs, rhs and those of the epilogue as the problem has them, in numpy so that they can be spoilt."""
    rng = np.random.default_rng(seed)

    def some(shape, dtype):
        if jnp.issubdtype(dtype, jnp.integer):
            most = min(int(jnp.iinfo(dtype).max), 127)
            return rng.integers(-most - 1, most + 1, shape).astype(dtype)
        if dtype == jnp.float8_e8m0fnu:
            return (2.0 ** rng.integers(-4, 4, shape)).astype(dtype)
        return rng.normal(size=shape).astype(dtype)

    lhs, rhs = some(problem.lhs_shape, problem.lhs), some(problem.rhs_shape, problem.rhs)
    extras, ends, float32 = [], problem.epilogue, np.dtype("float32")
    if ends.by_row:
        rows = problem.form is Form.ROWS
        extras.append(some((problem.m,) if rows else (problem.local_groups, problem.k), float32))
    if ends.by_column:
        (k, n), scales = ends.column_block, (problem.local_groups, problem.n)
        along_k = (problem.local_groups, -(-problem.k // k), -(-problem.n // n)) if k else scales
        extras.append(some(along_k, ends.column_scales if k else float32))
    if problem.epilogue.bias is not None:
        extras.append(some((problem.local_groups, problem.n), problem.epilogue.bias))
    if problem.epilogue.accumulate:
        extras.append(some(problem.out_shape, problem.out))
    return lhs, rhs, *extras


def meaning(problem, lhs, rhs, sizes, first, *extras):
    """The result in float64, entry by entry."""
    *scales, bias, existing = problem.epilogue.split(extras)
    if problem.epilogue.column_block[0]:
        rhs, scales = scaled_weights(problem, rhs, scales[1]), (scales[0], None)
    lhs = np.swapaxes(lhs, 0, 1) if problem.transpose_lhs else lhs
    m, local, parts = problem.m, problem.local_groups, []
    for e in range(problem.batch):
        x = lhs[e * m : (e + 1) * m]
        if problem.form is Form.CONTRACTION:
            y = rhs[e * m : (e + 1) * m]
            parts.append(oracle.contraction(x, y, sizes[e], first=int(first[e]), local=local, scales=scales))
        else:
            at = e % problem.rhs_batch * local
            parts.append(oracle.rows(
                x, rhs[at : at + local], sizes[e], first=int(first[e]), transpose_rhs=problem.transpose_rhs,
                bias=bias, activation=problem.epilogue.activation, scales=scales,
            ))  # fmt: skip
    out = np.concatenate(parts)
    return out if existing is None else out + oracle.wide(existing)


def scaled_weights(problem, rhs, scales):
    """Weights in float64, times their scales along k."""
    for axis, length, size in zip((1, 2), problem.epilogue.column_block, (problem.k, problem.n), strict=True):
        scales = np.repeat(oracle.wide(scales), length, axis=axis).take(range(size), axis=axis)
    return oracle.wide(rhs) * (np.swapaxes(scales, 1, 2) if problem.transpose_rhs else scales)


def spans(problem, sizes, first):
    """The rows of each local group of each entry; none for a group outside of the window."""
    found = []
    for e in range(problem.batch):
        bounds = oracle.bounds(sizes[e], problem.m)
        for i in range(int(first[e]), int(first[e]) + problem.local_groups):
            start, end = bounds[i] if 0 <= i < problem.groups else (0, 0)
            found.append(range(e * problem.m + start, e * problem.m + end))
    return found


def spoil(problem, sizes, first, operands, bad, poison):
    """Poison in all unowned rows, in those of span `bad`, and in the weights, bias and scales of its group."""
    lhs, rhs, *extras = (np.array(x) for x in operands)
    mine = spans(problem, sizes, first)
    rows = np.setdiff1d(np.arange(problem.rows), [row for i, span in enumerate(mine) if i != bad for row in span])
    unowned = np.setdiff1d(rows, mine[bad])
    if problem.lhs.kind != "i":
        (lhs.T if problem.transpose_lhs else lhs)[rows] = poison
    by_row, by_column, bias, existing = problem.epilogue.split(tuple(extras))
    if by_row is not None:
        by_row[rows if problem.form is Form.ROWS else bad] = np.nan
    if by_column is not None:
        by_column[bad] = np.nan
    if problem.form is Form.CONTRACTION:
        if problem.rhs.kind != "i":
            rhs[rows] = poison
        return lhs, rhs, *extras
    if not jnp.issubdtype(problem.rhs, jnp.integer):
        rhs[bad % problem.weights] = poison
    if bias is not None:
        bias[bad % problem.local_groups] = poison
    if existing is not None and problem.out.kind != "i":
        existing[unowned] = poison
    return lhs, rhs, *extras


def check_unowned(problem, got, sizes, first, extras):
    """Unowned rows of a result, or groups without rows in a contraction, are zero, or existing_out to the bit."""
    mine = spans(problem, sizes, first)
    if got.ndim == 2:
        rest = np.setdiff1d(np.arange(problem.rows), [row for span in mine for row in span])
    else:
        rest = [at for at, span in enumerate(mine) if not span]
    kept = extras[-1] if problem.epilogue.accumulate else np.zeros_like(got)
    assert got[rest].tobytes() == kept[rest].tobytes()
