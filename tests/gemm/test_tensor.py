"""Grouped tensors: their groups, through lists and transformations, and gradients with respect to them."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import trencadis as tr
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
    assert (tensor.is_stacked, tensor.is_fully_ragged) == (kind == "none", kind == "both")
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
def test_the_shapes_of_a_list_decide_what_is_ragged(shapes, want):
    assert repr(GroupedTensor.from_list([jnp.ones(shape) for shape in shapes])) == want


def test_the_repr_shows_the_first_groups():
    assert repr(GroupedTensor.ragged_rows(jnp.ones((9, 1)), [1] * 9)).endswith(
        "9 groups of 1, 1, 1, 1, 1, 1, 1, 1, ... rows)"
    )


both = pytest.mark.parametrize("given", [list, np.asarray, jnp.asarray], ids=["ints", "numpy", "jax"])


def rows(given, shift=0.0):
    """Four rows in groups of 1 and 2; no group owns the last."""
    return GroupedTensor.ragged_rows(jnp.arange(8.0).reshape(4, 2) + shift, given([1, 2]))


def loss(t, w):
    """A product of the groups, and something else of the data."""
    return (tr.grouped_gemm(t, GroupedTensor.stacked(w), contracting_dims=((1,), (1,))).data ** 2).sum() / 2


W = jnp.arange(1.0, 9.0).reshape(2, 2, 2)


def slope_of(t):
    """The gradient of the loss, in numpy: that of unowned rows is 0."""
    x, w = np.asarray(t.data), np.asarray(W)
    return np.concatenate([x[:1] @ w[0] @ w[0].T, x[1:3] @ w[1] @ w[1].T, np.zeros((1, 2))])


def test_gradients_with_respect_to_a_tensor():
    """Sizes that are Python ints are static: gradients are tensors of the same groups, and updates keep the sizes."""
    t = rows(list)
    want = slope_of(t)
    value = float(loss(t, W))
    for step in (jax.value_and_grad(loss, (0, 1)), jax.jit(jax.value_and_grad(loss, (0, 1)))):
        found, (slope, d_w) = step(t, W)
        np.testing.assert_allclose(found, value, 1e-6)
        assert isinstance(slope, GroupedTensor) and jax.tree.structure(slope) == jax.tree.structure(t)
        np.testing.assert_allclose(slope.data, want, 1e-6)
        assert slope.first_dims.tolist() == [1, 2] and d_w.shape == W.shape
    np.testing.assert_allclose(jax.grad(loss)(t, W).data, want, 1e-6)
    new = jax.tree.map(lambda p, g: p - 0.5 * g, t, slope)  # as optimizers do
    np.testing.assert_allclose(new.data, t.data - 0.5 * want, 1e-6)
    assert new.first_dims.tolist() == [1, 2] and new.shape == t.shape
    hessian = jax.jvp(jax.grad(lambda t: loss(t, W)), (t,), (slope,))[1]
    np.testing.assert_allclose(hessian.data, slope_of(slope), 1e-6)


@pytest.mark.parametrize("given", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_gradients_with_respect_to_data_whose_sizes_are_arrays(given):
    """Sizes are leaves: JAX asks for allow_int, or one differentiates in the data."""
    t = rows(given)
    want = slope_of(t)
    with pytest.raises(TypeError, match="allow_int"):
        jax.grad(loss)(t, W)
    slope = jax.grad(loss, allow_int=True)(t, W)
    assert slope.first_dims.dtype == jax.dtypes.float0 and slope.shape == t.shape
    by_data = jax.jit(jax.grad(lambda data, t: loss(t.with_data(data), W)))(t.data, t)
    _, pull = jax.vjp(lambda t: loss(t, W), t)
    for found in (slope.data, by_data, pull(1.0)[0].data):
        np.testing.assert_allclose(found, want, 1e-6)


@both
def test_goes_through_transformations(given):
    x = rows(given)
    double = lambda t: t.with_data(2 * t.data)
    same(jax.jit(double, donate_argnums=0)(jax.tree.map(jnp.copy, x)).to_list(), [2 * a for a in x.to_list()])
    leaves, tree = jax.tree.flatten(x)
    back = jax.tree.unflatten(tree, leaves)
    assert len(leaves) == (1 if given is list else 2) and hash(tree) == hash(jax.tree.structure(back))
    assert back.shape == x.shape and back.first_dims.tolist() == [1, 2]
    many = jax.tree.map(lambda *xs: jnp.stack(xs), x, rows(given, 10.0))  # a batch of tensors, and of sizes
    found = jax.vmap(lambda t: double(t).map(jnp.negative))(many)
    np.testing.assert_array_equal(found.data[1], jnp.where(jnp.arange(4)[:, None] < 3, -2 * (x.data + 10), 0))
    total, last = jax.lax.scan(lambda t, y: (t + y * t, t.data[0, 0]), x + 1, jnp.array([1.0, 2.0]))
    np.testing.assert_array_equal(total.data[:3], 6 * (x.data[:3] + 1))
    assert last.tolist() == [1, 2] and total.first_dims.tolist() == [1, 2]
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(x)]
    assert paths == [".data", ".first_dims"][: len(leaves)]
    assert jax.tree.map(jnp.shape, x).data == (4, 2)  # leaves may be anything


def test_axes_of_vmap_by_leaf():
    x = rows(jnp.asarray)
    axes = GroupedTensor(0, None, None, x.shape)
    many = GroupedTensor(jnp.stack([x.data, -x.data]), x.first_dims, None, x.shape)
    np.testing.assert_array_equal(jax.vmap(lambda t: t.data.sum(), in_axes=(axes,))(many), [28, -28])


def test_static_sizes_are_known_inside_of_jit_and_in_results():
    """A result whose size depends on them needs no `out`; it keeps them on the way out of jit, and when exported."""
    x = GroupedTensor.from_list([jnp.ones((1, 2)), 2 * jnp.ones((2, 2))])
    scores = jax.jit(lambda t: tr.grouped_gemm(t, t, contracting_dims=((1,), (1,))))
    found = scores(x)
    assert repr(found) == "GroupedTensor(float32[5], 2 groups of 1, 2 rows by 1, 2 columns)"
    same(found.to_list(), [np.full((1, 1), 2, np.float32), np.full((2, 2), 8, np.float32)])
    assert len(jax.tree.leaves(found)) == 1
    again = jax.export.deserialize(jax.export.export(scores)(x).serialize()).call(x)
    same(again.to_list(), found.to_list())
    assert jax.tree.structure(again) == jax.tree.structure(found)
    with pytest.raises(ValueError, match="read-only"):
        x.first_dims[0] = 5


def test_the_repr_inside_of_jit():
    seen = []
    x = GroupedTensor.ragged_cols(jnp.ones((2, 4)), jnp.array([1, 3]))
    jax.jit(lambda t: seen.append((repr(t), t.num_groups, t.ndim, t.dtype)) or t)(x)
    assert seen == [("GroupedTensor(float32[2,4], 2 groups of ragged columns)", 2, 2, np.dtype("float32"))]


def test_sizes_that_numpy_knows_are_known_inside_of_jit():
    out = jax.jit(lambda x: GroupedTensor.ragged_rows(x, [1, 2]).to_list())(jnp.ones((4, 2)))
    assert [a.shape for a in out] == [(1, 2), (2, 2)]


def test_an_empty_array_means_uniform():
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
        (lambda: jax.jit(lambda s: GroupedTensor.ragged_rows(jnp.ones((3, 2)), s).to_list())(jnp.array([1])), ValueError, "to_list: want sizes that are known.*got traced sizes"),
    ],
)  # fmt: skip
def test_errors_say_what_is_wanted(make, error, words):
    with pytest.raises(error, match=words):
        make()
