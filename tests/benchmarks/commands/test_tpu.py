"""The command for the TPU compiler's schedules. Nothing is compiled here."""

import pytest

from benchmarks import __main__ as command_line
from benchmarks import processes
from benchmarks.commands import tpu
from benchmarks.report import Record, Results

from ..test_tpu_table import RECORDS


@pytest.fixture(autouse=True)
def _nothing_is_compiled(monkeypatch):
    def one(peer, case, tiling, timeout):
        key = {"problem": case.problem.name, "which": case.which, "device": case.generation, "dtype": case.dtype}
        return Record(contender=peer.name, **key, why="no")

    monkeypatch.setattr(tpu, "one", one)


WORDS = ["tpu", "--peers", "ours", "--problems", "qwen3-tpu", "--passes", "forward", "--generations", "v6e"]


def test_schedules_are_reused(tmp_path, capsys):
    before, out = tmp_path / "before.json", tmp_path / "after.json"
    before.write_text(Results(command="tpu", environment={"date": "2026-01-02"}, records=RECORDS).to_json())
    assert command_line.main([*WORDS, "--reuse", str(before), "--json", str(out), "--page", str(before)]) == 1
    made = Results.read(out)
    assert [(r.contender, r.why) for r in made.records[:2]] == [("ours", "no"), ("megablox", "")]
    assert len(made.records) == 6 and str(tmp_path) not in made.environment["command"]
    assert "it has no <!--" in capsys.readouterr().err
    files = ["--reuse", str(out), "--reuse", str(before), "--json", str(tmp_path / "both.json"), "--page", "none"]
    assert command_line.main(["tpu", "--generations", "none", *files]) == 1
    assert Results.read(tmp_path / "both.json").records == made.records  # the first that has a record counts
    with pytest.raises(SystemExit):
        command_line.main(["tpu", "--peers", "nobody", "--json", "none"])
    assert "nobody not among ours" in capsys.readouterr().err


def test_another_interpreter_compiles_the_peers(monkeypatch, capsys):
    def run(job, silence_s, python):
        assert job.function == "benchmarks.commands.tpu:schedules" and python == "other/python"
        assert job.arguments[3] == ["megablox"]  # ours is compiled here
        yield RECORDS[1].to_json()

    monkeypatch.setattr(processes, "run", run)
    words = ["--peers", "ours,megablox", "--python", "other/python", "--generations", "none", "--json", "none"]
    assert command_line.main(["tpu", *words]) == 0
    assert "v6e qwen3-tpu forward bf16 megablox [128, 2048, 768] 450 us" in capsys.readouterr().out


def test_what_is_made_anew_replaces_what_was():
    def record(contender, version, **more):
        key = {"problem": "qwen3-tpu", "dtype": "bf16", "which": "forward", "device": "v6e"}
        return Record(contender=contender, **key, details={"versions": {"jax": version}, **more})

    old = [record("ours", "1"), record("megablox", "1"), record("megablox", "2")]
    assert tpu.kept(old, []) == old
    assert tpu.kept(old, [record("ours", "2")]) == old[1:]
    assert tpu.kept(old, [record("megablox", "2", tiling=[128, 128, 128])]) == old[:2]
