"""The vectors of an epilogue in VMEM: column scales and bias along lanes, and row scales, transposed to sublanes.

Row scales arrive as lane vectors, 128 to one, since an array [m, 1] in HBM would be padded to 128 lanes. The kernel
transposes the lane vectors of a tile once, and then reads a column [rows, 1] from the transposed buffer.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from trencadis.backends.prepare import pad_to, round_up
from trencadis.backends.tpu import gating
from trencadis.backends.tpu.indexing import LANES, BlockedAxis, Dma, Index, Ref, Value, aligned_ds, i32
from trencadis.backends.tpu.layout import Layout
from trencadis.core.problem import Form, Problem

FLOAT32 = np.dtype(np.float32)


def column_vectors(problem: Problem) -> dict[str, np.dtype[Any]]:
    """The epilogue's vectors along columns, `[g, n]`: their dtypes by name."""
    steps = problem.epilogue
    up = steps.bias if len(gating.weights(problem)) > 1 else None
    constant = steps.by_column and not steps.column_block[0]  # along k
    given = {"by_column": FLOAT32 if constant else None, "bias": steps.bias, "bias_up": up}
    return {name: dtype for name, dtype in given.items() if dtype is not None}


def scratch(problem: Problem, layout: Layout) -> dict[str, Any]:
    """The scratch shapes of the epilogue's vectors, by name."""
    buffers: dict[str, Any] = {}
    for name, dtype in column_vectors(problem).items():
        buffers[name] = pltpu.VMEM((2, layout.chunks, 1, layout.chunk), dtype)
        buffers[f"{name}_sem"] = pltpu.SemaphoreType.DMA((2, layout.chunks))
    if problem.epilogue.by_row or gating.is_pullback(problem):  # the weights of rows in a pullback are used like scales
        count = _lane_vectors(problem, layout)
        buffers["by_row"] = pltpu.VMEM((layout.lhs_buffers, count, 1, LANES), FLOAT32)
        buffers["by_row_sem"] = pltpu.SemaphoreType.DMA((layout.lhs_buffers,))
        buffers["by_row_transposed"] = pltpu.VMEM((count * LANES, LANES), FLOAT32)
    return buffers


def as_lane_vectors(problem: Problem, layout: Layout, by_row: jax.Array) -> jax.Array:
    """Row scales as lane vectors `[..., 1, 128]`, padded so that each row tile or block of k can copy its own."""
    count = _lane_vectors(problem, layout)
    if problem.form is Form.ROWS:  # a tile may start inside of its first lane vector
        return pad_to(by_row, (round_up(problem.rows, LANES) + count * LANES,)).reshape(-1, 1, LANES)
    blocks = -(-problem.k // layout.block_k)
    return pad_to(by_row, (problem.local_groups, blocks * count * LANES)).reshape(-1, 1, LANES)


def _lane_vectors(problem: Problem, layout: Layout) -> int:
    """The lane vectors of row scales that one row tile, or in a contraction one block of k, needs."""
    rows = problem.form is Form.ROWS
    return round_up(layout.block_m + LANES - layout.sublane_tile if rows else layout.block_k, LANES) // LANES


class EpilogueVectors:
    """The epilogue's vectors inside a kernel: the copies that bring them to VMEM, and the part that a tile uses."""

    def __init__(
        self, problem: Problem, layout: Layout, n: BlockedAxis, hbm: dict[str, Ref], vmem: dict[str, Ref]
    ) -> None:
        self.n, self.hbm, self.vmem = n, hbm, vmem
        self.lane_vectors = _lane_vectors(problem, layout)

    def dma_columns(self, name: str, which: Index, block: Index, slot: Index, chunk: Index) -> Dma:
        """The copy of a chunk of a column vector of one group."""
        start, size = self.n.chunk_range(block, chunk)
        return pltpu.make_async_copy(
            self.hbm[name].at[which, :, aligned_ds(start, size, LANES)],
            self.vmem[name].at[slot, chunk, :, aligned_ds(0, size, LANES)],
            self.vmem[f"{name}_sem"].at[slot, chunk],
        )

    def dma_rows(self, first: Index, slot: Index) -> Dma:
        """The copy of the row scales of a tile, from the lane vector `first` on."""
        return pltpu.make_async_copy(
            self.hbm["by_row"].at[pl.ds(first, self.lane_vectors)], self.vmem["by_row"].at[slot],
            self.vmem["by_row_sem"].at[slot],
        )  # fmt: skip

    def transpose_rows(self, slot: Index) -> None:
        """Transpose the row scales that have arrived in a buffer to sublanes; they are the same in all lanes."""
        for i in range(self.lane_vectors):
            square = jnp.broadcast_to(self.vmem["by_row"][slot, i], (LANES, LANES))
            self.vmem["by_row_transposed"][i * LANES : (i + 1) * LANES, :] = square.T

    def rows(self, first: Index, size: int, unit: int) -> Value | None:
        """The transposed scales of `size` rows, `[size, chunk]` or `[size, 1]`; None if there are no row scales."""
        if "by_row_transposed" not in self.vmem:
            return None
        column = self.vmem["by_row_transposed"][aligned_ds(first, size, unit), :]
        return column[:, :1] if self.n.chunk % LANES else jnp.concatenate([column] * (self.n.chunk // LANES), axis=1)

    def columns(self, name: str, slot: Index, chunk: Index) -> Value | None:
        """A chunk of a column vector in a buffer, `[1, chunk]`; None if the epilogue has no such vector."""
        return self.vmem[name][slot, chunk] if name in self.vmem else None


def lane_vector_of(row: Index) -> Index:
    """The lane vector that holds the scale of a row."""
    return row >> i32(LANES.bit_length() - 1)
