"""Problem: a value that can be a dictionary key, knows its shapes and prints itself."""

import jax.numpy as jnp
import pytest

from trencadis.core.arguments import problem_of
from trencadis.core.epilogue import Epilogue
from trencadis.core.problem import Form

pytestmark = pytest.mark.core


def test_is_a_value():
    a, b = (problem_of((16, 4), (2, 4, 8), groups=3) for _ in range(2))
    assert a == b
    assert len({a, b}) == 1
    assert a.replace(m=17) != a
    with pytest.raises(AttributeError):
        a.m = 17


def test_shapes_of_both_forms():
    rows = problem_of((16, 4), (2, 4, 8), groups=3)
    assert (rows.lhs_shape, rows.rhs_shape, rows.out_shape) == ((16, 4), (2, 4, 8), (16, 8))
    assert rows.replace(transpose_rhs=True).rhs_shape == (2, 8, 4)
    batch = rows.replace(batch=6, rhs_batch=3)
    assert (batch.lhs_shape, batch.rhs_shape, batch.out_shape) == ((96, 4), (6, 4, 8), (96, 8))
    summed = problem_of((4, 16), (16, 8), groups=3)
    assert (summed.form, summed.lhs_shape, summed.rhs_shape, summed.out_shape) == (
        Form.CONTRACTION, (4, 16), (16, 8), (3, 4, 8),
    )  # fmt: skip


def test_prints_itself():
    rows = problem_of((16, 4), (2, 4, 8), groups=3, dtype=jnp.bfloat16, transpose_rhs=False)
    assert str(rows) == "rows m=16 k=4 n=8 g=3 (window of 2): bfloat16 x bfloat16 -> bfloat16"
    full = rows.replace(
        batch=2, epilogue=Epilogue(bias=rows.lhs, activation=jnp.tanh, accumulate=True), transpose_rhs=True
    )
    assert str(full).endswith(
        "m=2x16 k=4 n=8 g=3 (window of 2): bfloat16 x bfloat16ᵀ -> bfloat16, bias + tanh + existing_out"
    )
