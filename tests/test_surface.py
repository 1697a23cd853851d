"""The public surface: names, packages that are imported when used, types, extras, and the overhead of a call."""

import functools
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import runpy
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest

import trencadis as tr
from trencadis.compat.maxtext import gmm

ROOT = pathlib.Path(__file__).parents[1]


def test_the_user_program_runs():
    """`make lint` checks its types."""
    names = runpy.run_path(str(ROOT / "tests/support/user_program.py"))
    assert names["y"].shape == (8, 3)


def test_types_are_shipped():
    assert (pathlib.Path(tr.__file__).parent / "py.typed").exists()


def test_names_are_public_names_and_packages():
    """What completion shows is what there is, and each is there after a plain import."""
    hidden = [name for name in dir(tr) if name.startswith("_")]
    packages = ["compat", "gemm", "inspect", "moe", "parallel", "quant", "viz"]
    assert tr.__dir__() == [*sorted({*tr.__all__, *packages}), "__version__"] and hidden == ["__version__"]
    assert not set(packages) & set(tr.__all__)  # `import *` leaves the standard library's inspect alone
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
def test_a_product_on_a_cpu_imports_no_kernels_of_other_devices():
    """What takes long to import waits until a program needs it."""
    program = """
        import sys, jax.numpy as jnp, trencadis as tr
        x, w = jnp.ones((4, 3)), jnp.ones((2, 3, 5))
        tr.grouped_matmul(x, w, [1, 3])
        tr.grouped_gemm(*(tr.GroupedTensor.stacked(w),) * 2, contracting_dims=((1,), (1,)))
        pallas = "jax.experimental.pallas"
        slow = f"{pallas}.tpu", f"{pallas}.mosaic_gpu", "triton", "typer", "matplotlib", "flax"
        sys.exit(", ".join(name for name in slow if name in sys.modules) or None)
    """
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    run = functools.partial(subprocess.run, env=environment, capture_output=True, text=True, timeout=120)
    done = run([sys.executable, "-c", textwrap.dedent(program)])
    assert done.returncode == 0, done.stderr


def test_a_call_like_one_before_it_traces_nothing():
    x, w, sizes = jnp.ones((33, 7)), jnp.ones((4, 7, 5)), (10, 0, 20, 3)
    routing = tr.moe.route(x[:, :4], 2)
    mesh = jax.make_mesh((1,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    spec, traced = jax.sharding.PartitionSpec("expert"), jnp.array(sizes)
    multiply = tr.sharded(mesh, spec, spec, spec)(tr.grouped_matmul)
    q, recipe = tr.quant.quantize(w, "int8", "column"), tr.quant.Recipe(*["int8"] * 3)

    def quantized(x, w):
        out = tr.grouped_matmul(x, q, sizes) + tr.ragged_dot(x, q, traced)
        out += tr.grouped_dense(x, w, sizes, contracting_dims=((1,), (1,)), quantization=recipe)
        return (out + gmm(x, w, traced, lhs_quantize_dtype="int8", rhs_quantize_dtype="int8")).sum()

    def calls():
        multiply(x, w, traced)
        tr.moe_mlp(x, routing, w, w, w.mT, quantization=recipe)
        tr.parallel.moe_mlp(x, routing, w, w, w.mT, axis="expert", mesh=mesh)
        tr.grouped_matmul(x, w, sizes, precision="highest")
        tr.transposed_grouped_matmul(x.T, x, sizes)
        tr.moe_mlp(x, routing, w, w, w.mT)
        jax.grad(quantized, (0, 1))(x, w)

    events = []
    listener = lambda name, seconds, **_: events.append(name)
    calls()
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        calls()
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert not [name for name in events if "trace" in name or "compile" in name]


@pytest.mark.core
@pytest.mark.skipif(sys.platform != "linux", reason="Triton has wheels for Linux alone")
def test_triton_is_here_so_that_its_tests_are_not_skipped():
    assert importlib.util.find_spec("triton") is not None
