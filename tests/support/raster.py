"""The visits of a fixed raster in plain Python, which those of `core.schedule` are compared with."""

from collections.abc import Sequence

import numpy as np


def walk(
    group_sizes: Sequence[int] | np.ndarray,
    m: int,
    height: int,
    *,
    first: int = 0,
    local_groups: int | None = None,
    empty: bool = False,
) -> list[tuple[int, int]]:
    """The pairs (group, tile) of `core.schedule.visits` by a plain loop over groups and tiles."""
    last = len(group_sizes) if local_groups is None else first + local_groups
    tiles, pairs, start = -(-m // height), [], 0
    for group, size in enumerate(group_sizes):
        end = min(start + max(int(size), 0), m)
        mine = [t for t in range(tiles) if max(start, t * height) < min(end, (t + 1) * height)]
        if end == start and empty:
            mine = [min(start // height, max(tiles - 1, 0))]
        if first <= group < last:
            pairs += [(group, t) for t in mine]
        start = end
    return pairs
