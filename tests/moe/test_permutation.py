"""Sorting by expert, gathering rows and summing them up again: laws over random assignments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trencadis as tr
from trencadis import moe
from trencadis.core.devices import CHIPS
from trencadis.core.target import Target
from trencadis.moe import row_operations

pytestmark = pytest.mark.core

T, K, E, D = 7, 3, 5, 4
V6E = Target(platform="tpu", kind=CHIPS["v6e"].kind)


def drawn(seed):
    """Experts [t, k], some of them none, tokens, rows and weights."""
    rng = np.random.default_rng(seed)
    experts = jnp.asarray(rng.integers(-1, E + 1, size=(T, K)), jnp.int32)
    x, y, w = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((T, D), (T * K, D), (T, K)))
    return experts, x, y, w


@given(st.integers(0, 2**31 - 1))
def test_sorted_rows(seed):
    experts, x, _, _ = drawn(seed)
    token, inverse, sizes = moe.sort_by_expert(experts, E)
    flat = np.ravel(experts)
    there = (flat >= 0) & (flat < E)
    order = np.argsort(np.where(there, flat, E), kind="stable")
    np.testing.assert_array_equal(token, order // K)
    np.testing.assert_array_equal(np.asarray(inverse)[order], np.arange(T * K))
    np.testing.assert_array_equal(sizes, np.bincount(flat[there], minlength=E))
    np.testing.assert_array_equal(moe.permute(x, moe.sort_by_expert(experts, E)), np.asarray(x)[order // K])


@pytest.mark.parametrize("dtype", ["uint8", "uint32", "int64", "uint64"])
def test_ids_of_any_dtype(x64, dtype):
    """Those that int32 cannot hold are no expert."""
    ids = np.array([[2**32, 1], [2**32 - 1, 0], [2**31 + 1, 2]]).astype(dtype)
    want = np.sort(np.append(np.where(ids < E, ids, E), range(E)))
    sizes = moe.sort_by_expert(jnp.asarray(ids), E).sizes
    np.testing.assert_array_equal(sizes, np.bincount(want[want < E].astype(int), minlength=E) - 1)
    np.testing.assert_array_equal(moe.route(jnp.zeros((3, E)), 2, experts=jnp.asarray(ids)).sizes, sizes)


@given(st.integers(0, 2**31 - 1))
def test_combine_is_the_weighted_sum_over_the_rows_of_a_token(seed):
    experts, _, y, w = drawn(seed)
    permutation = moe.sort_by_expert(experts, E)
    there = (np.asarray(experts) >= 0) & (np.asarray(experts) < E)
    rows = np.asarray(permutation.inverse).reshape(T, K)
    want = np.sum((np.asarray(w) * there)[:, :, None] * np.asarray(y)[rows], axis=1)
    poisoned = jnp.where(jnp.arange(T * K)[:, None] < permutation.sizes.sum(), y, jnp.nan)
    np.testing.assert_allclose(moe.combine(poisoned, w, permutation), want, rtol=1e-5, atol=1e-6)


def derivatives(f):
    """A compiled function: reverse and forward mode of f(constants, x, y, w) and of its squared gradients, summed."""

    def all_of(constants, *args):
        g = functools.partial(f, constants)
        square = lambda *args: sum(jnp.sum(d**2) for d in jax.grad(g, argnums=(0, 1, 2))(*args))
        return [jax.grad(h, argnums=(0, 1, 2))(*args) for h in (g, square)], [
            jax.jvp(h, args, args) for h in (g, square)
        ]

    return jax.jit(all_of)


@derivatives
def ours(permutation, x, y, w):
    return jnp.sum(jnp.tanh(moe.permute(x, permutation)) * y) + jnp.sum(jnp.sin(moe.combine(y, w, permutation)))


@derivatives
def dense(matrices, x, y, w):
    gather, spread = matrices
    return jnp.sum(jnp.tanh(gather @ x) * y) + jnp.sum(jnp.sin(jnp.einsum("tkr,tk,rd->td", spread, w, y)))


@given(st.integers(0, 2**31 - 1))
def test_gradients_are_exact(seed):
    """Against the dense matrices of both maps; in forward mode, reverse mode, and reverse mode twice."""
    experts, x, y, w = drawn(seed)
    permutation = moe.sort_by_expert(experts, E)
    gather = np.eye(T, dtype=np.float32)[np.asarray(permutation.token)]  # [rows, t]
    owned = np.arange(T * K) < np.sum(permutation.sizes)
    spread = gather.T[:, None] * np.eye(T * K, dtype=np.float32)[np.asarray(permutation.inverse).reshape(T, K)] * owned
    both = zip(ours(permutation, x, y, w), dense((gather, spread), x, y, w), (2e-4, 2e-3), strict=True)
    for found, want, atol in both:
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=atol), found, want)


def test_sums_are_float32():
    """Many small rows of bfloat16 that a sum in bfloat16 would lose."""
    experts = jnp.zeros((1, 33), jnp.int32)
    permutation = moe.sort_by_expert(experts, 1)
    y = jnp.full((33, 1), 2.0**-9, jnp.bfloat16).at[0].set(1.0)
    assert float(moe.combine(y, jnp.ones((1, 33)), permutation)[0, 0]) == 1.0625
    gradient = jax.grad(lambda x: jnp.sum(moe.permute(x, permutation) * y))(jnp.ones((1, 1), jnp.bfloat16))
    assert float(gradient[0, 0]) == 1.0625


def test_vmap():
    experts, x, y, w = (jnp.stack(each) for each in zip(*map(drawn, range(3)), strict=True))

    def both(experts, x, y, w):
        permutation = moe.sort_by_expert(experts, E)
        return moe.permute(x, permutation), moe.combine(y, w, permutation)

    batched = jax.vmap(both)(experts, x, y, w)
    for i in range(3):
        jax.tree.map(
            np.testing.assert_array_equal,
            jax.tree.map(lambda a, i=i: a[i], batched),
            both(experts[i], x[i], y[i], w[i]),
        )


def test_nothing_at_all():
    permutation = moe.sort_by_expert(jnp.zeros((0, 2), jnp.int32), 3)
    assert moe.permute(jnp.zeros((0, 4)), permutation).shape == (0, 4)
    assert moe.combine(jnp.zeros((0, 4)), jnp.zeros((0, 2)), permutation).shape == (0, 4)
    out, pullback = jax.vjp(lambda y, w: moe.combine(y, w, permutation), jnp.zeros((0, 3)), jnp.zeros((0, 2)))
    assert out.shape == (0, 3) and [x.shape for x in pullback(out)] == [(0, 3), (0, 2)]


@pytest.mark.parametrize(
    ("words", "call"),
    [
        (["experts", "[t, k]"], lambda p: moe.sort_by_expert(jnp.zeros(4, jnp.int32), 3)),
        (["experts", "float32"], lambda p: moe.sort_by_expert(jnp.zeros((4, 2)), 3)),
        (["x", "21 assignments", "(5, 4)"], lambda p: moe.permute(jnp.zeros((5, D)), p)),
        (["y", "21 rows", "(5, 4)"], lambda p: moe.combine(jnp.zeros((5, D)), jnp.zeros((T, K)), p)),
        (["weights", "21 assignments"], lambda p: moe.combine(jnp.zeros((T * K, D)), jnp.zeros((T, 2)), p)),
    ],
)
def test_errors_name_the_argument(words, call):
    with pytest.raises(ValueError) as error:
        call(moe.sort_by_expert(drawn(0)[0], E))
    assert all(word in str(error.value) for word in words)


@given(st.integers(0, 2**31 - 1))
def test_other_ways_to_the_same_results(seed):
    """The sorts that a TPU has in place of scatters and gathers of single entries, and sorts of pairs."""
    experts, _, y, w = drawn(seed)
    token, inverse, sizes = moe.sort_by_expert(experts, E)
    with pytest.MonkeyPatch.context() as patch:
        found = [row_operations.SortByExpert(E).on_tpu(V6E, experts)]
        patch.setattr(row_operations, "PACKED", 0)
        found.append(row_operations.SortByExpert(E).composed(experts))
    for each in found:
        jax.tree.map(np.testing.assert_array_equal, each, [token, inverse, sizes])
    rows = inverse.reshape(T, K)
    for operation, operands in (
        (row_operations.SpreadEntries(), (w, token, rows)),
        (row_operations.GatherEntries(), (y[:, 0], rows)),
        (row_operations.SpreadRows(), (y[:T], token, rows, w)),  # too short for the kernel
    ):
        np.testing.assert_array_equal(operation.on_tpu(V6E, *operands)[0], operation.composed(*operands)[0])


def lowered_for_tpu(f, *args):
    with tr.target("v6e"):
        return jax.jit(f).trace(*args).lower(lowering_platforms=("tpu",)).as_text()


def test_a_tpu_has_no_scatter():
    text = lowered_for_tpu(lambda e: moe.sort_by_expert(e, E), drawn(0)[0])
    assert "stablehlo.scatter" not in text and text.count("stablehlo.sort") == 2


@pytest.mark.parametrize(("d", "kernels"), [(512, 0), (640, 2)])
def test_a_tpu_copies_long_rows_by_dma(d, kernels):
    """Rows and their gradient, a sum, by kernels; XLA gathers rows of 1 KB as fast as a kernel, and sums none so."""
    experts, x, ct = drawn(0)[0], jnp.ones((T, d), jnp.bfloat16), jnp.ones((T * K, d), jnp.bfloat16)

    def gradients(x, ct):
        out, pull = jax.vjp(lambda x: moe.permute(x, moe.sort_by_expert(experts, E)), x)
        return out, pull(ct)

    text = lowered_for_tpu(gradients, x, ct)
    assert (text.count("trencadis_spread_rows") > 0) == (kernels == 2)
    assert text.count("trencadis_pack_rows") == (kernels == 2) and "trencadis_sum_rows" in text
