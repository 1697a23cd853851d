"""The tile scheduler against slow Python: every row of the result is in one tile, and tiles come in the right order."""

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
from jax import lax

from trencadis.backends.gpu.tile_scheduler import Tile, TileScheduler, row_tiles
from trencadis.core.epilogue import Epilogue
from trencadis.core.problem import Form

from .interpreted import layout_of, rows_problem, sum_problem

pytestmark = pytest.mark.core

M, G, MOST = 700, 6, 400  # rows of an entry, groups, an upper bound of the tiles
MORE = Epilogue(accumulate=True)
SHORT = {"block_m": 128, "raster_group": 1}
CASES = {
    "rows": (rows_problem(M, 100, 300, G, local=4), {"block_m": 256, "raster_group": 2}),
    "rows of a batch": (rows_problem(M, 64, 130, G, local=3, batch=3), SHORT),
    "rows, accumulated": (rows_problem(M, 64, 130, G, local=4, epilogue=MORE), SHORT),
    "rows, swap-AB": (rows_problem(M, 64, 300, G, local=4), {"block_m": 96, "swap_ab": True, "raster_group": 3}),
    "all groups": (rows_problem(M, 1, 64, G), {"block_m": 128, "block_n": 64, "raster_group": 8}),
    "contraction": (sum_problem(M, 650, 300, G, local=4), {"block_m": 256, "raster_group": 2}),
    "contraction, accumulated": (sum_problem(M, 300, 130, G, local=4, epilogue=MORE), SHORT),
    "contraction of a batch": (sum_problem(M, 130, 130, G, batch=2), SHORT),
    "contraction, stored [k, m]": (sum_problem(M, 450, 64, G, transpose_lhs=True), {"block_m": 256, "raster_group": 8}),
    "contraction, float32": (sum_problem(M, 130, 64, G, "f32 f32 f32"), SHORT),
}


def case(name):
    """The problem of a case, and its layout."""
    problem, changes = CASES[name]
    return problem, layout_of(problem, **changes)


@functools.cache
def compiled(name, num_ctas, cta):
    """All tiles of one CTA, each with the first row of its first step, in one loop that is compiled once."""
    problem, layout = case(name)

    def call(sizes, first):
        scheduler = TileScheduler(problem, layout, sizes, first)

        def step(state, _):
            index, span = state
            span = scheduler.advance(span, index)
            tile = scheduler.tile(span, index)
            return (index + jnp.int32(num_ctas), span), (tile, scheduler.step_row(tile, jnp.int32(0)))

        start = jnp.int32(cta), jax.tree.map(jnp.asarray, scheduler.before)
        return lax.scan(step, start, None, length=-(-MOST // num_ctas))[1]

    return jax.jit(call)


def scheduled(name, sizes, first, num_ctas=1, cta=0):
    """The tiles of a CTA, each with the first row of its first step, up to the one that says there are no more."""
    tiles, rows = compiled(name, num_ctas, cta)(sizes.reshape(-1), first)
    columns = [np.asarray(x).tolist() for x in (*tiles, rows)]
    all_tiles = [(Tile(*values[:-1]), values[-1]) for values in zip(*columns, strict=True)]
    ends = [i for i, (tile, _) in enumerate(all_tiles) if tile.steps < 0]
    assert ends and all(tile.steps < 0 for tile, _ in all_tiles[ends[0] :])  # all that follow say so too
    return all_tiles[: ends[0]]


def split(units, most):
    """The heights of as few tiles as possible, the taller ones first."""
    count = -(-units // most)
    return [units // count + (i < units % count) for i in range(count)]


def expected_spans(problem, sizes, first):
    """(group, first row, end row) of each span; group is None for the unowned rows around the window of an entry."""
    rows_form, spans = problem.form is Form.ROWS, []
    for entry in range(problem.batch):
        bounds, base = oracle.bounds(sizes[entry], M), entry * M
        mine = []
        before = bounds[min(first[entry], G) - 1][1] if first[entry] > 0 else 0
        for i in range(problem.local_groups):
            group = first[entry] + i
            start, end = bounds[group] if 0 <= group < G else (None, None)
            if start is None:
                start = end = mine[-1][2] - base if mine else before
            mine.append((entry * problem.local_groups + i, start + base, end + base))
        if rows_form and not problem.epilogue.accumulate:
            mine = [(None, base, mine[0][1]), *mine, (None, mine[-1][2], base + M)]
        spans += mine
    return spans


def expected(name, sizes, first):
    """(steps, group or None, first row, first column, units, rows of the result that are stored) of each tile."""
    problem, layout = case(name)
    unit = 16 if layout.swap_ab else 64
    most, tiles = layout.block_m // unit, []
    rows_form = problem.form is Form.ROWS
    for group, start, end in expected_spans(problem, sizes, first):
        if (rows_form or problem.epilogue.accumulate) and start == end:
            continue
        align = layout.block_k if problem.transpose_lhs or layout.k_major else 8
        rows = end - start // align * align if end > start else 0
        steps = 0 if group is None else -(-(problem.k if rows_form else rows) // layout.block_k)
        low, high = (start, end) if rows_form else (0, problem.k)
        heights = split(-(-(high - low // 8 * 8) // unit), most)
        tops = [low // 8 * 8 + unit * sum(heights[:i]) for i in range(len(heights))]
        for group_start in range(0, len(heights), layout.raster_group):
            down = range(group_start, min(group_start + layout.raster_group, len(heights)))
            for column, i in itertools.product(range(0, problem.n, layout.block_n), down):
                edges = max(tops[i], low), min(tops[i] + unit * heights[i], high)
                tiles.append((steps, group, tops[i], column, heights[i], edges))
    return tiles


def found(problem, tile):
    """A tile as `expected` gives it; a tile of unowned rows has no group."""
    unowned = problem.form is Form.ROWS and tile.steps == 0
    edges = tile.row + max(tile.valid_from, 0), tile.row + tile.valid_to
    return tile.steps, None if unowned else tile.group, tile.row, tile.column, tile.units, edges


def drawn(data, problem):
    sizes = [data.draw(strategies.sizes(M, G)) for _ in range(problem.batch)]
    first = st.integers(-2, G + 1) if problem.local_groups < G else st.sampled_from([0, 0, 0, -1, 2])
    return np.stack(sizes), np.asarray([data.draw(first) for _ in range(problem.batch)], np.int32)


def check(name, sizes, first):
    problem, layout = case(name)
    tiles = scheduled(name, sizes, first)
    assert [found(problem, tile) for tile, _ in tiles] == expected(name, sizes, first)
    for tile, row in tiles:
        assert 1 <= tile.units <= layout.block_m // layout.m_unit
        if problem.form is Form.CONTRACTION and tile.steps:  # the steps hold all rows of the group
            assert row <= tile.start and row % 8 == 0 and row + tile.steps * layout.block_k >= tile.end
    return tiles


@pytest.mark.parametrize("name", CASES)
@hypothesis.settings(max_examples=40)
@hypothesis.given(data=st.data())
def test_equals_the_slow_schedule(name, data):
    check(name, *drawn(data, case(name)[0]))


@pytest.mark.parametrize("name", ["rows", "rows of a batch", "rows, swap-AB", "all groups"])
@hypothesis.settings(max_examples=40)
@hypothesis.given(data=st.data())
def test_every_row_is_stored_once_and_by_its_group(name, data):
    problem, layout = case(name)
    sizes, first = drawn(data, problem)
    owner = np.full((problem.batch, M), -1)
    for entry, i in itertools.product(range(problem.batch), range(problem.local_groups)):
        if 0 <= first[entry] + i < G:
            start, end = oracle.bounds(sizes[entry], M)[first[entry] + i]
            owner[entry, start:end] = entry * problem.local_groups + i
    columns = -(-problem.n // layout.block_n)
    written = np.full((problem.rows, columns), -2)
    for tile, _ in scheduled(name, sizes, first):
        _, group, *_, (low, high) = found(problem, tile)
        assert (written[low:high, tile.column // layout.block_n] == -2).all()
        written[low:high, tile.column // layout.block_n] = -1 if group is None else group
    np.testing.assert_array_equal(written, np.repeat(owner.reshape(-1, 1), columns, axis=1))


@pytest.mark.parametrize("name", ["rows", "rows, swap-AB", "contraction"])
@hypothesis.settings(max_examples=40)
@hypothesis.given(data=st.data())
def test_tiles_of_a_span_are_equally_tall(name, data):
    """Up to one unit; and within an L2 rasterization group the next tile lies below."""
    layout = case(name)[1]
    tiles = [tile for tile, _ in scheduled(name, *drawn(data, case(name)[0]))]
    for one, next in itertools.pairwise(tiles):
        if (one.group, one.start) == (next.group, next.start):
            assert abs(one.units - next.units) <= 1
            assert next.column != one.column or next.row == one.row + layout.m_unit * one.units
    for _, group in itertools.groupby(tiles, lambda tile: (tile.group, tile.start, tile.column)):
        assert len(list(group)) <= layout.raster_group or layout.block_n >= case(name)[0].n


@pytest.mark.parametrize(("name", "num_ctas"), [("rows of a batch", 3), ("contraction", 3)])
@hypothesis.settings(max_examples=40)
@hypothesis.given(data=st.data())
def test_static_scheduling_deals_tiles_to_ctas_in_turn(name, num_ctas, data):
    sizes, first = drawn(data, case(name)[0])
    by_cta = [scheduled(name, sizes, first, num_ctas, cta) for cta in range(num_ctas)]
    together = [tile for turn in itertools.zip_longest(*by_cta) for tile in turn if tile is not None]
    assert together == scheduled(name, sizes, first)


@pytest.mark.parametrize("name", ["rows", "contraction of a batch"])
@hypothesis.given(raw=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2 * G, max_size=2 * G))
def test_no_tile_leaves_the_rows_of_its_batch_entry(name, raw):
    """Whatever the traced group sizes are."""
    problem = case(name)[0]
    sizes = np.asarray(raw[: problem.batch * G], np.int32).reshape(problem.batch, G)
    for tile, _ in check(name, sizes, np.zeros(problem.batch, np.int32)):
        entry = tile.group // problem.local_groups if problem.form is Form.CONTRACTION else 0
        assert entry * M <= tile.start <= tile.end <= (entry + 1) * M


@pytest.mark.parametrize("name", [name for name in CASES if "batch" not in name])
@hypothesis.given(sizes=strategies.sizes(M, G))
def test_row_tiles_are_those_of_the_scheduler(name, sizes):
    """What pictures are drawn from: the first row and the owned rows of each tile, or of each step of a sum."""
    problem, layout = case(name)
    computed = [(tile, row) for tile, row in scheduled(name, sizes, np.zeros(1, np.int32)) if tile.steps > 0]
    for group, (start, end) in enumerate(oracle.bounds(sizes, M)[: problem.local_groups]):
        mine = [(tile, row) for tile, row in computed if tile.group == group and tile.column == 0]
        tiles = row_tiles(problem, layout, start, end)
        if problem.form is Form.ROWS:
            assert [tile.rows.start for tile in tiles] == sorted(tile.row for tile, _ in mine)
            edges = sorted((tile.row + max(tile.valid_from, 0), tile.row + tile.valid_to) for tile, _ in mine)
            assert [(tile.owned.start, tile.owned.stop) for tile in tiles] == edges
            heights = layout.heights if layout.swap_ab else range(64, layout.block_m + 1, 64)
            assert all(len(tile.rows) in heights for tile in tiles)
        else:
            steps = {(len(tiles), tiles[0].rows.start)} if tiles else set()
            assert {(tile.steps, row) for tile, row in mine} == steps
        assert [row for tile in tiles for row in tile.owned] == list(range(start, end))
        assert all(set(tile.owned) <= set(tile.rows) for tile in tiles)
