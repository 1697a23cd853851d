"""The arithmetic of a problem: what it must compute and what it must move, for the rows that are really there."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from trencadis.problem import Form, Problem


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Multiply-adds count as two; bytes are those of operands and result, each moved once."""

    flops: int
    bytes: int

    @property
    def intensity(self) -> float:
        """Flops per byte: below a machine's ratio of the two, the problem is bound by memory."""
        return self.flops / max(self.bytes, 1)

    def __str__(self) -> str:
        return f"{_unit(self.flops)}FLOP, {_unit(self.bytes)}B, {self.intensity:.3g} flop/byte"


def _unit(x: float) -> str:
    """Three digits and the letter for a power of a thousand."""
    for letter in ("", "k", "M", "G", "T"):
        if x < 1000:
            return f"{x:.3g} {letter}"
        x /= 1000
    return f"{x:.3g} P"


def cost(problem: Problem, group_sizes: Sequence[int] | None = None) -> Cost:
    """Cost of a problem; with group_sizes, of the owned rows and the groups in use only.

    >>> from trencadis.api import problem_of
    >>> asked = problem_of((8, 4), (3, 4, 2), groups=3)
    >>> print(cost(asked), "|", cost(asked, [2, 0, 0]))
    128 FLOP, 288 B, 0.444 flop/byte | 32 FLOP, 80 B, 0.4 flop/byte
    """
    rows, used = problem.rows, problem.weights if problem.form is Form.ROWS else problem.spans
    if group_sizes is not None:
        sizes = np.maximum(np.asarray(group_sizes), 0)
        rows, used = min(int(sizes.sum()), problem.rows), int((sizes > 0).sum())
    flops = 2 * rows * problem.k * problem.n
    matrix = problem.k * problem.n
    lhs = rows * problem.k * problem.lhs.itemsize
    if problem.form is Form.ROWS:
        moved = lhs + used * matrix * problem.rhs.itemsize + problem.rows * problem.n * problem.out.itemsize
        if group_sizes is not None:  # an unowned row costs nothing but its zeros, which are not counted
            moved -= (problem.rows - rows) * problem.n * problem.out.itemsize
    else:
        moved = lhs + rows * problem.n * problem.rhs.itemsize + problem.spans * matrix * problem.out.itemsize
    return Cost(flops=flops, bytes=moved)
