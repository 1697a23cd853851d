"""The loop of a kernel over the tiles of its own scheduler, with prefetched operands."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from trencadis.backends.tpu.indexing import Condition, Index, Ref, i32
from trencadis.backends.tpu.pipeline import Cursor, Prefetcher, prologue

Compute = Callable[["Neighbours", dict[str, Cursor]], None]


class Neighbours(NamedTuple):
    """A tile, the one before it, and the one after it; the first tile has none before it."""

    tile: Any
    previous: Any
    following: Any
    is_first: Condition


@dataclasses.dataclass(frozen=True, slots=True)
class GroupTable:
    """Some numbers of each group, i32[fields * groups] in SMEM: what a scheduler of tiles knows of the groups."""

    table: Ref
    groups: int
    fields: ClassVar[tuple[str, ...]]

    def field(self, name: str, group: Index) -> Index:
        """A number of a group; of the last if there is no such group."""
        return self.table[i32(self.fields.index(name) * self.groups) + jnp.minimum(group, i32(self.groups - 1))]

    def first_where(self, holds: Callable[[Index], Condition], group: Index) -> Index:
        """The first group from this one on for which a condition holds, or the number of groups if there is none."""

        def passed_over(group: Index) -> Condition:
            return (group < i32(self.groups)) & jnp.logical_not(holds(group))

        return lax.while_loop(passed_over, lambda group: group + i32(1), group)


def run_tiles(scheduler: Any, prefetchers: dict[str, Prefetcher], compute: Compute) -> None:
    """Call `compute(neighbours, cursors)` for each tile, while operands of later ones are fetched."""
    first = scheduler.first_tile()
    cursors = prologue(prefetchers.values(), first)

    def step(state: tuple[Any, Any, Condition, tuple[Cursor, ...]]) -> tuple[Any, Any, Condition, tuple[Cursor, ...]]:
        tile, previous, is_first, cursors = state
        following = scheduler.next_tile(tile)
        by_name = {
            name: cursor._replace(last_use=jnp.logical_not(prefetcher.same_block(tile, following)))
            for (name, prefetcher), cursor in zip(prefetchers.items(), cursors, strict=True)
        }
        compute(Neighbours(tile, previous, following, is_first), by_name)
        cursors = tuple(each.advance(by_name[name]) for name, each in prefetchers.items())
        return following, tile, jnp.bool_(False), cursors

    start = (first, first, jnp.bool_(True), cursors)
    lax.while_loop(lambda state: jnp.logical_not(scheduler.past_end(state[0])), step, start)


def call(
    body: Callable[[dict[str, Ref], dict[str, Ref]], None],
    operands: dict[str, jax.Array],
    results: dict[str, jax.ShapeDtypeStruct],
    scratch: dict[str, Any],
    *,
    name: str,
    cost: pl.CostEstimate,
    aliases: dict[str, str] | None = None,
    options: dict[str, Any],
) -> dict[str, jax.Array]:
    """Run a kernel of one grid step; the operands "table" and "numbers" are in SMEM, and all others in HBM.

    `aliases` are operands whose memory a result takes, by their names.
    """
    names = list(operands)

    def kernel(*refs: Ref) -> None:
        outside = [*names, *results]
        hbm, vmem = dict(zip(outside, refs, strict=False)), dict(zip(scratch, refs[len(outside) :], strict=True))
        body(hbm, vmem)

    outs = pl.pallas_call(
        kernel,
        out_shape=list(results.values()),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM if n in ("table", "numbers") else pltpu.HBM) for n in names],
        out_specs=[pl.BlockSpec(memory_space=pltpu.HBM)] * len(results),
        scratch_shapes=list(scratch.values()),
        input_output_aliases={names.index(a): list(results).index(b) for a, b in (aliases or {}).items()},
        cost_estimate=cost,
        name=name,
        **options,
    )(*operands.values())
    return dict(zip(results, outs, strict=True))
