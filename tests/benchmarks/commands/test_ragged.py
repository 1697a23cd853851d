import numpy as np
import pytest

from benchmarks import __main__ as command_line
from benchmarks import problems, timing
from benchmarks.commands import ragged
from benchmarks.report import Results

SMALL = problems.RaggedProblem(name="small", groups=3, least=2, most=5)


@pytest.mark.parametrize("which", problems.PASSES)
def test_contenders_are_right(monkeypatch, which):
    monkeypatch.setattr(ragged, "RAGGED", SMALL)
    found = ragged.race("f32", which, timing.wall_clock(), rounds=0)
    assert [r.contender for r in found] == ["numpy", "known", "traced"]
    assert not any(r.why for r in found) and max(r.error for r in found) < 1e-6


@pytest.mark.parametrize("which", problems.PASSES)
def test_the_burst_of_a_gpu_is_checked(which):
    found = ragged.timed(SMALL, which, timing.wall_clock())
    assert not found.why and found.error < found.limit and found.details["TFLOP/s"] > 0


def test_matrices_lie_one_after_the_other():
    first, second = ragged.matrices(np.arange(10), np.array([2, 1]), np.array([3, 4]))
    np.testing.assert_array_equal(first, [[0, 1, 2], [3, 4, 5]])
    np.testing.assert_array_equal(second, [[6, 7, 8, 9]])


def test_the_command(monkeypatch, tmp_path, capsys):
    def race(dtype, which, clock, rounds):
        key = {"problem": "ragged-32", "dtype": dtype, "which": which}
        times = {"numpy": 2.0, "known": 1.0, "traced": 4.0}
        return [ragged.Record(**key, contender=c, time=timing.Stats(median=t)) for c, t in times.items()]

    monkeypatch.setattr(ragged, "race", race)
    assert command_line.main(["ragged", "--json", str(tmp_path / "r.json")]) == 0
    assert len(Results.read(tmp_path / "r.json").records) == 2 * 3 * 3
    printed = capsys.readouterr().out
    assert "32 groups of 64 to 512 in m, k and n; wall time, milliseconds" in printed
    assert "0.500" in printed and "2.000" in printed  # known and traced over numpy
