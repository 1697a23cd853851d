"""Kernels in layouts made by hand, interpreted: a read of what nobody wrote gives NaN, and a race is an error."""

import functools

import jax
import numpy as np
import oracle
import poisoned
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

from trencadis.backends.tpu import execute
from trencadis.backends.tpu.layout import Layout, heights_table

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


@functools.cache
def kernel(problem, layout, params=STRICT, **options):
    return jax.jit(functools.partial(execute, problem, problem, layout, interpret=params, **options))


def run(problem, layout, *operands, **options):
    out = jax.block_until_ready(kernel(problem, layout, **options)(*operands))
    assert not races_found()
    return out


def check(problem, layout, lhs, rhs, sizes, first, *extras, **options):
    """The kernel's result, equal to its meaning."""
    sizes, first = np.asarray(sizes).reshape(problem.batch, -1), np.asarray(first, np.int32).reshape(-1)
    got = run(problem, layout, lhs, rhs, sizes, first, *extras, **options)
    with np.errstate(invalid="ignore"):
        want = poisoned.meaning(problem, lhs, rhs, sizes, first, *extras)
    finite = want[np.isfinite(want)]
    oracle.check(got, want, scale=max(1.0, float(np.abs(finite).max(initial=0.0))))
    return got


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
