"""The general grouped GEMM over tensors that carry their own sizes, and the dense layer of each group."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
from jax.typing import ArrayLike, DTypeLike

from trencadis.core import arguments
from trencadis.core.activation import Activation
from trencadis.gemm.epilogue import GemmEpilogue
from trencadis.gemm.forms import GemmOptions, dense, gemm
from trencadis.gemm.operand import gemm_operands
from trencadis.gemm.tensor import GroupedTensor
from trencadis.quant.operand import array_operand
from trencadis.quant.product import rows_product
from trencadis.quant.recipe import Recipe
from trencadis.quant.scaled import Scaled
from trencadis.quant.training import trained

Array = jax.Array


def grouped_gemm(
    lhs: GroupedTensor,
    rhs: GroupedTensor,
    *,
    contracting_dims: tuple[Sequence[int], Sequence[int]],
    bias: ArrayLike | None = None,
    alpha: ArrayLike | None = None,
    beta: ArrayLike | None = None,
    out: GroupedTensor | ArrayLike | None = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: ArrayLike | None = None,
    interpret: bool = False,
    precision: jax.lax.PrecisionLike = None,
    backend: str | None = None,
) -> GroupedTensor | Array:
    """Multiply group by group: `out_i = alpha_i * (lhs_i @ rhs_i) + bias_i + beta_i * out_i`.

    The form of the product follows from the ragged axes of lhs and rhs and from contracting_dims. A ragged axis that is
    contracted, in both operands, gives one matrix for each group; a ragged axis that is free is a ragged axis of the
    result. Each pass of a layer is one call:

        forward    x ragged rows [m, k]    w stacked [g, k, n]     ((1,), (1,))    ragged rows [m, n]
        d x        y ragged rows [m, n]    w stacked [g, k, n]     ((1,), (2,))    ragged rows [m, k]
        d w        x ragged rows [m, k]    y ragged rows [m, n]    ((0,), (0,))    [g, k, n]

    If one of m, k and n is ragged, the kernels of `grouped_matmul` and `transposed_grouped_matmul` compute it. If more
    are, kernels of Triton (GPU), Pallas (TPU) or trencadis-cpu (native CPU) do; otherwise XLA: one product for each
    group if sizes are known inside `jit`, else loops over tiles. Entries that no group owns are exactly 0, or keep the
    value that `out` has there. Everything is computed in the dtype of sums and rounded once. Differentiable with
    respect to everything except sizes.

    Args:
      lhs: the left operand. Its axes are those of its `shape`; the first axis of a stack is that of the groups. Its
        data, and those of rhs, may be a `quant.Scaled`, as `gemm.grouped_quantize` returns it.
      rhs: the right operand, with the same number of groups.
      contracting_dims: the axes of lhs and those of rhs that are contracted with each other. Their lengths are equal,
        unowned entries at the end of a ragged axis included.
      bias: `[g, ...]` with the free axes of rhs, added to the product of each group.
      alpha: `[g]`, the factor of the product of each group.
      beta: `[g]`, the factor of each group of `out`; 1 by default. As in BLAS, `out` is not read where beta is 0: NaN
        and Inf in it do not reach the result.
      out: a tensor, or an array if the result is not ragged, that the product is added to: of the shape, the dtype, the
        ragged axes and the sizes of the result. If a ragged axis of the result comes from a fully ragged operand, or if
        m and n are both ragged, it also gives the size of the result: it is then required if sizes are traced.
      preferred_element_type: the dtype of the result; by default that of the operands that are not quantized, promoted,
        or float32.
      group_offset: the first group that a stack holds, or that is computed, as in `grouped_matmul`.
      interpret: as in `grouped_matmul`; only if some of m, k and n is ragged, and with backend="triton" or "tpu" if
        more are.
      precision: as in `grouped_matmul`.
      backend: as in `grouped_matmul`; "tpu", "triton", "cpu", "xla" or None if several of m, k and n are ragged, "xla"
        or None if none is.

    Returns:
      A `GroupedTensor` with the free axes of lhs, then those of rhs; or, if no free axis is ragged, an array with these
      axes after that of the groups.

    >>> import jax.numpy as jnp
    >>> x = GroupedTensor.ragged_rows(jnp.ones((3, 2)), [1, 2])
    >>> w = GroupedTensor.stacked(jnp.stack([jnp.eye(2), 2 * jnp.eye(2)]))
    >>> grouped_gemm(x, w, contracting_dims=((1,), (1,))).data.tolist()
    [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
    >>> grouped_gemm(x, x, contracting_dims=((0,), (0,))).tolist()
    [[[1.0, 1.0], [1.0, 1.0]], [[2.0, 2.0], [2.0, 2.0]]]
    """
    a, b = gemm_operands(lhs, rhs, contracting_dims)
    epilogue = GemmEpilogue(bias=bias, alpha=alpha, beta=beta, out=out)
    options = GemmOptions(
        preferred_element_type=preferred_element_type, group_offset=group_offset,
        precision=precision, backend=backend, interpret=interpret,
    )  # fmt: skip
    return gemm(a, b, epilogue, options)


def grouped_dense(
    x: ArrayLike | Scaled,
    kernel: ArrayLike | Scaled,
    group_sizes: ArrayLike | Sequence[int],
    *,
    contracting_dims: tuple[Sequence[int], Sequence[int]] = ((-1,), (1,)),
    bias: ArrayLike | None = None,
    activation: Activation | None = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: ArrayLike | None = None,
    interpret: bool = False,
    precision: jax.lax.PrecisionLike = None,
    backend: str | None = None,
    quantization: Recipe | None = None,
) -> Array:
    """Apply a dense layer to each group of rows: `activation(x_i @ kernel_i + bias_i)`.

    Args:
      x: `[m, ...]`, rows sorted by group; an array or a `quant.Scaled`.
      kernel: `[g, ...]`, one for each group; an array or a `quant.Scaled`.
      group_sizes: `[g]`, the rows of each group, at least one; otherwise as in `grouped_matmul`.
      contracting_dims: the axes of x and those of kernel that are contracted with each other.
      bias: `[g, ...]` with the free axes of kernel. Its gradient is summed in float32 over the rows of each group.
      activation: as in `grouped_matmul`.
      preferred_element_type: the dtype of the result; by default as in `grouped_gemm`.
      group_offset: as in `grouped_matmul`.
      interpret: as in `grouped_matmul`.
      precision: as in `grouped_matmul`.
      backend: as in `grouped_matmul`.
      quantization: a `quant.Recipe` that says which of x, kernel and the incoming gradient are quantized. Gradients are
        straight-through: those of the layer without quantization, computed from the quantized numbers, which are all
        that the backward pass keeps of x and kernel. They have no second derivative with respect to what is quantized,
        and a recipe that quantizes the incoming gradient (`grad`) has no forward mode.

    Returns:
      `[m, ...]` with the free axes of x, then those of kernel; rows that no group owns are 0.

    >>> import jax.numpy as jnp
    >>> grouped_dense(jnp.ones((3, 2)), jnp.ones((2, 2, 1)), [1, 1], bias=jnp.array([[1.0], [-3.0]])).ravel()
    Array([ 3., -1.,  0.], dtype=float32)
    >>> grouped_dense(jnp.ones((3, 2)), jnp.ones((2, 2, 1)), [1, 1], quantization=Recipe("int8", "int8")).ravel()
    Array([2., 2., 0.], dtype=float32)
    """
    rows, weights = array_operand("x", x), array_operand("kernel", kernel)
    sizes = arguments.as_sizes(group_sizes)
    if not sizes.size:
        raise ValueError(f"group_sizes: want 1 dimension [g] of at least one group; got shape {sizes.shape}")
    lhs = GroupedTensor(rows, sizes, None, rows.shape)
    rhs = GroupedTensor(weights, None, None, weights.shape)
    a, b = gemm_operands(lhs, rhs, contracting_dims, names=("x", "kernel"), size_name="group_sizes")
    options = GemmOptions(
        preferred_element_type=preferred_element_type, group_offset=group_offset,
        precision=precision, backend=backend, interpret=interpret,
    )  # fmt: skip
    multiply = rows_product if quantization is None else functools.partial(trained, quantization)
    return dense(a, b, bias, activation, options, multiply)
