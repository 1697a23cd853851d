"""The check of the kernels, with a backend that runs here."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest

from benchmarks import __main__ as command_line
from benchmarks import cases, oracle, quantized_cases
from benchmarks.commands import check
from benchmarks.report import Results

SMALL = cases.Call(m=40, k=12, n=10, g=4)
compiled = functools.cache(check.compiled)


@pytest.mark.parametrize(
    "call",
    [
        SMALL,
        dataclasses.replace(SMALL, form="contraction", out="bf16"),
        dataclasses.replace(SMALL, form="contraction", flipped=True, existing="kept"),
        dataclasses.replace(SMALL, window=2, existing="donated"),
        dataclasses.replace(SMALL, bias=True, activation="gelu"),
        dataclasses.replace(SMALL, flipped=True, grad=True, out="bf16"),
        dataclasses.replace(SMALL, form="contraction", flipped=True, grad=True, out="bf16"),
    ],
    ids=str,
)
@pytest.mark.parametrize("sampled", [False, True])
def test_a_case_is_judged(call, sampled, monkeypatch):
    if sampled:
        monkeypatch.setattr(oracle, "LARGE", 0)
        monkeypatch.setattr(oracle, "SAMPLE", 3)
    case = cases.Case(name="case", call=call, sizes="short", seed=1, first=1 if call.window else 0)
    right = compiled(call, "xla")
    record = check.judge(case, right, "xla")
    assert not record.why, record

    def spoiled(*arguments):  # one element of the last row or matrix
        results = right(*arguments)
        return jax.tree.map(lambda x: x.at[(-1,) * x.ndim].add(1), results)

    assert check.judge(case, spoiled, "xla").why.startswith("wrong: relative error")


@pytest.mark.parametrize(
    "form, poison",
    [("rows", "unowned"), ("rows", "groups"), ("rows", "empty"), ("contraction", "unowned"), ("contraction", "groups")],
)
def test_poison_that_spreads_is_seen(form, poison):
    call = dataclasses.replace(SMALL, form=form)
    case = cases.Case(name="case", call=call, sizes="empties" if poison == "empty" else "short", poison=poison)
    right = compiled(call, "xla")
    assert not check.judge(case, right, "xla").why
    leaky = check.judge(case, lambda *a: right(*a).at[1, ..., 2].set(np.nan), "xla")
    assert leaky.error == float("inf") and leaky.why


def test_other_bits_are_seen():
    right, calls = compiled(SMALL, "xla"), itertools.count()
    record = check.judge(cases.Case(name="case", call=SMALL), lambda *a: right(*a) * (1 + 1e-6 * next(calls)), "xla")
    assert "other bits" in record.why


def test_the_check_ends_with_a_verdict(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    good = cases.Case(name="good", call=SMALL)
    large = dataclasses.replace(good, name="large", large=True)
    quantized = {"half": quantized_cases.Check(lambda: 5e-4, "bfloat16")}
    monkeypatch.setattr(check, "cases", lambda: [good, large])
    monkeypatch.setattr(quantized_cases, "checks", lambda backend: quantized)
    words = ["check", "--device", "cpu", "--jobs", "0", "--json"]
    assert command_line.main([*words, str(tmp_path / "r.json"), "--quick"]) == 0
    assert "2 of 2 right" in capsys.readouterr().out
    assert [r.problem for r in Results.read(tmp_path / "r.json").records] == ["good", "quantized half"]
    assert command_line.main([*words, "none", "--backend", "nonsense", "--only", "good"]) == 1
    assert "FAILED ValueError: backend" in capsys.readouterr().out
    quantized["half"] = quantized_cases.Check(lambda: 5e-3, "bfloat16")
    assert command_line.main([*words, "none", "--only", "half"]) == 1
    assert "0 of 1 right" in capsys.readouterr().out


def test_processes_share_the_cases_by_what_they_compile(monkeypatch):
    parts = []

    def each(function, names, backend, silence_s, child):
        parts.append(list(names))
        yield from ((name, {"problem": name, "dtype": "", "pass": ""}, "") for name in names)

    other = dataclasses.replace(SMALL, n=11)
    every = [cases.Case(name=name, call=call) for name, call in (("a", SMALL), ("b", other), ("c", SMALL))]
    monkeypatch.setattr(check, "cases", lambda: every)
    monkeypatch.setattr(check.processes, "each", each)
    assert [r.problem for r in check.judge_all(["a", "b", "c", "quantized d"], "xla", 2)] == [
        "a",
        "b",
        "c",
        "quantized d",
    ]
    assert sorted(parts) == [["a", "c", "quantized d"], ["b"]]
