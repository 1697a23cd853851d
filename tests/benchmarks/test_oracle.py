import numpy as np
import pytest

from benchmarks import measure, oracle, peers
from tests.support import oracle as float64
from trencadis.quant import quantize

from .fakes import TINY


@pytest.mark.parametrize("which", peers.PASSES)
def test_a_sampled_answer_is_part_of_the_whole_one(monkeypatch, which):
    x = peers.operands(TINY, "f32")
    (whole,) = oracle.answers(x, which)
    monkeypatch.setattr(oracle, "LARGE", 0)
    monkeypatch.setattr(oracle, "SAMPLE", 3)
    monkeypatch.setattr(oracle, "BORDERS", 1)
    (part,) = oracle.answers(x, which)
    assert part.values.size < whole.values.size
    np.testing.assert_allclose(part.values, part.pick(whole.values), rtol=1e-12)


@pytest.mark.parametrize("sampled", [False, True])
def test_a_window_with_everything(monkeypatch, rng, sampled):
    """Rows outside the window of groups are exact; bias, activation and existing_out are applied to the others."""
    if sampled:
        monkeypatch.setattr(oracle, "LARGE", 0)
        monkeypatch.setattr(oracle, "SAMPLE", 4)
    sizes, m, k, n = np.array([3, 0, 7, 2, 4]), 20, 5, 6
    lhs, rhs, out = (rng.normal(size=shape) for shape in ((m, k), (2, k, n), (m, n)))
    extras = {"bias": rng.normal(size=(2, n)), "existing_out": out, "activation": np.tanh}
    want = float64.rows(lhs, rhs, sizes, first=2, **extras)
    right = oracle.rows(lhs, rhs, sizes, first=2, **extras)
    np.testing.assert_allclose(right.values, right.pick(want))
    assert oracle.error(want, right) < 1e-15
    want[0, 0] += 1e-9  # no group owns row 0: it must equal existing_out exactly
    assert oracle.error(want, right) == float("inf")


def test_quantized_operands_are_dequantized(rng):
    sizes = np.array([3, 5])
    x, w = quantize(rng.normal(size=(8, 16)), "int8", "row"), quantize(rng.normal(size=(2, 16, 4)), "int8", "column")
    want = float64.rows(x.dequantize(), w.dequantize(), sizes)
    np.testing.assert_allclose(oracle.rows(x, w, sizes).values, want, rtol=1e-12)
    np.testing.assert_allclose(oracle.rows(x, w.mT, sizes, transpose_rhs=True).values, want, rtol=1e-12)


def test_errors():
    right = oracle.Answer(pick=lambda out: out, values=np.full(10_000, 2.0))
    good = right.values * (1 + 1e-6)
    assert oracle.error(good, right) == pytest.approx(1e-6)
    good[7] += 1  # half of the rms, which is 1/32 of what one element may be off by
    assert oracle.error(good, right) == pytest.approx(0.5 / oracle.OUTLIER, rel=1e-4)
    good[7] = np.nan
    assert oracle.error(good, right) == float("inf")
    nothing = oracle.Answer(pick=lambda out: out, values=np.zeros(3))
    assert oracle.error(np.zeros(3), nothing) == 0 and oracle.error(np.ones(3), nothing) == float("inf")


def test_limits_grow_with_the_sum_and_with_rounding():
    assert oracle.limit("float32", depth=256) == 1.0512e-05 and oracle.limit("bfloat16", depth=256) == 3e-3
    assert oracle.limit("float32", depth=256, tf32=True) == 1e-3
    assert [oracle.depths(TINY.shape(), which) for which in (*peers.PASSES, "step")] == [8, 6, 12, 12]


def test_a_step_is_checked_in_all_of_its_results():
    x = peers.operands(TINY, "f32")
    takers = [peer for peer in peers.PEERS.values() if "step" in peer.passes]
    calls, found = measure.entrants(x, "f32", "step", takers)
    assert set(calls) == {"ours", "numpy", "dense", "ragged_dot"}
    assert set(found) == {*calls, "xla"} and found["xla"].why == "is ours, without native kernels"
    out, right = calls["ours"](), oracle.answers(x, "step")
    assert oracle.worst(out, right) <= measure.tolerance(x, "step")
    assert oracle.worst((out[0], out[1], out[2] + 1), right) > 0.01
