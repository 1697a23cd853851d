"""The operations on rows of an MoE layer: a sort by expert, gathers and gather-sums, with kernels on GPUs and TPUs.

`token` i32[m] is the token of each row, and `rows` i32[t, k] are the rows of each token, m = t * k. XLA gathers by
token, which reads each token k times; the kernel for GPUs reads it once and stores it k times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from trencadis.backends.triton import moe as kernels
from trencadis.core.dtypes import accumulator
from trencadis.core.mesh import explicit_mesh
from trencadis.core.operation import Operation, run
from trencadis.core.target import Target

PACKED = 2**31  # numbers below it, an expert times the number of assignments plus an assignment, are sorted as one
LEAST_BYTES = 1024  # of a row: XLA gathers shorter ones on a TPU as fast as a kernel starts their copies


@dataclasses.dataclass(frozen=True)
class SortByExpert(Operation):
    """The token of each row, the row of each assignment and the rows of each expert, from experts i32[t, k]."""

    num_experts: int

    def composed(self, experts: Array) -> list[Array]:
        """The results by XLA's sort and a scatter of indices."""
        order, sizes = self._sorted(experts)
        row = jnp.arange(order.shape[0], dtype=jnp.int32)
        inverse = jnp.zeros_like(order).at[order].set(row, unique_indices=True, mode="promise_in_bounds")
        return [order // max(experts.shape[1], 1), inverse, sizes]

    def on_gpu(self, arch: str, experts: Array) -> Sequence[Array] | None:
        """The results by a counting sort."""
        return kernels.sort_by_expert(experts, self.num_experts, arch)

    def on_tpu(self, target: Target, experts: Array) -> list[Array]:
        """The results by another sort for the inverse: it takes a tenth of the time of a scatter."""
        order, sizes = self._sorted(experts)
        return [order // max(experts.shape[1], 1), _inverse(order), sizes]

    def _sorted(self, experts: Array) -> tuple[Array, Array]:
        """The assignment, t * k + j, of each row, and the rows of each expert."""
        m = experts.size
        ids, row = experts.reshape(m), jnp.arange(m, dtype=jnp.int32)
        ids = jnp.where((ids >= 0) & (ids < self.num_experts), ids, self.num_experts)
        if (self.num_experts + 1) * m < PACKED:  # one number for an expert and its assignment
            order = lax.sort(ids * m + row, is_stable=False) % max(m, 1)
        else:
            _, order = lax.sort((ids, row), num_keys=1, is_stable=True)
        sizes = jnp.sum(ids[:, None] == jnp.arange(self.num_experts, dtype=jnp.int32)[None], axis=0, dtype=jnp.int32)
        return order, sizes


@dataclasses.dataclass(frozen=True)
class SpreadRows(Operation):
    """The rows [m, d] of tokens x [t, d], times weights [t, k] if there are any: of x, token, rows and weights."""

    def composed(self, x: Array, token: Array, rows: Array, *weights: Array) -> list[Array]:
        """The result by a gather."""
        entries = [take(each.reshape(-1), _assignment(token, rows)) for each in weights]
        return [_scaled(take(x, token), *entries)]

    def on_gpu(self, arch: str, x: Array, token: Array, rows: Array, *weights: Array) -> list[Array] | None:
        """The result by a kernel that reads each token once."""
        found = kernels.spread_rows(x, rows, weights[0] if weights else None, arch)
        return None if found is None else [found]

    def on_tpu(self, target: Target, x: Array, token: Array, rows: Array, *weights: Array) -> list[Array] | None:
        """The result by a kernel that copies rows, if they are long, and the weights by a sort."""
        from trencadis.backends.tpu import moe as tpu_kernels  # imports Pallas for TPUs, which takes long

        kernel = not target.partitioned and x.shape[1] * x.dtype.itemsize > LEAST_BYTES
        found = tpu_kernels.spread_rows(x, token) if kernel else None
        entries = (_sorted_by(rows.reshape(-1), each.reshape(-1)) for each in weights)
        return [_scaled(take(x, token) if found is None else found, *entries)]


@dataclasses.dataclass(frozen=True)
class SumRows(Operation):
    """The sum [t, d] of the rows [t, k] of each token: of y [m, d], rows, and weights [t, k] if there are any."""

    masked: bool  # -1 is no row

    def composed(self, y: Array, rows: Array, *weights: Array) -> list[Array]:
        """The result by a sum of k gathers, which is one loop for XLA; it would store a gather of [t, k, d]."""
        total = jnp.zeros((rows.shape[0], y.shape[1]), _wide(y))
        for j in range(rows.shape[1]):
            row = rows[:, j]
            each = take(y, jnp.maximum(row, 0) if self.masked else row).astype(total.dtype)
            each = jnp.where(row[:, None] >= 0, each, 0) if self.masked else each
            total = total + (each * weights[0][:, j, None].astype(total.dtype) if weights else each)
        return [total.astype(y.dtype)]

    def on_tpu(self, target: Target, y: Array, rows: Array, *weights: Array) -> list[Array] | None:
        """The result by a kernel that copies the rows of some tokens and sums them."""
        if target.partitioned:
            return None
        from trencadis.backends.tpu import moe as tpu_kernels

        found = tpu_kernels.sum_rows(y, rows, weights[0] if weights else None, masked=self.masked)
        return None if found is None else [found]


@dataclasses.dataclass(frozen=True)
class SpreadEntries(Operation):
    """The entries [m] of x [t, k], sorted as rows are: of x, token and rows."""

    def composed(self, x: Array, token: Array, rows: Array) -> list[Array]:
        """The result by a search for the assignment of each row."""
        return [take(x.reshape(-1), _assignment(token, rows))]

    def on_gpu(self, arch: str, x: Array, token: Array, rows: Array) -> list[Array] | None:
        """The result by a kernel that stores each entry at its row."""
        found = kernels.spread_rows(x.reshape(-1, 1), rows.reshape(-1, 1), None, arch)
        return None if found is None else [found[:, 0]]

    def on_tpu(self, target: Target, x: Array, token: Array, rows: Array) -> list[Array]:
        """The result by a sort, which takes a tenth of the time of gathers of single entries."""
        return [_sorted_by(rows.reshape(-1), x.reshape(-1))]


@dataclasses.dataclass(frozen=True)
class GatherEntries(Operation):
    """The entries [t, k] of x [m] at the rows of each token: of x and rows."""

    def composed(self, x: Array, rows: Array) -> list[Array]:
        """The result by a gather."""
        return [take(x, rows)]

    def on_tpu(self, target: Target, x: Array, rows: Array) -> list[Array]:
        """The result by sorts: of the rows, for the assignment of each, and of entries by assignment."""
        return [_sorted_by(_inverse(rows.reshape(-1)), x).reshape(rows.shape)]


def sum_of_rows(y: Array, rows: Array, weights: Array | None, *, masked: bool = False) -> Array:
    """The sum [t, d] in float32 of the rows [t, k] of each token, times weights [t, k] if any; masked: -1 is no row."""
    operation, operands = SumRows(masked), (y, rows, *(() if weights is None else (weights,)))
    if explicit_mesh(*operands) is not None:  # columns of y may be divided, and stay so
        return operation.composed(*operands)[0]
    return run(operation, *operands)[0]


def take(x: Array, index: Array) -> Array:
    """The rows of x at an index, all of which are there."""
    return x.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _scaled(x: Array, *weights: Array) -> Array:
    """The rows x [m, d], times a weight [m] of each if there are any."""
    for each in weights:
        x = (x.astype(_wide(x)) * each.astype(_wide(x))[:, None]).astype(x.dtype)
    return x


def _sorted_by(keys: Array, x: Array) -> Array:
    """The entries of x in the order of keys, all of which are different."""
    return lax.sort((keys, x), num_keys=1, is_stable=False)[1]


def _inverse(permutation: Array) -> Array:
    """The inverse of a permutation, by a sort."""
    return _sorted_by(permutation, jnp.arange(permutation.shape[0], dtype=jnp.int32))


def _wide(x: Array) -> jnp.dtype:
    """The dtype in which entries of x are summed."""
    return accumulator(x.dtype, jnp.float32)


def _assignment(token: Array, rows: Array) -> Array:
    """The assignment, t * k + j, of each row: that of its token whose row it is."""
    here = take(rows, token) == jnp.arange(token.shape[0], dtype=jnp.int32)[:, None]
    return token * rows.shape[1] + jnp.argmax(here, axis=1).astype(jnp.int32)
