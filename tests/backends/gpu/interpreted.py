"""Kernels in layouts made by hand, interpreted: a read of what nobody wrote, or of what lies outside, gives NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle

from trencadis.api import problem_of
from trencadis.backends.gpu import execute
from trencadis.backends.gpu.layout import Layout
from trencadis.problem import Form
from trencadis.versions import gpu_interpreter

NAMES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


def layout_of(problem, **changes):
    """Few stages and small tiles; the step of the sum is the one line that the operands have."""
    wide = problem.lhs != problem.rhs or problem.lhs.itemsize == 4
    sizes = {"tall": 128, "wide": 128, "stages": 2, "panel": 2, "blocks": 2, **changes}
    return Layout(deep=32 if wide else 64, flat=wide, **sizes)


def rows_problem(m, k, n, groups, kinds="bf16 bf16 f32", *, local=None, **changes):
    weights = (local or groups, n, k) if changes.get("transpose_rhs") else (local or groups, k, n)
    asked = problem_of((m, k), weights, groups=groups, transpose_rhs=changes.pop("transpose_rhs", False))
    return asked.replace(**dtypes(kinds), **changes)


def sum_problem(m, k, n, groups, kinds="bf16 bf16 f32", *, local=None, **changes):
    """Lhs is stored [m, k] unless it is said to be transposed."""
    changes = {"transpose_lhs": False, "local_groups": local or groups, **changes}
    return problem_of((k, m), (m, n), groups=groups).replace(**dtypes(kinds), **changes)


def dtypes(kinds):
    return dict(zip(("lhs", "rhs", "out"), (np.dtype(jnp.dtype(NAMES[kind])) for kind in kinds.split()), strict=True))


@functools.cache
def kernel(problem, layout, params=None):
    return jax.jit(functools.partial(execute, problem, layout, interpret=params or gpu_interpreter()))


def numbers(problem, seed):
    """Operands: lhs, rhs, bias and existing_out as the problem has them, in numpy so that they can be spoilt."""
    rng = np.random.default_rng(seed)

    def some(shape, dtype):
        return np.asarray(jnp.asarray(rng.normal(size=shape), dtype))

    lhs, rhs = some(problem.lhs_shape, problem.lhs), some(problem.rhs_shape, problem.rhs)
    extras = []
    if problem.epilogue.bias is not None:
        extras.append(some((problem.local_groups, problem.n), problem.epilogue.bias))
    if problem.epilogue.accumulate:
        extras.append(some(problem.out_shape, problem.out))
    return lhs, rhs, *extras


def meaning(problem, lhs, rhs, sizes, first, *extras):
    """The result in float64, entry by entry."""
    bias, existing = problem.epilogue.split(extras)
    lhs = np.swapaxes(lhs, 0, 1) if problem.transpose_lhs else lhs
    m, local, parts = problem.m, problem.local_groups, []
    for e in range(problem.batch):
        x = lhs[e * m : (e + 1) * m]
        if problem.form is Form.CONTRACTION:
            y = rhs[e * m : (e + 1) * m]
            parts.append(oracle.contraction(x, y, sizes[e], first=int(first[e]), local=local))
        else:
            at = e % problem.rhs_batch * local
            parts.append(oracle.rows(
                x, rhs[at : at + local], sizes[e], first=int(first[e]), transpose_rhs=problem.transpose_rhs,
                bias=bias, activation=problem.epilogue.activation,
            ))  # fmt: skip
    out = np.concatenate(parts)
    return out if existing is None else out + oracle.wide(existing)


def check(problem, layout, lhs, rhs, sizes, first, *extras, **options):
    """The kernel's result, equal to its meaning."""
    sizes, first = np.asarray(sizes).reshape(problem.batch, -1), np.asarray(first, np.int32).reshape(-1)
    got = jax.block_until_ready(kernel(problem, layout, **options)(lhs, rhs, sizes, first, *extras))
    assert got.shape == problem.out_shape and got.dtype == problem.out
    with np.errstate(invalid="ignore"):
        want = meaning(problem, lhs, rhs, sizes, first, *extras)
    finite = want[np.isfinite(want)]
    oracle.check(got, want, scale=max(1.0, float(np.abs(finite).max(initial=0.0))))
    return np.asarray(got)


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
    """Poison in all rows that nobody owns, in the rows of span `bad`, and in the weights and the bias of its group."""
    lhs, rhs, *extras = (np.array(x) for x in operands)
    mine = spans(problem, sizes, first)
    rows = np.setdiff1d(np.arange(problem.rows), [row for i, span in enumerate(mine) if i != bad for row in span])
    nobodys = np.setdiff1d(rows, mine[bad])
    (lhs.T if problem.transpose_lhs else lhs)[rows] = poison
    bias, existing = problem.epilogue.split(tuple(extras))
    if problem.form is Form.CONTRACTION:
        rhs[rows] = poison
        return lhs, rhs, *extras
    rhs[bad % problem.weights] = poison
    if bias is not None:
        bias[bad % problem.local_groups] = poison
    if existing is not None:
        existing[nobodys] = poison
    return lhs, rhs, *extras


def tricky(problem, seed):
    """Sizes that cross the ends of grains, blocks and tiles, and of the rows; int32[count, batch, groups]."""
    m, g, rng = problem.m, problem.groups, np.random.default_rng(seed)
    one = np.zeros(g, int)
    one[g // 2] = m
    full = np.diff([0, *np.sort(rng.integers(0, m + 1, g - 1)), m])
    wild = np.resize([-5, m // 3, -(2**31), 3, 2**31 - 1, 2], g)
    single = [
        np.resize([7, 65, 0, 129, 9, 63], g),  # starts that are no multiples of a grain; a row past a block, a tile
        one,
        np.zeros(g, int),
        full,
        np.resize([0, 1, 8, 64, 128, 61], g),
        wild,
        np.resize([0, 0, 0, 0, 0, m - 3], g),
    ]
    single = [s if s.min() < 0 else np.diff([0, *np.minimum(np.cumsum(s), m)]) for s in single]
    return np.asarray([np.stack([np.roll(s, e) for e in range(problem.batch)]) for s in single], np.int32)
