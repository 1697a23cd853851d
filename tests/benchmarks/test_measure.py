import dataclasses

import numpy as np
import pytest

from benchmarks import measure, peers, processes, timing

from .fakes import TINY


def test_wrong_and_failing_contenders_are_left_out():
    def raises(x, which):
        raise NotImplementedError("no such kernel\nand more")

    def wrong(x, which):
        return peers.HostCall(lambda lhs: np.ones((x.problem.m, x.problem.n)), (x.lhs,))

    def poisoned(x, which):
        return peers.HostCall(lambda: np.full((x.problem.m, x.problem.n), np.nan), ())

    three = [peers.Peer(name=f.__name__, what="", prepare=f) for f in (raises, wrong, poisoned)]
    calls, found = measure.entrants(peers.operands(TINY, "f32"), "f32", "forward", three)
    assert not calls
    assert found["raises"].why == "failed: NotImplementedError: no such kernel"
    assert found["wrong"].why.startswith("wrong: relative error")
    assert found["poisoned"].why == "wrong: relative error inf"


def test_compiled_ahead():
    def raises(x, which):
        raise NotImplementedError("no such kernel")

    x = peers.operands(TINY, "f32")
    three = [*peers.select("dense"), peers.Peer(name="raises", what="", prepare=raises)]
    ahead = measure.Ahead(x, ("forward", "step"), three, jobs=2)
    both = {(name, which) for name in ("ours", "dense") for which in ("forward", "step")}
    assert set(ahead.calls) == {*both, ("raises", "forward")}
    calls, found = measure.entrants(x, "f32", "forward", three, ahead)
    assert set(calls) == {"ours", "dense"} and "no such kernel" in found["raises"].why
    assert calls["ours"].memory()["result"] == TINY.m * TINY.n * 4


def test_records_of_bursts(capsys):
    how = measure.How(clock=timing.HostClock("fake", iter(range(10**6)).__next__), bursts=True)
    found = measure.problem_records(TINY, ["f32"], ["forward"], peers.select("dense,tokamax"), how)
    assert [(r.contender, r.seconds) for r in found] == [("ours", 1), ("dense", 1), ("tokamax", None)]
    printed = capsys.readouterr().out
    assert "forward: ours 1000.000 ms, dense 1000.000 ms" in printed and "tokamax is not installed" in printed


@pytest.mark.parametrize("name", ["ours", "numpy", "dense", "ragged_dot"])
def test_a_step_is_the_value_and_both_gradients(name, monkeypatch):
    """Every contender of a CPU has all passes, and each is compared with float64 before it is timed."""
    monkeypatch.setattr(timing, "WARM_S", 0.0)
    given = [dataclasses.asdict(TINY)], ["f32"], ["forward", "step"], 2, 0.0
    found = [measure.Record.from_json(value) for value in measure.alone(name, *given)]
    assert [(r.problem, r.contender, r.which, r.why) for r in found] == [
        ("tiny", name, "forward", ""), ("tiny", name, "step", "")
    ]  # fmt: skip
    assert all(r.error <= r.limit and r.time.samples >= 2 for r in found)


def test_contenders_alone(monkeypatch, capsys):
    """One job for each contender; one that dies is a record without a time, and the others go on."""

    def run(job):
        name, (problem,), (dtype,), passes, _, _ = job.arguments
        if name == "dense":
            raise processes.ChildFailed("exit code 9")
        time = timing.Stats(median=0.25)
        record = measure.Record(problem=problem["name"], dtype=dtype, which=passes[0], contender=name, time=time)
        yield dataclasses.replace(record, details={"others": 0.5}).to_json()

    monkeypatch.setattr(processes, "run", run)
    how = measure.How(clock=timing.wall_clock(), alone=True)
    found = measure.alone_records(TINY, ["f32"], ["forward"], peers.select("numpy,dense"), how)
    assert [(r.contender, r.seconds, r.why) for r in found] == [
        ("ours", 0.25, ""), ("numpy", 0.25, ""), ("dense", None, "exit code 9")
    ]  # fmt: skip
    assert "f32 numpy: forward 250.00 ms; other processes took up to 0.5 cores" in capsys.readouterr().out
