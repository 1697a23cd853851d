"""How a general grouped GEMM is computed: the decision of its backend, and the reason for it."""

from __future__ import annotations

import dataclasses
from typing import Literal

from trencadis.core.target import Target
from trencadis.core.tiling import Tiling
from trencadis.gemm.problem import GemmProblem

Layout = Literal["empty", "unrolled", "tiled"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GemmPlan:
    """A problem, the target it is compiled for, how it is computed there, and why."""

    problem: GemmProblem
    target: Target
    layout: Layout
    tile: Tiling | None = None  # of the tiled layout
    serial: bool = False  # of the unrolled layout: one product after the other, each in a loop of its own
    because: str

    def __str__(self) -> str:
        return f"xla, {self.layout}: {self.because}"
