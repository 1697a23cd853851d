"""The primitive of the general grouped GEMM: its JVP, transpose and batching rules, and its lowering.

Operands are lhs, rhs and the six arrays i32[g] of `Groups`: where each group starts in lhs, rhs and out, and its m, k
and n; and the array that the product is added to, if there is one. The gradients exchange m, k and n, so that they are
products of the same kind. There may be unowned entries between groups, so that a batch of products is one product with
more groups.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad

from trencadis.core.jax_compat import Rules, interpreter_effects, register, replicated, result_type, vary_alike
from trencadis.core.target import Target
from trencadis.core.tiling import Overrides
from trencadis.gemm import plan as planning
from trencadis.gemm.problem import Buffer, GemmProblem, Groups, Shape

Array = jax.Array

gemm_p = Primitive("grouped_gemm")


def run(problem: GemmProblem, overrides: Overrides, lhs: Any, rhs: Any, groups: Groups, *existing: Any) -> Array:
    """The product of lhs and rhs, group by group, as an array of the shape and dtype of `problem.out`.

    `existing` is the array that it is added to, if `problem.accumulate`.
    """
    operands = vary_alike(*map(replicated, (lhs, rhs, *groups, *existing)))
    return gemm_p.bind(*operands, problem=problem, overrides=overrides)


def _split(operands: Any) -> tuple[Any, Any, Groups, tuple[Any, ...]]:
    """lhs, rhs, groups, and the existing array or none."""
    lhs, rhs, *rest = operands
    return lhs, rhs, Groups(*rest[:6]), tuple(rest[6:])


def _jvp(primals: Any, tangents: Any, *, problem: GemmProblem, overrides: Overrides) -> tuple[Array, Any]:
    lhs, rhs, groups, existing = _split(primals)
    d_lhs, d_rhs, _, d_existing = _split(tangents)
    out, plain = run(problem, overrides, lhs, rhs, groups, *existing), problem.replace(accumulate=False)
    terms = []
    if jnp.issubdtype(problem.out.dtype, jnp.inexact):
        if type(d_lhs) is not ad.Zero:
            terms.append(run(plain, overrides, d_lhs, rhs, groups))
        if type(d_rhs) is not ad.Zero:
            terms.append(run(plain, overrides, lhs, d_rhs, groups))
        terms += [each for each in d_existing if type(each) is not ad.Zero]
    return out, functools.reduce(ad.add_jaxvals, terms) if terms else ad.Zero(jax.typeof(out).to_tangent_aval())


def _transpose(ct: Any, *operands: Any, problem: GemmProblem, overrides: Overrides) -> Any:
    lhs, rhs, groups, existing = _split(operands)
    constants = [None] * len(groups)
    if type(ct) is ad.Zero:
        zeros = [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in (lhs, rhs, *existing)]
        return [*zeros[:2], *constants, *zeros[2:]]
    d_lhs = d_rhs = None
    if ad.is_undefined_primal(lhs):
        d_lhs = run(problem.d_lhs(), overrides, ct, rhs, groups.d_lhs())
    elif ad.is_undefined_primal(rhs):
        d_rhs = run(problem.d_rhs(), overrides, lhs, ct, groups.d_rhs())
    return [d_lhs, d_rhs, *constants, *(ct if ad.is_undefined_primal(x) else None for x in existing)]


def _batch(args: Any, dims: Any, *, problem: GemmProblem, overrides: Overrides) -> tuple[Array, int]:
    """A batch is a problem of as many times the groups: those of one entry follow those of the entry before."""
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    args = [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(replicated(x), d, 0)
        for x, d in zip(args, dims, strict=True)
    ]
    (lhs, rhs, groups, existing), many = _split(args), problem.repeated(size)
    entry = np.arange(size, dtype=np.int32)[:, None]
    starts = [
        (start + entry * np.int32(buffer.shape[buffer.group_axis])).reshape(-1)
        for start, buffer in zip(groups[:3], (problem.lhs, problem.rhs, problem.out), strict=True)
    ]

    def merged(x: Array, buffer: Buffer, shape: Shape) -> Array:
        return jnp.moveaxis(x, 0, buffer.group_axis).reshape(shape)

    lhs, rhs = merged(lhs, problem.lhs, many.lhs.shape), merged(rhs, problem.rhs, many.rhs.shape)
    added = (merged(x, problem.out, many.out.shape) for x in existing)
    out = run(many, overrides, lhs, rhs, Groups(*starts, *(x.reshape(-1) for x in groups[3:])), *added)
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
    with jax.disable_jit(False):  # there is nothing below the primitive to run without jit
        return _eager(*operands, problem=problem.replace(known=None), overrides=overrides)


register(gemm_p, Rules(_impl, _abstract, _jvp, _transpose, _batch, _execute))
