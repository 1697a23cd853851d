"""When native kernels for CPUs are taken, and what is said where they are not; none of this needs the kernels."""

import dataclasses
import importlib
import pathlib
import shutil

import jax.numpy as jnp
import pytest

import trencadis as tr
from trencadis.backends import cpu
from trencadis.core.arguments import problem_of
from trencadis.core.decision import Plan, Refusal, missing
from trencadis.core.target import Target
from trencadis.core.tiling import Overrides

pytestmark = pytest.mark.core

CPU, ASKED = Target(platform="cpu"), problem_of((64, 16), (4, 16, 8))


@pytest.fixture
def installed(monkeypatch):
    """As if the package were there."""
    monkeypatch.setattr(cpu, "missing", lambda *_: None)
    monkeypatch.setattr(cpu, "layout_here", lambda: cpu.Layout(panel=12, instructions="AVX-512"))


def answer(problem=ASKED, target=CPU):
    return cpu.plan(problem, target, Overrides())


def test_why_says_how_to_install_them(monkeypatch):
    monkeypatch.setattr(cpu, "missing", lambda _, __, *given: missing("cpu", "no_such_module", *given))
    x, w, sizes = jnp.ones((64, 16)), jnp.ones((4, 16, 8)), jnp.array([16] * 4)
    said = tr.why(x, w, sizes)
    assert said.passes[0].plan.backend == "xla"
    assert (
        "cpu        no   trencadis-cpu, which has faster products than XLA, does not import: "
        "No module named 'no_such_module'; pip install ./native, in a checkout of trencadis"
    ) in str(said)


def test_a_package_without_its_library_says_so(tmp_path, monkeypatch):
    """As where Python starts in `native/` of a checkout, whose package has been built elsewhere."""
    source = pathlib.Path(__file__).parents[3] / "native/trencadis_cpu/__init__.py"
    shutil.copy(source, tmp_path / "unbuilt_cpu.py")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"^its library is not built$"):
        importlib.import_module("unbuilt_cpu")


@pytest.mark.parametrize("change, reason", [
    ({"platform": "cuda"}, "the cpu backend runs on CPUs"),
    ({"partitioned": True}, "cannot partition"),
    ({"exported": True}, "exported"),
])  # fmt: skip
def test_programs_that_run_elsewhere_do_not_have_them(installed, change, reason):
    refusal = answer(target=dataclasses.replace(CPU, **change))
    assert isinstance(refusal, Refusal) and reason in refusal.reason


@pytest.mark.parametrize("change", [
    {"lhs": jnp.dtype("float16")}, {"out": jnp.dtype("float64")}, {"rhs": jnp.dtype("int8")},
])  # fmt: skip
def test_dtypes_that_xla_multiplies(installed, change):
    assert isinstance(answer(ASKED.replace(**change)), Refusal)


def test_a_machine_without_vectors_is_left_to_xla(installed, monkeypatch):
    assert isinstance(answer(), Plan)
    monkeypatch.setattr(cpu, "layout_here", lambda: cpu.Layout(panel=4, instructions=""))
    assert isinstance(answer(), Refusal)


@pytest.mark.parametrize("size", [0, 1, 12, 13, 30])
def test_panels_cover_a_group(size):
    tiles = cpu.row_tiles(ASKED, cpu.Layout(panel=12, instructions=""), 3, 3 + size)
    assert [row for tile in tiles for row in tile.owned] == list(range(3, 3 + size))
    assert len(tiles) == -(-size // 12)
