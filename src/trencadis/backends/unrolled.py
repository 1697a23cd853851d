"""A grouped GEMM whose groups are known when the program is made: one product for each, of just its size."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from trencadis.dtypes import cast
from trencadis.gemm import Dim, Gemm, Kind, Store, along, kind

Array = jax.Array
Ints = tuple[int, ...]


def run(gemm: Gemm, lhs: Array, rhs: Array) -> Array:
    """The result: what groups have, one after the other, and zeros between."""
    (a, b, c), contract = gemm.pairs, (((int(not gemm.lhs.turned),), (int(gemm.rhs.turned),)), ((), ()))
    axis = along(gemm.out, c)
    parts, done = [], 0

    def skip(until: int) -> None:
        if until > done:
            shape = tuple(until - done if i == axis else size for i, size in enumerate(gemm.out.shape))
            parts.append(jnp.zeros(shape, gemm.out.dtype))

    for at_a, at_b, at_c, m, k, n in zip(*gemm.known, strict=True):
        if 0 in (m, k, n):
            continue
        x, y = _group(gemm.lhs, a, lhs, at_a, (m, k)), _group(gemm.rhs, b, rhs, at_b, (k, n))
        if x.dtype != y.dtype:
            x, y = x.astype(gemm.acc), y.astype(gemm.acc)
        acc = lax.dot_general(x, y, contract, precision=gemm.precision, preferred_element_type=gemm.acc)
        start, limit = _place(gemm.out, c, at_c, (m, n))
        skip(start[axis])
        shape = [end - at for at, end in zip(start, limit, strict=True)]
        parts.append(cast(acc.T if gemm.out.turned else acc, gemm.out.dtype).reshape(shape))
        done = limit[axis]
    skip(gemm.out.shape[axis])
    return lax.concatenate(parts, axis)


def _group(store: Store, dims: tuple[Dim, Dim], x: Array, base: int, sizes: tuple[int, int]) -> Array:
    """The matrix of a group, as it is stored."""
    return lax.slice(x, *_place(store, dims, base, sizes)).reshape(sizes[::-1] if store.turned else sizes)


def _place(store: Store, dims: tuple[Dim, Dim], base: int, sizes: tuple[int, int]) -> tuple[Ints, Ints]:
    """Where a group starts in memory, and where it ends."""
    rows, columns = sizes[::-1] if store.turned else sizes
    match kind(*dims):
        case Kind.FLAT:
            return (base,), (base + rows * columns,)
        case Kind.STACK:
            return (base, 0, 0), (base + 1, rows, columns)
        case Kind.ROWS:
            start = (0, base) if along(store, dims) else (base, 0)
            return start, (start[0] + rows, start[1] + columns)
