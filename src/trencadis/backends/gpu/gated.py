"""Gated activations and their pullback: more copies for the mainloop, and an epilogue with several results.

    forward     Blocks of 64 columns of gate and of up alternate in shared memory, so that a consumer has the sums of the
                same columns of both, in the same registers of the same threads.
    pullback    The sums are d h. Blocks of z_gate and z_up come through the stages of the operands, as further steps
                behind those of the sum, so that they are there when the sum is.

Both are for swap-AB tiles: a block of sums is [64 columns, rows].
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mgpu

from trencadis.backends.gpu import tile_queue
from trencadis.backends.gpu.layout import SWAP_AB_UNIT, WGMMA_M, Layout
from trencadis.backends.gpu.mma_shapes import mma_shapes
from trencadis.backends.gpu.row_sums import WARPS, store_row_sums
from trencadis.backends.gpu.rows import RowsMainloop
from trencadis.backends.gpu.store import Store, Subtile, Subtiles, Sums
from trencadis.backends.gpu.tile_scheduler import Ref, Refs, Scalar, Tile, TileScheduler, i32
from trencadis.core.epilogue import Gate, elementwise, inlined
from trencadis.core.jax_compat import for_transposed_store, transpose_ref
from trencadis.core.problem import Problem

ROUGH = {"tanh", "sin", "cos", "log", "log2", "sqrt"}  # operations whose approximate instructions are too inexact
ONE = np.float32(1)


def results(problem: Problem) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shapes and dtypes of the kernel's results by name, in order."""
    out = problem.out_shape, problem.out
    if problem.gate is None:
        return {"out": out}
    if not problem.gate.pullback:
        return {name: out for name in ("out", "out_gate", "out_up")[: 3 if problem.gate.keep else 1]}
    sums = (problem.n // WGMMA_M * WARPS, problem.rows), np.dtype(np.float32)
    return {"d_gate": out, "d_up": out, "weighted": out, "row_sums": sums}


# ---------------------------------------------------------------------------------------------------------------------
# The arithmetic, on blocks of float32 in registers


def activated(gate: Gate, *z: jax.Array) -> jax.Array:
    """The activation of two blocks of pre-activations."""
    return elementwise(inlined(gate.activation, RULES))(*z)


def pulled_back(gate: Gate, d_h: jax.Array, z_gate: jax.Array, z_up: jax.Array, weight: jax.Array) -> list[jax.Array]:
    """Blocks of d gate, d up, weight * h and d h * h."""

    def of_numbers(d_h: jax.Array, z_gate: jax.Array, z_up: jax.Array, weight: jax.Array) -> tuple[jax.Array, ...]:
        h, pullback = jax.vjp(gate.activation, z_gate, z_up)
        return (*pullback(weight * d_h), weight * h, d_h * h)

    return elementwise(inlined(of_numbers, RULES))(d_h, z_gate, z_up, weight)


def _logistic(x: jax.Array, **_: Any) -> jax.Array:
    """The sigmoid without a division, which takes many instructions."""
    root = lax.rsqrt(ONE + lax.exp(-x))
    return root * root


RULES: dict[str, Callable[..., jax.Array]] = {"logistic": _logistic}


@functools.lru_cache(maxsize=256)
def approximates(gate: Gate) -> bool:
    """Whether the approximate instructions of the GPU are exact enough: that of exp is, for one."""
    number = jnp.zeros((), jnp.float32)
    function = functools.partial(pulled_back if gate.pullback else activated, gate)
    tile = number[None, None]
    traced = jax.make_jaxpr(function)(*(tile,) * (4 if gate.pullback else 2))
    return not ROUGH & {equation.primitive.name for equation in traced.eqns}


# ---------------------------------------------------------------------------------------------------------------------
# Copies of the mainloop


@dataclasses.dataclass(frozen=True)
class GatedMainloop(RowsMainloop):
    """The mainloop of the rows form with the weights of both gate and up."""

    @property
    def copies(self) -> int:
        """The number of copies of a step."""
        return 1 + self.layout.factors * self.layout.block_n // WGMMA_M

    def staged_weights(self, refs: Refs, tile: Tile, low: Scalar, k: Any, stage: Scalar) -> list[tuple[Ref, Ref]]:
        """The weights of a step: blocks of 64 columns of gate and up in turn."""
        found = []
        for at in range(self.layout.block_n // WGMMA_M):
            n = pl.ds(pl.multiple_of(tile.column + i32(at * WGMMA_M), WGMMA_M), WGMMA_M)
            for which, name in enumerate(("rhs", "up")):
                columns = pl.ds((2 * at + which) * WGMMA_M, WGMMA_M)
                place = (stage, columns) if self.problem.transpose_rhs else (stage, slice(None), columns)
                found.append((refs[name].at[self.weights_at(tile, n, k)], refs["smem_rhs"].at[place]))
        return found


@dataclasses.dataclass(frozen=True)
class PullbackMainloop(RowsMainloop):
    """The mainloop of the rows form, followed by steps that load the pre-activations."""

    def load(self, refs: Refs, scheduler: TileScheduler, tile: Tile, step: Scalar, stage: Scalar) -> None:
        """Start the TMA copies of one step, of either kind."""
        first = tile.steps - i32(self.layout.epilogue_steps)
        operands = functools.partial(super().load, refs, scheduler, tile, step, stage)
        lax.cond(step < first, operands, functools.partial(self._load_z, refs, tile, step - first, stage))

    def _load_z(self, refs: Refs, tile: Tile, turn: Scalar, stage: Scalar) -> None:
        """Start the copies of a block of z_gate and z_up, to where lhs and rhs are in other steps.

        Consumers take turns: each step is for the next block of one of them.
        """
        consumers = i32(self.layout.consumers)
        block = lax.rem(turn, consumers) * mma_shapes(self.problem, self.layout).share(tile) + lax.div(turn, consumers)
        columns = pl.ds(pl.multiple_of(tile.column + block * i32(WGMMA_M), WGMMA_M), WGMMA_M)
        self.load_rows(refs, tile, columns, stage, {"smem_lhs": refs["z_gate"], "smem_rhs": refs["z_up"]})


def mainloop_for(problem: Problem, layout: Layout) -> RowsMainloop:
    """The mainloop of a problem of the rows form."""
    if problem.gate is None:
        return RowsMainloop(problem, layout)
    return (PullbackMainloop if problem.gate.pullback else GatedMainloop)(problem, layout)


# ---------------------------------------------------------------------------------------------------------------------
# Epilogues


@dataclasses.dataclass(frozen=True)
class GatedStore(Store):
    """The epilogue of gate and up: the activation, and the pre-activations where they are kept."""

    def store(self, tile: Tile, subtiles: Subtiles, sums: Sums, mine: Scalar) -> None:
        """Store all results of the blocks of a consumer."""
        self.wait_vectors(tile)
        for block in range(len(subtiles) // self.layout.factors):
            some = functools.partial(self._store_block, tile, subtiles.at(block), sums, block)
            pl.when(mine > block)(some) if block else some()

    def _store_block(self, tile: Tile, subtile: Subtile, sums: Sums, block: int) -> None:
        """Store all results of 64 columns, one after the other."""
        gate = self.problem.gate
        assert gate is not None

        def z(which: int, row: int, rows: int) -> jax.Array:
            acc = sums.of_block(2 * block + which, row, row + rows)
            if self.problem.epilogue.bias is not None:
                acc = acc + self._spread(("bias", "bias_up")[which], subtile, row, acc.shape).astype(acc.dtype)
            return acc.astype(self.problem.out)

        def h(row: int, rows: int) -> jax.Array:
            found = activated(gate, *(z(which, row, rows).astype(jnp.float32) for which in range(2)))
            owned = lax.select(lax.broadcast(tile.steps, found.shape) > 0, found, jnp.zeros_like(found))
            return owned.astype(self.problem.out)

        every: dict[str, Callable[[int, int], jax.Array]] = {"out": h}
        if gate.keep:
            every |= {name: functools.partial(z, which) for which, name in enumerate(("out_gate", "out_up"))}
        for name, part in every.items():
            parts = ((row, part(row, rows)) for row, rows in sums.slices(WGMMA_M))
            _store_matrix(self, tile, subtile, name, parts)


@dataclasses.dataclass(frozen=True)
class PullbackStore(Store):
    """The epilogue of d h: the gradients of gate and up, the weighted activation, and sums over columns."""

    done: Scalar  # steps of all tiles before this one

    def store(self, tile: Tile, subtiles: Subtiles, sums: Sums, mine: Scalar) -> None:
        """Store all results of the blocks of a consumer: zeros in rows without an owner."""
        pull_back = functools.partial(self._pull_back, tile, subtiles, sums, mine)
        lax.cond(tile.steps > 0, pull_back, functools.partial(self._zero, tile, subtiles, mine))

    def _pull_back(self, tile: Tile, subtiles: Subtiles, sums: Sums, mine: Scalar) -> None:
        """Store the results of a tile, block by block, as the pre-activations arrive."""
        mgpu.barrier_wait(self._vectors_full)
        consumers = self.layout.consumers
        first = self.done + tile.steps - i32(self.layout.epilogue_steps)
        for block in range(self.layout.epilogue_steps // consumers):
            turn, after = first + i32(block * consumers), first + i32((block + 1) * consumers)
            if block >= len(subtiles):
                self._pass(turn, after)
                continue
            own = turn + self.warpgroup
            self._pass(turn, own)
            mgpu.barrier_wait(self.refs["full"].at[self._stage(own)])
            compute = functools.partial(self._store_block, tile, subtiles.at(block), sums, own)
            lax.cond(mine > block, compute, functools.partial(self._release, own))
            self._pass(own + i32(1), after)

    def _store_block(self, tile: Tile, subtile: Subtile, sums: Sums, step: Scalar) -> None:
        """Store the results of 64 columns, from the pre-activations that this step has loaded.

        All results are computed at once. While the first is written to the buffer, the two others take the registers of
        the sums.
        """
        kept: dict[str, list[tuple[int, jax.Array]]] = {"d_up": [], "weighted": []}

        def d_gate() -> Iterable[tuple[int, jax.Array]]:
            for row, rows in sums.slices(SWAP_AB_UNIT):  # as few registers at a time as can be
                first, *others = self._results(tile, subtile, sums, step, row, rows)
                for parts, other in zip(kept.values(), others, strict=True):
                    parts.append((row, other))
                yield row, first

        _store_matrix(self, tile, subtile, "d_gate", d_gate())
        self._release(step)
        for name, parts in kept.items():
            _store_matrix(self, tile, subtile, name, parts)

    def _results(
        self, tile: Tile, subtile: Subtile, sums: Sums, step: Scalar, row: int, rows: int
    ) -> list[jax.Array]:
        """Some rows of the three results [64, rows]; their sums over columns are stored at once."""
        gate, stage = self.problem.gate, self._stage(step)
        assert gate is not None
        staged = (self.refs[name].at[stage, pl.ds(row, rows)] for name in ("smem_lhs", "smem_rhs"))
        z = [for_transposed_store(transpose_ref(ref)[...]).astype(jnp.float32) for ref in staged]
        d_h = for_transposed_store(sums.of_block(subtile.acc_row // WGMMA_M, row, row + rows))
        weight = for_transposed_store(self._spread("weight", subtile, row, d_h.shape))
        *found, products = pulled_back(gate, d_h, *z, weight)
        self._store_sums(tile, subtile, products, i32(row))
        return [each.astype(self.problem.out) for each in found]

    def _store_sums(self, tile: Tile, subtile: Subtile, products: jax.Array, row: Scalar) -> None:
        """Store the sums over columns of products [64, rows], which start at a row of the tile."""
        column = tile.column + subtile.column
        if self.layout.columns % WGMMA_M:  # others are there to align copies
            at = lax.broadcasted_iota(jnp.int32, products.shape, 0) + column
            products = lax.select(at < i32(self.layout.columns), products, jnp.zeros_like(products))
        inside = lax.convert_element_type(column < i32(self.problem.n), jnp.int32)
        valid = (edge * inside - row for edge in (tile.valid_from, tile.valid_to))
        first = lax.div(column, i32(WGMMA_M)) * i32(WARPS)
        store_row_sums(self.refs["row_sums"], products, (first, tile.row + row), *valid, self.layout.interpreted)

    def _zero(self, tile: Tile, subtiles: Subtiles, mine: Scalar) -> None:
        """Store zeros to the results of a tile whose rows have no owner."""
        buffer = self._buffer(subtiles.at(0), 0, self.layout.block_m)
        mgpu.wait_smem_to_gmem(0, wait_read_only=True)
        transpose_ref(buffer)[...] = for_transposed_store(jnp.zeros(buffer.shape[::-1], self.problem.out))
        mgpu.commit_smem()

        def block(i: Scalar, _: None) -> None:
            subtile = subtiles.at(0, i)._replace(buffer=0)
            for name in ("d_gate", "d_up", "weighted"):
                self._copy_span(tile, subtile, name)
            zeros = jnp.zeros((WGMMA_M, SWAP_AB_UNIT), jnp.float32)
            units = i32(self.layout.block_m // SWAP_AB_UNIT)
            lax.fori_loop(i32(0), units, lambda j, _: self._store_sums(tile, subtile, zeros, j * i32(SWAP_AB_UNIT)), None)

        lax.fori_loop(i32(0), mine, block, None)
        mgpu.commit_smem_to_gmem_group()

    def _stage(self, step: Scalar) -> Scalar:
        """The stage of a step, counted over all tiles."""
        return tile_queue.slot(step, self.layout.stages)

    def _release(self, step: Scalar) -> None:
        """Tell the producer that this consumer has read a step."""
        mgpu.barrier_arrive(self.refs["empty"].at[self._stage(step)])

    def _pass(self, first: Scalar, end: Scalar) -> None:
        """Release steps that are for other consumers."""

        def step(i: Scalar, _: None) -> None:
            mgpu.barrier_wait(self.refs["full"].at[self._stage(i)])
            self._release(i)

        lax.fori_loop(first, end, step, None)


def _store_matrix(
    store: Store, tile: Tile, subtile: Subtile, name: str, parts: Iterable[tuple[int, jax.Array]]
) -> None:
    """Store a block of a result, given as parts [64, rows] from a row on, through the buffer of its subtile."""
    mgpu.wait_smem_to_gmem(0, wait_read_only=True)  # earlier copies have read the buffer
    for row, part in parts:
        transpose_ref(store._buffer(subtile, row, part.shape[1]))[...] = for_transposed_store(part)
    mgpu.commit_smem()
    store._copy_span(tile, subtile, name)
    mgpu.commit_smem_to_gmem_group()


def store_for(problem: Problem, layout: Layout, refs: Refs, warpgroup: Scalar, done: Scalar) -> Store:
    """The epilogue of a problem for one consumer; `done` steps came before its tile."""
    if problem.gate is None:
        return Store(problem, layout, refs, warpgroup)
    if problem.gate.pullback:
        return PullbackStore(problem, layout, refs, warpgroup, done)
    return GatedStore(problem, layout, refs, warpgroup)
