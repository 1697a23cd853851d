"""The float64 layer of the benchmarks is that of the tests, which is a loop over tokens."""

import functools

import jax
import numpy as np
import pytest

from benchmarks import oracle
from benchmarks.moe import exact
from benchmarks.moe.shapes import MoeShape
from tests.support import moe_oracle

from .conftest import TINY


def by_token(params, ct, experts):
    """The result and all gradients by the oracle of the tests, with the router's by the derivative of the softmax."""
    x, router = (np.asarray(each, np.float64) for each in params[:2])
    logits = np.take_along_axis(x @ router, experts, axis=1)
    weights = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    given = {name: getattr(params, name) for name in moe_oracle.NAMES}
    limit, alpha, shift = TINY.swiglu
    out, d = moe_oracle.layer(x, experts, weights, given, ct, limit=limit, alpha=alpha, shift=shift)
    d_weights = d.pop("weights")
    d_logits = np.zeros((TINY.t, TINY.e))
    d_chosen = weights * (d_weights - (weights * d_weights).sum(1, keepdims=True))
    np.put_along_axis(d_logits, experts, d_chosen, axis=1)
    return {"out": out, "router": x.T @ d_logits, **d, "x": d["x"] + d_logits @ router.T}


@pytest.mark.parametrize("sampled", [False, True])
def test_values_are_those_of_a_loop_over_tokens(monkeypatch, operands, sampled):
    if sampled:
        monkeypatch.setattr(oracle, "LARGE", 0)
        monkeypatch.setattr(oracle, "SAMPLE", 3)
    x, experts = operands, np.asarray(operands.routing.experts)
    with jax.enable_x64(True):
        found = jax.jit(functools.partial(exact.values, TINY))(x.params, x.ct, experts)
    want = by_token(x.params, x.ct, experts)
    sample = exact.Sample.of(TINY)
    assert set(found) == set(want) and (found["gate"].shape[1] < TINY.d) == sampled
    for name, each in want.items():
        np.testing.assert_allclose(found[name], sample.cut(name, each), rtol=1e-9, atol=1e-12, err_msg=name)


def test_room_for_the_tokens_of_an_expert():
    assert exact.room(TINY) == TINY.t
    assert exact.room(MoeShape(name="a", t=4096, k=8, d=8, f=8, e=128)) == 2 * 256 + 16


def test_errors_are_of_the_worst_result():
    right = {"out": np.ones(4), "x": np.full(4, 2.0)}
    assert exact.error({"out": np.ones(4)}, right) == 0
    assert exact.error({"out": np.ones(4), "x": np.full(4, 2.02)}, right) == pytest.approx(0.01)
