"""No warpgroup reads memory that another may still be writing, as far as the race detector sees."""

import dataclasses

import pytest
from poisoned import numbers

from trencadis.core.jax_compat import JAX, gpu_interpreter

from .interpreted import check, layout_of, rows_problem, sum_problem

pytestmark = [
    pytest.mark.core,
    pytest.mark.skipif(JAX < (0, 11), reason="its race detector does not follow wgmma and copies to global memory"),
]


@pytest.mark.parametrize(
    "problem",
    [rows_problem(72, 192, 64, 2, "bf16 bf16 bf16"), sum_problem(200, 64, 64, 2, "bf16 bf16 bf16")],
    ids=["rows", "contraction"],
)
def test_no_races(problem):
    """Three steps in two stages, and a group that starts in the middle of an 8-row atom."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    params = dataclasses.replace(gpu_interpreter(), detect_races=True)
    layout = layout_of(problem, block_n=64, num_ctas=1)
    check(problem, layout, *numbers(problem, 0), [21, problem.m - 30], [0], params=params)
    assert not gpu_callbacks.get_races().races_found
