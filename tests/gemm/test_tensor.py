"""Grouped tensors: what they say is what they hold, through lists and transformations."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from trencadis import GroupedTensor

pytestmark = pytest.mark.core

sizes = st.lists(st.integers(0, 5), min_size=1, max_size=6)


def matrices(first, last, dtype=np.float32):
    """One matrix for each pair, with numbers that tell them apart."""
    return [
        np.arange(a * b, dtype=dtype).reshape(a, b) + 100 * i for i, (a, b) in enumerate(zip(first, last, strict=True))
    ]


def same(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b, strict=True)


@hypothesis.given(first=sizes, last=sizes, kind=st.sampled_from(["rows", "columns", "both", "none"]))
def test_a_list_comes_back(first, last, kind):
    count = min(len(first), len(last))
    first, last = first[:count], last[:count]
    if kind in ("rows", "none"):
        last = [3] * count
    if kind in ("columns", "none"):
        first = [2] * count
    groups = matrices(first, last)
    tensor = GroupedTensor.from_list(groups, ragged=kind)
    assert tensor.num_groups == count
    assert (tensor.first_dims is None, tensor.last_dims is None) == {
        "rows": (False, True), "columns": (True, False), "both": (False, False), "none": (True, True)
    }[kind]  # fmt: skip
    same(tensor.to_list(), groups)
    same(GroupedTensor.from_list(groups).to_list(), groups)


@pytest.mark.parametrize(
    ("shapes", "want"),
    [
        ([(2, 3), (2, 3)], "GroupedTensor(float32[2,2,3], 2 groups)"),
        ([(2, 3), (1, 3)], "GroupedTensor(float32[3,3], 2 groups of 2, 1 rows)"),
        ([(2, 3), (2, 1)], "GroupedTensor(float32[2,4], 2 groups of 3, 1 columns)"),
        ([(2, 3), (1, 1)], "GroupedTensor(float32[7], 2 groups of 2, 1 rows by 3, 1 columns)"),
        ([(1, 2, 3), (4, 2, 3)], "GroupedTensor(float32[5,2,3], 2 groups of 1, 4 rows)"),
        ([(4,), (2,)], "GroupedTensor(float32[6], 2 groups of 4, 2 rows)"),
    ],
)
def test_the_shapes_of_a_list_say_what_is_ragged(shapes, want):
    assert repr(GroupedTensor.from_list([jnp.ones(shape) for shape in shapes])) == want


def test_many_groups_print_as_a_few():
    assert repr(GroupedTensor.ragged_rows(jnp.ones((9, 1)), [1] * 9)).endswith(
        "9 groups of 1, 1, 1, 1, 1, 1, 1, 1, ... rows)"
    )


def test_goes_through_transformations():
    x = GroupedTensor.ragged_rows(jnp.arange(8.0).reshape(4, 2), jnp.array([1, 2]))

    def double(t):
        return GroupedTensor(2 * t.data, t.first_dims, t.last_dims, t.shape)

    same(jax.jit(double, donate_argnums=0)(jax.tree.map(jnp.copy, x)).to_list(), [2 * a for a in x.to_list()])
    leaves, tree = jax.tree.flatten(x)
    assert len(leaves) == 2 and jax.tree.unflatten(tree, leaves).shape == x.shape
    axes = GroupedTensor(0, None, None, x.shape)
    many = GroupedTensor(jnp.stack([x.data, -x.data]), x.first_dims, None, x.shape)
    np.testing.assert_array_equal(jax.vmap(lambda t: double(t).data.sum(), in_axes=(axes,))(many), [56, -56])
    slope = jax.grad(lambda t: (t.data**2).sum(), allow_int=True)(x)
    np.testing.assert_array_equal(slope.data, 2 * x.data)
    assert slope.shape == x.shape and "2 groups" in repr(slope)


def test_says_what_it_is_inside_of_jit():
    seen = []
    x = GroupedTensor.ragged_cols(jnp.ones((2, 4)), jnp.array([1, 3]))
    jax.jit(lambda t: seen.append((repr(t), t.num_groups, t.ndim, t.dtype)) or t)(x)
    assert seen == [("GroupedTensor(float32[2,4], 2 groups of ragged columns)", 2, 2, np.dtype("float32"))]


def test_sizes_that_numpy_knows_are_known_inside_of_jit():
    out = jax.jit(lambda x: GroupedTensor.ragged_rows(x, [1, 2]).to_list())(jnp.ones((4, 2)))
    assert [a.shape for a in out] == [(1, 2), (2, 2)]


def test_an_empty_array_says_uniform():
    """S3-02: the sentinel of a primitive that cannot take None."""
    none = jnp.zeros((0,), jnp.int32)
    tensor = GroupedTensor(jnp.ones((3, 2, 2)), none, none, (3, 2, 2))
    assert tensor.first_dims is None and tensor.last_dims is None and tensor.num_groups == 3
    assert len(tensor.unstack()) == 3


def test_a_stack_has_no_sizes():
    """R-07: giving a shape makes nothing ragged."""
    tensor = GroupedTensor(jnp.ones((4, 2)), None, None, (4, 2))
    assert tensor.num_groups == 4 and repr(tensor) == "GroupedTensor(float32[4,2], 4 groups)"


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: GroupedTensor.ragged_rows(jnp.ones((3, 2)), [2, 2]), ValueError, "sizes: must sum to at most 3, the rows"),
        (lambda: GroupedTensor.ragged_cols(jnp.ones((2, 3)), [2, 2]), ValueError, "sizes: must sum to at most 3, the columns"),
        (lambda: GroupedTensor.ragged_rows(jnp.ones((3, 2)), [-1, 2]), ValueError, "group 0 has -1"),
        (lambda: GroupedTensor.ragged_rows(jnp.ones((3, 2)), []), ValueError, "at least one group"),
        (lambda: GroupedTensor.ragged_rows(jnp.ones((3, 2)), [1.0]), TypeError, "sizes: want an integer dtype"),
        (lambda: GroupedTensor.ragged_rows(jnp.ones((3, 2)), [[1]]), ValueError, r"sizes: want 1 dimension \[g\]"),
        (lambda: GroupedTensor.ragged_rows(3.0, [1]), ValueError, "x: want at least 1 dimension"),
        (lambda: GroupedTensor.ragged_cols(jnp.ones(3), [1]), ValueError, "x: want at least 2 dimensions"),
        (lambda: GroupedTensor.stacked(1.0), ValueError, "x: want at least 1 dimension"),
        (lambda: GroupedTensor.stacked("w"), TypeError, "x: want an array; got str"),
        (lambda: GroupedTensor.fully_ragged(jnp.ones((2, 2)), [1], [1]), ValueError, r"flat: want 1 dimension"),
        (lambda: GroupedTensor.fully_ragged(jnp.ones(9), [1, 2], [1]), ValueError, "as many groups as first_dims; got 1 and 2"),
        (lambda: GroupedTensor.fully_ragged(jnp.ones(4), [1, 2], [1, 2]), ValueError, "the groups have 5 entries; got 4"),
        (lambda: GroupedTensor.from_list([]), ValueError, "at least one group"),
        (lambda: GroupedTensor.from_list([jnp.ones((1, 2, 3)), jnp.ones((2, 2, 1))]), ValueError, r"got shapes \(1, 2, 3\), \(2"),
        (lambda: GroupedTensor.from_list([jnp.ones((1, 2)), jnp.ones((3, 2))], ragged="none"), ValueError, "groups of one shape"),
        (lambda: GroupedTensor.from_list([jnp.ones(2)], ragged="rowwise"), ValueError, "ragged: want None or one of 'none'"),
        (lambda: GroupedTensor.from_list([jnp.ones(2), jnp.ones(2, int)]), TypeError, "want one dtype; got float32, int32"),
        (lambda: GroupedTensor.ragged_rows(jnp.ones((3, 2)), [1]).unstack(), ValueError, "unstack: want a stacked tensor"),
        (lambda: jax.jit(lambda s: GroupedTensor.ragged_rows(jnp.ones((3, 2)), s).to_list())(jnp.array([1])), ValueError, "traced"),
    ],
)  # fmt: skip
def test_errors_say_what_is_wanted(make, error, words):
    with pytest.raises(error, match=words):
        make()
