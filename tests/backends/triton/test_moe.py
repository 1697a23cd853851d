"""The kernels around the products of an MoE layer: by value, interpreted, as lowered for GPUs, and as compiled."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

import trencadis as tr
from trencadis.backends import triton
from trencadis.backends.triton import bridge
from trencadis.backends.triton import moe as kernels
from trencadis.core.decision import Refusal
from trencadis.core.devices import CARDS
from trencadis.core.jax_compat import JAX
from trencadis.moe import combine, permute, route, sort_by_expert
from trencadis.moe.row_operations import sum_of_rows
from trencadis.moe.selection import SCORES, PullBackWeights, Rule

pytestmark = pytest.mark.core

T, K, E, D = 21, 3, 6, 40
CALL = f"custom_call @{'triton_kernel_call_ffi' if JAX >= (0, 11) else 'triton_kernel_call'}("
RNG = np.random.default_rng(0)
ASSIGNMENTS = {
    "random": RNG.integers(0, E, (T, K)),
    "masked": RNG.integers(-2, E + 2, (T, K)),
    "all to one": np.full((T, K), 4),
    "to the ends": RNG.choice([0, E - 1], (T, K)),
    "to none": np.full((T, K), E),
    "one token": np.array([[2, 0, 2]]),
}


@pytest.fixture
def small(monkeypatch):
    """Blocks so small that few rows cross the edges of all of them."""
    for name, value in {"TILE_BYTES": 64, "IDS": 16, "COUNTS": 64, "LOGITS": 32}.items():
        monkeypatch.setattr(kernels, name, value)


def sorted_by_expert(experts):
    flat = experts.ravel()
    there = (flat >= 0) & (flat < E)
    order = np.argsort(np.where(there, flat, E), kind="stable")
    return order // experts.shape[1], np.argsort(order), np.bincount(flat[there], minlength=E)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("summed_before", [False, True])
@pytest.mark.parametrize("experts", ASSIGNMENTS.values(), ids=ASSIGNMENTS)
def test_sort(experts, summed_before, monkeypatch):
    monkeypatch.setattr(kernels, "MOST_COUNTS", 0 if summed_before else 2**20)
    found = kernels.sort_by_expert(jnp.asarray(experts, jnp.int32), E, "9.0", interpret=True)
    for got, want in zip(found, sorted_by_expert(experts), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("width", [1, 5, D])
def test_rows(dtype, width):
    x = jnp.asarray(RNG.integers(-9, 9, (T, width))).astype(dtype)
    token, inverse, _ = sorted_by_expert(ASSIGNMENTS["masked"])
    rows = jnp.asarray(inverse.reshape(T, K), jnp.int32)
    found = kernels.spread_rows(x, rows, None, "9.0", interpret=True)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(x)[token])
    if dtype in kernels.FLOATS:
        weights = jnp.asarray(RNG.normal(size=(T, K)), jnp.float32)
        found = kernels.spread_rows(x, rows, weights, "9.0", interpret=True)
        want = np.asarray(weights).ravel()[np.argsort(inverse)][:, None] * np.asarray(x, np.float32)[token]
        np.testing.assert_array_equal(np.asarray(found), np.asarray(jnp.asarray(want).astype(dtype)))


@pytest.mark.usefixtures("small")
def test_no_row_is_stored_outside_of_the_result():
    """Rows that a permutation cannot have, before and after all of them."""
    rows = jnp.array([[-1, 0], [1, 2], [3, 2**30]], jnp.int32)
    found = kernels.spread_rows(jnp.arange(12.0).reshape(3, 4), rows, None, "9.0", interpret=True)
    np.testing.assert_array_equal(found[:4, 0], [0, 4, 4, 8])


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("score", SCORES)
def test_routing(score, normalize):
    """Experts, weights and scores, and the gradient of the logits, as XLA has them."""
    rule = Rule(score, normalize)
    logits = jnp.asarray(RNG.normal(size=(T, E)) * 3, jnp.float32)
    experts, weights, probs = kernels.route(logits, None, K, score, normalize, "9.0", interpret=True)
    np.testing.assert_array_equal(experts, jax.lax.top_k(rule.keys(logits), K)[1])
    for got, want in zip((weights, probs), rule.weights(experts, logits), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-6)
    gradients = [jnp.asarray(RNG.normal(size=x.shape), jnp.float32) for x in (weights, probs)]
    found = kernels.route_backward(logits, experts, *gradients, score, normalize, "9.0", interpret=True)
    np.testing.assert_allclose(
        found, PullBackWeights(rule).composed(logits, experts, *gradients)[0], rtol=1e-5, atol=1e-6
    )


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("score", SCORES)
def test_routing_by_scores_that_underflow(score):
    rows = [[1, 2, -120, 0.5], [1, 2, -np.inf, 0.5], [-50] * 4, [-75, -76, -77, -74], [-300] * 4]
    rule, logits = Rule(score, True), jnp.asarray(rows, jnp.float32)
    experts, weights, probs = kernels.route(logits, None, 2, score, True, "9.0", interpret=True)
    gradients = [jnp.asarray(RNG.normal(size=x.shape), jnp.float32) for x in (weights, probs)]
    found = kernels.route_backward(logits, experts, *gradients, score, True, "9.0", interpret=True)
    wanted = *rule.weights(experts, logits), *PullBackWeights(rule).composed(logits, experts, *gradients)
    for got, want in zip((weights, probs, found), wanted, strict=True):
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("small")
def test_routing_by_other_keys():
    logits = jnp.asarray(RNG.normal(size=(T, E)), jnp.bfloat16)
    keys = jnp.asarray(RNG.normal(size=(T, E)), jnp.float32)
    experts, weights, _ = kernels.route(logits, keys, K, "sigmoid", True, "9.0", interpret=True)
    np.testing.assert_array_equal(experts, jax.lax.top_k(keys, K)[1])
    np.testing.assert_allclose(weights, Rule("sigmoid", True).weights(experts, logits)[0], rtol=2e-6)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("value", [0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf])
def test_experts_of_equal_or_strange_scores_are_different(value):
    """Of equal scores the first experts are chosen, as `lax.top_k` does."""
    logits = jnp.full((T, E), value, jnp.float32).at[0].set(jnp.array([0.0, -0.0] * (E // 2)))
    experts, _, _ = kernels.route(logits, None, K, "softmax_topk", True, "9.0", interpret=True)
    np.testing.assert_array_equal(experts, np.broadcast_to(np.arange(K), (T, K)))


# ---------------------------------------------------------------------------------------------------------------------
# What is lowered and compiled


def layer(x, router):
    routing = route(x @ router, 8, score="sigmoid", bias=jnp.zeros(router.shape[1]))
    permutation = sort_by_expert(routing.experts, router.shape[1])
    return combine(jnp.tanh(permute(x, permutation)), routing.weights, permutation)


ARGS = jax.ShapeDtypeStruct((4096, 2048), jnp.bfloat16), jax.ShapeDtypeStruct((2048, 128), jnp.bfloat16)


@functools.cache
def assemblies(name):
    """What the kernels of a layer and of its gradients compile to, by the name of the kernel."""
    found, plain = {}, bridge.compiled

    def compiled(kernel):
        found[kernel.function.__name__] = plain(kernel).text
        return plain(kernel)

    with pytest.MonkeyPatch.context() as patch, tr.target(name):
        patch.setattr(bridge, "compiled", compiled)
        gradients = jax.grad(lambda *args: jnp.sum(layer(*args)).astype(jnp.float32), argnums=(0, 1))
        text = jax.jit(gradients).trace(*ARGS).lower(lowering_platforms=(CARDS[name].platform,)).as_text()
    assert "scatter" not in text
    return found


@pytest.mark.parametrize("name", ["a100", "h200", "b200", "mi300x"])
def test_a_layer_holds_its_kernels(name):
    """The choice of experts and its gradient, a sort by counts, tokens to rows and gradients to rows, with weights."""
    assert set(assemblies(name)) == {"route", "pull_back", "block_counts", "sum_counts", "place", "spread_rows"}


def test_rows_move_by_16_bytes():
    text = assemblies("h200")["spread_rows"]
    assert len(re.findall(r"st\.global\.v4\.b32", text)) == 16 and not re.search(r"st\.global\.b", text)


def test_rows_of_float8_move_where_nothing_multiplies_them():
    move = jax.jit(lambda x, rows: kernels.spread_rows(x, rows, None, CARDS["a100"].arch))
    args = jax.ShapeDtypeStruct((16, 64), jnp.float8_e4m3fn), jax.ShapeDtypeStruct((16, 2), jnp.int32)
    assert CALL in move.trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def test_elsewhere_it_is_xla():
    assert CALL not in jax.jit(layer).lower(*ARGS).as_text()
    for name in ("a100", "mi300x"):  # in a process that does not know which GPU it lowers for
        assert CALL not in jax.jit(layer).trace(*ARGS).lower(lowering_platforms=(CARDS[name].platform,)).as_text()


def test_many_blocks_of_ids_are_summed_by_a_kernel():
    experts = jax.ShapeDtypeStruct((32768, 8), jnp.int32)
    with tr.target("h200"):
        sort = jax.jit(functools.partial(sort_by_expert, num_experts=1024))
        assert sort.trace(experts).lower(lowering_platforms=("cuda",)).as_text().count(CALL) == 3


@pytest.mark.parametrize(
    "call",
    [
        lambda x: kernels.spread_rows(x, jnp.zeros((4, 99), jnp.int32), None, "9.0"),
        lambda x: kernels.spread_rows(x.astype(bool), jnp.zeros((4, 2), jnp.int32), None, "9.0"),
        lambda x: kernels.spread_rows(x.astype(jnp.int8), jnp.zeros((4, 2), jnp.int32), jnp.ones((4, 2)), "9.0"),
        lambda x: kernels.sort_by_expert(jnp.zeros((4, 2), jnp.int32), 10**5, "9.0"),
        lambda x: kernels.sort_by_expert(jnp.zeros((0, 2), jnp.int32), 4, "9.0"),
        lambda x: kernels.sort_by_expert(jax.ShapeDtypeStruct((2**26, 1), jnp.int32), 4096, "9.0"),
        lambda x: kernels.route(jnp.zeros((4, 2048)), None, 2, "softmax", True, "9.0"),
        lambda x: kernels.route(jax.ShapeDtypeStruct((2**21, 1024), jnp.float32), None, 2, "softmax", True, "9.0"),
        lambda x: kernels.route_backward(jnp.zeros((4, 64)), jnp.zeros((4, 33)), x, x, "softmax", True, "9.0"),
    ],
)
def test_what_the_kernels_do_not_take(call):
    assert call(jnp.ones((4, 8))) is None


def test_without_triton_a_warning_says_what_to_install(monkeypatch):
    """The sums over the rows of a token have no kernel on GPUs, and do not warn."""
    advice = "pip install 'trencadis[cuda]'"
    monkeypatch.setattr(triton, "_missing", lambda: Refusal("triton", "Triton does not import", advice))
    rows = jax.ShapeDtypeStruct((16, 2), jnp.int32)
    with tr.target("h200"):
        with pytest.warns(tr.PerformanceWarning, match=r"run as XLA operations .*pip install 'trencadis\[cuda\]'"):
            sort = jax.jit(lambda x: sort_by_expert(x, 4))
            assert CALL not in sort.trace(rows).lower(lowering_platforms=("cuda",)).as_text()
        sums = jax.jit(lambda y, rows: sum_of_rows(y, rows, None))
        sums.trace(jax.ShapeDtypeStruct((32, 8), jnp.float32), rows).lower(lowering_platforms=("cuda",))
