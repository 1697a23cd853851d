"""Every example runs, and checks what it says."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parents[1] / "examples"
SMALL = ("quickstart", "moe_train", "expert_parallel", "block_sparse", "feature_slices")


def run(name, *words, cwd):
    """In a process of its own: examples choose their platform and number of devices."""
    kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py"), *words]
    done = subprocess.run(
        command, cwd=cwd, env=kept | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_example_is_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SMALL, "demo"}


@pytest.mark.parametrize("name", SMALL)
def test_small_examples(name, tmp_path):
    assert run(name, cwd=tmp_path)


def test_demo(tmp_path):
    said = run("demo", "--quick", cwd=tmp_path)
    assert "checks held" in said and "FAILED" not in said
    assert (tmp_path / "demo.svg").read_text().lstrip().startswith("<")
