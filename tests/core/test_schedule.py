"""The fixed-raster schedule against its plain Python version, and against the rows it must cover."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import strategies
from hypothesis import strategies as st
from raster import walk

import trencadis as tr
from trencadis.core.schedule import visits

pytestmark = pytest.mark.core

M, G = 50, 6


@functools.cache
def jitted(height, local, empty):
    return jax.jit(lambda s, first: visits(s, M, height, first=first, local_groups=local, empty=empty))


@pytest.mark.parametrize("height", [1, 7, 16, 64])
@pytest.mark.parametrize("empty", [False, True])
@hypothesis.given(sizes=strategies.sizes(M, G), first=st.integers(0, 2))
def test_equals_plain_python(height, empty, sizes, first):
    for local in (G - 2, 2):
        got = jitted(height, local, empty)(sizes, first)
        assert got.pairs() == walk(sizes, M, height, first=first, local_groups=local, empty=empty)
        assert got.offsets.tolist() == [0, *np.cumsum(sizes).tolist()]


@hypothesis.given(sizes=strategies.sizes(M, G))
def test_covers_every_owned_row_once_and_visits_tiles_in_order(sizes):
    pairs = jitted(8, G, False)(sizes, 0).pairs()
    covered = np.zeros(M, int)
    for group, tile in pairs:
        a, b = oracle.bounds(sizes, M)[group]
        covered[max(a, tile * 8) : min(b, tile * 8 + 8)] += 1
    np.testing.assert_array_equal(covered, np.arange(M) < sum(sizes))
    assert [t for _, t in pairs] == sorted(t for _, t in pairs)
    assert len(pairs) <= -(-M // 8) + G - 1


@pytest.mark.parametrize("tiles", [3010, 8192, 16384, 2**20])
def test_exact_for_millions_of_rows(tiles):
    """A group that starts inside one of the last tiles: megablox's float histogram misplaces it from 3,010 tiles on."""
    tm = 128
    m = tiles * tm
    sizes = np.array([m - 3 * tm - 5, 2 * tm, tm + 4], np.int32)
    metadata = functools.partial(tr.make_group_metadata, m=m, tm=tm, start_group=0, num_nonzero_groups=3)
    (_, ids, visited), count = jax.tree.map(np.asarray, jax.jit(lambda s: metadata(group_sizes=s))(sizes))
    n = int(count)
    pairs = list(zip(ids[n - 6 : n].tolist(), visited[n - 6 : n].tolist(), strict=True))
    last = tiles - 4
    assert pairs == [(0, last), (1, last), (1, last + 1), (1, last + 2), (2, last + 2), (2, last + 3)]
    assert n == tiles + 2
    np.testing.assert_array_equal(visited[: last + 1], np.arange(last + 1))


def test_metadata_shapes_names_and_padding():
    sizes = jnp.array([100, 0, 150, 50])
    meta, count = tr.make_group_metadata(group_sizes=sizes, m=300, tm=128, start_group=0, num_nonzero_groups=4)
    offsets_, ids, tiles = meta
    assert (offsets_.shape, ids.shape, tiles.shape) == ((5,), (3 + 4 - 1,), (3 + 4 - 1,))
    assert {a.dtype for a in (*meta, count)} == {jnp.dtype("int32")}
    assert (meta.group_offsets.tolist(), int(count)) == ([0, 100, 100, 250, 300], 6)
    assert (ids.tolist(), tiles.tolist()) == ([0, 1, 2, 2, 3, 3], [0, 0, 0, 1, 1, 2])
    meta, count = tr.make_group_metadata(
        group_sizes=sizes, m=300, tm=128, start_group=jnp.array(2), num_nonzero_groups=1,
        visit_empty_groups=False,
    )  # fmt: skip
    assert int(count) == 2
    assert (meta.group_ids.tolist(), meta.m_tile_ids.tolist()) == ([2] * 6, [0, 1, 1, 1, 1, 1])


def test_metadata_in_a_serialized_program():
    schedule = functools.partial(tr.make_group_metadata, m=8, tm=4, start_group=0, num_nonzero_groups=2)
    sizes = jnp.array([3, 5])
    exported = jax.export.export(jax.jit(lambda s: schedule(group_sizes=s)))(sizes)
    got, want = jax.export.deserialize(exported.serialize()).call(sizes), schedule(group_sizes=sizes)
    assert isinstance(got[0], tr.GroupMetadata)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("first", [-(2**31), -3, -1, 5, 2**31 - 3, 2**31 - 1])
def test_a_traced_window_outside_of_the_groups(first):
    """A window that reaches outside visits only the groups it holds; its end does not overflow int32."""
    sizes = np.array([9, 0, 3, 20, 1, 4], np.int32)
    assert jitted(16, 2, True)(sizes, first).pairs() == walk(sizes, M, 16, first=first, local_groups=2, empty=True)


def test_prints_itself():
    assert str(visits(jnp.array([3, 0, 5]), 8, 4)) == "3 visits to tiles of 4 rows: (0,0) (2,0) (2,1)"
    jax.jit(lambda s: print(visits(s, 8, 4)) or s)(jnp.array([3, 0, 5]))
