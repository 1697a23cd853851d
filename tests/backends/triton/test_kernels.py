"""The kernels by value, interpreted, in layouts so small that few rows cross every boundary: spans, tiles and steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

pytest.importorskip("triton")

from poisoned import check_unowned, meaning, numbers, rows_problem, spoil, sum_problem

from trencadis.backends.triton import execute
from trencadis.backends.triton.layout import Layout
from trencadis.core.epilogue import Epilogue

pytestmark = pytest.mark.core


def relu(z):
    return np.maximum(z, 0) if isinstance(z, np.ndarray) else jnp.maximum(z, 0)


BIAS, MORE = Epilogue(bias=np.dtype("float32"), activation=relu), Epilogue(accumulate=True)
SCALES = Epilogue(by_row=True, by_column=True)
SMALL = Layout(block_m=32, block_n=32, block_k=16, warps=4, stages=2, raster_group=2)

CASES = {
    # a window; the last column of tiles is narrower than the others; m and k are multiples of nothing
    "rows": (rows_problem(103, 40, 72, 6, "bf16 bf16 bf16", local=4), {}),
    "rows, masked": (rows_problem(103, 41, 72, 6, "bf16 bf16 f32", local=4), {"peeled": False}),
    "rows, stored [n, k]": (rows_problem(103, 41, 40, 6, "f16 f16 f32", transpose_rhs=True), {"raster_group": 1}),
    "rows, persistent": (rows_problem(103, 40, 72, 6, "bf16 bf16 bf16", local=4), {"programs": 3, "tma": True}),
    "rows, persistent, stored [n, k]": (
        rows_problem(103, 40, 72, 6, "bf16 bf16 bf16", transpose_rhs=True), {"programs": 5, "tma": True},
    ),
    "rows, short tiles": (rows_problem(103, 40, 72, 6, "bf16 bf16 bf16", local=4), {"short_m": 16}),
    "rows, float32": (rows_problem(103, 33, 40, 6, local=5), {}),
    "rows, float32, six products": (rows_problem(103, 33, 40, 6, precision="highest"), {}),
    "rows, float32 by bfloat16, six products": (
        rows_problem(75, 33, 40, 6, "f32 bf16 f32", precision="highest", transpose_rhs=True), {},
    ),
    "rows, bfloat16, which is exact": (rows_problem(45, 33, 40, 5, "bf16 bf16 f32", precision="highest"), {}),
    "rows, mixed": (rows_problem(75, 33, 32, 6, "bf16 f16 f16", transpose_rhs=True), {}),
    "rows, float32 by bfloat16": (rows_problem(75, 33, 40, 6, "f32 bf16 bf16", local=4), {}),
    "rows, bias": (rows_problem(75, 33, 72, 6, "bf16 bf16 bf16", epilogue=BIAS), {}),
    "rows, scales": (rows_problem(75, 33, 40, 6, "bf16 bf16 f32", epilogue=SCALES), {}),
    "rows, existing_out": (rows_problem(75, 33, 40, 6, "bf16 bf16 f16", local=4, epilogue=MORE), {}),
    "rows, int8": (rows_problem(75, 40, 40, 6, "s8 s8 s32"), {"block_k": 32}),
    "rows, int8 with scales": (rows_problem(75, 40, 40, 6, "s8 s8 bf16", epilogue=SCALES), {"block_k": 32}),
    "rows, float8": (rows_problem(75, 40, 40, 6, "e4 e4 f32", transpose_rhs=True), {"block_k": 32}),
    "rows, int8 weights": (rows_problem(75, 40, 40, 6, "bf16 s8 bf16"), {}),
    "rows, float8 weights": (rows_problem(75, 40, 40, 6, "f16 e5 f16", transpose_rhs=True), {}),
    "rows, batch": (rows_problem(45, 33, 40, 5, "bf16 bf16 bf16", local=4, batch=2, rhs_batch=2), {}),
    "rows, batch that shares weights": (rows_problem(45, 33, 32, 5, "f16 f16 f32", local=3, batch=2), {}),
    "contraction": (sum_problem(103, 40, 72, 4, "bf16 bf16 bf16", local=3), {}),
    "contraction, stored [k, m]": (sum_problem(103, 40, 33, 3, "bf16 bf16 f32", transpose_lhs=True), {}),
    "contraction, persistent": (sum_problem(103, 40, 72, 5, "bf16 bf16 f32", local=4), {"programs": 5}),
    "contraction, persistent, TMA": (
        sum_problem(103, 40, 72, 5, "bf16 bf16 bf16", epilogue=SCALES), {"programs": 4, "tma": True},
    ),
    "contraction, persistent, stored [k, m]": (
        sum_problem(103, 40, 33, 3, "bf16 bf16 f32", transpose_lhs=True), {"programs": 2},
    ),
    "contraction, persistent, existing_out": (
        sum_problem(75, 40, 40, 5, "bf16 bf16 bf16", local=4, epilogue=MORE), {"programs": 3},
    ),
    "contraction, float32, six products": (sum_problem(103, 40, 40, 4, precision="highest"), {}),
    "contraction, float16, which is exact": (sum_problem(45, 40, 40, 4, "f16 f16 f32", precision="highest"), {}),
    "contraction, float32": (sum_problem(103, 40, 40, 4, "f32 f32 bf16"), {}),
    "contraction, scales": (sum_problem(75, 40, 33, 4, "bf16 bf16 f32", epilogue=SCALES), {}),
    "contraction, existing_out": (sum_problem(75, 40, 40, 5, "bf16 bf16 bf16", local=4, epilogue=MORE), {}),
    "contraction, batch": (sum_problem(45, 40, 40, 4, "bf16 bf16 bf16", local=3, batch=2), {}),
}  # fmt: skip


def tricky(problem):
    """Group sizes that cross the edges of tiles and of all rows, or lie about them: int32[count, batch, groups]."""
    m, g = problem.m, problem.groups
    one = np.zeros(g, int)
    one[g // 2] = m
    single = [np.resize([7, 33, 0, 17, 9, 1], g), one, np.resize([-5, m // 3, 3, 2**31 - 1, 2], g), np.zeros(g, int)]
    single = [s if s.min() < 0 else np.diff([0, *np.minimum(np.cumsum(s), m)]) for s in single]
    return np.asarray([np.stack([np.roll(s, e) for e in range(problem.batch)]) for s in single], np.int32)


def windows(problem):
    """First groups of windows: the last one, one in the middle, and some that reach out of the groups."""
    outside = problem.groups - problem.local_groups
    return [outside, outside // 2, problem.groups - 1, -1] if outside else [0]


@functools.cache
def kernel(problem, layout):
    return jax.jit(functools.partial(execute, problem, layout, "9.0", interpret=True))


@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle_with_poison_elsewhere(name):
    """NaN and Inf fill other groups and unowned rows; unowned rows of the result are zero, or kept to the bit."""
    problem, changes = CASES[name]
    at = list(CASES).index(name)
    for i in (0, 1 + at % 3):  # every case has the sizes that cross all edges, and one of the others
        sizes = tricky(problem)[i]
        first = np.asarray(np.roll(np.resize(windows(problem), 4), -i - at)[: problem.batch], np.int32)
        poison = np.nan if i % 2 or problem.lhs.name == "float8_e4m3fn" else np.inf
        lhs, rhs, *extras = spoil(problem, sizes, first, numbers(problem, i), i % problem.spans, poison)
        got = np.asarray(kernel(problem, SMALL.replace(**changes))(lhs, rhs, sizes, first, *extras))
        with np.errstate(invalid="ignore"):
            want = meaning(problem, lhs, rhs, sizes, first, *extras)
        finite = want[np.isfinite(want)]
        oracle.check(got, want, scale=max(1.0, float(np.abs(finite).max(initial=0.0))))
        check_unowned(problem, got, sizes, first, extras)


@pytest.mark.parametrize("form", ["rows", "contraction"])
def test_six_products_keep_infinities(form):
    """The parts of an Inf are Inf and NaN, but its sums are those of float32: Inf, and NaN with a zero."""
    make = rows_problem if form == "rows" else sum_problem
    problem = make(40, 33, 40, 2, precision="highest")
    lhs, rhs = numbers(problem, 0)
    lhs[3, 5], lhs[20, 7], rhs[0, 0] = np.inf, 3e38, 0  # the largest numbers have parts too
    rhs.reshape(-1)[-1] = -np.inf
    sizes, first = np.array([[30, 10]], np.int32), np.zeros(1, np.int32)
    got = np.asarray(kernel(problem, SMALL)(lhs, rhs, sizes, first))
    with np.errstate(invalid="ignore", over="ignore"):
        want = meaning(problem, lhs, rhs, sizes, first).astype(np.float32)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_allclose(got[~np.isnan(want)], want[~np.isnan(want)], rtol=1e-5, atol=1e-5)
