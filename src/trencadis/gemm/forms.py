"""The forms of a grouped GEMM, by which of m, k and n are ragged, and how each is computed.

none             one batched product of XLA
m or n           rows: the kernels of `grouped_matmul`
k                contraction: the kernels of `transposed_grouped_matmul`
two or three     the general form: `lowering` and its own primitive
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from trencadis.backends import INTERPRETED
from trencadis.core import arguments
from trencadis.core.activation import Activation
from trencadis.core.call import Options, Steps
from trencadis.core.dtypes import accumulator
from trencadis.core.plan import check_backend
from trencadis.core.tiling import Overrides
from trencadis.gemm.epilogue import GemmEpilogue, apply_epilogue, checked_epilogue, existing_data
from trencadis.gemm.lowering import general_product
from trencadis.gemm.operand import GemmOperand, as_matrices, contracted_axes, merged_sizes, result_tensor
from trencadis.gemm.plan import BACKENDS
from trencadis.gemm.tensor import GroupedTensor
from trencadis.quant.product import contraction_product, rows_product

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmOptions:
    """The options of a grouped GEMM, as the caller gave them."""

    preferred_element_type: Any = None
    group_offset: Any = None
    precision: Any = None
    backend: str | None = None
    interpret: bool = False

    @property
    def product(self) -> Options:
        """The options that the rows and contraction forms pass on."""
        return Options(precision=self.precision, backend=self.backend, interpret=self.interpret)


def gemm(a: GemmOperand, b: GemmOperand, epilogue: GemmEpilogue, options: GemmOptions) -> GroupedTensor | Array:
    """alpha * product + bias + beta * out of two operands: a tensor, or an array if the result is not ragged."""
    ragged = _ragged_dims(a, b)
    dtype = _result_dtype(options.preferred_element_type, a, b)
    _check_groups(a, b, options, ragged, epilogue)
    epilogue = checked_epilogue(a, b, epilogue, ragged, dtype)
    _check_kernel(ragged, options)
    fused, epilogue = _fused(a, b, ragged, epilogue, dtype, window=options.group_offset is not None)
    kept = epilogue.dtype(accumulator(a.dtype, b.dtype)) if epilogue.given else dtype
    if ragged == "":
        product = (_quantized_stacks if a.quantized or b.quantized else _stacks)(a, b, kept, options.precision)
    elif ragged == "m":
        product = _rows(a, b, kept, options, fused)
    elif ragged == "n":
        product = _rows(b, a, kept, options)
    elif ragged == "k":
        product = _contraction(a, b, kept, options, fused.existing_out)
    else:
        fuses = len(a.free) == len(b.free) == 1
        product = general_product(
            a, b, dtype if fuses else kept, epilogue, fused=fuses, precision=options.precision,
            overrides=Overrides(backend=options.backend, interpret=options.interpret),
        )  # fmt: skip
        epilogue = GemmEpilogue() if fuses else epilogue
    return apply_epilogue(product, epilogue, dtype)


def dense(
    a: GemmOperand,
    b: GemmOperand,
    bias: Any,
    activation: Activation | None,
    options: GemmOptions,
    multiply: Callable[..., Array],
) -> Array:
    """activation(product + bias) of ragged rows and a stack; `multiply` takes the arguments of `rows_product`."""
    epilogue = GemmEpilogue(bias=bias)
    dtype = _result_dtype(options.preferred_element_type, a, b)
    _check_groups(a, b, options, "m", epilogue)
    checked_epilogue(a, b, epilogue, "m", dtype)
    fused, _ = _fused(a, b, "m", epilogue, dtype)
    return _rows(a, b, dtype, options, fused._replace(activation=activation), multiply).data


# ---------------------------------------------------------------------------------------------------------------------
# Checks, and what a kernel fuses


def _ragged_dims(a: GemmOperand, b: GemmOperand) -> str:
    """The names of the ragged ones of m, k and n, in this order."""
    sizes = {"m": a.ragged_sizes(a.free), "k": a.ragged_sizes(a.contracted), "n": b.ragged_sizes(b.free)}
    return "".join(name for name, each in sizes.items() if each is not None)


def _result_dtype(asked: Any, a: GemmOperand, b: GemmOperand) -> np.dtype[Any]:
    """The dtype of the result: as asked, or that of the operands that are not quantized, promoted, or float32."""
    given = [x.tensor.dtype for x in (a, b) if not x.quantized]
    if len(given) < 2 and not any(jnp.issubdtype(each, jnp.inexact) for each in given):
        given = [np.dtype(np.float32)]
    return arguments.result_dtype(jnp.result_type(*given) if asked is None else asked, a.tensor, b.tensor)


def _check_groups(a: GemmOperand, b: GemmOperand, options: GemmOptions, ragged: str, epilogue: GemmEpilogue) -> None:
    """Raise unless both operands have the same groups or, with group_offset, one is a stack of some of them."""
    counts = a.tensor.num_groups, b.tensor.num_groups
    by_group = [name for name in ("alpha", "beta", "bias") if getattr(epilogue, name) is not None]
    bias_alone = by_group == ["bias"] and ragged == "m" and epilogue.out is None  # then the kernel adds it
    window = options.group_offset is not None
    if window and (len(ragged) != 1 or (by_group and not bias_alone)):
        got = " and ".join([f"{ragged or 'none'} ragged", *by_group])
        raise ValueError(
            "group_offset: want exactly one of m, k and n ragged, and no alpha, beta or bias, except a bias alone "
            f"where m is ragged; got {got}"
        )
    if counts[0] != counts[1] and (not window or ragged == "k"):
        raise ValueError(f"{b.name}: want as many groups as {a.name}; got {counts[1]} and {counts[0]}")


def _check_kernel(ragged: str, options: GemmOptions) -> None:
    """Raise if a kernel is asked for that takes neither stacks alone nor several ragged dimensions."""
    backend, interpret = check_backend(options.backend), arguments.checked_flag("interpret", options.interpret)
    known = (None, *BACKENDS) if ragged else (None, "xla")
    kernels = [name for name in BACKENDS if name in INTERPRETED] if ragged else []
    if len(ragged) == 1 or (backend in known and (backend in kernels or not interpret)):
        return
    count, asked = "more than one ragged dimension" if ragged else "stacks alone", backend not in known
    if asked:
        raise ValueError(f"backend: {backend!r} has no kernel for {count}; want one of {', '.join(map(repr, known))}")
    wanted = f"False, or backend={' or '.join(map(repr, kernels))}" if ragged else "False"
    raise ValueError(f"interpret: True has no kernel for {count}; want {wanted}")


def _fused(
    a: GemmOperand, b: GemmOperand, ragged: str, epilogue: GemmEpilogue, dtype: Any, window: bool = False
) -> tuple[Steps, GemmEpilogue]:
    """The steps of the epilogue that a kernel computes itself, and the epilogue that is left."""
    given = epilogue.given
    free = [x.tensor.shape[axis] for x in (a, b) if not x.flat for axis in x.free]
    merged = a.extent(a.free), b.extent(b.free)
    if given == ("bias",) and ragged == "m":
        return Steps(bias=epilogue.bias.reshape(-1, merged[1])), GemmEpilogue()
    if given == ("out",) and ragged == "k":
        # with a window, out says how many groups are computed
        groups = epilogue.out.shape[:1] if window else (a.tensor.num_groups,)
        data = existing_data(epilogue.out, (*groups, *free), (None, None), dtype)
        return Steps(existing_out=data.reshape(*groups, *merged)), GemmEpilogue()
    if given == ("out",) and ragged == "m" and a.ragged_first(a.free) == a.free:
        data = existing_data(epilogue.out, tuple(free), (a.ragged_sizes(a.free), None), dtype)
        return Steps(existing_out=data.reshape(merged)), GemmEpilogue()
    return Steps(), epilogue


# ---------------------------------------------------------------------------------------------------------------------
# The forms with at most one ragged dimension


def _stacks(a: GemmOperand, b: GemmOperand, dtype: Any, precision: Any) -> GroupedTensor:
    """The product of two stacks as one batched product of XLA."""
    acc = accumulator(a.tensor.dtype, b.tensor.dtype)
    # as matrices: XLA:CPU has no code for some small products of bfloat16 if it merges the axes itself
    (x, x_flipped), (y, y_flipped) = as_matrices(a, a.free, a.contracted), as_matrices(b, b.contracted, b.free)
    if x.dtype != y.dtype:
        x, y = x.astype(acc), y.astype(acc)
    dims = (((1 if x_flipped else 2,), (2 if y_flipped else 1,)), ((0,), (0,)))
    precision = arguments.checked_precision(precision)
    out = lax.dot_general(x, y, dims, precision=precision, preferred_element_type=acc).astype(dtype)
    out = out.reshape(_stack_shape(a, b))
    return GroupedTensor(out, None, None, out.shape)


def _stack_shape(a: GemmOperand, b: GemmOperand) -> tuple[int, ...]:
    """The shape of the product of two stacks: the groups, and the free axes of both."""
    return (a.tensor.shape[0], *(x.tensor.shape[axis] for x in (a, b) for axis in x.free))


def _quantized_stacks(a: GemmOperand, b: GemmOperand, dtype: Any, precision: Any) -> GroupedTensor:
    """The product of two stacks of which one is quantized: the rows form, in which all groups of lhs have one size."""
    x, transposed = as_matrices(a, a.free, a.contracted)
    x = x.mT if transposed else x
    w, transposed = as_matrices(b, b.contracted, b.free)
    groups, rows, k = x.shape
    x = x.merged(2, 1) if a.quantized else x.reshape(groups * rows, k)
    sizes: Any = np.full((groups,), rows, np.int32)
    out = rows_product(x, w, sizes, dtype, Options(precision=precision), transpose_rhs=transposed)
    shape = _stack_shape(a, b)
    return GroupedTensor(out.reshape(shape), None, None, shape)


def _rows(
    ragged: GemmOperand,
    stack: GemmOperand,
    dtype: Any,
    options: GemmOptions,
    steps: Steps = Steps(),
    multiply: Callable[..., Array] = rows_product,
) -> GroupedTensor:
    """The rows of the ragged operand, those of each group times its matrix of the stack."""
    free = ragged.ragged_first(ragged.free)
    x, transposed = as_matrices(ragged, free, ragged.contracted)
    x = x.mT if transposed else x
    w, transposed = as_matrices(stack, stack.contracted, stack.free)
    sizes = merged_sizes(ragged.ragged_sizes(ragged.free), ragged.uniform_extent(ragged.free), x.shape[0])
    window = options.group_offset
    out = multiply(x, w, sizes, dtype, options.product, steps, transpose_rhs=transposed, group_offset=window)
    labels = [(ragged.name, axis) for axis in free] + [(stack.name, axis) for axis in stack.free]
    lengths = [ragged.tensor.shape[axis] for axis in free] + [stack.tensor.shape[axis] for axis in stack.free]
    return result_tensor(ragged, stack, out.reshape(lengths), labels)


def _contraction(
    a: GemmOperand, b: GemmOperand, dtype: Any, options: GemmOptions, existing_out: Array | None
) -> GroupedTensor:
    """The product over the rows of each group, which are contracted."""
    left, right = contracted_axes(a, b)
    x, transposed = as_matrices(a, left, a.free)
    y, other = as_matrices(b, right, b.free)
    y = y.mT if other else y
    sizes = merged_sizes(a.ragged_sizes(a.contracted), a.uniform_extent(a.contracted), y.shape[0])
    groups = None if existing_out is None else existing_out.shape[0]
    out = contraction_product(
        x, y, sizes, dtype, options.product,
        transpose_lhs=not transposed, window=(options.group_offset, groups), existing_out=existing_out,
    )  # fmt: skip
    shape = [out.shape[0]] + [x.tensor.shape[axis] for x in (a, b) for axis in x.free]
    return GroupedTensor(out.reshape(shape), None, None, tuple(shape))
