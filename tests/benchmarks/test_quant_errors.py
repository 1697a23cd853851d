"""The errors of quantized operands: the pages say what was measured, and it is still so."""

import pathlib

import pytest

from benchmarks import quant_errors
from benchmarks.report import RESULTS, Results

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def errors():
    return Results.read(RESULTS / "quantized-errors" / "2026-11-15.json")


def test_errors_on_the_pages(errors):
    pages = {name: (ROOT / f"docs/{name}.md").read_text() for name in ("quantized-numerics", "quantization", "serving")}
    assert quant_errors.table(errors) in pages["quantized-numerics"]
    rows = {f"`{row[0]}`, {row[1]}": row for row in quant_errors.rows(errors)}
    lines = [line.strip(" |").split(" | ") for line in (pages["quantization"] + pages["serving"]).splitlines()]
    quoted = [(rows[line[0]], line) for line in lines if line[0] in rows]
    assert len(quoted) == 11
    for row, line in quoted:
        assert f"{row[2]:.2f}" in line and quant_errors.span(row, "weights") in line
    for row, line in quoted[:4]:  # quantization.md
        assert quant_errors.span(row, "both") in line


def test_errors_are_those_that_were_measured(errors):
    name, scales, data = "int8", "row x column", "outlier channels"
    row = next(row for row in quant_errors.rows(errors) if row[:2] == (name, scales))
    found = quant_errors.errors(name, scales, *quant_errors.operands(data))
    for which in ("both", "weights"):
        assert found[which] == pytest.approx(row[3][data][which], rel=1e-3)
    assert max(r.error for r in errors.records if r.contender == "multiplying") < 1e-6


def test_errors_have_every_format(errors):
    assert [row[:2] for row in quant_errors.rows(errors)] == list(quant_errors.cases())


def test_errors_as_results(monkeypatch):
    monkeypatch.setattr(quant_errors, "cases", lambda: [("bfloat16", "none")])
    monkeypatch.setattr(quant_errors, "DATA", {"normal": "rows and weights are normal"})
    monkeypatch.setattr(quant_errors, "loudness", lambda x, w: 1.0)
    made = quant_errors.formats(["quant", "--errors", "formats"])
    assert [r.contender for r in made.records] == ["both", "weights", "multiplying"]
    assert quant_errors.table(made).splitlines()[-1] == "| `bfloat16` | none | 16.00 | 0.24 / 0.17 |"


def test_errors_of_gradients(monkeypatch):
    monkeypatch.setattr(quant_errors, "RECIPES", (("int8", "int8"),))
    made = quant_errors.gradients(["quant", "--errors", "gradients"])
    assert [(r.problem, r.which) for r in made.records[2:4]] == [("normal", "d_rhs"), ("large columns", "forward")]
    (line,) = quant_errors.gradient_table(made).splitlines()
    # as docs/quantization.md has them
    assert [float(word) for word in line.split()[:6]] == pytest.approx(
        [0.011, 0.011, 0.012, 0.045, 0.049, 0.072], abs=6e-4
    )
