"""What every backend obeys, in both forms and every dtype: laws over values, at fixed shapes."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import strategies
from hypothesis import strategies as st

import trencadis as tr
from trencadis.backends import BACKENDS
from trencadis.core.arguments import problem_of
from trencadis.core.plan import Plan
from trencadis.core.target import Target
from trencadis.core.tiling import Overrides

pytestmark = pytest.mark.core

M, K, N, G = 37, 6, 5, 5  # odd on purpose: nothing is a multiple of anything
FLOATS = ["float32", "bfloat16", "float16"]
# Backends that run on a CPU. The kernels of the others have laws of their own, interpreted: tests/backends/.
ASKED, CPU = problem_of((M, K), (G, K, N)), Target(platform="cpu")


def here(dtype="float32", out=None):
    """The backends that run on a CPU and take these dtypes."""
    asked = ASKED.replace(lhs=jnp.dtype(dtype), rhs=jnp.dtype(dtype), out=jnp.dtype(out or dtype))
    return [name for name, backend in BACKENDS.items() if isinstance(backend.plan(asked, CPU, Overrides()), Plan)]


HERE = here()


@functools.cache
def gmm(backend, transpose_rhs=False, out="float32"):
    return jax.jit(
        functools.partial(
            tr.grouped_matmul, backend=backend, transpose_rhs=transpose_rhs, preferred_element_type=jnp.dtype(out)
        )
    )


@functools.cache
def tgmm(backend, out="float32"):
    return jax.jit(
        functools.partial(
            tr.transposed_grouped_matmul, backend=backend, transpose_lhs=True, preferred_element_type=jnp.dtype(out)
        )
    )


@functools.cache
def gradients(backend):
    def pull(x, w, sizes, c):
        _, back = jax.vjp(lambda x, w: tr.grouped_matmul(x, w, sizes, backend=backend), x, w)
        return back(c)

    return jax.jit(pull)


def operands(seed, dtype="float32"):
    rng = np.random.default_rng(seed)
    x, w, y = rng.normal(size=(M, K)), rng.normal(size=(G, K, N)), rng.normal(size=(M, N))
    return tuple(a.astype(jnp.dtype(dtype)) for a in (x, w, y))


every = hypothesis.given(sizes=strategies.sizes(M, G), seed=strategies.seeds)


@pytest.mark.parametrize("dtype", FLOATS)
@every
def test_rows_equal_the_oracle(dtype, sizes, seed):
    x, w, _ = operands(seed, dtype)
    for backend in here(dtype):
        oracle.check(gmm(backend, out=dtype)(x, w, sizes), oracle.rows(x, w, sizes))


@pytest.mark.parametrize("dtype", FLOATS)
@every
def test_contraction_equals_the_oracle(dtype, sizes, seed):
    x, _, y = operands(seed, dtype)
    for backend in here(dtype):
        oracle.check(tgmm(backend, out=dtype)(x, y, sizes), oracle.contraction(x, y, sizes))


@every
def test_transposed_storage_changes_nothing(sizes, seed):
    x, w, _ = operands(seed)
    for backend in HERE:
        oracle.check(gmm(backend, transpose_rhs=True)(x, w.swapaxes(1, 2), sizes), oracle.rows(x, w, sizes))


@every
def test_int8_is_exact(sizes, seed):
    rng = np.random.default_rng(seed)
    x, w, y = (rng.integers(-128, 128, shape).astype(np.int8) for shape in ((M, K), (G, K, N), (M, N)))
    for backend in here("int8", "int32"):
        np.testing.assert_array_equal(gmm(backend, out="int32")(x, w, sizes), oracle.rows(x, w, sizes))
        np.testing.assert_array_equal(tgmm(backend, out="int32")(x, y, sizes), oracle.contraction(x, y, sizes))


@hypothesis.given(sizes=strategies.sizes(M, G - 1), seed=strategies.seeds, at=st.integers(0, G - 1))
def test_inserting_an_empty_group_changes_nothing(sizes, seed, at):
    x, w, y = operands(seed)
    more = np.insert(sizes, at, 0)
    fewer = np.delete(np.asarray(w), at, axis=0)
    for backend in HERE:
        np.testing.assert_array_equal(gmm(backend)(x, w, more), gmm(backend)(x, fewer, sizes))
        wide = np.asarray(tgmm(backend)(x, y, more))
        np.testing.assert_array_equal(np.delete(wide, at, axis=0), tgmm(backend)(x, y, sizes))
        assert not wide[at].any()


@hypothesis.given(sizes=strategies.sizes(M, G - 1), seed=strategies.seeds, data=st.data())
def test_splitting_a_group_with_repeated_weights_changes_nothing(sizes, seed, data):
    x, w, y = operands(seed)
    at = data.draw(st.integers(0, G - 2))
    left = data.draw(st.integers(0, int(sizes[at])))
    split = np.concatenate([sizes[:at], [left, sizes[at] - left], sizes[at + 1 :]]).astype(np.int32)
    w = w[: G - 1]
    twice = np.insert(w, at, w[at], axis=0)
    for backend in HERE:
        oracle.check(gmm(backend)(x, twice, split), np.asarray(gmm(backend)(x, w, sizes), np.float64))
        parts, whole = np.array(tgmm(backend)(x, y, split)), np.asarray(tgmm(backend)(x, y, sizes))
        parts[at] += parts[at + 1]
        oracle.check(np.delete(parts, at + 1, axis=0), whole.astype(np.float64))


@hypothesis.given(sizes=strategies.sizes(M, G), seed=strategies.seeds, order=st.permutations(range(G)))
def test_permuting_groups_permutes_the_answer(sizes, seed, order):
    x, w, _ = operands(seed)
    order = np.asarray(order)
    rows = [np.arange(a, b) for a, b in oracle.bounds(sizes, M)]
    rest = np.arange(sum(sizes), M)
    moved = np.concatenate([*(rows[i] for i in order), rest]).astype(int)
    for backend in HERE:
        straight = np.asarray(gmm(backend)(x, w, sizes))
        oracle.check(gmm(backend)(x[moved], w[order], sizes[order]), straight[moved].astype(np.float64))


@hypothesis.given(sizes=strategies.sizes(M, G), seed=strategies.seeds, scale=st.sampled_from([-2.0, 0.5, 3.0]))
def test_linear_in_each_operand(sizes, seed, scale):
    x, w, y = operands(seed)
    x2, w2, y2 = operands(seed + 1)
    scale = np.float32(scale)
    for backend in HERE:
        f, t = gmm(backend), tgmm(backend)
        oracle.check(f(scale * x + x2, w, sizes), scale * oracle.rows(x, w, sizes) + oracle.rows(x2, w, sizes))
        oracle.check(f(x, scale * w + w2, sizes), scale * oracle.rows(x, w, sizes) + oracle.rows(x, w2, sizes))
        want = scale * oracle.contraction(x, y, sizes) + oracle.contraction(x, y2, sizes)
        oracle.check(t(x, scale * y + y2, sizes), want)


@every
def test_adjoints_agree(sizes, seed):
    """<f(x, w), c> = <x, dx> = <w, dw>, and each gradient equals its formula."""
    x, w, c = operands(seed)
    for backend in HERE:
        dx, dw = gradients(backend)(x, w, sizes, c)
        oracle.check_adjoints(x, w, sizes, c, dx, dw)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@hypothesis.given(sizes=strategies.sizes(M, G), seed=strategies.seeds, bad=st.integers(0, G - 1))
def test_poison_stays_in_its_group(poison, sizes, seed, bad):
    """NaN in one group's rows and weights, and in unowned rows, in the operands and the cotangent."""
    x, w, c = operands(seed)
    clean = oracle.rows(x, w, sizes), oracle.rows(c, w, sizes, transpose_rhs=True), oracle.contraction(x, c, sizes)
    ranges = oracle.bounds(sizes, M)
    start, end = ranges[bad]
    for a in (x, c):
        a[start:end] = poison
        a[ranges[-1][1] :] = poison  # unowned
    w[bad] = poison
    good_rows = np.r_[0:start, end:M]
    good_groups = [i for i in range(G) if i != bad]
    for backend in HERE:
        out = np.asarray(gmm(backend)(x, w, sizes))
        dx, dw = map(np.asarray, gradients(backend)(x, w, sizes, c))
        direct = np.asarray(tgmm(backend)(x, c, sizes))
        oracle.check(out[good_rows], clean[0][good_rows])
        oracle.check(dx[good_rows], clean[1][good_rows])
        for weights in (dw, direct):
            oracle.check(weights[good_groups], clean[2][good_groups])
            if start == end:
                assert not weights[bad].any()


@hypothesis.given(sizes=strategies.sizes(M, G), seed=strategies.seeds, first=st.integers(0, G - 2))
def test_windows(sizes, seed, first):
    """A window of the groups computes its own rows and leaves the others 0, in value and gradient."""
    x, w, c = operands(seed)
    held = w[first : first + 2]
    for backend in HERE:
        f = windowed(backend)
        out, dx, dw = f(x, held, sizes, c, first)
        oracle.check(out, oracle.rows(x, held, sizes, first=first))
        oracle.check(dx, oracle.rows(c, held, sizes, first=first, transpose_rhs=True))
        oracle.check(dw, oracle.contraction(x, c, sizes, first=first, local=2))


@functools.cache
def windowed(backend):
    def f(x, w, sizes, c, first):
        op = functools.partial(tr.grouped_matmul, group_sizes=sizes, group_offset=first, backend=backend)
        out, back = jax.vjp(lambda x, w: op(x, w), x, w)
        return out, *back(c)

    return jax.jit(f)


@every
def test_existing_out_accumulates(sizes, seed):
    x, w, y = operands(seed)
    e = np.random.default_rng(seed + 7).normal(size=(G, K, N)).astype(np.float32)
    for backend in HERE:
        oracle.check(gmm(backend)(x, w, sizes, existing_out=y), oracle.rows(x, w, sizes, existing_out=y))
        oracle.check(tgmm(backend)(x, y, sizes, existing_out=e), oracle.contraction(x, y, sizes, existing_out=e))


@hypothesis.given(data=st.lists(st.integers(-9, 60), min_size=G, max_size=G), seed=strategies.seeds)
def test_traced_sizes_are_clamped(data, seed):
    """Negative counts as 0, and no group reaches past m."""
    x, w, y = operands(seed)
    sizes = np.asarray(data, np.int32)
    for backend in HERE:
        oracle.check(gmm(backend)(x, w, sizes), oracle.rows(x, w, sizes))
        oracle.check(tgmm(backend)(x, y, sizes), oracle.contraction(x, y, sizes))


@every
def test_deterministic(sizes, seed):
    x, w, y = operands(seed, "bfloat16")
    for backend in HERE:
        for f, b in ((gmm(backend), w), (tgmm(backend), y)):
            np.testing.assert_array_equal(f(x, b, sizes), f(x, b, sizes))
