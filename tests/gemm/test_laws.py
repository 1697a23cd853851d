"""Laws of the general GEMM, for every ragged combination: over values, at fixed shapes, against a loop over groups."""

import functools
import itertools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import strategies
from grouped_cases import (  # isort: split
    CASES,
    TOTAL,
    TRANSPOSES,
    UNIFORM,
    G,
    add,
    check,
    compiled,
    drawn,
    gemm,
    ids,
    lay,
    product,
    run,
    sizes_of,
    take,
    transposed,
)

from hypothesis import strategies as st
from sweep import marked, sweep

from trencadis.gemm import xla

pytestmark = pytest.mark.core

few = hypothesis.settings(max_examples=6)
every = pytest.mark.parametrize("case", CASES, ids=ids)
half = pytest.mark.parametrize("case", [marked((case,)) if i % 2 else case for i, case in enumerate(CASES)], ids=ids)
ragged = pytest.mark.parametrize("case", CASES[1:], ids=ids[1:])
# one storage order for each combination; the first law compares all of them with the loop, most of them as a sweep
STORED = {case: TRANSPOSES[i % 4] for i, case in enumerate(CASES)}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(xla, "TILE", 4)


@pytest.mark.parametrize(("case", "transposes"), sweep(itertools.product(CASES, TRANSPOSES), STORED.items()), ids=str)
@few
@hypothesis.given(data=st.data(), seed=strategies.seeds)
def test_equals_a_loop_over_groups(case, transposes, data, seed):
    """S3-03, S3-05, S3-08: forward and both gradients; m, k and n have sizes of their own; unowned entries are NaN."""
    sizes = data.draw(sizes_of(case))
    a, b, old, ct = drawn(sizes, seed)
    out, da, db, d_old = run(case, transposes, sizes, a, b, old, ct)
    check(out, add(product(a, b), old))
    check(da, product(ct, transposed(b)))
    check(db, product(transposed(a), ct))
    check(d_old, ct)


@every
@few
@hypothesis.given(data=st.data(), seed=strategies.seeds, order=st.permutations(range(G)))
def test_permuting_groups_permutes_the_answer(case, data, seed, order):
    """The same holds for the gradients."""
    sizes, transposes = data.draw(sizes_of(case)), STORED[case]
    given = drawn(sizes, seed)
    move = lambda groups: [groups[i] for i in order]
    straight = run(case, transposes, sizes, *given)
    moved = run(case, transposes, [move(s) for s in sizes], *map(move, given))
    for got, want in zip(moved, straight, strict=True):
        check(got, move(want))


@ragged
@few
@hypothesis.given(data=st.data(), seed=strategies.seeds, at=st.integers(0, G - 2))
def test_splitting_a_group_splits_the_answer(case, data, seed, at):
    """Split m or n: the same rows or columns. Split k: two sums that add up. The other operand is repeated.

    A tensor that has the split dimension splits along it; the parts of one that has not add up, also in gradients.
    """
    sizes, transposes = data.draw(sizes_of(case, G - 1, TOTAL - 7)), STORED[case]
    which = data.draw(st.sampled_from([i for i in range(3) if case[i]]))
    here = sizes[which][at]
    cut = data.draw(st.integers(0, here))
    a, b, old, ct = drawn(sizes, seed)
    old = [np.zeros_like(x) for x in old]
    parts = [[*s[: at + 1], *s[at:]] for s in sizes]
    parts[which][at : at + 2] = cut, here - cut

    def split(groups, dims):
        halves = [groups[at]] * 2 if which not in dims else np.split(groups[at], [cut], dims.index(which))
        return [*groups[:at], *halves, *groups[at + 1 :]]

    def joined(groups, dims):
        first, second = groups[at : at + 2]
        one = first + second if which not in dims else np.concatenate([first, second], dims.index(which))
        return [*groups[:at], one, *groups[at + 2 :]]

    tensors = (0, 1), (1, 2), (0, 2), (0, 2)
    found = run(case, transposes, parts, *(split(x, dims) for x, dims in zip((a, b, old, ct), tensors, strict=True)))
    check(joined(found[0], (0, 2)), product(a, b))
    check(joined(found[1], (0, 1)), product(ct, transposed(b)))
    check(joined(found[2], (1, 2)), product(transposed(a), ct))


@every
@few
@hypothesis.given(data=st.data(), seed=strategies.seeds, scale=st.sampled_from([-2.0, 0.5, 3.0]))
def test_linear_in_each_operand(case, data, seed, scale):
    """Also in `out`; both sides are computed by the library."""
    sizes, transposes = data.draw(sizes_of(case)), STORED[case]
    one, two = drawn(sizes, seed), drawn(sizes, seed + 1)
    zero = [np.zeros_like(x) for x in one[2]]
    mixed = [add([np.float32(scale) * x for x in x], y) for x, y in zip(one, two, strict=True)]
    f = lambda a, b, old=zero: run(case, transposes, sizes, a, b, old, one[3])[0]
    scaled = lambda groups: [scale * x.astype(np.float64) for x in groups]
    check(f(mixed[0], one[1]), add(scaled(f(one[0], one[1])), f(two[0], one[1])))
    check(f(one[0], mixed[1]), add(scaled(f(one[0], one[1])), f(one[0], two[1])))
    check(f(one[0], one[1], one[2]), add(f(one[0], one[1]), one[2]))


@every
@few
@hypothesis.given(data=st.data(), seed=strategies.seeds)
def test_adjoints_agree(case, data, seed):
    """<f(x, w), c> = <x, dx> = <w, dw>."""
    sizes, transposes = data.draw(sizes_of(case)), STORED[case]
    a, b, old, ct = drawn(sizes, seed)
    out, da, db, _ = run(case, transposes, sizes, a, b, [np.zeros_like(x) for x in old], ct)
    inner = lambda xs, ys: sum(np.vdot(x.astype(np.float64), y) for x, y in zip(xs, ys, strict=True))
    scale = max(1.0, abs(inner(out, ct)))
    for x, dx in ((a, da), (b, db)):
        np.testing.assert_allclose(inner(x, dx), inner(out, ct), atol=2e-5 * scale)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@every
@few
@hypothesis.given(data=st.data(), seed=strategies.seeds, bad=st.integers(0, G - 1))
def test_poison_stays_in_its_group(case, poison, data, seed, bad):
    """NaN and Inf in a group's operands and cotangent, and in unowned entries, reach no other group or its gradient."""
    sizes, transposes = data.draw(sizes_of(case)), STORED[case]
    given = drawn(sizes, seed)
    clean = run(case, transposes, sizes, *given, fill=0.0)
    for groups in given:
        groups[bad][:] = poison
    found = run(case, transposes, sizes, *given, fill=poison)
    others = lambda groups: groups[:bad] + groups[bad + 1 :]
    for got, want in zip(found, clean, strict=True):
        check(others(got), others(want))
    if sizes[1][bad] == 0:  # the contracted dimension is empty
        np.testing.assert_array_equal(found[0][bad], given[2][bad])


# ---------------------------------------------------------------------------------------------------------------------
# Higher derivatives, batches and epilogues: one program for each combination


@functools.cache
def second(case):
    """The tangent of f, and of the gradients of `sum(c * f(x, y)**2) / 2`: forward over reverse, and reverse twice."""

    def call(x, y, c, dx, dy, *sizes):
        room = jnp.zeros(c.shape, jnp.float32)
        f = lambda x, y: gemm(case, STORED[case], x, y, room, sizes)
        slopes = lambda x, y: jax.grad(lambda x, y: jnp.sum(c * f(x, y) ** 2) / 2, (0, 1))(x, y)
        _, tangent = jax.jvp(f, (x, y), (dx, dy))
        _, forward = jax.jvp(slopes, (x, y), (dx, dy))
        along = lambda x, y: sum(jnp.vdot(s, d) for s, d in zip(slopes(x, y), (dx, dy), strict=True))
        return tangent, *forward, *jax.grad(along, (0, 1))(x, y)

    return jax.jit(call)


@half
@hypothesis.settings(max_examples=4)
@hypothesis.given(data=st.data(), seed=strategies.seeds)
def test_second_order(case, data, seed):
    """jvp, jvp of grad, and grad of grad."""
    sizes, transposes = data.draw(sizes_of(case)), STORED[case]
    (a, b, _, c), (da, db, _, _) = drawn(sizes, seed), drawn(sizes, seed + 1)
    put, get = functools.partial(lay, case, transposes, sizes), functools.partial(take, case, transposes, sizes)
    laid = (put(0, a, 0), put(1, b, 0), put(2, c, 0), put(0, da, 0), put(1, db, 0))
    tangent, hx, hy, rx, ry = second(case)(*laid, *(np.asarray(s) for s in sizes))
    moved = add(product(da, b), product(a, db))
    times = lambda xs, ys: [x * y for x, y in zip(xs, ys, strict=True)]
    slope, curve = times(c, product(a, b)), times(c, moved)
    check(get(2, tangent), moved)
    for found in (hx, rx):
        check(get(0, found), add(product(curve, transposed(b)), product(slope, transposed(db))))
    for found in (hy, ry):
        check(get(1, found), add(product(transposed(a), curve), product(transposed(da), slope)))


B = 3  # entries of a batch
BATCHES = {"lhs": (1, None, None), "rhs": (None, -1, None), "sizes": (None, None, 0), "all": (0, 0, 0)}


@functools.cache
def batched(case):
    """Four batches of operands stacked along the first axis; of those that are not batched the first is used."""

    def call(x, y, room, sizes):
        f = lambda x, y, sizes: gemm(case, STORED[case], x, y, room, sizes)

        def each(axes):
            given = zip((x, y, sizes), axes, strict=True)
            return [z[0] if axis is None else jnp.moveaxis(z, 0, axis) for z, axis in given]

        return {name: jax.vmap(f, in_axes=axes)(*each(axes)) for name, axes in BATCHES.items()}

    return jax.jit(call)


@every
@hypothesis.settings(max_examples=3)
@hypothesis.given(data=st.data(), seed=strategies.seeds)
def test_vmap_is_a_loop(case, data, seed):
    """T-06: over lhs, rhs or sizes alone, along any axis, and over all of them; with NaN in unowned entries."""
    transposes = STORED[case]
    many = np.asarray([data.draw(sizes_of(case)) for _ in range(B)])
    entries = [drawn(sizes, seed + i) for i, sizes in enumerate(many)]
    put = lambda which, fill: np.stack(
        [lay(case, transposes, sizes, which, each[which], fill) for sizes, each in zip(many, entries, strict=True)]
    )
    x, y, room = put(0, np.nan), put(1, np.nan), lay(case, transposes, many[0], 2, entries[0][2], 7)
    found = batched(case)(x, y, room, many)
    for name, axes in BATCHES.items():
        for i in range(B):
            j, k, l = (0 if axis is None else i for axis in axes)
            want = compiled(case, transposes)(x[j], y[k], room, np.zeros_like(room), *many[l])[0]
            check([found[name][i]], [np.asarray(want)])


@functools.cache
def ended(case):
    def call(x, y, old, ct, alpha, beta, bias, *sizes):
        def f(x, y, old, alpha, beta, bias):
            more = {} if case[2] else {"bias": bias}
            return gemm(case, STORED[case], x, y, old, sizes, alpha=alpha, beta=beta, **more)

        out, back = jax.vjp(f, x, y, old, alpha, beta, bias)
        return out, *back(ct)

    return jax.jit(call)


@every
@few
@hypothesis.given(data=st.data(), seed=strategies.seeds)
def test_the_epilogue(case, data, seed):
    """S3-06, T-03: alpha, beta, out and bias by group, and their gradients; NaN in unowned entries reaches none."""
    sizes, transposes = data.draw(sizes_of(case)), STORED[case]
    a, b, old, ct = drawn(sizes, seed)
    rng = np.random.default_rng(seed)
    alpha, beta = rng.normal(size=(2, G)).astype(np.float32)
    bias = rng.normal(size=(G, UNIFORM[2])).astype(np.float32) * (not case[2])
    put, get = functools.partial(lay, case, transposes, sizes), functools.partial(take, case, transposes, sizes)
    out, dx, dy, d_old, d_alpha, d_beta, d_bias = ended(case)(
        put(0, a, np.nan),
        put(1, b, np.nan),
        put(2, old, -0.0),
        put(2, ct, np.nan),
        alpha,
        beta,
        bias,
        *map(np.asarray, sizes),
    )
    scaled = lambda numbers, xs: [s * x.astype(np.float64) for s, x in zip(numbers, xs, strict=True)]
    plus = [np.zeros(1) if case[2] else row for row in bias]
    check(get(2, out, -0.0), add(scaled(alpha, product(a, b)), plus, scaled(beta, old)))
    check(get(0, dx), scaled(alpha, product(ct, transposed(b))))
    check(get(1, dy), scaled(alpha, product(transposed(a), ct)))
    check(get(2, d_old, np.nan), scaled(beta, ct))
    inner = lambda xs: np.asarray([np.vdot(x.astype(np.float64), c) for x, c in zip(xs, ct, strict=True)])
    check([d_alpha, d_beta], [inner(product(a, b)), inner(old)])
    if not case[2]:
        check(d_bias, [c.sum(0) for c in ct])
