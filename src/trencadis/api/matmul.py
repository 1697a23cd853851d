"""Two operations, `grouped_matmul` and `transposed_grouped_matmul`, and megablox's schedule metadata.

Every argument of the library that recurs elsewhere is explained here, once.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import PrecisionLike
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Int32, Num

from trencadis.core import arguments
from trencadis.core.activation import Activation
from trencadis.core.call import Options, Steps
from trencadis.core.debug import check_traced
from trencadis.core.jax_compat import exportable_tuple
from trencadis.core.mesh import replicated
from trencadis.core.schedule import visits
from trencadis.core.tiling import TilingLike
from trencadis.quant.operand import Operand, Sizes
from trencadis.quant.product import contraction_product, rows_product


def grouped_matmul(
    lhs: Operand,
    rhs: Operand,
    group_sizes: Sizes,
    preferred_element_type: DTypeLike | None = jnp.float32,
    tiling: TilingLike = None,
    group_offset: ArrayLike | None = None,
    existing_out: Num[Array, "m n"] | None = None,
    transpose_rhs: bool = False,
    interpret: bool = False,
    precision: PrecisionLike = None,
    *,
    bias: Num[Array, "g n"] | None = None,
    activation: Activation | None = None,
    backend: str | None = None,
) -> Num[Array, "m n"]:
    """Multiply consecutive groups of rows, each by its own matrix: `out[s_i:e_i] = lhs[s_i:e_i] @ rhs[i]`.

    Group i holds the `group_sizes[i]` rows after those of group i - 1. Rows that no group covers are exactly 0 in the
    result and in the gradient of lhs. NaN or Inf in one group never reaches another. Sums are kept in float32 (float64
    for float64, int32 for integers). Differentiable in lhs, rhs, bias and existing_out, any number of times. Operands
    may be sharded over a mesh: each device computes its part, and matrices are not gathered; see `docs/sharding.md`.

    Args:
      lhs: `[m, k]`, the rows, sorted by group; an array, a `quant.Scaled` or a `qwix.QArray`.
      rhs: `[g, k, n]`, or `[g, n, k]` with transpose_rhs: one matrix per group; likewise.
      group_sizes: integers, one per group. They may name more groups than rhs holds: see group_offset. Negative sizes
        or a sum past m raise if they are known now; traced ones are clamped (`debug_checks` makes them errors). With
        `[blocks, g]`, each block of `m / blocks` rows is sorted by itself and has its own sizes, as do shards of rows.
      preferred_element_type: the dtype of the result; None means that of `jax.lax.dot`, where a quantized operand has
        the dtype of its scales. Gradients have the dtypes of their operands.
      tiling: tile sizes in the units of m, k and n: None (planned), a `Tiling`, `(tm, tk, tn)`, a function of
        `(m, k, n)` that gives one of these, or a `Tilings` with one for each pass. The xla backend splits rows by it
        and leaves k and n to XLA's matmul; the reference has no tiles.
      group_offset: the first of the consecutive groups whose matrices rhs holds, an int or an integer array of shape
        `()` or `(1,)`. For a shard of the experts: rows of other groups count as not covered.
      existing_out: `[m, n]` of the result's dtype; the product is added to it. Its buffer is reused where it is not
        needed any more: a temporary under `jit`, or an argument that the caller donates.
      transpose_rhs: rhs is stored `[g, n, k]`. Nothing is transposed in memory.
      interpret: run the plainly written reference instead of a compiled kernel; with backend "tpu", "gpu" or "triton",
        interpret its kernel. Both are slow.
      precision: as in `jax.lax.dot`.
      bias: `[g, n]`, added to the rows of each group.
      activation: a function of one number, such as `jax.nn.silu`, applied after the bias. Not with existing_out.
      backend: "tpu", "gpu", "triton", "cpu", "xla" or "reference", or None for the best that supports the problem on
        the machine that it is compiled for.

    Returns:
      `existing_out + activation(product + bias)`, `[m, n]`.

    >>> x = jnp.arange(8.0).reshape(4, 2)
    >>> w = jnp.stack([jnp.eye(2), 10 * jnp.eye(2)])
    >>> grouped_matmul(x, w, jnp.array([1, 2]))  # no group owns the last row
    Array([[ 0.,  1.],
           [20., 30.],
           [40., 50.],
           [ 0.,  0.]], dtype=float32)
    """
    options = Options(tiling=tiling, interpret=interpret, precision=precision, backend=backend)
    steps = Steps(bias=bias, existing_out=existing_out, activation=activation)
    return rows_product(
        lhs, rhs, group_sizes, preferred_element_type, options, steps,
        transpose_rhs=transpose_rhs, group_offset=group_offset,
    )  # fmt: skip


def transposed_grouped_matmul(
    lhs: Operand,
    rhs: Operand,
    group_sizes: Sizes,
    preferred_element_type: DTypeLike | None = jnp.float32,
    tiling: TilingLike = None,
    group_offset: ArrayLike | None = None,
    num_actual_groups: int | None = None,
    existing_out: Num[Array, "g k n"] | None = None,
    interpret: bool = False,
    *,
    transpose_lhs: bool = False,
    precision: PrecisionLike = None,
    backend: str | None = None,
) -> Num[Array, "g k n"]:
    """Multiply consecutive groups of columns by the rows that match: `out[i] = lhs[:, s_i:e_i] @ rhs[s_i:e_i]`.

    The gradient of `grouped_matmul` with respect to its matrices. An empty group gives zeros. Arguments that
    `grouped_matmul` has too mean the same here.

    Args:
      lhs: `[k, m]`. Training has it as `[m, k]`: pass that with `transpose_lhs=True`, and nothing is transposed.
      rhs: `[m, n]`.
      group_sizes: as in `grouped_matmul`, one per group; with `[blocks, g]` the result is the sum over blocks of rows.
      preferred_element_type: as in `grouped_matmul`.
      tiling: as in `grouped_matmul`.
      group_offset: the first group to compute.
      num_actual_groups: how many groups to compute; by default all from group_offset on. Needed when group_offset is
        traced.
      existing_out: `[g, k, n]` of the result's dtype; the product is added to it, so that gradients can be accumulated
        in float32; in place where `grouped_matmul` would.
      interpret: as in `grouped_matmul`.
      transpose_lhs: lhs is stored `[m, k]`.
      precision: as in `grouped_matmul`.
      backend: as in `grouped_matmul`.

    Returns:
      `existing_out + product`, `[num_actual_groups, k, n]`.

    >>> x, y = jnp.arange(3.0).reshape(3, 1), jnp.ones((3, 1))  # three rows
    >>> transposed_grouped_matmul(x, y, jnp.array([1, 2, 0]), transpose_lhs=True).reshape(3)
    Array([0., 3., 0.], dtype=float32)
    """
    options = Options(tiling=tiling, interpret=interpret, precision=precision, backend=backend)
    return contraction_product(
        lhs, rhs, group_sizes, preferred_element_type, options,
        transpose_lhs=transpose_lhs, window=(group_offset, num_actual_groups), existing_out=existing_out,
    )  # fmt: skip


@exportable_tuple
class GroupMetadata(NamedTuple):
    """The schedule of a kernel over row tiles, as megablox lays it out; all int32."""

    group_offsets: Int32[Array, " groups+1"]  # the row at which each group starts; the last is the sum of the sizes
    group_ids: Int32[Array, " tiles+groups-1"]  # the group of each visit
    m_tile_ids: Int32[Array, " tiles+groups-1"]  # the row tile of each visit


def make_group_metadata(
    *,
    group_sizes: Sizes,
    m: int,
    tm: int,
    start_group: ArrayLike,
    num_nonzero_groups: int,
    visit_empty_groups: bool = True,
) -> tuple[GroupMetadata, Int32[Array, ""]]:
    """The visits of a kernel: which group works on which tile of tm rows, in order. Any m; exact for any m.

    Args:
      group_sizes: integers, one per group.
      m: rows.
      tm: rows of a tile.
      start_group: the first group of the window, an int or a traced integer.
      num_nonzero_groups: how many groups the window holds, empty ones included.
      visit_empty_groups: give an empty group one visit, as a kernel needs that has to write its zeros.

    Returns:
      A `GroupMetadata` and the number of visits. Entries past that number repeat the last visit.

    >>> sizes = jnp.array([100, 150, 50])
    >>> meta, visits = make_group_metadata(group_sizes=sizes, m=300, tm=128, start_group=0, num_nonzero_groups=3)
    >>> [(int(g), int(t)) for g, t in zip(meta.group_ids, meta.m_tile_ids)], int(visits)
    ([(0, 0), (1, 0), (1, 1), (2, 1), (2, 2)], 5)
    """
    sizes = arguments.as_sizes(group_sizes)
    first = arguments.first_group(start_group)
    arguments.check_schedule(sizes, m, tm, first, num_nonzero_groups)
    whole = replicated(jnp.asarray(sizes))
    check_traced(whole, first, int(m), int(num_nonzero_groups))
    empty = arguments.checked_flag("visit_empty_groups", visit_empty_groups)
    found = _visits(whole, int(m), int(tm), first=first, local_groups=int(num_nonzero_groups), empty=empty)
    return GroupMetadata(found.offsets, found.group, found.tile), found.count


_visits = jax.jit(visits, static_argnums=(1, 2), static_argnames=("local_groups", "empty"))  # one program, also eagerly
