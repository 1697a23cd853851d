"""Spans, masks and owners of rows against plain Python, for any integers that a traced array may hold."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

import trencadis as tr
from trencadis.core.arguments import problem_of
from trencadis.core.spans import clamp_first, clamped, local_group, offsets, owned, owned_by_window, owner, spans

pytestmark = pytest.mark.core

M, G, LOCAL = 11, 4, 3
LOW, HIGH = -(2**31), 2**31 - 1

any_size = st.one_of(st.integers(-3, M + 3), st.sampled_from([LOW, HIGH, HIGH - 1]))
any_first = st.one_of(st.integers(-LOCAL - 2, G + 2), st.sampled_from([LOW, LOW + 1, HIGH - 2, HIGH - 1, HIGH]))


def rows_of(sizes, m):
    """The rows of each group as ranges: negative sizes are empty, and nothing leaves the m rows."""
    found, start = [], 0
    for size in map(int, sizes):
        end = min(start + max(size, 0), m)
        found.append(range(start, end))
        start = end
    return found


def window(sizes, m, first, local):
    """The rows of each local group: None for a group that sizes does not name."""
    groups = rows_of(sizes, m)
    return [groups[i] if 0 <= i < len(groups) else None for i in range(first, first + local)]


@functools.cache
def jitted(f, *static):
    return jax.jit(functools.partial(f, *static)) if static else jax.jit(f, static_argnums=1)


# ---------------------------------------------------------------------------------------------------------------------
# Sizes alone


@hypothesis.given(sizes=st.lists(any_size, min_size=G, max_size=G))
def test_offsets(sizes):
    """Ascending from 0, never past m; also where a plain sum of the sizes overflows int32."""
    for m in (M, 2**30):
        want = [0, *(rows.stop for rows in rows_of(sizes, m))]
        assert jitted(offsets)(np.asarray(sizes, np.int32), m).tolist() == want


def test_offsets_stop_at_m_however_large_both_are():
    m = 2**31 - 5
    sizes = jnp.array([2**30, 2**31 - 1, -3, 2**31 - 1, 7], jnp.int32)
    assert offsets(sizes, m).tolist() == [0, 2**30, m, m, m, m]


def test_offsets_of_a_batch_and_of_no_groups():
    assert offsets(jnp.array([[3, 0], [9, 9]]), 8).tolist() == [[0, 3, 3], [0, 8, 8]]
    assert offsets(jnp.zeros((0,), jnp.int32), 8).tolist() == [0]


@pytest.mark.parametrize("dtype", ["int4", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_sizes_of_any_integer_dtype_are_clamped_to_int32(dtype, x64):
    bound = jnp.iinfo(dtype)
    sizes = [int(bound.min), 0, 5, int(bound.max)]
    got = clamped(jnp.asarray(np.array(sizes, dtype)), 300)
    assert got.dtype == jnp.int32
    assert got.tolist() == [min(max(size, 0), 300) for size in sizes]


@hypothesis.given(sizes=st.lists(any_size, min_size=G, max_size=G))
def test_owner(sizes):
    """Each row has the group that covers it; a row past the last group has the number of groups."""
    want = [G] * M
    for group, rows in enumerate(rows_of(sizes, M)):
        for row in rows:
            want[row] = group
    assert jitted(owner)(np.asarray(sizes, np.int32), M).tolist() == want


# ---------------------------------------------------------------------------------------------------------------------
# A window of the groups

BATCH = 2
PROBLEM = problem_of((M, 2), (LOCAL, 2, 2), groups=G).replace(batch=BATCH)
NONE = problem_of((M, 2), (0, 2, 2), groups=G)


@hypothesis.given(
    sizes=st.lists(st.lists(any_size, min_size=G, max_size=G), min_size=BATCH, max_size=BATCH),
    first=st.lists(any_first, min_size=BATCH, max_size=BATCH),
)
@hypothesis.settings(max_examples=40)
def test_spans_and_owned_rows_of_a_batch(sizes, first):
    """Windows may reach outside of the groups on either side, however far."""
    given_ = jnp.asarray(np.array(sizes, np.int32)), jnp.asarray(np.array(first, np.int32))
    starts, ends = (x.tolist() for x in jitted(spans, PROBLEM)(*given_))
    mask = [False] * (BATCH * M)
    for entry in range(BATCH):
        for i, rows in enumerate(window(sizes[entry], M, first[entry], LOCAL)):
            at = entry * LOCAL + i
            found = range(starts[at] - entry * M, ends[at] - entry * M)
            assert 0 <= found.start <= found.stop <= M
            assert (found == rows) if rows is not None else len(found) == 0
            for row in rows or ():
                mask[entry * M + row] = True
    assert jitted(owned, PROBLEM)(*given_).tolist() == mask


@hypothesis.given(sizes=st.lists(any_size, min_size=G, max_size=G), first=any_first)
@hypothesis.settings(max_examples=40)
def test_local_group(sizes, first):
    """An owned row has its local group; any other has one that can be gathered."""
    one = PROBLEM.replace(batch=1)
    got = jitted(local_group, one)(np.array([sizes], np.int32), np.array([first], np.int32)).tolist()
    for i, rows in enumerate(window(sizes, M, first, LOCAL)):
        assert all(got[row] == i for row in rows or ())
    assert all(0 <= i < LOCAL for i in got)


@hypothesis.given(sizes=st.lists(any_size, min_size=G, max_size=G), first=any_first)
@hypothesis.settings(max_examples=40)
def test_owned_by_window(sizes, first):
    """Exactly the rows of the groups of the window that exist."""
    want = {row for rows in window(sizes, M, first, LOCAL) for row in rows or ()}
    got = jitted(owned_by_local_groups)(np.array(sizes, np.int32), M, np.int32(first)).tolist()
    assert got == [row in want for row in range(M)]


def owned_by_local_groups(sizes, m, first):
    return owned_by_window(sizes, m, first, LOCAL)


def test_no_local_groups_own_nothing():
    sizes, first = jnp.array([[2, 3, 4, 0]]), jnp.array([1])
    assert [x.tolist() for x in spans(NONE, sizes, first)] == [[], []]
    assert not owned(NONE, sizes, first).any()


@hypothesis.given(first=any_first)
def test_a_clamped_window_holds_the_same_groups_and_cannot_overflow(first):
    got = int(jitted(clamp_first_of)(np.int32(first), LOCAL))
    held = [i for i in range(G) if first <= i < first + LOCAL]
    assert [i for i in range(G) if got <= i < got + LOCAL] == held
    assert got == first if held else -LOCAL <= got <= G


def clamp_first_of(first, local_groups):
    return clamp_first(first, G, local_groups)


# ---------------------------------------------------------------------------------------------------------------------
# Through the operation


def test_shapes_in_signatures_are_checked():
    """The import hook of conftest is on: sizes of too few groups, or that are no integers, do not get in."""
    assert offsets(np.array([3, 0, 5]), 8).tolist() == [0, 3, 3, 8]
    for sizes in (np.ones((1, G - 1), np.int32), np.ones((1, G), np.float32)):
        with pytest.raises(TypeCheckError, match="group_sizes"):
            spans(problem_of((M, 2), (LOCAL, 2, 2), groups=G), sizes, np.zeros((1,), np.int32))


def plus_one(z):
    return z + 1


@pytest.mark.parametrize("dtype, offset", [
    ("int32", HIGH), ("int32", HIGH - 1), ("int32", LOW), ("uint32", 2**32 - 1), ("uint64", 2**64 - 1),
    ("int64", LOW - 1),
])  # fmt: skip
def test_a_window_that_holds_no_group_owns_no_row(backend, dtype, offset, x64):
    """Rows of no local group are 0, not the activation of 0; neither the window nor its dtype wraps around."""
    x, w, sizes = np.ones((4, 2), np.float32), np.ones((2, 2, 1), np.float32), jnp.array([1, 1, 2])
    call = jax.jit(lambda at: tr.grouped_matmul(x, w, sizes, group_offset=at, activation=plus_one, backend=backend))
    assert not call(jnp.asarray(np.array(offset, dtype))).any()


@pytest.mark.parametrize("dtype", ["uint8", "uint32", "int64", "uint64"])
def test_a_traced_group_offset_of_any_integer_dtype(dtype, x64):
    x, w, sizes = np.ones((4, 2), np.float32), np.ones((2, 2, 1), np.float32), jnp.array([1, 1, 2])
    out = jax.jit(lambda at: tr.grouped_matmul(x, w, sizes, group_offset=at))(jnp.asarray(np.array(1, dtype)))
    assert out.ravel().tolist() == [0, 2, 2, 2]
