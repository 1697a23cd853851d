"""Interpreted kernels in small layouts: a read of uninitialized memory gives NaN, and a race is an error."""

import functools

import jax
import numpy as np
import oracle
import poisoned
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

from trencadis.backends.tpu.execution import execute
from trencadis.backends.tpu.layout import Layout, cheapest_heights

STRICT = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")


def races_found():
    """Whether the last kernel had a race; since jax 0.11 it would have raised already."""
    return interpreter.races.races_found


def rows_layout(**changes):
    """A layout of the rows form with two tile heights, and column blocks of two chunks."""
    sizes = {**dict(sublane_tile=8, dma_align=8, heights=(16, 32), block_k=0, block_n=256, chunk=128), **changes}
    return Layout(height_table=cheapest_heights(sizes["heights"], sizes["sublane_tile"], lambda h: h + 8), **sizes)


def contraction_layout(**changes):
    """A layout of the contraction form with row tiles of two long steps, and column blocks of two chunks of n."""
    blocks = dict(heights=(64,), block_k=128, block_n=256, chunk=128, step_m=16)
    sizes = {**dict(sublane_tile=8, dma_align=8, out_buffers=2), **blocks, **changes}
    return Layout(height_table=sizes["heights"], **sizes)


@functools.cache
def kernel(problem, layout, params=STRICT, **options):
    return jax.jit(functools.partial(execute, problem, problem, layout, interpret=params, **options))


def run(problem, layout, *operands, **options):
    """The result of an interpreted kernel, which had no race."""
    outs = jax.block_until_ready(kernel(problem, layout, **options)(*operands))
    assert not races_found()
    return outs[0] if problem.gate is None else outs


def check(problem, layout, lhs, rhs, sizes, first, *extras, **options):
    """The result of an interpreted kernel, which equals that in float64."""
    sizes, first = np.asarray(sizes).reshape(problem.batch, -1), np.asarray(first, np.int32).reshape(-1)
    got = run(problem, layout, lhs, rhs, sizes, first, *extras, **options)
    with np.errstate(invalid="ignore"):
        want = poisoned.meaning(problem, lhs, rhs, sizes, first, *extras)
    finite = want[np.isfinite(want)]
    oracle.check(got, want, scale=max(1.0, float(np.abs(finite).max(initial=0.0))))
    return got


def boundary_sizes(problem, unit, seed):
    """Group sizes that end at and around every boundary of a sublane tile; int32[count, batch, groups]."""
    m, g, rng = problem.m, problem.groups, np.random.default_rng(seed)
    edges = [unit - 1, 2, unit, 0, unit + 1, 1]
    one = np.zeros(g, int)
    one[g // 2] = m
    full = np.diff([0, *np.sort(rng.integers(0, m + 1, g - 1)), m])
    wild = np.asarray([-5, m // 2, -(2**31), 3, 2**31 - 1, 2])
    single = [np.zeros(g, int), one, np.ones(g, int), np.resize(edges, g), full, np.resize(wild, g)]
    return np.asarray([np.stack([np.roll(s, e) for e in range(problem.batch)]) for s in single], np.int32)
