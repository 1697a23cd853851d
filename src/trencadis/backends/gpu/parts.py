"""float32 operands as sums of bfloat16 parts, whose products the kernel adds one after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from trencadis.backends.gpu.layout import Layout
from trencadis.backends.gpu.tile_scheduler import Ref, Refs, Scalar, i32
from trencadis.core.problem import Form, Problem

Array = jax.Array
OPERANDS = ("lhs", "rhs")

Products = tuple[tuple[int, int], ...]
ONE: Products = ((0, 0),)
HI_LO: dict[tuple[str, str], Products] = {
    ("float32", "bfloat16"): ((1, 0), (0, 0)),
    ("bfloat16", "float32"): ((0, 1), (0, 0)),
}
HIGH: Products = ((1, 2), (2, 1), (0, 0))


def products(problem: Problem) -> Products:
    """The parts of lhs and of rhs that are multiplied, one pair after the other; most operands have one part.

    A float32 operand beside a bfloat16 one has two. In contractions of precision HIGH, float32 has three: only the
    first has infinities, which would be NaN where they meet zeros. The largest products are the last, since wgmma cuts
    sums off instead of rounding them. So long sums have not the error of HIGHEST, which is Triton's.
    """
    kinds = (problem.lhs.name, problem.rhs.name)
    if kinds in HI_LO:
        return HI_LO[kinds]
    if problem.form is Form.CONTRACTION and kinds == ("float32", "float32"):
        return HIGH if problem.float32_precision is lax.Precision.HIGH else ONE
    return ONE


def part_name(name: str, part: int) -> str:
    """What the kernel calls a part of an operand, whose first part has its name."""
    return f"{name}_{part}" if part else name


def from_part(name: str, refs: Refs, layout: Layout, index: Scalar, copy: Callable[[Ref], None]) -> None:
    """Start a copy from an operand, or from its part in the product of parts that has this index."""
    parts = [pair[OPERANDS.index(name)] for pair in layout.products]
    each = sorted(set(parts))
    if len(each) == 1:
        copy(refs[name])
        return
    which = sum((lax.select(index == i32(i), i32(each.index(part)), i32(0)) for i, part in enumerate(parts)), i32(0))
    lax.switch(which, [functools.partial(copy, refs[part_name(name, part)]) for part in each])


@jax.jit
def hi_lo(x: Array) -> tuple[Array, Array]:
    """The bf16 hi/lo split of a float32 array: x rounded to bfloat16, and x minus that. x = hi + lo.

    They are two arrays: XLA takes more than twice the time to write both parts to one.
    """
    hi, lo = _head_and_rest(x)
    return hi.astype(jnp.bfloat16), lo.astype(jnp.bfloat16)


@jax.jit
def three_parts(x: Array) -> tuple[Array, Array, Array]:
    """The bf16 hi/lo split of a float32 array, and between them hi with 0 for what is not finite."""
    hi, lo = _head_and_rest(x)
    finite = jnp.where(jnp.isfinite(x), hi, 0)
    return hi.astype(jnp.bfloat16), finite.astype(jnp.bfloat16), lo.astype(jnp.bfloat16)


def _head_and_rest(x: Array) -> tuple[Array, Array]:
    """A float32 array rounded to bfloat16, but no finite number to an infinity, and what that leaves."""
    limit = float(jnp.finfo(jnp.bfloat16).max)
    head = lax.reduce_precision(x, 8, 7)  # XLA may leave out a conversion there and back
    head = jnp.where(jnp.isfinite(x), jnp.clip(head, -limit, limit), head)
    return head, jnp.where(jnp.isfinite(x), x - head, 0)
