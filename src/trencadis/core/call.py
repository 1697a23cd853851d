"""A call of a grouped product, as the caller gave it: its options, the steps of its epilogue, its sizes and window."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from trencadis.backends import INTERPRETED
from trencadis.core import arguments
from trencadis.core.activation import Activation
from trencadis.core.debug import check_traced
from trencadis.core.mesh import Over
from trencadis.core.plan import check_backend
from trencadis.core.problem import Problem
from trencadis.core.sharded import OutSharding
from trencadis.core.spans import clamp_first
from trencadis.core.tiling import Overrides, TilingLike, resolve

Array = jax.Array


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The static options of a grouped product, as the caller gave them."""

    tiling: TilingLike = None
    interpret: bool = False
    precision: Any = None
    backend: str | None = None
    out_sharding: OutSharding = None
    advise: bool = True  # whether the caller stores the operands, and can be told how
    over: Over = Over()  # manual mesh axes over which the caller has divided what is multiplied


class Steps(NamedTuple):
    """What follows a product: the operands of its epilogue, as the caller gave them, and its activation."""

    bias: Any = None
    existing_out: Any = None
    activation: Activation | None = None


def overrides_of(problem: Problem, options: Options) -> Overrides:
    """What the caller decided instead of the plan, checked."""
    backend = check_backend(options.backend)
    interpret = arguments.checked_flag("interpret", options.interpret)
    if interpret and backend not in (None, "reference", *INTERPRETED):
        raise ValueError(
            f"interpret: backend {backend!r} has no kernel to interpret; want backend=None, 'reference' or "
            f"{', '.join(map(repr, INTERPRETED))}"
        )
    tilings = resolve(options.tiling, problem.m, problem.k, problem.n)
    return Overrides(backend=backend, interpret=interpret, tilings=tilings, advise=options.advise)


def sizes_and_window(problem: Problem, group_sizes: Array | np.ndarray, group_offset: Any) -> tuple[Array, Array]:
    """The checked run-time integers of a problem: group sizes `[batch, groups]`, first group of each `[batch]`."""
    first = arguments.first_group(group_offset)
    arguments.check_sizes(group_sizes, problem.m)
    arguments.check_window(first, problem.local_groups, problem.groups)
    sizes = jnp.asarray(group_sizes)
    check_traced(sizes, first, problem.m, problem.local_groups)
    if arguments.concrete(first) is None:  # so that no kernel counts past 2**31
        first = clamp_first(first, problem.groups, problem.local_groups)
    if sizes.ndim == 2:
        return sizes, jnp.broadcast_to(jnp.asarray(first), (problem.batch,))
    return lax.expand_dims(sizes, (0,)), jnp.asarray(first.reshape(1))
