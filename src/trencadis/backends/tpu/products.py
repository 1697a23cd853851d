"""The product of two tiles on the MXU, and the dtypes in which it is computed."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from trencadis.backends.tpu.float8 import B11, B11_SHIFT, E4M3, as_b11
from trencadis.backends.tpu.indexing import Value
from trencadis.backends.tpu.passes import ALGORITHMS, asked_precision, passes, precise_product
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


def weight_parts(problem: Problem) -> tuple[int, ...]:
    """The numbers of bfloat16 parts, for weights that are multiplied by their scales along k, that can be tried.

    0 is promotion: the sums of each block of k are multiplied, which is exact. One part is exact for some formats; for
    others it rounds weights as a result of 16 bits is rounded, and the precision says whether it may. Weights stored
    `[g, n, k]` are not multiplied by their scales, which would have to be repeated along lanes.
    """
    if not problem.epilogue.column_block[0] or problem.transpose_rhs:
        return (0,)
    if exact_in_operand(problem):
        return (1,)
    asked = asked_precision(problem)
    if asked is lax.Precision.DEFAULT and (problem.out.itemsize <= 2 or problem.asked in ALGORITHMS):
        return 0, 1
    return (0, 2) if asked in (lax.Precision.DEFAULT, lax.Precision.HIGH) else (0,)


def as_multiplied(problem: Problem, parts: int) -> Problem:
    """The problem that the MXUs compute: weights that were multiplied by their scales are bfloat16 `parts`."""
    return problem.replace(rhs=np.dtype(jnp.bfloat16), epilogue=Epilogue()) if parts else problem


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

    It is too small where operands are read as float8_e4m3b11fnuz: `rescaled` makes up for that once the sum is
    complete. If it is `finished`, and scales follow, integers that float32 holds exactly may be float32.
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
        return dot(converted(x, left, chip), converted(y, right, chip))

    if len(passes(problem)) > 1:
        return precise_product(problem, a, b, dot)
    step = EXACT_TERMS if widened else size
    rest = (partial_product(start, min(start + step, size)) for start in range(step, size, step))
    return sum(rest, partial_product(0, min(step, size)))


def rescaled(problem: Problem, chip: Chip, total: Value) -> Value:
    """A complete sum of products with the exponent that `multiply` left out."""
    shift = B11_SHIFT * (problem.lhs, problem.rhs).count(E4M3) if chip.b11 and len(passes(problem)) == 1 else 0
    return total * np.float32(2.0**shift) if shift else total


def converted(x: Value, dtype: np.dtype[Any], chip: Chip) -> Value:
    """A tile in the dtype in which it is multiplied; of float8_e4m3fn too small by 2**4, unless the chip knows it."""
    return (as_b11(x) if x.dtype == E4M3 and chip.b11 else x).astype(dtype)


def mxu_dtypes(problem: Problem, chip: Chip) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """The dtypes that tiles of lhs and rhs are converted to before they are multiplied: their own where the chip can.

    Next to a bfloat16 operand, a float8 is converted by the MXU itself as it loads it. Chips that multiply float8 no
    faster than bfloat16 take 32 rows of it at a time, and 16 of bfloat16; so there the rows are converted.
    """
    bfloat16 = np.dtype(jnp.bfloat16)
    if len(passes(problem)) > 1:
        return bfloat16, bfloat16
    stored = problem.lhs, problem.rhs
    narrow = _narrow_dtypes(problem)
    if problem.lhs == problem.rhs and not narrow:
        return stored
    if not all(dtype.name in EXACT_IN_BFLOAT16 for dtype in stored):
        return problem.acc, problem.acc
    integer = [jnp.issubdtype(dtype, jnp.integer) for dtype in stored]
    if not any(integer) and narrow <= set(chip.mxu_8bit_dtypes):
        return stored if not chip.b11 else (bfloat16, B11 if problem.rhs == E4M3 else problem.rhs)
    common = np.dtype(jnp.int8) if all(integer) and "int8" in chip.mxu_8bit_dtypes else bfloat16
    return common, common


def conversion_note(problem: Problem, chip: Chip, parts: int) -> str | None:
    """A sentence on how the chip multiplies operands of 8 bits or less; None if there are none."""
    narrow = sorted(_narrow_dtypes(problem))
    if not narrow:
        return None
    names, (left, right) = " and ".join(narrow), mxu_dtypes(as_multiplied(problem, parts), chip)
    said = f"the kernel converts {names} to {left.name} in VMEM, which a {chip.name} multiplies"
    if (left, right) == (problem.lhs, problem.rhs):
        said = f"a {chip.name} multiplies {names} as stored"
    elif left != right:
        said = f"a {chip.name} multiplies {names} as {left.name}, to which its MXUs convert the right operand"
    return said + _scaling_note(problem, parts)


def _scaling_note(problem: Problem, parts: int) -> str:
    """The rest of the sentence, where weights have scales that change along k."""
    length = problem.epilogue.column_block[0]
    if not length:
        return ""
    if not parts:
        return f"; the sums of each {length} of k are multiplied by their scales"
    exact = "which is exact" if exact_in_operand(problem) else "rounded to bfloat16"
    return f", and multiplies weights by their scales per {length} of k, " + (
        exact if parts == 1 else "to 16 bits, in two passes"
    )


def _narrow_dtypes(problem: Problem) -> set[str]:
    """The names of the operands' dtypes of 8 bits or less."""
    return {dtype.name for dtype in (problem.lhs, problem.rhs) if dtype.itemsize == 1}
