"""A grouped GEMM whose groups are known when the program is made: one product for each, of just its size.

On CPU each is a loop of one turn. XLA would otherwise cut all groups out of their buffers before it multiplies any:
what should stay in the cache would go through new memory, which the system hands out page by page.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from trencadis.backends.prepare import from_bits, to_bits
from trencadis.core.dtypes import cast
from trencadis.gemm.problem import Dim, Gemm, Kind, Store, along, kind

Array = jax.Array
Ints = tuple[int, ...]


def run(gemm: Gemm, lhs: Array, rhs: Array) -> Array:
    """The result."""
    in_turn, at_once = (functools.partial(_run, gemm, loops=loops) for loops in (True, False))
    return lax.platform_dependent(lhs, rhs, cpu=in_turn, default=at_once)


def _run(gemm: Gemm, lhs: Array, rhs: Array, *, loops: bool) -> Array:
    lhs, rhs, out = (to_bits(x) for x in (lhs, rhs, jnp.zeros(gemm.out.shape, gemm.out.dtype)))
    once = lax.optimization_barrier(jnp.int32(1))  # a loop that is known to have one turn is none
    for group in zip(*gemm.known, strict=True):
        if 0 not in group[3:]:
            product = functools.partial(_product, gemm, lhs, rhs, group)
            out = lax.fori_loop(0, once, product, out) if loops else product(np.int32(0), out)
    return from_bits(out, gemm.out.dtype)


def _product(gemm: Gemm, lhs: Array, rhs: Array, group: Ints, turn: Any, out: Array) -> Array:
    """The result with that of a group in it. The turn, which is 0, keeps what a loop does inside of it."""
    at_a, at_b, at_c, m, k, n = group
    (a, b, c), contract = gemm.pairs, (((int(not gemm.lhs.turned),), (int(gemm.rhs.turned),)), ((), ()))
    x = _cut(gemm.lhs, a, lhs, at_a + turn, (m, k))
    y = _cut(gemm.rhs, b, rhs, at_b + turn, (k, n))
    if x.dtype != y.dtype:
        x, y = x.astype(gemm.acc), y.astype(gemm.acc)
    acc = lax.dot_general(x, y, contract, precision=gemm.precision, preferred_element_type=gemm.acc)
    new = to_bits(cast(acc.T if gemm.out.turned else acc, gemm.out.dtype))
    start, shape = _place(gemm.out, c, at_c + turn, (m, n))
    return lax.dynamic_update_slice(out, new.reshape(shape), start)


def _cut(store: Store, dims: tuple[Dim, Dim], x: Array, base: Any, sizes: tuple[int, int]) -> Array:
    """The matrix of a group, as it is stored."""
    found = lax.dynamic_slice(x, *_place(store, dims, base, sizes))
    return from_bits(found.reshape(sizes[::-1] if store.turned else sizes), store.dtype)


def _place(store: Store, dims: tuple[Dim, Dim], base: Any, sizes: tuple[int, int]) -> tuple[tuple[Any, ...], Ints]:
    """Where a group starts in memory, and the shape it has there."""
    rows, columns = sizes[::-1] if store.turned else sizes
    match kind(*dims):
        case Kind.FLAT:
            return (base,), (rows * columns,)
        case Kind.STACK:
            return (base, 0, 0), (1, rows, columns)
        case Kind.ROWS:
            return (0, base) if along(store, dims) else (base, 0), (rows, columns)
