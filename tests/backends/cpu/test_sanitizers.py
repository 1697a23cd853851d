"""The native kernels for CPUs under sanitizers, by a program of their own."""

import pathlib
import shutil
import subprocess

import pytest

CHECK = pathlib.Path(__file__).parents[3] / "native" / "tests" / "check.cc"


@pytest.mark.sweep
def test_the_kernels_of_all_instructions_under_sanitizers(tmp_path):
    """AVX2 and portable kernels too; the program compares them with a loop, over ragged sizes."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path / "check"
    flags = ["-std=c++17", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-Wno-psabi"]
    subprocess.run([compiler, *flags, str(CHECK), "-o", str(program)], check=True)
    subprocess.run([str(program)], check=True)
