"""Lowering for a chip that is not there, and an installation that is not well."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from trencadis import inspect as tpu
from trencadis.core.devices import CHIPS
from trencadis.inspect import aot

from .kernels import array, copy

pytestmark = pytest.mark.core


@pytest.mark.parametrize("name", CHIPS)
def test_a_kernel_is_traced_for_the_chip(name):
    seen = []

    def fn(x):
        seen.append(pltpu.get_tpu_info().vmem_capacity_bytes)
        return x

    aot.export_for(CHIPS[name], fn, [array(8)])
    assert set(seen) == {CHIPS[name].vmem}


def test_values_of_integers_only():
    args = [np.ones(3), np.arange(2), jnp.arange(4, dtype=jnp.uint8), array(2, dtype=jnp.int32), 7, 0.5, True]
    _, known = aot.export_for(CHIPS["v6e"], lambda *xs: xs, args)
    assert sorted(known) == [1, 2, 4, 6]
    assert known[1].dtype == jnp.asarray(np.arange(2)).dtype


def test_a_call_that_export_would_not_keep():
    exported, _ = aot.export_for(CHIPS["v6e"], lambda x: jax.lax.approx_max_k(x, 4), [array(8, 1024)])
    assert exported.platforms == ("tpu",)


def test_export_writes_for_this_compiler_alone():
    option = "jax_export_ignore_forward_compatibility"
    seen = []

    def fn(x):
        seen.append(getattr(jax.config, option))
        return x

    aot.export_for(CHIPS["v6e"], fn, [array(8)])
    assert seen == [True] and getattr(jax.config, option) is False


def test_a_folder_that_was_used_before(monkeypatch, tmp_path):
    (tmp_path / "dump").mkdir()
    for name in ("answer.json", "compiling", "dump/1-old.1-05-final_bundles.txt", "mine.txt"):
        (tmp_path / name).touch()
    with pytest.raises(tpu.CompilerMissing):
        died(1, "", False, monkeypatch, tmp_path)
    assert not (tmp_path / "answer.json").exists() and not list((tmp_path / "dump").iterdir())
    assert (tmp_path / "mine.txt").exists()


def test_a_wrong_program_raises_here():
    with pytest.raises(TypeError, match="dot_general requires contracting dimensions"):
        tpu.inspect(jnp.dot, array(3, 4), array(3, 4))


def test_a_bad_generation():
    with pytest.raises(ValueError, match=r"generation: want one of v4 .* got 'v9'"):
        tpu.inspect(copy, array(128, 128), generation="v9")


def test_without_the_compiler(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(tpu.CompilerMissing, match=r"libtpu, is not installed; .*pip install 'trencadis\[tpu\]'"):
        tpu.inspect(copy, array(128, 128))


def died(code, stderr, compiling, monkeypatch, tmp_path):
    def run(command, **options):
        if compiling:
            (tmp_path / "compiling").touch()
        return subprocess.CompletedProcess(command, code, "", stderr)

    monkeypatch.setattr(aot.subprocess, "run", run)
    return tpu.inspect(copy, array(128, 128), dump=tmp_path)


def test_a_compiler_that_does_not_start(monkeypatch, tmp_path):
    with pytest.raises(tpu.CompilerMissing, match=r"did not start(.|\n)*no such symbol"):
        died(1, "ImportError: no such symbol", False, monkeypatch, tmp_path)


def test_a_compiler_that_crashes_is_an_answer(monkeypatch, tmp_path):
    found = died(-6, "noise\nF0101 Check failed: x == y\n", True, monkeypatch, tmp_path)
    assert not found.compiled
    assert found.message == "the compiler crashed (signal 6): F0101 Check failed: x == y"
