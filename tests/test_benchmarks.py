"""The benchmark tools: problems, contenders and statistics are what they say. Nothing is timed here."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import platform
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # benchmarks is not installed

from benchmarks import cells, oracle, peers, plot, problems, report, run, timing  # noqa: E402

TINY = problems.BenchProblem(name="tiny", m=20, k=8, n=6, g=4, sizes="zipf-empties", seed=3)


class FakeClock:
    """Each call lasts what its table says, in turn; then the last of it, for ever."""

    name, settle_s = "fake", 0.0

    def __init__(self, seconds):
        self.left = {name: list(values) for name, values in seconds.items()}
        self.order = []

    def __call__(self, call, repeats):
        name = call()
        self.order.append((name, repeats))
        return self.left[name].pop(0) if len(self.left[name]) > 1 else self.left[name][0]


# ---------------------------------------------------------------------------------------------------------------------
# Problems


@pytest.mark.parametrize(
    "problem", [*problems.PROBLEMS.values(), *problems.SCALING_G, *problems.SCALING_M], ids=lambda p: p.name
)
def test_sizes_are_sound_and_the_same_each_time(problem):
    sizes = problem.group_sizes()
    assert sizes.shape == (problem.g,) and sizes.dtype == np.int32
    assert sizes.sum() == problem.m and (sizes >= 0).all()
    np.testing.assert_array_equal(sizes, problem.group_sizes())
    assert problem.flops == 2 * problem.m * problem.k * problem.n


def test_sizes_are_those_of_the_recipe():
    rng = np.random.default_rng(0)
    p = problems.PROBLEMS["qwen3-30b-a3b"]
    np.testing.assert_array_equal(p.group_sizes(), rng.multinomial(p.m, rng.dirichlet(np.full(p.g, 4.0))))
    b, d = problems.PROBLEMS["B"].group_sizes(), problems.PROBLEMS["D"].group_sizes()
    assert (b == 0).sum() == 8 and 1100 < b.max() < 1350
    assert 35 < (d > 0).sum() < 50 and d.max() < 8


def test_selection_and_its_errors():
    assert [p.name for p in problems.select("B,E", "cpu")] == ["B", "E"]
    assert [p.name for p in problems.select(None, "cpu")] == list("ABCDE")
    assert {p.name for p in problems.select(None, "cpu-scaled")} == {f"{p.name}-cpu" for p in problems.GPU}
    with pytest.raises(ValueError, match="nonsense not among"):
        problems.select("A,nonsense", "cpu")
    with pytest.raises(ValueError, match="none of cpu"):
        problems.select(None, "nonsense")
    with pytest.raises(ValueError, match="sizes: 'nonsense' is none of balanced"):
        problems.group_sizes("nonsense", 8, 2)


# ---------------------------------------------------------------------------------------------------------------------
# Contenders


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("which", peers.PASSES)
def test_contenders_agree_with_float64(dtype, which):
    x = peers.operands(TINY, dtype)
    calls, errors, skipped = cells.entrants(x, which, list(peers.PEERS.values()))
    assert set(calls) >= {"ours", "numpy", "dense", "ragged_dot"}, skipped
    assert set(calls) | set(skipped) == set(peers.PEERS)
    assert all(errors[name] <= oracle.tolerance(x.dtype) for name in calls)


def test_a_sampled_oracle_is_part_of_the_whole_one(monkeypatch):
    x = peers.operands(TINY, "f32")
    whole = {which: oracle.oracle(x, which) for which in peers.PASSES}
    monkeypatch.setattr(oracle, "WHOLE", 0)
    monkeypatch.setattr(oracle, "SAMPLE", 3)
    for which in peers.PASSES:
        part = oracle.oracle(x, which)
        assert part.values.size < whole[which].values.size
        np.testing.assert_array_equal(part.values, whole[which].values[part.index])


def test_wrong_and_failing_contenders_are_left_out():
    def raises(x, which):
        raise NotImplementedError("no such kernel\nand more")

    def wrong(x, which):
        return peers.HostCall(lambda lhs: np.ones((x.problem.m, x.problem.n)), (x.lhs,))

    def poisoned(x, which):
        return peers.HostCall(lambda: np.full((x.problem.m, x.problem.n), np.nan), ())

    three = [peers.Peer(name=f.__name__, what="", prepare=f) for f in (raises, wrong, poisoned)]
    calls, _, skipped = cells.entrants(peers.operands(TINY, "f32"), "forward", three)
    assert not calls
    assert skipped["raises"] == "failed: NotImplementedError: no such kernel"
    assert skipped["wrong"].startswith("wrong: off by") and skipped["poisoned"].startswith("wrong: off by inf")


def test_those_who_cannot_run_say_why():
    huge = dataclasses.replace(TINY, m=1 << 20, k=1 << 10, g=64)
    x = dataclasses.replace(peers.operands(TINY, "f32"), problem=huge)
    assert "GiB of temporary memory" in peers.PEERS["ragged_dot"].absent(x)
    assert "TPU only" in peers.PEERS["megablox"].absent(x)
    assert [p.name for p in peers.select("numpy")] == ["ours", "numpy"]
    with pytest.raises(ValueError, match="peers: nobody not among ours"):
        peers.select("nobody")


# ---------------------------------------------------------------------------------------------------------------------
# Statistics, on a clock that does not run


def test_statistics():
    found = timing.stats([5.0, 1.0, 2.0, 3.0, 4.0], repeats=7)
    assert dataclasses.asdict(found) == {"median": 3, "min": 1, "q1": 2, "q3": 4, "samples": 5, "repeats": 7}
    assert found.spread == pytest.approx(2 / 3)
    alone = timing.stats([2.0])
    assert (alone.median, alone.q1, alone.q3, alone.spread) == (2, 2, 2, 0)
    times = {"ours": timing.stats([1.0]), "slow": timing.stats([4.0]), "fast": timing.stats([0.5])}
    assert timing.ratios(times, "ours") == {"slow": 0.25, "fast": 2}
    assert timing.ratios(times, "nobody") == {}
    assert timing.slope([1, 2, 4], [3, 12, 48]) == pytest.approx(2)


def test_clocks():
    ticks = iter([10.0, 16.0])
    calls = []
    assert timing.HostClock("fake", lambda: next(ticks))(lambda: calls.append(1), 3) == 2 and len(calls) == 3

    class WithItsOwn:
        clock = staticmethod(lambda repeats: repeats * 2.0)

    assert timing.CuptiClock()(WithItsOwn(), 4) == 8
    # both let the last contender's threads and deferred frees pass
    assert timing.wall_clock().settle_s > 0 and timing.cpu_clock().settle_s > 0


def test_turns_and_repeats():
    assert timing.plan_turns(1.0, rounds=7, budget_s=10) == (7, 1)
    assert timing.plan_turns(4.0, rounds=7, budget_s=10) == (2, 1)
    assert timing.plan_turns(60.0, rounds=7, budget_s=10) == (1, 1)
    assert timing.plan_turns(0.001, rounds=7, budget_s=10) == (7, 5)
    assert timing.plan_turns(0.0, rounds=7, budget_s=10)[1] == timing.MOST_REPEATS


def test_contenders_take_turns():
    clock = FakeClock({"a": [0.001, 1.0, 3.0, 2.0], "b": [9.0, 8.0]})
    found = timing.race({"a": lambda: "a", "b": lambda: "b"}, clock, rounds=3, budget_s=10)
    # each runs once to be judged; then rounds, whose first contender changes; b is slow, and has one turn
    assert clock.order == [("a", 1), ("b", 1), ("a", 5), ("b", 1), ("a", 5), ("a", 5)]
    assert (found["a"].median, found["a"].samples, found["a"].repeats) == (2, 3, 5)
    assert (found["b"].median, found["b"].samples) == (8, 1)


def test_who_starts_a_round_changes():
    clock = FakeClock({name: [1.0] for name in "abc"})
    timing.race({name: (lambda name=name: name) for name in "abc"}, clock, rounds=3, budget_s=10)
    assert [name for name, _ in clock.order[3::3]] == ["a", "b", "c"]


def test_pinning_too_late_is_refused():
    with pytest.raises(RuntimeError, match="numpy and jax is imported already"):
        timing.pin(0)


def test_nothing_heavy_is_imported_before_the_arguments_are_read():
    code = (
        "import sys, benchmarks.run as r; r.main(['--list']); sys.exit('numpy' in sys.modules or 'jax' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)


# ---------------------------------------------------------------------------------------------------------------------
# Reports


def a_report():
    ticking = itertools.count(1)
    how = cells.How(clock=FakeClockOf(ticking), rounds=2, memory=True)
    contenders = peers.select("numpy,dense")
    made = report.Report(environment=report.environment(["--problems", "tiny"], "fake", None))
    made.cells = run.measure_problem(TINY, ["f32"], ["forward", "d_rhs"], contenders, how)
    larger = dataclasses.replace(TINY, name="larger", m=40)
    made.scaling = {
        "m": [c for p in (TINY, larger) for c in run.measure_problem(p, ["f32"], ["forward"], contenders, how)]
    }
    return made


class FakeClockOf:
    """One more second with each call."""

    name, settle_s = "fake", 0.0

    def __init__(self, ticking):
        self.ticking = ticking

    def __call__(self, call, repeats):
        return float(next(self.ticking))


@pytest.fixture(scope="module")
def made():
    return a_report()


def test_a_report_survives_json(made, tmp_path):
    again = report.Report.from_json(made.to_json())
    assert again == made
    assert again.to_json() == made.to_json()
    first, second = (made.save(tmp_path / "x" / "day.json") for _ in range(2))
    assert (first.name, second.name) == ("day.json", "day-2.json")
    with pytest.raises(ValueError, match="schema: None"):
        report.Report.from_json("{}")


def test_a_report_says_where_and_not_who(made):
    text = made.to_json()
    assert {"cpu", "clock", "versions", "command", "load_before"} <= set(made.environment)
    assert str(ROOT) not in text and platform.node() not in made.environment.values()
    assert report.scrubbed(["--pin", "1", "--out", "/a/b", "--memory"]) == ["--pin", "1", "--out ...", "--memory"]
    assert report.scrubbed(["--out=/a/b"]) == ["--out=..."]


def test_tables(made, capsys):
    header, rows = report.ratio_rows(made.cells)
    assert header[-2:] == ["/ numpy", "/ dense"] and len(rows) == 2 and all(len(row) == len(header) for row in rows)
    run.tables(made)
    printed = capsys.readouterr().out
    assert "ours / peer" in printed and "time grows as m^" in printed and "temporary memory" in printed
    assert report.plain("t", ["a", "b"], [["xx", "y"]]) == "t\na   b\n--  -\nxx  y"


def test_pictures(made, tmp_path):
    written = plot.draw(made, tmp_path)
    assert [path.name.split("-")[0] for path in written] == ["ratios", "scaling"]
    assert all("<svg" in path.read_text() for path in written)


def test_the_command_line(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(problems.PROBLEMS, "tiny", TINY)
    words = ["--problems", "tiny", "--dtypes", "f32", "--passes", "forward", "--peers", "numpy", "--memory"]
    assert run.main([*words, "--rounds", "0", "--out", str(tmp_path / "r.json")]) == 0
    again = report.Report.from_json((tmp_path / "r.json").read_text())
    assert [cell.problem for cell in again.cells] == ["tiny"] and again.cells[0].memory["ours"]["result"] == 20 * 6 * 4
    with pytest.raises(SystemExit):
        run.main(["--problems", "nonsense", "--out", "none"])
    assert "nonsense not among" in capsys.readouterr().err
