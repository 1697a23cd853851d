"""Doors for those who write lax: `ragged_dot` and `ragged_dot_general`, with lax's signatures, shapes and errors.

Every dimension finds a place in the two forms. With b batch, x outer and y inner dimensions around the ragged one:

    mode 1  ragged row     lhs [b, x, m, y, k]   rhs [b, g, k, n]      rows of m * y, for each b and x
    mode 2  ragged sum     lhs [b, x, m, y, i]   rhs [b, x, m, y, n]   contraction of m * y rows, summed over x
    mode 3  ragged batch   a plain batched product; batch entries that no group covers are 0

What is outside of the ragged dimension is vmapped; what is inside makes the groups taller.

A quantized operand keeps its scales where they are: it goes in modes 1 and 2 with one m, k and n each, in any order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import ShapeDtypeStruct, lax
from jax.lax import PrecisionLike
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array

from trencadis.api.matmul import grouped_matmul, transposed_grouped_matmul
from trencadis.core import problem as what
from trencadis.core.debug import check_traced
from trencadis.core.dtypes import ShapeDtype, accumulator
from trencadis.core.jax_compat import without_mesh
from trencadis.core.spans import clamped, offsets
from trencadis.quant.operand import Operand, Sizes, array_operand
from trencadis.quant.scaled import Scaled

SizesArray: TypeAlias = Array | np.ndarray  # numpy's where the sizes are known inside `jit`
Dims: TypeAlias = lax.RaggedDotDimensionNumbers

BASIC = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(([1], [1]), ([], [])), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


def ragged_dot(
    lhs: Operand,
    rhs: Operand,
    group_sizes: Sizes,
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: ArrayLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> Array:
    """`jax.lax.ragged_dot`, without its g-fold work: `[m, k] x [g, k, n] -> [m, n]`.

    Arguments are lax's. Beyond it, group_offset works (rhs is then a window of the groups, as in `grouped_matmul`),
    rows past the groups are 0 on every platform, and every derivative and `vmap` exists. Either operand may be
    quantized, a `quant.Scaled` or a `qwix.QArray`; in the default dtype of the result the dtype of its scales counts.

    >>> ragged_dot(jnp.ones((4, 2)), jnp.ones((2, 2, 1)), jnp.array([1, 2])).reshape(4)
    Array([2., 2., 2., 0.], dtype=float32)
    """
    return ragged_dot_general(
        lhs, rhs, group_sizes, BASIC, precision, preferred_element_type, group_offset, out_sharding
    )


def ragged_dot_general(
    lhs: Operand,
    rhs: Operand,
    group_sizes: Sizes,
    ragged_dot_dimension_numbers: lax.RaggedDotDimensionNumbers,
    precision: PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: ArrayLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> Array:
    """`jax.lax.ragged_dot_general`: the ragged dimension may be a row, a summed or a batch dimension of lhs.

    Arguments, shapes and shape errors are lax's. With group_offset, group i of the result or of rhs is group
    `group_offset + i` of group_sizes. Quantized operands are taken as by `ragged_dot`, without batch dimensions.

    >>> dims = jax.lax.RaggedDotDimensionNumbers(((([0], [0])), ([], [])), [0], [])  # sum over ragged rows
    >>> ragged_dot_general(jnp.ones((4, 2)), jnp.ones((4, 1)), jnp.array([1, 2]), dims).shape
    (2, 2, 1)
    """
    lhs, rhs, group_sizes = array_operand("lhs", lhs), array_operand("rhs", rhs), what.as_sizes(group_sizes)
    dims = ragged_dot_dimension_numbers
    out = _lax_type(lhs, rhs, group_sizes, dims, precision, preferred_element_type, group_offset)
    (contract, _), (batch, _) = dims.dot_dimension_numbers
    (ragged,) = dims.lhs_ragged_dimensions
    mode: Callable[..., Array] = _summed if ragged in contract else _batched if ragged in batch else _rows
    if isinstance(lhs, Scaled) or isinstance(rhs, Scaled):
        mode = _scaled
    result = mode(lhs, rhs, group_sizes, dims, out, precision=precision, group_offset=group_offset)
    return result if out_sharding is None else jax.sharding.reshard(result, out_sharding)


def _lax_type(
    lhs: Array | Scaled,
    rhs: Array | Scaled,
    group_sizes: SizesArray,
    dims: Dims,
    precision: PrecisionLike,
    preferred: DTypeLike | None,
    group_offset: ArrayLike | None,
) -> ShapeDtypeStruct:
    """The type of lax's result. Asking lax for it is also what raises lax's own errors."""
    ask = functools.partial(
        lax.ragged_dot_general, ragged_dot_dimension_numbers=dims, precision=precision, preferred_element_type=preferred
    )
    shape, window = group_sizes.shape, dims.rhs_group_dimensions
    if group_offset is not None and len(window) == 1 and shape and 0 <= window[0] < rhs.ndim:
        # lax has no windows: let it see the sizes of the groups that rhs holds
        shape = (*shape[:-1], min(shape[-1], rhs.shape[window[0]]))
    sizes = ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(group_sizes.dtype))
    a, b = (ShapeDtypeStruct(x.shape, dtype) for x, dtype in zip((lhs, rhs), _dtypes(lhs, rhs), strict=True))
    with without_mesh():
        return jax.eval_shape(ask, a, b, sizes)


def _dtypes(*operands: Array | Scaled) -> list[np.dtype]:
    """The dtypes that lax is shown: beside a quantized operand, the one that all of them go into."""
    if not any(isinstance(x, Scaled) for x in operands):
        return [x.dtype for x in operands]
    wide = [x.wide if isinstance(x, Scaled) else x.dtype for x in operands]
    narrow = [each.itemsize == 1 and jnp.issubdtype(each, jnp.floating) for each in wide]  # jnp promotes none of these
    kept = [jnp.bfloat16 if small else each for small, each in zip(narrow, wide, strict=True)]
    return [jnp.result_type(*kept)] * len(operands)


def _scaled(
    lhs: Array | Scaled, rhs: Array | Scaled, sizes: SizesArray, dims: Dims, out: ShapeDtypeStruct, **options: Any
) -> Array:
    """Rows or sums of operands that have the axes of `grouped_matmul`, or of its transpose, in any order."""
    (lhs_k, rhs_k), (lhs_b, _) = dims.dot_dimension_numbers
    (ragged,) = dims.lhs_ragged_dimensions
    rank = 2 if ragged in lhs_k else 3
    for name, x, axes in (("lhs", lhs, 2), ("rhs", rhs, rank)):
        if x.ndim != axes or len(lhs_k) != 1 or lhs_b:
            raise ValueError(
                f"{name}: beside a quantized operand, want {axes} dimensions, one of them summed and none a batch; "
                f"got shape {x.shape} with {dims.dot_dimension_numbers}"
            )
    if rank == 3:
        (group,) = dims.rhs_group_dimensions
        (n,) = _rest(rhs, rhs_k, [group])
        flipped = rhs_k[0] > n  # as it is stored, but for the groups
        rhs = _turned(rhs, group, *((n, *rhs_k) if flipped else (*rhs_k, n)))
        lhs = _turned(lhs, ragged, *lhs_k)
        return grouped_matmul(lhs, rhs, sizes, out.dtype, transpose_rhs=flipped, **options)
    rhs = _turned(rhs, *rhs_k, *_rest(rhs, rhs_k))
    groups, sizes = sizes.shape[-1], _with_room(sizes, options["group_offset"])
    return transposed_grouped_matmul(
        lhs, rhs, sizes, out.dtype, transpose_lhs=ragged == 0, num_actual_groups=groups, **options
    )


def _rows(lhs: Array, rhs: Array, sizes: SizesArray, dims: Dims, out: ShapeDtypeStruct, **options: Any) -> Array:
    (lhs_k, rhs_k), (lhs_b, rhs_b) = dims.dot_dimension_numbers
    (ragged,), (group,) = dims.lhs_ragged_dimensions, dims.rhs_group_dimensions
    free = _rest(lhs, lhs_k, lhs_b)
    outer, inner = free[: free.index(ragged)], free[free.index(ragged) + 1 :]
    b, x, y, k = (_size(lhs, d) for d in (lhs_b, outer, inner, lhs_k))
    m, n = lhs.shape[ragged], _rest(rhs, rhs_k, rhs_b, [group])
    lhs = lhs.transpose(*lhs_b, *free, *lhs_k).reshape(b, x, m * y, k)
    rhs = rhs.transpose(*rhs_b, group, *rhs_k, *n).reshape(b, rhs.shape[group], k, _size(rhs, n))
    over, sizes = _sizes(sizes, (b, x), m, y)

    def entry(lhs: Array, sizes: SizesArray, rhs: Array) -> Array:
        return grouped_matmul(lhs, rhs, sizes, out.dtype, **options)

    each = jax.vmap(jax.vmap(entry, in_axes=(0, over, None)), in_axes=(0, over, 0))
    return each(lhs, sizes, rhs).reshape(out.shape)


def _summed(lhs: Array, rhs: Array, sizes: SizesArray, dims: Dims, out: ShapeDtypeStruct, **options: Any) -> Array:
    (lhs_k, rhs_k), (lhs_b, rhs_b) = dims.dot_dimension_numbers
    at = lhs_k.index(dims.lhs_ragged_dimensions[0])
    # sizes that are the same for every outer summed dimension let it go inside, where it costs no second sum
    outer = range(at) if sizes.ndim > 1 else ()
    order = [*outer, at, *(d for d in range(len(lhs_k)) if d != at and d not in outer)]
    b, m, x = _size(lhs, lhs_b), lhs.shape[lhs_k[at]], _size(lhs, [lhs_k[d] for d in outer])
    y = _size(lhs, lhs_k) // max(m * x, 1)

    def rows(a: Array, summed: Sequence[int], batch: Sequence[int]) -> Array:  # [b, x, m * y, columns]
        columns = _rest(a, summed, batch)
        return a.transpose(*batch, *(summed[d] for d in order), *columns).reshape(b, x, m * y, _size(a, columns))

    over, sizes = _sizes(sizes, (b, x), m, y)
    groups = sizes.shape[-1]
    sizes = _with_room(sizes, options["group_offset"])
    kept = out.dtype if x == 1 else accumulator(lhs.dtype, rhs.dtype)

    def entry(lhs: Array, sizes: SizesArray, rhs: Array) -> Array:
        return transposed_grouped_matmul(
            lhs, rhs, sizes, kept, transpose_lhs=True, num_actual_groups=groups, **options
        )  # [g, i, n]

    each = jax.vmap(jax.vmap(entry, in_axes=(0, over, 0)), in_axes=(0, over, 0))
    products = each(rows(lhs, lhs_k, lhs_b), sizes, rows(rhs, rhs_k, rhs_b)).sum(axis=1)  # [b, g, i, n]
    return jnp.moveaxis(products, 0, 1).astype(out.dtype).reshape(out.shape)


def _batched(
    lhs: Array,
    rhs: Array,
    sizes: SizesArray,
    dims: Dims,
    out: ShapeDtypeStruct,
    *,
    precision: PrecisionLike,
    group_offset: ArrayLike | None,
) -> Array:
    (lhs_k, rhs_k), (lhs_b, rhs_b) = dims.dot_dimension_numbers
    at = lhs_b.index(dims.lhs_ragged_dimensions[0])
    m, groups = lhs.shape[lhs_b[at]], sizes.shape[-1]
    first = what.first_group(group_offset)
    what.check_window(first, 0, groups)
    _check(sizes, m, first)
    bounds = jnp.broadcast_to(offsets(sizes, m), (*(lhs.shape[d] for d in lhs_b[:at]), groups + 1))
    start = jnp.take(bounds, first, axis=-1, mode="clip")[..., None]
    entry = lax.broadcasted_iota(jnp.int32, (*bounds.shape[:-1], m), at)
    covered = (entry >= start) & (entry < bounds[..., -1:])  # [x, m]
    lhs, lhs_k = _batch_first(lhs, lhs_b, lhs_k)
    rhs, rhs_k = _batch_first(rhs, rhs_b, rhs_k)

    def mask(a: Array) -> Array:
        return jnp.where(lax.broadcast_in_dim(covered, a.shape, range(at + 1)), a, jnp.zeros_like(a))

    acc = accumulator(lhs.dtype, rhs.dtype)
    if lhs.dtype != rhs.dtype:
        lhs, rhs = lhs.astype(acc), rhs.astype(acc)
    batch = tuple(range(len(lhs_b)))
    product = lax.dot_general(
        mask(lhs), mask(rhs), ((lhs_k, rhs_k), (batch, batch)), precision=precision, preferred_element_type=acc
    )
    return product.astype(out.dtype)


def _batch_first(a: Array, batch: Sequence[int], summed: Sequence[int]) -> tuple[Array, tuple[int, ...]]:
    order = [*batch, *(d for d in range(a.ndim) if d not in batch)]
    return a.transpose(order), tuple(order.index(d) for d in summed)


def _sizes(sizes: SizesArray, lead: tuple[int, ...], m: int, inner: int) -> tuple[int | None, SizesArray]:
    """Checked sizes, times the rows inside each ragged one; and the axis they are mapped over, None where shared."""
    _check(sizes, m, np.int32(0))
    if inner != 1:
        sizes = clamped(jnp.asarray(sizes), m) * inner
    return (None, sizes) if sizes.ndim == 1 else (0, sizes.reshape(*lead, sizes.shape[-1]))


def _with_room(sizes: SizesArray, group_offset: ArrayLike | None) -> SizesArray:
    """Sizes for a result that has a place for every group, wherever it starts: those past the end are empty."""
    return sizes if group_offset is None else jnp.concatenate([sizes, jnp.zeros_like(sizes)], axis=-1)


def _check(sizes: SizesArray, m: int, first: ArrayLike) -> None:
    """Sizes known now are right; traced ones are checked at run time where that is asked for."""
    known = what.concrete(sizes)
    if known is not None and known.size:
        for row in known.reshape(-1, known.shape[-1]):
            what.check_sizes(row, m)
    elif known is None and sizes.size:
        jax.vmap(lambda row: check_traced(row, first, m, 0))(sizes.reshape(-1, sizes.shape[-1]))


def _turned(a: Array | Scaled, *axes: int) -> Array | Scaled:
    return a if axes == tuple(range(a.ndim)) else a.transpose(*axes)


def _rest(a: ShapeDtype, *taken: Sequence[int]) -> list[int]:
    return [d for d in range(a.ndim) if not any(d in dims for dims in taken)]


def _size(a: ShapeDtype, dims: Sequence[int]) -> int:
    return math.prod(a.shape[d] for d in dims)
