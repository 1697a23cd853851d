"""Which products the Triton backend takes, on which GPUs, and what it says of the others."""

import re
import sys

import jax
import numpy as np
import pytest
from jax import lax
from poisoned import rows_problem, sum_problem

from trencadis.backends import triton
from trencadis.backends.triton.choose import (
    candidates,
    choose,
    choose_for_tile,
    estimated_time,
    shared_memory,
    tiling_of,
)
from trencadis.core.decision import Plan, Refusal, missing
from trencadis.core.devices import CARDS, target_of
from trencadis.core.epilogue import Epilogue
from trencadis.core.plan import plan
from trencadis.core.target import Target
from trencadis.core.tiling import Overrides, Tiling

ROWS = rows_problem(4096, 1024, 1024, 8, "bf16 bf16 bf16")
SUM = sum_problem(4096, 1024, 1024, 8, "bf16 bf16 bf16")
A100 = Target(platform="cuda", kind="NVIDIA A100-SXM4-80GB")


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """Planning needs no Triton."""
    monkeypatch.setattr(triton, "_missing", lambda: None)


@pytest.mark.parametrize("name", CARDS)
def test_every_card_has_a_kernel(name):
    hopper = CARDS[name].hopper
    assert plan(ROWS, target_of(name)).backend == ("gpu" if hopper else "triton")
    assert plan(SUM, target_of(name)).backend == ("gpu" if hopper else "triton")
    highest = rows_problem(4096, 1024, 1024, 8, precision="highest")
    assert plan(highest, target_of(name)).backend == "triton"


@pytest.mark.parametrize(
    ("problem", "target", "reason"),
    [
        (ROWS, Target(platform="cpu", kind="cpu"), "the triton backend runs on GPUs; the target is cpu"),
        (ROWS, Target(platform="cuda"), "which GPU this is for is not known here"),
        (ROWS, Target(platform="cuda", kind="NVIDIA X1"), "knows neither .* nor its compute capability"),
        (ROWS, Target(platform="cuda", kind="Tesla T4", arch="7.5"), "since Ampere"),
        (ROWS, Target(platform="cuda", kind="NVIDIA A10", partitioned=True), "cannot partition"),
        (rows_problem(64, 64, 64, 2).replace(lhs=np.dtype("float64")), A100, "lhs is float64; kernels take bfloat16"),
        (rows_problem(64, 64, 64, 2, epilogue=Epilogue(by_row=True, row_block=32)), A100, "scales change along k"),
        (rows_problem(64, 64, 64, 2, precision=lax.DotAlgorithmPreset.BF16_BF16_F32), A100, "precision is"),
        (rows_problem(64, 64, 64, 2).replace(m=0), A100, "nothing to multiply"),
    ],
)  # fmt: skip
def test_refusals(problem, target, reason):
    answer = triton.plan(problem, target, Overrides())
    assert isinstance(answer, Refusal)
    assert re.search(reason, answer.reason)


CONVERTED = {  # operands that products of a card do not read, and what they are in the kernel
    "rows of float8": (ROWS, "float8_e4m3fn float8_e4m3fn", "bfloat16 float8_e4m3fn"),
    "weights of float8": (ROWS, "float32 float8_e5m2", "float32 bfloat16"),
    "a sum of float8": (SUM, "float8_e4m3fn bfloat16", "bfloat16 bfloat16"),
    "rows of int4": (ROWS, "int4 int8", "int8 int8"),
    "weights of int4, as they lie": (ROWS, "bfloat16 int4", "bfloat16 int8"),
    "weights of int4, unpacked": (ROWS.replace(transpose_rhs=True), "int4 int4", "bfloat16 int4"),
    "a sum of int4": (SUM, "int4 float32", "int8 float32"),
}


@pytest.mark.parametrize("card", ["a100", "mi300x"])
@pytest.mark.parametrize("name", CONVERTED)
def test_operands_that_a_card_does_not_multiply_are_converted(name, card):
    problem, given, want = CONVERTED[name]
    lhs, rhs = map(np.dtype, given.split())
    chosen = plan(problem.replace(lhs=lhs, rhs=rhs), target_of(card))
    assert (chosen.backend, f"{chosen.problem.lhs} {chosen.problem.rhs}") == ("triton", want)
    assert ("become int8" in chosen.slow) == ("lie" in name)


def test_an_unknown_card_is_taken_by_its_compute_capability():
    for arch, want in (("8.6", "8.6"), ("8.7", "8.7"), ("12.1", "12.1")):
        answer = triton.plan(ROWS, Target(platform="cuda", kind="NVIDIA New", cores=50, arch=arch), Overrides())
        assert isinstance(answer, Plan) and "50 SMs" in answer.because
        assert triton.card_for(answer.target).arch == want
    card = triton.card_for(Target(platform="rocm", kind="AMD New", arch="gfx942:sramecc+:xnack-"))
    assert (card.cores, card.units) == (304, "CUs")


def test_without_triton_it_says_what_to_install(monkeypatch):
    monkeypatch.undo()
    missing.cache_clear()
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "trencadis.backends.triton.bridge", raising=False)
    answer = triton.plan(ROWS, A100, Overrides())
    missing.cache_clear()
    assert isinstance(answer, Refusal) and "trencadis[cuda]" in answer.reason


@pytest.mark.parametrize("name", CARDS)
@pytest.mark.parametrize("problem", [ROWS, SUM, rows_problem(64, 2048, 1536, 32, "bf16 bf16 bf16")], ids=str)
def test_layouts_fit_and_the_chosen_is_the_fastest(problem, name):
    card = CARDS[name]
    some = list(candidates(problem, card))
    assert len(some) > 4 and all(shared_memory(problem, card, one) <= card.shared for one in some)
    best = choose(problem, card)
    assert estimated_time(problem, card, best) == min(estimated_time(problem, card, one) for one in some)


@pytest.mark.parametrize(
    ("problem", "layout"),
    [
        (rows_problem(16384, 4096, 14336, 8, "bf16 bf16 bf16"), "128 x 256 x 64, 8 warps, 4 stages, 132 persistent"),
        (rows_problem(32768, 1536, 2048, 128, "bf16 bf16 bf16", transpose_rhs=True), "128 x 256 x 64, 8 warps, 4"),
        (rows_problem(512, 2048, 1536, 128, "bf16 bf16 bf16"), "16 x "),
        (sum_problem(32768, 4096, 4096, 64, "bf16 bf16 bf16"), "128 x 256 x 64, 8 warps, 3 stages, 132 persistent"),
        (sum_problem(16384, 2880, 5760, 128, "bf16 bf16 bf16"), "128 x 128 x 32, 4 warps, 5 stages, 264 persistent"),
        (rows_problem(8192, 2048, 1536, 32, precision="highest"), "64 x 128 x 32, 8 warps, 3 stages"),
    ],
    ids=str,
)
def test_the_model_finds_what_was_the_fastest_on_an_h200(problem, layout):
    assert str(choose(problem, CARDS["h200"])).startswith(layout)


def test_float32_says_how_it_is_multiplied():
    answer = triton.plan(rows_problem(64, 64, 64, 2, precision="highest"), A100, Overrides())
    assert isinstance(answer, Plan) and "six products" in answer.because


def test_few_rows_have_small_tiles_and_many_have_large_ones():
    for name in ("a100", "h200", "mi300x"):
        decode = choose(rows_problem(512, 2048, 1536, 128, "bf16 bf16 bf16"), CARDS[name])
        assert decode.block_m <= 32
        train = choose(rows_problem(16384, 4096, 14336, 8, "bf16 bf16 bf16"), CARDS[name])
        assert train.block_m * train.block_n >= 128 * 128


@pytest.mark.parametrize("problem", [ROWS, SUM], ids=["rows", "contraction"])
def test_a_tile_that_is_asked_for_is_not_exceeded(problem):
    tile = Tiling(128, 128, 128)
    layout = choose_for_tile(problem, CARDS["a100"], tile)
    found = tiling_of(problem, layout)
    assert (layout.block_m, layout.block_n) == (128, 128) and found.m <= 128 and found.k <= 128
    smallest = choose_for_tile(problem, CARDS["a100"], Tiling(1, 1, 1))
    assert smallest.block_m * smallest.block_n == min(c.block_m * c.block_n for c in candidates(problem, CARDS["a100"]))


def test_an_activation_that_triton_has_not_is_left_to_xla():
    asked = rows_problem(64, 64, 64, 2, "bf16 bf16 bf16", epilogue=Epilogue(activation=jax.numpy.arctan))
    answer = triton.plan(asked, A100, Overrides())
    assert answer.peeled == ("arctan",) and answer.problem.out == np.float32


def test_lhs_of_another_dtype_is_converted_before_the_kernel_on_hopper():
    """A kernel would convert it in registers, which products of wgmma that are in flight still read."""
    problem = ROWS.replace(lhs=np.dtype(np.int8))
    dtypes = {card: triton.plan(problem, target_of(card), Overrides()).problem.lhs for card in ("h200", "a100")}
    assert dtypes == {"h200": ROWS.rhs, "a100": np.int8}
