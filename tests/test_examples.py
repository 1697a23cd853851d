"""Every example runs, and checks what it says."""

from __future__ import annotations

import importlib
import os
import pathlib
import runpy
import subprocess
import sys

import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
HERE = ("block_sparse", "feature_slices", "load_checkpoint")
ALSO = ("quickstart", "expert_parallel", "demo", "train_moe", "serve_moe", "train_moe_processes")


def run(name, *words, cwd, flags=""):
    """The output of an example in a process of its own, where it may choose its platform and number of devices."""
    command = [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py"), *words]
    chosen = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run(command, cwd=cwd, env=os.environ | chosen, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def cheap():
    """XLA_FLAGS as the other tests have them, but for the number of devices."""
    return " ".join(flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag)


def test_every_example_is_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*HERE, *ALSO}


@pytest.mark.parametrize("name", HERE)
def test_small_examples(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert capsys.readouterr().out


def test_with_the_compiler_as_users_have_it(tmp_path):
    assert run("quickstart", cwd=tmp_path)


def test_an_example_that_chooses_its_devices(tmp_path):
    assert run("expert_parallel", cwd=tmp_path, flags=cheap())


def test_training_and_serving(tmp_path, monkeypatch, capsys):
    """A tiny model learns, is saved, and is served with int4 experts; over four devices it learns the same."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    train_moe, serve_moe = map(importlib.import_module, ("train_moe", "serve_moe"))
    losses = train_moe.main(["--quick", "--steps", "8", "--save", "model.npz"])
    said = capsys.readouterr()
    assert "loss" in said.out and "layer 1" in said.out and "step 8/8" in said.err
    serve_moe.main(["--load", "model.npz", "--batch", "2", "--tokens", "4"])
    said = capsys.readouterr().out
    assert "int4" in said and "tokens/s" in said
    spread = train_moe.main(["--quick", "--steps", "8", "--experts-over", "4"])
    np.testing.assert_allclose(spread, losses, rtol=1e-5)


@pytest.mark.sweep
def test_training_in_two_processes(tmp_path):
    assert "equal to the bit" in run("train_moe_processes", "--steps", "3", cwd=tmp_path, flags=cheap())


def test_demo(tmp_path):
    said = run("demo", "--quick", cwd=tmp_path, flags=cheap())
    assert "checks held" in said and "FAILED" not in said
    assert (tmp_path / "demo.svg").read_text().lstrip().startswith("<")
