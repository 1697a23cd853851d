"""Who does the work. `BACKENDS` is in order of preference; a new backend is one entry here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax

from trencadis.backends import gpu, reference, tpu, xla
from trencadis.core.devices import CARDS
from trencadis.core.problem import Problem
from trencadis.core.target import Target
from trencadis.core.tiling import Tiling


class Backend(Protocol):
    """What a backend module has."""

    def supports(self, problem: Problem, target: Target) -> str | None:
        """None, or the reason why not."""

    def tiling(self, problem: Problem, target: Target) -> Tiling:
        """The tile it prefers."""

    def run(self, problem: Problem, plan: Any, *operands: jax.Array) -> jax.Array:
        """The result; operands are lhs, rhs, group_sizes, first group, then those of the epilogue."""


BACKENDS: dict[str, Backend] = {"tpu": tpu, "gpu": gpu, "xla": xla, "reference": reference}
# what some backends say of how they would do a problem on a target: a sentence, or None
NOTES: dict[str, Callable[[Problem, Target], str | None]] = {"tpu": tpu.note}
# backends whose kernels can be interpreted anywhere, and what they are interpreted as
INTERPRETED = {"tpu": Target(platform="tpu"), "gpu": Target(platform="cuda", kind=CARDS["h200"].kind)}
