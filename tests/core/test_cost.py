"""Flops and bytes are counted for owned rows and nonempty groups."""

import pytest

from trencadis.core.arguments import problem_of
from trencadis.core.cost import cost

pytestmark = pytest.mark.core


def test_rows():
    problem = problem_of((100, 10), (4, 10, 20), dtype="bfloat16")
    whole = cost(problem)
    assert (whole.flops, whole.bytes) == (2 * 100 * 10 * 20, 2 * (100 * 10 + 4 * 10 * 20 + 100 * 20))
    part = cost(problem, [30, 0, 20, 0])
    assert (part.flops, part.bytes) == (2 * 50 * 10 * 20, 2 * (50 * 10 + 2 * 10 * 20 + 50 * 20))
    assert part.intensity == part.flops / part.bytes


def test_contraction_writes_every_group():
    problem = problem_of((10, 100), (100, 20), groups=4)
    assert cost(problem, [30, 0, 20, 0]).bytes == 4 * (50 * 10 + 50 * 20 + 4 * 10 * 20)
    assert str(cost(problem)) == "40 kFLOP, 15.2 kB, 2.63 flop/byte"
