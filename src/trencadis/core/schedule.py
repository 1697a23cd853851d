"""The schedules that are not computed by a kernel itself: megablox's fixed raster, and row tiles for pictures.

A fixed raster has tiles of equal height, and a tile that two groups share is visited by each, one after the other:

    rows    0 1 2 3 │ 4 5 6 7        sizes [3, 0, 5], tiles of 4 rows
    group   0 0 0 2 │ 2 2 2 2
    visits  (0,0) (2,0) (2,1)

Our own kernels start a tile where its group starts, so they do not use a raster; `make_group_metadata` and
`show(sizes, tile=...)` do. All integers are exact, for any number of tiles. What our kernels do instead is told by the
function `row_tiles` of each backend, as a list of `RowTile`.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Int32, Integer

from trencadis.core.spans import offsets


class RowTile(NamedTuple):
    """A tile of rows that a kernel computes for one group, and the rows of that group among them."""

    rows: range  # all rows that are computed, those of other groups and past the last row included
    owned: range  # the rows that count: they belong to the group, and no other of its tiles has them


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Visits:
    """The (group, tile) pairs of a fixed raster, in order of rows; entries from `count` on repeat the last visit."""

    offsets: Int32[Array, " bounds"]  # [groups + 1]: the row at which each group starts
    group: Int32[Array, " visits"]
    tile: Int32[Array, " visits"]
    count: Int32[Array, ""]  # visits that are real
    height: int = dataclasses.field(metadata={"static": True})  # rows of a tile

    def pairs(self) -> list[tuple[int, int]]:
        """The first `count` visits as a list of Python pairs (group, tile)."""
        n = int(self.count)
        return list(zip(np.asarray(self.group)[:n].tolist(), np.asarray(self.tile)[:n].tolist(), strict=True))

    def __str__(self) -> str:
        if isinstance(self.count, jax.core.Tracer):
            return f"at most {self.group.shape[0]} visits to tiles of {self.height} rows"
        return f"{int(self.count)} visits to tiles of {self.height} rows: " + " ".join(
            f"({g},{t})" for g, t in self.pairs()
        )


def visits(
    group_sizes: Integer[Array | np.ndarray, " g"],
    m: int,
    height: int,
    *,
    first: ArrayLike = 0,
    local_groups: int | None = None,
    empty: bool = False,
) -> Visits:
    """Compute the visits of the groups `[first, first + local_groups)`; with `empty`, an empty group gets one visit.

    >>> print(visits(jnp.array([3, 0, 5]), 8, 4))
    3 visits to tiles of 4 rows: (0,0) (2,0) (2,1)
    """
    groups = group_sizes.shape[0]
    local_groups = groups if local_groups is None else local_groups
    tiles = -(-m // height)
    bounds = offsets(group_sizes, m)
    start, end = bounds[:-1], bounds[1:]
    first_tile = jnp.minimum(start // height, max(tiles - 1, 0))
    count = jnp.where(end > start, (end + height - 1) // height - start // height, np.int32(empty))
    group = np.arange(groups, dtype=np.int32)
    count = jnp.where((group >= first) & (group < first + local_groups), count, 0)
    bound = max(tiles, 1) + groups - 1
    before = jnp.cumsum(count, dtype=jnp.int32) - count  # visits of the groups before
    total = jnp.sum(count, dtype=jnp.int32)
    step = jnp.minimum(np.arange(bound, dtype=np.int32), jnp.maximum(total - 1, 0))
    if groups == 0:
        return Visits(offsets=bounds, group=step, tile=step, count=total, height=height)
    if groups == 1:  # the general way would have XLA fold a sum over all visits at compile time
        which = jnp.zeros_like(step)
    else:
        which = jnp.repeat(group, count, total_repeat_length=bound)[step]
    return Visits(
        offsets=bounds, group=which, tile=first_tile[which] + step - before[which], count=total, height=height
    )
