"""The backend refuses a problem or a target with a sentence, and another backend takes over."""

import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trencadis as tr
from trencadis import backends
from trencadis.backends import gpu
from trencadis.backends.gpu.choose import choose
from trencadis.core.arguments import problem_of
from trencadis.core.decision import Plan, Refusal
from trencadis.core.devices import card_for
from trencadis.core.epilogue import Epilogue, Gate
from trencadis.core.plan import gated_answers, plan
from trencadis.core.target import Target
from trencadis.core.tiling import Overrides
from trencadis.moe import swiglu
from trencadis.why import why

from .ahead import kernels, largest_result, lowered


def refusal(problem, target):
    """The reason why the backend refuses a problem; None if it has a plan."""
    answer = gpu.plan(problem, target, Overrides())
    return answer.reason if isinstance(answer, Refusal) else None


pytestmark = pytest.mark.core

ROWS = problem_of((256, 128), (4, 128, 128))
SUM = problem_of((128, 256), (256, 128), groups=4)
HALF = problem_of((256, 128), (4, 128, 128), dtype="bfloat16")
H200 = Target(platform="cuda", kind="NVIDIA H200")
TAKES = "kernels take bfloat16, float16, float32"


def but(problem=ROWS, **changes):
    return problem.replace(**{k: np.dtype(v) if k in ("lhs", "rhs", "out") else v for k, v in changes.items()})


def cuda(kind):
    return Target(platform="cuda", kind=kind)


@pytest.mark.parametrize(
    ("problem", "target", "reason"),
    [
        (ROWS, Target(platform="cpu", kind="cpu"), "the gpu backend runs on NVIDIA GPUs; the target is cpu"),
        (
            ROWS,
            Target(platform="tpu", kind="TPU v6 lite"),
            r"the gpu backend runs on NVIDIA GPUs; the target is tpu \(TPU v6 lite\)",
        ),
        (ROWS, Target(platform="rocm", kind="MI300X"), r"on NVIDIA GPUs; the target is rocm \(MI300X\)"),
        (
            ROWS,
            cuda(None),
            "kernels of the gpu backend are for Hopper GPUs, and which GPU this is for is not known here",
        ),
        (ROWS, cuda("NVIDIA A100-SXM4-80GB"), r"for Hopper GPUs; the target is cuda \(NVIDIA A100-SXM4-80GB\)"),
        (
            ROWS,
            cuda("NVIDIA B200"),
            r"kernels of the gpu backend are for Hopper GPUs; the target is cuda \(NVIDIA B200\)",
        ),
        (ROWS, dataclasses.replace(H200, partitioned=True), "XLA cannot partition a kernel over devices"),
        (but(lhs="int16", rhs="int8"), H200, f"lhs is int16; {TAKES}"),
        (but(rhs="float64"), H200, f"rhs is float64; {TAKES}"),
        (but(lhs=jnp.float8_e4m3b11fnuz), H200, f"lhs is float8_e4m3b11fnuz; {TAKES}"),
        (but(out="int32"), H200, f"the result is int32; {TAKES}"),
        (but(epilogue=Epilogue(bias=np.dtype("int32"))), H200, f"bias is int32; {TAKES}"),
        (but(precision="highest"), H200, "precision is highest; the gpu backend multiplies float32 as tf32"),
        (but(precision=jax.lax.Precision.HIGH), H200, "precision is HIGH; the gpu backend multiplies float32 as tf32"),
        (but(precision=("highest", "default")), H200, r"precision is \('highest', 'default'\); the gpu backend"),
        (but(SUM, precision="highest"), H200, "precision is highest; the gpu backend multiplies float32 as tf32"),
        (
            but(HALF, rhs="float32", precision="highest"),
            H200,
            "precision is highest; the gpu backend multiplies float32 as a bf16 hi/lo split",
        ),
        (but(m=0), H200, "there is nothing to multiply"),
        (but(k=0), H200, "there is nothing to multiply"),
        (but(n=0), H200, "there is nothing to multiply"),
        (but(local_groups=0), H200, "there is nothing to multiply"),
        (but(groups=0, local_groups=0), H200, "there is nothing to multiply"),
        (but(SUM, local_groups=0), H200, "there is nothing to multiply"),
        (but(SUM, m=0), H200, "there is nothing to multiply"),
    ],
)
def test_reasons(problem, target, reason):
    assert re.fullmatch(f".*{reason}.*", refusal(problem, target))
    assert plan(problem, target).backend != "gpu"


def test_scales_along_k_are_for_operands_of_8_or_16_bits():
    blocks = Epilogue(by_row=True, by_column=True, row_block=128, column_block=(128, 128))
    assert re.match("scales change along k every 128; .* no float32", refusal(but(epilogue=blocks), H200) or "")
    assert refusal(but(lhs="int8", rhs="int8", epilogue=blocks), H200) is None
    rows = Epilogue(by_row=True, row_block=32)
    assert re.match("scales change along k every 32", refusal(but(lhs="int8", rhs="bfloat16", epilogue=rows), H200))


def test_too_many_tiles_to_count():
    for problem in (but(m=2**31 - 1, n=2**20), but(SUM, k=2**22, n=2**22)):
        assert re.fullmatch(r"\d+ tiles are too many to count in 32 bits", refusal(problem, H200) or "")
    for problem in (but(m=2**20, n=2**15), but(SUM, m=2**20, k=2**15, n=2**15)):
        assert refusal(problem, H200) is None


@pytest.mark.parametrize("kind", ["NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA GH200 480GB"])
def test_takes_what_it_takes(kind):
    for problem in (ROWS, SUM, HALF, but(HALF, rhs="float32"), but(lhs="float16", rhs="float16", out="float16")):
        assert refusal(problem, cuda(kind)) is None
        assert plan(problem, cuda(kind)).backend == "gpu"


def test_few_rows_are_tritons():
    """Of weights stored K-major, and in contractions; not where the caller asks for this backend, or Triton refuses."""
    k_major = but(problem_of((64, 128), (4, 128, 128), dtype="bfloat16"), transpose_rhs=True)
    summed = problem_of((128, 32), (32, 128), groups=4, dtype="bfloat16")
    for few in (k_major, summed):
        assert gpu.plan(few, H200, Overrides()).faster[0] == "triton" == plan(few, H200).backend
        assert plan(few, H200, Overrides(backend="gpu")).backend == "gpu"
        assert plan(few.replace(m=17 * 4), H200).backend == "gpu"
    assert plan(but(k_major, transpose_rhs=False), H200).backend == "gpu"
    assert plan(but(k_major, lhs="float32", rhs="float32"), H200).backend == "gpu"


def test_contractions_of_high_precision_are_three_products_and_those_of_the_highest_are_tritons():
    for precision, backend in (("high", "gpu"), ("highest", "triton"), ("tensorfloat32", "gpu"), (None, "gpu")):
        asked = problem_of((256, 4096), (4096, 128), groups=8).replace(precision=precision)
        assert plan(asked, H200).backend == backend
        assert len(choose(asked, card_for(H200)).products) == (3 if precision == "high" else 1)
    assert plan(asked.replace(precision="high", m=64), H200).backend == "triton"


def test_thin_contractions_of_small_groups_are_tritons():
    """Such as the gradient of a bias: they read rhs and multiply next to nothing."""
    thin = problem_of((1, 512), (512, 256), groups=4, dtype="bfloat16")
    assert plan(thin, H200).backend == "triton" == plan(thin.replace(k=16, m=512 * 4), H200).backend
    assert plan(thin.replace(k=17), H200).backend == "gpu" == plan(thin.replace(m=513 * 4), H200).backend


@pytest.mark.parametrize(
    ("form", "n", "k", "backend"),
    [("rows", 360, 512, "triton"), ("rows", 512, 360, "gpu"), ("rows", 354, 512, "gpu"), ("rows", 1, 512, "gpu"),
     ("contraction", 360, 512, "triton"), ("contraction", 512, 360, "gpu")],
)  # fmt: skip
def test_what_would_copy_weights_or_the_result_is_tritons(form, n, k, backend):
    """To align them to 64 columns, where rows are whole multiples of 16 bytes; a copy of lhs alone costs less."""
    m, g = 4096, 8
    asked = problem_of((m, k), (g, k, n), dtype="bfloat16", out=np.dtype(jnp.bfloat16))
    if form == "contraction":
        asked = problem_of((k, m), (m, n), groups=g, dtype="bfloat16", out=np.dtype(jnp.bfloat16))
    chosen = plan(asked, H200)
    assert chosen.backend == backend and ("no multiple of 64" in chosen.because) == (backend == "triton")
    assert plan(but(asked, lhs="float32", rhs="float32"), H200).backend == "gpu"
    if form == "rows":  # K-major weights have whole rows of k, and any n
        flipped = plan(but(asked, transpose_rhs=True, out="float32"), H200)
        assert flipped.backend == ("gpu" if n % 64 == k % 64 == 0 or n % 8 or k % 8 else "triton")


def test_large_weights_that_are_copied_are_said_aloud():
    """Rows that start at no multiples of 16 bytes are slow to read for every kernel."""
    asked = problem_of((4096, 2049), (8, 2049, 1531), dtype="bfloat16", out=np.dtype(jnp.bfloat16))
    chosen = plan(asked, H200)
    assert chosen.slow == "k = 2049 or n = 1531 is no multiple of 64: weights are copied before each product"
    assert not plan(asked.replace(k=2048, n=1536), H200).slow and not plan(asked.replace(n=15), H200).slow
    assert not plan(asked.replace(k=2056, n=1528), H200).slow  # Triton's


@pytest.mark.parametrize(("f", "fused"), [(352, False), (96, True), (384, True)])
def test_gated_activations_copy_few_weights(f, fused):
    """A kernel of both products, which has to align weights, or two products that do not."""
    rows, d, e = 32768, 2048, 64
    gate = Gate(activation=swiglu())
    asked = problem_of((rows, d), (e, d, f), dtype="bfloat16", out=np.dtype(jnp.bfloat16)).replace(gate=gate)
    answer = gated_answers(asked, H200, Overrides())["gpu"]
    assert isinstance(answer, Plan) == fused and (fused or "would be copied" in answer.reason)


def test_without_triton_few_rows_are_its_own(monkeypatch):
    monkeypatch.setitem(backends.BACKENDS, "triton", types.SimpleNamespace(plan=lambda *_: Refusal("triton", "no")))
    summed = problem_of((128, 32), (32, 128), groups=4, dtype="bfloat16")
    assert plan(summed, H200).backend == "gpu"


@pytest.mark.parametrize("precision", [None, "default", "tensorfloat32", jax.lax.DotAlgorithmPreset.TF32_TF32_F32])
def test_float32_is_tf32(precision):
    assert refusal(but(precision=precision), H200) is None


def test_narrow_operands_have_one_precision():
    """Every precision is accepted: products of 16-bit operands are exact in float32."""
    for precision in ("highest", "high", jax.lax.Precision.HIGHEST, jax.lax.DotAlgorithmPreset.BF16_BF16_F32):
        assert refusal(but(HALF, precision=precision), H200) is None
    with jax.default_matmul_precision("highest"):
        assert refusal(HALF, H200) is None
        assert refusal(ROWS, H200) == "precision is highest; the gpu backend multiplies float32 as tf32"
        assert refusal(but(precision="default"), H200) is None


@pytest.mark.parametrize("activation", [jax.nn.relu, jax.nn.silu, jax.nn.gelu, jnp.tanh, lambda z: 2 * z + 1])
def test_activations_that_a_kernel_applies(activation):
    assert refusal(but(HALF, epilogue=Epilogue(activation=activation)), H200) is None
    assert gpu._lowers(activation, np.dtype("float32"))


@pytest.mark.parametrize("axis", ["Auto", "Manual", "Explicit"])
def test_a_mesh_is_no_reason_against_an_activation(axis):
    mesh = jax.sharding.AbstractMesh((2,), ("x",), axis_types=(getattr(jax.sharding.AxisType, axis),))
    with jax.sharding.use_abstract_mesh(mesh):
        assert gpu._lowers.__wrapped__(jnp.tanh, np.dtype("float32"))


def test_an_activation_that_does_not_lower_is_applied_after_the_kernel():
    shapes = [((256, 128), "float16"), ((4, 128, 128), "float16"), ((4,), "int32")]

    def text(activation):
        return lowered(lambda *xs: tr.grouped_matmul(*xs, activation=activation, backend="gpu"), *shapes)

    after, within = text(jnp.arctan), text(jnp.tanh)
    assert kernels(after) == kernels(within) == 1
    assert "chlo.atan" in after or "stablehlo.atan2" in after
    assert largest_result(after)[0] >= 256 * 128 > 16 >= largest_result(within)[0]


def test_there_is_a_cta_for_every_sm():
    for cores in (132, 114, 78):
        assert choose(ROWS, card_for(dataclasses.replace(H200, cores=cores))).num_ctas == cores
    assert choose(ROWS, card_for(H200)).num_ctas == 132


def struct(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


ASKED = struct(4096, 1024), struct(8, 1024, 2048), struct(8, dtype="int32")


def test_why_names_it_in_all_passes():
    answer = why(*ASKED, target=H200)
    assert [each.plan.backend for each in answer.passes] == ["gpu"] * 3
    assert "target       cuda (NVIDIA H200)" in str(answer)
    summed = why(struct(4096, 1024), struct(4096, 2048), ASKED[2], transpose_lhs=True, target=H200)
    assert [each.plan.backend for each in summed.passes] == ["gpu"] * 3


@pytest.mark.parametrize("kind", ["NVIDIA A100-SXM4-80GB", "NVIDIA B200", "NVIDIA GeForce RTX 4090"])
def test_other_gpus_are_left_to_triton_and_why_says_why(kind, monkeypatch):
    monkeypatch.setattr(backends.triton, "_missing", lambda: None)
    answer = why(*ASKED, target=cuda(kind))
    assert [each.plan.backend for each in answer.passes] == ["triton"] * 3
    (reason,) = (each.reason for each in answer.backends if each.backend == "gpu")
    assert reason == f"kernels of the gpu backend are for Hopper GPUs; the target is cuda ({kind})"
    assert reason in str(answer)
