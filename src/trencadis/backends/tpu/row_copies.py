"""Rows of an array in HBM, copied to VMEM by their indices, one DMA for each; those of the next block are in flight."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from trencadis.backends.prepare import pad_to
from trencadis.backends.tpu.indexing import Index, Ref, i32

Array = jax.Array

SUBLANES = 8  # rows of 32-bit words in a vector register


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowCopies:
    """Blocks of rows of 32-bit words, in groups of 8 * parts: row i of a group is row i // parts of part i % parts."""

    rows: int  # of a block: several groups
    parts: int
    width: int  # words of a row
    dtype: np.dtype[Any]  # of the words
    scratch: tuple[Any, ...] = ()  # further memory that is needed to compute with a block

    @property
    def groups(self) -> int:
        """The number of groups in a block."""
        return self.rows // (SUBLANES * self.parts)

    def call(
        self, compute: Callable[..., None], index: Array, words: Array, known: Sequence[Array],
        result: jax.ShapeDtypeStruct, *, block: tuple[int, int], name: str, **options: Any,
    ) -> Array:  # fmt: skip
        """The result of `compute`, called with each block of rows [groups, parts, 8, width] that has arrived in VMEM.

        It gets the rows, a block of the result, as many rows of each known array, and the scratch memory. `index` has
        the index of each row of `words`: [rows, width], also of narrower numbers, or [rows, 1, width], where rows are
        contiguous.
        """
        steps = -(-index.shape[0] // self.rows)
        index = pad_to(index, (steps * self.rows,)).reshape(steps, 1, self.rows)

        def kernel(now: Ref, then: Ref, *refs: Ref) -> None:
            given, (words, out, buffer, semaphores, *scratch) = refs[: len(known)], refs[len(known) :]
            words = words if words.dtype == self.dtype else words.bitcast(self.dtype)
            step = pl.program_id(0)
            slot = lax.rem(step, i32(2))
            pl.when(step == 0)(lambda: self._start(now, words, buffer, semaphores, i32(0)))
            pl.when(step + i32(1) < steps)(lambda: self._start(then, words, buffer, semaphores, i32(1) - slot))
            arrived = buffer.at[pl.ds(slot * i32(self.groups), self.groups)]
            pltpu.make_async_copy(arrived, arrived, semaphores.at[slot]).wait()  # for as many bytes as all of them have
            compute(arrived, out, *given, *scratch)

        def smem(ahead: int) -> pl.BlockSpec:
            return pl.BlockSpec(
                (None, 1, self.rows),
                lambda step: (jnp.minimum(step + i32(ahead), i32(steps - 1)), i32(0), i32(0)),
                memory_space=pltpu.SMEM,
            )

        def vmem(columns: int) -> pl.BlockSpec:
            return pl.BlockSpec((block[0], columns), lambda step: (step, i32(0)))

        return pl.pallas_call(
            kernel,
            grid=(steps,),
            in_specs=[smem(0), smem(1), *(vmem(x.shape[1]) for x in known), pl.BlockSpec(memory_space=pltpu.HBM)],
            out_specs=vmem(block[1]),
            out_shape=result,
            scratch_shapes=[
                pltpu.VMEM((2 * self.groups, self.parts, SUBLANES, self.width), self.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                *self.scratch,
            ],
            name=name,
            **options,
        )(index, index, *known, words)

    def _start(self, index: Ref, words: Ref, buffer: Ref, semaphores: Ref, slot: Index) -> None:
        """Start the copies of a block of rows; places in a group are static, which leaves little to compute."""

        def start(group: Index) -> None:
            unit = SUBLANES * self.parts
            targets, rows = buffer.at[slot * i32(self.groups) + group], index.at[:, pl.ds(group * i32(unit), unit)]
            for i in range(unit):
                row, (sublane, part) = rows[i32(0), i32(i)], divmod(i, self.parts)
                source = words.at[row] if len(words.shape) == 3 else words.at[pl.ds(row, 1)]
                pltpu.make_async_copy(source, targets.at[i32(part), pl.ds(sublane, 1)], semaphores.at[slot]).start()

        for_each(self.groups, start)


def for_each(count: int, function: Callable[[Index], None]) -> None:
    """Call a function with each int32 below a count, in a loop; the counter of `fori_loop` is int64 where x64 is on."""

    def step(i: Index) -> Index:
        function(i)
        return i + i32(1)

    lax.while_loop(lambda i: i < i32(count), step, jnp.int32(0))
