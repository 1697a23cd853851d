"""Compile times need processes of their own; here one function is compiled in this one."""

import pytest

from benchmarks import __main__ as command_line
from benchmarks import processes
from benchmarks.report import Results


def test_stacks_beside_lax(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(processes, "run", lambda job, silence_s: job.values())
    words = ["compile", "--problems", "E", "--layers", "1", "--peers", "ragged_dot", "--json", str(tmp_path / "x.json")]
    assert command_line.main(words) == 0
    ours, lax = Results.read(tmp_path / "x.json").records
    assert [r.contender for r in (ours, lax)] == ["ours", "ragged_dot"] and ours.which == "stack of 1"
    assert 0 < ours.details["lowering"] < ours.seconds and ours.details["module bytes"] > 1000
    assert "s lowering" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command_line.main([*words[:5], "--peers", "numpy"])  # no stack is made of it


def test_a_child_that_fails_is_a_record(monkeypatch, tmp_path):
    def fails(job, silence_s):
        raise processes.ChildFailed("exit code 1")
        yield

    monkeypatch.setattr(processes, "run", fails)
    words = ["compile", "--problems", "E", "--passes", "forward", "--json", str(tmp_path / "x.json")]
    assert command_line.main(words) == 1
    (record,) = Results.read(tmp_path / "x.json").records
    assert record.why == "failed: exit code 1" and record.which == "forward"
