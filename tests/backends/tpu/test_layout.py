"""The table of tile heights against an exhaustive search over all covers of a span."""

import itertools

import hypothesis
import pytest
from hypothesis import strategies as st

from trencadis.backends.tpu.layout import cheapest_heights

pytestmark = pytest.mark.core


@hypothesis.given(
    heights=st.sets(st.integers(1, 5), min_size=1, max_size=4),
    extra=st.lists(st.integers(0, 50), min_size=4, max_size=4),
    unit=st.sampled_from([8, 32]),
)
def test_the_height_table_gives_the_cheapest_cover(heights, extra, unit):
    heights = sorted(unit * h for h in heights)
    price = {h: h + extra[i] for i, h in enumerate(heights)}
    table = cheapest_heights(tuple(heights), unit, price.__getitem__)
    for units in range(1, 2 * heights[-1] // unit + 1):
        left, paid = units * unit, 0
        while left > 0:
            height = table[min(left // unit, len(table) - 1)]
            left, paid = left - height, paid + price[height]
        counts = itertools.product(*(range(-(-units * unit // h) + 1) for h in heights))
        covers = (c for c in counts if sum(n * h for n, h in zip(c, heights, strict=True)) >= units * unit)
        assert paid == min(sum(n * price[h] for n, h in zip(c, heights, strict=True)) for c in covers)
