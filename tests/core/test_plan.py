"""The chooser obeys, or says every reason why not."""

import numpy as np
import pytest

from trencadis import backends
from trencadis.api.matmul import problem_of
from trencadis.core.plan import plan, refusals
from trencadis.core.target import Target
from trencadis.core.tiling import Pins, Tiling, resolve

pytestmark = pytest.mark.core

PROBLEM = problem_of((16, 4), (2, 4, 8))
CPU = Target(platform="cpu")


@pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm", "tpu", "other"])
def test_some_backend_runs_everywhere(platform):
    assert plan(PROBLEM, Target(platform=platform)).backend == ("tpu" if platform == "tpu" else "xla")
    wide = PROBLEM.replace(lhs=np.dtype("complex64"), out=np.dtype("complex64"))
    assert plan(wide, Target(platform=platform)).backend == "xla"


def test_a_kernel_is_interpreted_as_it_is_on_its_own_target():
    chosen = plan(PROBLEM, CPU, Pins(backend="tpu", interpret=True))
    assert (chosen.backend, chosen.target, chosen.interpret) == ("tpu", Target(platform="tpu"), True)
    said = (
        r"'tpu' cannot run .* on cpu \(tpu: it runs on TPU; the target is cpu; "
        r"gpu: it runs on NVIDIA GPUs; the target is cpu; xla: "
    )
    with pytest.raises(ValueError, match=said):
        plan(PROBLEM, CPU, Pins(backend="tpu"))


def test_a_gpu_kernel_is_interpreted_as_on_the_card_that_it_is_measured_on():
    chosen = plan(PROBLEM, CPU, Pins(backend="gpu", interpret=True))
    want = ("gpu", Target(platform="cuda", kind="NVIDIA H200"), True)
    assert (chosen.backend, chosen.target, chosen.interpret) == want
    with pytest.raises(ValueError, match=r"'gpu' cannot run .* on cpu \(.*gpu: it runs on NVIDIA GPUs"):
        plan(PROBLEM, CPU, Pins(backend="gpu"))


def test_pins_are_obeyed():
    assert plan(PROBLEM, CPU, Pins(backend="reference")).backend == "reference"
    assert plan(PROBLEM, CPU, Pins(interpret=True)).backend == "reference"
    chosen = plan(PROBLEM, CPU, Pins(tilings=resolve((8, 4, 2), 16, 4, 8)))
    assert (chosen.tiling, chosen.backend) == (Tiling(8, 4, 2), "xla")
    assert "as given" in str(chosen)


def test_a_refusal_carries_every_reason(monkeypatch):
    monkeypatch.setattr(backends.reference, "supports", lambda problem, target: "it is Sunday")
    tpu, gpu = "it runs on TPU; the target is cpu", "it runs on NVIDIA GPUs; the target is cpu"
    assert refusals(PROBLEM, CPU) == {"tpu": tpu, "gpu": gpu, "xla": None, "reference": "it is Sunday"}
    said = rf"cannot run rows .* on cpu \(tpu: {tpu}; gpu: {gpu}; xla: supports it; reference: it is Sunday"
    with pytest.raises(ValueError, match=said):
        plan(PROBLEM, CPU, Pins(backend="reference"))
