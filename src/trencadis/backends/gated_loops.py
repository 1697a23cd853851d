"""Products with a gated activation on CPUs, as loops over row tiles: what lies between products stays in a tile."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from trencadis.backends.loops import Layout, Tile, each_tile, inside, multiply, row_or_none, while_below
from trencadis.backends.prepare import from_bits, to_bits
from trencadis.core.activation import Activation, elementwise
from trencadis.core.epilogue import Extras
from trencadis.core.problem import Problem
from trencadis.core.spans import Bounds

Array = jax.Array

_0 = np.int32(0)


def gated_rows(
    problem: Problem, layout: Layout, bounds: Bounds, operands: Sequence[Array], token: Array | None, outs: list[Array]
) -> list[Array]:
    """The results of a rows problem with a gated activation, into arrays of zeros; `token`: rows of lhs to gather."""
    gate = problem.gate
    assert gate is not None
    form = _pullback if gate.pullback else _sum if gate.activation is None else _forward
    return form(problem, layout, bounds, operands, token, outs)


def _forward(
    problem: Problem, layout: Layout, bounds: Bounds, operands: Sequence[Array], token: Array | None, outs: list[Array]
) -> list[Array]:
    """The activation of gate and up, and if they are kept both."""
    lhs, gate, *rest = operands
    bias_gate, up, bias_up = rest if problem.epilogue.bias is not None else (None, rest[0], None)

    def compute(tile: Tile, sources: Sequence[Array], weights: Sequence[Array], outs: list[Array]) -> list[Array]:
        x = tile.of(sources[0], token)
        z = [multiply(problem, layout, x, weight) for weight in weights]
        vectors = [Extras(bias=row_or_none(bias, tile.group)) for bias in (bias_gate, bias_up)]
        z = [problem.epilogue.finish(each, vector, problem.acc) for each, vector in zip(z, vectors, strict=True)]
        found = (elementwise(activation_of(problem))(*z), *z)
        return [tile.stored(out, each, problem.out) for out, each in zip(outs, found, strict=False)]

    return each_tile(problem, layout, bounds, compute, [lhs], [gate, up], outs)


def _pullback(
    problem: Problem, layout: Layout, bounds: Bounds, operands: Sequence[Array], token: Array | None, outs: list[Array]
) -> list[Array]:
    """The gradients of gate and up, stored over them, the weighted activation, and the gradient of the weights."""
    lhs, rhs, z_gate, z_up, weight = operands

    def compute(tile: Tile, sources: Sequence[Array], weights: Sequence[Array], outs: list[Array]) -> list[Array]:
        d_h = multiply(problem, layout, tile.of(sources[0], token), weights[0])
        z = [from_bits(tile.of(out), problem.out).astype(problem.acc) for out in outs[:2]]
        scale = tile.of(weight).astype(problem.acc)[:, None]
        # in a loop of one iteration; without it XLA would read gate while it stores up, and copy both arrays before
        once, state = (tile.row >= 0).astype(jnp.int32), (*z, d_h, jnp.zeros(tile.height, problem.acc))
        new = lax.fori_loop(_0, once, functools.partial(pulled_back, problem, scale), state)
        kinds = (problem.out,) * 3 + (problem.acc,)
        return [tile.stored(out, *each) for out, *each in zip(outs, new, kinds, strict=True)]

    assert problem.batch == 1  # so that the rows of the groups are adjacent
    cleared = [_cleared(to_bits(each), bounds.first, bounds.ends[-1]) for each in (z_gate, z_up)]
    return each_tile(problem, layout, bounds, compute, [lhs], [rhs], [*cleared, *outs[2:]])


def _sum(
    problem: Problem, layout: Layout, bounds: Bounds, operands: Sequence[Array], token: Array | None, outs: list[Array]
) -> list[Array]:
    """The sum of two products."""
    lhs, rhs, lhs_up, rhs_up = operands

    def compute(tile: Tile, sources: Sequence[Array], weights: Sequence[Array], outs: list[Array]) -> list[Array]:
        gate, up = (multiply(problem, layout, tile.of(x), w) for x, w in zip(sources, weights, strict=True))
        return [tile.stored(outs[0], gate + up, problem.out)]

    return each_tile(problem, layout, bounds, compute, [lhs, lhs_up], [rhs, rhs_up], outs)


def pulled_back(problem: Problem, scale: Array, _: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
    """The gradients of gate and up, the weighted activation, and the gradient of the weights of some rows.

    It is the body of a loop: of the state gate, up and the gradient of the activation, the fourth is not read.
    """
    z_gate, z_up, d_h, _ = state
    h, pullback = jax.vjp(elementwise(activation_of(problem)), z_gate, z_up)
    return (*pullback(scale * d_h), scale * h, jnp.sum(d_h * h, axis=1))


def activation_of(problem: Problem) -> Activation:
    """The activation of a gated problem that has one."""
    assert problem.gate is not None and problem.gate.activation is not None
    return problem.gate.activation


def _cleared(x: Array, low: Array, high: Array) -> Array:
    """The array with 0 in its rows outside of [low, high), in place: other rows are not touched."""
    m = x.shape[0]
    height = min(256, m)

    def clear(start: Array, end: Array, x: Array) -> Array:
        def step(state: tuple[Array, Array]) -> tuple[Array, Array]:
            top, x = state
            tile = Tile(top, top, height, inside(m, height, top, end))
            return top + height, tile.stored(x, jnp.zeros((height, *x.shape[1:]), x.dtype), x.dtype)

        return while_below(end, step, (start, x))[1]

    return clear(high, jnp.int32(m), clear(jnp.int32(0), low, x))
