"""The chooser obeys, or says every reason why not."""

import pytest

from trencadis import backends
from trencadis.api import problem_of
from trencadis.plan import plan, refusals
from trencadis.target import Target
from trencadis.tiling import Pins, Tiling, resolve

pytestmark = pytest.mark.core

PROBLEM = problem_of((16, 4), (2, 4, 8))
CPU = Target(platform="cpu")


@pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm", "tpu", "other"])
def test_some_backend_runs_everywhere(platform):
    assert plan(PROBLEM, Target(platform=platform)).backend == "xla"


def test_pins_are_obeyed():
    assert plan(PROBLEM, CPU, Pins(backend="reference")).backend == "reference"
    assert plan(PROBLEM, CPU, Pins(interpret=True)).backend == "reference"
    chosen = plan(PROBLEM, CPU, Pins(tilings=resolve((8, 4, 2), 16, 4, 8)))
    assert (chosen.tiling, chosen.backend) == (Tiling(8, 4, 2), "xla")
    assert "as given" in str(chosen)


def test_a_refusal_carries_every_reason(monkeypatch):
    monkeypatch.setattr(backends.reference, "supports", lambda problem, target: "it is Sunday")
    assert refusals(PROBLEM, CPU) == {"xla": None, "reference": "it is Sunday"}
    with pytest.raises(
        ValueError, match=r"'reference' cannot run rows .* on cpu \(xla: supports it; reference: it is Sunday"
    ):
        plan(PROBLEM, CPU, Pins(backend="reference"))
