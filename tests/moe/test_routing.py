"""Routing equals the rules written out for one token at a time in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.test_util import check_grads

from trencadis import moe

pytestmark = pytest.mark.core

T, E = 9, 8
LOGITS = np.random.default_rng(3).normal(size=(T, E))
SCORES = {
    "softmax": lambda z: np.exp(z) / np.exp(z).sum(),
    "sigmoid": lambda z: 1 / (1 + np.exp(-z)),
    "sqrtsoftplus": lambda z: np.sqrt(np.log1p(np.exp(z))),
}


def one_token(z, k, score, normalize=True, scale=1.0, bias=0.0, groups=None, group_k=None):
    """The experts of one token, and their weights."""
    scores = z if score == "softmax_topk" else SCORES[score](z)
    chosen_by = scores + bias
    if groups:
        each = chosen_by.reshape(groups, -1)
        best = np.sort(each, axis=1)[:, -2:].sum(axis=1)
        lost = np.argsort(-best, kind="stable")[group_k:]
        each = each.copy()
        each[lost] = -np.inf
        chosen_by = each.reshape(-1)
    experts = np.argsort(-chosen_by, kind="stable")[:k]
    weights = np.exp(z[experts]) if score == "softmax_topk" else scores[experts]
    if normalize or score == "softmax_topk":
        weights = weights / weights.sum()
    return experts, weights * (scale if np.ndim(scale) == 0 else np.asarray(scale)[experts])


@pytest.mark.parametrize(
    "options",
    [
        {"score": "softmax"},
        {"score": "softmax", "normalize": False, "scale": 2.5},
        {"score": "softmax_topk"},
        {"score": "sigmoid", "scale": np.linspace(1, 2, E)},
        {"score": "sigmoid", "bias": np.linspace(-1, 1, E)},
        {"score": "sqrtsoftplus"},
        {"score": "sigmoid", "bias": np.linspace(1, -1, E), "groups": 4, "group_k": 2},
        {"score": "softmax", "groups": 2, "group_k": 1},
    ],
    ids=str,
)
def test_equals_the_rules_for_one_token(options):
    routing = moe.route(jnp.asarray(LOGITS, jnp.float32), 3, **options)
    for t, z in enumerate(LOGITS):
        experts, weights = one_token(z, 3, **options)
        np.testing.assert_array_equal(routing.experts[t], experts)
        np.testing.assert_allclose(routing.weights[t], weights, rtol=1e-5)
    np.testing.assert_array_equal(routing.sizes, np.bincount(np.ravel(routing.experts), minlength=E))
    np.testing.assert_allclose(np.sum(routing.probs, axis=1), 1, rtol=1e-5)


def test_a_score_may_be_a_function():
    routing = moe.route(jnp.asarray(LOGITS, jnp.float32), 2, score=lambda z: jnp.exp(z), normalize=False)
    np.testing.assert_allclose(routing.weights, np.sort(np.exp(LOGITS), axis=1)[:, :-3:-1], rtol=1e-5)


def test_masked_tokens_go_nowhere():
    mask = np.arange(T) % 2 == 0
    logits = jnp.asarray(LOGITS, jnp.float32)
    for score in ("softmax", "softmax_topk", "sigmoid"):

        def weights(logits, score=score):
            return moe.route(logits, 2, score=score, mask=mask).weights

        poisoned = logits.at[1].set(jnp.nan)
        routing, plain = moe.route(poisoned, 2, score=score, mask=mask), moe.route(logits, 2, score=score)
        np.testing.assert_array_equal(routing.experts[~mask], E)
        assert not np.any(routing.weights[~mask]) and not np.any(routing.probs[~mask])
        np.testing.assert_array_equal(routing.weights[mask], plain.weights[mask])
        np.testing.assert_array_equal(routing.sizes, np.bincount(np.ravel(routing.experts[mask]), minlength=E))
        slopes = jax.grad(lambda z: jnp.sum(weights(z) * jnp.arange(2.0)))(poisoned)
        assert not np.isnan(slopes).any() and not np.any(slopes[~mask])
        assert np.isfinite(moe.balance_loss(routing)) and np.isfinite(moe.z_loss(poisoned, mask=jnp.asarray(mask)))


def test_replay():
    """Given experts keep their ids, and weights follow the live logits, with their gradient."""
    first = moe.route(jnp.asarray(LOGITS, jnp.float32), 2)
    other = jnp.asarray(-LOGITS, jnp.float32)
    again = moe.route(other, 2, experts=first.experts)
    np.testing.assert_array_equal(again.experts, first.experts)
    scores = np.take_along_axis(np.asarray(jax.nn.softmax(other)), np.asarray(first.experts), axis=1)
    np.testing.assert_allclose(again.weights, scores / scores.sum(axis=1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("score", ["softmax", "softmax_topk", "sigmoid", "sqrtsoftplus"])
def test_gradients(score):
    ids = moe.route(jnp.asarray(LOGITS, jnp.float32), 2, score=score).experts  # fixed: the choice has no derivative

    def loss(z):
        routing = moe.route(z, 2, score=score, experts=ids)
        return jnp.sum(routing.weights * jnp.arange(2.0)) + moe.balance_loss(routing) + moe.z_loss(z)

    check_grads(loss, (jnp.asarray(LOGITS, jnp.float32),), order=1, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("score", SCORES)
def test_second_derivatives(score):
    """Those of a score with a name are those of the same score as a function."""

    def slope(score):
        def loss(z):
            routing = moe.route(z, 2, score=score, normalize=False)
            return jnp.sum(routing.weights**2) + jnp.sum(routing.probs**3)

        return jax.jvp(jax.grad(loss), (z,), (direction,))[1]

    z, direction = jnp.asarray(LOGITS, jnp.float32), jnp.asarray(LOGITS[::-1].copy(), jnp.float32)
    want = slope(moe.selection.SCORES[score])
    np.testing.assert_allclose(jax.jit(slope, static_argnums=0)(score), want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("score", [*SCORES, "softmax_topk", jax.nn.relu])
def test_gradients_of_scores_that_underflow(score):
    rows = [[1, 2, -88, 0.5], [1, 2, -np.inf, 0.5], [-50] * 4, [-75, -76, -77, -74], [-200] * 4, [-88] * 4]

    def slopes(score):
        def loss(z):
            routing = moe.route(z, 2, score=score)
            losses = moe.balance_loss(routing) + jnp.sum(routing.probs**2)
            return jnp.sum(routing.weights[:, 0]), losses

        return jax.jit(jax.jacrev(loss))(jnp.asarray(rows, jnp.float32))

    found = slopes(score)
    for each in found:
        assert np.isfinite(each).all() and not each[1, 2]
        np.testing.assert_allclose(each[0], each[1], rtol=1e-4)
    if score == "sigmoid":  # far below 0 it is an exponential
        np.testing.assert_allclose(found[0][2:4], slopes("softmax")[0][2:4], rtol=1e-4, atol=1e-7)


def test_no_tokens():
    routing = moe.route(jnp.zeros((0, E)), 2, groups=4, group_k=2, bias=jnp.zeros(E))
    assert routing.weights.shape == (0, 2) and not routing.sizes.any() and moe.balance_loss(routing) == 0


def test_no_floating_point_scatter():
    def loss(z):
        routing = moe.route(z, 2, groups=4, group_k=2, bias=jnp.zeros(E))
        return jnp.sum(routing.weights**2) + moe.balance_loss(routing)

    assert "scatter" not in jax.jit(jax.grad(loss)).lower(jnp.asarray(LOGITS, jnp.float32)).as_text()


def test_balance_over_shards_is_that_of_all_tokens():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6, E)), jnp.float32)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")

    def local(z):
        routing = moe.route(z[0], 2)
        return moe.balance_loss(routing, axis_name="data")[None], moe.load_of(routing, axis_name="data").imbalance[None]

    loss, imbalance = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)(logits)
    whole = moe.route(logits.reshape(-1, E), 2)
    np.testing.assert_allclose(loss, np.full(4, moe.balance_loss(whole)), rtol=1e-5)
    np.testing.assert_allclose(imbalance, np.full(4, moe.load_of(whole).imbalance), rtol=1e-5)


def test_the_bias_balances():
    """With its update rule, a bias makes an uneven router even, and leaves the weights of the same experts alone."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(256, E)) + np.linspace(0, 2, E), jnp.float32)
    bias = jnp.zeros(E)
    before = moe.load_of(moe.route(logits, 2, score="sigmoid"))
    step = lambda _, bias: moe.update_bias(bias, moe.route(logits, 2, score="sigmoid", bias=bias).sizes, 0.005)
    bias = jax.lax.fori_loop(0, 200, step, bias)
    after = moe.load_of(moe.route(logits, 2, score="sigmoid", bias=bias))
    assert before.imbalance > 1.8 and after.imbalance < 1.2


@given(st.integers(0, 2**31 - 1), st.integers(1, 8))
def test_capacity_drops_the_last_tokens_and_counts_them(seed, capacity):
    routing = moe.route(jnp.asarray(np.random.default_rng(seed).normal(size=(T, E)), jnp.float32), 2)
    limited, load = moe.limit_rows(routing, capacity)
    seen, dropped = np.zeros(E, int), 0
    for t, j in np.ndindex(T, 2):
        expert = int(routing.experts[t, j])
        kept = seen[expert] < capacity
        seen[expert] += kept
        dropped += not kept
        assert int(limited.experts[t, j]) == (expert if kept else E)
        assert float(limited.weights[t, j]) == (float(routing.weights[t, j]) if kept else 0)
    np.testing.assert_array_equal(load.rows, seen)
    np.testing.assert_array_equal(limited.sizes, seen)
    assert int(load.dropped) == dropped


@pytest.mark.parametrize(
    ("words", "change"),
    [
        (["logits", "[t, e]"], {"logits": jnp.ones(3)}),
        (["logits", "array", "NoneType"], {"logits": None}),
        (["k", "8", "9"], {"k": 9}),
        (["k", "int", "[2]"], {"k": [2]}),
        (["k", "int", "True"], {"k": True}),
        (["scale", "(8,)", "(3,)"], {"scale": jnp.ones(3)}),
        (["score", "(9, 8)", "(9,)"], {"score": lambda z: z.sum(axis=1)}),
        (["groups", "int", "2.0"], {"groups": 2.0, "group_k": 1}),
        (["score", "'softmax'", "'max'"], {"score": "max"}),
        (["groups", "group_k"], {"groups": 2}),
        (["groups", "divisor", "3"], {"groups": 3, "group_k": 1}),
        (["group_k", "hold k = 3"], {"k": 3, "groups": 4, "group_k": 1}),
        (["bias", "(8,)"], {"bias": jnp.ones(3)}),
        (["mask", "(9,)"], {"mask": jnp.ones(3, bool)}),
        (["experts", "(9, 2)"], {"experts": jnp.ones((9, 3), jnp.int32)}),
        (["experts", "integers"], {"experts": jnp.ones((9, 2))}),
    ],
)
def test_errors_name_the_argument(words, change):
    with pytest.raises((ValueError, TypeError)) as error:
        moe.route(**({"logits": jnp.asarray(LOGITS, jnp.float32), "k": 2} | change))
    assert all(word in str(error.value) for word in words)


def test_capacity_of_ids_that_cannot_hold_no_expert(x64):
    """256 is no uint8; and a count is int32, as it is without 64 bits."""
    routing = moe.route(jnp.zeros((2, 256)), 1, experts=jnp.array([[7], [7]]))
    limited, load = moe.limit_rows(routing._replace(experts=routing.experts.astype(jnp.uint8)), 1)
    assert limited.experts.ravel().tolist() == [7, 256] and load.dropped.dtype == jnp.int32


@pytest.mark.parametrize("capacity", [-1, 1.25, True])
def test_a_capacity_is_a_number_of_rows(capacity):
    routing = moe.route(jnp.asarray(LOGITS, jnp.float32), 2)
    with pytest.raises(ValueError, match=f"capacity: want a nonnegative int, the rows of an expert; got {capacity}"):
        moe.limit_rows(routing, capacity)


def test_lists_are_arrays():
    logits, bias, mask = jnp.zeros((2, 3)), [0.0, 0.0, 1.0], [True, False]
    routing = moe.route(logits, 1, bias=bias, mask=mask)
    assert routing.experts.ravel().tolist() == [2, 3]
    np.testing.assert_allclose(moe.z_loss(logits, mask=mask), np.log(3) ** 2, rtol=1e-6)
    np.testing.assert_array_equal(moe.update_bias(bias, routing.sizes, 0.5), [0.5, 0.5, 0.5])


def test_the_bias_keeps_its_dtype():
    bias = moe.update_bias(jnp.zeros(3, jnp.bfloat16), jnp.array([1, 3, 5]), jnp.float32(0.5))
    assert bias.dtype == jnp.bfloat16 and bias.tolist() == [0.5, 0, -0.5]


def test_no_tokens_have_no_loss():
    assert moe.z_loss(jnp.zeros((0, 3))) == 0


@pytest.mark.parametrize(
    ("message", "call"),
    [
        (r"mask: want shape \(2,\); got \(1,\)", lambda: moe.z_loss(jnp.zeros((2, 3)), mask=jnp.ones(1, bool))),
        (r"sizes: want shape \(3,\), that of bias; got \(2,\)", lambda: moe.update_bias(jnp.zeros(3), [1, 2], 0.5)),
        (r"bias: want floats of shape \[e\]; got int32", lambda: moe.update_bias(jnp.arange(2), [1, 2], 0.5)),
        (r"rate: want one number; got shape \(2,\)", lambda: moe.update_bias(jnp.zeros(2), [1, 2], jnp.ones(2))),
    ],
)
def test_errors_about_balance_name_the_argument(message, call):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: moe.route(x, 1, mask=jnp.zeros(3)), "mask: want booleans, True where a token counts; got float32"),
        (lambda x: moe.z_loss(x, mask=jnp.ones(3, jnp.int32)), "mask: want booleans"),
        (moe.balance_loss, "routing: want what moe.route returns; got ArrayImpl"),
        (moe.load_of, "routing: want what moe.route returns"),
        (lambda x: moe.limit_rows(x, 3), "routing: want what moe.route returns"),
        (lambda x: moe.permute(x, moe.route(x, 1)), "permutation: want what moe.sort_by_expert returns; got Routing"),
        (lambda x: moe.combine(x, x, moe.route(x, 1)), "permutation: want what moe.sort_by_expert returns"),
    ],
)
def test_what_is_of_another_type_is_named(call, message):
    with pytest.raises(TypeError, match=message):
        call(jnp.ones((3, 2)))
