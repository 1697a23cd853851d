"""`why`: it prints what the plan and the traced derivatives are, and nothing of its own."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from trencadis import GroupedTensor, grouped_gemm, grouped_matmul, moe
from trencadis.backends import BACKENDS
from trencadis.core import devices
from trencadis.core.arguments import problem_of
from trencadis.core.cost import cost
from trencadis.core.plan import Plan, Refusal, answers, plan
from trencadis.core.problem import Form
from trencadis.core.target import Target
from trencadis.quant import quantize
from trencadis.why import why

pytestmark = pytest.mark.core


def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


SIZES = jax.ShapeDtypeStruct((4,), jnp.int32)


def test_rows():
    answer = why(struct(64, 8), struct(4, 8, 16), SIZES, target="cpu")
    forward, d_lhs, d_rhs = (each.problem for each in answer.passes)
    assert forward == answer.problem == problem_of((64, 8), (4, 8, 16), dtype=jnp.bfloat16, out=jnp.dtype(jnp.float32))
    assert (d_lhs.form, d_lhs.k, d_lhs.n, d_lhs.transpose_rhs) == (Form.ROWS, 16, 8, True)
    assert (d_rhs.form, d_rhs.k, d_rhs.n, d_rhs.out) == (Form.CONTRACTION, 8, 16, jnp.bfloat16)
    assert answer.cost == cost(answer.problem)


def test_contraction():
    answer = why(struct(8, 64), struct(64, 16), SIZES, target="cpu")
    assert answer.problem.form is Form.CONTRACTION and answer.problem.transpose_lhs
    assert [each.problem.form for each in answer.passes] == [Form.CONTRACTION, Form.ROWS, Form.ROWS]
    assert not why(struct(64, 8), struct(64, 16), SIZES, transpose_lhs=True, target="cpu").problem.transpose_lhs


@pytest.mark.parametrize("platform", devices.PLATFORMS)
def test_every_backend_answers_and_the_plans_are_the_plans(platform):
    answer = why(struct(64, 8), struct(4, 16, 8), SIZES, transpose_rhs=True, target=platform)
    target = Target(platform=platform)
    assert [each.backend for each in answer.backends] == list(BACKENDS)
    assert answer.backends == tuple(answers(answer.problem, target).values())
    for each in answer.backends:
        assert f"{each.backend:<10} {'yes' if isinstance(each, Plan) else 'no '}" in str(answer)
    for each in answer.passes:
        assert each.plan == plan(each.problem, target)
        assert str(each.plan) in str(answer)
    assert str(answer).count("<- chosen") == 1


@pytest.fixture
def backends():
    """The dictionary to play with; its entries and their order come back."""
    kept = dict(BACKENDS)
    yield BACKENDS
    BACKENDS.clear()
    BACKENDS.update(kept)


def test_text(backends):
    reference = backends["reference"]

    class Picky:
        @staticmethod
        def plan(problem, target, overrides):
            if problem.form is not Form.ROWS:
                return Refusal(backend="picky", reason="only rows")
            return dataclasses.replace(
                reference.plan(problem, target, overrides), backend="picky", because="it likes it"
            )

    class Never:
        @staticmethod
        def plan(problem, target, overrides):
            return Refusal(backend="never", reason=f"target is {target}")

    backends.clear()
    backends.update(never=Never, picky=Picky, reference=reference)
    assert str(why(struct(64, 8), struct(4, 8, 16), SIZES, target="cpu")).splitlines() == [
        "problem      rows m=64 k=8 n=16 g=4: bfloat16 x bfloat16 -> float32",
        "target       cpu",
        f"cost         {cost(problem_of((64, 8), (4, 8, 16), dtype=jnp.bfloat16, out=jnp.dtype(jnp.float32)))}",
        "backends",
        "  never      no   target is cpu",
        "  picky      yes  tile 64·8·16 <- chosen",
        "  reference  yes  tile 64·8·16",
        "passes",
        "  forward    rows m=64 k=8 n=16 g=4: bfloat16 x bfloat16 -> float32",
        "             picky, tile 64·8·16: it likes it",
        "  d lhs      rows m=64 k=16 n=8 g=4: float32 x bfloat16ᵀ -> bfloat16",
        "             picky, tile 64·16·8: it likes it",
        "  d rhs      contraction m=64 k=8 n=16 g=4: bfloat16 x float32 -> bfloat16",
        "             reference, tile 64·8·16: 4 full matmuls of all 64 rows, one for each group",
        "             not picky: only rows",
    ]


def test_known_sizes_count_only_the_rows_there():
    answer = why(jnp.ones((8, 4)), jnp.ones((3, 4, 2)), [2, 0, 0], target="cpu")
    assert answer.cost == cost(answer.problem, [2, 0, 0])
    window = why(jnp.ones((8, 4)), jnp.ones((1, 4, 2)), jnp.array([2, 6]), target="cpu", group_offset=1)
    assert window.cost == cost(window.problem, [6])


def test_backends_answer_for_the_part_of_k_that_is_planned():
    """A tiling is meant for all of k, so that parts of it are planned without one."""
    weights = quantize(jnp.ones((4, 64, 16)), "float8_e4m3fn", (1, 16, 1))
    forward = why(struct(64, 64), weights, SIZES, target="v6e", tiling=(32, 64, 16)).passes[0]
    assert forward.plan.split == 16 and forward.backends[0].tiling == forward.plan.tiling


def test_shardings_inside_of_a_function_count():
    """A program is for several devices as a whole, wherever it says so; XLA cannot partition a TPU kernel over them."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    split, whole = NamedSharding(mesh, P("d")), NamedSharding(mesh, P())

    def constrained(x, w, s):
        return grouped_matmul(jax.lax.with_sharding_constraint(x, split), w, s)

    def manual(x, w, s):
        inside = jax.shard_map(grouped_matmul, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        return grouped_matmul(x, w, s) + inside(x, w, s)

    args = struct(64, 128), struct(4, 128, 128), SIZES
    into = jax.jit(grouped_matmul, in_shardings=(split, whole, whole))
    out = jax.jit(grouped_matmul, out_shardings=split)
    for fn in (constrained, into, out):
        assert [each.plan.backend for each in why(fn, *args, target="v6e").passes] == ["xla"] * 3
        assert [each.plan.backend for each in why(fn, *args, target="h200").passes] == ["gpu"] * 3
    assert [each.plan.backend for each in why(manual, *args, target="v6e").passes[:2]] == ["xla", "tpu"]


def test_what_is_not_there_is_said():
    """No grouped product has no problem and no cost; a general grouped GEMM has no cost."""
    for read in (lambda answer: answer.problem, lambda answer: answer.cost):
        with pytest.raises(ValueError, match="why: there is no grouped product in this function"):
            read(why(jnp.sin, struct(2), target="cpu"))
    columns, rows = (
        GroupedTensor.ragged_cols(jnp.ones((4, 8)), [2, 6]),
        GroupedTensor.ragged_rows(jnp.ones((8, 4)), [5, 3]),
    )
    general = why(lambda a, b: grouped_gemm(a, b, contracting_dims=((1,), (0,))), rows, columns, target="cpu")
    with pytest.raises(ValueError, match=r"why: the cost of a general grouped GEMM is not known; got .*g=2"):
        _ = general.cost


def test_integers_that_are_known_stay_known():
    """Shapes may depend on them, in the call and so in its explanation."""
    rows = GroupedTensor.ragged_rows(jnp.ones((8, 4)), [5, 3])
    columns = GroupedTensor.ragged_cols(jnp.ones((4, 8)), [2, 6])
    assert why(lambda a, b: grouped_gemm(a, b, contracting_dims=((1,), (0,))), rows, columns, target="cpu").target

    def stored(x, w, sizes, transpose_rhs, group_offset):
        return grouped_matmul(x, w, sizes, transpose_rhs=transpose_rhs, group_offset=group_offset)

    answer = why(stored, struct(64, 8), struct(2, 16, 8), SIZES, np.True_, np.int32(1), target="cpu")
    assert answer.problem.transpose_rhs


def test_passes_without_a_derivative():
    mixed = why(struct(8, 4, dtype=jnp.int8), struct(4, 4, 2), SIZES, target="cpu")
    assert [each.problem is None for each in mixed.passes] == [False, True, False]
    assert "lhs is int8, which has no derivative" in str(mixed)
    rounded = why(struct(8, 4), struct(4, 4, 2), SIZES, jnp.int32, target="cpu")
    assert "the result is int32, which has no derivative" in str(rounded)


def test_targets():
    device = jax.devices()[0]
    assert devices.target_of(None) == devices.target_of(device) == Target.of(device)
    with jax.default_device(jax.devices("cpu")[0]):
        assert devices.target_of(None).platform == "cpu"
    assert devices.target_of(Target(platform="tpu", kind="TPU v5 lite")).kind == "TPU v5 lite"


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((struct(4, 4), struct(1, 1, 4, 4), SIZES), {}, "rhs: want 3 dimensions"),
        ((struct(4, 5), struct(4, 4, 4), SIZES), {}, "rhs: the second dimension must be k = 5"),
        ((struct(4, 4), None, SIZES), {}, "rhs: want an array; got NoneType"),
        ((struct(4, 4), struct(1, 4, 4), [9]), {}, "group_sizes: must sum to at most m = 4"),
        ((struct(4, 4), struct(4, 4, 4), SIZES), dict(transpose_lhs=True), "transpose_lhs: want rhs of rank 2"),
        ((struct(4, 4), struct(4, 4), SIZES), dict(transpose_rhs=True), "transpose_rhs: want rhs of rank 3"),
        (
            (struct(4, 4), struct(4, 4, 4), SIZES),
            dict(target="cup"),
            "target: want a Target, a device, or one of 'cpu'",
        ),
    ],
)
def test_bad_arguments_are_named(arguments, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        why(*arguments, **options)


def test_the_kernels_of_triton_are_no_copies():
    """Only what is made beside the product is one, such as the parts of float32."""
    plain = why(struct(512, 256), struct(4, 512, 256), SIZES, transpose_rhs=True, target="a100")
    assert [each.plan.backend for each in plain.passes] == ["triton"] * 3
    assert not any(copy for each in plain.passes[:1] for copy in each.copies)
    full = struct(512, 256, dtype=jnp.float32), struct(4, 256, 512, dtype=jnp.float32)
    (copy,) = why(*full, SIZES, target="a100", precision="highest").passes[0].copies
    assert copy == "split float32[512,256] -> bfloat16[3,512,256], 0.786 MB"


def test_a_faster_backend_is_named():
    first = why(struct(32, 256), struct(4, 512, 256), SIZES, transpose_rhs=True, target="h200").passes[0]
    assert first.plan.backend == "triton" and first.plan.because.endswith("; faster than gpu with so few rows")


def test_a_transposition_that_moves_nothing_is_no_copy():
    """XLA for TPUs stores weights with an axis of whole lanes last; one without such an axis is padded, and said."""
    for n in (352, 2048):
        x, w = jax.ShapeDtypeStruct((8192, 2048), jnp.bfloat16), jax.ShapeDtypeStruct((16, 2048, n), jnp.bfloat16)
        found = why(x, w, jax.ShapeDtypeStruct((16,), jnp.int32), target="v6e", preferred_element_type=jnp.bfloat16)
        assert [len(each.copies) for each in found.passes] == [0, 0, 0]
    *_, d_rhs = why(
        jax.ShapeDtypeStruct((8192, 2880), jnp.bfloat16), jax.ShapeDtypeStruct((16, 2880, 2880), jnp.bfloat16),
        jax.ShapeDtypeStruct((16,), jnp.int32), target="v6e", preferred_element_type=jnp.bfloat16,
    ).passes  # fmt: skip
    assert any(copy.startswith("slice") for copy in d_rhs.copies)


def test_products_that_no_kernel_gates_are_counted():
    """What is gathered before them, and what follows; a kernel of both says nothing of it."""

    def layer(x, routing, gate, up, down):
        return moe.moe_mlp(x, routing, gate, up, down)

    x, w = jax.ShapeDtypeStruct((512, 128), jnp.bfloat16), jax.ShapeDtypeStruct((8, 128, 256), jnp.bfloat16)
    routing = jax.eval_shape(lambda: moe.route(jnp.zeros((512, 8)), 2))
    passes = why(layer, x, routing, w, w, jax.ShapeDtypeStruct((8, 256, 128), jnp.bfloat16), target="a100").passes
    up, down, pullback, pair, one, both = (str(each.plan).partition(":")[0] for each in passes)
    assert re.fullmatch("triton, rows gathered before, two kernels, tile .*, then swiglu of gate and up.* in XLA", up)
    assert re.fullmatch("triton, tile [^,]*", down)
    assert re.fullmatch("triton, rows gathered before, tile .*, then pullback of swiglu in XLA", pullback)
    assert re.fullmatch("triton, rows gathered before, two kernels, tile [^,]*", pair)
    assert re.fullmatch("triton, rows gathered before, tile [^,]*", one)
    assert re.fullmatch("triton, two kernels, tile .*, then their sum in XLA", both)
    fused, *_ = why(layer, x, routing, w, w, jax.ShapeDtypeStruct((8, 256, 128), jnp.bfloat16), target="h200").passes
    assert str(fused.plan).startswith("gpu, tile") and "XLA" not in str(fused.plan)
