"""Quantized operands by the names of their formats, on tiny problems."""

import dataclasses

import jax.numpy as jnp
import pytest

from benchmarks import formats, oracle, problems, processes
from benchmarks.peers import JaxCall

from .fakes import TINY


@pytest.mark.parametrize(
    "which, format, k_last",
    [
        ("forward", "w-int8", False),
        ("forward", "e4m3", True),
        ("d_lhs", "bf16", True),
        ("d_rhs", "int8", True),
        ("forward", "e4m3-128-kn", True),
        ("forward", "f16-w-int4-128", True),
    ],
)
def test_calls_are_right(which, format, k_last):
    call, right = formats.prepared(TINY, which, format, k_last=k_last)()
    assert oracle.error(call(), right) < 3 * oracle.limit(jnp.bfloat16)


def test_which_passes_a_format_has():
    assert all(formats.has_pass(format, "forward") for format in formats.FORMATS)
    assert {format for format in formats.FORMATS if formats.has_pass(format, "d_rhs")} == {"bf16", *formats.BOTH}
    assert {*formats.GPU, *formats.CPU, *formats.TPU, *formats.MORE} == set(formats.FORMATS)


def test_a_record_of_a_format(monkeypatch):
    monkeypatch.setitem(problems.PROBLEMS, "tiny", TINY)
    monkeypatch.setattr(formats, "timed", lambda record, call: dataclasses.replace(record, why=type(call).__name__))
    good, bad = formats.records([("tiny", "forward", "w-int8"), ("tiny", "forward", "nonsense")], 0)
    assert good.dtype == "w-int8" and good.error < good.limit and good.why == "JaxCall"
    assert bad.why == "failed: KeyError: 'nonsense'"
    monkeypatch.setattr(processes, "each", lambda function, cases, child: iter([(cases[0], None, "no answer")]))
    (hung,) = formats.records([("tiny", "forward", "w-int8")], 1)
    assert hung.why == "no answer"


def test_wrong_results_are_not_timed():
    record = formats.Record(problem="p", dtype="e4m3", which="forward", error=0.5, limit=9e-3)
    assert formats.timed(record, JaxCall(len, ())).why == "wrong: relative error 5.0e-01"


def test_shapes_for_the_tpu_compiler():
    _, (x, w, sizes) = formats.scheduled(problems.TPU_DECODE, "forward", "e4m3")
    assert x.values.shape == (256, 7168) and x.scale.shape == (256, 1) and str(x.values.dtype) == "float8_e4m3fn"
    assert w.values.shape == (32, 7168, 2048) and w.scale.shape == (32, 1, 2048) and sizes.sum() == 256
    _, (x, y, _) = formats.scheduled(problems.TPU_DECODE, "d_rhs", "int8")
    assert (x.scale.shape, y.scale.shape) == ((1, 7168), (1, 2048))
    _, (x, w, _) = formats.scheduled(problems.TPU_DECODE, "forward", "w-int8")
    assert str(x.dtype) == "bfloat16" and w.format == "int8"
