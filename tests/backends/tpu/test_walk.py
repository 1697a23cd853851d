"""The walk against a slow twin, and the table of heights against all ways to cover a span."""

import functools
import itertools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import strategies
from hypothesis import strategies as st
from poisoned import rows_problem, sum_problem

from trencadis.backends.tpu.layout import heights_table
from trencadis.backends.tpu.walk import Walk, row_tiles
from trencadis.core.problem import Form

from .interpreted import rows_layout, sum_layout

pytestmark = pytest.mark.core

M, G = 150, 6
WALKS = {
    "rows": (rows_problem(M, 1, 384, G, local=4), rows_layout(wide=128), (0, 3)),
    "rows of a batch": (rows_problem(M, 1, 384, G, local=3, batch=3), rows_layout(slab=16, heights=(32, 48)), (1, 2)),
    "one height": (rows_problem(M, 1, 128, G), rows_layout(heights=(24,)), (0, 1)),
    "contraction": (sum_problem(M, 256, 256, G, local=4), sum_layout(), (0, 2)),
    "contraction of a batch": (sum_problem(M, 1, 1, G, batch=2), sum_layout(slab=32, heights=(64,)), (0, 1)),
}


@functools.cache
def steps(name):
    """The walk's first place, its next one, and whether it is over, each compiled once."""
    problem, layout, blocks = WALKS[name]

    def on(f):
        def call(sizes, first, *place):
            scalars = {"sizes": sizes, "first": first, "table": jnp.asarray(layout.table, jnp.int32)}
            return f(Walk(problem, layout, scalars, tuple(map(np.int32, blocks))), *place)

        return jax.jit(call)

    return on(lambda walk: walk.begin()), on(lambda walk, place: (walk.after(place), walk.rows(place))), problem.spans


def walked(name, sizes, first):
    """(span, first and last row of the span or None, block, row of the tile, rows of the tile), place by place."""
    begin, after, spans = steps(name)
    place, places = begin(sizes, first), []
    while int(place.span) < spans:
        span, start, end, block, row = map(int, place)
        place, rows = after(sizes, first, place)
        places.append((span, (start, end) if end > start else None, block, row if end > start else None, int(rows)))
        assert len(places) < 1000
    return places


def twin(name, sizes, first):
    problem, layout, blocks = WALKS[name]
    slab, table, places = layout.slab, layout.table, []
    for entry, i in itertools.product(range(problem.batch), range(problem.local_groups)):
        group, base = int(first[entry]) + i, entry * M
        start, end = oracle.bounds(sizes[entry], M)[group] if 0 <= group < G else (0, 0)
        start, end, span = start + base, end + base, entry * problem.local_groups + i
        if start == end:
            if problem.form is Form.CONTRACTION:
                places += [(span, None, block, None, 0) for block in range(*blocks)]
            continue
        for block in range(*blocks):
            row, bottom = start // slab * slab, -(-end // slab) * slab
            while row < bottom:
                height = table[min((bottom - row) // slab, len(table) - 1)]
                places.append((span, (start, end), block, row, min(height, bottom - row)))
                row += height
    return places


@pytest.mark.parametrize("name", WALKS)
@hypothesis.given(sizes=st.lists(strategies.sizes(M, G), min_size=3, max_size=3), data=st.data())
def test_equals_its_slow_twin(name, sizes, data):
    problem = WALKS[name][0]
    first = data.draw(st.lists(st.integers(-2, G + 1), min_size=problem.batch, max_size=problem.batch))
    sizes, first = np.stack(sizes[: problem.batch]), np.asarray(first, np.int32)
    assert walked(name, sizes.reshape(-1), first) == twin(name, sizes, first)


@hypothesis.given(raw=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2 * G, max_size=2 * G))
def test_never_leaves_the_rows_of_its_entry(raw):
    """Whatever a traced array holds."""
    sizes, first = np.asarray(raw, np.int32), np.asarray([0, 0], np.int32)
    name = "contraction of a batch"
    assert walked(name, sizes, first) == twin(name, sizes.reshape(2, G), first)


@hypothesis.given(
    heights=st.sets(st.integers(1, 5), min_size=1, max_size=4),
    extra=st.lists(st.integers(0, 50), min_size=4, max_size=4),
    slab=st.sampled_from([8, 32]),
)
def test_the_table_of_heights_is_the_cheapest_cover(heights, extra, slab):
    heights = sorted(slab * h for h in heights)
    price = {h: h + extra[i] for i, h in enumerate(heights)}
    table = heights_table(tuple(heights), slab, price.__getitem__)
    for slabs in range(1, 2 * heights[-1] // slab + 1):
        left, paid = slabs * slab, 0
        while left > 0:
            height = table[min(left // slab, len(table) - 1)]
            left, paid = left - height, paid + price[height]
        counts = itertools.product(*(range(-(-slabs * slab // h) + 1) for h in heights))
        covers = (c for c in counts if sum(n * h for n, h in zip(c, heights, strict=True)) >= slabs * slab)
        assert paid == min(sum(n * price[h] for n, h in zip(c, heights, strict=True)) for c in covers)


@pytest.mark.parametrize("name", [name for name in WALKS if "batch" not in name])
@hypothesis.given(sizes=strategies.sizes(M, G))
def test_row_tiles_are_those_of_the_walk(name, sizes):
    """What pictures are drawn from: the first row of each tile, and the rows of whole slabs that it has."""
    problem, layout, blocks = WALKS[name]
    places = [place for place in walked(name, sizes, np.zeros(1, np.int32)) if place[2] == blocks[0] and place[4]]
    for group, (start, end) in enumerate(oracle.bounds(sizes, M)[: problem.local_groups]):
        tiles = row_tiles(problem, layout, start, end)
        mine = [(row, rows) for span, _, _, row, rows in places if span == group]
        assert [tile.rows.start for tile in tiles] == [row for row, _ in mine]
        if problem.form is Form.ROWS:
            assert all(len(tile.rows) in layout.heights for tile in tiles)
        else:
            assert [len(tile.rows) for tile in tiles] == [-(-rows // layout.fine) * layout.fine for _, rows in mine]
        assert [row for tile in tiles for row in tile.owned] == list(range(start, end))
        assert all(set(tile.owned) <= set(tile.rows) for tile in tiles)
