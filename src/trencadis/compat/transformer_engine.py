"""TransformerEngine's grouped GEMM for JAX, as it is since grouped tensors have `first_dims` and `last_dims`.

`from trencadis.compat.transformer_engine import GroupedNoScaleTensor, grouped_gemm, grouped_dense, grouped_dbias`. On
every backend, for any sizes: groups may be empty, and rows past the last group are nobody's, so that they are 0 in
results and in gradients. `group_offset`, `precision` and a bias are honoured. Tensors with scales, and the quantizers
that make them, are those of `te_quantize`; one with scales may meet one without.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from trencadis.api import gemm as grouped
from trencadis.api import matmul as api
from trencadis.compat.transformer_engine_quantize import (
    GroupedNoScaleTensor,
    GroupedQuantizer,
    GroupedScaledTensor1x,
    QuantizeLayout,
    QuantizerFactory,
    QuantizerSet,
    ScaledTensor2x,
    ScalingMode,
    TensorUsage,
    grouped_dequantize,
    grouped_quantize,
    noop_quantizer_set,
    quantized,
    tensor_of,
)
from trencadis.core import problem as what
from trencadis.gemm.tensor import GroupedTensor

Array = jax.Array

__all__ = [
    "GroupedNoScaleTensor",
    "GroupedQuantizer",
    "GroupedScaledTensor1x",
    "QuantizeLayout",
    "QuantizerFactory",
    "QuantizerSet",
    "ScaledTensor2x",
    "ScalingMode",
    "TensorUsage",
    "grouped_dbias",
    "grouped_dense",
    "grouped_dequantize",
    "grouped_gemm",
    "grouped_quantize",
    "noop_quantizer_set",
]


def grouped_gemm(
    lhs: GroupedNoScaleTensor | GroupedScaledTensor1x,
    rhs: GroupedNoScaleTensor | GroupedScaledTensor1x,
    contracting_dims: tuple[Sequence[int], Sequence[int]] = ((1,), (2,)),
    bias: Any = None,
    precision: Any = jax.lax.Precision.DEFAULT,
    preferred_element_type: Any = None,
    group_offset: Any = None,
    quantizer_set: Any = noop_quantizer_set,
    use_async_d2h_group_sizes: bool = False,
) -> Array:
    """Forward, dgrad and wgrad by what is ragged, as `trencadis.grouped_gemm`; returns the data of the result.

    Args:
      preferred_element_type: the dtype of the result; by default that of lhs, before it was quantized.
      quantizer_set: what quantizes an operand that is not yet: `x` is for lhs, `kernel` for rhs.
      use_async_d2h_group_sizes: sizes are never copied to the host: there is nothing to make asynchronous.

    >>> x = GroupedNoScaleTensor(jnp.ones((3, 2)), None, jnp.array([1, 2]), None, (3, 2))
    >>> w = GroupedNoScaleTensor(jnp.ones((2, 2, 4)), None, None, None, (2, 2, 4))
    >>> grouped_gemm(x, w, contracting_dims=((1,), (1,))).shape
    (3, 4)
    """
    del use_async_d2h_group_sizes
    a, b = tensor_of("lhs", lhs), tensor_of("rhs", rhs)
    if all(dims is None for x in (a, b) for dims in (x.first_dims, x.last_dims)):
        raise ValueError("Cannot infer number of gemms: lhs and rhs have neither first_dims nor last_dims")
    dtype = lhs.dq_dtype if isinstance(lhs, GroupedScaledTensor1x) else a.dtype
    if not _noop(quantizer_set):
        if isinstance(lhs, GroupedScaledTensor1x) and isinstance(rhs, GroupedScaledTensor1x):
            raise ValueError("quantizer_set: lhs and rhs are quantized already; want the one that does nothing")
        by = quantizer_set.x, quantizer_set.kernel
        a, b = (_quantized(*each) for each in zip((a, b), (lhs, rhs), by, contracting_dims, strict=True))
    found = grouped.grouped_gemm(
        a, b, contracting_dims=contracting_dims, bias=bias, precision=precision, group_offset=group_offset,
        preferred_element_type=dtype if preferred_element_type is None else preferred_element_type,
    )  # fmt: skip
    return found.data if isinstance(found, GroupedTensor) else found


def grouped_dense(
    x: Any,
    kernel: Any,
    group_sizes: Any,
    contracting_dims: tuple[Sequence[int], Sequence[int]] = ((1,), (1,)),
    bias: Any = None,
    precision: Any = jax.lax.Precision.DEFAULT,
    preferred_element_type: Any = None,
    group_offset: Any = None,
    quantizer_set: Any = noop_quantizer_set,
    kernel_fsdp_info: tuple[Any, int] = (None, -1),
) -> Array:
    """A dense layer for each group, as `trencadis.grouped_dense`. Gradients have the dtypes of what they belong to.

    With quantizers, x and kernel are quantized, and so is the gradient of the result before it is multiplied; rounding
    has the gradient of the identity. MXFP8 has its blocks along what a pass sums over. The gradient of quantizer_set is
    the set of the next call, as in the original.

    Args:
      preferred_element_type: the dtype of the result; by default that of x.
      quantizer_set: of x and kernel `[g, k, n]`, with `contracting_dims` of ((1,), (1,)); or the one that does nothing.
      kernel_fsdp_info: only `(None, -1)`: gather a sharded kernel before the call.

    >>> grouped_dense(jnp.ones((3, 2)), jnp.ones((2, 2, 4)), jnp.array([1, 2])).shape
    (3, 4)
    """
    if tuple(kernel_fsdp_info) != (None, -1):
        raise ValueError(f"kernel_fsdp_info: want (None, -1), a kernel that is gathered; got {kernel_fsdp_info!r}")
    x = what.as_array("x", x)
    if not _noop(quantizer_set):
        kernel = what.as_array("kernel", kernel)
        axes = tuple(tuple(axis % ndim for axis in each) for each, ndim in zip(contracting_dims, (2, 3), strict=True))
        if (x.ndim, kernel.ndim, axes) != (2, 3, ((1,), (1,))):
            raise ValueError(
                f"quantizer_set: goes with x [m, k], kernel [g, k, n] and contracting_dims ((1,), (1,)); "
                f"got {x.shape}, {kernel.shape} and {contracting_dims}"
            )
        out = x.dtype if preferred_element_type is None else preferred_element_type
        bias = None if bias is None else what.as_array("bias", bias)
        return _dense((out, precision), x, kernel, what.as_sizes(group_sizes), bias, group_offset, quantizer_set)
    return grouped.grouped_dense(
        x, kernel, group_sizes, contracting_dims=contracting_dims, bias=bias, precision=precision,
        preferred_element_type=x.dtype if preferred_element_type is None else preferred_element_type,
        group_offset=group_offset,
    )  # fmt: skip


def grouped_dbias(grad: Any, group_sizes: Any) -> Array:
    """The gradient of a bias: rows `[m, n]` summed by group to `[g, n]`, in float32, in the dtype of grad.

    >>> grouped_dbias(jnp.ones((3, 2), jnp.bfloat16), jnp.array([0, 2])).tolist()  # the last row is nobody's
    [[0.0, 0.0], [2.0, 2.0]]
    """
    grad = what.as_array("grad", grad)
    if grad.ndim != 2:
        raise ValueError(f"grad: want 2 dimensions [m, n]; got shape {grad.shape}")
    ones = jnp.ones((grad.shape[0], 1), grad.dtype)
    total = api.transposed_grouped_matmul(
        ones, grad, group_sizes, grad.dtype, transpose_lhs=True, precision=jax.lax.Precision.HIGHEST
    )
    return total[:, 0]


def _noop(quantizer_set: Any) -> bool:
    """Whether a set quantizes nothing."""
    if quantizer_set is None:
        return True
    if not isinstance(quantizer_set, QuantizerSet):
        raise TypeError(f"quantizer_set: want a QuantizerSet; got {type(quantizer_set).__name__}")
    return quantizer_set.x is None and quantizer_set.kernel is None


def _quantized(tensor: GroupedTensor, given: Any, quantizer: Any, axes: Sequence[int]) -> GroupedTensor:
    """An operand with scales, whose blocks lie along what is summed over."""
    if quantizer is None or isinstance(given, GroupedScaledTensor1x):
        return tensor
    made, _, amax = quantized(tensor, quantizer, int(axes[-1]) % tensor.ndim)
    quantizer.update(amax)
    return made


# ---------------------------------------------------------------------------------------------------------------------
# A layer with quantizers: `how` is the dtype of the result and the precision


def _both(x: Any, sizes: Any, quantizer: GroupedQuantizer | None, axes: tuple[int, int]) -> tuple[Any, Any, Any]:
    """X as two products read it, quantized along one axis and along another; and the quantizer of the next call."""
    if quantizer is None:
        return x, x, None
    tensor, after = GroupedTensor(x, sizes, None, x.shape), jax.tree.map(lambda leaf: leaf, quantizer)
    one, _, amax = quantized(tensor, quantizer, axes[0])
    same = quantizer.scaling_mode.is_tensor_scaling()
    two = one if same else quantized(tensor, quantizer, axes[1])[0]
    after.update(amax)
    return one.data, two.data, after


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dense(how: Any, x: Any, kernel: Any, sizes: Any, bias: Any, first: Any, quantizers: QuantizerSet) -> Array:
    return _forward(how, x, kernel, sizes, bias, first, quantizers)[0]


def _forward(
    how: Any, x: Any, kernel: Any, sizes: Any, bias: Any, first: Any, quantizers: QuantizerSet
) -> tuple[Array, Any]:
    rows, again, after_x = _both(x, sizes, quantizers.x, (1, 0))
    weights, back, after_kernel = _both(kernel, None, quantizers.kernel, (1, 2))
    out = api.grouped_matmul(rows, weights, sizes, how[0], group_offset=first, precision=how[1], bias=bias)
    like = tuple(None if each is None else jnp.zeros((0,), each.dtype) for each in (x, kernel, bias))
    return out, (again, back, sizes, first, quantizers.dgrad, (after_x, after_kernel), like)


def _backward(how: Any, kept: Any, ct: Array) -> tuple[Any, ...]:
    x, kernel, sizes, first, quantizer, after, like = kept
    rows, again, after_grad = _both(ct, sizes, quantizer, (1, 0))
    there = {"group_offset": first, "precision": how[1]}
    dx = api.grouped_matmul(rows, kernel, sizes, like[0].dtype, transpose_rhs=True, **there)
    sums = {"num_actual_groups": kernel.shape[0], "transpose_lhs": True, **there}
    dw = api.transposed_grouped_matmul(x, again, sizes, like[1].dtype, **sums)
    db = None
    if like[2] is not None:
        ones = jnp.ones((ct.shape[0], 1), ct.dtype)
        db = api.transposed_grouped_matmul(ones, ct, sizes, like[2].dtype, **sums)[:, 0]
    return dx, dw, None, db, None, QuantizerSet(after[0], after[1], after_grad)


_dense.defvjp(_forward, _backward)
