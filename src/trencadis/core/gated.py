"""Gated activations: a primitive for the products of a gated layer with its activation, and for their pullback.

    forward     h = activation(lhs @ w_gate + b_gate, lhs @ w_up + b_up)
    pullback    d h = lhs @ rhs, then d gate, d up, weight * h and d weight, from gate, up and the weight of each row
    sum         d gate @ w_gate + d up @ w_up
    weights     the gradients of the weights, contractions: lhsᵀ @ rhs, or lhsᵀ @ d gate and lhsᵀ @ d up

Rows may be gathered by token, from lhs or, in a contraction, from rhs. A kernel that cannot do so gets them gathered
before. A backend may compute either in one kernel. Otherwise, and wherever they are differentiated or batched, they are
composed of plain products and elementwise operations. Unowned rows of every result are 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Effect, Primitive
from jax.sharding import AbstractMesh
from jaxtyping import Array

from trencadis.backends import BACKENDS, INTERPRETED
from trencadis.core import autodiff, sharded
from trencadis.core.dtypes import accumulator
from trencadis.core.epilogue import Epilogue, Gate
from trencadis.core.jax_compat import Value, interpreter_effects, result_type, vary_alike
from trencadis.core.linear import jvp_of_varied
from trencadis.core.mesh import explicit_mesh, mapped, mapped_alike, partly_explicit, replicated, resharded_like
from trencadis.core.partition import Partition, dimensions
from trencadis.core.plan import gated_plan
from trencadis.core.primitive import Rules, register
from trencadis.core.problem import Form, Problem
from trencadis.core.spans import owned
from trencadis.core.target import Target
from trencadis.core.tiling import Overrides

V = TypeVar("V", bound=Value)
Multiply: TypeAlias = Callable[..., Array]  # problem, overrides, operands -> the result of a plain product

gated_p = Primitive("gated_matmul")
gated_p.multiple_results = True


def run(problem: Problem, overrides: Overrides, *operands: Value) -> list[Array]:
    """The results of a problem with a gated activation: operands are those of a plain one, then those of the gate."""
    mesh = explicit_mesh(*operands)
    if mesh is None:
        return _bind(problem, overrides, *operands)
    if problem.form is Form.CONTRACTION or partly_explicit(mesh):
        return composed(problem, overrides, sharded.run, *operands)
    problem, operands = problem.of_rows, _with_rows(problem, *operands)
    plain = problem.replace(gate=None)
    part = sharded.partition_of(plain, mesh, operands[: len(dimensions(plain))])
    if part.k or part.gathered or any(part.scattered):  # results of the products are exchanged before the activation
        return composed(problem, overrides, sharded.run, *operands)
    return _on_mesh(*operands, problem=problem, part=part, overrides=overrides, mesh=mesh)


def _bind(problem: Problem, overrides: Overrides, *operands: Value) -> list[Array]:
    return gated_p.bind(*vary_alike(*map(replicated, operands)), problem=problem, overrides=overrides)


@functools.partial(jax.jit, static_argnames=("problem", "part", "overrides", "mesh"))
def _on_mesh(
    *operands: Value, problem: Problem, part: Partition, overrides: Overrides, mesh: AbstractMesh
) -> list[Array]:
    """The results on all devices of a mesh, each of which has some groups, rows or columns."""
    assert problem.gate is not None
    biased, (lhs, rhs, *_) = problem.epilogue.bias is not None, dimensions(part.problem)
    rest = ["mn", "mn", "m"] if problem.gate.pullback else [rhs, *["gn"] * biased]
    rest = [lhs, rhs] if problem.gate.activation is None else rest
    results = ["m" if len(shape) == 1 else "mn" for shape, _ in problem.results]

    def compute(*operands: Array) -> list[Array]:
        found = _bind(part.local.replace(gate=problem.gate), overrides, *part.windowed(*operands))
        sums = [part.g + part.n if names == "m" else part.g for names in results]
        return [lax.psum(x, axes) if axes else x for x, axes in zip(found, sums, strict=True)]

    specs = [*part.operands, *map(part.divided, rest)]
    return mapped(compute, mesh, specs, list(map(part.divided, results)), dict(part.devices))(*operands)


def composed(problem: Problem, overrides: Overrides, multiply: Multiply, *operands: Value) -> list[Array]:
    """The same results from plain products and elementwise operations."""
    assert problem.gate is not None
    lhs, rhs, sizes, first, *rest = operands = _with_rows(problem, *operands)
    plain = problem.replace(gate=None)
    if problem.form is Form.CONTRACTION:
        return [multiply(plain, overrides, lhs, each, sizes, first) for each in (rhs, *rest)]
    if problem.gate.activation is None:
        total, (lhs, rhs) = multiply(plain, overrides, lhs, rhs, sizes, first), rest
        more = plain.replace(epilogue=Epilogue(accumulate=True))
        return [multiply(more, overrides, lhs, rhs, sizes, first, total)]
    mine = owned(problem, sizes, first)[:, None]
    if problem.gate.pullback:
        d_h = multiply(plain, overrides, lhs, rhs, sizes, first)
        return _pulled_back(problem, problem.gate, d_h, mine, *rest)
    biased = problem.epilogue.bias is not None
    bias_gate, up, bias_up = rest if biased else (None, rest[0], None)
    biases = ((bias_gate,), (bias_up,)) if biased else ((), ())
    z = [multiply(plain, overrides, lhs, w, sizes, first, *bias) for w, bias in zip((rhs, up), biases, strict=True)]
    h = jnp.where(mine, _activated(problem.gate, *z), 0).astype(problem.out)
    return [h, *z] if problem.gate.keep else [h]


def _with_rows(problem: Problem, *operands: V) -> tuple[V | Array, ...]:
    """The operands of `problem.of_rows`: rows are gathered, if the problem asks for it."""
    if problem.gather is None:
        return operands
    *given, token, inverse = operands
    found: list[V | Array] = [*given]
    at = ("lhs", "rhs").index(problem.gather.operand)
    found[at] = problem.gather.rows(*map(jnp.asarray, (given[at], token, inverse)))
    return tuple(found)


def _activated(gate: Gate, *z: Array) -> Array:
    """The activation of two matrices of sums, in the dtype of sums."""
    assert gate.activation is not None
    wide = (resharded_like(each.astype(accumulator(each.dtype, each.dtype)), z[0]) for each in z)
    return jax.vmap(jax.vmap(gate.activation))(*wide)


def _pulled_back(
    problem: Problem, gate: Gate, d_h: Array, mine: Array, z_gate: Value, z_up: Value, weight: Value
) -> list[Array]:
    """The results of the pullback from its finished product d_h [m, n]."""
    h, pullback = jax.vjp(functools.partial(_activated, gate), z_gate, z_up)
    d_h, weight = resharded_like(d_h.astype(h.dtype), h), weight.astype(h.dtype)[:, None]
    d_weight = jnp.sum(jnp.where(mine, d_h * h, 0), axis=1).astype(problem.acc)
    found = (*pullback(weight * d_h), weight * h)
    return [*(jnp.where(mine, each, 0).astype(problem.out) for each in found), d_weight]


# ---------------------------------------------------------------------------------------------------------------------
# The rules of the primitive


def _abstract(*operands: ShapedArray, problem: Problem, overrides: Overrides) -> tuple[list[ShapedArray], set[Effect]]:
    interpreted = overrides.interpret and overrides.backend in INTERPRETED
    found = [result_type(operands, shape, dtype) for shape, dtype in problem.results]
    return found, interpreter_effects() if interpreted else set()


def _jvp(
    primals: Sequence[Value], tangents: Sequence[Any], *, problem: Problem, overrides: Overrides
) -> tuple[list[Array], list[Any]]:
    """Values and tangents of the composition, with respect to the operands that have tangents."""
    return jvp_of_varied(functools.partial(composed, problem, overrides, autodiff.run), primals, tangents)


def _batch(
    operands: Sequence[Value], axes: Sequence[int | None], *, problem: Problem, overrides: Overrides
) -> tuple[list[Array], list[int]]:
    function = functools.partial(composed, problem, overrides, autodiff.run)
    out = jax.vmap(function, in_axes=tuple(axes))(*mapped_alike(operands, axes))
    return out, [0] * len(out)


def _execute(*operands: Array, problem: Problem, overrides: Overrides, target: Target) -> list[Array]:
    if target.partitioned:  # XLA divides the products by themselves
        return composed(problem, overrides, autodiff.run, *operands)
    chosen = gated_plan(problem, target, overrides)
    if chosen is not None:
        operands = operands if chosen.problem.gather is not None else _with_rows(problem, *operands)
        with jax.named_scope(f"gated_{chosen.backend}"):
            return list(BACKENDS[chosen.backend].run(chosen, *operands))

    def multiply(problem: Problem, overrides: Overrides, *operands: Array) -> Array:
        return autodiff.executed(*operands, problem=problem, overrides=overrides, target=target)

    return composed(problem, overrides, multiply, *operands)


@functools.partial(jax.jit, static_argnames=("problem", "overrides"))
def _eager(*operands: Value, problem: Problem, overrides: Overrides) -> list[Array]:
    return gated_p.bind(*operands, problem=problem, overrides=overrides)


register(gated_p, Rules(_eager, _abstract, _jvp, None, _batch, _execute))
