"""No warpgroup reads memory that another may still be writing, as far as the race detector sees."""

import dataclasses

import gated_cases
import numpy as np
import pytest
from poisoned import numbers

from trencadis.core.jax_compat import JAX, gpu_interpreter

from .interpreted import check, kernel, layout_of, rows_problem, sum_problem

pytestmark = [
    pytest.mark.core,
    pytest.mark.skipif(JAX < (0, 11), reason="its race detector does not follow wgmma and copies to global memory"),
]


@pytest.mark.parametrize(
    ("problem", "pipelines"),
    [(rows_problem(72, 192, 64, 2, "bf16 bf16 bf16"), 2), (sum_problem(200, 64, 64, 2, "bf16 bf16 bf16"), 1)],
    ids=["rows", "contraction"],
)
def test_no_races(problem, pipelines):
    """Three steps in two stages, and a group that starts in the middle of an 8-row atom."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    params = dataclasses.replace(gpu_interpreter(), detect_races=True)
    layout = layout_of(problem, block_n=64, num_ctas=1, pipelines=pipelines)
    check(problem, layout, *numbers(problem, 0), [21, problem.m - 30], [0], params=params)
    assert not gpu_callbacks.get_races().races_found


@pytest.mark.parametrize(
    ("problem", "changes"),
    [
        (
            gated_cases.gathered(72, 192, 64, 2, "bf16 bf16 bf16", keep=False),
            dict(swap_ab=True, gated=True, block_m=96, store_buffers=1),
        ),
        (gated_cases.weights(200, 64, 64, 2, "bf16 bf16 bf16", pair=True, k=2), dict(block_n=64, two_results=True)),
    ],
    ids=["rows", "contraction"],
)
def test_no_races_where_rows_are_gathered(problem, changes):
    """The threads of the producer copy rows; the mask warpgroup writes to them as well."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    params = dataclasses.replace(gpu_interpreter(), detect_races=True)
    layout = layout_of(problem, **changes, num_ctas=1)
    lhs, rhs, *rest = operands = gated_cases.numbers(problem, 0)
    sizes, first = np.array([[21, problem.m - 30]], np.int32), np.zeros(1, np.int32)
    found = kernel(problem, layout, params)(lhs, rhs, sizes, first, *rest)
    gated_cases.check(problem, sizes, first, operands, [np.asarray(x) for x in found])
    assert not gpu_callbacks.get_races().races_found
