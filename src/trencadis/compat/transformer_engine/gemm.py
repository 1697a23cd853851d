"""TransformerEngine's `grouped_gemm`: forward, dgrad and wgrad of a layer in one function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from trencadis.api import gemm as api
from trencadis.compat.transformer_engine.quantize import quantized
from trencadis.compat.transformer_engine.quantizers import GroupedQuantizer, QuantizerSet, noop_quantizer_set
from trencadis.compat.transformer_engine.tensors import GroupedNoScaleTensor, GroupedScaledTensor1x, tensor_of
from trencadis.gemm.operand import gemm_operands
from trencadis.gemm.tensor import GroupedTensor

Array = jax.Array


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
    """Multiply two grouped tensors group by group, as `trencadis.grouped_gemm` does, and return the data of the result.

    Args:
      preferred_element_type: the dtype of the result; by default that of lhs, before it was quantized.
      quantizer_set: quantizes an operand that is not quantized yet: `x` is for lhs, `kernel` for rhs.
      use_async_d2h_group_sizes: has no effect, since sizes are never copied to the host.

    >>> import jax.numpy as jnp
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
    if not is_noop(quantizer_set):
        if isinstance(lhs, GroupedScaledTensor1x) and isinstance(rhs, GroupedScaledTensor1x):
            raise ValueError("quantizer_set: lhs and rhs are quantized already; want noop_quantizer_set")
        gemm_operands(a, b, contracting_dims)  # raises before an axis of them is used
        by = quantizer_set.x, quantizer_set.kernel
        named = zip(("lhs", "rhs"), (a, b), (lhs, rhs), by, contracting_dims, strict=True)
        a, b = (_quantized(*each) for each in named)
    found = api.grouped_gemm(
        a, b, contracting_dims=contracting_dims, bias=bias, precision=precision, group_offset=group_offset,
        preferred_element_type=dtype if preferred_element_type is None else preferred_element_type,
    )  # fmt: skip
    return found.data if isinstance(found, GroupedTensor) else found


def is_noop(quantizer_set: Any) -> bool:
    """True for None or a set that quantizes neither operand; a TypeError for anything that is no `QuantizerSet`."""
    if quantizer_set is None:
        return True
    if not isinstance(quantizer_set, QuantizerSet):
        raise TypeError(f"quantizer_set: want a QuantizerSet; got {type(quantizer_set).__name__}")
    for name in ("x", "kernel", "dgrad"):
        each = getattr(quantizer_set, name)
        if each is not None and not isinstance(each, GroupedQuantizer):
            raise TypeError(f"quantizer_set.{name}: want None or a GroupedQuantizer; got {type(each).__name__}")
    return quantizer_set.x is None and quantizer_set.kernel is None


def _quantized(name: str, tensor: GroupedTensor, given: Any, quantizer: Any, axes: Sequence[int]) -> GroupedTensor:
    """The operand quantized with blocks along the contracted axis, unless it is quantized already."""
    if quantizer is None or isinstance(given, GroupedScaledTensor1x):
        return tensor
    axis = int(axes[-1]) if axes else -1
    made, _, amax = quantized(name, tensor, quantizer, axis % tensor.ndim)
    quantizer.update(amax)
    return made
