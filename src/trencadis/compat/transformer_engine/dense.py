"""TransformerEngine's `grouped_dense`, a dense layer per group with quantized training, and `grouped_dbias`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from trencadis.api import gemm, matmul
from trencadis.compat.transformer_engine.gemm import is_noop
from trencadis.compat.transformer_engine.quantize import quantized
from trencadis.compat.transformer_engine.quantizers import GroupedQuantizer, QuantizerSet, noop_quantizer_set
from trencadis.core import arguments
from trencadis.core.jax_compat import vary_over, varying_axes
from trencadis.gemm.operand import gemm_operands
from trencadis.gemm.tensor import GroupedTensor

Array = jax.Array
Settings = tuple[Any, Any]  # the dtype of the result, and the precision of all products


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
    """Apply a dense layer per group, as `trencadis.grouped_dense` does; gradients have the dtypes of their operands.

    With quantizers, x and kernel are quantized, and so is the gradient of the result before it is multiplied; rounding
    counts as the identity in gradients. MXFP8 has its blocks along the axis that each pass contracts. The gradient of
    quantizer_set is the set for the next call, as in the original.

    Args:
      preferred_element_type: the dtype of the result; by default that of x.
      quantizer_set: for x `[m, k]` and kernel `[g, k, n]` with contracting_dims ((1,), (1,)); or `noop_quantizer_set`.
      kernel_fsdp_info: only `(None, -1)`: gather a sharded kernel before the call.

    >>> grouped_dense(jnp.ones((3, 2)), jnp.ones((2, 2, 4)), jnp.array([1, 2])).shape
    (3, 4)
    """
    if not isinstance(kernel_fsdp_info, (tuple, list)) or tuple(kernel_fsdp_info) != (None, -1):
        raise ValueError(f"kernel_fsdp_info: want (None, -1), a kernel that is gathered; got {kernel_fsdp_info!r}")
    x = _numbers("x", x)
    out = x.dtype if preferred_element_type is None else arguments.result_dtype(preferred_element_type)
    if is_noop(quantizer_set):
        return gemm.grouped_dense(
            x, kernel, group_sizes, contracting_dims=contracting_dims, bias=bias, precision=precision,
            preferred_element_type=out, group_offset=group_offset,
        )  # fmt: skip
    kernel, sizes = _numbers("kernel", kernel), arguments.as_sizes(group_sizes)
    _check_single(x, kernel, sizes, contracting_dims)
    bias = None if bias is None else _numbers("bias", bias)
    first: Any = None if group_offset is None else arguments.first_group(group_offset)
    if first is not None:
        arguments.check_window(first, kernel.shape[0], sizes.shape[0])
    varying = frozenset().union(*(varying_axes(each) for each in (x, kernel, sizes, bias, first) if each is not None))
    axes = tuple(sorted(varying, key=str))  # a `custom_vjp` has gradients that vary as its operands do
    x, kernel, bias = (None if each is None else vary_over(each, axes) for each in (x, kernel, bias))
    return _dense((out, precision), x, kernel, sizes, bias, first, quantizer_set)


def grouped_dbias(grad: Any, group_sizes: Any) -> Array:
    """The gradient of a bias: rows `[m, n]` summed by group to `[g, n]`, in float32, returned in the dtype of grad.

    >>> grouped_dbias(jnp.ones((3, 2), jnp.bfloat16), jnp.array([0, 2])).tolist()  # the last row is unowned
    [[0.0, 0.0], [2.0, 2.0]]
    """
    grad = _numbers("grad", grad)
    if grad.ndim != 2:
        raise ValueError(f"grad: want 2 dimensions [m, n]; got shape {grad.shape}")
    return _sum_by_group(grad, group_sizes, grad.dtype, precision=jax.lax.Precision.HIGHEST)


def _numbers(name: str, x: Any) -> Array:
    """x as an array of numbers, or an error that names the argument."""
    x = arguments.as_array(name, x)
    if not jnp.issubdtype(x.dtype, jnp.number):
        raise TypeError(f"{name}: want a number dtype; got {x.dtype}")
    return x


def _check_single(x: Array, kernel: Array, sizes: Any, contracting_dims: Any) -> None:
    """Raise unless the operands match, and their axes are those that quantizers are made for."""
    fits = (x.ndim, kernel.ndim) == (2, 3)
    if fits:
        rows, weights = GroupedTensor(x, sizes, None, x.shape), GroupedTensor(kernel, None, None, kernel.shape)
        a, b = gemm_operands(rows, weights, contracting_dims, names=("x", "kernel"), size_name="group_sizes")
        fits = a.contracted == b.contracted == (1,)
    if not fits:
        raise ValueError(
            f"quantizer_set: goes with x [m, k], kernel [g, k, n] and contracting_dims ((1,), (1,)); "
            f"got {x.shape}, {kernel.shape} and {contracting_dims}"
        )


def _sum_by_group(rows: Array, group_sizes: Any, dtype: Any, **options: Any) -> Array:
    """The rows `[m, n]` of each group summed to `[g, n]`, as the product with a column of ones."""
    ones = jnp.ones((rows.shape[0], 1), rows.dtype)
    return matmul.transposed_grouped_matmul(ones, rows, group_sizes, dtype, transpose_lhs=True, **options)[:, 0]


# ---------------------------------------------------------------------------------------------------------------------
# The layer with quantizers


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dense(
    settings: Settings, x: Any, kernel: Any, sizes: Any, bias: Any, first: Any, quantizers: QuantizerSet
) -> Array:
    """x times kernel, both quantized, plus bias; the gradients are those of the layer without quantization."""
    return _forward(settings, x, kernel, sizes, bias, first, quantizers)[0]


def _forward(
    settings: Settings, x: Any, kernel: Any, sizes: Any, bias: Any, first: Any, quantizers: QuantizerSet
) -> tuple[Array, Any]:
    """The result, and what the backward pass needs."""
    x_fwd, x_wgrad, next_x = _both("x", x, sizes, quantizers.x, (1, 0))
    w_fwd, w_dgrad, next_kernel = _both("kernel", kernel, None, quantizers.kernel, (1, 2))
    dtype, precision = settings
    out = matmul.grouped_matmul(x_fwd, w_fwd, sizes, dtype, group_offset=first, precision=precision, bias=bias)
    like = tuple(None if each is None else jnp.zeros((0,), each.dtype) for each in (x, kernel, bias))
    return out, (x_wgrad, w_dgrad, sizes, first, quantizers.dgrad, (next_x, next_kernel), like)


def _backward(settings: Settings, saved: Any, ct: Array) -> tuple[Any, ...]:
    """The gradients of x, kernel and bias; the one of the quantizers is the set for the next call."""
    x, kernel, sizes, first, quantizer, (next_x, next_kernel), (like_x, like_kernel, like_bias) = saved
    ct_dgrad, ct_wgrad, next_dgrad = _both("grad", ct, sizes, quantizer, (1, 0))
    common = {"group_offset": first, "precision": settings[1]}
    window = {"num_actual_groups": kernel.shape[0], **common}
    dx = matmul.grouped_matmul(ct_dgrad, kernel, sizes, like_x.dtype, transpose_rhs=True, **common)
    dw = matmul.transposed_grouped_matmul(x, ct_wgrad, sizes, like_kernel.dtype, transpose_lhs=True, **window)
    db = None if like_bias is None else _sum_by_group(ct, sizes, like_bias.dtype, **window)
    return dx, dw, None, db, None, QuantizerSet(next_x, next_kernel, next_dgrad)


_dense.defvjp(_forward, _backward)


def _both(
    name: str, x: Any, sizes: Any, quantizer: GroupedQuantizer | None, axes: tuple[int, int]
) -> tuple[Any, Any, Any]:
    """x quantized with blocks along each of two axes, for the two products that read it; and the next quantizer."""
    if quantizer is None:
        return x, x, None
    tensor, after = GroupedTensor(x, sizes, None, x.shape), jax.tree.map(lambda leaf: leaf, quantizer)
    one, _, amax = quantized(name, tensor, quantizer, axes[0])
    same = quantizer.scaling_mode.is_tensor_scaling()
    two = one if same else quantized(name, tensor, quantizer, axes[1])[0]
    after.update(amax if after.scale is None else _over_devices(amax, after.scale))
    return one.data, two.data, after


def _over_devices(amax: Array, scale: Array) -> Array:
    """The largest magnitudes of all devices that share the scale, which inside `jax.shard_map` may be several."""
    shared = tuple(sorted(varying_axes(amax) - varying_axes(scale), key=str))
    return lax.pmax(lax.stop_gradient(amax), shared) if shared else amax
