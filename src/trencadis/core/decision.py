"""The outcome of planning: a `Plan` says how a grouped product will run, a `Refusal` why a backend cannot run it."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from trencadis.core.activation import Activation
from trencadis.core.dtypes import accumulator
from trencadis.core.epilogue import Epilogue, Gate
from trencadis.core.problem import Problem
from trencadis.core.target import Target
from trencadis.core.tiling import Tiling


class PerformanceWarning(UserWarning):
    """A grouped product on an accelerator does not reach a kernel, or runs as many small ones.

    Issued once for each reason when a program is lowered; the usual warning filters silence it:

    >>> import warnings
    >>> warnings.simplefilter("ignore", PerformanceWarning)
    """


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A whole decision: which backend runs a product, in what layout, split how, and for what reason.

    The backend computes `problem`. Where that is less than `asked`, the rest runs as XLA operations: with `split`, the
    product is a sum over parts of k, or of weights that were multiplied by their scales; steps of the epilogue that
    `problem` lacks are applied to the finished sum.
    """

    asked: Problem
    problem: Problem
    target: Target
    backend: str
    tiling: Tiling  # in the caller's units of m, k and n
    layout: Any = None  # the backend's own description of its kernel
    split: int = 0  # parts of k of this length are products with their own scales; 0: a kernel applies all scales
    interpret: bool = False
    because: str
    notes: tuple[str, ...] = ()  # how operands are multiplied, where that is worth a sentence
    slow: str = ""  # why it is slower than it need be; said in a `PerformanceWarning`
    advice: str = ""  # what the caller can do about that, if it is slow
    faster: tuple[str, str] | None = None  # a backend that takes less time, and runs this if it can, and why

    @property
    def peeled(self) -> tuple[str, ...]:
        """The steps of the epilogue that XLA applies after the kernel, a gated activation included."""
        asked, kept = self.asked.epilogue, self.problem.epilogue
        gate = (self.divided.elementwise,) if self.divided is not None and self.divided.elementwise else ()
        rest = Epilogue(
            by_row=asked.by_row and not kept.by_row and not self.split,
            by_column=asked.by_column and not kept.by_column and not self.split,
            bias=asked.bias if kept.bias is None else None,
            activation=asked.activation if kept.activation is None else None,
            accumulate=asked.accumulate and not kept.accumulate,
        )
        entries = ("the sum over blocks of rows",) if self.asked.summed and self.asked.batch > 1 else ()
        return entries + rest.steps + gate

    @property
    def divided(self) -> Gate | None:
        """The gate of a problem whose products run by themselves, each by a plan such as this one."""
        return self.asked.gate if self.problem.gate is None else None

    def __str__(self) -> str:
        split = f", split along k into parts of {self.split}" if self.split else ""
        if self.split and self.asked.epilogue.columnwise:
            split = f", weights times scales before it, in {self.problem.rhs}"
        peeled = f", then {' + '.join(self.peeled)} in XLA" if self.peeled else ""
        asked, kept = self.asked.gate, self.problem.gate
        before = asked is not None and asked.gather is not None and (kept is None or kept.gather is None)
        each = ", rows gathered before" * before
        each += ", two kernels" * (self.divided is not None and self.divided.products == 2)
        return f"{self.backend}{each}, tile {self.tiling}{split}{peeled}: {self.because}"


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why a backend cannot run a problem, and what the caller can do about it."""

    backend: str
    reason: str
    advice: str = ""
    costly: bool = True  # False where nothing is lost, as with an empty problem

    def __str__(self) -> str:
        return self.reason


@functools.cache
def missing(backend: str, module: str, what: str, advice: str) -> Refusal | None:
    """None if a module of a backend imports. Otherwise the refusal, which says what to install."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        return Refusal(backend, f"{what} does not import: {error}; {advice}")
    return None


def peel(problem: Problem, applies: Callable[[Activation, np.dtype], bool]) -> Problem:
    """The problem, without its activation if a kernel does not apply that to this dtype: XLA does, after the kernel."""
    activation = problem.epilogue.activation
    if activation is None or applies(activation, accumulator(problem.sum, problem.out)):
        return problem
    return problem.without_activation


# why and what to do, where XLA partitions a program and cannot partition a kernel
PARTITIONED = (
    "XLA cannot partition a kernel over devices",
    "wrap the call in jax.shard_map or trencadis.sharded, or make the axes of the mesh explicit; a jax.vmap over a "
    "sharded axis goes inside",
)


class Dtypes(NamedTuple):
    """The names of the dtypes that a backend takes."""

    lhs: Sequence[str]
    rhs: Sequence[str]
    result: Sequence[str]
    bias: Sequence[str]


def unknown_dtype(backend: str, problem: Problem, known: Dtypes) -> Refusal | None:
    """The refusal of the first operand, result or bias whose dtype is not one of those that the backend takes."""
    found = [
        ("lhs", problem.lhs, known.lhs),
        ("rhs", problem.rhs, known.rhs),
        ("the result", problem.out, known.result),
    ]
    found += [] if problem.epilogue.bias is None else [("bias", problem.epilogue.bias, known.bias)]
    for name, dtype, names in found:
        if dtype.name not in names:
            return Refusal(
                backend, f"{name} is {dtype.name}; kernels take {', '.join(names)}", "cast it to one of these"
            )
    return None
