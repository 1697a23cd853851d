import os
import pathlib
import subprocess
import sys
import types

import pytest

from benchmarks import __main__ as command_line
from benchmarks import timing

ROOT = pathlib.Path(__file__).parents[2]
COMMANDS = ("run", "gpu", "tpu", "quant", "ragged", "moe", "check", "plot")


def test_nothing_heavy_is_imported_before_the_arguments_are_read():
    code = (
        "import sys, benchmarks.__main__ as m; m.main(['run', '--list']);"
        "sys.exit('numpy' in sys.modules or 'jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert "mixtral-8x7b: m=16384" in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        command_line.main([command, "--help"])
    assert stop.value.code == 0 and f"usage: python -m benchmarks {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, platform",
    [
        (["gpu"], "cuda"), (["quant", "--device", "gpu"], "cuda"), (["check"], "cuda"),
        (["check", "--device", "cpu"], "cpu"), (["quant", "--device", "tpu"], "cpu"), (["tpu"], "cpu"),
        (["moe", "--device", "gpu"], "cuda"), (["moe"], "cpu"), (["run"], "unchanged"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_the_platform_of_a_command(monkeypatch, words, platform):
    monkeypatch.setenv("JAX_PLATFORMS", "unchanged")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "")
    command_line.prepare(command_line.parser().parse_args(words))
    assert os.environ["JAX_PLATFORMS"] == platform


def test_pinning_comes_first(monkeypatch):
    saw = []
    monkeypatch.setattr(timing, "pin", saw.append)
    command_line.prepare(types.SimpleNamespace(command="run", pin=3))
    assert saw == [3]


def test_an_unknown_name_is_an_error_of_usage(monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(SystemExit):
        command_line.main(["run", "--problems", "nonsense", "--json", "none"])
    assert "nonsense not among" in capsys.readouterr().err


def test_alone_is_on_all_cores(capsys):
    with pytest.raises(SystemExit):
        command_line.main(["run", "--alone", "--pin", "0"])
    assert "--alone: want all cores; got --pin" in capsys.readouterr().err
