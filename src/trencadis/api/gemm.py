"""The general door: one GEMM for each group, over tensors that carry their own raggedness."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from trencadis.api.matmul import grouped_matmul, transposed_grouped_matmul
from trencadis.core import problem as what
from trencadis.core.dtypes import accumulator
from trencadis.core.epilogue import Activation
from trencadis.core.plan import check_backend
from trencadis.gemm.epilogue import Ends, check_ends, finished, held
from trencadis.gemm.lowering import general
from trencadis.gemm.operand import Side, arranged, laid, paired, sides, times
from trencadis.gemm.tensor import GroupedTensor
from trencadis.quant.operand import array_operand
from trencadis.quant.recipe import Recipe
from trencadis.quant.training import trained

Array = jax.Array


def grouped_gemm(
    lhs: GroupedTensor,
    rhs: GroupedTensor,
    *,
    contracting_dims: tuple[Sequence[int], Sequence[int]],
    bias: Any = None,
    alpha: Any = None,
    beta: Any = None,
    out: GroupedTensor | Array | None = None,
    preferred_element_type: Any = None,
    group_offset: Any = None,
    interpret: bool = False,
    precision: Any = None,
    backend: str | None = None,
) -> GroupedTensor | Array:
    """Multiply group by group: `out_i = alpha_i * (lhs_i @ rhs_i) + bias_i + beta_i * out_i`.

    What is ragged in lhs and rhs, and which axes are summed over, says what the result is: groups that differ in an
    axis that is summed over, in both operands, give one matrix each; groups that differ in a free axis give a result
    that differs in it. The passes of a layer are one call each:

        forward    x ragged rows [m, k]    w stacked [g, k, n]     ((1,), (1,))    ragged rows [m, n]
        d x        y ragged rows [m, n]    w stacked [g, k, n]     ((1,), (2,))    ragged rows [m, k]
        d w        x ragged rows [m, k]    y ragged rows [m, n]    ((0,), (0,))    [g, k, n]

    With one ragged dimension the kernels of `grouped_matmul` and `transposed_grouped_matmul` do the work; with more,
    loops over tiles. What no group owns is exactly 0, or what `out` holds there. Differentiable in all but sizes.

    Args:
      lhs: the left operand; axes are those of its `shape`, of which the first is that of the groups in a stack. Its
        data may be a `quant.Scaled`, as `quant.grouped_quantize` makes it, and so may those of rhs.
      rhs: the right operand, of as many groups.
      contracting_dims: the axes of lhs, and those of rhs, that are summed over together.
      bias: `[g, ...]` with the free axes of rhs, added to the product of each group.
      alpha: `[g]`, what the product of each group is multiplied with.
      beta: `[g]`, what `out` is multiplied with, group by group; 1 by default.
      out: what the product is added to: of the shape, the dtype and the raggedness of the result.
        Where both m and n are ragged, or one of them comes from a tensor that is fully ragged, it also says how large
        the result is: needed if sizes are traced.
      preferred_element_type: the dtype of the result; by default that of the operands, promoted, without those that are
        quantized, or float32.
      group_offset: the first group that a stack holds, or that is computed, as in `grouped_matmul`.
      interpret: as in `grouped_matmul`, where one dimension is ragged.
      precision: as in `grouped_matmul`.
      backend: as in `grouped_matmul`.

    Returns:
      A `GroupedTensor` whose axes are the free ones of lhs, then those of rhs; or, where no free axis is ragged, an
      array with these axes after that of the groups.

    >>> x = GroupedTensor.ragged_rows(jnp.ones((3, 2)), [1, 2])
    >>> w = GroupedTensor.stacked(jnp.stack([jnp.eye(2), 2 * jnp.eye(2)]))
    >>> grouped_gemm(x, w, contracting_dims=((1,), (1,))).data.tolist()
    [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
    >>> grouped_gemm(x, x, contracting_dims=((0,), (0,))).tolist()
    [[[1.0, 1.0], [1.0, 1.0]], [[2.0, 2.0], [2.0, 2.0]]]
    """
    a, b = sides(lhs, rhs, contracting_dims)
    ends = Ends(bias=bias, alpha=alpha, beta=beta, out=out)
    dtype = _dtype(preferred_element_type, a, b, ends)
    options = {"precision": precision, "backend": backend, "interpret": interpret}
    differ = {"m": a.ragged(a.free), "k": a.ragged(a.summed), "n": b.ragged(b.free)}
    ragged = "".join(name for name, sizes in differ.items() if sizes is not None)
    _check_groups(a, b, group_offset, ragged, ends)
    ends = check_ends(a, b, ends, ragged)
    _check_kernel(ragged, backend, interpret)
    fused, ends = _fused(a, b, ragged, ends, dtype, window=group_offset is not None)
    kept = ends.dtype(accumulator(a.dtype, b.dtype)) if ends.any else dtype
    if ragged == "":
        product = (_scaled_stacks if a.quantized or b.quantized else _stacked)(a, b, kept, precision)
    elif ragged == "m":
        product = _rows(a, b, kept, group_offset=group_offset, **options, **fused)
    elif ragged == "n":
        product = _rows(b, a, kept, group_offset=group_offset, **options)
    elif ragged == "k":
        product = _summed(a, b, kept, group_offset=group_offset, **options, **fused)
    else:
        product = general(a, b, kept, ends.out, precision=precision)
    return finished(product, ends, dtype)


def grouped_dense(
    x: Any,
    kernel: Any,
    group_sizes: Any,
    *,
    contracting_dims: tuple[Sequence[int], Sequence[int]] = ((-1,), (1,)),
    bias: Any = None,
    activation: Activation | None = None,
    preferred_element_type: Any = None,
    group_offset: Any = None,
    interpret: bool = False,
    precision: Any = None,
    backend: str | None = None,
    quantization: Recipe | None = None,
) -> Array:
    """A dense layer for each group of rows: `activation(x_i @ kernel_i + bias_i)`.

    Args:
      x: `[m, ...]`, rows sorted by group; an array or a `quant.Scaled`.
      kernel: `[g, ...]`, one for each group; an array or a `quant.Scaled`.
      group_sizes: as in `grouped_matmul`.
      contracting_dims: the axes of x, and those of kernel, that are summed over together.
      bias: `[g, ...]` with the free axes of kernel. Its gradient is summed in float32, over rows that a group owns.
      activation: as in `grouped_matmul`.
      preferred_element_type: the dtype of the result; by default as in `grouped_gemm`.
      group_offset: as in `grouped_matmul`.
      interpret: as in `grouped_matmul`.
      precision: as in `grouped_matmul`.
      backend: as in `grouped_matmul`.
      quantization: what is quantized on the way, by a `quant.Recipe`. Gradients are those of the layer without it,
        computed from the quantized numbers, which are all that is kept of x and kernel. They are not differentiated
        again in what is quantized; and if they are quantized themselves (`grad`), JAX refuses forward mode.

    Returns:
      `[m, ...]`, the free axes of x, then those of kernel.

    >>> grouped_dense(jnp.ones((3, 2)), jnp.ones((2, 2, 1)), [1, 1], bias=jnp.array([[1.0], [-3.0]])).ravel()
    Array([ 3., -1.,  0.], dtype=float32)
    >>> grouped_dense(jnp.ones((3, 2)), jnp.ones((2, 2, 1)), [1, 1], quantization=Recipe("int8", "int8")).ravel()
    Array([2., 2., 0.], dtype=float32)
    """
    x, kernel = array_operand("x", x), array_operand("kernel", kernel)
    rows = GroupedTensor(x, what.as_sizes(group_sizes), None, x.shape)
    weights = GroupedTensor(kernel, None, None, kernel.shape)
    a, b = sides(rows, weights, contracting_dims, names=("x", "kernel"), dims="group_sizes")
    ends = Ends(bias=bias)
    dtype = _dtype(preferred_element_type, a, b, ends)
    _check_groups(a, b, group_offset, "m", ends)
    check_ends(a, b, ends, "m")
    fused, _ = _fused(a, b, "m", ends, dtype)
    multiply = grouped_matmul if quantization is None else functools.partial(trained, quantization)
    return _rows(
        a, b, dtype, multiply, precision=precision, backend=backend, interpret=interpret, group_offset=group_offset,
        activation=activation, **fused,
    ).data  # fmt: skip


def _dtype(asked: Any, a: Side, b: Side, ends: Ends) -> Any:
    """The dtype of the result: as asked, or that of the operands, promoted, where what is quantized is any float."""
    given = [side.tensor.dtype for side in (a, b) if not side.quantized]
    if len(given) < 2 and not any(jnp.issubdtype(each, jnp.inexact) for each in given):
        given = [np.dtype(np.float32)]
    asked = jnp.result_type(*given) if asked is None else asked
    return what.result_dtype(asked, a.tensor, b.tensor, *([] if ends.bias is None else [ends.bias]))


def _check_groups(a: Side, b: Side, group_offset: Any, ragged: str, ends: Ends) -> None:
    """As many groups in both; or, with group_offset, a stack that holds some of them."""
    counts = a.tensor.num_groups, b.tensor.num_groups
    by_group = [name for name in ("alpha", "beta", "bias") if getattr(ends, name) is not None]
    alone = by_group == ["bias"] and ragged == "m" and ends.out is None  # then the kernel adds it
    if group_offset is not None and (len(ragged) != 1 or (by_group and not alone)):
        got = " and ".join([f"{ragged or 'none'} ragged", *by_group])
        raise ValueError(
            "group_offset: says which groups a stack holds, where one of m, k and n is ragged and there is no alpha, "
            f"beta or bias, or a bias alone where m is ragged; got {got}"
        )
    if counts[0] != counts[1] and (group_offset is None or ragged == "k"):
        raise ValueError(f"{b.name}: want as many groups as {a.name}; got {counts[1]} and {counts[0]}")


def _check_kernel(ragged: str, backend: str | None, interpret: bool) -> None:
    """There are kernels where one dimension is ragged."""
    asked = check_backend(backend) not in (None, "xla")
    if len(ragged) != 1 and (what.checked_flag("interpret", interpret) or asked):
        name, got, want = ("backend", backend, "None or 'xla'") if asked else ("interpret", True, "False")
        count = "more than one ragged dimension" if ragged else "stacks alone"
        raise ValueError(f"{name}: {got!r} has no kernel for {count}; want {want}")


def _fused(a: Side, b: Side, ragged: str, ends: Ends, dtype: Any, window: bool = False) -> tuple[dict[str, Any], Ends]:
    """What a kernel does itself after the product, and what is left."""
    given = [name for name in ("bias", "alpha", "beta", "out") if getattr(ends, name) is not None]
    free = [side.tensor.shape[axis] for side in (a, b) if not side.flat for axis in side.free]
    merged = a.extent(a.free), b.extent(b.free)
    if given == ["bias"] and ragged == "m":
        return {"bias": ends.bias.reshape(-1, merged[1])}, Ends()
    if given == ["out"] and ragged == "k":
        # with a window, it is out that says of how many groups
        groups = ends.out.shape[:1] if window else (a.tensor.num_groups,)
        data = held(ends.out, (*groups, *free), (None, None), dtype)
        return {"existing_out": data.reshape(*groups, *merged)}, Ends()
    if given == ["out"] and ragged == "m" and a.ordered(a.free) == a.free:
        data = held(ends.out, tuple(free), (a.ragged(a.free), None), dtype)
        return {"existing_out": data.reshape(merged)}, Ends()
    return {}, ends


# ---------------------------------------------------------------------------------------------------------------------
# The forms that kernels know, and a stack of both


def _stacked(a: Side, b: Side, dtype: Any, precision: Any) -> GroupedTensor:
    """Nothing is ragged: XLA's own batched product."""
    acc = accumulator(a.tensor.dtype, b.tensor.dtype)
    x, y = a.tensor.data, b.tensor.data
    if x.dtype != y.dtype:
        x, y = x.astype(acc), y.astype(acc)
    dims = ((a.summed, b.summed), ((0,), (0,)))
    precision = what.checked_precision(precision)
    out = lax.dot_general(x, y, dims, precision=precision, preferred_element_type=acc).astype(dtype)
    return GroupedTensor(out, None, None, out.shape)


def _scaled_stacks(a: Side, b: Side, dtype: Any, precision: Any) -> GroupedTensor:
    """Nothing is ragged, and there are scales: the rows of all groups of lhs, one group after the other."""
    x, turned = laid(a, a.free, a.summed)
    x = x.mT if turned else x
    w, turned = laid(b, b.summed, b.free)
    groups, rows, k = x.shape
    x = x.merged(2, 1) if a.quantized else x.reshape(groups * rows, k)
    sizes: Any = np.full((groups,), rows, np.int32)
    out = grouped_matmul(x, w, sizes, dtype, transpose_rhs=turned, precision=precision)
    shape = [groups] + [side.tensor.shape[axis] for side in (a, b) for axis in side.free]
    return GroupedTensor(out.reshape(shape), None, None, tuple(shape))


def _rows(
    side: Side, stack: Side, dtype: Any, multiply: Callable[..., Array] = grouped_matmul, **options: Any
) -> GroupedTensor:
    """The ragged side's rows, each times a matrix of the stack."""
    free = side.ordered(side.free)
    x, other = laid(side, free, side.summed)
    x = x.mT if other else x
    w, turned = laid(stack, stack.summed, stack.free)
    sizes = times(side.ragged(side.free), side.inner(side.free), x.shape[0])
    out = multiply(x, w, sizes, dtype, transpose_rhs=turned, **options)
    shape = [side.tensor.shape[axis] for axis in free] + [stack.tensor.shape[axis] for axis in stack.free]
    return arranged(
        side,
        stack,
        out.reshape(shape),
        [(side.name, axis) for axis in free] + [(stack.name, axis) for axis in stack.free],
    )


def _summed(a: Side, b: Side, dtype: Any, **options: Any) -> GroupedTensor:
    """A sum over the rows of each group."""
    left, right = paired(a, b)
    x, turned = laid(a, left, a.free)
    y, other = laid(b, right, b.free)
    y = y.mT if other else y
    sizes = times(a.ragged(a.summed), a.inner(a.summed), y.shape[0])
    held = options.get("existing_out")
    count = None if held is None else held.shape[0]
    out = transposed_grouped_matmul(x, y, sizes, dtype, transpose_lhs=not turned, num_actual_groups=count, **options)
    shape = [out.shape[0]] + [side.tensor.shape[axis] for side in (a, b) for axis in side.free]
    return GroupedTensor(out.reshape(shape), None, None, tuple(shape))
