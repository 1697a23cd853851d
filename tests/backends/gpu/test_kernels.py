"""Laws of the kernels in layouts so small that few rows cross every boundary: spans, atoms, blocks, tiles, stages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from poisoned import check_unowned, numbers, spoil
from sweep import sweep

from trencadis.backends.gpu import execute, mma_shapes
from trencadis.core.epilogue import Epilogue

from .interpreted import check, kernel, layout_of, rows_problem, sum_problem, tricky

# the interpreter multiplies in numpy, which warns of Inf times zero; as an error, that would end one of its threads
pytestmark = [pytest.mark.core, pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")]


def relu(z):
    return np.maximum(z, 0) if isinstance(z, np.ndarray) else jnp.maximum(z, 0)


BIAS = Epilogue(bias=np.dtype("float32"), activation=relu)
MORE = Epilogue(accumulate=True)

SWAP_AB = {"swap_ab": True, "block_m": 96, "block_n": 128, "store_buffers": 1}

CASES = {
    # a window; the last column of tiles is narrower than the others; m and k are multiples of nothing
    "rows": (rows_problem(203, 100, 136, 6, "bf16 bf16 bf16", local=4), {}),
    "rows, stored [n, k]": (rows_problem(203, 70, 40, 6, transpose_rhs=True), {"block_n": 64, "raster_group": 1}),
    "rows, 256 x 128": (rows_problem(330, 64, 64, 5, "f16 f16 f16"), {"block_m": 256, "stages": 3, "num_ctas": 1}),
    "rows, 256 x 192": (
        rows_problem(330, 64, 384, 4, "bf16 bf16 bf16"), {"block_m": 256, "block_n": 192, "store_buffers": 3},
    ),
    "rows, float32": (rows_problem(203, 70, 96, 6, "f32 f32 bf16", local=5), {"block_n": 64, "stages": 3}),
    "rows, mixed": (rows_problem(140, 33, 32, 6, "bf16 f16 f16", transpose_rhs=True), {"block_n": 64, "num_ctas": 1}),
    "rows, lhs hi/lo": (rows_problem(140, 100, 72, 6, "f32 bf16 bf16", local=4, transpose_rhs=True), {"stages": 3}),
    "rows, rhs hi/lo": (rows_problem(140, 33, 72, 6, "bf16 f32 f32"), {"block_n": 64}),
    "rows, bias": (rows_problem(140, 64, 264, 6, "bf16 bf16 bf16", epilogue=BIAS), {"block_n": 256}),
    "rows, existing_out": (
        rows_problem(140, 64, 200, 6, "bf16 bf16 f16", local=4, epilogue=MORE), {"block_n": 192, "store_buffers": 4},
    ),
    "rows, batch": (rows_problem(75, 64, 64, 5, "bf16 bf16 bf16", local=4, batch=2, rhs_batch=2), {"block_n": 64}),
    "rows, batch that shares weights": (rows_problem(75, 64, 32, 5, "f16 f16 f32", local=3, batch=2), {"block_n": 64}),
    # two columns of tiles, the last narrower
    "rows, swap-AB": (rows_problem(203, 100, 136, 6, "bf16 bf16 bf16", local=4), SWAP_AB),
    "rows, swap-AB, stored [n, k]": (
        rows_problem(203, 70, 128, 6, "f16 f16 bf16", transpose_rhs=True), {**SWAP_AB, "block_n": 256, "stages": 3},
    ),
    "rows, swap-AB, bias, two pipelines": (
        rows_problem(140, 64, 200, 6, "bf16 bf16 bf16", epilogue=BIAS), {**SWAP_AB, "block_m": 64, "pipelines": 2},
    ),
    "rows, swap-AB, existing_out": (
        rows_problem(140, 64, 200, 6, "bf16 bf16 f16", local=4, epilogue=MORE),
        {**SWAP_AB, "store_buffers": 2, "num_ctas": 1},
    ),
    "rows, swap-AB, float32": (rows_problem(140, 33, 64, 6, "f32 f32 bf16", local=5), SWAP_AB),
    "rows, swap-AB, batch": (rows_problem(75, 64, 64, 5, "bf16 bf16 bf16", local=4, batch=2, rhs_batch=2), SWAP_AB),
    # two tiles of k, the last smaller; a tile and a bit of n
    "contraction": (sum_problem(203, 140, 136, 4, "bf16 bf16 bf16", local=3), {}),
    "contraction, stored [k, m]": (
        sum_problem(203, 140, 40, 3, "bf16 bf16 f32", transpose_lhs=True),
        {"block_n": 64, "raster_group": 1, "stages": 3},
    ),
    "contraction, 256 x 64": (
        sum_problem(140, 270, 64, 3, "f16 f16 f16"), {"block_m": 256, "block_n": 64, "num_ctas": 1},
    ),
    "contraction, 128 x 192": (sum_problem(140, 70, 200, 3, "bf16 bf16 f16"), {"block_n": 192, "stages": 3}),
    "contraction, 256 x 192": (sum_problem(140, 270, 320, 3), {"block_m": 256, "block_n": 192, "store_buffers": 3}),
    "contraction, float32": (sum_problem(203, 100, 40, 4, "f32 f32 bf16"), {"block_n": 64, "stages": 3}),
    "contraction, mixed": (
        sum_problem(140, 72, 40, 4, "bf16 f16 f16", transpose_lhs=True), {"block_n": 64, "num_ctas": 1},
    ),
    "contraction, rhs hi/lo": (sum_problem(203, 72, 72, 4, "bf16 f32 bf16", local=3), {"stages": 3}),
    "contraction, lhs hi/lo": (
        sum_problem(140, 72, 40, 4, "f32 bf16 f32", transpose_lhs=True), {"block_n": 64, "num_ctas": 1},
    ),
    "contraction, float32, high": (
        sum_problem(203, 72, 72, 4, "f32 f32 f32", local=3, precision="high"), {"stages": 3},
    ),
    "contraction, float32, high, stored [k, m]": (
        sum_problem(140, 72, 40, 4, "f32 f32 f32", transpose_lhs=True, precision="high"), {"block_n": 64},
    ),
    "contraction, existing_out": (
        sum_problem(140, 72, 72, 5, "bf16 bf16 bf16", local=4, epilogue=MORE), {"block_n": 64, "raster_group": 1},
    ),
    "contraction, batch": (sum_problem(75, 64, 64, 4, "bf16 bf16 bf16", local=3, batch=2), {"block_n": 64}),
}  # fmt: skip
DEFAULT = [
    "rows", "rows, lhs hi/lo", "rows, existing_out", "rows, swap-AB, bias, two pipelines",
    "contraction", "contraction, stored [k, m]", "contraction, rhs hi/lo", "contraction, float32, high",
    "contraction, batch",
]  # fmt: skip


def windows(problem):
    """First groups of windows: the last one, one in the middle, and some that reach out of the groups."""
    outside = problem.groups - problem.local_groups
    return [outside, outside // 2, 0, -1, problem.groups - 1, outside] if outside else [0]


@pytest.mark.parametrize("name", sweep(CASES, DEFAULT))
def test_equals_the_oracle_with_poison_elsewhere(name):
    """NaN and Inf fill other groups and unowned rows; unowned rows of the result are zero, or kept to the bit."""
    problem, changes = CASES[name]
    layout, at = layout_of(problem, **changes), list(CASES).index(name)
    several = tricky(problem, seed=at)
    for i in (0, 1 + at % 6):  # every case has the sizes that cross all edges, and one of the others
        sizes = several[i]
        first = np.roll(np.resize(windows(problem), max(6, problem.batch)), -i)[: problem.batch]
        poison = (np.nan, np.inf)[i % 2]
        lhs, rhs, *extras = spoil(problem, sizes, first, numbers(problem, i), i % problem.spans, poison)
        got = check(problem, layout, lhs, rhs, sizes, first, *extras)
        check_unowned(problem, got, sizes, first, extras)


def test_precise_sums_have_the_error_of_their_parts():
    """Also of numbers that bfloat16 rounds to infinity; an infinity stays one, beside numbers with zeros as parts."""
    problem = sum_problem(96, 64, 64, 2, "f32 f32 f32", precision="high")
    rng = np.random.default_rng(0)
    lhs, rhs = (np.exp(rng.normal(size=(96, 64))).astype(np.float32) for _ in range(2))
    lhs[0, 3], rhs[0] = np.finfo(np.float32).max, 2.0**-30
    got = np.asarray(kernel(problem, layout_of(problem))(lhs, rhs, np.array([[40, 56]]), np.zeros(1, np.int32)))
    want = np.stack([lhs[rows].astype(float).T @ rhs[rows].astype(float) for rows in (slice(40), slice(40, None))])
    np.testing.assert_allclose(got, want, rtol=2.0**-16)
    lhs[2, 7], rhs[2] = np.inf, 2.0
    got = np.asarray(kernel(problem, layout_of(problem))(lhs, rhs, np.array([[40, 56]]), np.zeros(1, np.int32)))
    assert (got[0, 7] == np.inf).all() and np.isfinite(got[0, 8:]).all()


@pytest.mark.parametrize("swap_ab", [False, True])
def test_a_last_column_of_tiles_as_wide_as_the_others_is_cut_when_it_is_stored(swap_ab, monkeypatch):
    """Where a narrower product saves little, columns outside of the result are multiplied, and not stored."""
    monkeypatch.setattr(mma_shapes, "NARROW_GAIN", 1)
    problem = rows_problem(90, 64, 448, 3, "bf16 bf16 bf16")
    layout = layout_of(problem, **(SWAP_AB if swap_ab else {"block_n": 192, "store_buffers": 3}), stages=3)
    assert mma_shapes.widths(problem, layout) == [layout.block_n] and problem.n % layout.block_n
    sizes = tricky(problem, seed=1)[0]
    lhs, rhs = numbers(problem, 1)
    check(problem, layout, lhs, rhs, sizes, [0])


def test_all_products_of_a_kernel_share_one_store():
    """A kernel for tiles of many heights has as many copies to global memory in its code as one for few heights."""
    problem = rows_problem(2048, 64, 256, 4, "bf16 bf16 bf16")
    copies = {}
    for block_m in (64, 192):
        layout = layout_of(problem, **{**SWAP_AB, "block_m": block_m, "block_n": 256})
        arrays = [jax.ShapeDtypeStruct(*x) for x in (((2048, 64), "bfloat16"), ((4, 64, 256), "bfloat16"))]
        integers = [jax.ShapeDtypeStruct((1, 4), "int32"), jax.ShapeDtypeStruct((1,), "int32")]
        traced = jax.make_jaxpr(functools.partial(execute, problem, layout))(*arrays, *integers)
        copies[len(layout.heights)] = str(traced).count("copy_smem_to_gmem[")
    assert len(copies) == 2 and len(set(copies.values())) == 1 and 0 not in copies.values()
