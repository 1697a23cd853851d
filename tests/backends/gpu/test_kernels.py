"""Laws of the kernels in layouts so small that few rows cross every boundary: spans, grains, blocks, tiles, stages."""

import jax.numpy as jnp
import numpy as np
import pytest
from poisoned import numbers, spans, spoil

from trencadis.core.epilogue import Epilogue

from .interpreted import check, layout_of, rows_problem, sum_problem, tricky

# the interpreter multiplies in numpy, which warns of Inf times zero; as an error, that would end one of its threads
pytestmark = [pytest.mark.core, pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")]


def relu(z):
    return np.maximum(z, 0) if isinstance(z, np.ndarray) else jnp.maximum(z, 0)


BIAS = Epilogue(bias=np.dtype("float32"), activation=relu)
MORE = Epilogue(accumulate=True)

TURNED = {"turned": True, "tall": 96, "wide": 128, "slots": 1}

CASES = {
    # a window; the last column of tiles is narrower than the others; m and k are multiples of nothing
    "rows": (rows_problem(203, 100, 136, 6, "bf16 bf16 bf16", local=4), {}),
    "rows, stored [n, k]": (rows_problem(203, 70, 40, 6, transpose_rhs=True), {"wide": 64, "panel": 1}),
    "rows, tall": (rows_problem(330, 64, 64, 5, "f16 f16 f16"), {"tall": 256, "stages": 3, "blocks": 1}),
    "rows, largest": (rows_problem(330, 64, 384, 4, "bf16 bf16 bf16"), {"tall": 256, "wide": 192, "slots": 3}),
    "rows, float32": (rows_problem(203, 70, 96, 6, "f32 f32 bf16", local=5), {"wide": 64, "stages": 3}),
    "rows, mixed": (rows_problem(140, 33, 32, 6, "bf16 f16 f16", transpose_rhs=True), {"wide": 64, "blocks": 1}),
    "rows, lhs in halves": (rows_problem(140, 100, 72, 6, "f32 bf16 bf16", local=4, transpose_rhs=True), {"stages": 3}),
    "rows, rhs in halves": (rows_problem(140, 33, 72, 6, "bf16 f32 f32"), {"wide": 64}),
    "rows, bias": (rows_problem(140, 64, 264, 6, "bf16 bf16 bf16", epilogue=BIAS), {"wide": 256}),
    "rows, existing_out": (
        rows_problem(140, 64, 200, 6, "bf16 bf16 f16", local=4, epilogue=MORE), {"wide": 192, "slots": 4},
    ),
    "rows, batch": (rows_problem(75, 64, 64, 5, "bf16 bf16 bf16", local=4, batch=2, rhs_batch=2), {"wide": 64}),
    "rows, batch that shares weights": (rows_problem(75, 64, 32, 5, "f16 f16 f32", local=3, batch=2), {"wide": 64}),
    # rows as columns of the products; two columns of tiles, the last narrower
    "rows, turned": (rows_problem(203, 100, 136, 6, "bf16 bf16 bf16", local=4), TURNED),
    "rows, turned, stored [n, k]": (
        rows_problem(203, 70, 128, 6, "f16 f16 bf16", transpose_rhs=True), {**TURNED, "wide": 256, "stages": 3},
    ),
    "rows, turned, bias": (rows_problem(140, 64, 200, 6, "bf16 bf16 bf16", epilogue=BIAS), {**TURNED, "tall": 64}),
    "rows, turned, existing_out": (
        rows_problem(140, 64, 200, 6, "bf16 bf16 f16", local=4, epilogue=MORE), {**TURNED, "slots": 2, "blocks": 1},
    ),
    "rows, turned, float32": (rows_problem(140, 33, 64, 6, "f32 f32 bf16", local=5), TURNED),
    "rows, turned, batch": (rows_problem(75, 64, 64, 5, "bf16 bf16 bf16", local=4, batch=2, rhs_batch=2), TURNED),
    # two tiles of k, the last smaller; a tile and a bit of n
    "contraction": (sum_problem(203, 140, 136, 4, "bf16 bf16 bf16", local=3), {}),
    "contraction, stored [k, m]": (
        sum_problem(203, 140, 40, 3, "bf16 bf16 f32", transpose_lhs=True), {"wide": 64, "panel": 1, "stages": 3},
    ),
    "contraction, tall": (sum_problem(140, 270, 64, 3, "f16 f16 f16"), {"tall": 256, "wide": 64, "blocks": 1}),
    "contraction, wide": (sum_problem(140, 70, 200, 3, "bf16 bf16 f16"), {"wide": 192, "stages": 3}),
    "contraction, largest": (sum_problem(140, 270, 320, 3), {"tall": 256, "wide": 192, "slots": 3}),
    "contraction, float32": (sum_problem(203, 100, 40, 4, "f32 f32 bf16"), {"wide": 64, "stages": 3}),
    "contraction, mixed": (sum_problem(140, 72, 40, 4, "bf16 f16 f16", transpose_lhs=True), {"wide": 64, "blocks": 1}),
    "contraction, rhs in halves": (sum_problem(203, 72, 72, 4, "bf16 f32 bf16", local=3), {"stages": 3}),
    "contraction, lhs in halves": (
        sum_problem(140, 72, 40, 4, "f32 bf16 f32", transpose_lhs=True), {"wide": 64, "blocks": 1},
    ),
    "contraction, existing_out": (
        sum_problem(140, 72, 72, 5, "bf16 bf16 bf16", local=4, epilogue=MORE), {"wide": 64, "panel": 1},
    ),
    "contraction, batch": (sum_problem(75, 64, 64, 4, "bf16 bf16 bf16", local=3, batch=2), {"wide": 64}),
}  # fmt: skip


def windows(problem):
    """First groups: the last window, one in the middle, and some that reach out of the groups."""
    outside = problem.groups - problem.local_groups
    return [outside, outside // 2, 0, -1, problem.groups - 1, outside] if outside else [0]


@pytest.mark.parametrize("name", CASES)
def test_equals_its_meaning_whatever_others_hold(name):
    """NaN and Inf in all that is somebody else's or nobody's; what nobody owns is zero, or kept to the bit."""
    problem, changes = CASES[name]
    layout, at = layout_of(problem, **changes), list(CASES).index(name)
    several = tricky(problem, seed=at)
    for i in (0, 1 + at % 6):  # every case crosses all ends; the other sizes take turns
        sizes = several[i]
        first = np.roll(np.resize(windows(problem), max(6, problem.batch)), -i)[: problem.batch]
        poison = (np.nan, np.inf)[i % 2]
        lhs, rhs, *extras = spoil(problem, sizes, first, numbers(problem, i), i % problem.spans, poison)
        got = check(problem, layout, lhs, rhs, sizes, first, *extras)
        mine = spans(problem, sizes, first)
        if got.ndim == 2:
            rest = np.setdiff1d(np.arange(problem.rows), [row for span in mine for row in span])
        else:
            rest = [at for at, span in enumerate(mine) if not span]
        kept = extras[-1] if problem.epilogue.accumulate else np.zeros_like(got)
        assert got[rest].tobytes() == kept[rest].tobytes()
