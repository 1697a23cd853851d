"""Grouped products of arrays or quantized operands: values are multiplied as stored, scales go to the epilogue.

An operand that is stored transposed is multiplied in that order. Zero points are subtracted before the product.
A scale that is constant along the sum is a factor of the result. One that changes along k is a factor of a part of the
sum: the plan decides whether a kernel applies it or the product is split. Weights are never multiplied by their scales.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from trencadis.core import arguments, unfused
from trencadis.core.activation import static_activation
from trencadis.core.call import Options, Steps, overrides_of, sizes_and_window
from trencadis.core.dtypes import accumulator, whole
from trencadis.core.epilogue import Epilogue
from trencadis.core.mesh import replicated, resharded_like
from trencadis.core.problem import Form, Problem
from trencadis.core.sharded import run
from trencadis.core.spans import local_group, owned
from trencadis.core.split import SHORT
from trencadis.core.wide_upcast import WORD, takes, upcast
from trencadis.quant.blocks import expanded
from trencadis.quant.operand import Operand, Sizes, array_operand, dtype_of_product
from trencadis.quant.scaled import Scaled

Array = jax.Array


def rows_product(
    lhs: Operand,
    rhs: Operand,
    group_sizes: Sizes,
    dtype: Any,
    options: Options,
    steps: Steps = Steps(),
    *,
    transpose_rhs: bool,
    group_offset: Any = None,
) -> Array:
    """The result `[m, n]` of `grouped_matmul`, from the caller's arguments; dtype is that of the result, or None."""
    x, w, sizes = array_operand("lhs", lhs), array_operand("rhs", rhs), arguments.as_sizes(group_sizes)
    dtype = dtype_of_product(x, w) if dtype is None else dtype
    bias, existing_out, activation = steps
    if activation is not None and existing_out is not None:
        raise ValueError("activation: cannot be given together with existing_out; apply it to the sum yourself")
    bias = None if bias is None else arguments.as_array("bias", bias)
    epilogue = Epilogue(bias=None if bias is None else np.dtype(bias.dtype), accumulate=existing_out is not None)
    problem = arguments.rows_problem(
        x, w, sizes, dtype, transpose_rhs=arguments.checked_flag("transpose_rhs", transpose_rhs),
        epilogue=epilogue, precision=options.precision,
    )  # fmt: skip
    arguments.check_bias(problem, bias)
    arguments.check_existing_out(existing_out, problem.out_shape, problem.out)
    arguments.check_window_given(group_offset, problem.local_groups, problem.groups)
    overrides = overrides_of(problem, options)
    after = sizes_and_window(problem, sizes, group_offset)
    problem, operands, scales = with_scales(problem, x, w, *after)
    extras = [
        arguments.as_array(name, x) for name, x in (("bias", bias), ("existing_out", existing_out)) if x is not None
    ]
    call = functools.partial(run, out_sharding=options.out_sharding)
    static = None if activation is None else static_activation(activation, problem.sum, problem.out)
    if activation is not None and static is None:
        z = call(problem.replace(out=problem.sum), overrides, *operands, *after, *scales, *extras)
        return resharded_like(unfused.activate(problem, activation, replicated(z), *after), z)
    problem = problem.replace(epilogue=dataclasses.replace(problem.epilogue, activation=static))
    return call(problem, overrides, *operands, *after, *scales, *extras)


def contraction_product(
    lhs: Operand,
    rhs: Operand,
    group_sizes: Sizes,
    dtype: Any,
    options: Options,
    *,
    transpose_lhs: bool,
    window: tuple[Any, int | None],
    existing_out: Any = None,
) -> Array:
    """The result `[g, k, n]` of `transposed_grouped_matmul`; window is its group_offset and num_actual_groups."""
    x, y, sizes = array_operand("lhs", lhs), array_operand("rhs", rhs), arguments.as_sizes(group_sizes)
    dtype = dtype_of_product(x, y) if dtype is None else dtype
    first = arguments.first_group(window[0])
    problem = arguments.contraction_problem(
        x, y, sizes, dtype,
        transpose_lhs=not arguments.checked_flag("transpose_lhs", transpose_lhs),
        local=arguments.local_groups(window[1], first, np.shape(sizes)[-1] if np.ndim(sizes) else 0),
        precision=options.precision,
    ).replace(epilogue=Epilogue(accumulate=existing_out is not None))  # fmt: skip
    arguments.check_existing_out(existing_out, problem.out_shape, problem.out)
    overrides = overrides_of(problem, options)
    after = sizes_and_window(problem, sizes, first)
    problem, operands, scales = with_scales(problem, x, y, *after)
    extras = [] if existing_out is None else [arguments.as_array("existing_out", existing_out)]
    return run(problem, overrides, *operands, *after, *scales, *extras, out_sharding=options.out_sharding)


# ---------------------------------------------------------------------------------------------------------------------
# Scales


def with_scales(
    problem: Problem, lhs: Array | Scaled, rhs: Array | Scaled, sizes: Array, first: Array
) -> tuple[Problem, tuple[Array, Array], list[Array]]:
    """The problem of the stored values, with scales in its epilogue; these values; and the scales.

    Scales are constants to autodiff, and so are the values they belong to.
    """
    if not isinstance(lhs, Scaled) and not isinstance(rhs, Scaled):
        return problem, (lhs, rhs), []
    lhs, rhs = (lax.stop_gradient(x) if isinstance(x, Scaled) else x for x in (lhs, rhs))
    if problem.form is Form.CONTRACTION:
        if isinstance(lhs, Scaled) and lhs.transposed:
            problem, lhs = problem.replace(transpose_lhs=not problem.transpose_lhs), lhs.mT
        return _contraction_scales(problem, _without_zeros(lhs), _without_zeros(rhs), sizes, first)
    if isinstance(rhs, Scaled) and rhs.transposed:
        problem, rhs = problem.replace(transpose_rhs=not problem.transpose_rhs), rhs.mT
    return _rows_scales(problem, _without_zeros(lhs), _without_zeros(rhs), sizes, first)


def _without_zeros(x: Array | Scaled) -> Array | Scaled:
    """The same operand without zero points: its values are the differences, which int8 or bfloat16 hold exactly."""
    if not isinstance(x, Scaled) or x.zeros is None:
        return x
    values = x.centered(jnp.int8 if x.dtype == jnp.int4 else jnp.bfloat16)  # up to 15, or up to 255
    return Scaled.tree_unflatten((x.format, x.block, False, False), (values, x.scale, x.total, None))


def _rows_scales(
    problem: Problem, lhs: Array | Scaled, rhs: Array | Scaled, sizes: Array, first: Array
) -> tuple[Problem, tuple[Array, Array], list[Array]]:
    """Scales of a rows product: of each row and block of k for lhs, of each column and block of k for rhs.

    Blocks of k that are too short to be parts of the sum are multiplied into lhs instead.
    """
    k_axis = 2 if problem.transpose_rhs else 1
    if isinstance(lhs, Scaled) and (_short(lhs, 1) or _misaligned(lhs, rhs, k_axis)):
        lhs = lhs.dequantize()
    total = None
    if isinstance(lhs, Scaled) and _in_bfloat16(lhs):  # exact, and one kernel can apply the scales of the weights
        total, lhs = lhs.total, _bfloat16_rows(lhs)
    if isinstance(rhs, Scaled) and _short(rhs, k_axis) and rhs.scale.shape[3 - k_axis] == 1:
        each = jnp.squeeze(rhs.scales(), 3 - k_axis)  # [g or 1, k]
        if each.shape[0] > 1:
            each = jnp.take(each, local_group(problem, sizes, first), axis=0)
        each = jnp.where(owned(problem, sizes, first)[:, None], each, 1)  # unowned rows have no scales
        lhs = lhs.dequantize() if isinstance(lhs, Scaled) else lhs.astype(accumulator(lhs.dtype, np.float32))
        lhs = lhs * each
        rhs = _values(rhs)
    epilogue, scales = problem.epilogue, []
    if isinstance(rhs, Scaled) and rhs.total is not None and rhs.scale.shape[k_axis] > 1:
        (values, scale, own, zeros), static = rhs.tree_flatten()  # the total is a factor of the sum
        total = own if total is None else total * own
        rhs = Scaled.tree_unflatten(static, (values, scale, None, zeros))
    if isinstance(lhs, Scaled):
        by_row, block = _along_k(lhs, 1)  # [m or 1, k / block or 1]
        by_row = jnp.broadcast_to(by_row if total is None else by_row * total, (problem.rows, by_row.shape[1]))
        scales.append(by_row if block else by_row[:, 0])
        epilogue = dataclasses.replace(epilogue, by_row=True, row_block=block)
    elif total is not None:
        scales.append(jnp.broadcast_to(total, (problem.rows,)))
        epilogue = dataclasses.replace(epilogue, by_row=True)
    x, y, interleaved = _values(lhs), rhs, False
    if isinstance(rhs, Scaled):
        by_column, block, across = _column_scales(rhs.mT if problem.transpose_rhs else rhs)
        groups = (problem.local_groups, *by_column.shape[1:])
        scales.append(jnp.broadcast_to(by_column, groups if block else (problem.local_groups, problem.n)))
        epilogue = dataclasses.replace(epilogue, by_column=True, column_block=(block, across) if block else (0, 1))
        if block:
            epilogue = dataclasses.replace(epilogue, column_scales=np.dtype(by_column.dtype))
        as_stored = block > 0 or whole(rhs.dtype) == rhs.dtype
        interleaved = rhs.interleaved and as_stored
        y = jnp.asarray(rhs.stored) if as_stored else _values(rhs)
    dtypes = {"lhs": np.dtype(x.dtype), "rhs": np.dtype(y.dtype)}
    return problem.replace(**dtypes, interleaved=interleaved, epilogue=epilogue), (x, jnp.asarray(y)), scales


def _column_scales(rhs: Scaled) -> tuple[Array, int, int]:
    """Scales of weights [g, k, n]: `[g or 1, k / block, n / across]`, or `[g or 1, n or 1]` if constant along k.

    Those that change along k have the dtype in which they are stored, others float32.
    """
    scale, block = _along_k(rhs, 1)
    if block and rhs.total is None:  # in their own dtype, which may be a byte
        scale = expanded(jnp.asarray(rhs.scale), (rhs.block[0], 1, 1), (rhs.shape[0], *rhs.scale.shape[1:]))
    if not block:
        return expanded(scale, (1, 1, rhs.block[2]), (*scale.shape[:2], rhs.shape[2]))[:, 0], 0, 1
    return scale, block, rhs.block[2]


def _along_k(x: Scaled, axis: int) -> tuple[Array, int]:
    """The scales in float32, expanded along all leading axes but k, and the length of blocks along k; 0: all of k."""
    scale = jnp.asarray(x.scale).astype(jnp.float32)
    scale = scale if x.total is None else scale * x.total
    block = x.block[axis] if scale.shape[axis] > 1 else 0
    lengths = tuple(length if i == 0 else 1 for i, length in enumerate(x.block))
    return expanded(scale, lengths, (x.shape[0], *scale.shape[1:])), block


def _contraction_scales(
    problem: Problem, lhs: Array | Scaled, rhs: Array | Scaled, sizes: Array, first: Array
) -> tuple[Problem, tuple[Array, Array], list[Array]]:
    """Scales of a contraction: those of rows go to rhs, those of columns to the result, both at once to the operand."""
    left, right = _split(lhs, int(problem.transpose_lhs)), _split(rhs, 0)
    x, y = left.values, right.values
    mine = owned(problem, sizes, first)
    for rows in (left.rows, right.rows):  # [m]; unowned rows have no scales
        y = y if rows is None else y.astype(accumulator(y.dtype, np.float32)) * jnp.where(mine, rows, 1)[:, None]
    scales = [
        jnp.broadcast_to(s, (problem.local_groups, size))
        for s, size in ((left.columns, problem.k), (right.columns, problem.n))
        if s is not None
    ]
    epilogue = dataclasses.replace(
        problem.epilogue, by_row=left.columns is not None, by_column=right.columns is not None
    )
    return problem.replace(lhs=np.dtype(x.dtype), rhs=np.dtype(y.dtype), epilogue=epilogue), (x, y), scales


class _Split(NamedTuple):
    """The values of an operand of a contraction, and the scales of its rows [m] or of its columns."""

    values: Array
    rows: Array | None = None
    columns: Array | None = None


def _split(x: Array | Scaled, axis: int) -> _Split:
    """An operand whose rows lie along `axis`, separated from its scales; dequantized if both axes have scales."""
    if not isinstance(x, Scaled):
        return _Split(x)
    by_row, by_column = (x.scale.shape[i] > 1 for i in (axis, 1 - axis))
    if by_row and by_column:
        return _Split(x.dequantize())
    which = axis if by_row else 1 - axis  # the axis along which scales may differ; the other has one
    along = jnp.broadcast_to(jnp.squeeze(x.scales(), 1 - which), (x.shape[which],))
    return _Split(_values(x), rows=along) if by_row else _Split(_values(x), columns=along)


def _short(x: Scaled, axis: int) -> bool:
    """Whether scales change along an axis more often than it is worth to split a product."""
    return x.scale.shape[axis] > 1 and x.block[axis] < SHORT


def _in_bfloat16(lhs: Scaled) -> bool:
    """Whether rows have scales along k, and bfloat16 holds their products with the values: mxfp8, mxfp4, nvfp4."""
    if lhs.zeros is not None or lhs.scale.shape[1] == 1 or lhs.scale.dtype.itemsize > 1:
        return False
    return _digits(lhs.dtype) + _digits(lhs.scale.dtype) <= _digits(jnp.bfloat16)


def _bfloat16_rows(lhs: Scaled) -> Array:
    """Rows times their scales along k, without the total, which bfloat16 numbers hold."""
    (values, scale, _, zeros), static = lhs.tree_flatten()
    lhs = Scaled.tree_unflatten(static, (values, scale, None, zeros))
    if lhs.transposed or not takes(values) or values.shape[1] % lhs.block[1] or lhs.block[1] % WORD:
        return lhs.dequantize(jnp.bfloat16)

    def on_gpu(values: Array, scale: Array) -> Array:
        of_rows = expanded(scale.astype(jnp.float32), (lhs.block[0], 1), (values.shape[0], scale.shape[1]))
        return upcast(values, of_rows)

    def elsewhere(values: Array, scale: Array) -> Array:
        return Scaled.tree_unflatten(static, (values, scale, None, zeros)).dequantize(jnp.bfloat16)

    return lax.platform_dependent(jnp.asarray(values), jnp.asarray(scale), cuda=on_gpu, default=elsewhere)


def _digits(dtype: Any) -> int:
    """The significant bits of a dtype; none for powers of two, which change no digits of a product."""
    if jnp.issubdtype(dtype, jnp.integer):
        return int(jnp.iinfo(dtype).bits) - 1
    digits = jnp.finfo(dtype).nmant
    return digits + 1 if digits else 0


def _misaligned(lhs: Scaled, rhs: Array | Scaled, k_axis: int) -> bool:
    """Whether both have scales along k whose blocks share only parts that are too short, such as 17 and 32."""
    if not isinstance(rhs, Scaled) or lhs.scale.shape[1] == 1 or rhs.scale.shape[k_axis] == 1:
        return False
    return math.gcd(lhs.block[1], rhs.block[k_axis]) < SHORT


def _values(x: Array | Scaled) -> Array:
    if not isinstance(x, Scaled):
        return x
    return jnp.asarray(x.values).astype(whole(np.dtype(x.values.dtype)))
