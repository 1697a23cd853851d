"""The primitive of the general grouped GEMM: its JVP, transpose and batching rules, and its lowering.

Operands are lhs, rhs and the six arrays i32[g] of `Groups`: where each group starts in lhs, rhs and out, and its m, k
and n. The gradients exchange m, k and n, so that they are products of the same kind. Groups may start anywhere, so that
a batch of products is one product with more groups.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad

from trencadis.backends import KERNELS
from trencadis.core.jax_compat import Rules, register, replicated, result_type, vary_alike
from trencadis.core.plan import warn_slow
from trencadis.core.target import Target
from trencadis.gemm import xla
from trencadis.gemm.problem import GemmProblem, Groups

Array = jax.Array

gemm_p = Primitive("grouped_gemm")


def run(problem: GemmProblem, lhs: Any, rhs: Any, groups: Groups) -> Array:
    """The product of lhs and rhs, group by group, as an array of the shape and dtype of `problem.out`."""
    return gemm_p.bind(*vary_alike(*map(replicated, (lhs, rhs, *groups))), problem=problem)


def _jvp(primals: Any, tangents: Any, *, problem: GemmProblem) -> tuple[Array, Any]:
    lhs, rhs, *groups = primals
    d_lhs, d_rhs, *_ = tangents
    out = run(problem, lhs, rhs, Groups(*groups))
    terms = []
    if jnp.issubdtype(problem.out.dtype, jnp.inexact):
        if type(d_lhs) is not ad.Zero:
            terms.append(run(problem, d_lhs, rhs, Groups(*groups)))
        if type(d_rhs) is not ad.Zero:
            terms.append(run(problem, lhs, d_rhs, Groups(*groups)))
    return out, functools.reduce(ad.add_jaxvals, terms) if terms else ad.Zero(jax.typeof(out).to_tangent_aval())


def _transpose(ct: Any, lhs: Any, rhs: Any, *groups: Any, problem: GemmProblem) -> Any:
    constants = [None] * len(groups)
    if type(ct) is ad.Zero:
        return [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in (lhs, rhs)] + constants
    if ad.is_undefined_primal(lhs):
        return [run(problem.d_lhs(), ct, rhs, Groups(*groups).d_lhs()), None, *constants]
    return [None, run(problem.d_rhs(), lhs, ct, Groups(*groups).d_rhs()), *constants]


def _batch(args: Any, dims: Any, *, problem: GemmProblem) -> tuple[Array, int]:
    """A batch is a problem of as many times the groups: those of one entry follow those of the entry before."""
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    args = [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(replicated(x), d, 0)
        for x, d in zip(args, dims, strict=True)
    ]
    (lhs, rhs), groups, many = args[:2], Groups(*args[2:]), problem.repeated(size)
    entry = np.arange(size, dtype=np.int32)[:, None]
    starts = [
        (start + entry * np.int32(buffer.shape[buffer.group_axis])).reshape(-1)
        for start, buffer in zip(groups[:3], (problem.lhs, problem.rhs, problem.out), strict=True)
    ]
    lhs = jnp.moveaxis(lhs, 0, problem.lhs.group_axis).reshape(many.lhs.shape)
    rhs = jnp.moveaxis(rhs, 0, problem.rhs.group_axis).reshape(many.rhs.shape)
    out = run(many, lhs, rhs, Groups(*starts, *(x.reshape(-1) for x in groups[3:])))
    shape, axis = problem.out.shape, problem.out.group_axis
    return out.reshape(*shape[:axis], size, *shape[axis:]), axis


def _abstract(*operands: Any, problem: GemmProblem) -> Any:
    return result_type(operands, problem.out.shape, problem.out.dtype), set()


def _execute(*operands: Any, problem: GemmProblem, target: Target) -> Array:
    chosen = xla.plan(problem, target)
    if target.platform in KERNELS and not chosen.layout.unrolled and not problem.empty:
        *some, last = (name for name in "mkn" if getattr(problem, name).ragged)
        ragged = f"{', '.join(some)} and {last}"
        warn_slow(f"a grouped GEMM runs as XLA loops: {ragged} are ragged, and kernels take one ragged dimension")
    with jax.named_scope("gemm_xla"):
        return xla.run(chosen, *operands)


@functools.partial(jax.jit, static_argnames=("problem",))
def _eager(*operands: Any, problem: GemmProblem) -> Array:
    return gemm_p.bind(*operands, problem=problem)


def _impl(*operands: Any, problem: GemmProblem) -> Array:
    """A call outside of `jit`: sizes are operands even if they are known, so that one program serves all values."""
    with jax.disable_jit(False):  # there is nothing below the primitive to run without jit
        return _eager(*operands, problem=problem.replace(known=None))


register(gemm_p, Rules(_impl, _abstract, _jvp, _transpose, _batch, _execute))
