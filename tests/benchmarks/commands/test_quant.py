"""The times of quantized operands: what is measured on which device, on a tiny problem."""

import pytest

from benchmarks import __main__ as command_line
from benchmarks import formats, problems, quant_errors, timing
from benchmarks.commands import quant
from benchmarks.report import Record, Results
from benchmarks.timing import Stats

from ..fakes import TINY


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setitem(problems.PROBLEMS, "tiny", TINY)


def test_formats_take_turns_on_a_cpu(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(timing, "race", lambda calls, clock, rounds: {name: Stats(median=1.0) for name in calls})
    words = ["quant", "--problems", "tiny", "--formats", "bf16,w-int8", "--json", str(tmp_path / "q.json")]
    assert command_line.main(words) == 0
    made = Results.read(tmp_path / "q.json")
    assert [(r.dtype, r.seconds) for r in made.records] == [("bf16", 1.0), ("w-int8", 1.0)]
    assert all(r.error <= r.limit for r in made.records)
    assert "milliseconds" in capsys.readouterr().out


def test_cases_on_a_gpu(monkeypatch, capsys):
    def records(cases, jobs):
        assert jobs == 3
        return (Record(problem=p, which=w, dtype=f, time=Stats(median=1e-3)) for p, w, f in cases)

    monkeypatch.setattr(formats, "records", records)
    words = ["--problems", "zipf-64,decode-128", "--formats", "e4m3,w-int4", "--jobs", "3", "--json", "none"]
    assert command_line.main(["quant", "--device", "gpu", *words]) == 0
    printed = capsys.readouterr().out
    assert printed.count("w-int4 ours") == 2 and printed.count("e4m3 ours") == 6  # weights alone: forward


def test_schedules_of_formats(monkeypatch, capsys):
    monkeypatch.setattr(quant, "scheduled", lambda record, build, clock, versions: _timed(record, clock.generation))
    words = ["quant", "--device", "tpu", "--generations", "v5e,v6e", "--formats", "bf16,w-int8", "--json", "none"]
    assert command_line.main(words) == 0
    header, *rows = [
        line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(("problem", "dsv3"))
    ]
    assert header == ["problem", "dtype", "pass", "v5e", "v6e"]
    assert [row[:3] for row in rows] == [
        ["dsv3-tpu", "bf16", "forward"], ["dsv3-tpu", "w-int8", "forward"], ["dsv3-tpu", "bf16", "d_lhs"],
        ["dsv3-tpu", "bf16", "d_rhs"], ["dsv3-decode-tpu", "bf16", "forward"], ["dsv3-decode-tpu", "w-int8", "forward"],
    ]  # fmt: skip
    assert all(row[3:] == ["5", "6"] for row in rows)


def _timed(record, generation):
    assert record.device == generation
    time = Stats(median=int(generation[1]) * 1e-6)
    return Record(problem=record.problem, dtype=record.dtype, which=record.which, device=generation, time=time)


def test_errors_are_written(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(quant_errors, "layers", dict)
    assert command_line.main(["quant", "--errors", "gradients", "--json", str(tmp_path / "e.json")]) == 0
    assert Results.read(tmp_path / "e.json").command == "quant"
