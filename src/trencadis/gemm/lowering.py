"""From the operands of a GEMM with several ragged dimensions to its problem and the arrays that the primitive takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trencadis.core import arguments
from trencadis.core.dtypes import accumulator
from trencadis.core.tiling import Overrides
from trencadis.gemm import autodiff
from trencadis.gemm.epilogue import GemmEpilogue, existing_data
from trencadis.gemm.operand import (
    Axes,
    GemmOperand,
    as_matrices,
    contracted_axes,
    dequantized,
    merged_sizes,
    result_tensor,
)
from trencadis.gemm.problem import Buffer, Dim, GemmProblem, Groups
from trencadis.gemm.sizes import flat_places, starts_and_sizes
from trencadis.gemm.tensor import GroupedTensor

Array = jax.Array


class View(NamedTuple):
    """An operand as a buffer of matrices: its array, where groups start, and two dimensions with their sizes."""

    data: Array
    buffer: Buffer
    starts: Any  # i32[g], as are both sizes; numpy if they are known
    dims: tuple[Dim, Dim]
    sizes: tuple[Any, Any]


class Result(NamedTuple):
    """How the result is stored, where its groups start, and how its array becomes a tensor."""

    buffer: Buffer
    starts: Any
    tensor: Callable[[Array], GroupedTensor]


def general_product(
    a: GemmOperand, b: GemmOperand, dtype: Any, epilogue: GemmEpilogue, *,
    precision: Any, overrides: Overrides, fused: bool,
) -> GroupedTensor:  # fmt: skip
    """The product of each group, for operands in which at least two of m, k and n are ragged.

    Args:
      a: the left operand.
      b: the right operand.
      dtype: the dtype of the result.
      epilogue: what follows the product; its `out`, if it has one, is as large as the result.
      precision: as in `jax.lax.dot`.
      overrides: the backend that the caller asks for, if any, and whether it is interpreted.
      fused: whether the epilogue is computed here, too; both operands have one free axis.
    """
    out = epilogue.out
    a, b = dequantized(a), dequantized(b)
    left, right = contracted_axes(a, b)
    x, y = _view(a, a.ragged_first(a.free), left), _view(b, right, b.ragged_first(b.free))
    (m, k), (k_rhs, n) = x.dims, y.dims
    result = _result(a, b, x, y, out, np.dtype(dtype))
    known = isinstance(x.sizes[1], np.ndarray) and isinstance(y.sizes[0], np.ndarray)
    k_sizes = (np if known else jnp).minimum(x.sizes[1], y.sizes[0])
    groups = Groups(x.starts, y.starts, result.starts, x.sizes[0], k_sizes, y.sizes[1])
    numbers = {name: getattr(epilogue, name) for name in ("alpha", "bias", "beta")} if fused else {}
    wide = epilogue.dtype(accumulator(a.dtype, b.dtype)) if any(x is not None for x in numbers.values()) else None
    problem = GemmProblem(
        groups=a.tensor.num_groups,
        m=m,
        k=Dim(size=max(k.size, k_rhs.size), ragged=k.ragged),
        n=n,
        lhs=x.buffer,
        rhs=y.buffer,
        out=result.buffer,
        precision=arguments.checked_precision(precision),
        accumulate=fused and out is not None,
        **{name: each is not None for name, each in numbers.items()},
        wide=wide,
        known=_known(groups),
    )
    dims = a.ragged_sizes(a.free), b.ragged_sizes(b.free)
    extras = [existing_data(out, result.buffer.shape, dims, problem.out.dtype)] if problem.accumulate else []
    extras += [each.astype(wide) for each in numbers.values() if each is not None]
    arrays = Groups(*map(jnp.asarray, groups))
    return result.tensor(autodiff.run(problem, overrides, x.data, y.data, arrays, *extras))


def _known(groups: Groups) -> Groups | None:
    """Starts and sizes as tuples of ints, or None if one of them is traced."""
    if not all(isinstance(each, np.ndarray) for each in groups):
        return None
    return Groups(*(tuple(each.tolist()) for each in groups))


def _view(x: GemmOperand, first: Axes, second: Axes) -> View:
    """An operand as a buffer of matrices, whose dimensions are some axes and some others."""
    ragged = (x.flat or x.ragged_sizes(first) is not None, x.flat or x.ragged_sizes(second) is not None)
    starts, *sizes = _places(x, first, second)
    if x.flat:
        data, transposed = x.tensor.data, first == (1,)
        extents = [x.tensor.shape[0]] * 2
    else:
        data, transposed = as_matrices(x, first, second)
        extents = [x.extent(axes) for axes in (first, second)]
    buffer = Buffer(shape=data.shape, dtype=x.tensor.dtype, ragged=ragged, transposed=transposed)
    one, two = (Dim(size=size, ragged=on) for size, on in zip(extents, ragged, strict=True))
    return View(data, buffer, starts, (one, two), (sizes[0], sizes[1]))


def _places(x: GemmOperand, first: Axes, second: Axes) -> tuple[Any, Any, Any]:
    """Where groups start, and their sizes along some axes and along others: i32[g] each, in numpy where known."""
    groups = x.tensor.num_groups
    if x.flat:
        columns = x.tensor.last_dims
        starts, rows = flat_places(x.tensor.first_dims, columns, x.tensor.shape[0])
        known = arguments.concrete(columns)
        columns = columns if known is None else known
        return (starts, columns, rows) if first == (1,) else (starts, rows, columns)
    starts = np.arange(groups, dtype=np.int32)
    found: list[Any] = []
    for axes in (first, second):
        sizes, total = x.ragged_sizes(axes), x.extent(axes)
        if sizes is None:
            found.append(np.full((groups,), total, np.int32))
        else:
            starts, merged = starts_and_sizes(merged_sizes(sizes, x.uniform_extent(axes), total), total)
            found.append(merged)
    return starts, found[0], found[1]


def _result(a: GemmOperand, b: GemmOperand, x: View, y: View, out: Any, dtype: np.dtype[Any]) -> Result:
    """How the result of two operands, seen as buffers, is stored."""
    m, n = x.dims[0], y.dims[1]
    if m.ragged and n.ragged:
        return _flat_result(a, b, x.sizes[0], y.sizes[1], out, dtype)
    ragged, other, sizes = (a, b, x.sizes[0]) if m.ragged else (b, a, y.sizes[1])
    dims = ragged.ragged_sizes(ragged.free)
    if ragged.flat:
        total = _capacity(out, "m" if ragged is a else "n", dims, axis=0 if ragged is a else -1)
    else:
        total = m.size if m.ragged else n.size
    shape = (total, n.size) if ragged is a else (m.size, total)
    labels = [(each.name, axis) for each in (a, b) for axis in each.ragged_first(each.free)]
    lengths = {(each.name, axis): each.tensor.shape[axis] for each in (a, b) if not each.flat for axis in each.free}

    def tensor(data: Array) -> GroupedTensor:
        data = data.reshape([lengths.get(label, total) for label in labels])
        return result_tensor(ragged, other, data, labels)

    buffer = Buffer(shape=shape, dtype=dtype, ragged=(m.ragged, n.ragged))
    return Result(buffer, starts_and_sizes(sizes, total)[0], tensor)


def _flat_result(a: GemmOperand, b: GemmOperand, m: Any, n: Any, out: Any, dtype: np.dtype[Any]) -> Result:
    """How a result is stored whose m and n, of these sizes, are both ragged."""
    if len(a.free) > 1 or len(b.free) > 1:
        raise ValueError(
            "contracting_dims: m and n are ragged, and a flat result holds matrices; want one free axis of each operand"
        )
    rows, columns = a.ragged_sizes(a.free), b.ragged_sizes(b.free)
    capacity = _capacity(out, "m and n", rows, columns)
    buffer = Buffer(shape=(capacity,), dtype=dtype, ragged=(True, True))
    starts, _ = flat_places(m, n, capacity)
    return Result(buffer, starts, lambda data: GroupedTensor(data, rows, columns, data.shape))


def _capacity(out: Any, which: str, *sizes: Any, axis: int = 0) -> int:
    """The number of entries of the result along an axis: that of `out`, or the sum over groups of products of sizes."""
    if out is not None:
        return int(out.shape[axis])
    known = [arguments.concrete(x) for x in sizes]
    if any(x is None for x in known):
        raise ValueError(
            f"out: want a tensor that is as large as the result, since sizes of {which} are traced; got None"
        )
    return int(sum(math.prod(int(x) for x in each) for each in zip(*known, strict=True)))
