"""The walk against a slow twin: every row of the result is somebody's, once, and in the order that is told."""

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

from trencadis.backends.gpu.walk import Tile, Walk, row_tiles
from trencadis.core.epilogue import Epilogue
from trencadis.core.problem import Form

from .interpreted import layout_of, rows_problem, sum_problem

pytestmark = pytest.mark.core

M, G, MOST = 700, 6, 400  # rows of an entry, groups, tiles that a walk may have
MORE = Epilogue(accumulate=True)
SHORT = {"tall": 128, "panel": 1}
WALKS = {
    "rows": (rows_problem(M, 100, 300, G, local=4), {"tall": 256, "panel": 2}),
    "rows of a batch": (rows_problem(M, 64, 130, G, local=3, batch=3), SHORT),
    "rows, accumulated": (rows_problem(M, 64, 130, G, local=4, epilogue=MORE), SHORT),
    "rows, turned": (rows_problem(M, 64, 300, G, local=4), {"tall": 96, "turned": True, "panel": 3}),
    "all groups": (rows_problem(M, 1, 64, G), {"tall": 128, "wide": 64, "panel": 8}),
    "contraction": (sum_problem(M, 650, 300, G, local=4), {"tall": 256, "panel": 2}),
    "contraction, accumulated": (sum_problem(M, 300, 130, G, local=4, epilogue=MORE), SHORT),
    "contraction of a batch": (sum_problem(M, 130, 130, G, batch=2), SHORT),
    "contraction, stored [k, m]": (sum_problem(M, 450, 64, G, transpose_lhs=True), {"tall": 256, "panel": 8}),
    "contraction, float32": (sum_problem(M, 130, 64, G, "f32 f32 f32"), SHORT),
}


def parts(name):
    problem, changes = WALKS[name]
    return problem, layout_of(problem, **changes)


@functools.cache
def compiled(name, blocks, block):
    """All tiles of one thread block, each with the first row of its first step, in one loop that is compiled once."""
    problem, layout = parts(name)

    def call(sizes, first):
        walk = Walk(problem, layout, sizes, first)

        def step(state, _):
            at, place = state
            tile = walk.tile(place, at)
            return (at + jnp.int32(blocks), walk.seek(place, at + jnp.int32(blocks))), (
                tile,
                walk.row(tile, jnp.int32(0)),
            )

        start = jnp.int32(block)
        return lax.scan(step, (start, walk.begin(start)), None, length=-(-MOST // blocks))[1]

    return jax.jit(call)


def walked(name, sizes, first, blocks=1, block=0):
    """The tiles of a thread block until it hears that there are none."""
    tiles, rows = compiled(name, blocks, block)(sizes.reshape(-1), first)
    columns = [np.asarray(x).tolist() for x in (*tiles, rows)]
    found = [(Tile(*values[:-1]), values[-1]) for values in zip(*columns, strict=True)]
    ends = [i for i, (tile, _) in enumerate(found) if tile.steps < 0]
    assert ends and all(tile.steps < 0 for tile, _ in found[ends[0] :])  # the end is never left
    return found[: ends[0]]


def split(blocks, most):
    """As few tiles as there can be, the taller ones first."""
    count = -(-blocks // most)
    return [blocks // count + (i < blocks % count) for i in range(count)]


def twin_spans(problem, sizes, first):
    """(span, group, first row, last row), with the rows that nobody owns around the window of each entry."""
    ragged, spans = problem.form is Form.ROWS, []
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
        if ragged and not problem.epilogue.accumulate:
            mine = [(None, base, mine[0][1]), *mine, (None, mine[-1][2], base + M)]
        spans += mine
    return spans


def twin(name, sizes, first):
    """(steps, group or None, first row, first column, units, rows of the result that are written), tile by tile."""
    problem, layout = parts(name)
    unit = 16 if layout.turned else 64
    most, tiles = layout.tall // unit, []
    ragged = problem.form is Form.ROWS
    for group, start, end in twin_spans(problem, sizes, first):
        if (ragged or problem.epilogue.accumulate) and start == end:
            continue
        grain = layout.deep if problem.transpose_lhs or layout.flat else 8
        rows = end - start // grain * grain if end > start else 0
        steps = 0 if group is None else -(-(problem.k if ragged else rows) // layout.deep)
        low, high = (start, end) if ragged else (0, problem.k)
        heights = split(-(-(high - low // 8 * 8) // unit), most)
        tops = [low // 8 * 8 + unit * sum(heights[:i]) for i in range(len(heights))]
        for panel in range(0, len(heights), layout.panel):
            down = range(panel, min(panel + layout.panel, len(heights)))
            for across, i in itertools.product(range(0, problem.n, layout.wide), down):
                edges = max(tops[i], low), min(tops[i] + unit * heights[i], high)
                tiles.append((steps, group, tops[i], across, heights[i], edges))
    return tiles


def told(problem, tile):
    """A tile as the twin says it; a tile of nobody's has no group."""
    nobody = problem.form is Form.ROWS and tile.steps == 0
    edges = tile.down + max(tile.low, 0), tile.down + tile.high
    return tile.steps, None if nobody else tile.group, tile.down, tile.across, tile.units, edges


def drawn(data, problem):
    sizes = [data.draw(strategies.sizes(M, G)) for _ in range(problem.batch)]
    first = st.integers(-2, G + 1) if problem.local_groups < G else st.sampled_from([0, 0, 0, -1, 2])
    return np.stack(sizes), np.asarray([data.draw(first) for _ in range(problem.batch)], np.int32)


def check(name, sizes, first):
    problem, layout = parts(name)
    found = walked(name, sizes, first)
    assert [told(problem, tile) for tile, _ in found] == twin(name, sizes, first)
    for tile, row in found:
        assert 1 <= tile.units <= layout.tall // layout.unit
        if problem.form is Form.CONTRACTION and tile.steps:  # the steps hold all rows of the group
            assert row <= tile.start and row % 8 == 0 and row + tile.steps * layout.deep >= tile.end
    return found


@pytest.mark.parametrize("name", WALKS)
@hypothesis.settings(max_examples=40)
@hypothesis.given(data=st.data())
def test_equals_its_slow_twin(name, data):
    check(name, *drawn(data, parts(name)[0]))


@pytest.mark.parametrize("name", ["rows", "rows of a batch", "rows, turned", "all groups"])
@hypothesis.settings(max_examples=40)
@hypothesis.given(data=st.data())
def test_every_row_is_written_once_and_by_its_owner(name, data):
    problem, layout = parts(name)
    sizes, first = drawn(data, problem)
    owner = np.full((problem.batch, M), -1)
    for entry, i in itertools.product(range(problem.batch), range(problem.local_groups)):
        if 0 <= first[entry] + i < G:
            start, end = oracle.bounds(sizes[entry], M)[first[entry] + i]
            owner[entry, start:end] = entry * problem.local_groups + i
    columns = -(-problem.n // layout.wide)
    written = np.full((problem.rows, columns), -2)
    for tile, _ in walked(name, sizes, first):
        _, group, *_, (low, high) = told(problem, tile)
        assert (written[low:high, tile.across // layout.wide] == -2).all()
        written[low:high, tile.across // layout.wide] = -1 if group is None else group
    np.testing.assert_array_equal(written, np.repeat(owner.reshape(-1, 1), columns, axis=1))


@pytest.mark.parametrize("name", ["rows", "rows, turned", "contraction"])
@hypothesis.settings(max_examples=40)
@hypothesis.given(data=st.data())
def test_tiles_that_follow_each_other_are_as_tall(name, data):
    """But for one unit; and within a panel the next tile lies below."""
    layout = parts(name)[1]
    tiles = [tile for tile, _ in walked(name, *drawn(data, parts(name)[0]))]
    for one, next in itertools.pairwise(tiles):
        if (one.group, one.start) == (next.group, next.start):
            assert abs(one.units - next.units) <= 1
            assert next.across != one.across or next.down == one.down + layout.unit * one.units
    for _, panel in itertools.groupby(tiles, lambda tile: (tile.group, tile.start, tile.across)):
        assert len(list(panel)) <= layout.panel or layout.wide >= parts(name)[0].n


@pytest.mark.parametrize(("name", "blocks"), [("rows of a batch", 3), ("contraction", 3)])
@hypothesis.settings(max_examples=40)
@hypothesis.given(data=st.data())
def test_blocks_take_turns(name, blocks, data):
    sizes, first = drawn(data, parts(name)[0])
    dealt = [walked(name, sizes, first, blocks, block) for block in range(blocks)]
    together = [tile for turn in itertools.zip_longest(*dealt) for tile in turn if tile is not None]
    assert together == walked(name, sizes, first)


@pytest.mark.parametrize("name", ["rows", "contraction of a batch"])
@hypothesis.given(raw=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2 * G, max_size=2 * G))
def test_never_leaves_the_rows_of_its_entry(name, raw):
    """Whatever a traced array holds."""
    problem = parts(name)[0]
    sizes = np.asarray(raw[: problem.batch * G], np.int32).reshape(problem.batch, G)
    for tile, _ in check(name, sizes, np.zeros(problem.batch, np.int32)):
        entry = tile.group // problem.local_groups if problem.form is Form.CONTRACTION else 0
        assert entry * M <= tile.start <= tile.end <= (entry + 1) * M


@pytest.mark.parametrize("name", [name for name in WALKS if "batch" not in name])
@hypothesis.given(sizes=strategies.sizes(M, G))
def test_row_tiles_are_those_of_the_walk(name, sizes):
    """What pictures are drawn from: the first row and the owned rows of each tile, or of each step of a sum."""
    problem, layout = parts(name)
    found = [(tile, row) for tile, row in walked(name, sizes, np.zeros(1, np.int32)) if tile.steps > 0]
    for group, (start, end) in enumerate(oracle.bounds(sizes, M)[: problem.local_groups]):
        mine = [(tile, row) for tile, row in found if tile.group == group and tile.across == 0]
        tiles = row_tiles(problem, layout, start, end)
        if problem.form is Form.ROWS:
            assert [tile.rows.start for tile in tiles] == sorted(tile.down for tile, _ in mine)
            edges = sorted((tile.down + max(tile.low, 0), tile.down + tile.high) for tile, _ in mine)
            assert [(tile.owned.start, tile.owned.stop) for tile in tiles] == edges
            assert all(len(tile.rows) in layout.heights for tile in tiles)
        else:
            steps = {(len(tiles), tiles[0].rows.start)} if tiles else set()
            assert {(tile.steps, row) for tile, row in mine} == steps
        assert [row for tile in tiles for row in tile.owned] == list(range(start, end))
        assert all(set(tile.owned) <= set(tile.rows) for tile in tiles)
