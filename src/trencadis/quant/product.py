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

from trencadis import problem as what
from trencadis.autodiff import activate, run
from trencadis.epilogue import Activation, Epilogue
from trencadis.problem import Form, Problem
from trencadis.quant.qarray import from_qarray, is_qarray
from trencadis.quant.scaled import Scaled, expanded
from trencadis.tiling import Pins
from trencadis.versions import vary_alike
from trencadis.visits import local_group, owned

Array = jax.Array
Operand = Any  # an array or a Scaled

WHOLE = {"float4_e2m1fn": jnp.float8_e4m3fn}  # nothing multiplies 4 bits of a float; a byte holds them exactly

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
    multiply = _rows if asked.form is Form.ROWS else _contraction
    product = multiply(bare, pins, lhs, rhs, sizes, first)
    if bias is not None:
        mine = owned(asked, sizes, first)[:, None]
        shift = jnp.take(bias.astype(jnp.float32), local_group(asked, sizes, first), axis=0)  # its gradient too
        product = product + jnp.where(mine, shift, 0)
    if activation is not None:
        return activate(asked, activation, product, sizes, first)
    if existing is not None:
        product = product + existing.astype(product.dtype)
    return product.astype(asked.out)


# ---------------------------------------------------------------------------------------------------------------------
# Rows: the sum runs along k


def _rows(asked: Problem, pins: Pins, lhs: Operand, rhs: Operand, sizes: Array, first: Array) -> Array:
    """[m, n]. Scales that change along k split the sum where they change, or go to lhs where that is too often."""
    axes = 1, 2 if asked.transpose_rhs else 1  # k
    mine = owned(asked, sizes, first)[:, None]
    local = local_group(asked, sizes, first)
    if _often(lhs, 1):
        lhs = lhs.dequantize()
    if _often(rhs, axes[1]) and _parts(rhs, 3 - axes[1]) == 1:
        by_group = jnp.squeeze(rhs.scales(), 3 - axes[1])  # [g or 1, k]
        each = by_group if by_group.shape[0] == 1 else jnp.take(by_group, local, axis=0)
        lhs, rhs = (lhs.dequantize() if isinstance(lhs, Scaled) else lhs) * each, _values(rhs)
    lengths = [x.block[axis] for x, axis in zip((lhs, rhs), axes, strict=True) if _parts(x, axis) > 1]
    step = min(math.gcd(*lengths), asked.k) if lengths else asked.k
    count = -(-asked.k // step) if step else 1
    short = count * step - asked.k
    values = [_padded(_values(x), axis, short) for x, axis in zip((lhs, rhs), axes, strict=True)]
    inner = asked.replace(k=step, lhs=np.dtype(values[0].dtype), rhs=np.dtype(values[1].dtype))
    inner = inner.replace(out=inner.acc)
    pins = pins if count == 1 else Pins(backend=pins.backend, interpret=pins.interpret)  # tiles are of all of k

    def part(i: Any) -> Array:
        x, y = (lax.dynamic_slice_in_dim(v, i * step, step, axis) for v, axis in zip(values, axes, strict=True))
        product = run(inner, pins, x, y, sizes, first)
        for operand, axis in zip((lhs, rhs), axes, strict=True):
            if isinstance(operand, Scaled):
                scale = _across(operand, axis, i * step)  # [m or 1, 1], or [g or 1, n or 1]
                by_group = operand is rhs and scale.shape[0] > 1
                product = product * (jnp.take(scale, local, axis=0) if by_group else scale)
        return jnp.where(mine, product, 0)  # what nobody owns is 0, whatever scales say

    if count == 1:
        return part(0)
    total, *_ = vary_alike(jnp.zeros((asked.m, asked.n), jnp.float32), *jax.tree.leaves((lhs, rhs, sizes, first)))
    return lax.scan(lambda sums, i: (sums + part(i), None), total, jnp.arange(count))[0]


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
    for rows in (left[1], right[1]):  # [m]
        y = y if rows is None else y.astype(jnp.float32) * rows[:, None]
    inner = asked.replace(lhs=np.dtype(x.dtype), rhs=np.dtype(y.dtype))
    out = run(inner.replace(out=inner.acc), pins, x, y, sizes, first).astype(jnp.float32)
    out = out if left[2] is None else out * left[2][:, None]
    return out if right[2] is None else out * right[2]


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


def _padded(x: Array, axis: int, short: int) -> Array:
    return jnp.pad(x, [(0, short if i == axis else 0) for i in range(x.ndim)]) if short else x


def operand(name: str, x: Any) -> Operand:
    """An argument as an array, or a `Scaled` that holds together: its own, or one of a `qwix.QArray`."""
    if is_qarray(x):
        x = from_qarray(name, x)
    if not isinstance(x, Scaled):
        return what.as_array(name, x)
    shape, scale = jnp.shape(x.values), jnp.shape(x.scale)
    want = tuple(-(-size // max(length, 1)) for size, length in zip(shape, x.block, strict=False))
    if 0 in shape and len(x.block) == len(shape):  # no entries: any scales will do, and these broadcast
        return dataclasses.replace(x, scale=jnp.ones([max(count, 1) for count in want], x.scale.dtype))
    if len(x.block) != len(shape) or scale != want:
        raise ValueError(f"{name}: want a scale for each block of {x.block}, shape {want}; got {scale}")
    return x
