"""The kernels compile on a machine without a GPU for every architecture, to the instruction of its tensor cores."""

import itertools

import numpy as np
import pytest

pytest.importorskip("triton")

import jax
from poisoned import rows_problem, sum_problem
from sweep import sweep

from trencadis.backends.triton import kernel_of
from trencadis.backends.triton.bridge import compiled
from trencadis.backends.triton.choose import choose
from trencadis.core.devices import CARDS
from trencadis.core.epilogue import Epilogue

INSTRUCTIONS = {
    "a100": "mma.sync", "a10": "mma.sync", "l40s": "mma.sync", "h200": "wgmma.mma_async", "b200": "tcgen05.mma",
    "rtx5090": "mma.sync", "mi300x": "v_mfma", "mi355x": "v_mfma",
}  # fmt: skip
FULL = Epilogue(by_row=True, by_column=True, bias=np.dtype("float32"), activation=jax.nn.gelu)
PROBLEMS = {
    "rows": rows_problem(4096, 1024, 1024, 8, "bf16 bf16 bf16", epilogue=FULL),
    "contraction": sum_problem(4096, 1024, 1024, 4, "bf16 bf16 bf16", epilogue=Epilogue(accumulate=True)),
}


def assembly(problem, card):
    layout = choose(problem, card)
    binary = compiled(kernel_of(problem, layout, card.arch))
    assert 0 < binary.shared <= card.shared
    return binary.text


@pytest.mark.parametrize(
    ("name", "form"),
    sweep(
        itertools.product(INSTRUCTIONS, PROBLEMS),
        [("a100", "rows"), ("h200", "rows"), ("h200", "contraction"), ("b200", "contraction"),
         ("rtx5090", "contraction"), ("mi300x", "rows")],
    ),
)  # fmt: skip
def test_tensor_cores_of_every_architecture(name, form):
    assert INSTRUCTIONS[name] in assembly(PROBLEMS[form], CARDS[name])


@pytest.mark.parametrize(
    ("kinds", "changes", "instruction"),
    [
        ("f16 f16 f16", {}, "f32.f16.f16.f32"),
        ("f32 f32 f32", {}, "f32.tf32.tf32.f32"),
        ("f32 f32 f32", {"precision": "highest"}, "f32.bf16.bf16.f32"),
        ("s8 s8 s32", {"transpose_rhs": True}, "s32.s8.s8.s32"),
        ("bf16 s8 bf16", {"transpose_rhs": True}, "f32.bf16.bf16.f32"),
    ],
)
def test_tensor_cores_of_every_dtype(kinds, changes, instruction):
    """On an A100, whose instruction says its dtypes."""
    assert instruction in assembly(rows_problem(512, 256, 256, 8, kinds, **changes), CARDS["a100"])


def test_float8_where_the_card_has_it():
    problem = rows_problem(512, 256, 256, 8, "e4 e4 bf16", transpose_rhs=True)
    assert "e4m3" in assembly(problem, CARDS["l40s"])
    assert "v_mfma" in assembly(problem, CARDS["mi355x"])


def test_persistent_programs_copy_by_tma():
    problem, card = rows_problem(4096, 1024, 1024, 8, "bf16 bf16 bf16"), CARDS["h200"]
    layout = choose(problem, card)
    assert layout.programs == card.cores and layout.tma
    assert "cp.async.bulk.tensor" in assembly(problem, card)


def test_six_products_wait_for_the_tensor_cores_in_each_step():
    """They read registers late, into which the next step would split its weights."""
    text = assembly(rows_problem(8192, 256, 256, 8, precision="highest"), CARDS["h200"])
    loop = text[text.index("wgmma.mma_async") :]
    loop = loop[: loop.index("bra")]
    assert loop.rindex("wgmma.wait_group.sync.aligned 0") > loop.rindex("wgmma.mma_async")
