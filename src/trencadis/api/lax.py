"""`ragged_dot` and `ragged_dot_general` with lax's signatures, shapes and errors, for code that already calls lax.

lax has three modes, by the role of the ragged dimension m of lhs. Each is one of our two forms, or a plain product.
With batch dimensions b, and dimensions x before and y after m among those of the same role:

    mode 1, m is a row        lhs [b, x, m, y, k]   rhs [b, g, k, n]      rows form, m * y rows for each b and x
    mode 2, m is contracted   lhs [b, x, m, y, i]   rhs [b, x, m, y, n]   contraction form, m * y rows, summed over x
    mode 3, m is a batch      lhs [b, m, ...]       rhs [b, m, ...]       batched dot_general; entries of no group are 0

b and x are vmapped; y is merged into m, with group sizes times y. Operands with a single m, k and n, in any order, go
straight to `grouped_matmul` or `transposed_grouped_matmul`; quantized operands have to be of this kind.
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
from trencadis.core import arguments
from trencadis.core.call import Options
from trencadis.core.debug import check_traced
from trencadis.core.dtypes import ShapeDtype, accumulator, bits
from trencadis.core.jax_compat import without_mesh
from trencadis.core.mesh import replicated
from trencadis.core.programs import is_hashable
from trencadis.core.spans import clamped, offsets
from trencadis.quant.operand import Operand, Sizes, array_operand, promoted
from trencadis.quant.product import contraction_product, rows_product
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
    """Multiply groups of rows, each by its own matrix, as `jax.lax.ragged_dot` does: `[m, k] x [g, k, n] -> [m, n]`.

    The arguments are lax's, and the work does not grow with the number of groups. Beyond lax, group_offset works (rhs
    then holds a window of the groups, as in `grouped_matmul`), rows past the last group are 0 on every platform, and
    every derivative and `vmap` exists. With out_sharding on a mesh with explicit axes, sums over devices are
    scattered as the result is sharded. Either operand may be quantized, as a `quant.Scaled` or a `qwix.QArray`; then
    the dtype of its scales takes part in the promotion that gives the default dtype of the result.

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
    """`jax.lax.ragged_dot_general`: the ragged dimension is a row, a contracted or a batch dimension of lhs.

    The arguments, shapes and shape errors are lax's. With group_offset, group i of rhs or of the result is group
    `group_offset + i` of group_sizes. Operands may be quantized as in `ragged_dot`, without batch dimensions.

    >>> dims = jax.lax.RaggedDotDimensionNumbers(((([0], [0])), ([], [])), [0], [])  # contract the ragged rows
    >>> ragged_dot_general(jnp.ones((4, 2)), jnp.ones((4, 1)), jnp.array([1, 2]), dims).shape
    (2, 2, 1)
    """
    lhs, rhs, group_sizes = array_operand("lhs", lhs), array_operand("rhs", rhs), arguments.as_sizes(group_sizes)
    dims = ragged_dot_dimension_numbers
    out = _lax_type(lhs, rhs, group_sizes, dims, precision, preferred_element_type, group_offset)
    if isinstance(lhs, Scaled) or isinstance(rhs, Scaled):
        _check_single(lhs, rhs, dims)
    mode: Callable[..., Array] = _single if _is_single(lhs, rhs, dims) else _mode(dims)
    options = {"precision": precision, "group_offset": group_offset}
    if mode is _single:  # a product that divides itself so that its result has this sharding
        return mode(lhs, rhs, group_sizes, dims, out, **options, out_sharding=out_sharding)
    result = mode(lhs, rhs, group_sizes, dims, out, **options)
    return result if out_sharding is None else jax.sharding.reshard(result, out_sharding)


def _mode(dims: Dims) -> Callable[..., Array]:
    """The function for the mode of lax that the dimension numbers ask for."""
    (contract, _), (batch, _) = dims.dot_dimension_numbers
    (ragged,) = dims.lhs_ragged_dimensions
    return _contraction if ragged in contract else _batched if ragged in batch else _rows


def _lax_type(
    lhs: Array | Scaled,
    rhs: Array | Scaled,
    group_sizes: SizesArray,
    dims: Dims,
    precision: PrecisionLike,
    preferred: DTypeLike | None,
    group_offset: ArrayLike | None,
) -> ShapeDtypeStruct:
    """The shape and dtype of lax's result; bad arguments raise lax's own errors, since lax is asked for it."""
    shape, window = group_sizes.shape, dims.rhs_group_dimensions
    if group_offset is not None and len(window) == 1 and shape and 0 <= window[0] < rhs.ndim:
        # lax has no windows: show it the sizes of only as many groups as rhs holds
        shape = (*shape[:-1], min(shape[-1], rhs.shape[window[0]]))
    sizes = ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(group_sizes.dtype))
    a, b = (ShapeDtypeStruct(x.shape, dtype) for x, dtype in zip((lhs, rhs), promoted(lhs, rhs), strict=True))
    given: list[Any] = [dims, precision, preferred, (a, b, sizes), jnp.result_type(int)]
    return _type_of_lax(*given) if is_hashable(tuple(given)) else _type_of_lax.__wrapped__(*given)


@functools.lru_cache(maxsize=256)  # tracing takes longer than the rest of a call
def _type_of_lax(
    dims: Dims,
    precision: PrecisionLike,
    preferred: DTypeLike | None,
    types: tuple[ShapeDtypeStruct, ...],
    default: np.dtype,
) -> ShapeDtypeStruct:
    """What lax's result is for operands and sizes of these types; the default dtype tells of jax_enable_x64."""
    del default
    ask = functools.partial(
        lax.ragged_dot_general, ragged_dot_dimension_numbers=dims, precision=precision, preferred_element_type=preferred
    )
    with without_mesh():
        return jax.eval_shape(ask, *types)


def _is_single(lhs: Array | Scaled, rhs: Array | Scaled, dims: Dims) -> bool:
    """True if the operands have one m, one k and one n, and no batch, as those of `grouped_matmul` or its transpose."""
    (lhs_k, _), (batch, _) = dims.dot_dimension_numbers
    return lhs.ndim == 2 and len(lhs_k) == 1 and not batch and rhs.ndim == _single_rank(dims)


def _single_rank(dims: Dims) -> int:
    """The rank of rhs in a product with one m, k and n: 2 if m is contracted, else 3."""
    (lhs_k, _), _ = dims.dot_dimension_numbers
    return 2 if dims.lhs_ragged_dimensions[0] in lhs_k else 3


def _check_single(lhs: Array | Scaled, rhs: Array | Scaled, dims: Dims) -> None:
    """Raise for operands that a quantized product does not take."""
    if _is_single(lhs, rhs, dims):
        return
    name, x, want = ("lhs", lhs, 2) if lhs.ndim != 2 else ("rhs", rhs, _single_rank(dims))
    raise ValueError(
        f"{name}: with a quantized operand, want {want} dimensions, one of them contracted and none a batch dimension; "
        f"got shape {x.shape} with {dims.dot_dimension_numbers}"
    )


def _single(
    lhs: Array | Scaled, rhs: Array | Scaled, sizes: SizesArray, dims: Dims, out: ShapeDtypeStruct,
    *, group_offset: ArrayLike | None, **options: Any,
) -> Array:  # fmt: skip
    """Modes 1 and 2 for operands with one m, one k and one n, in any order."""
    (lhs_k, rhs_k), _ = dims.dot_dimension_numbers
    (ragged,) = dims.lhs_ragged_dimensions
    if rhs.ndim == 3:
        (group,) = dims.rhs_group_dimensions
        (n,) = _rest(rhs, rhs_k, [group])
        transposed = rhs_k[0] > n  # keep k and n in the order in which they are stored
        rhs = _transposed(rhs, group, *((n, *rhs_k) if transposed else (*rhs_k, n)))
        lhs = _transposed(lhs, ragged, *lhs_k)
        return rows_product(
            lhs, rhs, sizes, out.dtype, Options(**options), transpose_rhs=transposed, group_offset=group_offset
        )
    rhs = _transposed(rhs, *rhs_k, *_rest(rhs, rhs_k))
    groups, sizes = sizes.shape[-1], _with_room(sizes, group_offset)
    return contraction_product(
        lhs, rhs, sizes, out.dtype, Options(**options), transpose_lhs=ragged == 0, window=(group_offset, groups)
    )


def _rows(lhs: Array, rhs: Array, sizes: SizesArray, dims: Dims, out: ShapeDtypeStruct, **options: Any) -> Array:
    """Mode 1: the ragged dimension is a row of lhs and of the result."""
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


def _contraction(lhs: Array, rhs: Array, sizes: SizesArray, dims: Dims, out: ShapeDtypeStruct, **options: Any) -> Array:
    """Mode 2: the ragged dimension is contracted, and the result has one matrix for each group."""
    (lhs_k, rhs_k), (lhs_b, rhs_b) = dims.dot_dimension_numbers
    at = lhs_k.index(dims.lhs_ragged_dimensions[0])
    # dimensions before m can be merged after it, which saves the second sum, if the sizes do not vary along them
    outer = range(at) if sizes.ndim > 1 else ()
    order = [*outer, at, *(d for d in range(len(lhs_k)) if d != at and d not in outer)]
    b, m, x = _size(lhs, lhs_b), lhs.shape[lhs_k[at]], _size(lhs, [lhs_k[d] for d in outer])
    y = _size(lhs, lhs_k) // max(m * x, 1)

    def rows(a: Array, contracted: Sequence[int], batch: Sequence[int]) -> Array:  # [b, x, m * y, columns]
        columns = _rest(a, contracted, batch)
        return a.transpose(*batch, *(contracted[d] for d in order), *columns).reshape(b, x, m * y, _size(a, columns))

    over, sizes = _sizes(sizes, (b, x), m, y)
    groups = sizes.shape[-1]
    sizes = _with_room(sizes, options["group_offset"])
    kept = out.dtype if x == 1 else accumulator(lhs.dtype, rhs.dtype)

    def entry(lhs: Array, sizes: SizesArray, rhs: Array) -> Array:
        return transposed_grouped_matmul(
            lhs, rhs, sizes, kept, transpose_lhs=True, num_actual_groups=groups, **options
        )  # [g, i, n]

    each = jax.vmap(jax.vmap(entry, in_axes=(0, over, 0)), in_axes=(0, over, 0))
    products = each(rows(lhs, lhs_k, lhs_b), sizes, rows(rhs, rhs_k, rhs_b))  # [b, x, g, i, n]
    products = products[:, 0] if x == 1 else products.sum(axis=1)
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
    """Mode 3: the ragged dimension is a batch dimension, and entries that no group covers are 0."""
    (lhs_k, rhs_k), (lhs_b, rhs_b) = dims.dot_dimension_numbers
    at = lhs_b.index(dims.lhs_ragged_dimensions[0])
    m, groups = lhs.shape[lhs_b[at]], sizes.shape[-1]
    first = arguments.first_group(group_offset)
    arguments.check_window(first, 0, groups)
    _check(sizes, m, first)
    sizes = replicated(jnp.asarray(sizes))
    bounds = jnp.broadcast_to(offsets(sizes, m), (*(lhs.shape[d] for d in lhs_b[:at]), groups + 1))
    start = jnp.take(bounds, first, axis=-1, mode="clip")[..., None]
    entry = lax.broadcasted_iota(jnp.int32, (*bounds.shape[:-1], m), at)
    covered = (entry >= start) & (entry < bounds[..., -1:])  # [x, m]
    lhs, lhs_k = _batch_first(lhs, lhs_b, lhs_k)
    rhs, rhs_k = _batch_first(rhs, rhs_b, rhs_k)

    def mask(a: Array) -> Array:
        return jnp.where(lax.broadcast_in_dim(covered, a.shape, range(at + 1)), a, jnp.zeros_like(a))

    acc = accumulator(lhs.dtype, rhs.dtype)
    if lhs.dtype != rhs.dtype or bits(lhs.dtype) < 8 or lhs.dtype == jnp.float8_e8m0fnu:
        lhs, rhs = lhs.astype(acc), rhs.astype(acc)  # XLA multiplies no packed values; e8m0 has no 0 to mask with
    batch = tuple(range(len(lhs_b)))
    product = lax.dot_general(
        mask(lhs), mask(rhs), ((lhs_k, rhs_k), (batch, batch)), precision=precision, preferred_element_type=acc
    )
    return product.astype(out.dtype)


def _batch_first(a: Array, batch: Sequence[int], contracted: Sequence[int]) -> tuple[Array, tuple[int, ...]]:
    """a with its batch dimensions first, and where its contracted dimensions are then."""
    order = [*batch, *(d for d in range(a.ndim) if d not in batch)]
    return a.transpose(order), tuple(order.index(d) for d in contracted)


def _sizes(sizes: SizesArray, lead: tuple[int, ...], m: int, inner: int) -> tuple[int | None, SizesArray]:
    """The axis to vmap group sizes over (None if shared), and the checked sizes, times the rows merged into m."""
    _check(sizes, m, np.int32(0))
    if inner != 1:
        sizes = clamped(jnp.asarray(sizes), m) * inner
    return (None, sizes) if sizes.ndim == 1 else (0, sizes.reshape(*lead, sizes.shape[-1]))


def _with_room(sizes: SizesArray, group_offset: ArrayLike | None) -> SizesArray:
    """Group sizes followed by as many empty groups, so that a window of all groups fits from any group_offset on."""
    return sizes if group_offset is None else jnp.concatenate([sizes, jnp.zeros_like(sizes)], axis=-1)


def _check(sizes: SizesArray, m: int, first: ArrayLike) -> None:
    """Raise if concrete sizes are negative or sum past m; traced ones are checked under `debug_checks`."""
    known = arguments.concrete(sizes)
    if known is not None and known.size:
        for row in known.reshape(-1, known.shape[-1]):
            arguments.check_sizes(row, m)
    elif known is None:
        check_traced(jnp.asarray(sizes), first, m, 0)


def _transposed(a: Array | Scaled, *axes: int) -> Array | Scaled:
    """a with its axes in this order; a itself if that is the order they are in."""
    return a if axes == tuple(range(a.ndim)) else a.transpose(*axes)


def _rest(a: ShapeDtype, *taken: Sequence[int]) -> list[int]:
    """The dimensions of a that are in none of these lists."""
    return [d for d in range(a.ndim) if not any(d in dims for dims in taken)]


def _size(a: ShapeDtype, dims: Sequence[int]) -> int:
    """The product of the sizes of some dimensions of a."""
    return math.prod(a.shape[d] for d in dims)
