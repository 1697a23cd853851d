"""Products of two tiles, and in which dtype they are taken."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from trencadis.problem import Problem


def multiply(problem: Problem, a: Any, b: Any, left: tuple[int, ...], right: tuple[int, ...]) -> Any:
    """The product of two tiles, contracted over an axis of each, in the accumulator's dtype."""
    kind = operand_dtype(problem)
    return lax.dot_general(
        a.astype(kind), b.astype(kind), ((left, right), ((), ())),
        precision=problem.precision, preferred_element_type=problem.acc,
    )  # fmt: skip


def operand_dtype(problem: Problem) -> Any:
    """What tiles are converted to before they are multiplied: their own dtype where they have one in common."""
    if problem.lhs == problem.rhs:
        return problem.lhs
    kinds = {problem.lhs, problem.rhs}
    if kinds <= {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.int8)}:  # every int8 is a bfloat16
        return jnp.dtype(jnp.bfloat16)
    return problem.acc
