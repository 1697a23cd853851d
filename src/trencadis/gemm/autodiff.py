"""The primitive of the general grouped GEMM: its JVP, transpose and batching rules, and its lowering.

Operands are lhs, rhs and the six arrays i32[g] of `Groups`: where each group starts in lhs, rhs and out, and its m, k
and n; and those arrays of `Extras` that there are. The gradients exchange m, k and n, so that they are products of the
same kind, with the same alpha. There may be unowned entries between groups, so that a batch of products is one product
with more groups.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad

from trencadis.core.jax_compat import interpreter_effects, result_type, vary_alike
from trencadis.core.mesh import replicated
from trencadis.core.primitive import Rules, register
from trencadis.core.target import Target
from trencadis.core.tiling import Overrides
from trencadis.gemm import plan as planning
from trencadis.gemm.by_group import dots, scaled, scaled_or_kept, where_beta
from trencadis.gemm.problem import Buffer, Dim, Extras, GemmProblem, Groups, Shape

Array = jax.Array

gemm_p = Primitive("grouped_gemm")


def run(problem: GemmProblem, overrides: Overrides, lhs: Any, rhs: Any, groups: Groups, *extras: Any) -> Array:
    """The result of lhs and rhs, group by group, as an array of the shape and dtype of `problem.out`.

    `extras` are the arrays of `Extras` that the problem has.
    """
    operands = vary_alike(*map(replicated, (lhs, rhs, *groups, *extras)))
    return gemm_p.bind(*operands, problem=problem, overrides=overrides)


def _split(problem: GemmProblem, operands: Any) -> tuple[Any, Any, Groups, Extras]:
    """lhs, rhs, groups, and the arrays of the epilogue."""
    lhs, rhs, *rest = operands
    return lhs, rhs, Groups(*rest[:6]), problem.extras(rest[6:])


def _jvp(primals: Any, tangents: Any, *, problem: GemmProblem, overrides: Overrides) -> tuple[Array, Any]:
    lhs, rhs, groups, extras = _split(problem, primals)
    out = run(problem, overrides, *primals[:2], groups, *extras.given)
    terms = []
    if jnp.issubdtype(problem.out.dtype, jnp.inexact):
        d_lhs, d_rhs, _, moved = _split(problem, [None if type(x) is ad.Zero else x for x in tangents])
        alpha, product = Extras(alpha=extras.alpha).given, problem.product()
        if d_lhs is not None:
            terms.append(run(product, overrides, d_lhs, rhs, groups, *alpha))
        if d_rhs is not None:
            terms.append(run(product, overrides, lhs, d_rhs, groups, *alpha))
        if moved.alpha is not None:
            terms.append(run(product, overrides, lhs, rhs, groups, moved.alpha))
        terms += _added_terms(problem, overrides, groups, extras, moved)
    return out, functools.reduce(ad.add_jaxvals, terms) if terms else ad.Zero(jax.typeof(out).to_tangent_aval())


def _added_terms(
    problem: GemmProblem, overrides: Overrides, groups: Groups, extras: Extras, moved: Extras
) -> list[Array]:
    """The tangents of what is added to the product, where `extras` move by `moved`."""
    terms = []
    if moved.bias is not None:
        ones = jnp.ones((1, problem.out.shape[0]), problem.out.dtype)
        each, one = np.arange(problem.groups, dtype=np.int32), np.ones(problem.groups, np.int32)
        by_row = groups._replace(lhs=groups.out, rhs=each, k=one)
        terms.append(run(_bias_problem(problem), overrides, ones, moved.bias[:, None], by_row))
    if moved.existing is not None and extras.beta is None:
        terms.append(moved.existing)
    elif moved.existing is not None:
        terms.append(scaled_or_kept(problem, groups, extras.beta, moved.existing).astype(problem.out.dtype))
    if moved.beta is not None:
        old = where_beta(extras.beta, extras.existing.astype(problem.sum), problem, groups)
        terms.append(scaled(problem, groups, moved.beta, old).astype(problem.out.dtype))
    return terms


def _bias_problem(problem: GemmProblem) -> GemmProblem:
    """A bias [g, n] as a product: a column of ones [m, 1], stored in one row, with [g, 1, n]; m is ragged.

    It is a sum really, and has its full precision.
    """
    wide, out, known = problem.sum, problem.out, problem.known
    if known is not None:
        known = known._replace(lhs=known.out, rhs=tuple(range(problem.groups)), k=(1,) * problem.groups)
    ones = Buffer(shape=(1, out.shape[0]), dtype=out.dtype, ragged=(True, False), transposed=True)
    rows = Buffer(shape=(problem.groups, 1, problem.n.size), dtype=wide, ragged=(False, False))
    return problem.product().replace(
        alpha=False, wide=None, k=Dim(size=1), lhs=ones, rhs=rows, precision=jax.lax.Precision.HIGHEST, known=known
    )


def _transpose(ct: Any, *operands: Any, problem: GemmProblem, overrides: Overrides) -> Any:
    lhs, rhs, groups, extras = _split(problem, operands)
    moves = [ad.is_undefined_primal(x) for x in operands]
    if type(ct) is ad.Zero:
        return [ad.Zero(x.aval) if on else None for x, on in zip(operands, moves, strict=True)]
    found: list[Any] = [None] * len(operands)
    alpha = Extras(alpha=extras.alpha).given
    if moves[0]:
        found[0] = run(problem.d_lhs(), overrides, ct, rhs, groups.d_lhs(), *alpha)
    elif moves[1]:
        found[1] = run(problem.d_rhs(), overrides, lhs, ct, groups.d_rhs(), *alpha)
    for i, x in enumerate(operands[8:], 8):
        if moves[i] and x is extras.existing:
            found[i] = ct
        elif moves[i] and x is extras.alpha:
            out = dataclasses.replace(problem.out, dtype=problem.sum)
            plain = problem.product().replace(alpha=False, wide=None, out=out)
            found[i] = dots(problem, groups, ct, run(plain, overrides, lhs, rhs, groups))
    return found


def _batch(args: Any, dims: Any, *, problem: GemmProblem, overrides: Overrides) -> tuple[Array, int]:
    """A batch is a problem of as many times the groups: those of one entry follow those of the entry before."""
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    args = [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(replicated(x), d, 0)
        for x, d in zip(args, dims, strict=True)
    ]
    (lhs, rhs, groups, extras), many = _split(problem, args), problem.repeated(size)
    entry = np.arange(size, dtype=np.int32)[:, None]
    starts = [
        (start + entry * np.int32(buffer.shape[buffer.group_axis])).reshape(-1)
        for start, buffer in zip(groups[:3], (problem.lhs, problem.rhs, problem.out), strict=True)
    ]

    def merged(x: Array, buffer: Buffer, shape: Shape) -> Array:
        return jnp.moveaxis(x, 0, buffer.group_axis).reshape(shape)

    lhs, rhs = merged(lhs, problem.lhs, many.lhs.shape), merged(rhs, problem.rhs, many.rhs.shape)
    numbers = (None if x is None else x.reshape(-1, *x.shape[2:]) for x in extras[1:])
    old = None if extras.existing is None else merged(extras.existing, problem.out, many.out.shape)
    given = Extras(old, *numbers).given
    out = run(many, overrides, lhs, rhs, Groups(*starts, *(x.reshape(-1) for x in groups[3:])), *given)
    shape, axis = problem.out.shape, problem.out.group_axis
    return out.reshape(*shape[:axis], size, *shape[axis:]), axis


def _abstract(*operands: Any, problem: GemmProblem, overrides: Overrides) -> Any:
    effects = interpreter_effects() if overrides.interpret else set()
    return result_type(operands, problem.out.shape, problem.out.dtype), effects


def _execute(*operands: Any, problem: GemmProblem, overrides: Overrides, target: Target) -> Array:
    chosen = planning.plan(problem, target, overrides)
    planning.warn_if_slow(chosen, overrides)
    with jax.named_scope(f"gemm_{chosen.backend}"):
        return planning.run(chosen, *operands)


@functools.partial(jax.jit, static_argnames=("problem", "overrides"))
def _eager(*operands: Any, problem: GemmProblem, overrides: Overrides) -> Array:
    return gemm_p.bind(*operands, problem=problem, overrides=overrides)


def _impl(*operands: Any, problem: GemmProblem, overrides: Overrides) -> Array:
    """A call outside of `jit`: sizes are operands even if they are known, so that one program serves all values."""
    return _eager(*operands, problem=problem.replace(known=None), overrides=overrides)


register(gemm_p, Rules(_impl, _abstract, _jvp, _transpose, _batch, _execute))
