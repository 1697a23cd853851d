"""The problems that the backend refuses, each with a reason, and what its plan leaves to XLA."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies

import trencadis as tr
from trencadis.backends import tpu
from trencadis.core import autodiff
from trencadis.core.arguments import problem_of
from trencadis.core.decision import Refusal
from trencadis.core.devices import CHIPS
from trencadis.core.epilogue import Epilogue
from trencadis.core.plan import plan
from trencadis.core.target import Target
from trencadis.core.tiling import Overrides, Tiling, Tilings

from .ahead import compiled, device, kernels


def refusal(problem, target):
    """The reason why the backend refuses a problem; None if it has a plan."""
    answer = tpu.plan(problem, target, Overrides())
    return answer.reason if isinstance(answer, Refusal) else None


pytestmark = pytest.mark.core

ROWS = problem_of((256, 128), (4, 128, 128))
SUM = problem_of((128, 256), (256, 128), groups=4)
V6E = Target(platform="tpu", kind="TPU v6 lite")


def changed(problem=ROWS, **changes):
    return problem.replace(**changes)


@pytest.mark.parametrize(
    ("problem", "target", "reason"),
    [
        (ROWS, Target(platform="cpu", kind="cpu"), "the tpu backend runs on TPU; the target is cpu"),
        (ROWS, Target(platform="tpu", kind="TPU v99"), "the tpu backend knows no TPU of the kind 'TPU v99'"),
        (changed(rhs=np.dtype("float64")), V6E, "rhs is float64"),
        (changed(out=np.dtype("float64")), V6E, "the result is float64; kernels take bfloat16, float32, int8, int32"),
        (changed(epilogue=Epilogue(bias=np.dtype("int32"))), V6E, "bias is int32; kernels take bfloat16, float32"),
        (changed(m=0), V6E, "there is nothing to multiply"),
        (changed(k=0), V6E, "there is nothing to multiply"),
        (changed(local_groups=0), V6E, "there is nothing to multiply"),
        (changed(groups=0, local_groups=0), V6E, "there is nothing to multiply"),
        (changed(SUM, local_groups=0), V6E, "there is nothing to multiply"),
        (changed(groups=2**17), V6E, "131072 group sizes are too many for scalar memory"),
        (
            changed(precision=jax.lax.DotAlgorithmPreset.F32_F32_F32),
            V6E,
            "precision is F32_F32_F32; the tpu backend has DEFAULT, HIGH",
        ),
        (
            changed(rhs=np.dtype(jnp.float8_e4m3fnuz)),
            V6E,
            "rhs is float8_e4m3fnuz; kernels take .* float8_e4m3fn, float8_e5m2",
        ),
    ],
)
def test_a_refusal_has_a_reason_and_another_backend_runs_it(problem, target, reason):
    assert re.search(reason, refusal(problem, target))
    assert plan(problem, target).backend != "tpu"


def test_where_scales_change_along_a_k_that_does_not_fit_each_part_is_a_product():
    problem = changed(k=2**18, epilogue=Epilogue(by_column=True, column_block=(128, 1)))
    assert refusal(problem, V6E) == "no block of k = 262144 columns fits into the 128 MiB of VMEM of a v6e"
    assert plan(problem, V6E).split == 128


def call(dtype, **options):
    return lambda x, w, s: tr.grouped_matmul(x, w, s, jnp.float32, backend="tpu", **options), [
        ((256, 128), dtype),
        ((4, 128, 128), dtype),
        ((4,), "int32"),
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
def test_jax_default_matmul_precision_holds_for_float32_alone(dtype):
    """Operands of fewer bits than float32 have only one precision, whatever the setting."""
    fn, shapes = call(dtype)
    with jax.default_matmul_precision("highest"):
        assert kernels(compiled(CHIPS["v6e"], fn, *shapes)) == ["trencadis_rows"]
    problem = ROWS.replace(lhs=jnp.dtype(dtype), rhs=jnp.dtype(dtype))
    with jax.default_matmul_precision("F32_F32_F32"):
        assert (refusal(problem, V6E) is None) == (dtype != "float32")


def test_precision_reaches_the_kernel():
    def products(**options):
        problem = ROWS.replace(**options)
        shapes = [(problem.lhs_shape, "float32"), (problem.rhs_shape, "float32"), ((1, 4), "int32"), ((1,), "int32")]
        args = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in shapes]
        chosen = plan(problem, V6E)
        heights = len(chosen.layout.heights)
        return str(jax.make_jaxpr(functools.partial(tpu.run, chosen))(*args)).count("= dot_general") / heights

    assert products() == 1 and products(precision="high") == 3
    assert products(precision="highest") == products(precision=jax.lax.Precision.HIGHEST) == 6
    with jax.default_matmul_precision("float32"):
        assert products() == 6


def test_an_activation_that_does_not_lower_is_applied_after_the_kernel():
    """The kernel gives the sums, and XLA applies the activation to owned rows."""
    shapes = call("float32")[1]
    for activation in (jnp.arctan, jnp.tanh):
        text = compiled(CHIPS["v5e"], call("float32", activation=activation)[0], *shapes)
        assert kernels(text) == ["trencadis_rows"]
        assert plan(changed(epilogue=Epilogue(activation=activation)), V6E).peeled == ("arctan",) * (
            activation is jnp.arctan
        )


@pytest.mark.parametrize("axis", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_a_program_that_xla_partitions_takes_another_backend(axis):
    """A kernel cannot be split over devices by XLA; inside shard_map, as on explicit axes, every device has its own."""
    chip = CHIPS["v5e"]
    devices = topologies.get_topology_desc(platform="tpu", topology_name=chip.topology).devices
    mesh = jax.sharding.Mesh(np.array(devices), ("d",), axis_types=(axis,))
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shapes = call("float32")[1]
    fn = tr.grouped_matmul
    args = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=where) for shape, dtype in shapes]

    def text(fn):
        with jax.set_mesh(mesh):
            return jax.jit(fn).trace(*args).lower(lowering_platforms=("tpu",)).compile().as_text()

    if axis == jax.sharding.AxisType.Explicit:
        assert kernels(text(fn)) == ["trencadis_rows"]
    else:
        with pytest.warns(tr.PerformanceWarning, match="cannot partition a kernel over devices"):
            assert kernels(text(fn)) == []
    spec = jax.sharding.PartitionSpec()
    assert kernels(text(jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec))) == ["trencadis_rows"]
    answer = tpu.plan(ROWS, dataclasses.replace(V6E, partitioned=True), Overrides())
    assert "cannot partition" in answer.reason and "jax.shard_map" in answer.advice


def test_a_mesh_does_not_keep_an_activation_out_of_the_kernel():
    mesh = jax.sharding.AbstractMesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.sharding.use_abstract_mesh(mesh):
        assert refusal(ROWS.replace(epilogue=Epilogue(activation=jnp.cos)), V6E) is None


@pytest.mark.parametrize("name", ["v5e", "v6e"])
def test_a_plain_jit_is_planned_for_its_device(name, monkeypatch):
    """Without a mesh and without a context, the target is found from the client that compiles the call."""
    chip, seen = CHIPS[name], []
    monkeypatch.setattr(
        autodiff, "plan", lambda problem, target, overrides: seen.append(target) or plan(problem, target, overrides)
    )
    where = jax.sharding.SingleDeviceSharding(device(chip))
    args = [jax.ShapeDtypeStruct(shape, dtype, sharding=where) for shape, dtype in call("float32")[1]]
    jax.jit(lambda *xs: tr.grouped_matmul(*xs)).trace(*args).lower(lowering_platforms=("tpu",))
    assert seen == [Target(platform="tpu", kind=chip.kind)]


def test_weights_are_planned_in_the_order_in_which_tpus_store_them():
    """With an axis of whole lanes last; contractions exchange their operands, if no tile was asked for."""
    asked = problem_of((512, 256), (4, 256, 72), dtype="bfloat16")
    flipped = asked.replace(k=72, n=256, transpose_rhs=True)
    for problem, transposed in ((asked, True), (flipped, False), (asked.replace(n=200, k=72), False)):
        assert plan(problem, V6E).problem.transpose_rhs == transposed
    assert not plan(asked.replace(rhs=np.dtype("int8")), V6E).problem.transpose_rhs
    summed = problem_of((256, 512), (512, 72), groups=4, dtype="bfloat16").replace(transpose_lhs=False)
    found = plan(summed, V6E)
    assert (found.problem.k, found.problem.n, found.tiling.n) == (72, 256, 72)
    tile = Overrides(tilings=Tilings(forward=Tiling(128, 256, 128)))
    assert plan(summed, V6E, tile).problem.k == 256
