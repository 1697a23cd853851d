"""The native kernels for CPUs by a program of their own: under sanitizers, and as those of other machines."""

import pathlib
import shutil
import subprocess

import pytest

CHECK = pathlib.Path(__file__).parents[3] / "native" / "tests" / "check.cc"


@pytest.mark.sweep
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_the_kernels_of_all_instructions_under_sanitizers(sanitizers, tmp_path):
    """AVX2 and portable kernels too; the program compares them with a loop, over ragged sizes."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    flags = ["-O1", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=undefined"]
    subprocess.run([_built(compiler, flags, tmp_path)], check=True)


@pytest.mark.sweep
@pytest.mark.parametrize("flags", [["-O1"], ["-O3", "-ffp-contract=fast", "-fno-math-errno"]], ids=["O1", "O3"])
def test_the_kernels_of_neon_in_an_emulator(flags, tmp_path):
    """The same program for 64-bit ARM (Debian's packages g++-aarch64-linux-gnu and qemu-user run it on x86)."""
    compiler, emulator = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
    if compiler is None or emulator is None:
        pytest.skip("no compiler for ARM, or no emulator")
    subprocess.run([emulator, _built(compiler, ["-static", *flags], tmp_path)], check=True)


def _built(compiler: str, flags: list[str], folder: pathlib.Path) -> str:
    """The program, compiled; its exit code is the number of wrong products."""
    program = str(folder / "check")
    subprocess.run([compiler, "-std=c++17", "-Wno-psabi", "-pthread", *flags, str(CHECK), "-o", program], check=True)
    return program
