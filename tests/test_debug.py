"""debug_checks: what is silently clamped becomes an error that names the group."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify

import trencadis as tr

pytestmark = pytest.mark.core

X, W, Y = jnp.ones((8, 4)), jnp.ones((3, 4, 2)), jnp.ones((8, 2))


def gmm(sizes, first=0):
    return tr.grouped_matmul(X, W[:2], sizes, group_offset=first)


def tgmm(sizes, first=0):
    return tr.transposed_grouped_matmul(X.T, Y, sizes, group_offset=first, num_actual_groups=2)


@pytest.mark.parametrize("f", [gmm, tgmm])
@pytest.mark.parametrize(
    "sizes, first, words",
    [
        ([3, -2, 5], 0, "group_sizes: group 1 has size -2"),
        ([3, 4, 5], 0, "group_sizes: group 2 ends past m = 8 rows"),
        ([2**31 - 1, 2**31 - 1, 0], 0, "group_sizes: group 0 ends past m = 8 rows"),
        ([3, 0, 5], 2, "group_offset: a window of 2 groups from group 2 on leaves the 3 groups"),
        ([3, 0, 5], -1, "from group -1 on"),
        ([3, 0, 5], 1, None),
    ],
)
def test_errors_name_the_group(f, sizes, first, words):
    checked = checkify.checkify(jax.jit(f))
    with tr.debug_checks():
        error, _ = checked(jnp.array(sizes), first)
    assert (error.get() is None) if words is None else (words in error.get())


def test_off_by_default_and_seen_by_jit():
    f = jax.jit(gmm)
    f(jnp.array([3, -2, 5]))  # clamped
    with tr.debug_checks():
        error, _ = checkify.checkify(f)(jnp.array([3, -2, 5]))
    assert "group 1" in error.get()
    f(jnp.array([3, -2, 5]))


def test_under_vmap_and_grad():
    loss = lambda w, s: jnp.sum(tr.grouped_matmul(X, w, s) ** 2)
    f = checkify.checkify(jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0))))
    with tr.debug_checks():
        good, _ = f(W, jnp.array([[3, 0, 5], [1, 1, 1]]))
        bad, _ = f(W, jnp.array([[3, 0, 5], [1, 1, 9]]))
    assert good.get() is None
    assert "group 2 ends past m = 8" in bad.get()


@pytest.mark.parametrize("sizes, words", [([-1, 2], "group 0 has size -1"), ([0, 9], "group 1 ends past m = 4")])
def test_the_other_doors_check_too(sizes, words):
    inner = jax.lax.RaggedDotDimensionNumbers((([2], [1]), ([], [])), [0], [0])
    batch = jax.lax.RaggedDotDimensionNumbers((([2], [1]), ([0], [0])), [0], [])
    calls = [
        lambda s: tr.ragged_dot_general(jnp.ones((4, 2, 3)), jnp.ones((2, 3, 5)), s, inner),
        lambda s: tr.ragged_dot_general(jnp.ones((4, 2, 3)), jnp.ones((4, 3, 5)), s, batch),
        lambda s: tr.make_group_metadata(group_sizes=s, m=4, tm=2, start_group=0, num_nonzero_groups=2),
    ]
    for call in calls:
        with tr.debug_checks():
            error, _ = checkify.checkify(jax.jit(call))(jnp.array(sizes))
        assert words in error.get()
