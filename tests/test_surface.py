"""The public surface: names, lazily reachable packages, types that checkers accept, and what the extras install."""

import importlib.metadata
import importlib.util
import pathlib
import re
import subprocess
import sys
import textwrap

import pytest

import trencadis as tr

ROOT = pathlib.Path(__file__).parents[1]

# what a user would write, in every way that the documentation allows
PROGRAM = """
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import trencadis as tr

x, w = jnp.ones((8, 4)), jnp.ones((2, 4, 3))
sizes = jnp.array([3, 5])
y: jax.Array = tr.grouped_matmul(x, w, sizes, x.dtype, bias=jnp.zeros((2, 3)), activation=jax.nn.silu)
y = tr.grouped_matmul(x, tr.quant.quantize(w, "int8", "column"), [3, 5], group_offset=0, tiling=(8, 4, 3))
y = tr.grouped_matmul(np.ones((8, 4), np.float32), np.ones((2, 4, 3)), np.array([3, 5]), tiling=tr.Tiling(8, 4, 3))
y = tr.grouped_matmul([[1.0, 2.0]], [[[1.0], [2.0]]], (1,), tiling=lambda m, k, n: (m, k, n))
z: jax.Array = tr.transposed_grouped_matmul(x, jnp.ones((8, 3)), sizes, transpose_lhs=True, num_actual_groups=2)
z = tr.ragged_dot(x, tr.quant.quantize(w, "float8_e4m3fn"), sizes)
meta, count = tr.make_group_metadata(group_sizes=[3, 5], m=8, tm=4, start_group=0, num_nonzero_groups=2)
rows = tr.GroupedTensor.ragged_rows(x, [3, 5])
out = tr.grouped_gemm(rows, tr.GroupedTensor.stacked(w), contracting_dims=((1,), (1,)))
dense: jax.Array = tr.grouped_dense(x, w, sizes, quantization=tr.quant.Recipe("int8", "int8"))
routing = tr.moe.route(x @ jnp.ones((4, 2)), 1, score="sigmoid", bias=jnp.zeros(2), scale=2.5)
mlp: jax.Array = tr.moe_mlp(x, routing, w, tr.quant.quantize(w, "int8", "column"), jnp.ones((2, 3, 4)), save="fast")
mlp = tr.moe_mlp(x, routing, None, w, jnp.ones((2, 3, 4)), activation=jax.nn.relu)
config = tr.moe.Config(d=4, f=3, experts=2, k=1, activation=tr.moe.swiglu(limit=7.0))
mlp, routing = tr.moe.apply(tr.moe.init(jax.random.key(0), config), x, config, bias=jnp.zeros(2))
balance: jax.Array = tr.moe.balance_loss(routing) + tr.moe.limit_rows(routing, 2)[1].imbalance
why: str = str(tr.why(tr.grouped_matmul, x, w, sizes, target="v6e"))


class QArray:  # as qwix has it
    def __init__(self, qvalue: jax.Array, scale: jax.Array) -> None:
        self.qvalue, self.scale = qvalue, scale
        self.zero_point: Any = None
        self.qtype: Any = "int8"


y = tr.grouped_matmul(x, QArray(jnp.ones((2, 4, 3), jnp.int8), jnp.ones((2, 1, 3))), sizes)
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("user") / "program.py"
    path.write_text(PROGRAM)
    return path


def test_a_user_program_goes_through_mypy(program):
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-incremental", "--config-file=", str(program)],
        capture_output=True, text=True, cwd=program.parent, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def test_a_user_program_goes_through_pyright(program):
    done = subprocess.run(
        [sys.executable, "-m", "basedpyright", "--level", "error", "--pythonpath", sys.executable, str(program)],
        capture_output=True, text=True, cwd=program.parent, timeout=300,
    )  # fmt: skip
    problems = [line for line in done.stdout.splitlines() if " error: " in line]
    assert not problems and "0 errors" in done.stdout, done.stdout


def test_the_user_program_runs(program):
    names: dict[str, object] = {}
    exec(compile(PROGRAM, str(program), "exec"), names)
    assert names["y"].shape == (8, 3)


def test_types_are_shipped():
    assert (pathlib.Path(tr.__file__).parent / "py.typed").exists()


def test_names_are_public_names_and_packages():
    """What completion shows is what there is, and each is there after a plain import."""
    hidden = [name for name in dir(tr) if name.startswith("_")]
    assert dir(tr) == sorted(dir(tr)) and hidden == ["__version__"]
    program = """
        import trencadis as tr
        for name in dir(tr):
            getattr(tr, name)
        tr.compat.megablox.gmm, tr.compat.maxtext.gmm, tr.compat.ejkernel, tr.compat.transformer_engine
        tr.quant.quantize, tr.gemm.grouped_quantize, tr.inspect.inspect, tr.moe.route, tr.viz.Mosaic
        try:
            tr.nothing
        except AttributeError as error:
            print(error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120)
    assert done.stdout == "module 'trencadis' has no attribute 'nothing'\n", done.stderr


def closure(requirement, extras=()):
    """The names of all distributions that a requirement installs here, by the metadata of those that are installed."""
    seen, todo = set(), [(requirement, frozenset(extras))]
    while todo:
        name, extras = todo.pop()
        name = re.sub(r"[-_.]+", "-", name).lower()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for line in requires:
            head, _, marker = line.partition(";")
            asked = re.findall(r"extra == ['\"]([^'\"]+)['\"]", marker)
            if asked and not set(asked) & extras:
                continue
            match = re.match(r"\s*([\w.-]+)(?:\[([^\]]*)\])?", head)
            todo.append((match[1], frozenset(filter(None, (match[2] or "").replace(" ", "").split(",")))))
    return {name for name, _ in seen}


@pytest.mark.parametrize(("extra", "module"), [("cuda", "gpu.kernel"), ("tpu", "tpu.kernel")])
def test_the_extras_install_what_the_kernels_import(extra, module):
    """A kernel is imported with nothing but the distributions that the package metadata says its extra installs."""
    owners = importlib.metadata.packages_distributions()
    names = {name: {re.sub(r"[-_.]+", "-", each).lower() for each in found} for name, found in owners.items()}
    brought = closure("trencadis", {extra})
    others = sorted(name for name, found in names.items() if not found & brought and not name.startswith("_"))
    assert {"jax", "jaxlib", "numpy", "jaxtyping"} <= brought and {"pytest", "hypothesis"} <= set(others)
    program = f"""
        import sys
        for name in {others!r}:
            if name not in sys.modules:
                sys.modules[name] = None  # importing it fails
        import trencadis.backends.{module}
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.core
@pytest.mark.skipif(sys.platform != "linux", reason="Triton has wheels for Linux alone")
def test_triton_is_here_so_that_its_tests_are_not_skipped():
    assert importlib.util.find_spec("triton") is not None
