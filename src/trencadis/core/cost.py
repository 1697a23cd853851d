"""The arithmetic of a problem: what it must compute and what it must move, for the rows that are really there."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from trencadis.core.problem import Form, Problem


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


def cost(problem: Problem, group_sizes: Sequence[int] | None = None, stored: tuple[int, int] | None = None) -> Cost:
    """Cost of a problem; with group_sizes, of the owned rows and the groups in use only.

    Quantized operands are more than their values: `stored` are the bytes of lhs and rhs with their scales, of which
    the rows and groups in use have their share.

    >>> from trencadis.core.problem import problem_of
    >>> asked = problem_of((8, 4), (3, 4, 2), groups=3)
    >>> print(cost(asked), "|", cost(asked, [2, 0, 0]))
    128 FLOP, 288 B, 0.444 flop/byte | 32 FLOP, 80 B, 0.4 flop/byte
    """
    rows, used = problem.rows, problem.weights if problem.form is Form.ROWS else problem.spans
    if group_sizes is not None:
        sizes = np.maximum(np.asarray(group_sizes), 0)
        rows, used = min(int(sizes.sum()), problem.rows), int((sizes > 0).sum())
    flops = 2 * rows * problem.k * problem.n
    if stored is None:
        stored = (
            math.prod(problem.lhs_shape) * problem.lhs.itemsize,
            math.prod(problem.rhs_shape) * problem.rhs.itemsize,
        )
    lhs = _share(stored[0], rows, problem.rows)
    if problem.form is Form.ROWS:  # an unowned row costs nothing but its zeros, which are not counted
        rhs, out = _share(stored[1], used, problem.weights), rows * problem.n
    else:
        rhs, out = _share(stored[1], rows, problem.rows), problem.spans * problem.k * problem.n
    return Cost(flops=flops, bytes=lhs + rhs + out * problem.out.itemsize)


def _share(whole: int, part: int, of: int) -> int:
    return whole * part // max(of, 1)
