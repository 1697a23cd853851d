import pathlib
import platform

import pytest

from benchmarks import report
from benchmarks.report import Record, Results
from benchmarks.timing import Stats

ROOT = pathlib.Path(__file__).parents[2]
FILES = sorted(report.RESULTS.rglob("*.json"))


def test_results_survive_json(made):
    again = Results.from_json(made.to_json())
    assert again == made and again.to_json() == made.to_json()
    with pytest.raises(ValueError, match="schema: want results of schema 2; got"):
        Results.from_json("{}")


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_committed_results_are_in_the_one_format(path):
    results = Results.read(path)
    assert results.records and Results.from_json(results.to_json()) == results
    assert {"date", "platform", "versions"} - set(results.environment) <= {"versions"}
    assert all(record.time or record.error is not None or record.why for record in results.records)
    timed = [record for record in results.records if record.time and results.command != "ragged"]
    assert {record.problem for record in timed} <= set(results.shapes)


def test_figures_of_committed_results_are_those_that_were_measured():
    """Some of them, as they were printed on the day: no change of format may change a number."""

    def seconds(name, *key):
        return {(*r.cell[:3], r.contender): r.seconds for r in Results.read(report.RESULTS / name).records}[key]

    assert seconds("nvidia-h200/2026-11-15.json", "mixtral-8x7b", "bf16", "forward", "ours") == 0.0024332209999999997
    quantized = seconds("nvidia-h200/2026-11-16-quantized.json", "mixtral-8x7b", "e4m3", "forward", "ours")
    assert quantized * 1e3 == 1.3081245000000001
    ragged = seconds("cpu-amd-epyc-1c/2026-11-15-ragged-jax-0.10.2.json", "ragged-32", "f32", "d_rhs", "traced")
    assert ragged == 0.04333725900000118


def test_records_without_a_time():
    record = Record(problem="p", dtype="f32", which="forward", error=float("inf"), why="wrong", details={"a": [1]})
    assert record.to_json() == {
        "problem": "p", "dtype": "f32", "pass": "forward", "contender": "ours", "why": "wrong", "details": {"a": [1]},
    }  # fmt: skip
    assert Record.from_json(record.to_json()).why == "wrong" and record.seconds is None


def test_cells_and_ratios():
    def record(contender, seconds, **more):
        time = Stats(median=seconds) if seconds else None
        return Record(problem="p", dtype="f32", which="forward", contender=contender, time=time, **more)

    slow, fast = record("a", 4.0, details={"tiling": 1}), record("a", 2.0)
    (cell,) = report.cells([record("ours", 1.0), slow, fast, record("a", None), record("b", None), record("c", 0.5)])
    assert cell["a"] is fast and cell["b"].time is None
    assert report.ratios(cell) == {"a": 0.5, "c": 2.0} and report.ratios(cell, "b") == {}


def test_a_run_keeps_what_it_has_measured_so_far(made, tmp_path):
    """One file, whole after each problem, beside those of other runs."""
    (tmp_path / "day.json").write_text("an older run")
    keep = report.Writer(made, str(tmp_path / "day.json"))
    for _ in range(2):
        keep()
        assert Results.read(keep.path) == made
    assert sorted(path.name for path in tmp_path.iterdir()) == ["day-2.json", "day.json"]
    nowhere = report.Writer(made, "none")
    nowhere.close()
    assert nowhere.path is None


def test_results_are_never_overwritten(tmp_path):
    first = report.free_path(tmp_path / "x" / "day.json")
    first.write_text("taken")
    assert (first.name, report.free_path(first).name) == ("day.json", "day-2.json")


def test_results_say_where_and_not_who(made):
    text = made.to_json()
    assert {"cpu", "clock", "versions", "command", "load_before"} <= set(made.environment)
    assert str(ROOT) not in text and platform.node() not in made.environment.values()
    assert report.scrubbed(["--pin", "1", "--json", "/a/b", "--memory"]) == ["--pin", "1", "--json ...", "--memory"]
    assert report.scrubbed(["--json=/a/b"]) == ["--json=..."]
    assert report.scrubbed(["--python", "/a", "--python", "/b"]) == ["--python ...", "--python ..."]
    assert report.device_slug({"platform": "gpu", "device": "NVIDIA H200"}) == "nvidia-h200"
