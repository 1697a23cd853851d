"""Products of two tiles, and in which dtypes they are taken."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from trencadis.backends.tpu.columns import LANES
from trencadis.backends.tpu.nans import marks
from trencadis.core.devices import Chip
from trencadis.core.problem import Problem

BFLOATS = ("bfloat16", "int8", "int4", "float8_e4m3fn", "float8_e5m2")  # every number of these is a bfloat16
EXACT = 1024  # products of two int8, the sum of which float32 holds exactly: 2**24 over 2**14


def multiply(problem: Problem, chip: Chip, a: Any, b: Any, axes: tuple[int, int]) -> Any:
    """The product of two tiles, contracted over an axis of each, in the accumulator's dtype."""
    left, right = kinds(problem, chip)
    widened = jnp.issubdtype(problem.acc, jnp.integer) and left == jnp.bfloat16
    size = a.shape[axes[0]]

    def part(at: int, end: int) -> Any:
        x, y = (lax.slice_in_dim(tile, at, end, axis=axis) for tile, axis in zip((a, b), axes, strict=True))
        return lax.dot_general(
            x.astype(left), y.astype(right), (((axes[0],), (axes[1],)), ((), ())),
            precision=problem.precision, preferred_element_type=jnp.float32 if widened else problem.acc,
        ).astype(problem.acc)  # fmt: skip

    step = EXACT if widened else size
    product = sum((part(at, min(at + step, size)) for at in range(step, size, step)), part(0, min(step, size)))
    for tile, kind, axis, turned in ((a, left, axes[0], False), (b, right, axes[1], True)):
        if kind.name == chip.blind:
            product = product + marks(tile, axis, turned)
    return product


def kinds(problem: Problem, chip: Chip) -> tuple[Any, Any]:
    """What tiles of lhs and of rhs are converted to before they are multiplied: nothing else where the chip can.

    A float8 beside a bfloat16 becomes one when the MXU loads it.
    """
    pair = problem.lhs, problem.rhs
    few = _few(problem)
    if problem.lhs == problem.rhs and not few:
        return pair
    if not all(dtype.name in BFLOATS for dtype in pair):
        return problem.acc, problem.acc
    whole = [jnp.issubdtype(dtype, jnp.integer) for dtype in pair]
    seen = chip.blind not in few or (problem.k % LANES == 0 and problem.n % LANES == 0)
    if not any(whole) and seen and few <= set(chip.narrow):
        return pair
    kind = jnp.dtype(jnp.int8 if all(whole) and "int8" in chip.narrow else jnp.bfloat16)
    return kind, kind


def note(problem: Problem, chip: Chip) -> str | None:
    """What is worth a word about how a chip multiplies operands of 8 bits or less."""
    few = sorted(_few(problem))
    if not few:
        return None
    if kinds(problem, chip) == (problem.lhs, problem.rhs):
        return f"a {chip.name} multiplies {' and '.join(few)} as stored"
    return f"the kernel makes {' and '.join(few)} {kinds(problem, chip)[0].name} in VMEM; a {chip.name} multiplies that"


def _few(problem: Problem) -> set[str]:
    """The dtypes of operands of 8 bits or less."""
    return {dtype.name for dtype in (problem.lhs, problem.rhs) if dtype.itemsize == 1}
