"""torch is not installed here: its child process is replaced, and its tensors by numpy arrays."""

import importlib.util

import numpy as np
import pytest

from benchmarks import problems, processes, torch_peer

from .fakes import TINY

DECODE = problems.PROBLEMS["decode-128"]


def test_torch_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = torch_peer.records([DECODE], ("forward", "step"))
    assert [(r.problem, r.which, r.why) for r in found] == [("decode-128", "forward", "is not installed")]


def test_torch_that_dies(monkeypatch):
    def each(function, cases, silence_s):
        yield cases[0], {"problem": "decode-128", "dtype": "bf16", "pass": "forward", "contender": "torch"}, ""
        yield cases[1], None, "exit code 139"

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(processes, "each", each)
    good, bad = torch_peer.records([DECODE], ("forward", "d_rhs"))
    assert not good.why and good.contender == "torch" and bad.which == "d_rhs" and bad.why == "failed: exit code 139"


def test_wrong_results_have_no_time():
    record = torch_peer._record("a", "forward")
    good, wrong = torch_peer.judged(record, 1e-3, [1, 2, 3]), torch_peer.judged(record, 0.5, [1])
    assert good.seconds == 2 and not good.why
    assert wrong.seconds is None and wrong.why == "wrong: relative error 5.0e-01"


class Fake(np.ndarray):
    """The part of a torch tensor that the check needs."""

    def float(self):
        return self

    cpu = float

    def numpy(self):
        return np.asarray(self)


@pytest.mark.parametrize("which", problems.PASSES)
def test_errors_are_against_the_oracle(which, rng):
    sizes = TINY.group_sizes()
    lhs, rhs, ct = (
        rng.normal(size=s).view(Fake) for s in ((TINY.m, TINY.k), (TINY.g, TINY.k, TINY.n), (TINY.m, TINY.n))
    )
    data = torch_peer.Data(lhs=lhs, rhs=rhs, ct=ct, ends=None, sizes=sizes)
    group = np.repeat(np.arange(TINY.g), sizes)
    if which == "d_rhs":
        right = np.stack([lhs[group == i].T @ ct[group == i] for i in range(TINY.g)])
        right[sizes == 0] = np.nan  # torch may leave them as they are
    else:
        pair = (ct, rhs.swapaxes(1, 2)) if which == "d_lhs" else (lhs, rhs)
        right = np.stack([row @ pair[1][i] for row, i in zip(pair[0], group, strict=True)])
    assert torch_peer.error(data, which, right.view(Fake)) < 1e-15
    right[-1, 0] += 1
    assert torch_peer.error(data, which, right.view(Fake)) > 0.01
