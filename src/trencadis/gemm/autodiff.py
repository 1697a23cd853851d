"""The calculus of a general grouped GEMM: its adjoints exchange m, k and n, and are such GEMMs again.

Operands are lhs, rhs, where each group lies in lhs, in rhs and in the result, and its sizes m, k and n: all i32[g].
Groups may lie anywhere, so that a batch of GEMMs is one with more groups.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from trencadis.core.jax_compat import lower_plainly, replicated, result_type, vary_alike
from trencadis.gemm import unrolled
from trencadis.gemm import xla as tiles
from trencadis.gemm.problem import D_LHS, D_RHS, Dim, Gemm, Store, along, exchanged

Array = jax.Array

gemm_p = Primitive("grouped_gemm")


def run(gemm: Gemm, *operands: Any) -> Array:
    """The result of a GEMM."""
    return gemm_p.bind(*vary_alike(*map(replicated, operands)), gemm=gemm)


def _jvp(primals: Any, tangents: Any, *, gemm: Gemm) -> tuple[Array, Any]:
    lhs, rhs, *places = primals
    d_lhs, d_rhs, *_ = tangents
    out = run(gemm, *primals)
    if not jnp.issubdtype(gemm.out.dtype, jnp.inexact):
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    terms = []
    if type(d_lhs) is not ad.Zero:
        terms.append(run(gemm, d_lhs, rhs, *places))
    if type(d_rhs) is not ad.Zero:
        terms.append(run(gemm, lhs, d_rhs, *places))
    return out, functools.reduce(ad.add_jaxvals, terms) if terms else ad.Zero(jax.typeof(out).to_tangent_aval())


def _transpose(ct: Any, lhs: Any, rhs: Any, *places: Any, gemm: Gemm) -> Any:
    rest = [None] * 6
    if type(ct) is ad.Zero:
        return [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in (lhs, rhs)] + rest
    if ad.is_undefined_primal(lhs):
        return [run(gemm.d_lhs(), ct, rhs, *exchanged(D_LHS, places)), None, *rest]
    return [None, run(gemm.d_rhs(), lhs, ct, *exchanged(D_RHS, places)), *rest]


def _batch(args: Any, dims: Any, *, gemm: Gemm) -> tuple[Array, int]:
    """As many times the groups: each entry's lie behind those of the entry before."""
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    args = [
        jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(replicated(x), d, 0)
        for x, d in zip(args, dims, strict=True)
    ]
    lhs, rhs, a, b, c, *sizes = args
    pairs = gemm.pairs
    stores = [_repeated(store, pair, size) for store, pair in zip((gemm.lhs, gemm.rhs, gemm.out), pairs, strict=True)]
    entry = np.arange(size, dtype=np.int32)[:, None]
    places = [
        (place + entry * np.int32(store.shape[along(store, pair)])).reshape(-1)
        for place, store, pair in zip((a, b, c), (gemm.lhs, gemm.rhs, gemm.out), pairs, strict=True)
    ]
    m, k, n = (Dim(size=dim.size * size, ragged=True) if dim.ragged else dim for dim in (gemm.m, gemm.k, gemm.n))
    many = gemm.replace(groups=gemm.groups * size, m=m, k=k, n=n, lhs=stores[0], rhs=stores[1], out=stores[2], known=())
    laid = [
        jnp.moveaxis(x, 0, along(store, pair)).reshape(wide.shape)
        for x, store, wide, pair in zip((lhs, rhs), (gemm.lhs, gemm.rhs), stores, pairs, strict=False)
    ]
    out = run(many, *laid, *places, *(x.reshape(-1) for x in sizes))
    at = along(gemm.out, pairs[2])
    return out.reshape(*gemm.out.shape[:at], size, *gemm.out.shape[at:]), at


def _repeated(store: Store, pair: tuple[Dim, Dim], times: int) -> Store:
    shape, axis = list(store.shape), along(store, pair)
    shape[axis] *= times
    return dataclasses.replace(store, shape=tuple(shape))


def _abstract(*operands: Any, gemm: Gemm) -> Any:
    return result_type(operands, gemm.out.shape, gemm.out.dtype)


def _execute(*operands: Any, gemm: Gemm) -> Array:
    lhs, rhs, a, b, c, m, k, n = operands
    if gemm.known:
        return unrolled.run(gemm, lhs, rhs)
    return tiles.run(gemm, lhs, rhs, (a, b, c), (m, k, n))


def _lower(context: Any, *operands: Any, **params: Any) -> Any:
    return lower_plainly(_execute, context, *operands, **params)


@functools.partial(jax.jit, static_argnames=("gemm",))
def _eager(*operands: Any, gemm: Gemm) -> Array:
    return gemm_p.bind(*operands, gemm=gemm)


def _impl(*operands: Any, gemm: Gemm) -> Array:
    with jax.disable_jit(False):
        return _eager(*operands, gemm=gemm)


gemm_p.def_impl(_impl)
gemm_p.def_abstract_eval(_abstract)
ad.primitive_jvps[gemm_p] = _jvp
ad.primitive_transposes[gemm_p] = _transpose
batching.primitive_batchers[gemm_p] = _batch
mlir.register_lowering(gemm_p, _lower)
