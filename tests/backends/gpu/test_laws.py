"""Laws of the interpreted kernels over group sizes, at one shape, so that each kernel is compiled once."""

import functools

import hypothesis
import jax
import numpy as np
import oracle
import pytest
import strategies
from hypothesis import strategies as st

import trencadis as tr

pytestmark = [pytest.mark.core, pytest.mark.once]

M, K, N, G = 100, 32, 32, 4
few = hypothesis.settings(max_examples=2, phases=[hypothesis.Phase.generate])  # an example is half a second
HOW = dict(backend="gpu", interpret=True)

# without jit, so that the products of gradients are the kernels that are compiled already
gmm = functools.partial(tr.grouped_matmul, **HOW)
tgmm = functools.partial(tr.transposed_grouped_matmul, transpose_lhs=True, **HOW)


def gradients(x, w, sizes, c):
    return jax.vjp(lambda x, w: tr.grouped_matmul(x, w, sizes, **HOW), x, w)[1](c)


def operands(seed):
    rng = np.random.default_rng(seed)
    return tuple(rng.normal(size=s).astype(np.float32) for s in ((M, K), (G, K, N), (M, N)))


@few
@hypothesis.given(sizes=strategies.sizes(M, G - 1), seed=strategies.seeds, at=st.integers(0, G - 1))
def test_the_place_of_an_empty_group_changes_nothing(sizes, seed, at):
    x, w, y = operands(seed)
    orders = [np.insert(np.arange(G - 1), i, G - 1) for i in (at, G - 1)]
    more = np.append(sizes, 0)
    w[-1] = np.nan  # weights of the empty group
    one, other = (gmm(x, w[order], more[order]) for order in orders)
    np.testing.assert_array_equal(one, other)
    one, other = (np.asarray(tgmm(x, y, more[order])) for order in orders)
    np.testing.assert_array_equal(np.delete(one, at, axis=0), other[:-1])
    assert not one[at].any()


@few
@hypothesis.given(sizes=strategies.sizes(M, G - 1), seed=strategies.seeds, data=st.data())
def test_splitting_a_group_changes_nothing(sizes, seed, data):
    x, w, y = operands(seed)
    at = data.draw(st.integers(0, G - 2))
    cut = data.draw(st.integers(0, int(sizes[at])))
    split = np.insert(sizes, at, cut)
    split[at + 1] -= cut
    whole = np.append(sizes, 0)
    twice = np.insert(np.arange(G - 1), at, at)
    oracle.check(gmm(x, w[twice], split), oracle.wide(gmm(x, w, whole)))
    parts = oracle.wide(tgmm(x, y, split))
    parts[at] += parts[at + 1]
    oracle.check(np.asarray(tgmm(x, y, whole))[:-1], np.delete(parts, at + 1, axis=0))


@few
@hypothesis.given(sizes=strategies.sizes(M, G), seed=strategies.seeds, order=st.permutations(range(G)))
def test_permuting_groups_permutes(sizes, seed, order):
    x, w, y = operands(seed)
    order = np.asarray(order)
    ranges = [np.arange(start, end) for start, end in oracle.bounds(sizes, M)]
    rest = np.arange(sizes.sum(), M)
    moved = np.concatenate([*(ranges[i] for i in order), rest]).astype(int)
    straight = np.asarray(gmm(x, w, sizes))
    oracle.check(gmm(x[moved], w[order], sizes[order]), straight[moved].astype(np.float64))
    oracle.check(tgmm(x[moved], y[moved], sizes[order]), oracle.wide(tgmm(x, y, sizes))[order])


@few
@hypothesis.given(sizes=strategies.sizes(M, G), seed=strategies.seeds, scale=st.sampled_from([-2.0, 0.5, 3.0]))
def test_linear_in_each_operand(sizes, seed, scale):
    x, w, y = operands(seed)
    x2, w2, y2 = operands(seed + 1)
    scale = np.float32(scale)
    oracle.check(gmm(scale * x + x2, w, sizes), scale * oracle.rows(x, w, sizes) + oracle.rows(x2, w, sizes))
    oracle.check(gmm(x, scale * w + w2, sizes), scale * oracle.rows(x, w, sizes) + oracle.rows(x, w2, sizes))
    want = scale * oracle.contraction(x, y, sizes) + oracle.contraction(x, y2, sizes)
    oracle.check(tgmm(x, scale * y + y2, sizes), want)


@few
@hypothesis.given(sizes=strategies.sizes(M, G), seed=strategies.seeds)
def test_adjoints_agree(sizes, seed):
    """<f(x, w), c> = <x, dx> = <w, dw>, and each gradient equals its formula."""
    x, w, c = operands(seed)
    oracle.check_adjoints(x, w, sizes, c, *gradients(x, w, sizes, c))
