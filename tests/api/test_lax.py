"""`ragged_dot` and `ragged_dot_general` equal lax where lax is right, and are tested by value where it is not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import lax
from sweep import marked

import trencadis as tr

pytestmark = pytest.mark.core


def dims(contract, batch=((), ()), ragged=(0,), group=()):
    return lax.RaggedDotDimensionNumbers((contract, batch), ragged, group)


# name, lhs, rhs, sizes, dimension numbers
CASES = [
    ("basic", (9, 3), (2, 3, 4), [4, 5], dims(((1,), (1,)), group=(0,))),
    ("rhs transposed", (9, 3), (2, 4, 3), [4, 5], dims(((1,), (2,)), group=(0,))),
    ("group dimension last", (9, 3), (3, 4, 2), [4, 5], dims(((1,), (0,)), group=(2,))),
    ("batch", (2, 9, 3), (2, 2, 3, 4), [4, 3], dims(((2,), (2,)), ((0,), (1,)), (1,), (0,))),
    ("batch, sizes each", (2, 9, 3), (2, 2, 3, 4), [[4, 3], [1, 8]], dims(((2,), (2,)), ((0,), (1,)), (1,), (0,))),
    ("outer rows", (2, 9, 3), (2, 3, 4), [4, 3], dims(((2,), (1,)), ragged=(1,), group=(0,))),
    ("outer rows, sizes each", (2, 9, 3), (2, 3, 4), [[4, 3], [1, 8]], dims(((2,), (1,)), ragged=(1,), group=(0,))),
    ("inner rows", (9, 2, 3), (2, 3, 4), [4, 3], dims(((2,), (1,)), group=(0,))),
    ("two summed, two columns", (9, 3, 2), (2, 3, 2, 4, 2), [4, 3], dims(((1, 2), (1, 2)), group=(0,))),
    ("summed in another order", (9, 3, 2), (2, 2, 3, 4), [4, 3], dims(((2, 1), (1, 2)), group=(0,))),
    ("contraction", (9, 3), (9, 4), [4, 3], dims(((0,), (0,)))),
    ("contraction of columns", (3, 9), (9, 4), [4, 3], dims(((1,), (0,)), ragged=(1,))),
    ("contraction, batch", (2, 9, 3), (2, 9, 4), [4, 3], dims(((1,), (1,)), ((0,), (0,)), (1,))),
    ("contraction, sizes each", (2, 9, 3), (2, 9, 4), [[4, 3], [1, 7]], dims(((1,), (1,)), ((0,), (0,)), (1,))),
    ("contraction, outer sum", (2, 9, 3), (2, 9, 4), [4, 3], dims(((0, 1), (0, 1)), ragged=(1,))),
    ("contraction, outer sum each", (2, 9, 3), (2, 9, 4), [[4, 3], [1, 7]], dims(((0, 1), (0, 1)), ragged=(1,))),
    ("contraction, inner sum", (9, 2, 3), (9, 2, 4), [4, 3], dims(((0, 1), (0, 1)), ragged=(0,))),
    ("ragged batch", (9, 2, 3), (9, 3, 4), [4, 5], dims(((2,), (1,)), ((0,), (0,)), (0,))),
    ("ragged batch, outer batch", (2, 9, 2, 3), (2, 9, 3, 4), [4, 5], dims(((3,), (2,)), ((0, 1), (0, 1)), (1,))),
]

EAGER = ("basic", "batch, sizes each", "outer rows", "contraction", "contraction, outer sum each", "ragged batch")


@pytest.mark.parametrize(
    "name, lhs, rhs, sizes, numbers",
    [marked(case) if i % 2 else case for i, case in enumerate(CASES)],
    ids=[c[0] for c in CASES],
)
def test_equals_lax(name, lhs, rhs, sizes, numbers, rng):
    x, y = rng.normal(size=lhs).astype(np.float32), rng.normal(size=rhs).astype(np.float32)
    sizes = jnp.asarray(sizes)
    ours = functools.partial(tr.ragged_dot_general, ragged_dot_dimension_numbers=numbers)
    theirs = functools.partial(lax.ragged_dot_general, ragged_dot_dimension_numbers=numbers)

    @functools.partial(jax.jit, static_argnums=0)
    def with_tangent(f, x, y, sizes):
        """The result, and its tangent: lax itself cannot transpose its contractions, so along a line."""
        if "outer sum" in name:
            return f(x, y, sizes), None
        return jax.jvp(lambda x, y: f(x, y, sizes), (x, y), (jnp.cos(x), jnp.sin(y)))

    want, want_tangent = with_tangent(theirs, x, y, sizes)
    got, tangent = with_tangent(ours, x, y, sizes)
    for each in (got, ours(x, y, sizes)) if name in EAGER else (got,):
        assert (each.shape, each.dtype) == (want.shape, want.dtype)
        oracle.check(each, oracle.wide(want))
    if tangent is not None:
        oracle.check(tangent, oracle.wide(want_tangent))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "uint8", "int16", "int32", "complex64"])
def test_dtypes_follow_lax(dtype, rng):
    x, w = (rng.integers(0, 5, shape).astype(jnp.dtype(dtype)) for shape in ((9, 3), (2, 3, 4)))
    asked = (None,) if dtype == "complex64" else (None, "float32", "int32")

    @functools.partial(jax.jit, static_argnums=0)
    def all_asked(f, x, w, sizes):
        return [f(x, w, sizes, preferred_element_type=preferred) for preferred in asked]

    for got, want in zip(*(all_asked(f, x, w, np.array([4, 5])) for f in (tr.ragged_dot, lax.ragged_dot)), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(oracle.wide(got), oracle.wide(want))


def test_packed_values_with_two_contracted_dimensions(rng):
    x, y = (rng.integers(-1, 2, shape) for shape in ((3, 2, 2), (3, 2, 4)))
    for ragged, sizes in ((0, [1, 1]), (1, [1, 1]), (1, [[1, 1], [0, 2], [1, 0]])):
        numbers = lax.RaggedDotDimensionNumbers((((0, 1), (0, 1)), ((), ())), [ragged], [])
        got = tr.ragged_dot_general(*(jnp.asarray(a, jnp.int4) for a in (x, y)), jnp.array(sizes), numbers)
        want = tr.ragged_dot_general(*(jnp.asarray(a, jnp.int32) for a in (x, y)), jnp.array(sizes), numbers)
        assert got.dtype == jnp.int4
        np.testing.assert_array_equal(got, want)


def test_windows_that_lax_does_not_have(rng):
    x, w = rng.normal(size=(9, 3)).astype("f"), rng.normal(size=(2, 3, 4)).astype("f")
    sizes = np.array([2, 3, 1, 3])
    for offset in (1, jnp.array([1]), jnp.array(1)):
        oracle.check(tr.ragged_dot(x, w, sizes, group_offset=offset), oracle.rows(x, w, sizes, first=1))
    y = rng.normal(size=(9, 4)).astype("f")
    numbers = dims(((0,), (0,)))
    got = jax.jit(lambda o: tr.ragged_dot_general(x, y, sizes, numbers, group_offset=o))(jnp.array(1))
    want = np.concatenate([oracle.contraction(x, y, sizes, first=1), np.zeros((1, 3, 4))])
    oracle.check(got, want)
    numbers = dims(((2,), (1,)), ((0,), (0,)), (0,))
    a, b = rng.normal(size=(9, 2, 3)).astype("f"), rng.normal(size=(9, 3, 4)).astype("f")
    want = np.einsum("bmk,bkn->bmn", a, b) * (np.arange(9) >= 2)[:, None, None]
    oracle.check(tr.ragged_dot_general(a, b, sizes, numbers, group_offset=1), want)


def test_ragged_batch_past_the_groups_is_zero_even_of_nan(rng):
    numbers = dims(((2,), (1,)), ((0,), (0,)), (0,))
    a, b = rng.normal(size=(9, 2, 3)).astype("f"), rng.normal(size=(9, 3, 4)).astype("f")
    want = np.einsum("bmk,bkn->bmn", a, b)
    want[5:] = 0
    a[5:], b[7:] = np.nan, np.inf
    f = lambda a, b: tr.ragged_dot_general(a, b, jnp.array([2, 3]), numbers)
    oracle.check(f(a, b), want)
    for g in jax.grad(lambda a, b: f(a, b).sum(), (0, 1))(a, b):
        assert np.isfinite(g).all()
        assert not np.asarray(g[5:]).any()


def test_every_derivative_and_vmap(rng):
    """What lax leaves out: second order in both operands, the gradient of a contraction, vmap of lhs alone."""
    x, w = rng.normal(size=(9, 3)).astype("f"), rng.normal(size=(2, 3, 4)).astype("f")
    sizes = jnp.array([4, 3])
    dense = lambda x, w: jnp.concatenate([x[:4] @ w[0], x[4:7] @ w[1], jnp.zeros((2, 4))])
    hessian = lambda f: jax.jit(jax.hessian(lambda x, w: jnp.sum(jnp.sin(f(x, w))), (0, 1)))(x, w)
    got, want = hessian(lambda x, w: tr.ragged_dot(x, w, sizes)), hessian(dense)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)
    out = jax.vmap(tr.ragged_dot, in_axes=(2, None, None), out_axes=1)(jnp.stack([x, 2 * x], axis=2), w, sizes)
    np.testing.assert_allclose(out[:, 1], 2 * dense(x, w), rtol=1e-5, atol=1e-5)
    y = rng.normal(size=(9, 4)).astype("f")
    f = lambda x: tr.ragged_dot_general(x, y, sizes, dims(((0,), (0,))))
    np.testing.assert_allclose(jax.grad(lambda x: f(x).sum())(x)[:7], np.repeat(y[:7].sum(1)[:, None], 3, 1), rtol=1e-5)


BAD = [
    ((9, 3), (2, 3, 4), (2,), dims(((1,), (1,)), ragged=(0, 1), group=(0,))),
    ((9, 3), (2, 3, 4), (2,), dims(((1,), (1,)), ragged=(2,), group=(0,))),
    ((9, 3), (2, 3, 4), (), dims(((1,), (1,)), group=(0,))),
    ((2, 9, 3), (2, 2, 3, 4), (3, 2), dims(((2,), (2,)), ((0,), (1,)), (1,), (0,))),
    ((9, 3), (2, 3, 4), (2,), dims(((1,), (1,)))),
    ((9, 3), (2, 3, 4), (2,), dims(((1,), (1,)), group=(3,))),
    ((9, 3), (2, 3, 4), (2,), dims(((1,), (1,)), group=(1,))),
    ((9, 3), (2, 3, 4), (3,), dims(((1,), (1,)), group=(0,))),
    ((9, 3), (9, 4), (2,), dims(((0,), (0,)), group=(0,))),
    ((9, 3), (2, 5, 4), (2,), dims(((1,), (1,)), group=(0,))),
    ((9, 3), (2, 3, 4), (2,), dims(((1, 1), (1, 1)), group=(0,))),
    ((9, 3), (2, 3, 4), (2,), dims(((1,), (5,)), group=(0,))),
    ((2, 9, 3), (3, 2, 3, 4), (2,), dims(((2,), (2,)), ((0,), (0,)), (1,), (1,))),
]


@pytest.mark.parametrize("lhs, rhs, sizes, numbers", BAD)
def test_lax_errors_are_ours(lhs, rhs, sizes, numbers):
    args = jnp.ones(lhs), jnp.ones(rhs), jnp.ones(sizes, jnp.int32), numbers
    with pytest.raises((TypeError, ValueError)) as theirs:
        lax.ragged_dot_general(*args)
    with pytest.raises(type(theirs.value)) as ours:
        tr.ragged_dot_general(*args)
    assert str(ours.value) == str(theirs.value)


def test_float_sizes_and_sums_past_m_are_refused():
    with pytest.raises(TypeError, match=r"subtype of np\.integer"):
        tr.ragged_dot(jnp.ones((4, 2)), jnp.ones((2, 2, 1)), jnp.array([1.0, 2.0]))
    with pytest.raises(ValueError, match="group_sizes: must sum to at most m = 4"):
        tr.ragged_dot(jnp.ones((4, 2)), jnp.ones((2, 2, 1)), jnp.array([3, 2]))


def test_a_precision_that_has_no_hash_gets_the_error_of_lax():
    with pytest.raises(ValueError, match="Precision argument must be one of"):
        tr.ragged_dot(jnp.ones((4, 2)), jnp.ones((2, 2, 1)), jnp.array([1, 2]), precision=("default", ["highest"]))


def test_out_sharding(rng):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        x, w = jnp.asarray(rng.normal(size=(8, 3)), jnp.float32), jnp.asarray(rng.normal(size=(2, 3, 4)), jnp.float32)
        got = jax.jit(lambda x, w: tr.ragged_dot(x, w, jnp.array([4, 3]), out_sharding=jax.P("x")))(x, w)
        assert jax.typeof(got).sharding.spec == jax.P("x", None)
    oracle.check(got, oracle.rows(x, w, [4, 3]))
