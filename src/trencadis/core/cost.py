"""The flops and bytes that a problem needs, counted for the owned rows and the groups in use."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from trencadis.core.problem import Form, Problem


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The flops of a problem, two per multiply-add, and the bytes of its operands and result, each moved once."""

    flops: int
    bytes: int

    @property
    def intensity(self) -> float:
        """Flops per byte; a problem is memory-bound where this is below the machine's own ratio of flops to bytes."""
        return self.flops / max(self.bytes, 1)

    def __str__(self) -> str:
        return f"{_unit(self.flops)}FLOP, {_unit(self.bytes)}B, {self.intensity:.3g} flop/byte"


def _unit(x: float) -> str:
    """x with three digits and the SI prefix for a power of a thousand."""
    for letter in ("", "k", "M", "G", "T"):
        if x < 1000:
            return f"{x:.3g} {letter}"
        x /= 1000
    return f"{x:.3g} P"


def cost(
    problem: Problem, group_sizes: Sequence[int] | np.ndarray | None = None, stored: tuple[int, int] | None = None
) -> Cost:
    """The cost of a problem; with group_sizes, the cost of only its owned rows and nonempty groups.

    For quantized operands, `stored` gives the bytes of lhs and rhs together with their scales; the owned rows and the
    nonempty groups count with their share of these.

    >>> from trencadis.core.arguments import problem_of
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
    if problem.form is Form.ROWS:  # the zeros of unowned rows are not counted
        rhs, out = _share(stored[1], used, problem.weights), rows * problem.n
    else:
        rhs, out = _share(stored[1], rows, problem.rows), problem.spans * problem.k * problem.n
    rows_read, products, matrices, vectors = _gated(problem)
    beside = matrices * out * problem.out.itemsize + vectors * rows * np.float32().itemsize
    return Cost(flops=products * flops, bytes=rows_read * lhs + products * rhs + beside)


def _gated(problem: Problem) -> tuple[int, int, int, int]:
    """The operands [m, k] of a problem, its products, its operands and results [m, n], and those [m].

    Other problems than those with a gated activation have one of each, and no vectors.
    """
    if problem.gate is None:
        return 1, 1, 1, 0
    tokens = 0 if problem.gather is None else 1  # the token of each row
    if problem.form is Form.CONTRACTION:
        return 1, 1 + problem.gate.pair, 1 + problem.gate.pair, tokens
    if problem.gate.activation is None:
        return 2, 2, 1, 0
    if problem.gate.pullback:  # gate, up, d gate, d up and weight * h; weight and d weight
        return 1, 1, 5, 2 + tokens
    return 1, 2, 3 if problem.gate.keep else 1, tokens


def _share(whole: int, part: int, of: int) -> int:
    """The bytes of `part` entries out of `of`, if all of them have `whole` bytes."""
    return whole * part // max(of, 1)
