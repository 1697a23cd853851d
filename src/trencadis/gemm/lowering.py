"""Groups that differ in two dimensions, or in all three: tiles of matrices that may lie anywhere."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trencadis.core import problem as what
from trencadis.core.spans import offsets
from trencadis.gemm import autodiff as tiled
from trencadis.gemm.operand import Axes, Side, arranged, dequantized, laid, paired, times
from trencadis.gemm.problem import Dim, Gemm, Kind, Store, kind
from trencadis.gemm.tensor import GroupedTensor, flat_places

Array = jax.Array

FEW = 64  # groups that may have a product of their own each: that takes some 25 ms to compile


def general(a: Side, b: Side, dtype: Any, out: Any, *, precision: Any) -> GroupedTensor:
    """The product of each group."""
    a, b = dequantized(a), dequantized(b)
    left, right = paired(a, b)
    (x, lhs, at_a, m, k_a), (y, rhs, at_b, k_b, n) = (
        _view(a, a.ordered(a.free), left),
        _view(b, right, b.ordered(b.free)),
    )
    groups = a.tensor.num_groups
    k = Dim(size=max(k_a[0].size, k_b[0].size), ragged=k_a[0].ragged)
    sizes = m[1], jnp.minimum(k_a[1], k_b[1]), n[1]
    free = [(side, side.ordered(side.free)) for side in (a, b)]
    result, store, at_c = _room(free, m, n, out, dtype)
    gemm = Gemm(
        groups=groups, m=m[0], k=k, n=n[0], lhs=lhs, rhs=rhs, out=store, precision=what.checked_precision(precision)
    )
    if out is None and kind(m[0], n[0]) is Kind.FLAT and groups <= FEW:
        gemm = gemm.replace(known=_known(a, b, store.shape[0]))
    data = tiled.run(gemm, x, y, at_a, at_b, at_c, *sizes)
    return result(data)


def _view(side: Side, first: Axes, second: Axes) -> Any:
    """An operand as the tiles see it: data, its store, where groups lie, and both dimensions with their sizes."""
    ragged = [side.flat or side.ragged(axes) is not None for axes in (first, second)]
    place, *sizes = _places(side, first, second)
    if side.flat:
        data, turned = side.tensor.data, first == (1,)
        extents = [side.tensor.shape[0]] * 2
    else:
        data, turned = laid(side, first, second)
        extents = [side.extent(axes) for axes in (first, second)]
    dims = [(Dim(size=size, ragged=on), x) for size, on, x in zip(extents, ragged, sizes, strict=True)]
    return data, Store(shape=data.shape, dtype=side.tensor.dtype, turned=turned), place, *dims


def _places(side: Side, first: Axes, second: Axes) -> tuple[Array, Array, Array]:
    """Where groups lie, and their sizes along some axes and along others: i32[g] each."""
    groups = side.tensor.num_groups
    if side.flat:
        columns = jnp.asarray(side.tensor.last_dims)
        place, rows = flat_places(side.tensor.first_dims, columns, side.tensor.shape[0])
        return (place, columns, rows) if first == (1,) else (place, rows, columns)
    place = jnp.arange(groups, dtype=jnp.int32)
    found = []
    for axes in (first, second):
        sizes, total = side.ragged(axes), side.extent(axes)
        if sizes is None:
            found.append(jnp.full((groups,), total, jnp.int32))
        else:
            bounds = offsets(jnp.asarray(times(sizes, side.inner(axes), total)), total)
            place = bounds[:-1]
            found.append(bounds[1:] - bounds[:-1])
    return place, found[0], found[1]


def _known(a: Side, b: Side, capacity: int) -> tuple[tuple[int, ...], ...]:
    """Where groups lie in lhs, in rhs and in a flat result, and their m, k and n, if that is known now.

    It is where the result is as large as sizes say: they decide its shape, so they may decide the program.
    """
    if any(what.concrete(sizes) is None for side in (a, b) for sizes in side.sizes.values()):
        return ()
    left, right = paired(a, b)
    with jax.ensure_compile_time_eval():
        at_a, m, k_a = _places(a, a.ordered(a.free), left)
        at_b, k_b, n = _places(b, right, b.ordered(b.free))
        at_c, _ = flat_places(m, n, capacity)
        found = at_a, at_b, at_c, m, jnp.minimum(k_a, k_b), n
        return tuple(tuple(np.asarray(x).tolist()) for x in found)


def _room(free: Any, m: Any, n: Any, out: Any, dtype: Any) -> Any:
    """What the result is: how it becomes a tensor, its store, and where its groups lie."""
    (a, left), (b, right) = free
    which = kind(m[0], n[0])
    if which is Kind.FLAT:
        if len(left) > 1 or len(right) > 1:
            raise ValueError(
                "contracting_dims: m and n are ragged, and a flat result holds matrices; want one free axis each"
            )
        rows, columns = a.ragged(a.free), b.ragged(b.free)
        capacity = _capacity(out, "m and n", rows, columns)
        place, _ = flat_places(m[1], n[1], capacity)
        store = Store(shape=(capacity,), dtype=np.dtype(dtype))
        return (lambda data: GroupedTensor(data, rows, columns, data.shape)), store, place
    side, (dim, sizes), other = (a, m, n) if m[0].ragged else (b, n, m)
    dims = side.ragged(side.free)
    if side.flat:
        total = _capacity(out, "m" if side is a else "n", dims, None, axis=0 if side is a else -1)
    else:
        total = dim.size
    bounds = offsets(sizes, total)
    shape = (total, other[0].size) if side is a else (other[0].size, total)
    store = Store(shape=shape, dtype=np.dtype(dtype))
    size = {(a.name, x): a.tensor.shape[x] for x in left if not a.flat} | {
        (b.name, x): b.tensor.shape[x] for x in right if not b.flat
    }
    labels = [(a.name, x) for x in left] + [(b.name, x) for x in right]

    def result(data: Array) -> GroupedTensor:
        data = data.reshape([size.get(label, total) for label in labels])
        return arranged(side, b if side is a else a, data, labels)

    return result, store, bounds[:-1]


def _capacity(out: Any, which: str, first: Any, last: Any, axis: int = 0) -> int:
    """How large the result is, which sizes that are traced cannot say."""
    if out is not None:
        return int(out.shape[axis])
    known = [what.concrete(x) for x in (first, last) if x is not None]
    if any(x is None for x in known):
        raise ValueError(
            f"out: sizes of {which} are traced, and how large the result is cannot depend on them; want a tensor for it"
        )
    return int(sum(math.prod(int(x) for x in sizes) for sizes in zip(*known, strict=True)))
