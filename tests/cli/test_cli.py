"""The command line: what it prints, and that bad input is one line and status 2."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import inspect
import json
import pathlib
import runpy
import subprocess
import sys

import jax
import pytest

from trencadis import inspect as tpu
from trencadis.cli import doctor
from trencadis.cli import inspect as compiling
from trencadis.cli import main as cli
from trencadis.cli.show import Show, tensor
from trencadis.cli.sizes import random_sizes
from trencadis.viz import show, show_gemm

IMAGES = pathlib.Path(__file__).parents[2] / "docs" / "img"


@pytest.fixture
def trencadis(monkeypatch):
    from typer import testing

    from trencadis.cli.commands import app

    monkeypatch.setenv("COLUMNS", "80")
    return lambda line: testing.CliRunner().invoke(app, line.split())


@pytest.mark.parametrize(
    "line",
    ["3 0 5 --target h200", "3,0,5 --target h200", "--target h200 3,0 5", "3,0,5 --target=h200 -m 8 -k 1024 -n 1024"],
)
def test_show(trencadis, line):
    result = trencadis(f"show {line}")
    assert result.exit_code == 0, result.output
    assert result.output == show([3, 0, 5], target="h200").text() + "\n"


def test_show_and_python_have_the_same_arguments_and_defaults(trencadis):
    """Each argument of Python is an option, besides the sizes; and without options both draw the same."""
    names = [name for name in inspect.signature(show).parameters if name != "group_sizes"]
    options = {field.name for field in dataclasses.fields(Show)}
    assert options == {*names, "sizes", "random", "skew", "seed", "svg"}
    assert trencadis("show 3 0 5").output == show([3, 0, 5]).text() + "\n"
    line = (
        "show 3 0 5 -m 12 -k 64 -n 32 --dtype float16 --preferred-element-type bfloat16 --form rows --transpose-rhs "
        "--target h200 --group-offset 1 --num-groups 2"
    )
    want = show([3, 0, 5], m=12, k=64, n=32, dtype="float16", preferred_element_type="bfloat16", form="rows",
                transpose_rhs=True, target="h200", group_offset=1, num_groups=2)  # fmt: skip
    assert trencadis(line).output == want.text() + "\n"


def test_show_a_fixed_raster(trencadis, tmp_path):
    result = trencadis(f"show 3 0 5 --tile 4 -m 10 --group-offset 1 --num-groups 2 --svg {tmp_path}/x.svg")
    want = show([3, 0, 5], tile=4, m=10, group_offset=1, num_groups=2)
    assert result.output == f"{want.text()}\nsaved   {tmp_path}/x.svg\n"
    assert (tmp_path / "x.svg").read_text(encoding="utf-8") == want.svg()


def test_show_random_sizes(trencadis):
    result = trencadis("show --random 40 -m 3000 --target h200 --skew uniform --seed 7")
    assert result.output == show(random_sizes(40, 3000, skew="uniform", seed=7), target="h200").text() + "\n"


GEMMS = {
    "3 0 5 -m 10 -k 4 -n 6": ("gemm-forward", [(3, 0, 5), 4], [4, 6], ((1,), (1,))),
    "3,0,5 -m 10 --pass d_lhs -k 4 -n 6": ("gemm-d-x", [(3, 0, 5), 6], [4, 6], ((1,), (2,))),
    "--pass d_rhs 3 0 5 --m 10 --k 4 --n 6": ("gemm-d-w", [(3, 0, 5), 4], [(3, 0, 5), 6], ((0,), (0,))),
    "2 4 3 --pass forward -k 3,1,5 -n 4,2,3": (
        "gemm-ragged",
        [(2, 4, 3), (3, 1, 5)],
        [(3, 1, 5), (4, 2, 3)],
        ((1,), (0,)),
    ),
}


@pytest.mark.parametrize("line", GEMMS)
def test_show_a_product(trencadis, tmp_path, line):
    """The command draws what Python draws, and the pictures of the pages."""
    name, left, right, dims = GEMMS[line]
    rows = 10 if "m 10" in line else None
    picture = show_gemm(tensor(left, 3, rows), tensor(right, 3, rows), contracting_dims=dims)
    result = trencadis(f"show-gemm {line} --svg {tmp_path}/x.svg")
    assert result.output == f"{picture.text()}\nsaved   {tmp_path}/x.svg\n"
    assert (tmp_path / "x.svg").read_text() == picture.svg() == (IMAGES / f"{name}.svg").read_text(encoding="utf-8")


def test_show_a_product_of_random_sizes(trencadis):
    result = trencadis("show-gemm --random 8 -m 8192 --pass d_rhs -k 4096 -n 14336")
    assert "8 groups, 481,036,337,152 multiply-adds" in result.output  # 8192 * 4096 * 14336


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("show", "sizes: want group sizes, or --random with a number of groups"),
        ("show 3 --random 4 -m 8", "sizes: want group sizes, or --random with a number of groups"),
        ("show 3 x", "sizes: want integers such as 3,0,5; got 'x'"),
        ("show -- 3 -1", "group_sizes: sizes must be >= 0; group 1 has -1"),
        ("show 3 --m 2", "group_sizes: must sum to at most m = 2 rows; got a sum of 3"),
        ("show 3 --tile 0", "tile: want a positive int; got 0"),
        ("show 3 --tile abc", "--tile"),
        ("show 3 --tile 4 -k 8", "k: goes with the tiles of a backend, not with the fixed raster of `tile`"),
        ("show 3 --tile 4 --target v6e", "target: goes with the tiles of a backend"),
        ("show 3 -k -1", "k: want a nonnegative int; got -1"),
        ("show 3 --dtype half-precise", "dtype: want a dtype such as bfloat16 or float32; got 'half-precise'"),
        ("show 3 --form columns", "'rows', 'contraction'"),
        ("show 3 --target cup", "--target: want one of cpu, cuda, rocm, tpu, v4, v5e, v5p, v6e, v7x, a100,"),
        ("show 3 --num-groups 2", "num_groups: want at most 1, the groups from group_offset = 0 on; got 2"),
        ("show 3 --group-offset 2", "group_offset: want 0 to 1, the number of groups; got 2"),
        ("show 3 --svg /no/such/folder/x.svg", "--svg: cannot write /no/such/folder/x.svg: No such file or directory"),
        ("show 3 --svg x.png", "--svg: want a file name that ends in .svg, the one format there is; got 'x.png'"),
        ("show-gemm 3 -k 2 -n 2 --svg x", "--svg: want a file name that ends in .svg, the one format there is; got"),
        ("show --random 8", "--random: also needs -m"),
        ("show --random 8 -m 9 --skew steep", "'zipf', 'uniform', 'balanced'"),
        ("show-gemm 3 0 --pass backward", "'forward', 'd_lhs', 'd_rhs'"),
        ("show-gemm 3 0 -k 4", "show-gemm: also needs -n"),
        ("show-gemm 3 0 -k 4 -n 2 --tile 4", "--tile"),
        ("show-gemm 3 0 -k 4,1,2 -n 2", "-k: want one size, or 2, one for each group; got 3"),
        ("show-gemm 3 0 -k 4 -n x", "-n: want integers such as 3,0,5; got 'x'"),
        ("show-gemm 3 0 -k 4 --n -2", "-n: want sizes >= 0; got '-2'"),
        ("show-gemm 3 0 -k 4 -n 2 -m 2", "-m: want at least 3, the sum of the sizes; got 2"),
        ("show-gemm 3 0 -k 4,2 -n 2 -m 9", "-m: goes with one size for k and one for n"),
        ("show-gemm 3 5000000000 -k 4 -n 2", "sizes: want fewer than 2**31 rows; got 5000000003"),
        ("show-gemm 3 0 -k 5000000000 -n 2", "-k: want fewer than 2**31 in all; got 5000000000"),
        ("why -m -3", "--m: want a nonnegative int; got -3"),
        ("why --dtype half-precise", "--dtype: want a dtype such as bfloat16 or float32; got 'half-precise'"),
        ("why --target cup", "--target: want one of cpu, cuda, rocm, tpu, v4,"),
        ("why --form contraction --transpose-rhs", "transpose_rhs: want rhs of rank 3"),
        ("paint", "paint"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(trencadis, line, message):
    result = trencadis(line)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.startswith("trencadis: ") and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("why --target tpu", "rows m=4096 k=1024 n=1024 g=8: bfloat16 x bfloat16 -> float32\ntarget       tpu"),
        ("why -m 64 -k 8 -n 4 -g 2 --target v4", "target       tpu (TPU v4)"),
        ("why -m 64 -k 8 -n 4 --platform h200 --preferred-element-type bfloat16", "rows m=64 k=4 n=8 g=8: bfloat16 x"),
        ("why --m 64 --k 8 --n 4 --groups 2 --dtype float32 --transpose-rhs", "m=64 k=8 n=4 g=2: float32 x float32ᵀ"),
        ("why --k 8 --n 4 --form contraction --dtype int8", "contraction m=4096 k=8 n=4 g=8: int8 x int8 -> int32"),
    ],
)  # fmt: skip
def test_why(trencadis, line, expected):
    result = trencadis(line)
    assert result.exit_code == 0, result.output
    assert expected in result.output


@pytest.mark.parametrize("line", ["", "--help", "show --help", "show-gemm -h", "why -h", "inspect -h", "doctor --help"])
def test_help(trencadis, line):
    result = trencadis(line)
    assert result.exit_code == 0
    assert "Usage: " in result.output and "trencadis" in result.output


def test_version(trencadis):
    import trencadis as package

    assert trencadis("--version").output == f"{package.__version__}\n"


def test_doctor(trencadis):
    result = trencadis("doctor")
    assert result.exit_code == 0, result.output
    for expected in (
        f"jax                {jax.__version__}",
        "python",
        "numpy",
        "rows  ",
        "contraction  ",
        "x64",
        "huge pages",
        "ok: ",
    ):
        assert expected in result.output


def test_doctor_finds_a_wrong_result(trencadis, monkeypatch):
    right = doctor.grouped_matmul
    monkeypatch.setattr(doctor, "grouped_matmul", lambda *args, **options: 2 * right(*args, **options))
    result = trencadis("doctor")
    assert result.exit_code == 1
    assert "error: AssertionError: out differs from numpy by" in result.output


def test_doctor_survives_a_backend_that_raises(monkeypatch):
    def broken(*args, **options):
        raise RuntimeError("no such\nkernel")

    monkeypatch.setattr(doctor, "grouped_matmul", broken)
    assert doctor.diagnose().error == "RuntimeError: no such kernel"


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_it_says_what_to_install(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit, match=rf"needs {missing}; install it with: .*'trencadis\[cli\]'.*'\.\[cli\]'"):
        cli.main()


def test_python_m_trencadis(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "trencadis.__main__", raising=False)  # which the test of docstrings imports
    monkeypatch.setattr(sys, "argv", ["trencadis", "show", "3", "0", "5", "--tile", "4"])
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(SystemExit) as left:
        runpy.run_module("trencadis", run_name="__main__")
    assert left.value.code == 0
    assert capsys.readouterr().out == show([3, 0, 5], tile=4).text() + "\n"


@pytest.mark.parametrize(
    ("line", "alone"),
    [("why", False), ("show 3", False), ("doctor", False), ("why --target v6e", True), ("show 3 --platform=h200", True),
     ("show 3 --tile 4", True), ("show-gemm 3", True), ("inspect", True)],
)  # fmt: skip
def test_which_commands_ask_for_the_devices_of_this_machine(line, alone, monkeypatch):
    """A named target needs no device: no accelerator is waited for, and none of its memory is taken."""
    asked = {}
    monkeypatch.setattr(jax.config, "update", lambda name, value: asked.update({name: value}))
    monkeypatch.setattr("trencadis.cli.commands.app", lambda prog_name: None)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(sys, "argv", ["trencadis", *line.split()])
    cli.main()
    assert asked == ({"jax_platforms": "cpu"} if alone else {})


def test_the_library_needs_nothing_of_the_extra():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('typer', 'rich', 'matplotlib')))\n"
        "import trencadis.cli.main, trencadis.cli.doctor; print(trencadis.viz.show([1], tile=1).visits)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1\n"


EXAMPLES = ["cli.doctor", "cli.main", "cli.options", "cli.show", "cli.sizes", "viz.draw", "viz.mosaic", "viz.palette",
            "viz.panel", "viz.planned", "viz.product", "viz.raster", "viz.terminal"]  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name):
    module = importlib.import_module(f"trencadis.{name}")
    result = doctest.testmod(module)
    assert result.attempted and not result.failed


BUILDER = """
import jax, jax.numpy as jnp
from jax.experimental import pallas as pl

def double(x, y):
    y[...] = x[...] * 2

def build():
    x = jax.ShapeDtypeStruct((256, 128), jnp.float32)
    return pl.pallas_call(double, out_shape=x, name="double"), (x,), {"flops": 32768.0}

def wrong():
    return 3

constant = 4
"""


@pytest.fixture
def builder(tmp_path):
    (tmp_path / "built_kernel.py").write_text(BUILDER)
    yield f"{tmp_path}/built_kernel.py"
    sys.modules.pop("built_kernel", None)
    sys.path.remove(str(tmp_path)) if str(tmp_path) in sys.path else None


def test_inspect_a_file(trencadis, builder, tmp_path):
    result = trencadis(f"inspect {builder}:build --target v5e --json {tmp_path}/x.json")
    assert result.exit_code == 0, result.output
    assert "kernel double" in result.output and "% of the peak" in result.output
    found = json.loads((tmp_path / "x.json").read_text())
    assert found["generation"] == "v5e" and found["kernels"][0]["bytes_in"] == 256 * 128 * 4


@pytest.mark.parametrize("form", ["rows", "contraction"])
def test_inspect_a_grouped_matmul(trencadis, monkeypatch, form):
    asked = {}

    def inspect(fn, *args, **options):
        asked.update(options, out=jax.eval_shape(fn, *args), sizes=args[2].tolist())
        return tpu.Inspection(generation="v6e", jax="1", libtpu="2", compiled=False, message="no room")

    monkeypatch.setattr(compiling, "inspect_call", inspect)
    result = trencadis(f"inspect -m 64 -k 8 -n 4 --sizes 30,0,20 --form {form}")
    assert result.exit_code == 1
    assert "does not compile:\n  no room" in result.output
    assert asked["out"].shape == ((64, 4) if form == "rows" else (3, 8, 4)) and asked["out"].dtype == "bfloat16"
    assert asked["sizes"] == [30, 0, 20] and asked["flops"] == 2 * 50 * 8 * 4 and asked["xla"] is True


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("inspect --target v9", "--target: want a TPU generation, one of v4, v5e, v5p, v6e, v7x; got 'v9'"),
        ("inspect --target h200", "--target: want a TPU generation, one of v4, v5e, v5p, v6e, v7x; got 'h200'"),
        ("inspect -m 0", "--m: want a positive int; got 0"),
        ("inspect -g 0", "groups: want a positive int; got 0"),
        ("inspect --sizes 3,x", "--sizes: want integers such as 3,0,5; got 'x'"),
        ("inspect --dtype half-precise", "--dtype: want a dtype such as bfloat16 or float32; got 'half-precise'"),
        ("inspect kernel", "want FILE.py:builder; got 'kernel'"),
        ("inspect /no/such.py:build", "there is no file /no/such.py"),
        ("inspect BUILDER:nothing", "the file has no function nothing"),
        ("inspect BUILDER:constant", "the file has no function constant"),
        ("inspect BUILDER:wrong", "want it to return (fn, args); got int"),
    ],
)
def test_inspect_bad_input(trencadis, builder, line, message):
    test_bad_input_is_one_line(trencadis, line.replace("BUILDER", builder), message)


def test_inspect_without_the_compiler(trencadis, monkeypatch):
    def inspect(*args, **options):
        raise tpu.CompilerMissing("libtpu is not installed")

    monkeypatch.setattr(compiling, "inspect_call", inspect)
    test_bad_input_is_one_line(trencadis, "inspect", "libtpu is not installed")
