"""Products of scaled operands: values are multiplied as they are stored, and scales go to what comes out.

A scale that is the same all along the sum is a factor of the result; one that is not is a factor of a part of the sum,
or of the other operand. Weights are never multiplied by their scales.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from trencadis.core import problem as what
from trencadis.core.autodiff import ended, run
from trencadis.core.dtypes import accumulator
from trencadis.core.epilogue import Activation, Epilogue
from trencadis.core.problem import Form, Problem
from trencadis.core.spans import local_group, owned
from trencadis.core.split import in_parts
from trencadis.core.tiling import Pins
from trencadis.quant.qarray import from_qarray, is_qarray
from trencadis.quant.scaled import Scaled, expanded

Array = jax.Array
Operand = Any  # an array or a Scaled

WHOLE = {"float4_e2m1fn": jnp.float8_e4m3fn}  # nothing multiplies 4 bits of a float; a byte holds them exactly

BLOCKS = 128
SHORT = 16  # entries of a sum below which it has no product of its own


def factored(asked: Problem, lhs: Operand, rhs: Operand) -> tuple[Problem, Array, Array, list[Array]] | None:
    """The same product of arrays, with scales in its epilogue; None if scales change along the sum.

    They are constants to autodiff, and so are the values they belong to.
    """
    lhs, rhs = (lax.stop_gradient(x) if isinstance(x, Scaled) else x for x in (lhs, rhs))
    rows = asked.form is Form.ROWS
    summed = (1, 2 if asked.transpose_rhs else 1) if rows else (int(asked.transpose_lhs), 0)
    if any(_parts(x, axis) > 1 for x, axis in zip((lhs, rhs), summed, strict=True)):
        return None
    shape = (asked.m,) if rows else (asked.local_groups, asked.k)
    by_row = _across(lhs, summed[0], 0).reshape(-1) if isinstance(lhs, Scaled) else None
    by_column = _across(rhs, summed[1], 0) if isinstance(rhs, Scaled) else None
    scales = [
        jnp.broadcast_to(x, shape)
        for x, shape in ((by_row, shape), (by_column, (asked.local_groups, asked.n)))
        if x is not None
    ]
    x, y = _values(lhs), _values(rhs)
    ends = dataclasses.replace(asked.epilogue, by_row=by_row is not None, by_column=by_column is not None)
    return asked.replace(lhs=np.dtype(x.dtype), rhs=np.dtype(y.dtype), epilogue=ends), x, y, scales


def split_run(
    asked: Problem,
    pins: Pins,
    operands: tuple[Operand, Operand, Array, Array],
    *,
    bias: Array | None = None,
    existing: Array | None = None,
    activation: Activation | None = None,
) -> Array:
    """The result of a problem of the values, for operands (lhs, rhs, sizes, first) that stand for something else."""
    lhs, rhs, sizes, first = operands
    lhs, rhs = (lax.stop_gradient(x) if isinstance(x, Scaled) else x for x in (lhs, rhs))
    bare = asked.replace(epilogue=Epilogue())
    follows = bias is not None or activation is not None or existing is not None
    if blocks_of(asked, lhs, rhs):
        wide = accumulator(accumulator(lhs.dtype, rhs.dtype), np.float32)
        product = _blocked(bare.replace(out=wide) if follows else bare, pins, lhs, rhs, sizes, first)
    else:
        multiply = _rows if asked.form is Form.ROWS else _contraction
        product = multiply(bare, pins, lhs, rhs, sizes, first)
    ends = dataclasses.replace(asked.epilogue, by_row=True, activation=activation)  # scaled sums are no integers
    return ended(asked.replace(epilogue=ends), product, bias, existing, sizes, first)


# ---------------------------------------------------------------------------------------------------------------------
# Rows: the sum runs along k


def _blocked(asked: Problem, pins: Pins, lhs: Scaled, rhs: Scaled, sizes: Array, first: Array) -> Array:
    """[m, n]. Scales of blocks that a kernel may take as they are."""
    ends = Epilogue(by_row=True, by_column=True, blocks=blocks_of(asked, lhs, rhs))
    scale = rhs.scale.mT if asked.transpose_rhs else rhs.scale  # [g, k / 128, n / 128]
    scales = (x.astype(jnp.float32) for x in (lhs.scale, scale))
    x, y = _values(lhs), _values(rhs)
    asked = asked.replace(lhs=np.dtype(x.dtype), rhs=np.dtype(y.dtype), epilogue=ends)
    return run(asked, pins, x, y, sizes, first, *scales)


def _rows(asked: Problem, pins: Pins, lhs: Operand, rhs: Operand, sizes: Array, first: Array) -> Array:
    """[m, n]. Scales that change along k split the sum where they change, or go to lhs where that is too often."""
    axes = 1, 2 if asked.transpose_rhs else 1  # k
    if _often(lhs, 1):
        lhs = lhs.dequantize()
    if _often(rhs, axes[1]) and _parts(rhs, 3 - axes[1]) == 1:
        by_group = jnp.squeeze(rhs.scales(), 3 - axes[1])  # [g or 1, k]
        each = by_group
        if by_group.shape[0] > 1:
            each = jnp.take(by_group, local_group(asked, sizes, first), axis=0)
        each = jnp.where(owned(asked, sizes, first)[:, None], each, 1)  # rows of nobody have no scales
        lhs, rhs = (lhs.dequantize() if isinstance(lhs, Scaled) else lhs) * each, _values(rhs)
    lengths = [x.block[axis] for x, axis in zip((lhs, rhs), axes, strict=True) if _parts(x, axis) > 1]
    step = min(math.gcd(*lengths), asked.k) if lengths else asked.k
    pins = pins if step == asked.k else pins.untiled

    def scales(i: Any) -> list[Array | None]:
        down = _across(lhs, 1, i * step).reshape(-1) if isinstance(lhs, Scaled) else None
        across = _across(rhs, axes[1], i * step) if isinstance(rhs, Scaled) else None
        shapes = (asked.m,), (asked.local_groups, asked.n)
        pairs = zip((down, across), shapes, strict=True)
        return [None if s is None else jnp.broadcast_to(s, shape) for s, shape in pairs]

    operands = (_values(lhs), _values(rhs), sizes, first)
    return in_parts(asked, step, operands, scales, lambda inner, *given: run(inner, pins, *given))


def blocks_of(asked: Problem, lhs: Operand, rhs: Operand) -> int:
    """How long blocks are that some kernels know: 1 x 128 of rows by 128 x 128 of weights; 0 if they are others."""
    if asked.form is not Form.ROWS or not (isinstance(lhs, Scaled) and isinstance(rhs, Scaled)):
        return 0
    fits = asked.k > BLOCKS and lhs.total is None and rhs.total is None
    same = lhs.dtype == rhs.dtype and lhs.block == (1, BLOCKS) and rhs.block == (1, BLOCKS, BLOCKS)
    return BLOCKS if fits and same else 0


def _often(x: Operand, axis: int) -> bool:
    """Whether scales change along an axis more often than products can be cut."""
    return _parts(x, axis) > 1 and x.block[axis] < SHORT


def _across(x: Scaled, axis: int, at: Any) -> Array:
    """The scales at a place along an axis, without that axis: float32, 1 long where they are all the same."""
    scale = jnp.asarray(x.scale)
    if scale.shape[axis] > 1:
        scale = lax.dynamic_slice_in_dim(scale, at // x.block[axis], 1, axis)
    scale = expanded(scale.astype(jnp.float32), x.block, x.shape)
    scale = scale if x.ndim == 2 else jnp.squeeze(scale, axis)
    return scale if x.total is None else scale * x.total


# ---------------------------------------------------------------------------------------------------------------------
# Contraction: the sum runs along the rows


def _contraction(asked: Problem, pins: Pins, lhs: Operand, rhs: Operand, sizes: Array, first: Array) -> Array:
    """[g, k, n]. Scales of rows go to rhs; of columns, to the result; of both at once, to the operand itself."""
    row = int(asked.transpose_lhs)  # the axis of the sum in lhs
    left, right = (_split(x, axis) for x, axis in ((lhs, row), (rhs, 0)))
    x, y = left[0], right[0]
    mine = owned(asked, sizes, first)
    for rows in (left[1], right[1]):  # [m]; rows of nobody have no scales
        y = y if rows is None else y.astype(accumulator(y.dtype, np.float32)) * jnp.where(mine, rows, 1)[:, None]
    scales = [
        jnp.broadcast_to(s, (asked.local_groups, size))
        for s, size in ((left[2], asked.k), (right[2], asked.n))
        if s is not None
    ]
    ends = Epilogue(by_row=left[2] is not None, by_column=right[2] is not None)
    inner = asked.replace(lhs=np.dtype(x.dtype), rhs=np.dtype(y.dtype), epilogue=ends)
    return run(inner.replace(out=accumulator(inner.acc, np.float32)), pins, x, y, sizes, first, *scales)


def _split(x: Operand, axis: int) -> tuple[Array, Array | None, Array | None]:
    """The values of an operand, the scales of its rows, which lie along an axis, and of its columns."""
    if not isinstance(x, Scaled):
        return x, None, None
    by_row, by_column = _parts(x, axis) > 1, _parts(x, 1 - axis) > 1
    if by_row and by_column:
        return x.dequantize(), None, None
    scales = jnp.broadcast_to(x.scales(), x.shape)
    along = lax.index_in_dim(scales, 0, 1 - axis if by_row else axis, keepdims=False)
    return (_values(x), along, None) if by_row else (_values(x), None, along)


# ---------------------------------------------------------------------------------------------------------------------
# Either


def _parts(x: Operand, axis: int) -> int:
    """How many scales there are along an axis."""
    return x.scale.shape[axis] if isinstance(x, Scaled) else 1


def _values(x: Operand) -> Array:
    if not isinstance(x, Scaled):
        return x
    return jnp.asarray(x.values).astype(WHOLE.get(x.values.dtype.name, x.values.dtype))


def operand(name: str, x: Any) -> Operand:
    """An argument as an array, or a `Scaled` that holds together: its own, or one of a `qwix.QArray`."""
    if is_qarray(x):
        x = from_qarray(name, x)
    if not isinstance(x, Scaled):
        return what.as_array(name, x)
    shape, scale = jnp.shape(x.values), jnp.shape(x.scale)
    if len(x.block) != len(shape) or (0 in x.block and 0 not in shape):
        raise ValueError(f"{name}: want blocks of a length along each axis of {shape}; got {x.block}")
    if x.total is not None and jnp.shape(x.total) != ():
        raise ValueError(f"{name}: want one total; got an array of shape {jnp.shape(x.total)}")
    want = tuple(-(-size // max(length, 1)) for size, length in zip(shape, x.block, strict=True))
    if 0 in shape:  # no entries: any scales will do, and these broadcast
        return dataclasses.replace(x, scale=jnp.ones([max(count, 1) for count in want], x.scale.dtype))
    if scale != want:
        raise ValueError(f"{name}: want a scale for each block of {x.block}, shape {want}; got {scale}")
    return x
