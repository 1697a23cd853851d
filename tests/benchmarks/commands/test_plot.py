"""Pictures of results: those in the docs are up to date."""

import pathlib
import xml.etree.ElementTree as xml

import pytest

from benchmarks import __main__ as command_line
from benchmarks.commands import plot
from benchmarks.report import RESULTS, Results

IMAGES = pathlib.Path(__file__).parents[3] / "docs" / "img"
PICTURES = {
    "quantized-errors": "quantized-errors/2026-11-15.json",
    "ratios-cpu-amd-epyc-1c": "cpu-amd-epyc-1c/2026-11-15-jax-0.10.2.json",
    "scaling-cpu-amd-epyc-1c": "cpu-amd-epyc-1c/2026-11-15-scaling-jax-0.10.2.json",
    "rates-nvidia-h200": "nvidia-h200/2026-11-15.json",
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_in_the_docs_are_up_to_date(name):
    assert plot.draw(Results.read(RESULTS / PICTURES[name])) == {name: (IMAGES / f"{name}.svg").read_text("utf-8")}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_in_the_style_of_the_library(name):
    document = xml.fromstring((IMAGES / f"{name}.svg").read_text("utf-8"))
    text = xml.tostring(document, encoding="unicode")
    assert document.get("class") == "trencadis" and "prefers-color-scheme: dark" in text
    places = [float(mark.get("cx")) for mark in document.iter("{http://www.w3.org/2000/svg}circle")]
    assert all(0 < x < 1000 for x in places)


@pytest.mark.sweep
def test_a_run_has_its_pictures(made, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    (tmp_path / "r.json").write_text(made.to_json())
    assert command_line.main(["plot", str(tmp_path / "r.json"), "--out", str(tmp_path / "img")]) == 0
    written = sorted((tmp_path / "img").iterdir())
    assert [path.name.split("-")[0] for path in written] == ["ratios", "scaling"]
    assert all(xml.fromstring(path.read_text("utf-8")) is not None for path in written)
    assert str(written[0]) in capsys.readouterr().out


def test_quantized_rates_have_a_name_of_their_own():
    made = Results.read(RESULTS / "nvidia-h200" / "2026-11-16-quantized.json")
    assert list(plot.draw(made)) == ["quantized-rates-nvidia-h200"]
