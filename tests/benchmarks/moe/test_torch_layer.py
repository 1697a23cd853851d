"""torch is not installed here: what it computes is replaced."""

import contextlib
import sys
import types

import pytest

from benchmarks import torch_peer
from benchmarks.moe import shapes, torch_layer
from benchmarks.report import Record

from .conftest import TINY


@pytest.fixture
def torch(monkeypatch):
    fake = types.SimpleNamespace(cuda=types.SimpleNamespace(empty_cache=lambda: None), no_grad=contextlib.nullcontext)
    monkeypatch.setitem(sys.modules, "torch", fake)
    monkeypatch.setitem(shapes.SHAPES, "tiny", TINY)
    monkeypatch.setattr(torch_layer, "operands", lambda torch, shape: {})
    monkeypatch.setattr(torch_peer, "burst", lambda torch, call: [1.0, 2.0, 3.0])
    return fake


def test_records(torch, monkeypatch):
    monkeypatch.setattr(torch_layer, "passes", lambda *given: {"forward": lambda: 1e-3, "step": lambda: 0.5})
    monkeypatch.setattr(torch_layer, "error", lambda torch, shape, tensors, results: results)
    said, *found = torch_layer.measure("tiny")
    forward, step = map(Record.from_json, found)
    assert said["says"].startswith("tiny: torch compiled in")
    assert forward.seconds == 2 and not forward.why and forward.contender == "torch"
    assert step.seconds is None and step.why == "wrong: relative error 5.0e-01"


def test_a_pass_that_fails(torch, monkeypatch):
    monkeypatch.setattr(torch_layer, "passes", lambda *given: {"forward": lambda: 1 / 0, "step": lambda: 0.0})
    monkeypatch.setattr(torch_layer, "error", lambda torch, shape, tensors, results: results)
    _, forward, step = torch_layer.measure("tiny")
    assert forward["why"].startswith("failed: ZeroDivisionError") and step["time"]["median"] == 2


def test_passes(torch):
    """A step returns the gradients of what was differentiated; the cotangent is not an input of the layer."""
    saw = []
    torch.compile = lambda fn, **how: lambda given: saw.append(sorted(given)) or ("out", "experts")
    torch.autograd = types.SimpleNamespace(grad=lambda out, inputs, ct: (out, inputs, ct))
    found = torch_layer.passes(torch, TINY, {"x": 1, "down": 2, "ct": 3})
    assert found["forward"]() == ("out", "experts")
    assert found["step"]() == ("out", "experts", ("out", [1, 2], 3)) and saw == [["down", "x"]] * 2
