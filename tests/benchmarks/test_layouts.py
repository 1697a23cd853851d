"""Layouts of the GPU kernels need a GPU: here are the cases, their child and the table."""

import argparse

import pytest

from benchmarks import kernels, layouts, problems, processes
from benchmarks.report import Results

DECODE = problems.PROBLEMS["decode-128"]


def asked(tmp_path, **more):
    fields = {"layouts": ["", "stages=3"], "format": "bf16", "backend": "gpu", "words": ["gpu"]}
    return argparse.Namespace(**fields | {"json": str(tmp_path / "x.json")} | more)


def test_a_layout_that_hangs_is_a_record(monkeypatch, tmp_path, capsys):
    def each(function, cases, silence_s):
        assert cases[0] == ("decode-128", "forward", "dense", "bf16", "") and len(cases) == 3
        good = {"time": {"median": 1e-4}, "details": {"layout": "Layout(...)", "apart": 0.0}}
        for case in cases[:2]:
            yield case, layouts._record(case).to_json() | good, ""
        yield cases[2], None, "no answer within 60 s"

    monkeypatch.setattr(processes, "each", each)
    assert layouts.main(asked(tmp_path), [DECODE], ["forward"]) == 0
    made = Results.read(tmp_path / "x.json")
    assert [r.contender for r in made.records] == ["dense", "planned", "stages=3"]
    assert "no answer" in made.records[2].why and "0.1000 ms" in capsys.readouterr().out
    with pytest.raises(problems.UnknownName, match="format: nonsense not among bf16"):
        layouts.main(asked(tmp_path, format="nonsense"), [DECODE], ["forward"])


def test_without_a_hopper_gpu_a_layout_has_a_reason():
    (found,) = layouts.measure([("decode-128", "forward", "", "bf16", "gpu")])
    assert "want a GPU that has a kernel; got cpu" in found["why"]


@pytest.mark.parametrize("format", kernels.FORMATS)
def test_problems_of_kernels(format):
    rows = kernels.gpu_problem(DECODE, "forward", format)
    assert (rows.m, rows.k, rows.n) == (512, 2048, 1536) and rows.epilogue.by_column == (format != "bf16")
    assert kernels.gpu_problem(DECODE, "d_lhs", format).k == 1536
