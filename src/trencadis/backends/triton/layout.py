"""The layout of one kernel: its tile, warps, pipeline stages, and the order of its tiles.

A tile of the result is block_m x block_n, and the mainloop walks the sum in steps of block_k. In the rows form M, N, K
are the problem's m, n, k. In a contraction the result is [k, n] for each group and the sum runs over rows, so that M is
the problem's k and K its rows.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The static parameters of a kernel beside its problem."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int  # steps that are on their way at once
    raster_group: int = 8  # tiles of a column that run before the next column: an L2 rasterization group
    programs: int = 0  # persistent programs, whose loops over tiles and over steps are one; 0: one for each tile
    peeled: bool = True  # rows: the last step of a sum stands apart, so that the others need no mask
    short_m: int = 0  # rows: the height of tiles that have no more rows than this; 0: all are block_m high
    tma: bool = False  # by the tensor memory accelerator: operands in the rows form, the result in a contraction

    def replace(self, **changes: Any) -> Layout:
        """The same layout with some fields changed."""
        return dataclasses.replace(self, **changes)

    def __str__(self) -> str:
        more = f", {self.programs} persistent programs" if self.programs else ""
        more += f", short tiles of {self.short_m}" if self.short_m else ""
        more += ", TMA" if self.tma else ""
        return f"{self.block_m} x {self.block_n} x {self.block_k}, {self.warps} warps, {self.stages} stages{more}"
