"""Grouped GEMMs of every ragged combination, as lists of matrices: packed into arrays, multiplied, and unpacked."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from hypothesis import strategies as st

import trencadis as tr
from trencadis import GroupedTensor

G, TOTAL = 4, 13  # groups, and entries of a ragged dimension of all groups together
UNIFORM = (3, 5, 4)  # m, k, n where they are not ragged
MOST = 6  # of a ragged dimension
CASES = list(itertools.product([False, True], repeat=3))  # which of m, k and n are ragged
TRANSPOSES = list(itertools.product([False, True], repeat=2))  # lhs stored [k, m], rhs stored [n, k]
ids = ["".join(x for x, on in zip("mkn", case, strict=True) if on) or "none" for case in CASES]


def sizes_of(case, groups=G, limit=TOTAL - 1):
    """For each dimension the sizes of all groups; ragged ones leave unowned entries, and often all groups are empty."""
    some = st.lists(st.integers(0, MOST), min_size=groups, max_size=groups).map(lambda x: _fit(x, limit))
    ragged = st.one_of(some, some, some, st.just([0] * groups))
    return st.tuples(*(ragged if on else st.just([u] * groups) for on, u in zip(case, UNIFORM, strict=True)))


def _fit(sizes, limit):
    kept = []
    for size in sizes:
        kept.append(min(size, limit - sum(kept)))
    return kept


def normal(first, last, seed):
    """A matrix for each pair of sizes."""
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(np.float32) for shape in zip(first, last, strict=True)]


def drawn(sizes, seed):
    """The groups of lhs, rhs, out and the cotangent."""
    m, k, n = sizes
    return tuple(normal(*pair, (seed, i)) for i, pair in enumerate([(m, k), (k, n), (m, n), (m, n)]))


# ---------------------------------------------------------------------------------------------------------------------
# From lists to arrays and back; a dimension is (ragged, uniform size), a tensor has two


def shape_of(dims):
    """The shape of a tensor."""
    match [on for on, _ in dims]:
        case [False, False]:
            return (G, dims[0][1], dims[1][1])
        case [True, True]:
            return (MOST * (TOTAL - 1) + 3,)
    return tuple(TOTAL if on else size for on, size in dims)


def places(dims, sizes):
    """Where each group is: an index, and the shape of what is there."""
    at = 0
    for i, (r, c) in enumerate(zip(*sizes, strict=True)):
        match [on for on, _ in dims]:
            case [False, False]:
                yield i, (r, c)
            case [True, True]:
                yield slice(at, at + r * c), (r, c)
                at += r * c
            case [True, False]:
                yield slice(at, at + r), (r, c)
                at += r
            case [False, True]:
                yield (slice(None), slice(at, at + c)), (r, c)
                at += c


def packed(dims, sizes, matrices, fill):
    """An array that holds the matrices, and `fill` in unowned entries."""
    data = np.full(shape_of(dims), fill, np.float32)
    for (at, _), x in zip(places(dims, sizes), matrices, strict=True):
        data[at] = x.ravel() if data.ndim == 1 else x
    return data


def unpacked(dims, sizes, data, rest):
    """The matrices of an array, whose other entries are all `rest`."""
    data = np.array(data)
    found = [data[at].reshape(shape).copy() for at, shape in places(dims, sizes)]
    for at, _ in places(dims, sizes):
        data[at] = rest
    np.testing.assert_array_equal(data, np.full_like(data, rest))
    if rest == 0:  # to the bit
        np.testing.assert_array_equal(np.signbit(data), np.signbit(np.full_like(data, rest)))
    return found


def flipped(pair, on):
    return pair[::-1] if on else pair


def sides(case, transposes):
    """The two dimensions of lhs, rhs and out as they are stored, which of m, k and n they are, and the axes summed."""
    of = flipped((0, 1), transposes[0]), flipped((1, 2), transposes[1]), (0, 2)
    dims = [tuple((case[i], UNIFORM[i]) for i in pair) for pair in of]
    stacks = [not any(on for on, _ in each) for each in dims]
    return dims, of, tuple((pair.index(1) + stack,) for pair, stack in zip(of[:2], stacks[:2], strict=True))


def tensor_of(dims, data, sizes):
    first, last = (x if on else None for (on, _), x in zip(dims, sizes, strict=True))
    return GroupedTensor(data, first, last, data.shape)


def gemm(case, transposes, x, y, room, sizes, **options):
    """The data of the GEMM of two arrays; `room` is added to."""
    dims, of, axes = sides(case, transposes)
    sizes = [jnp.asarray(s, jnp.int32) for s in sizes]
    lhs, rhs, out = (
        tensor_of(each, data, [sizes[i] for i in pair]) for each, pair, data in zip(dims, of, (x, y, room), strict=True)
    )
    out = out if case[0] or case[2] else room
    found = tr.grouped_gemm(lhs, rhs, contracting_dims=axes, out=out, **options)
    return found.data if isinstance(found, GroupedTensor) else found


def lay(case, transposes, sizes, which, matrices, fill):
    """The array of one of lhs (0), rhs (1) and out (2)."""
    dims, of, _ = sides(case, transposes)
    transposed = which < 2 and transposes[which]
    return packed(dims[which], [sizes[i] for i in of[which]], [x.T for x in matrices] if transposed else matrices, fill)


def take(case, transposes, sizes, which, data, rest=0.0):
    """The matrices of one of them; unowned entries are `rest`."""
    dims, of, _ = sides(case, transposes)
    found = unpacked(dims[which], [sizes[i] for i in of[which]], data, rest)
    return [x.T for x in found] if which < 2 and transposes[which] else found


@functools.cache
def compiled(case, transposes):
    def pull(x, y, room, ct, *sizes):
        out, back = jax.vjp(lambda x, y, room: gemm(case, transposes, x, y, room, sizes), x, y, room)
        return out, *back(ct)

    return jax.jit(pull)


def run(case, transposes, sizes, a, b, old, ct, fill=np.nan):
    """The groups of the result and of the gradients of lhs, rhs and out; unowned entries are `fill`, and 7 in out."""
    put = functools.partial(lay, case, transposes, sizes)
    got, dx, dy, d_old = compiled(case, transposes)(
        put(0, a, fill), put(1, b, fill), put(2, old, 7), put(2, ct, fill), *(np.asarray(s) for s in sizes)
    )
    get = functools.partial(take, case, transposes, sizes)
    return get(2, got, 7), get(0, dx), get(1, dy), get(2, d_old, fill)


def product(a, b):
    """A loop over groups in float64."""
    wide = [(x.astype(np.float64), y.astype(np.float64)) for x, y in zip(a, b, strict=True)]
    return [x @ y for x, y in wide]


def add(*lists):
    return [sum(each[1:], each[0]) for each in zip(*lists, strict=True)]


def transposed(matrices):
    return [x.T for x in matrices]


def check(got, want):
    """Equal, group by group: to what float32 keeps of sums of a few products."""
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5 * np.nanmax(np.abs(y), initial=1))


def check_both_forms(x, w, y, sizes, **how):
    """Rows and contraction through `grouped_gemm`, with gradients; NaN in unowned rows reaches none of them."""
    gemm = functools.partial(tr.grouped_gemm, **how)
    stacked, rows_of = GroupedTensor.stacked, functools.partial(GroupedTensor.ragged_rows, sizes=sizes)
    columns_of = lambda a: GroupedTensor.ragged_cols(a.T, sizes)

    def step(x, w, y):
        out, pull = jax.vjp(lambda x, w: gemm(rows_of(x), stacked(w), contracting_dims=((1,), (1,))).data, x, w)
        transposed = gemm(stacked(w), columns_of(y), contracting_dims=((2,), (0,))).data  # n is ragged
        return out, *pull(y), transposed.T, gemm(columns_of(x), rows_of(y), contracting_dims=((1,), (0,)))

    out, dx, dw, transposed, weights = step(x, w, y)  # without jit, so that equal products are compiled once
    oracle.check(out, oracle.rows(x, w, sizes))
    for found in (dx, transposed):
        oracle.check(found, oracle.rows(y, w, sizes, transpose_rhs=True))
    for found in (dw, weights):
        oracle.check(found, oracle.contraction(x, y, sizes))
