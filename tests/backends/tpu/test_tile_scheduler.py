"""The tile scheduler against the same loops in plain Python."""

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

from trencadis.backends.tpu.tile_scheduler import TileScheduler, row_tiles
from trencadis.core.problem import Form

from .interpreted import contraction_layout, rows_layout

pytestmark = pytest.mark.core

M, G = 150, 6
CASES = {
    "rows": (rows_problem(M, 1, 384, G, local=4), rows_layout(block_n=128), (0, 3)),
    "rows of a batch": (
        rows_problem(M, 1, 384, G, local=3, batch=3),
        rows_layout(sublane_tile=16, heights=(32, 48)),
        (1, 2),
    ),
    "one height": (rows_problem(M, 1, 128, G), rows_layout(heights=(24,)), (0, 1)),
    "contraction": (sum_problem(M, 256, 256, G, local=4), contraction_layout(), (0, 2)),
    "contraction of a batch": (
        sum_problem(M, 1, 1, G, batch=2),
        contraction_layout(sublane_tile=32, heights=(64,)),
        (0, 1),
    ),
}


@functools.cache
def compiled(name):
    """The first tile, the next one with the rows of the tile before it, each compiled once; and the number of spans."""
    problem, layout, blocks = CASES[name]

    def on(f):
        def call(sizes, first, *tile):
            scalars = {"sizes": sizes, "first": first, "height_table": jnp.asarray(layout.height_table, jnp.int32)}
            return f(TileScheduler(problem, layout, scalars, tuple(map(np.int32, blocks))), *tile)

        return jax.jit(call)

    first_tile = on(lambda scheduler: scheduler.first_tile())
    next_tile = on(lambda scheduler, tile: (scheduler.next_tile(tile), scheduler.rows(tile)))
    return first_tile, next_tile, problem.spans


def scheduled(name, sizes, first):
    """(span, first and last row of the span or None, block, row of the tile, rows of the tile), tile by tile."""
    first_tile, next_tile, spans = compiled(name)
    tile, tiles = first_tile(sizes, first), []
    while int(tile.span) < spans:
        span, start, end, block, row = map(int, tile)
        tile, rows = next_tile(sizes, first, tile)
        tiles.append((span, (start, end) if end > start else None, block, row if end > start else None, int(rows)))
        assert len(tiles) < 1000
    return tiles


def expected(name, sizes, first):
    """What `scheduled` should give, by loops over groups, column blocks and row tiles."""
    problem, layout, blocks = CASES[name]
    unit, table, tiles = layout.sublane_tile, layout.height_table, []
    for entry, i in itertools.product(range(problem.batch), range(problem.local_groups)):
        group, base = int(first[entry]) + i, entry * M
        start, end = oracle.bounds(sizes[entry], M)[group] if 0 <= group < G else (0, 0)
        start, end, span = start + base, end + base, entry * problem.local_groups + i
        if start == end:
            if problem.form is Form.CONTRACTION:
                tiles += [(span, None, block, None, 0) for block in range(*blocks)]
            continue
        for block in range(*blocks):
            row, bottom = start // unit * unit, -(-end // unit) * unit
            while row < bottom:
                height = table[min((bottom - row) // unit, len(table) - 1)]
                tiles.append((span, (start, end), block, row, min(height, bottom - row)))
                row += height
    return tiles


@pytest.mark.parametrize("name", CASES)
@hypothesis.given(sizes=st.lists(strategies.sizes(M, G), min_size=3, max_size=3), data=st.data())
def test_equals_the_loops_in_python(name, sizes, data):
    problem = CASES[name][0]
    first = data.draw(st.lists(st.integers(-2, G + 1), min_size=problem.batch, max_size=problem.batch))
    sizes, first = np.stack(sizes[: problem.batch]), np.asarray(first, np.int32)
    assert scheduled(name, sizes.reshape(-1), first) == expected(name, sizes, first)


@hypothesis.given(raw=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2 * G, max_size=2 * G))
def test_stays_inside_the_rows_of_the_batch_entry(raw):
    """Whatever a traced array of sizes holds."""
    sizes, first = np.asarray(raw, np.int32), np.asarray([0, 0], np.int32)
    name = "contraction of a batch"
    assert scheduled(name, sizes, first) == expected(name, sizes.reshape(2, G), first)


@pytest.mark.parametrize("name", [name for name in CASES if "batch" not in name])
@hypothesis.given(sizes=strategies.sizes(M, G))
def test_row_tiles_are_those_of_the_scheduler(name, sizes):
    """What pictures are drawn from: the first row of each tile, and the rows of whole sublane tiles that it has."""
    problem, layout, blocks = CASES[name]
    tiles_of_all = [tile for tile in scheduled(name, sizes, np.zeros(1, np.int32)) if tile[2] == blocks[0] and tile[4]]
    for group, (start, end) in enumerate(oracle.bounds(sizes, M)[: problem.local_groups]):
        tiles = row_tiles(problem, layout, start, end)
        mine = [(row, rows) for span, _, _, row, rows in tiles_of_all if span == group]
        assert [tile.rows.start for tile in tiles] == [row for row, _ in mine]
        if problem.form is Form.ROWS:
            assert all(len(tile.rows) in layout.heights for tile in tiles)
        else:
            assert [len(tile.rows) for tile in tiles] == [-(-rows // layout.step_m) * layout.step_m for _, rows in mine]
        assert [row for tile in tiles for row in tile.owned] == list(range(start, end))
        assert all(set(tile.owned) <= set(tile.rows) for tile in tiles)
