"""The TPU kernels of the general form: values in the interpreter, what they compile to, and what the plan says."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax._src.pallas.mosaic.interpret import race_detection_state
from jax.experimental.pallas import tpu as pltpu
from sweep import sweep

import trencadis as tr
from tests.backends.tpu.ahead import compiled, kernels
from tests.gemm.drawn import KINDS, check_values, drawn, flat_problem, whole_strides
from trencadis import GroupedTensor, PerformanceWarning
from trencadis.backends.tpu.ragged.multiply import Parts
from trencadis.core.decision import Plan, Refusal
from trencadis.core.devices import CHIPS, target_of
from trencadis.core.target import Target
from trencadis.gemm import plan as planning
from trencadis.gemm import tpu
from trencadis.gemm.problem import Groups

pytestmark = pytest.mark.core

STRICT = pltpu.InterpretParams(uninitialized_memory="nan", out_of_bounds_reads="raise")
SMALL = tpu.GemmLayout(
    parts=Parts(granule=128, tile_m=1, tile_n=1, m=(1,), n=(1,), k=(1,)), longest=300, window=16384
)  # a tile of one block: several tiles and steps in a group
# a group of two row blocks and two steps along k, empty ones, a sum of no terms, and one whose rows are too long
M, K, N = [2, 0, 130, 4, 1], [129, 3, 2, 0, 1], [1, 2, 3, 5, 301]
ROOMS = 777, 700, 1100


@pytest.mark.sweep
@pytest.mark.parametrize(("dtype", "transposes", "epilogue"), KINDS)
def test_values_are_those_of_a_loop(dtype, transposes, epilogue, rng):
    """Nothing leaks: unowned entries are NaN, and uninitialized memory is too; rows that are too long go to XLA."""
    problem, operands, want = drawn(rng, (M, K, N), ROOMS, dtype, transposes, **epilogue)
    execute = functools.partial(tpu.execute, problem, SMALL, interpret=STRICT)
    check_values(problem, execute, operands, want, dtype, transposes)


@pytest.mark.sweep
def test_there_is_no_race(rng, monkeypatch):
    whole_strides(monkeypatch, race_detection_state)
    problem, operands, _ = drawn(rng, (M, K, N), ROOMS, "bfloat16", (False,) * 3)
    strict = dataclasses.replace(STRICT, detect_races=True)
    jax.block_until_ready(jax.jit(lambda *x: tpu.execute(problem, SMALL, *x, interpret=strict))(*operands))
    assert not interpreter.races.races_found


# ---------------------------------------------------------------------------------------------------------------------
# The plan


V6E = target_of("v6e")


@pytest.mark.parametrize(
    ("problem", "target", "reason"),
    [
        (flat_problem([9] * 3), Target(platform="cpu", kind="cpu"), "the tpu backend runs on TPU"),
        (flat_problem([9] * 3), dataclasses.replace(V6E, partitioned=True), "partition"),
        (flat_problem([9] * 3, "int16"), V6E, "lhs is int16"),
        (flat_problem([9] * 3, "float32", precision=jax.lax.Precision.HIGH), V6E, "precision is"),
        (flat_problem([9] * 9000), V6E, "9000 groups are too many"),
        (flat_problem([45000]), V6E, "2025000000 entries"),
        (flat_problem([0] * 3), V6E, "nothing to multiply"),
    ],
)
def test_refusals(problem, target, reason):
    answer = planning.answers(problem, target)["tpu"]
    assert isinstance(answer, Refusal) and re.search(reason, answer.reason)
    assert planning.plan(problem, target).backend == "xla"


@pytest.mark.parametrize("chip", CHIPS)
def test_the_layout_fits_into_vmem(chip):
    for dtype, size in (("bfloat16", 2304), ("float32", 2304), ("bfloat16", 40)):
        problem = flat_problem([size] * 32, dtype)
        answer = tpu.plan(problem, target_of(chip))
        assert isinstance(answer, Plan) and answer.layout.parts.granule == (256 if size > 40 else 128)
        scratch = tpu.multiplier(problem, answer.layout, tpu.room_for(problem.out, 32, answer.layout)).scratch()
        held = sum(np.prod(x.shape) * 4 for x in scratch.values() if getattr(x, "memory_space", None) == pltpu.VMEM)
        assert held <= 0.8 * CHIPS[chip].vmem


def test_groups_that_do_not_fit_are_left_to_loops():
    """A column of many rows would take 128 times its entries; the others are computed by the kernel."""
    problem = flat_problem([40] * 3)
    groups = Groups(*(jnp.asarray(x, jnp.int32) for x in ([0, 9, 4000], [0, 9, 18], [0, 9, 18],
                                                          [3, 3990, 20], [3, 1, 20], [3, 1, 20])))  # fmt: skip
    found = tpu.tables(problem, tpu.layout_for(problem, CHIPS["v6e"]), groups)
    assert found.left.tolist() == [False, True, False]
    assert found.products[:3].tolist() == [[1, 0, 1]] * 3


def call(x, m, k, n, **options):
    lhs, rhs, out = (GroupedTensor.fully_ragged(x, *pair) for pair in ((m, k), (k, n), (m, n)))
    return tr.grouped_gemm(lhs, rhs, contracting_dims=((1,), (0,)), out=out, **options).data


@pytest.mark.once
@pytest.mark.parametrize("chip", sweep(["v5e", "v5p", "v6e", "v7x"], ["v6e"]))
def test_compiles_to_kernels_and_a_condition(chip):
    """One kernel; behind a condition two copies to blocks, products, and results; then loops. There is no warning."""
    sizes = ((3,), "int32")
    text = compiled(CHIPS[chip], call, ((3000,), "bfloat16"), sizes, sizes, sizes)
    assert sorted(kernels(text)) == ["trencadis_align"] * 2 + [
        "trencadis_collect", "trencadis_ragged", "trencadis_resident"
    ]  # fmt: skip
    assert "conditional" in text


def test_it_warns_where_there_is_no_kernel():
    struct = jax.ShapeDtypeStruct((99,), jnp.int16), *[jax.ShapeDtypeStruct((2,), jnp.int32)] * 3
    with tr.target("v6e"), pytest.warns(PerformanceWarning, match="XLA loops instead of a kernel: lhs is int16"):
        jax.jit(call).trace(*struct).lower(lowering_platforms=("tpu",))


def test_why_shows_the_kernels():
    struct = jax.ShapeDtypeStruct((9999,), jnp.bfloat16), *[jax.ShapeDtypeStruct((4,), jnp.int32)] * 3
    text = str(tr.why(call, *struct, target="v6e"))
    assert text.count("for groups whose rhs fits into VMEM; for others") == 3
    assert "not triton: the triton backend runs on GPUs" in text
