"""Layers that are right are timed; those that are wrong or fail say so, and the others go on."""

import concurrent.futures
import dataclasses

import jax
import numpy as np
import pytest

from benchmarks import oracle
from benchmarks.moe import cpu, gpu, parts
from benchmarks.timing import CuptiClock, HostClock, Stats

from .conftest import NAMES, TINY


@pytest.mark.parametrize("which", TINY.passes)
@pytest.mark.parametrize("name", NAMES)
def test_layers_are_right(prepared, operands, which, name):
    call, record = prepared.layer(operands, which, name)
    assert call is not None and not record.why and record.error < 1e-5 < record.limit
    assert (record.problem, record.dtype, record.which, record.contender) == ("tiny", "f32", which, name)


def test_a_function_is_compiled_once(prepared, operands, caplog):
    call, _ = prepared.layer(operands, "forward", "ours")
    with jax.log_compiles():
        call()
    assert not caplog.records


@pytest.fixture
def changed(prepared):
    """The prepared calls, which a test may change."""
    other = object.__new__(type(prepared))
    other.__dict__ |= {**prepared.__dict__, "layers": dict(prepared.layers), "compiled": dict(prepared.compiled)}
    return other


def test_wrong_layers_are_not_timed(changed, operands):
    fn, args = changed.layers["step", "ours"]

    def off(*given):
        out, experts, gradients = fn(*given)
        return out, experts, gradients._replace(router=1.01 * gradients.router)

    changed.layers["step", "ours"] = (off, args)
    call, record = changed.layer(operands, "step", "ours")
    assert call is None and record.why == "wrong: relative error 1.0e-02"
    changed.layers["step", "ours"] = (lambda *given: (fn(*given)[0] * np.nan, *fn(*given)[1:]), args)
    assert changed.layer(operands, "step", "ours")[1].why == "wrong: relative error inf"


def failed_future():
    future = concurrent.futures.Future()
    future.set_exception(NotImplementedError("no such kernel"))
    return future


def test_what_does_not_compile_does_not_end_the_run(changed, operands):
    changed.compiled |= {("forward", "ours"): failed_future(), ("products", "down"): failed_future()}
    changed.compiled |= {("others", "sort"): failed_future()}
    found = {(r.which, r.contender): r for r in gpu.timed(changed, operands, ("ours", "composed"))}
    bad = {key: record.why for key, record in found.items() if record.why}
    assert set(bad) == {("forward", "ours"), ("forward", "products"), ("step", "products"), ("sort", "ours")}
    assert set(bad.values()) == {"failed: NotImplementedError: no such kernel"}
    assert all(found[key].seconds for key in found if key not in bad)


def test_an_overloaded_expert_is_not_compared(prepared, operands, monkeypatch):
    monkeypatch.setattr("benchmarks.moe.exact.room", lambda shape: 1)
    assert "want at most 1 tokens" in prepared.layer(operands, "forward", "ours")[1].why


def test_bursts_of_everything(prepared, operands, monkeypatch):
    clock = HostClock("fake", iter(range(10**6)).__next__)
    monkeypatch.setattr(gpu, "device_clock", lambda platform: clock)
    found = {(r.which, r.contender): r for r in gpu.timed(prepared, operands, ("ours", "composed"))}
    contenders = ("ours", "composed", "products", "products in sequence", "dense in sequence")
    layers = [(which, name) for which in TINY.passes for name in contenders]
    rows = [(name, "ours") for name in ("logits", "route", "sort", "gather", "gather_sum", "copy")]
    assert set(found) == {*layers, *rows} and not any(r.why for r in found.values())
    assert found["forward", "products"].seconds == 2 and found["step", "products"].seconds == 6
    assert found["copy", "ours"].details["bytes"] == 2 * TINY.m * TINY.d * 4


def test_dense_products_are_those_of_one_expert(operands):
    sizes = np.zeros(TINY.e, np.int32)
    sizes[0] = TINY.m
    x = operands._replace(permutation=operands.permutation._replace(sizes=sizes))
    found, wanted = (part.fn(*part.args(x)) for part in (parts.dense(TINY, "step"), parts.sequence(TINY, "step")))
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want[0] if want.ndim == 3 else want, rtol=1e-4, atol=1e-4)


def test_the_profiler_keeps_as_many_results_as_fit(prepared, monkeypatch):
    monkeypatch.setattr(gpu, "device_clock", lambda platform: CuptiClock())
    assert [gpu._clock(size).kept for size in (1, 6 << 30, 99 << 30)] == [10, 5, 1]
    assert prepared.bytes_of(*prepared.layers["forward", "ours"]) == 4 * TINY.t * (TINY.d + TINY.k)


def test_turns_on_a_cpu(prepared, monkeypatch):
    monkeypatch.setattr(cpu, "Prepared", lambda *args: prepared)
    saw = []

    def race(calls, clock, rounds):
        saw.append(set(calls))
        return {name: Stats(median=0.5, samples=rounds) for name in calls}

    monkeypatch.setattr(cpu, "race", race)
    found = list(cpu.records(TINY, ("ragged_dot",), None, rounds=3))
    assert saw[0] == {"ours", "ragged_dot", "gate_up", "down"} < saw[1] and len(saw[1]) == 8
    assert [(r.which, r.contender, r.seconds) for r in found] == [
        ("forward", "ours", 0.5), ("forward", "ragged_dot", 0.5), ("forward", "products", 1.0),
        ("step", "ours", 0.5), ("step", "ragged_dot", 0.5), ("step", "products", 3.0),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["gate_up", "down", "d_h", "d_down", "d_gate_up", "d_rows"])
def test_products_are_those_of_the_layer(prepared, operands, name):
    x, sizes = operands, np.asarray(operands.permutation.sizes)
    up, down = x.joined.gate_up, x.joined.down
    right = {
        "gate_up": lambda: oracle.rows(x.rows, up, sizes),
        "down": lambda: oracle.rows(x.h, down, sizes),
        "d_h": lambda: oracle.rows(x.rows, down, sizes, transpose_rhs=True),
        "d_down": lambda: oracle.contraction(x.h, x.rows, sizes),
        "d_gate_up": lambda: oracle.contraction(x.rows, x.z, sizes),
        "d_rows": lambda: oracle.rows(x.z, up, sizes, transpose_rhs=True),
    }[name]
    call = prepared.call(x, ("products", name), prepared.products[name])
    assert oracle.error(call(), right()) < 1e-6


def test_the_sum_of_the_products():
    assert parts.total({"gate_up": 3.0, "down": 1.0, "d_h": 2.0}) == 6.0
    assert parts.total({"gate_up": 3.0, "down": 1.0, "gate": 1.0, "up": 1.0}) == 3.0
    assert parts.total({"gate_up": 1.5, "down": 1.0, "gate": 1.0, "up": 1.0}) == 2.5


def test_a_decode_step_has_both_forms_of_gate_and_up():
    decode = dataclasses.replace(TINY, weights="mxfp4", biases=False)
    assert set(parts.products(decode, "forward")) == {"gate_up", "down", "gate", "up"}
    assert decode.passes == ("forward",) and decode.label == "w-mxfp4"
