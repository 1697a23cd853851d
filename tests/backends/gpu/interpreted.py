"""Interpreted kernels in layouts made by hand; reads of uninitialized memory, or out of bounds, give NaN."""

import functools

import jax
import numpy as np
import oracle
import poisoned

from trencadis.backends.gpu import execute
from trencadis.backends.gpu.choose import mma_dtype
from trencadis.backends.gpu.layout import Layout
from trencadis.backends.gpu.parts import products
from trencadis.core.jax_compat import gpu_interpreter


def layout_of(problem, **changes):
    """A layout with few stages and small tiles, and with steps of one swizzle row of the operands."""
    k_major = mma_dtype(problem).itemsize == 4
    sizes = {"block_m": 128, "block_n": 128, "stages": 2, "raster_group": 2, "num_ctas": 2, **changes}
    return Layout(block_k=32 if k_major else 64, k_major=k_major, products=products(problem), **sizes)


def rows_problem(m, k, n, groups, kinds="bf16 bf16 f32", **changes):
    return poisoned.rows_problem(m, k, n, groups, kinds, **changes)


def sum_problem(m, k, n, groups, kinds="bf16 bf16 f32", **changes):
    return poisoned.sum_problem(m, k, n, groups, kinds, **changes)


@functools.cache
def kernel(problem, layout, params=None):
    return jax.jit(functools.partial(execute, problem, layout, interpret=params or gpu_interpreter()))


def check(problem, layout, lhs, rhs, sizes, first, *extras, **options):
    """The result of the kernel, after a check that it equals the float64 oracle."""
    sizes, first = np.asarray(sizes).reshape(problem.batch, -1), np.asarray(first, np.int32).reshape(-1)
    got = jax.block_until_ready(kernel(problem, layout, **options)(lhs, rhs, sizes, first, *extras))
    assert got.shape == problem.out_shape and got.dtype == problem.out
    with np.errstate(invalid="ignore"):
        want = poisoned.meaning(problem, lhs, rhs, sizes, first, *extras)
    finite = want[np.isfinite(want)]
    if len(products(problem)) == 2:  # Inf times hi and lo, one of which may be zero, is NaN
        assert not np.isfinite(np.asarray(got, np.float32)[~np.isfinite(want)]).any()
        got, want = (np.where(np.isfinite(want), x, np.zeros_like(x)) for x in (np.asarray(got), want))
    oracle.check(got, want, scale=max(1.0, float(np.abs(finite).max(initial=0.0))))
    return np.asarray(got)


def tricky(problem, seed):
    """Group sizes that cross the edges of 8-row atoms, blocks, tiles and of all rows; int32[count, batch, groups]."""
    m, g, rng = problem.m, problem.groups, np.random.default_rng(seed)
    one = np.zeros(g, int)
    one[g // 2] = m
    full = np.diff([0, *np.sort(rng.integers(0, m + 1, g - 1)), m])
    wild = np.resize([-5, m // 3, -(2**31), 3, 2**31 - 1, 2], g)
    single = [
        np.resize([7, 65, 0, 129, 9, 63], g),  # starts that are no multiples of 8; a row past a block, a tile
        one,
        np.zeros(g, int),
        full,
        np.resize([0, 1, 8, 64, 128, 61], g),
        wild,
        np.resize([0, 0, 0, 0, 0, m - 3], g),
    ]
    single = [s if s.min() < 0 else np.diff([0, *np.minimum(np.cumsum(s), m)]) for s in single]
    return np.asarray([np.stack([np.roll(s, e) for e in range(problem.batch)]) for s in single], np.int32)
