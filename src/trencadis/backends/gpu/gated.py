"""Gated activations and their pullback: an epilogue with several results, and what it reads.

    forward     A consumer multiplies 64 columns of gate, and the same of up, into two sets of accumulators: both sums
                of a column are in the same thread.
    sum         The sum over k of one pair of operands goes on over that of another.
    pullback    The sums are d h. Blocks of z_gate and z_up come through the stages of the operands, as further steps
                behind those of the sum, so that they are there when the sum is.

Forward and pullback are for swap-AB tiles: a block of sums is [64 columns, rows].
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as mgpu

from trencadis.backends.gpu import tile_queue
from trencadis.backends.gpu.layout import SLICE, SLICE_SLOTS, SWAP_AB_UNIT, WGMMA_M, Layout
from trencadis.backends.gpu.mma_shapes import mma_shapes
from trencadis.backends.gpu.registers import WARPS, packed, store_row_sums, widened
from trencadis.backends.gpu.rows import RowsMainloop
from trencadis.backends.gpu.store import Store, Subtile, Subtiles, Sums
from trencadis.backends.gpu.tile_scheduler import Ref, Refs, Scalar, Tile, TileScheduler, i32
from trencadis.core.activation import elementwise, inlined
from trencadis.core.epilogue import Gate
from trencadis.core.jax_compat import for_transposed_store, transpose_ref
from trencadis.core.problem import Problem

ROUGH = {"tanh", "sin", "cos", "log", "log2", "sqrt"}  # operations whose approximate instructions are too inexact
ONE = np.float32(1)
RESULTS = "d_gate", "d_up", "weighted"  # the matrices that the pullback gives
UNITS = SLICE // SWAP_AB_UNIT  # of a slice
MOST_HEIGHTS = 4  # of copies of two operands
UNIT = (WGMMA_M, SWAP_AB_UNIT)  # the shape of one


def results(problem: Problem) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Shapes and dtypes of the kernel's results by name, in order."""
    out = problem.out_shape, problem.out
    if problem.gate is None or problem.gate.activation is None:
        return {name: out for name in ("out", "out_up")[: 2 if problem.gate is not None and problem.gate.pair else 1]}
    if not problem.gate.pullback:
        return {name: out for name in ("out", "out_gate", "out_up")[: 3 if problem.gate.keep else 1]}
    sums = (problem.n // WGMMA_M * WARPS, problem.rows), np.dtype(np.float32)
    return {**{name: out for name in RESULTS}, "row_sums": sums}


# ---------------------------------------------------------------------------------------------------------------------
# The arithmetic, on blocks of float32 in registers


def activated(gate: Gate, *z: jax.Array) -> jax.Array:
    """The activation of two blocks of pre-activations."""
    assert gate.activation is not None
    return elementwise(inlined(gate.activation, RULES))(*z)


def pulled_back(gate: Gate, d_h: jax.Array, z_gate: jax.Array, z_up: jax.Array, weight: jax.Array) -> list[jax.Array]:
    """Blocks of d gate, d up, weight * h and d h * h."""
    activation = gate.activation
    assert activation is not None

    def of_numbers(d_h: jax.Array, z_gate: jax.Array, z_up: jax.Array, weight: jax.Array) -> tuple[jax.Array, ...]:
        h, pullback = jax.vjp(activation, z_gate, z_up)
        return (*pullback(weight * d_h), weight * h, d_h * h)

    found: Any = elementwise(inlined(of_numbers, RULES))(d_h, z_gate, z_up, weight)
    return list(found)


def _logistic(x: jax.Array, **_: Any) -> jax.Array:
    """The sigmoid without a division, which takes many instructions."""
    root = lax.rsqrt(ONE + lax.exp(-x))
    return root * root


RULES: dict[str, Callable[..., jax.Array]] = {"logistic": _logistic, "add_any": lax.add}


@functools.lru_cache(maxsize=256)
def approximates(gate: Gate) -> bool:
    """Whether the approximate instructions of the GPU are exact enough: that of exp is, for one."""
    if gate.activation is None:
        return False
    number = jnp.zeros((), jnp.float32)
    function = functools.partial(pulled_back if gate.pullback else activated, gate)
    tile = number[None, None]
    traced = jax.make_jaxpr(function)(*(tile,) * (4 if gate.pullback else 2))
    return not ROUGH & {equation.primitive.name for equation in traced.eqns}


# ---------------------------------------------------------------------------------------------------------------------
# Mainloops


@dataclasses.dataclass(frozen=True)
class PairsMainloop(RowsMainloop):
    """The mainloop of the rows form over k of lhs and rhs, and then of lhs_up and up."""

    @property
    def copy_heights(self) -> list[int]:
        """Every second height, where there are many: each is a descriptor for both operands, and with too many of them
        the compiler has no uniform registers left for the index of a stage.
        """
        heights = self.layout.heights
        return heights if len(heights) <= MOST_HEIGHTS else heights[::-2][::-1]

    def load(self, refs: Refs, scheduler: TileScheduler, tile: Tile, step: Scalar, stage: Scalar) -> None:
        """Start the TMA copies of one step, of either pair."""
        half = lax.div(tile.steps, i32(2))
        second = {**refs, "lhs": refs["lhs_up"], "rhs": refs["up"]}
        load = functools.partial(functools.partial, super().load)
        lax.cond(
            step < half, load(refs, scheduler, tile, step, stage), load(second, scheduler, tile, step - half, stage)
        )


@dataclasses.dataclass(frozen=True)
class PullbackMainloop(RowsMainloop):
    """The mainloop of the rows form, followed by steps that load the pre-activations."""

    def load(self, refs: Refs, scheduler: TileScheduler, tile: Tile, step: Scalar, stage: Scalar) -> None:
        """Start the TMA copies of one step, of either kind."""
        first = tile.steps - i32(self.layout.epilogue_steps)
        operands = functools.partial(super().load, refs, scheduler, tile, step, stage)
        lax.cond(step < first, operands, functools.partial(self.load_z, refs, tile, step - first, stage))

    def load_z(self, refs: Refs, tile: Tile, turn: Scalar, stage: Scalar) -> None:
        """Start the copies of a block of z_gate and z_up, to where lhs and rhs are in other steps.

        Consumers take turns: each step is for the next block of one of them.
        """
        consumers = i32(self.layout.consumers)
        block = lax.rem(turn, consumers) * mma_shapes(self.problem, self.layout).share(tile) + lax.div(turn, consumers)
        columns = pl.ds(pl.multiple_of(tile.column + block * i32(WGMMA_M), WGMMA_M), WGMMA_M)
        self.load_rows(refs, tile, columns, stage, {"smem_lhs": refs["z_gate"], "smem_rhs": refs["z_up"]})


# ---------------------------------------------------------------------------------------------------------------------
# Epilogues


@dataclasses.dataclass(frozen=True)
class GatedStore(Store):
    """The epilogue of gate and up: the activation, and the pre-activations where they are kept."""

    def store(self, tile: Tile, subtiles: Subtiles, sums: Sums, mine: Scalar) -> None:
        """Store all results of a consumer's 64 columns, one after the other: sums are those of gate, then of up."""
        self.wait_vectors(tile)
        gate, subtile = self.problem.gate, subtiles.at(0)
        assert gate is not None and len(subtiles) == 1

        def z(which: int, row: int, rows: int) -> jax.Array:
            acc = sums.of_block(which, row, row + rows)
            if self.problem.epilogue.bias is not None:
                acc = acc + self._spread(("bias", "bias_up")[which], subtile, row, acc.shape).astype(acc.dtype)
            return packed(acc.astype(self.problem.out), self.layout.interpreted)

        def h(row: int, *z: jax.Array) -> jax.Array:
            def activate() -> jax.Array:
                wide = (widened(each, self.layout.interpreted) for each in z)
                return activated(gate, *wide).astype(self.problem.out)

            # also a block of its own for the compiler, which would compute all before it stores anything
            there = (tile.steps > 0) & (tile.units * i32(SWAP_AB_UNIT) > i32(row))
            return lax.cond(there, activate, lambda: jnp.zeros(z[0].shape, self.problem.out))

        rows = [row for row, _ in sums.slices(SLICE)]
        both = [[z(which, *each) for each in sums.slices(SLICE)] for which in range(2)]
        kept = dict(zip(("out_gate", "out_up"), both, strict=True)) if gate.keep else {}
        blocks, done = map(h, rows, *both), list[jax.Array]()
        if self.problem.epilogue.bias is not None:  # with the biases there are too few registers for the other order
            _store_matrix(self, tile, subtile, "out", zip(rows, blocks, strict=True))
        for i, (name, parts) in enumerate(kept.items()):
            _store_matrix(self, tile, subtile, name, zip(rows, parts, strict=True))
            # while the copies of a matrix are on their way, the activations of 64 rows are computed
            done += itertools.islice(blocks, sum(row // WGMMA_M == i for row in rows))
        if self.problem.epilogue.bias is None:
            _store_matrix(self, tile, subtile, "out", zip(rows, itertools.chain(done, blocks), strict=True))


@dataclasses.dataclass(frozen=True)
class PullbackStore(Store):
    """The epilogue of d h: the gradients of gate and up, the weighted activation, and sums over columns.

    It goes through a block in slices of 32 rows, in a loop: the pullback of an activation is long, and more copies of
    it would take more time to compile. The three results of a slice are below each other in a buffer for two slices.
    """

    done: Scalar  # steps of all tiles before this one

    def store(self, tile: Tile, subtiles: Subtiles, sums: Sums, mine: Scalar) -> None:
        """Store all results of the blocks of a consumer, as the pre-activations arrive."""
        first, consumers = self.done + tile.steps - i32(self.layout.epilogue_steps), i32(self.layout.consumers)
        slices = lax.div(tile.units + i32(UNITS - 1), i32(UNITS))

        def block(i: Scalar, _: None) -> None:
            turn = first + i * consumers
            own, subtile = turn + self.warpgroup, subtiles.at(0, i)

            def some(at: Scalar, _: None) -> None:
                unit = functools.partial(self._write_unit, tile, subtile, sums, i, self._stage(own))
                self._store_slice(tile, subtile, i * slices + at, at, unit)

            self._pass(tile, turn, own)
            pl.when(tile.steps > 0)(lambda: mgpu.barrier_wait(self.refs["full"].at[self._stage(own)]))
            lax.fori_loop(i32(0), slices, some, None)
            pl.when(tile.steps > 0)(lambda: self._release(own))
            self._pass(tile, own + i32(1), turn + consumers)

        pl.when(tile.steps > 0)(lambda: mgpu.barrier_wait(self._vectors_full))
        mgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the tile before, whose last slice may be in any slot
        lax.fori_loop(i32(0), mine, block, None)
        self._pass(tile, first + mine * consumers, first + i32(self.layout.epilogue_steps))

    def _store_slice(
        self, tile: Tile, subtile: Subtile, number: Scalar, at: Scalar, write_unit: Callable[[Scalar, list[Ref]], None]
    ) -> None:
        """Store the results of a slice, the `number`th of this tile."""
        slot = lax.rem(number, i32(SLICE_SLOTS)) * i32(len(RESULTS))
        parts = [subtile._replace(row=at * i32(SLICE), rows=SLICE, buffer=slot + i32(i)) for i in range(len(RESULTS))]
        mgpu.wait_smem_to_gmem(SLICE_SLOTS - 1, wait_read_only=True)  # the copies of the slice that was in the slot

        def unit(i: Scalar, _: None) -> None:
            row = i * i32(SWAP_AB_UNIT)
            write_unit(at * i32(UNITS) + i, [transpose_ref(self._buffer(part, row, SWAP_AB_UNIT)) for part in parts])

        lax.fori_loop(i32(0), lax.min(tile.units - at * i32(UNITS), i32(UNITS)), unit, None)
        mgpu.commit_smem()
        self._copy_span(tile, dict(zip(RESULTS, parts, strict=True)))
        mgpu.commit_smem_to_gmem_group()

    def _write_unit(
        self, tile: Tile, subtile: Subtile, sums: Sums, block: Scalar, stage: Scalar, unit: Scalar, buffers: list[Ref]
    ) -> None:
        """Write a unit [64, 16] of all results to their buffers, and store its sums over columns."""

        def pull_back() -> list[jax.Array]:
            return self._pulled_back(_unit(sums, block, unit), stage, unit * i32(SWAP_AB_UNIT))

        def zeros() -> list[jax.Array]:
            dtypes = [self.problem.out] * len(RESULTS) + [jnp.float32]
            return [for_transposed_store(jnp.zeros(UNIT, dtype)) for dtype in dtypes]

        *results, products = lax.cond(tile.steps > 0, pull_back, zeros)
        for buffer, x in zip(buffers, results, strict=True):
            buffer[...] = x
        self._store_sums(tile, subtile, products, unit * i32(SWAP_AB_UNIT))

    def _pulled_back(self, d_h: jax.Array, stage: Scalar, row: Scalar) -> list[jax.Array]:
        """A unit of the three results, and of the products that are summed over columns, from a row of the tile on."""
        gate, rows = self.problem.gate, pl.ds(pl.multiple_of(row, SWAP_AB_UNIT), SWAP_AB_UNIT)
        assert gate is not None
        staged = (self.refs[name].at[stage, rows] for name in ("smem_lhs", "smem_rhs"))
        z = [for_transposed_store(transpose_ref(ref)[...]).astype(jnp.float32) for ref in staged]
        weight = lax.broadcast_in_dim(self.refs["smem_weight"][self.warpgroup, rows], UNIT, (1,))
        z_gate, z_up = z
        *found, products = pulled_back(gate, for_transposed_store(d_h), z_gate, z_up, for_transposed_store(weight))
        return [*(each.astype(self.problem.out) for each in found), products]

    def _buffer(self, subtile: Subtile, row: Any, rows: int) -> Ref:
        """Some rows, from `row` on, of a part of the buffer."""
        start = pl.multiple_of(subtile.buffer * i32(SLICE), SLICE)
        return self.refs["smem_out"].at[self.warpgroup, 0, pl.ds(start + row, rows)]

    def _copy_rows(self, subtile: Subtile) -> list[int]:
        """The rows of the copies: most slices are copied whole."""
        return [SLICE, SLICE // 4, SLICE // 16, 1]

    def _store_sums(self, tile: Tile, subtile: Subtile, products: jax.Array, row: Scalar) -> None:
        """Store the sums over columns of products [64, 16], which start at a row of the tile."""
        column = tile.column + subtile.column
        if self.layout.columns % WGMMA_M:  # others are there to align copies
            at = lax.broadcasted_iota(jnp.int32, products.shape, 0) + column
            products = lax.select(at < i32(self.layout.columns), products, jnp.zeros_like(products))
        inside = lax.convert_element_type(column < i32(self.problem.n), jnp.int32)
        valid = [edge * inside - row for edge in (tile.valid_from, tile.valid_to)]
        place = lax.div(column, i32(WGMMA_M)) * i32(WARPS), tile.row + row
        store_row_sums(self.refs["row_sums"], products, place, valid, self.layout.interpreted)

    def _stage(self, step: Scalar) -> Scalar:
        """The stage of a step, counted over all tiles."""
        return tile_queue.slot(step, self.layout.stages)

    def _release(self, step: Scalar) -> None:
        """Tell the producer that this consumer has read a step."""
        mgpu.barrier_arrive(self.refs["empty"].at[self._stage(step)])

    def _pass(self, tile: Tile, first: Scalar, end: Scalar) -> None:
        """Release steps that are for other consumers, if the tile has any."""

        def step(i: Scalar, _: None) -> None:
            mgpu.barrier_wait(self.refs["full"].at[self._stage(i)])
            self._release(i)

        lax.fori_loop(first, lax.select(tile.steps > 0, end, first), step, None)


def _unit(sums: Sums, block: Scalar, unit: Scalar) -> jax.Array:
    """A unit of a block of sums: registers have no index, so that there is a branch for each."""
    blocks, rows = range(sums.rows[-1] // WGMMA_M), range(0, sums.columns[-1], SWAP_AB_UNIT)
    each = [functools.partial(sums.of_block, which, row, row + SWAP_AB_UNIT) for which in blocks for row in rows]
    return lax.switch(block * i32(len(rows)) + unit, each)


def _store_matrix(
    store: Store, tile: Tile, subtile: Subtile, name: str, parts: Iterable[tuple[int, jax.Array]]
) -> None:
    """Store a block of a result, given as parts [64, rows] from a row on, through the buffer of its subtile."""
    mgpu.wait_smem_to_gmem(0, wait_read_only=True)  # earlier copies have read the buffer
    for row, part in parts:
        transpose_ref(store._buffer(subtile, row, part.shape[1]))[...] = for_transposed_store(part)
    mgpu.commit_smem()
    store._copy_span(tile, {name: subtile})
    mgpu.commit_smem_to_gmem_group()


def store_for(problem: Problem, layout: Layout, refs: Refs, warpgroup: Scalar, done: Scalar) -> Store:
    """The epilogue of a problem for one consumer; `done` steps came before its tile."""
    if problem.gate is None or problem.gate.activation is None:
        return Store(problem, layout, refs, warpgroup)
    if problem.gate.pullback:
        return PullbackStore(problem, layout, refs, warpgroup, done)
    return GatedStore(problem, layout, refs, warpgroup)
