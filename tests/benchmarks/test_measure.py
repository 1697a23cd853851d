import numpy as np

from benchmarks import measure, peers, timing

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


def test_a_failing_burst_does_not_end_the_run():
    clock = timing.HostClock("fake", lambda: 0.0)
    times, failed = measure.bursts({"good": lambda: 1, "bad": lambda: 1 / 0}, clock)
    assert set(times) == {"good"} and failed["bad"].startswith("failed: ZeroDivisionError")


def test_compiled_ahead():
    def raises(x, which):
        raise NotImplementedError("no such kernel")

    x = peers.operands(TINY, "f32")
    three = [*peers.select("dense"), peers.Peer(name="raises", what="", prepare=raises)]
    ahead = measure.Ahead(x, ("forward", "step"), three, jobs=2)
    assert set(ahead.calls) == {("dense", "forward"), ("ours", "forward"), ("raises", "forward"), ("ours", "step")}
    calls, found = measure.entrants(x, "f32", "forward", three, ahead)
    assert set(calls) == {"ours", "dense"} and "no such kernel" in found["raises"].why
    assert calls["ours"].memory()["result"] == TINY.m * TINY.n * 4


def test_records_of_bursts(capsys):
    how = measure.How(clock=timing.HostClock("fake", iter(range(10**6)).__next__), bursts=True)
    found = measure.problem_records(TINY, ["f32"], ["forward"], peers.select("dense,tokamax"), how)
    assert [(r.contender, r.seconds) for r in found] == [("ours", 1), ("dense", 1), ("tokamax", None)]
    printed = capsys.readouterr().out
    assert "forward: ours 1000.000 ms, dense 1000.000 ms" in printed and "tokamax is not installed" in printed
