import dataclasses
import functools
import itertools

import pytest

from benchmarks import peers, timing

from .fakes import FakeClock


def test_statistics():
    found = timing.stats([5.0, 1.0, 2.0, 3.0, 4.0], repeats=7)
    assert dataclasses.asdict(found) == {"median": 3, "min": 1, "q1": 2, "q3": 4, "samples": 5, "repeats": 7}
    assert found.spread == pytest.approx(2 / 3)
    alone = timing.stats([2.0])
    assert (alone.median, alone.q1, alone.q3, alone.spread) == (2, 2, 2, 0)
    assert timing.Stats(median=2.0).spread == 0
    assert timing.slope([1, 2, 4], [3, 12, 48]) == pytest.approx(2)


def test_clocks():
    ticks = iter([10.0, 16.0])
    calls = []
    assert timing.HostClock("fake", lambda: next(ticks))(lambda: calls.append(1), 3) == 2 and len(calls) == 3

    ticks = iter(range(8))
    assert timing.HostClock("fake", lambda: next(ticks)).each(lambda: None, 4) == [1, 1, 1, 1]
    # both let the threads and deferred frees of the last contender pass
    assert timing.wall_clock().settle_s > 0 and timing.cpu_clock().settle_s > 0


def test_a_contender_alone(monkeypatch):
    """Calls to warm up do not count; a short call is repeated, and a slow one has as many turns as rounds."""
    monkeypatch.setattr(timing, "WARM_S", 0.0)
    clock = FakeClock({"short": [9.0, 0.001, 0.002, 0.003], "slow": [4.0]})
    clock.left["short"][0] = 0.001
    found = timing.steady(lambda: "short", clock, rounds=3, budget_s=0.02)
    assert (found.samples, found.repeats, found.min) == (4, 5, 0.001)
    found = timing.steady(lambda: "slow", clock, rounds=3, budget_s=0.02)
    assert (found.samples, found.repeats, found.median) == (3, 1, 4.0)


def test_cores_that_others_take(monkeypatch):
    others = timing.Others()
    monkeypatch.setattr(others, "start", (0.0, 10.0, 1.0))
    monkeypatch.setattr(others, "_read", lambda: (4.0, 18.0, 3.0))
    assert others() == 1.5  # 8 seconds of all, 2 of them ours, in 4 seconds
    monkeypatch.setattr(others, "_read", lambda: None)
    assert others() is None


def test_one_clock_for_each_device():
    names = [timing.device_clock("cpu"), timing.device_clock("cpu", pinned=True), timing.device_clock("gpu")]
    assert [clock.name for clock in names] == ["wall time", "cpu time", "cupti kernel time"]


def test_the_clock_of_a_gpu(monkeypatch):
    profiler = pytest.importorskip("jax.experimental.mosaic.gpu.profiler")
    saw = []

    def measure(fn, *, iterations):
        saw.append((fn, iterations))
        times = [2.0, 9.0, 4.0][:iterations]
        return lambda *args: (args, times if iterations > 1 else times[0])

    monkeypatch.setattr(profiler, "measure", measure)
    call = peers.JaxCall(len, ([],))
    assert timing.CuptiClock().each(call, 3) == [2e-3, 9e-3, 4e-3] and timing.CuptiClock()(call, 1) == 2e-3
    assert saw == [(len, 3), (len, 1)]
    assert timing.CuptiClock(kept=2).each(call, 5) == [2e-3, 9e-3, 2e-3, 9e-3, 2e-3]
    monkeypatch.setattr(profiler, "measure", lambda fn, *, iterations: lambda *args: (args, None))
    with pytest.raises(RuntimeError, match="saw no kernel"):
        timing.CuptiClock().each(call, 3)


def test_the_clock_of_a_tpu(monkeypatch):
    from trencadis import inspect

    saw = []
    monkeypatch.setattr(inspect, "inspect", lambda *args, **how: saw.append((args, how)) or "inspection")
    assert timing.ScheduleClock(generation="v6e", timeout_s=5)(len, "x", flops=7) == "inspection"
    assert saw == [((len, "x"), {"generation": "v6e", "xla": True, "flops": 7, "timeout": 5})]


def test_a_burst():
    calls, ticks = [], itertools.count()
    found = timing.burst(lambda: calls.append(1), timing.HostClock("fake", lambda: float(next(ticks))))
    assert len(calls) == timing.WARM + timing.TIMED and (found.median, found.samples) == (1, timing.TIMED)


def test_bursts_take_turns_and_a_failure_does_not_end_the_run():
    calls, clock = [], timing.HostClock("fake", lambda: 0.0)
    three = {name: (functools.partial(calls.append, name), clock) for name in "abc"}
    times, failed = timing.bursts(three | {"bad": (lambda: 1 / 0, clock)}, turns=4)
    assert list(times) == ["a", "b", "c"] and all(one.samples == 4 * timing.TIMED for one in times.values())
    assert list(failed) == ["bad"] and failed["bad"].startswith("failed: ZeroDivisionError")
    length = timing.WARM + timing.TIMED
    assert "".join(calls[::length]) == "abcbcacababc"  # another starts in each turn


def test_turns_and_repeats():
    assert timing.plan_turns(1.0, rounds=7, budget_s=10) == (7, 1)
    assert timing.plan_turns(4.0, rounds=7, budget_s=10) == (2, 1)
    assert timing.plan_turns(60.0, rounds=7, budget_s=10) == (1, 1)
    assert timing.plan_turns(0.001, rounds=7, budget_s=10) == (7, 5)
    assert timing.plan_turns(0.0, rounds=7, budget_s=10)[1] == timing.MOST_REPEATS


def test_contenders_take_turns():
    clock = FakeClock({"a": [0.001, 1.0, 3.0, 2.0], "b": [9.0, 8.0]})
    found = timing.race({"a": lambda: "a", "b": lambda: "b"}, clock, rounds=3, budget_s=10)
    # each runs once to plan its turns; then rounds, each with another start; b is slow, and has one turn
    assert clock.order == [("a", 1), ("b", 1), ("a", 5), ("b", 1), ("a", 5), ("a", 5)]
    assert (found["a"].median, found["a"].samples, found["a"].repeats) == (2, 3, 5)
    assert (found["b"].median, found["b"].samples) == (8, 1)


def test_another_contender_starts_each_round():
    clock = FakeClock({name: [1.0] for name in "abc"})
    timing.race({name: (lambda name=name: name) for name in "abc"}, clock, rounds=3, budget_s=10)
    assert [name for name, _ in clock.order[3::3]] == ["a", "b", "c"]


def test_pinning_too_late_is_refused():
    with pytest.raises(RuntimeError, match="got numpy and jax imported"):
        timing.pin(0)
