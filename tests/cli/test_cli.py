"""The command line: what it prints, and that bad input is one line and status 2."""

from __future__ import annotations

import doctest
import importlib
import json
import pathlib
import subprocess
import sys

import jax
import pytest

from trencadis import inspect as tpu
from trencadis.cli import doctor
from trencadis.cli import inspect_command as compiling
from trencadis.cli import main as cli
from trencadis.cli.show_command import tensor
from trencadis.cli.sizes import random_sizes
from trencadis.viz import show

pytestmark = pytest.mark.core

IMAGES = pathlib.Path(__file__).parents[2] / "docs" / "img"


@pytest.fixture
def trencadis(monkeypatch):
    from typer import testing

    from trencadis.cli.commands import app

    monkeypatch.setenv("COLUMNS", "80")
    return lambda line: testing.CliRunner().invoke(app, line.split())


@pytest.mark.parametrize(
    "line", ["show 3 0 5 --tile 4", "show 3,0,5 --tile 4", "show --tile 4 3,0 5", "show 3,0,5 --tile 4 --m 8"]
)
def test_show(trencadis, line):
    result = trencadis(line)
    assert result.exit_code == 0, result.output
    assert result.output == show([3, 0, 5], 4).text() + "\n"


def test_show_options(trencadis, tmp_path):
    result = trencadis(f"show 3 0 5 --tile 4 --rows 10 --window 1 2 --svg {tmp_path}/x.svg")
    want = show([3, 0, 5], 4, m=10, group_offset=1, num_groups=2)
    assert result.output == f"{want.text()}\ndrawn   {tmp_path}/x.svg\n"
    assert (tmp_path / "x.svg").read_text(encoding="utf-8") == want.svg()


def test_show_made_up_sizes(trencadis):
    result = trencadis("show --random 40 --rows 3000 --tile 64 --skew uniform --seed 7")
    assert result.output == show(random_sizes(40, 3000, skew="uniform", seed=7), 64).text() + "\n"


GEMMS = {
    "3 0 5 --rows 10 --gemm forward --k 4 --n 6": ("gemm-forward", [(3, 0, 5), 4], [4, 6], ((1,), (1,))),
    "3,0,5 --rows 10 --gemm d_lhs --k 4 --n 6": ("gemm-d-x", [(3, 0, 5), 6], [4, 6], ((1,), (2,))),
    "--gemm d_rhs 3 0 5 --rows 10 --k 4 --n 6": ("gemm-d-w", [(3, 0, 5), 4], [(3, 0, 5), 6], ((0,), (0,))),
    "2 4 3 --gemm forward --k 3,1,5 --n 4,2,3": (
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
    rows = 10 if "--rows" in line else None
    picture = show(tensor(left, 3, rows), tensor(right, 3, rows), contracting_dims=dims)
    result = trencadis(f"show {line} --svg {tmp_path}/x.svg")
    assert result.output == f"{picture.text()}\ndrawn   {tmp_path}/x.svg\n"
    assert (tmp_path / "x.svg").read_text() == picture.svg() == (IMAGES / f"{name}.svg").read_text(encoding="utf-8")


def test_show_a_product_of_made_up_sizes(trencadis):
    result = trencadis("show --random 8 --rows 8192 --gemm d_rhs --k 4096 --n 14336")
    assert "8 groups, 481,036,337,152 multiply-adds" in result.output  # 8192 * 4096 * 14336


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("show", "show: want group sizes, or --random with a number of groups"),
        ("show 3 --random 4 --rows 8", "show: want group sizes, or --random with a number of groups"),
        ("show 3 x", "sizes: want integers; got 'x'"),
        ("show -- 3 -1", "group_sizes: sizes must be >= 0; group 1 has -1"),
        ("show 3 --m 2", "group_sizes: must sum to at most m = 2 rows; got a sum of 3"),
        ("show 3 --tile 0", "tile: want a positive int; got 0"),
        ("show 3 --tile abc", "--tile"),
        ("show 3 --window 0 2", "num_groups: want at most 1, the groups from group_offset = 0 on; got 2"),
        ("show 3 --window 0", "--window"),
        ("show 3 --svg /no/such/folder/x.svg", "--svg: cannot write /no/such/folder/x.svg: No such file or directory"),
        ("show --random 8", "--random: also needs --rows"),
        ("show --random 8 --rows 9 --skew steep", "'zipf', 'uniform', 'balanced'"),
        ("show 3 0 --gemm backward", "'forward', 'd_lhs', 'd_rhs'"),
        ("show 3 0 --gemm forward --k 4", "--gemm: also needs --n"),
        ("show 3 0 --k 4", "--k: goes with --gemm"),
        ("show 3 0 --gemm forward --k 4 --n 2 --tile 4", "--tile: goes with a schedule, not with --gemm"),
        ("show 3 0 --gemm forward --k 4 --n 2 --window 0 1", "--window: goes with a schedule, not with --gemm"),
        ("show 3 0 --gemm forward --k 4,1,2 --n 2", "--k: want one size, or 2, one for each group; got 3"),
        ("show 3 0 --gemm forward --k 4 --n x", "--n: want integers; got 'x'"),
        ("show 3 0 --gemm forward --k 4 --n -2", "--n: want sizes >= 0; got '-2'"),
        ("show 3 0 --gemm forward --k 4 --n 2 --rows 2", "--rows: want at least 3, the sum of the sizes; got 2"),
        ("show 3 0 --gemm forward --k 4,2 --n 2 --rows 9", "--rows: goes with one size for k and one for n"),
        ("show 3 5000000000 --gemm forward --k 4 --n 2", "sizes: want fewer than 2**31 rows; got 5000000003"),
        ("show 3 0 --gemm forward --k 5000000000 --n 2", "--k: want fewer than 2**31 in all; got 5000000000"),
        ("why --m -3", "--m: want a nonnegative int; got -3"),
        ("why --dtype half-precise", "--dtype: want a dtype such as bfloat16 or float32; got 'half-precise'"),
        ("why --platform cup", "'cpu', 'cuda', 'rocm', 'tpu'"),
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
        ("why --platform tpu", "rows m=4096 k=1024 n=1024 g=8: bfloat16 x bfloat16 -> float32\ntarget       tpu"),
        ("why --m 64 --k 8 --n 4 --groups 2 --dtype float32 --transpose-rhs", "m=64 k=8 n=4 g=2: float32 x float32ᵀ"),
        ("why --k 8 --n 4 --form contraction --dtype int8", "contraction m=4096 k=8 n=4 g=8: int8 x int8 -> int32"),
    ],
)  # fmt: skip
def test_why(trencadis, line, expected):
    result = trencadis(line)
    assert result.exit_code == 0, result.output
    assert expected in result.output


@pytest.mark.parametrize("line", ["", "--help", "show --help", "why -h", "inspect -h", "doctor --help"])
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
    with pytest.raises(SystemExit, match=rf"needs {missing}; install it with: pip install 'trencadis\[cli\]'"):
        cli.main()


def test_the_library_needs_nothing_of_the_extra():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('typer', 'rich', 'matplotlib')))\n"
        "import trencadis.cli.main, trencadis.viz.doctor; print(trencadis.viz.show([1], 1).visits)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1\n"


@pytest.mark.parametrize(
    "name", ["door", "doctor", "drawing", "mosaic", "palette", "panel", "product", "reasons", "sizes"]
)
def test_examples(name):
    module = importlib.import_module(f"trencadis.viz.{name}")
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
    result = trencadis(f"inspect {builder}:build --generation v5e --json {tmp_path}/x.json")
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
        ("inspect --generation v9", "generation: want one of v4 (TPU v4), v5e (TPU v5 lite)"),
        ("inspect -m 0", "--m: want a positive int; got 0"),
        ("inspect -g 0", "groups: want a positive int; got 0"),
        ("inspect --sizes 3,x", "--sizes: want integers such as 3,0,5; got '3,x'"),
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
