import pytest

from benchmarks import __main__ as command_line
from benchmarks import problems
from benchmarks.commands import run
from benchmarks.report import Record, Results

from ..fakes import TINY


def test_the_command(monkeypatch, tmp_path):
    monkeypatch.setitem(problems.PROBLEMS, "tiny", TINY)
    words = ["--problems", "tiny", "--dtypes", "f32", "--passes", "forward", "--peers", "numpy", "--memory"]
    assert command_line.main(["run", *words, "--rounds", "0", "--json", str(tmp_path / "r.json")]) == 0
    again = Results.read(tmp_path / "r.json")
    assert {r.problem for r in again.records} == set(again.shapes) == {"tiny"}
    assert again.records[0].memory["result"] == 20 * 6 * 4 and again.records[0].error < 1e-5
    assert again.environment["command"].startswith("python -m benchmarks run --problems tiny")


def test_scaling_is_measured_on_its_own_problems(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(problems, "SCALING_G", problems.SCALING_G[:1])
    monkeypatch.setattr(problems, "SCALING_M", ())
    saw = []
    monkeypatch.setattr(run.measure, "problem_records", lambda *args: saw.append(args) or [])
    assert command_line.main(["run", "--scaling", "--json", "none"]) == 0
    ((problem, dtypes, passes, contenders, _),) = saw
    assert (problem.name, dtypes, passes) == ("g1", ["f32", "bf16"], list(problems.PASSES))
    assert [peer.name for peer in contenders] == ["ours", "numpy", "dense"]


def test_ours_that_is_wrong_fails_the_run(capsys):
    good = Record(problem="p", dtype="f32", which="forward")
    peer = Record(problem="p", dtype="f32", which="forward", contender="numpy", why="wrong")
    assert run.failed([good, peer]) == 0
    assert run.failed([Record(problem="p", dtype="f32", which="forward", why="wrong: x")]) == 1
    assert "OURS wrong: x (p f32 forward" in capsys.readouterr().err


def test_names_of_passes_and_dtypes():
    assert run.known_passes("step,forward", ()) == ["step", "forward"]
    with pytest.raises(problems.UnknownName, match="passes: backward not among forward"):
        run.known_passes("backward", ())
    assert run.default_dtypes("cpu") == ("f32", "bf16") and run.default_dtypes("gpu") == ("bf16",)
