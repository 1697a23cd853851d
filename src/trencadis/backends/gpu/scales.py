"""Which operand the kernel upcasts, and where it applies scales that change along k.

    in the operand     weights that are upcast, times their scales, are exact in bfloat16: mxfp4, mxfp8, nvfp4
    promotion          the sum of each part of k is multiplied by scales, and added to float32 sums in other registers

Rows and weights of the same 8-bit dtype are multiplied as they are. int4 weights beside 8-bit rows are unpacked to the
dtype of the rows: in shared memory, or in registers where sums are promoted. Any other pair of low precision is
multiplied as 16-bit numbers, which hold its values: XLA converts the rows, and the kernel upcasts the weights.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from trencadis.backends.gpu.layout import SCALE_BLOCK, SHORT_PART, WGMMA_M
from trencadis.core.dtypes import bits
from trencadis.core.interleave import FLOAT4
from trencadis.core.problem import Form, Problem

# significant bits of the values of low-precision weights, and of scales that are bytes
DIGITS = {"int4": 3, "int8": 7, "float8_e4m3fn": 4, "float8_e5m2": 3, "float4_e2m1fn": 2}
SCALE_DIGITS = {"float8_e8m0fnu": 0, "float8_e4m3fn": 4}
BFLOAT16_DIGITS = 8
FEW_ROWS = 64  # mean rows of a group up to which int4 weights are upcast in registers, also beside 8-bit rows


def needs_upcast(problem: Problem) -> bool:
    """Whether the kernel upcasts the weights: no wgmma multiplies weights of 8 or 4 bits with rows of 16.

    Or int4 weights are unpacked in registers, to the 8 bits of the rows.
    """
    if problem.form is not Form.ROWS or problem.rhs.name not in DIGITS:
        return False
    return problem.lhs.name in ("bfloat16", "float16") or unpacks_in_registers(problem)


def unpacks(problem: Problem) -> bool:
    """Whether the kernel unpacks int4 weights, in shared memory, to the 8-bit dtype of the rows, which holds them.

    It pays for many rows, which tensor cores then multiply twice as fast. For few rows unpacking to bfloat16 in
    registers is faster.
    """
    return _int4_beside_many_rows(problem) and not problem.epilogue.along_k


def unpacks_in_registers(problem: Problem) -> bool:
    """Whether the kernel unpacks int4 weights likewise, as a register operand, since sums are promoted.

    A lane has four neighbours along k then, so that weights lie in order. Parts are whole steps; the last step may be a
    half, of which copies past the end are zero.
    """
    part, step = problem.epilogue.part, 2 * WGMMA_M
    if not _int4_beside_many_rows(problem) or problem.interleaved or problem.out.itemsize != 2 or problem.n <= step:
        return False
    return part > 0 and part % step == 0 and problem.k % WGMMA_M == 0


def _int4_beside_many_rows(problem: Problem) -> bool:
    """Whether rows are of 8 bits, and many, and weights int4, stored K-major."""
    if problem.form is not Form.ROWS or not problem.transpose_rhs or problem.m <= FEW_ROWS * problem.groups:
        return False
    return problem.rhs.name == "int4" and problem.lhs.name in ("int8", "float8_e4m3fn", "float8_e5m2")


def transposes(problem: Problem) -> bool:
    """Whether the kernel transposes the weights: 8 bits, multiplied as they are or upcast in registers, not K-major."""
    if problem.form is not Form.ROWS or problem.transpose_rhs or bits(problem.rhs) != 8:
        return False
    return problem.lhs == problem.rhs or needs_upcast(problem)


def in_operand(problem: Problem) -> bool:
    """Whether weights that are upcast are multiplied by their scales along k: bfloat16 holds the products."""
    epilogue = problem.epilogue
    if not (needs_upcast(problem) and epilogue.column_block[0]) or problem.lhs != jnp.bfloat16:
        return False
    return DIGITS[problem.rhs.name] + SCALE_DIGITS.get(epilogue.column_scales.name, 24) <= BFLOAT16_DIGITS


def operand_excess(problem: Problem) -> float:
    """The power of two by which an operand that is multiplied by its scales is too small (`operand_scales.py`)."""
    small = problem.rhs.name == FLOAT4 and problem.epilogue.column_scales == jnp.float8_e4m3fn
    return 2.0**8 if small and in_operand(problem) else 1.0


def promoted_part(problem: Problem) -> int:
    """The entries of k whose sum is multiplied by scales of rows or columns (promotion); 0 if none is."""
    epilogue = problem.epilogue
    return math.gcd(epilogue.row_block, 0 if in_operand(problem) else epilogue.column_block[0])


def steps_in_parts(problem: Problem) -> bool:
    """Whether float8 rows have a scale every 32 or 64 of k, so that a step has several sums to promote.

    Weights may have scales that a tile shares, in blocks of 128 of k. One for each column would take another operation
    for every sum.
    """
    epilogue, kinds = problem.epilogue, (np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2))
    if problem.lhs != problem.rhs or problem.lhs not in kinds or epilogue.row_block not in (SHORT_PART, WGMMA_M):
        return False
    return epilogue.column_block[0] % SCALE_BLOCK == 0 and not column_scales_by_step(problem)


def shared_by_tile(problem: Problem) -> bool:
    """Whether all columns of a tile share the scales of weights that change along k, as in blocks of 128 x 128."""
    length, across = problem.epilogue.column_block
    return bool(length) and across % SCALE_BLOCK == 0 and not needs_upcast(problem)


def row_scales_of_step(problem: Problem, block_k: int) -> int:
    """The number of scales along k of a row in a step of the mainloop; 0 if they do not change along k."""
    length = problem.epilogue.row_block
    return max(block_k // length, 1) if length else 0


def column_scales_by_step(problem: Problem) -> bool:
    """Whether scales of weights along k, one for each column of a tile, are copied with each step of the mainloop."""
    return problem.epilogue.column_block[0] > 0 and not needs_upcast(problem) and not shared_by_tile(problem)


def with_bfloat16_rows(problem: Problem) -> Problem:
    """The problem with 8-bit rows as bfloat16, which is exact, where weights are upcast beside them.

    These are weights of another dtype, and weights with scales along k that are too short for promotion.
    """
    if problem.form is not Form.ROWS or problem.lhs.itemsize > 1 or bits(problem.rhs) > 8:
        return problem
    if unpacks(problem) or unpacks_in_registers(problem):
        return problem
    if problem.lhs == problem.rhs and (promoted_part(problem) % WGMMA_M == 0 or steps_in_parts(problem)):
        return problem
    return problem.replace(lhs=np.dtype(jnp.bfloat16))
