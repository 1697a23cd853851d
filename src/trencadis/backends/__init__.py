"""The backends, which plan and run grouped products, in the order of preference.

A new one is an entry of `BACKENDS`, and of the other tables as far as they apply to it.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax

from trencadis.backends import cpu, gpu, reference, tpu, triton, xla
from trencadis.core.decision import Plan, Refusal
from trencadis.core.devices import CARDS
from trencadis.core.problem import Problem
from trencadis.core.schedule import RowTile
from trencadis.core.target import Target
from trencadis.core.tiling import Overrides


class Backend(Protocol):
    """The functions of a backend module: one decides everything, one executes that decision, one tells its tiles."""

    def plan(self, problem: Problem, target: Target, overrides: Overrides) -> Plan | Refusal:
        """The whole decision for a problem on a target, or the reason why this backend cannot run it."""

    def run(self, plan: Plan, *operands: jax.Array) -> Any:
        """The result of `plan.problem`, or a list of them where it has a gated activation.

        Operands are lhs, rhs, group sizes, first group, then the epilogue's, then those of the gated activation.
        """

    def row_tiles(self, problem: Problem, layout: Any, start: int, end: int) -> list[RowTile]:
        """The row tiles of a group that owns the rows [start, end), by the problem and the layout of a plan."""


BACKENDS: dict[str, Backend] = {
    "tpu": tpu, "gpu": gpu, "triton": triton, "cpu": cpu, "xla": xla, "reference": reference
}  # fmt: skip
# the backends with kernels for a platform: a product there that reaches none of them is slow
KERNELS: dict[str, tuple[str, ...]] = {"tpu": ("tpu",), "cuda": ("gpu", "triton"), "rocm": ("triton",)}
# the backends that can apply a gated activation
GATED: tuple[str, ...] = ("tpu", "gpu", "cpu", "xla")
# the backends that can read interleaved weights; for others they are put in order first
INTERLEAVED: tuple[str, ...] = ("gpu", "triton")
# backends whose kernels can be interpreted anywhere, and the device that the interpreter stands for
_H200 = Target(platform="cuda", kind=CARDS["h200"].kind)
INTERPRETED = {"tpu": Target(platform="tpu"), "gpu": _H200, "triton": _H200}
