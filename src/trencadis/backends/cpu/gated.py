"""Products with a gated activation: native products, which gather their rows, and the activation in XLA operations.

The activation and its pullback are loops over blocks of rows, so that what several of their results depend on is read
from memory once. All results are in huge pages, where the machine has them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from trencadis.backends.cpu import bridge
from trencadis.backends.gated_loops import activation_of, pulled_back
from trencadis.backends.loops import slice_of, updated
from trencadis.backends.prepare import from_bits, to_bits
from trencadis.core.decision import Plan
from trencadis.core.dtypes import cast
from trencadis.core.epilogue import Extras, elementwise
from trencadis.core.problem import Form, Problem
from trencadis.core.spans import spans

Array = jax.Array

BLOCK = 1 << 18  # numbers of a block of rows

_0 = np.int32(0)


class Rows(NamedTuple):
    """Consecutive rows, of which those before `top` belong to the block before; not all of them need be owned."""

    row: Array  # the first
    height: int
    owned: Array  # bool[height]
    mine: Array | None  # bool[height]; None if there is no block before that has some of them

    def of(self, x: Array) -> Array:
        """These rows of an array."""
        return slice_of(x, (self.row, *[_0] * (x.ndim - 1)), (self.height, *x.shape[1:]))

    def stored(self, out: Array, new: Array, dtype: Any) -> Array:
        """The array, or its bits, with these rows of this dtype; unowned ones are 0."""
        shape = (-1, *[1] * (new.ndim - 1))
        new = to_bits(jnp.where(self.owned.reshape(shape), cast(new, dtype), jnp.zeros((), dtype)))
        new = new if self.mine is None else jnp.where(self.mine.reshape(shape), new, self.of(out))
        return updated(out, new, (self.row, *[_0] * (out.ndim - 1)))


def block_rows(problem: Problem) -> int:
    """The rows of a block: a few hundred thousand numbers, in blocks of about one height."""
    count = max(1, -(-problem.rows * problem.n // BLOCK))
    return max(1, -(-problem.rows // count))


def run(plan: Plan, *operands: Array) -> list[Array]:
    """The results of a plan's problem, which has a gate: operands are those of a plain one, then those of the gate."""
    problem, (lhs, rhs, sizes, first, *rest) = plan.problem, operands
    gate = problem.gate
    assert gate is not None
    token = None if problem.gather is None else rest[-2]
    rest = rest if problem.gather is None else rest[:-2]
    call = functools.partial(bridge.grouped, tile=plan.tiling, token=token)
    if problem.form is Form.CONTRACTION:
        return [call(problem, operands=(lhs, each, sizes, first)) for each in (rhs, *rest)]
    if gate.activation is None:
        total = call(problem, operands=(lhs, rhs, sizes, first))
        return [call(problem, operands=(*rest, sizes, first), extras=Extras(existing=total))]

    def multiply(weights: Array, bias: Array | None, dtype: Any) -> Array:
        given = (lhs, weights, sizes, first)
        return call(problem.replace(out=dtype), operands=given, extras=Extras(bias=bias))

    form = _pullback if gate.pullback else _forward
    return form(problem, multiply, (lhs, rhs, *rest), _owned(problem, sizes, first))


def _forward(
    problem: Problem, multiply: Callable[..., Array], operands: Sequence[Array], owned: tuple[Array, Array]
) -> list[Array]:
    """The activation of gate and up, and if they are kept both."""
    assert problem.gate is not None
    _, gate, *rest = operands
    bias_gate, up, bias_up = rest if problem.epilogue.bias is not None else (None, rest[0], None)

    z = [multiply(w, bias, problem.out) for w, bias in ((gate, bias_gate), (up, bias_up))]

    def compute(rows: Rows, outs: list[Array]) -> list[Array]:
        h = elementwise(activation_of(problem))(*(rows.of(each).astype(problem.acc) for each in z))
        return [rows.stored(outs[0], h, problem.out)]

    outs = [bridge.empty(problem.out_shape, problem.out, *z)]
    return [*_each_block(problem, owned, compute, outs), *(z if problem.gate.keep else ())]


def _pullback(
    problem: Problem, multiply: Callable[..., Array], operands: Sequence[Array], owned: tuple[Array, Array]
) -> list[Array]:
    """The gradients of gate and up, stored over them, the weighted activation, and the gradient of the weights."""
    lhs, rhs, z_gate, z_up, weight = operands

    product = multiply(rhs, None, problem.acc)

    def compute(rows: Rows, outs: list[Array]) -> list[Array]:
        d_h = rows.of(product)
        z = [from_bits(rows.of(out), problem.out).astype(problem.acc) for out in outs[:2]]
        scale = rows.of(weight).astype(problem.acc)[:, None]
        # in a loop of one iteration; without it XLA would read gate while it stores up, and copy both arrays before
        once, state = (rows.row >= 0).astype(jnp.int32), (*z, d_h, jnp.zeros(rows.height, problem.acc))
        new = lax.fori_loop(_0, once, functools.partial(pulled_back, problem, scale), state)
        kinds = (problem.out,) * 3 + (np.dtype(np.float32),)
        return [rows.stored(out, *each) for out, *each in zip(outs, new, kinds, strict=True)]

    empty = [bridge.empty(shape, dtype, lhs, rhs, nth=i) for i, (shape, dtype) in enumerate(problem.results[2:])]
    return _each_block(problem, owned, compute, [z_gate, z_up, *empty])


def _each_block(
    problem: Problem, owned: tuple[Array, Array], compute: Callable[..., list[Array]], outs: list[Array]
) -> list[Array]:
    """The results after `compute(rows, results)` for each block of rows; all rows of them are written."""
    height, dtypes = block_rows(problem), [out.dtype for out in outs]
    if problem.rows == 0:
        return outs
    exact = problem.rows % height == 0

    def block(i: Array, outs: list[Array]) -> list[Array]:
        top = i.astype(jnp.int32) * np.int32(height)
        row = top if exact else jnp.minimum(top, np.int32(problem.rows - height))
        index = row + lax.iota(np.int32, height)
        mine = None if exact else index >= top
        return compute(Rows(row, height, (index >= owned[0]) & (index < owned[1]), mine), outs)

    outs = lax.fori_loop(0, -(-problem.rows // height), block, [to_bits(out) for out in outs])
    return [from_bits(out, dtype) for out, dtype in zip(outs, dtypes, strict=True)]


def _owned(problem: Problem, sizes: Array, first: Array) -> tuple[Array, Array]:
    """The first owned row, and the end of them: local groups are adjacent."""
    starts, ends = spans(problem, sizes, first)
    return starts.min(initial=problem.rows), ends.max(initial=0)
