"""The benchmark tools: problems, contenders and statistics are what they say. Nothing is timed here."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import pathlib
import platform
import subprocess
import sys

import jax
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # benchmarks is not installed

from benchmarks import (  # noqa: E402
    cells,
    gpu_cases,
    gpu_check,
    oracle,
    peers,
    plot,
    problems,
    quantized_errors,
    quantized_picture,
    report,
    run,
    timing,
    torch_peer,
    tpu,
    tpu_peers,
    tpu_table,
)

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
        np.testing.assert_allclose(part.values, whole[which].values[part.index], rtol=1e-12)


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

    ticks = iter(range(8))
    assert timing.HostClock("fake", lambda: next(ticks)).each(lambda: None, 4) == [1, 1, 1, 1]
    # both let the last contender's threads and deferred frees pass
    assert timing.wall_clock().settle_s > 0 and timing.cpu_clock().settle_s > 0


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
    monkeypatch.setattr(profiler, "measure", lambda fn, *, iterations: lambda *args: (args, None))
    with pytest.raises(RuntimeError, match="saw no kernel"):
        timing.CuptiClock().each(call, 3)


def test_a_burst():
    calls, ticks = [], itertools.count()
    found = timing.burst(lambda: calls.append(1), timing.HostClock("fake", lambda: float(next(ticks))))
    assert len(calls) == timing.WARM + timing.TIMED and (found.median, found.samples) == (1, timing.TIMED)
    times, failed = cells.bursts({"good": lambda: 1, "bad": lambda: 1 / 0}, timing.HostClock("fake", lambda: 0.0))
    assert set(times) == {"good"} and failed["bad"].startswith("failed: ZeroDivisionError")


def test_a_step_is_checked_in_all_of_its_results():
    x = peers.operands(TINY, "f32")
    calls, errors, skipped = cells.entrants(x, "step", list(peers.PEERS.values()))
    assert set(calls) == set(errors) == {"ours"} and not skipped
    out = calls["ours"]()
    assert oracle.worst(out, oracle.answers(x, "step")) <= oracle.tolerance(x.dtype)
    assert oracle.worst((out[0], out[1], out[2] + 1), oracle.answers(x, "step")) > 0.01


def test_compiled_ahead():
    def raises(x, which):
        raise NotImplementedError("no such kernel")

    x = peers.operands(TINY, "f32")
    three = [*peers.select("dense"), peers.Peer(name="raises", what="", prepare=raises)]
    ahead = cells.Ahead(x, ("forward", "step"), three, jobs=2)
    assert set(ahead.calls) == {("dense", "forward"), ("ours", "forward"), ("raises", "forward"), ("ours", "step")}
    calls, _, skipped = cells.entrants(x, "forward", three, ahead)
    assert set(calls) == {"ours", "dense"} and "no such kernel" in skipped["raises"]
    assert calls["ours"].memory()["result"] == TINY.m * TINY.n * 4


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
    first, second = (report.write_beside(tmp_path / "x" / "day.json", made.to_json()) for _ in range(2))
    assert (first.name, second.name) == ("day.json", "day-2.json")
    with pytest.raises(ValueError, match="schema: None"):
        report.Report.from_json("{}")


def test_a_run_keeps_what_it_has_measured_so_far(made, tmp_path):
    """One file, whole after each problem, beside those of other runs."""
    (tmp_path / "day.json").write_text("an older run")
    keep = run.Keep(made, str(tmp_path / "day.json"))
    for _ in range(2):
        keep()
        assert report.Report.from_json(keep.path.read_text()) == made
    assert sorted(path.name for path in tmp_path.iterdir()) == ["day-2.json", "day.json"]
    nowhere = run.Keep(made, "none")
    nowhere()
    assert nowhere.path is None


def test_a_report_says_where_and_not_who(made):
    text = made.to_json()
    assert {"cpu", "clock", "versions", "command", "load_before"} <= set(made.environment)
    assert str(ROOT) not in text and platform.node() not in made.environment.values()
    assert report.scrubbed(["--pin", "1", "--out", "/a/b", "--memory"]) == ["--pin", "1", "--out ...", "--memory"]
    assert report.scrubbed(["--out=/a/b"]) == ["--out=..."]
    assert report.scrubbed(["--python", "/a", "--python", "/b"]) == ["--python ...", "--python ..."]


def test_tables(made, capsys):
    header, rows = report.ratio_rows(made.cells)
    assert header[-2:] == ["/ numpy", "/ dense"] and len(rows) == 2 and all(len(row) == len(header) for row in rows)
    run.tables(made)
    printed = capsys.readouterr().out
    assert "ours / peer" in printed and "time grows as m^" in printed and "temporary memory" in printed
    assert report.plain("t", ["a", "b"], [["xx", "y"]]) == "t\na   b\n--  -\nxx  y"


def test_rates():
    x = peers.operands(TINY, "f32")
    how = cells.How(clock=timing.HostClock("fake", itertools.count().__next__), burst=True)
    contenders = peers.select("dense")
    found = [cells.measure(x, "f32", which, contenders, how) for which in (*problems.PASSES, "step")]
    found[0] = cells.joined(found[0], "torch", timing.stats([0.5]), 1e-3, None)
    found[1] = cells.joined(found[1], "torch", None, None, "failed")
    assert found[0].errors["torch"] == 1e-3 and found[1].skipped == {"torch": "failed"}
    header, rows = report.rate_rows(found)
    table = [dict(zip(header, row, strict=True)) for row in rows]
    assert (table[0]["best peer"], table[0]["/ peer"], table[0]["of dense"]) == ("torch", "2.000", "100%")
    assert table[1]["best peer"] == "-" and table[1]["ms"] == "1000.000"
    assert (table[3]["best peer"], table[3]["/ peer"], table[3]["of dense"]) == ("sum of passes", "0.333", "-")
    assert found[3].flops == 3 * found[0].flops


def test_what_torch_said():
    said = (
        'noise\n{"problem": "a", "which": "forward", "error": 0.001, "seconds": [1, 2, 3]}\n'
        '{"problem": "a", "which": "d_lhs", "error": 0.5, "seconds": [1]}\n'
        '{"problem": "a", "which": "d_rhs", "why": "failed: no"}\n'
    )
    found = dict(torch_peer.read(said))
    assert found["a", "forward"].times.median == 2 and found["a", "forward"].why is None
    assert found["a", "d_lhs"].times is None and found["a", "d_lhs"].why.startswith("wrong")
    assert found["a", "d_rhs"].why == "failed: no"


def test_torch_that_is_not_there_or_dies(monkeypatch):
    decode = problems.PROBLEMS["decode-128"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = torch_peer.outside([decode], ("forward", "step"))
    assert {key: one.why for key, one in found.items()} == {("decode-128", "forward"): "is not installed"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    died = subprocess.CompletedProcess((), 139, stdout="", stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: died)
    assert torch_peer.outside([decode], ("d_rhs",))["decode-128", "d_rhs"].why == "failed: exit code 139"


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


# ---------------------------------------------------------------------------------------------------------------------
# The TPU compiler's schedules. Nothing is compiled here


SCHEDULES = """{"schema": 1, "date": "2026-01-02", "command": "python -m benchmarks.tpu", "records": [
 {"peer": "ours", "case": {"name": "qwen3", "form": "rows", "generation": "v6e"}, "seconds": 3.2e-4,
  "versions": {"jax": "0.10.2", "libtpu": "0.0.42.1", "trencadis": "0.1"}},
 {"peer": "megablox", "case": {"name": "qwen3", "form": "rows", "generation": "v6e"}, "tiling": [128, 2048, 768],
  "seconds": 4.5e-4, "versions": {"jax": "0.10.2", "libtpu": "0.0.42.1"}},
 {"peer": "megablox", "case": {"name": "qwen3", "form": "rows", "generation": "v6e"}, "tiling": [256, 2048, 768],
  "seconds": 4e-4, "versions": {"jax": "0.10.2", "libtpu": "0.0.42.1"}},
 {"peer": "tokamax v2", "case": {"name": "qwen3", "form": "rows", "generation": "v6e"}, "seconds": 6.4e-4,
  "versions": {"jax": "0.12.0", "libtpu": "0.0.50.1", "tokamax": "0.0.17"}},
 {"peer": "tokamax v2", "case": {"name": "qwen3", "form": "contraction", "generation": "v5e"}, "why": "too large"},
 {"peer": "ours", "case": {"name": "mixtral", "form": "rows", "generation": "v5e", "dtype": "int8"}, "seconds": 3e-3,
  "versions": {"jax": "0.10.2", "libtpu": "0.0.42.1", "trencadis": "0.1"}}
]}"""

TABLE = """\
| problem | form | chip | roofline | ours | megablox | tokamax v2 | ours / best peer |
| --- | --- | --- | --: | --: | --: | --: | --: |
| qwen3 | rows | v6e | 302 | 320 | 400 | 640 | 0.80 |
| qwen3 | contraction | v5e | 604 | - | - | fails | - |
| mixtral | rows, int8 | v5e | 2442 | 3000 | - | - | - |

2026-01-02. jax 0.10.2, libtpu 0.0.42.1: ours, megablox; jax 0.12.0, libtpu 0.0.50.1: tokamax v2 0.0.17."""


def test_the_table_of_schedules(tmp_path):
    made = tpu_table.Schedules.from_json(SCHEDULES)
    assert tpu_table.markdown(made) == TABLE
    assert tpu_table.Schedules.from_json(made.to_json()) == made
    page = tmp_path / "page.md"
    page.write_text(f"before\n{tpu_table.BEGIN}\nold\n{tpu_table.END}\nafter\n")
    for _ in range(2):  # in place, and again
        assert tpu_table.renew(page, TABLE)
        assert page.read_text() == f"before\n{tpu_table.BEGIN}\n\n{TABLE}\n\n{tpu_table.END}\nafter\n"
    page.write_text("no marks")
    assert not tpu_table.renew(page, TABLE) and page.read_text() == "no marks"
    with pytest.raises(ValueError, match="schema: None"):
        tpu_table.Schedules.from_json("{}")


def test_the_cases_of_schedules():
    cases = tpu_table.cases()
    assert len(cases) == len(set(cases)) == 3 * 4 * 3 + 2
    for case in cases:
        first, second, sizes = tpu_peers.operands(case)
        p = case.problem
        read = first.size * first.dtype.itemsize + second.size * second.dtype.itemsize
        written = {"rows": p.m * p.n, "d_lhs": p.m * p.k, "contraction": p.g * p.k * p.n}[case.form]
        assert case.bytes == read + written * tpu_peers.OUT[case.dtype].dtype.itemsize and sizes.sum() == p.m
        takers = [peer.name for peer in tpu_peers.PEERS.values() if peer.takes(case)]
        assert takers[0] == "ours" and (len(takers) > 1) == (case.form != "d_lhs" and case.dtype == "bf16")


def test_tilings_of_schedules():
    peers = tpu_peers.PEERS
    for case in (c for c in tpu_table.cases() if peers["megablox"].takes(c)):
        p = case.problem
        tried = {name: peers[name].tilings(case) for name in ("ours", "megablox", "megablox 128³", "MaxText v2")}
        assert tried["ours"] == tried["megablox 128³"] == (None,) and tried["MaxText v2"][0] is None
        assert len(tried["megablox"]) == 1
        for tm, tk, tn in filter(None, (*tried["megablox"], *tried["MaxText v2"])):
            assert tm % 128 == 0 and p.k % tk == 0 and p.n % tn == 0


def test_what_is_made_anew_replaces_what_was():
    case = tpu_table.cases()[0]

    def record(peer, version, **more):
        return tpu_table.Record(peer=peer, case=case, versions={"jax": version}, **more)

    old = [record("ours", "1"), record("megablox", "1"), record("megablox", "2")]
    assert tpu.kept(old, []) == old
    assert tpu.kept(old, [record("ours", "2", why="fails")]) == old[1:]
    assert tpu.kept(old, [record("megablox", "2", tiling=(128, 128, 128))]) == old[:2]


def test_the_table_says_how_two_cores_are_timed():
    case = tpu_table.Case(name="qwen3", form="rows", generation="v5p")
    made = tpu_table.Schedules(date="d", command="c", records=[tpu_table.Record(peer="ours", case=case, seconds=1.0)])
    assert tpu_table.markdown(made).endswith(tpu_table.TWO_CORES)


def test_a_failure_is_told_in_a_line_without_paths():
    assert tpu.reason("foo.RuntimeError: no room\n  in /home/me/x.py") == "foo.RuntimeError: no room in ..."


def test_schedules_are_reused(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tpu, "one", lambda peer, case, *_: tpu_table.Record(peer=peer.name, case=case, why="no"))
    before, out = tmp_path / "before.json", tmp_path / "after.json"
    before.write_text(SCHEDULES)
    words = ["--peers", "ours", "--problems", "qwen3", "--forms", "rows", "--generations", "v6e"]
    assert tpu.main([*words, "--reuse", str(before), "--out", str(out), "--page", str(before)]) == 1  # ours failed
    made = tpu_table.Schedules.from_json(out.read_text())
    assert [(r.peer, r.why) for r in made.records[:2]] == [("ours", "no"), ("megablox", None)]
    assert len(made.records) == 6 and str(tmp_path) not in made.command
    assert "it has no <!--" in capsys.readouterr().err
    files = ["--reuse", str(out), "--reuse", str(before)]
    assert tpu.main(["--generations", "none", *files, "--out", str(tmp_path / "both.json"), "--page", "none"]) == 1
    both = tpu_table.Schedules.from_json((tmp_path / "both.json").read_text())
    assert both.records == made.records  # the first that has a record counts
    with pytest.raises(SystemExit):
        tpu.main(["--peers", "nobody", "--out", "none"])
    assert "nobody not among ours" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# The check of the GPU kernels, of a backend that runs here


def test_the_cases_of_the_check():
    every = gpu_cases.cases()
    assert len({case.name for case in every}) == len(every)
    for case in every:
        sizes = gpu_cases.group_sizes(case.sizes, case.call.m, case.call.g, case.seed)
        assert sizes.sum() <= case.call.m and case.first + case.call.local <= case.call.g


SMALL = gpu_cases.Call(m=40, k=12, n=10, g=4)


@pytest.mark.parametrize(
    "call",
    [
        SMALL,
        dataclasses.replace(SMALL, form="contraction", out="bf16"),
        dataclasses.replace(SMALL, form="contraction", flipped=True, existing="kept"),
        dataclasses.replace(SMALL, window=2, existing="donated"),
        dataclasses.replace(SMALL, bias=True, activation="gelu"),
        dataclasses.replace(SMALL, flipped=True, grad=True, out="bf16"),
        dataclasses.replace(SMALL, form="contraction", flipped=True, grad=True, out="bf16"),
    ],
    ids=str,
)
@pytest.mark.parametrize("sampled", [False, True])
def test_a_case_is_judged(call, sampled, monkeypatch):
    if sampled:
        monkeypatch.setattr(gpu_check, "LARGE", 0)
        monkeypatch.setattr(gpu_check, "SAMPLE", 3)
    case = gpu_cases.Case(name="case", call=call, sizes="short", seed=1, first=1 if call.window else 0)
    right = gpu_check.compiled(call, "xla")
    row = gpu_check.judge(case, right, "xla")
    assert row.ok, row

    def spoiled(*arguments):  # one element of the last row or matrix
        results = right(*arguments)
        return jax.tree.map(lambda x: x.at[(-1,) * x.ndim].add(1), results)

    assert not gpu_check.judge(case, spoiled, "xla").ok


@pytest.mark.parametrize(
    "form, poison",
    [("rows", "unowned"), ("rows", "groups"), ("rows", "empty"), ("contraction", "unowned"), ("contraction", "groups")],
)
def test_poison_that_spreads_is_seen(form, poison):
    call = dataclasses.replace(SMALL, form=form)
    case = gpu_cases.Case(name="case", call=call, sizes="empties" if poison == "empty" else "short", poison=poison)
    right = gpu_check.compiled(call, "xla")
    assert gpu_check.judge(case, right, "xla").ok
    leaky = gpu_check.judge(case, lambda *a: right(*a).at[1, ..., 2].set(np.nan), "xla")
    assert leaky.error == float("inf") and not leaky.ok


def test_other_bits_are_seen():
    right, calls = gpu_check.compiled(SMALL, "xla"), itertools.count()
    row = gpu_check.judge(
        gpu_cases.Case(name="case", call=SMALL), lambda *a: right(*a) * (1 + 1e-6 * next(calls)), "xla"
    )
    assert "other bits" in row.why


def test_the_check_ends_with_a_verdict(monkeypatch, tmp_path, capsys):
    good = gpu_cases.Case(name="good", call=SMALL)
    large = dataclasses.replace(good, name="large", large=True)
    monkeypatch.setattr(gpu_check, "cases", lambda: [good, large])
    assert gpu_check.main(["--backend", "xla", "--quick", "--json", str(tmp_path / "r.json")]) == 0
    assert "1 of 1 right" in capsys.readouterr().out and '"ok": true' in (tmp_path / "r.json").read_text()
    assert gpu_check.main(["--backend", "nonsense", "--jobs", "1"]) == 1
    assert "FAILED ValueError: backend" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------------------
# Errors of quantized operands: the pages say what was measured, and it is still so


@pytest.fixture(scope="module")
def errors():
    return json.loads((quantized_errors.RESULTS / "2026-11-15.json").read_text())


def test_errors_on_the_pages(errors):
    pages = {name: (ROOT / f"docs/{name}.md").read_text() for name in ("quantized-numerics", "quantization", "serving")}
    assert quantized_errors.table(errors) in pages["quantized-numerics"]
    rows = {f"`{row['format']}`, {row['scales']}": row for row in errors["rows"]}
    lines = [line.strip(" |").split(" | ") for line in (pages["quantization"] + pages["serving"]).splitlines()]
    quoted = [(rows[line[0]], line) for line in lines if line[0] in rows]
    assert len(quoted) == 11
    for row, line in quoted:
        assert f"{row['bits']:.2f}" in line and quantized_errors.span(errors, row, "weights") in line
    for row, line in quoted[:4]:  # quantization.md
        assert quantized_errors.span(errors, row, "both") in line


def test_the_picture_of_errors_is_up_to_date(errors):
    assert (ROOT / quantized_picture.PICTURE).read_text(encoding="utf-8") == quantized_picture.draw(errors)


def test_errors_are_those_that_were_measured(errors):
    name, scales, data = "int8", "row x column", "outlier channels"
    row = next(row for row in errors["rows"] if (row["format"], row["scales"]) == (name, scales))
    found = quantized_errors.errors(name, scales, *quantized_errors.operands(data))
    for which in ("both", "weights"):
        assert found[which] == pytest.approx(row[data][which], rel=1e-3)
    assert max(each[data]["multiplying"] for each in errors["rows"] for data in errors["data"]) < 1e-6


def test_errors_have_every_format(errors):
    assert [(row["format"], row["scales"]) for row in errors["rows"]] == list(quantized_errors.cases())
