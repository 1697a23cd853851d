"""Kernels in layouts made by hand, interpreted: a read of what nobody wrote gives NaN, and a race is an error."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

from trencadis.api import problem_of
from trencadis.backends.tpu import execute
from trencadis.backends.tpu.layout import Layout, heights_table
from trencadis.problem import Form

STRICT = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")


def races_found():
    """Whether the kernel that ran last had a race; since jax 0.11 it would have raised already."""
    return interpreter.races.races_found


def rows_layout(**changes):
    """Two heights, chosen by a table; blocks of two chunks."""
    sizes = {**dict(slab=8, grain=8, heights=(16, 32), deep=0, wide=256, chunk=128), **changes}
    return Layout(table=heights_table(sizes["heights"], sizes["slab"], lambda h: h + 8), **sizes)


def sum_layout(**changes):
    """Tiles of two long steps; blocks of one column block of k and one of n, the latter in chunks."""
    sizes = {**dict(slab=8, grain=8, heights=(64,), deep=128, wide=256, chunk=128, fine=16, out_slots=2), **changes}
    return Layout(table=sizes["heights"], **sizes)


def rows_problem(m, k, n, groups, kinds="f32 f32 f32", *, local=None, **changes):
    weights = (local or groups, n, k) if changes.get("transpose_rhs") else (local or groups, k, n)
    asked = problem_of((m, k), weights, groups=groups, transpose_rhs=changes.pop("transpose_rhs", False))
    return asked.replace(**_dtypes(kinds), **changes)


def sum_problem(m, k, n, groups, kinds="f32 f32 f32", *, local=None, **changes):
    """Lhs is stored [m, k] unless it is said to be transposed."""
    changes = {"transpose_lhs": False, "local_groups": local or groups, **changes}
    return problem_of((k, m), (m, n), groups=groups).replace(**_dtypes(kinds), **changes)


def _dtypes(kinds):
    names = {"f32": "float32", "bf16": "bfloat16", "s8": "int8", "s32": "int32"}
    return dict(zip(("lhs", "rhs", "out"), (np.dtype(jnp.dtype(names[kind])) for kind in kinds.split()), strict=True))


@functools.cache
def kernel(problem, layout, params=STRICT, **options):
    return jax.jit(functools.partial(execute, problem, problem, layout, interpret=params, **options))


def run(problem, layout, *operands, **options):
    out = jax.block_until_ready(kernel(problem, layout, **options)(*operands))
    assert not races_found()
    return out


def numbers(problem, seed):
    """Operands: lhs, rhs, bias and existing_out as the problem has them, in numpy so that they can be spoilt."""
    rng = np.random.default_rng(seed)

    def some(shape, dtype):
        if dtype.kind in "iu":
            return rng.integers(-128, 128, shape).astype(dtype)
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
    got = run(problem, layout, lhs, rhs, sizes, first, *extras, **options)
    with np.errstate(invalid="ignore"):
        want = meaning(problem, lhs, rhs, sizes, first, *extras)
    finite = want[np.isfinite(want)]
    oracle.check(got, want, scale=max(1.0, float(np.abs(finite).max(initial=0.0))))
    return got


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
    if problem.lhs.kind != "i":
        (lhs.T if problem.transpose_lhs else lhs)[rows] = poison
    if problem.form is Form.CONTRACTION:
        if problem.rhs.kind != "i":
            rhs[rows] = poison
        return lhs, rhs, *extras
    if problem.rhs.kind != "i":
        rhs[bad % problem.weights] = poison
    bias, existing = problem.epilogue.split(tuple(extras))
    if bias is not None:
        bias[bad] = poison
    if existing is not None and problem.out.kind != "i":
        existing[nobodys] = poison
    return lhs, rhs, *extras


def tricky(problem, slab, seed):
    """Group sizes that cross every boundary of a slab and of the rows; int32[count, batch, groups]."""
    m, g, rng = problem.m, problem.groups, np.random.default_rng(seed)
    edges = [slab - 1, 2, slab, 0, slab + 1, 1]
    one = np.zeros(g, int)
    one[g // 2] = m
    full = np.diff([0, *np.sort(rng.integers(0, m + 1, g - 1)), m])
    wild = np.asarray([-5, m // 2, -(2**31), 3, 2**31 - 1, 2])
    single = [np.zeros(g, int), one, np.ones(g, int), np.resize(edges, g), full, np.resize(wild, g)]
    return np.asarray([np.stack([np.roll(s, e) for e in range(problem.batch)]) for s in single], np.int32)
