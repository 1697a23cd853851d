"""The chooser obeys, or says every reason why not."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import trencadis as tr
from trencadis import backends
from trencadis.core.arguments import problem_of
from trencadis.core.devices import target_of
from trencadis.core.epilogue import Epilogue
from trencadis.core.plan import Plan, Refusal, answers, plan
from trencadis.core.target import Target
from trencadis.core.tiling import Overrides, Tiling, resolve

pytestmark = pytest.mark.core

PROBLEM = problem_of((16, 4), (2, 4, 8))
CPU = Target(platform="cpu")


@pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm", "tpu", "other"])
def test_some_backend_runs_everywhere(platform):
    assert plan(PROBLEM, Target(platform=platform)).backend == ("tpu" if platform == "tpu" else "xla")
    wide = PROBLEM.replace(lhs=np.dtype("complex64"), out=np.dtype("complex64"))
    assert plan(wide, Target(platform=platform)).backend == "xla"


def test_a_kernel_is_interpreted_as_it_is_on_its_own_target():
    chosen = plan(PROBLEM, CPU, Overrides(backend="tpu", interpret=True))
    assert (chosen.backend, chosen.target, chosen.interpret) == ("tpu", Target(platform="tpu"), True)
    said = (
        r"'tpu' cannot run .* on cpu \(tpu: the tpu backend runs on TPU; the target is cpu; "
        r"gpu: the gpu backend runs on NVIDIA GPUs; the target is cpu; "
        r"triton: the triton backend runs on GPUs; the target is cpu; cpu: .*; xla: "
    )
    with pytest.raises(ValueError, match=said):
        plan(PROBLEM, CPU, Overrides(backend="tpu"))


def test_a_gpu_kernel_is_interpreted_as_on_the_card_that_it_is_measured_on():
    chosen = plan(PROBLEM, CPU, Overrides(backend="gpu", interpret=True))
    want = ("gpu", Target(platform="cuda", kind="NVIDIA H200"), True)
    assert (chosen.backend, chosen.target, chosen.interpret) == want
    with pytest.raises(ValueError, match=r"'gpu' cannot run .* on cpu \(.*gpu: the gpu backend runs on NVIDIA GPUs"):
        plan(PROBLEM, CPU, Overrides(backend="gpu"))


def test_overrides_are_obeyed():
    assert plan(PROBLEM, CPU, Overrides(backend="reference")).backend == "reference"
    assert plan(PROBLEM, CPU, Overrides(interpret=True)).backend == "reference"
    chosen = plan(PROBLEM, CPU, Overrides(tilings=resolve((8, 4, 2), 16, 4, 8)))
    assert (chosen.tiling, chosen.backend) == (Tiling(8, 4, 2), "xla")
    assert "asked for" in str(chosen)


def test_a_refusal_carries_every_reason(monkeypatch):
    sunday = Refusal(backend="reference", reason="it is Sunday")
    monkeypatch.setattr(backends.reference, "plan", lambda problem, target, overrides: sunday)
    tpu = "the tpu backend runs on TPU; the target is cpu"
    gpu = "the gpu backend runs on NVIDIA GPUs; the target is cpu"
    triton = "the triton backend runs on GPUs; the target is cpu"
    said = answers(PROBLEM, CPU)
    assert list(said) == list(backends.BACKENDS) and isinstance(said.pop("xla"), Plan)
    del said["cpu"]  # its package is there, or not
    want = {"tpu": tpu, "gpu": gpu, "triton": triton, "reference": "it is Sunday"}
    assert {name: each.reason for name, each in said.items()} == want
    said = rf"cannot run rows .* on cpu \(tpu: {tpu}; gpu: {gpu}; triton: {triton}; cpu: .*; xla: supports it; "
    said += "reference: it is Sunday"
    with pytest.raises(ValueError, match=said):
        plan(PROBLEM, CPU, Overrides(backend="reference"))


H200, V6E = Target(platform="cuda", kind="NVIDIA H200"), Target(platform="tpu", kind="TPU v6 lite")
BLOCKS = Epilogue(by_row=True, by_column=True, row_block=128, column_block=(128, 128))


def test_a_product_is_split_where_no_backend_takes_its_scales():
    """Splitting is an outcome of the plan: whole on a Hopper GPU with 8-bit operands, in parts of k elsewhere."""
    eight = problem_of((256, 512), (4, 512, 256), dtype="int8", out=np.dtype("float32"), epilogue=BLOCKS)
    assert (plan(eight, H200).backend, plan(eight, H200).split) == ("gpu", 0)
    assert (plan(eight, V6E).backend, plan(eight, V6E).split) == ("tpu", 128)
    assert (plan(eight, CPU).backend, plan(eight, CPU).split) == ("xla", 128)
    weights = Epilogue(by_column=True, column_block=(24, 1))
    by_column = problem_of((256, 512), (4, 512, 256), dtype="bfloat16", epilogue=weights).replace(rhs=np.dtype("int8"))
    chosen = plan(by_column, H200)
    assert (chosen.backend, chosen.split, chosen.problem.k, chosen.asked.k) == ("gpu", 24, 24, 512)
    assert "split along k into parts of 24" in str(chosen)
    weights = Epilogue(by_column=True, column_block=(32, 1))
    assert (plan(by_column.replace(epilogue=weights), H200).backend, plan(by_column, V6E).split) == ("gpu", 24)


@pytest.mark.parametrize("card", ["a100", "h200", "b200", "mi300x"])
@pytest.mark.parametrize("rows", ["bfloat16", "float32"])
def test_the_gradient_of_rows_beside_int4_weights_runs_kernels(card, rows):
    """Its scales change with each entry of k: the weights are multiplied by them, and there is one kernel."""
    weights = Epilogue(by_column=True, column_block=(1, 128))
    asked = problem_of((256, 512), (4, 512, 256), dtype=rows, epilogue=weights).replace(rhs=np.dtype("int4"))
    chosen = plan(asked, target_of(card))
    assert chosen.backend in backends.KERNELS[chosen.target.platform]
    assert chosen.split == chosen.problem.k == asked.k and not chosen.problem.epilogue


@pytest.mark.parametrize("target", ["a100", "v6e"])
def test_a_layout_is_that_of_the_precision_which_is_set(target):
    """`jax.default_matmul_precision` is no part of a problem, which layouts are remembered by."""
    asked = problem_of((4096, 1024), (8, 1024, 1032))
    if target == "v6e":  # whose weights the kernel may round to bfloat16, times their scales, by default alone
        asked = asked.replace(rhs=np.dtype("int8"), epilogue=Epilogue(by_column=True, column_block=(128, 1)))
    found = []
    for precision in ("highest", "default"):
        with jax.default_matmul_precision(precision):
            found.append(plan(asked, target_of(target)).layout)
    explicit = (plan(asked.replace(precision=each), target_of(target)).layout for each in ("highest", "default"))
    assert found == list(explicit) and found[0] != found[1]


@pytest.mark.parametrize("backend", ["tpu", "gpu", "triton"])
def test_int4_operands_that_kernels_do_not_unpack(backend):
    """Weights beside float32 rows on GPUs, and rows that are summed. Sums of integers are exact."""
    rng = np.random.default_rng(0)
    x, w, y = (rng.integers(-8, 8, shape) for shape in ((16, 64), (2, 64, 32), (16, 32)))
    how = {"backend": backend, "interpret": True}
    sizes, small = np.array([5, 9]), lambda x: jnp.asarray(x, jnp.int4)
    if backend != "tpu":
        got = tr.grouped_matmul(x.astype(np.float32), small(w), sizes, **how)
        np.testing.assert_array_equal(got, oracle.rows(x, w, sizes))
    if backend != "gpu":
        got = tr.transposed_grouped_matmul(small(x.T), jnp.asarray(y, jnp.bfloat16), sizes, **how)
        np.testing.assert_array_equal(got, oracle.contraction(x, y, sizes))


def test_what_a_kernel_does_not_fuse_is_peeled_off():
    asked = problem_of((256, 128), (4, 128, 128), dtype="bfloat16")
    odd = asked.replace(epilogue=Epilogue(bias=np.dtype("float32"), activation=jnp.arctan))
    for target, name in ((H200, "gpu"), (V6E, "tpu")):
        chosen = plan(odd, target)
        assert (chosen.backend, chosen.peeled) == (name, ("arctan",))
        assert (chosen.problem.out, chosen.problem.epilogue) == (np.float32, Epilogue(bias=np.dtype("float32")))
        assert plan(asked.replace(epilogue=Epilogue(activation=jnp.tanh)), target).peeled == ()
    eight = asked.replace(lhs=np.dtype("int8"), rhs=np.dtype("int8"), k=512)
    steps = dataclasses.replace(BLOCKS, bias=np.dtype("float32"), accumulate=True)
    assert plan(eight.replace(epilogue=steps), H200).peeled == ()  # scales along k are no reason


def test_an_activation_may_have_the_name_of_another_step():
    def bias(z):
        return jnp.arctan(z)

    asked = problem_of((256, 128), (4, 128, 128), dtype="bfloat16")
    odd = asked.replace(epilogue=Epilogue(bias=np.dtype("float32"), activation=bias))
    assert plan(odd, V6E).peeled == ("bias",)  # the activation, and not nothing


def test_the_reason_has_figures():
    big = problem_of((8192, 4096), (8, 4096, 14336), dtype="bfloat16")
    assert re.match(r"\d+ x \d+ (swap-AB )?tiles, \d+\.\d\d waves of 132 SMs, \d stages", plan(big, H200).because)
    assert re.match(r"[\d.]+ ms predicted for a v6e, row tiles of [\d, ]+, [\d.]+ of 128 MiB", plan(big, V6E).because)
    assert "row tiles of 16 to 256 rows" in plan(big.replace(lhs=np.dtype("float32")), CPU).because
