"""Vectors that an epilogue takes: those along columns, and scales of rows, which are turned from lanes to sublanes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from trencadis.backends.prepare import filled, up
from trencadis.backends.tpu.columns import LANES, Columns, i32, span
from trencadis.backends.tpu.layout import Layout
from trencadis.core.problem import Form, Problem


def across(problem: Problem) -> dict[str, Any]:
    """The vectors along columns, `[g, n]`: their dtypes by name."""
    ends = problem.epilogue
    given = {"by_column": np.dtype(np.float32) if ends.by_column else None, "bias": ends.bias}
    return {name: dtype for name, dtype in given.items() if dtype is not None}


def scratch(problem: Problem, layout: Layout) -> dict[str, Any]:
    """The buffers of the vectors."""
    buffers: dict[str, Any] = {}
    for name, dtype in across(problem).items():
        buffers[name] = pltpu.VMEM((2, layout.chunks, 1, layout.chunk), dtype)
        buffers[f"{name}_sem"] = pltpu.SemaphoreType.DMA((2, layout.chunks))
    if problem.epilogue.by_row:
        lines = _lines(problem, layout)
        buffers["by_row"] = pltpu.VMEM((layout.x_slots, lines, 1, LANES), np.float32)
        buffers["by_row_sem"] = pltpu.SemaphoreType.DMA((layout.x_slots,))
        buffers["down"] = pltpu.VMEM((lines * LANES, LANES), np.float32)
    return buffers


def laid(problem: Problem, layout: Layout, by_row: jax.Array) -> jax.Array:
    """Scales of rows as a kernel reads them: `[..., 1, 128]`, in lines that hold what a tile or a block takes."""
    lines = _lines(problem, layout)
    if problem.form is Form.ROWS:  # a tile may begin inside its first line
        return filled(by_row, (up(problem.rows, LANES) + lines * LANES,)).reshape(-1, 1, LANES)
    blocks = -(-problem.k // layout.deep)
    return filled(by_row, (problem.local_groups, blocks * lines * LANES)).reshape(-1, 1, LANES)


def _lines(problem: Problem, layout: Layout) -> int:
    """Lines of 128 scales that one tile of rows, or one block of k, takes."""
    rows = problem.form is Form.ROWS
    return up(layout.tallest + LANES - layout.slab, LANES) // LANES if rows else up(layout.deep, LANES) // LANES


class Scales:
    """The vectors of a kernel: how they come in, and what a tile takes of them."""

    def __init__(self, problem: Problem, layout: Layout, n: Columns, hbm: dict[str, Any], vmem: dict[str, Any]) -> None:
        self.n, self.hbm, self.vmem = n, hbm, vmem
        self.lines = _lines(problem, layout)

    def copy(self, name: str, which: Any, block: Any, slot: Any, part: Any) -> Any:
        """The copy of a chunk of a vector along columns."""
        at, size = self.n.of_chunk(block, part)
        return pltpu.make_async_copy(
            self.hbm[name].at[which, :, span(at, size, LANES)],
            self.vmem[name].at[slot, part, :, span(0, size, LANES)],
            self.vmem[f"{name}_sem"].at[slot, part],
        )

    def copy_lines(self, first: Any, slot: Any) -> Any:
        """The copy of the scales of rows from a line on."""
        return pltpu.make_async_copy(
            self.hbm["by_row"].at[pl.ds(first, self.lines)], self.vmem["by_row"].at[slot],
            self.vmem["by_row_sem"].at[slot],
        )  # fmt: skip

    def turn(self, slot: Any) -> None:
        """Turn scales that have come in: from here on they lie along rows."""
        for i in range(self.lines):
            line = jnp.broadcast_to(self.vmem["by_row"][slot, i], (LANES, LANES))
            self.vmem["down"][i * LANES : (i + 1) * LANES, :] = line.T

    def down(self, first: Any, size: int, unit: int) -> Any:
        """Scales of some rows, `[size, 1]`; None if there are none."""
        return self.vmem["down"][span(first, size, unit), :1] if "down" in self.vmem else None

    def across(self, name: str, ahead: dict[str, Any], part: Any) -> Any:
        """A chunk of a vector along columns, `[1, chunk]`; None if there is none."""
        return self.vmem[name][ahead[name].slot, part] if name in self.vmem else None


def line(row: Any) -> Any:
    """The line in which the scale of a row lies."""
    return row >> i32(LANES.bit_length() - 1)
