"""A k that is too long for VMEM, in parts: values, poison, plans and compiles."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import poisoned
import pytest
from poisoned import check_unowned, numbers, rows_problem, spoil
from sweep import marked

import trencadis as tr
from trencadis.backends.tpu import k_parts
from trencadis.backends.tpu.execution import execute_parts
from trencadis.core.devices import CHIPS, target_of
from trencadis.core.epilogue import Epilogue
from trencadis.core.plan import plan

from .ahead import compiled, kernels
from .interpreted import STRICT, races_found, rows_layout

pytestmark = [pytest.mark.core, pytest.mark.once]

SIZES, FIRST = np.array([[10, 20, 7, 13, 3, 5]], np.int32), np.array([1], np.int32)


@pytest.mark.parametrize(
    ("kinds", "changes"),
    [
        marked(("bf16 bf16 f32", dict(transpose_rhs=True))),
        ("s8 s8 f32", dict(epilogue=Epilogue(by_row=True, by_column=True))),
    ],
)
def test_the_sums_of_all_parts(kinds, changes):
    """The last part is padded; poison stays in its group, and unowned rows are zero."""
    problem = rows_problem(70, 300, 256, 6, kinds, local=4, **changes)
    unit = 32 if kinds.startswith("s8") else 16
    layout = rows_layout(block_n=128, sublane_tile=unit, dma_align=unit, heights=(32, 64), block_k=128)
    multiply = jax.jit(functools.partial(execute_parts, problem, problem, layout, interpret=STRICT))
    operands = numbers(problem, 0)
    for given in (operands, spoil(problem, SIZES, FIRST, operands, 1, np.nan)):
        lhs, rhs, *extras = given
        (got,) = jax.block_until_ready(multiply(lhs, rhs, SIZES, FIRST, *extras))
        assert not races_found()
        with np.errstate(invalid="ignore"):
            want = poisoned.meaning(problem, lhs, rhs, SIZES, FIRST, *extras)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.nanmax(np.abs(want)))
        check_unowned(problem, np.asarray(got), SIZES, FIRST, extras)


@pytest.mark.parametrize("chip", CHIPS)
def test_every_k_has_a_kernel(chip):
    """In equal parts where some are about as long as is best; what follows the scales is peeled off."""
    steps = Epilogue(bias=np.dtype("float32"), activation=jnp.tanh)
    for k in (2**17, 200_000):
        problem = rows_problem(8192, k, 2048, 8, "bf16 bf16 bf16", epilogue=steps)
        chosen = plan(problem, target_of(chip))
        assert chosen.backend == "tpu" and chosen.peeled == ("bias", "tanh")
        assert chosen.problem.out == np.float32 and 1024 < chosen.tiling.k <= k_parts.LENGTHS[0]
        assert any("parts of" in note for note in chosen.notes)
        assert k % chosen.tiling.k == 0 or k % 128


@pytest.mark.parametrize("chip", ["v4", "v7x"])
def test_parts_compile_to_one_kernel_in_a_loop(chip):
    k, n = 2**17, 256

    def fn(x, w, s):
        return tr.grouped_matmul(x, w, s, jnp.bfloat16, backend="tpu")

    shapes = [((256, k), "bfloat16"), ((2, k, n), "bfloat16"), ((2,), "int32")]
    text = compiled(CHIPS[chip], fn, *shapes)
    assert kernels(text) == ["trencadis_rows"] and "while(" in text
