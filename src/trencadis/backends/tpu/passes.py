"""Precise products of float32 on MXUs that multiply bfloat16: an operand is a sum of bfloat16 parts.

    precision    parts of float32    passes: products of parts i and j
    DEFAULT      1, by the MXU       i + j = 0
    HIGH         2, 16 bits          i + j <= 1
    HIGHEST      3, all bits         i + j <= 2

An operand that bfloat16 holds is one part. So float32 by float32 takes 3 passes for HIGH and 6 for HIGHEST, and float32
by bfloat16 takes 2 and 3. No vector unit has float16: XLA rounds it to bfloat16 before the kernel, as it does for its
own products, and for a higher precision it becomes float32, of which two parts hold all bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from trencadis.backends.tpu.indexing import Value
from trencadis.core.problem import Problem

DEPTHS = {lax.Precision.DEFAULT: 0, lax.Precision.HIGH: 1, lax.Precision.HIGHEST: 2}
_PRESETS = {
    lax.DotAlgorithmPreset.BF16_BF16_F32: lax.Precision.DEFAULT,
    lax.DotAlgorithmPreset.BF16_BF16_F32_X3: lax.Precision.HIGH,
    lax.DotAlgorithmPreset.BF16_BF16_F32_X6: lax.Precision.HIGHEST,
}
ALGORITHMS: dict[Any, lax.Precision] = _PRESETS | {preset.name: depth for preset, depth in _PRESETS.items()}
FLOAT16, FLOAT32 = np.dtype(np.float16), np.dtype(np.float32)
UPPER = np.int32(-0x10000)  # the bits of a float32 that a bfloat16 has
HALF = np.int32(0x8000)  # half of the last of them


def precision_of(problem: Problem) -> lax.Precision | None:
    """The precision of the products inside the kernel, or None if it does not have the one that was asked for.

    Only float32 and float16 operands have a choice; if each operand has its own precision, it is the higher one. It is
    always explicit: otherwise a product inside the kernel would take it from jax_default_matmul_precision.
    """
    if not {problem.lhs, problem.rhs} & {FLOAT16, FLOAT32}:
        return lax.Precision.DEFAULT
    return asked_precision(problem)


def asked_precision(problem: Problem) -> lax.Precision | None:
    """The precision that was asked for, whatever the dtypes; None if no kernel has it."""
    if problem.asked in ALGORITHMS:
        return ALGORITHMS[problem.asked]
    return max(problem.precisions, key=DEPTHS.__getitem__, default=None)


def passes(problem: Problem) -> list[tuple[int, int]]:
    """The parts of lhs and of rhs that each pass multiplies, the smallest products first."""
    precision = precision_of(problem)
    depth = 0 if precision is None else DEPTHS[precision]  # None is refused, or never asked
    lhs, rhs = (depth + 1 if dtype == FLOAT32 else 1 for dtype in (problem.lhs, problem.rhs))
    found = [(i, j) for i in range(lhs) for j in range(rhs) if i + j <= depth]
    return sorted(found, key=sum, reverse=True)


def split(x: Value, count: int) -> list[Value]:
    """A tile of float32 as so many bfloat16 parts: each holds the bits that those before it left.

    The parts after that of a NaN or an infinity are not finite. A number within 1/512 of the largest float32 becomes
    infinite.
    """
    parts: list[Value] = []
    rest = x
    for _ in range(count - 1):
        # rounded, so that products of what is left have either sign; by integers, since XLA, for which the interpreter
        # compiles, removes a conversion to bfloat16 and back
        head = pltpu.bitcast((pltpu.bitcast(rest, jnp.int32) + HALF) & UPPER, jnp.float32)
        if not parts:
            head = jnp.where(rest == rest, head, rest)  # a NaN need not be one after the addition
        parts.append(head.astype(jnp.bfloat16))
        rest = rest - head
    return [*parts, rest.astype(jnp.bfloat16)]


def precise_product(problem: Problem, a: Value, b: Value, dot: Callable[[Value, Value], Value]) -> Value:
    """The product of two tiles in several passes, given the product of two bfloat16 tiles.

    Whatever is not finite is in the first part of its operand already, and so in the first product; the others, in
    which it meets zeros, are left out where they are not finite.
    """
    terms = passes(problem)
    counts = [1 + max(indices) for indices in zip(*terms, strict=True)]
    left, right = (
        split(tile, count) if count > 1 else [tile.astype(jnp.bfloat16)]
        for tile, count in zip((a, b), counts, strict=True)
    )
    *small, (first, second) = terms
    rest = sum(dot(left[i], right[j]) for i, j in small)
    return dot(left[first], right[second]) + jnp.where(jnp.abs(rest) < np.float32(np.inf), rest, np.float32(0))


def without_float16(problem: Problem) -> Problem:
    """The problem that the kernel computes for one with float16: of other dtypes, which XLA converts from and to."""
    precision = precision_of(problem)
    if precision is None or FLOAT16 not in (problem.lhs, problem.rhs, problem.out, problem.epilogue.bias):
        return problem
    precise = precision is not lax.Precision.DEFAULT
    if precise and FLOAT32 not in (problem.lhs, problem.rhs):
        precision = lax.Precision.HIGH
    operand = FLOAT32 if precise else np.dtype(jnp.bfloat16)
    lhs, rhs = (operand if dtype == FLOAT16 else dtype for dtype in (problem.lhs, problem.rhs))
    out = FLOAT32 if problem.out == FLOAT16 else problem.out
    bias = FLOAT32 if problem.epilogue.bias == FLOAT16 else problem.epilogue.bias
    epilogue = dataclasses.replace(problem.epilogue, bias=bias)
    return problem.replace(lhs=lhs, rhs=rhs, out=out, precision=precision, epilogue=epilogue)


def notes(asked: Problem, problem: Problem, chip: str) -> list[str]:
    """Sentences on the operands that are converted or multiplied in several passes: of the problem as it was asked."""
    found, count = [], len(passes(problem))
    if FLOAT16 in (asked.lhs, asked.rhs):
        to = problem.lhs if asked.lhs == FLOAT16 else problem.rhs
        rounded = ", which rounds it: precision='high' does not" if to != FLOAT32 else ""
        found.append(f"XLA converts float16 to {to.name} before the kernel{rounded}")
    if count > 1:
        found.append(f"a {chip} multiplies float32 as bfloat16 parts, in {count} passes")
    return found
