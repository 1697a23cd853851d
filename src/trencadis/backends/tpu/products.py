"""The product of two tiles on the MXU, and the dtypes in which it is computed."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from trencadis.backends.tpu.indexing import LANES, Value
from trencadis.backends.tpu.nans import nan_marks
from trencadis.backends.tpu.passes import passes, precise_product
from trencadis.core.devices import Chip
from trencadis.core.epilogue import Epilogue
from trencadis.core.problem import Problem

FLOAT4 = "float4_e2m1fn"
EXACT_IN_BFLOAT16 = ("bfloat16", "int8", "int4", "float8_e4m3fn", "float8_e5m2", FLOAT4)  # no number is wider
# significant bits of the values of low-precision weights, of scales that are bytes, and of bfloat16
DIGITS = {"int4": 3, "int8": 7, "float8_e4m3fn": 4, "float8_e5m2": 3, FLOAT4: 2}
SCALE_DIGITS = {"float8_e8m0fnu": 0, "float8_e4m3fn": 4}
BFLOAT16_DIGITS = 8
EXACT_TERMS = 1024  # products of two int8, up to 2**14 each, whose sum float32 holds exactly: at most 2**24


def in_operand(problem: Problem) -> bool:
    """Whether weights are multiplied by their scales along k: bfloat16 holds the products.

    Weights stored `[g, n, k]` are not, since a scale would have to be repeated along lanes.
    """
    return not problem.transpose_rhs and exact_in_operand(problem)


def exact_in_operand(problem: Problem) -> bool:
    """Whether bfloat16 holds the products of weights and their scales along k, if there are such scales."""
    if not problem.epilogue.column_block[0]:
        return False
    scales = SCALE_DIGITS.get(problem.epilogue.column_scales.name, 24)
    return DIGITS.get(problem.rhs.name, 24) + scales <= BFLOAT16_DIGITS


def multiply(
    problem: Problem, chip: Chip, a: Value, b: Value, axes: tuple[int, int], *, finished: bool = False
) -> Value:
    """The product of two tiles, contracted over one axis of each, in the accumulator's dtype.

    If it is `finished`, and scales follow, integers that float32 holds exactly may be float32.
    """
    left, right = mxu_dtypes(problem, chip)
    widened = jnp.issubdtype(problem.acc, jnp.integer) and left == jnp.bfloat16
    size = a.shape[axes[0]]
    as_float = widened and finished and problem.epilogue.scaled and size <= EXACT_TERMS

    def dot(x: Value, y: Value) -> Value:
        return lax.dot_general(
            x, y, (((axes[0],), (axes[1],)), ((), ())),
            precision=lax.Precision.DEFAULT, preferred_element_type=jnp.float32 if widened else problem.acc,
        ).astype(jnp.float32 if as_float else problem.acc)  # fmt: skip

    def partial_product(start: int, end: int) -> Value:
        x, y = (lax.slice_in_dim(tile, start, end, axis=axis) for tile, axis in zip((a, b), axes, strict=True))
        return dot(x.astype(left), y.astype(right))

    if len(passes(problem)) > 1:
        return precise_product(problem, a, b, dot)
    step = EXACT_TERMS if widened else size
    rest = (partial_product(start, min(start + step, size)) for start in range(step, size, step))
    product = sum(rest, partial_product(0, min(step, size)))
    for tile, dtype, axis, as_row in ((a, left, axes[0], False), (b, right, axes[1], True)):
        if dtype.name == chip.no_nan_dtype:
            product = product + nan_marks(tile, axis, as_row)
    return product


def mxu_dtypes(problem: Problem, chip: Chip) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """The dtypes that tiles of lhs and rhs are converted to before they are multiplied: their own where the chip can.

    Next to a bfloat16 operand, a float8 is converted by the MXU itself as it loads it.
    """
    bfloat16 = np.dtype(jnp.bfloat16)
    if len(passes(problem)) > 1:
        return bfloat16, bfloat16
    if in_operand(problem):
        problem = problem.replace(rhs=bfloat16, epilogue=Epilogue())
    stored = problem.lhs, problem.rhs
    narrow = _narrow_dtypes(problem)
    if problem.lhs == problem.rhs and not narrow:
        return stored
    if not all(dtype.name in EXACT_IN_BFLOAT16 for dtype in stored):
        return problem.acc, problem.acc
    integer = [jnp.issubdtype(dtype, jnp.integer) for dtype in stored]
    # a search for NaNs needs tiles of whole lanes
    nans_kept = chip.no_nan_dtype not in narrow or (problem.k % LANES == 0 and problem.n % LANES == 0)
    if not any(integer) and nans_kept and narrow <= set(chip.mxu_8bit_dtypes):
        return stored
    common = np.dtype(jnp.int8) if all(integer) and "int8" in chip.mxu_8bit_dtypes else bfloat16
    return common, common


def conversion_note(problem: Problem, chip: Chip) -> str | None:
    """A sentence on how the chip multiplies operands of 8 bits or less; None if there are none."""
    narrow = sorted(_narrow_dtypes(problem))
    if not narrow:
        return None
    names = " and ".join(narrow)
    if mxu_dtypes(problem, chip) == (problem.lhs, problem.rhs):
        return f"a {chip.name} multiplies {names} as stored{_scaling_note(problem)}"
    to = mxu_dtypes(problem, chip)[0].name
    return f"the kernel converts {names} to {to} in VMEM, which a {chip.name} multiplies{_scaling_note(problem)}"


def _scaling_note(problem: Problem) -> str:
    """The rest of the sentence, where weights have scales that change along k."""
    length = problem.epilogue.column_block[0]
    if not length:
        return ""
    if in_operand(problem):
        return f", and multiplies weights by their scales per {length} of k, which is exact"
    return f"; the sums of each {length} of k are multiplied by their scales"


def _narrow_dtypes(problem: Problem) -> set[str]:
    """The names of the operands' dtypes of 8 bits or less."""
    return {dtype.name for dtype in (problem.lhs, problem.rhs) if dtype.itemsize == 1}
