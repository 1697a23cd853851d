"""Sums of 32 or 64 of k of float8 operands: where their products begin, and which problems have them."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from trencadis.backends import gpu
from trencadis.backends.gpu.layout import ROW_ALIGN, SHORT_PART, SWIZZLE
from trencadis.backends.gpu.short_sums import STRIDE, offset, product_text
from trencadis.core.arguments import problem_of
from trencadis.core.epilogue import Epilogue
from trencadis.core.target import Target
from trencadis.core.tiling import Overrides

pytestmark = pytest.mark.core

H200 = Target(platform="cuda", kind="NVIDIA H200")
ROWS = Epilogue(by_row=True, by_column=True, row_block=32)
ASKED = problem_of((512, 256), (4, 256, 256), dtype="float8_e4m3fn", out=np.dtype(jnp.bfloat16), epilogue=ROWS)


@pytest.mark.parametrize("swizzle", [SWIZZLE, SWIZZLE // 2])
def test_a_descriptor_finds_every_byte_of_a_product(swizzle):
    """TMA writes tiles of 8 swizzle rows, those of the same rows behind each other; the swizzle changes both alike."""
    row, k = np.arange(64)[:, None], np.arange(SWIZZLE)
    tiles = row // ROW_ALIGN * (SWIZZLE // swizzle) + k // swizzle
    written = tiles * ROW_ALIGN * swizzle + row % ROW_ALIGN * swizzle + k % swizzle
    begin = np.array([16 * offset(at, swizzle) for at in range(0, SWIZZLE, SHORT_PART)])[k // SHORT_PART]
    atoms = row // ROW_ALIGN * (STRIDE >> 32 << 4)
    np.testing.assert_array_equal(begin + atoms + row % ROW_ALIGN * swizzle + k % SHORT_PART, written)


@pytest.mark.parametrize("part", [32, 64])
def test_only_the_first_product_of_a_part_does_not_add(part):
    text = product_text(128, SWIZZLE, part, "e4m3")
    lines = [line for line in text.splitlines() if "more" in line and ".reg" not in line]
    assert [line.split()[0] for line in lines[::2]] == ["setp.ne.b32", "setp.eq.b32"][: part // SHORT_PART]
    assert all("m64n128k32.f32.e4m3.e4m3" in line for line in lines[1::2])
    assert len(lines) == 2 * part // SHORT_PART


def changed(**changes):
    return dataclasses.replace(ROWS, **changes)


@pytest.mark.parametrize(
    ("epilogue", "dtype"),
    [
        (ROWS, "float8_e4m3fn"),
        (changed(row_block=64, column_block=(128, 128)), "float8_e4m3fn"),
        (changed(column_block=(128, 1)), "bfloat16"),  # a factor for each column would be another operation
    ],
)
def test_rows_stay_in_8_bits_where_a_step_has_several_sums(epilogue, dtype):
    plan = gpu.plan(ASKED.replace(epilogue=epilogue, transpose_rhs=True), H200, Overrides())
    assert plan.backend == "gpu" and plan.problem.lhs.name == dtype
    assert dtype == "bfloat16" or (plan.layout.promoted and plan.layout.block_k == SWIZZLE == plan.layout.swizzle)
