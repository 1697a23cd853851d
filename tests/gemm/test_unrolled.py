"""Sizes that are known when the program is made: one product for each group, of just its size, and no loop."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trencadis as tr
from trencadis import GroupedTensor
from trencadis.gemm import lowering as general

pytestmark = pytest.mark.core

M, K, N = [3, 0, 2, 5], [4, 2, 0, 1], [1, 6, 3, 2]
DEEP = 4  # k where it is the same in all groups


def drawn(rng, ragged, turns):
    """Matrices, and tensors that hold them and more, which is nobody's: NaN."""
    k = K if ragged else [DEEP] * len(M)
    lefts = [rng.normal(size=s).astype(np.float32) for s in zip(M, k, strict=True)]
    rights = [rng.normal(size=s).astype(np.float32) for s in zip(k, N, strict=True)]
    stored = [[x.T if turned else x for x in xs] for xs, turned in zip((lefts, rights), turns, strict=True)]
    tensors = []
    for xs, sizes, turned, first in zip(stored, (M, N), turns, (True, False), strict=True):
        if ragged:
            data = np.concatenate([*(x.ravel() for x in xs), np.full(3, np.nan, np.float32)])
            rows, columns = (x.shape[0] for x in xs), (x.shape[1] for x in xs)
            tensors.append(GroupedTensor.fully_ragged(jnp.asarray(data), [*rows], [*columns]))
        else:
            axis = int(turned == first)
            hole = np.full([2 if i == axis else DEEP for i in range(2)], np.nan, np.float32)
            data = jnp.asarray(np.concatenate([*xs, hole], axis=axis))
            tensors.append((GroupedTensor.ragged_cols if axis else GroupedTensor.ragged_rows)(data, sizes))
    return lefts, rights, tensors, ((int(not turns[0]),), (int(turns[1]),))


@pytest.mark.parametrize("turns", list(itertools.product([False, True], repeat=2)), ids=["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("ragged", [False, True], ids=["mn", "mkn"])
def test_values_and_gradients_are_those_of_loops(ragged, turns, rng, monkeypatch):
    lefts, rights, (x, y), axes = drawn(rng, ragged, turns)

    def call(a, b):
        lhs, rhs = (GroupedTensor(d, t.first_dims, t.last_dims, t.shape) for d, t in ((a, x), (b, y)))
        return tr.grouped_gemm(lhs, rhs, contracting_dims=axes).data

    def all_of(a, b, ct):
        out, back = jax.vjp(call, a, b)
        return out, *back(ct)

    ct = rng.normal(size=sum(m * n for m, n in zip(M, N, strict=True))).astype(np.float32)
    assert "while" not in jax.jit(all_of).trace(x.data, y.data, ct).lower(lowering_platforms=("cuda",)).as_text()
    got = jax.jit(all_of)(x.data, y.data, ct)
    np.testing.assert_allclose(
        got[0], np.concatenate([(a @ b).ravel() for a, b in zip(lefts, rights, strict=True)]), 1e-5
    )
    monkeypatch.setattr(general, "FEW", 0)
    looped = jax.jit(lambda *xs: all_of(*xs))
    assert "while" in looped.lower(x.data, y.data, ct).as_text()
    for mine, theirs in zip(got, looped(x.data, y.data, ct), strict=True):
        np.testing.assert_allclose(mine, theirs, 1e-5, 1e-5)


def test_goes_through_vmap(rng):
    _, _, (x, y), axes = drawn(rng, True, (False, False))

    def call(a):
        return tr.grouped_gemm(GroupedTensor(a, x.first_dims, x.last_dims, x.shape), y, contracting_dims=axes).data

    many = jnp.stack([x.data, 2 * x.data])
    np.testing.assert_allclose(jax.vmap(call)(many), jnp.stack([call(a) for a in many]), 1e-5)


def test_many_groups_are_looped_over():
    sizes = [1] * (general.FEW + 1)
    x = GroupedTensor.fully_ragged(jnp.ones(len(sizes)), sizes, sizes)
    call = jax.jit(
        lambda a: tr.grouped_gemm(GroupedTensor.fully_ragged(a, sizes, sizes), x, contracting_dims=((1,), (0,))).data
    )
    assert "while" in call.lower(x.data).as_text()
    assert call(x.data).tolist() == [1.0] * len(sizes)


def test_what_follows_from_known_sizes_is_not_worked_out_by_the_compiler():
    """XLA folds constants entry by entry: with a scale for each of 3 million entries, for half a minute."""
    sizes = [40] * 8
    x = GroupedTensor.fully_ragged(jnp.zeros(8 * 40 * 40), sizes, sizes)

    def call(a):
        lhs = GroupedTensor.fully_ragged(a, sizes, sizes)
        return tr.grouped_gemm(lhs, x, contracting_dims=((1,), (0,)), alpha=jnp.ones(8)).data

    program = str(jax.make_jaxpr(call)(x.data))
    kept = program.index("optimization_barrier")
    assert "cumsum" in program[kept:]


def test_narrow_floats_are_not_widened_as_a_whole():
    """XLA:CPU would convert all of a buffer for each row that it writes: a gradient took a minute."""
    room = 7001

    def call(a, b, ct, sizes):
        out = GroupedTensor.fully_ragged(jnp.zeros_like(ct), sizes, sizes)

        def forward(a, b):
            lhs, rhs = (GroupedTensor.fully_ragged(x, sizes, sizes) for x in (a, b))
            return tr.grouped_gemm(lhs, rhs, contracting_dims=((1,), (0,)), out=out).data

        return jax.vjp(forward, a, b)[1](ct)

    flat = jax.ShapeDtypeStruct((room,), jnp.bfloat16)
    text = jax.jit(call).lower(flat, flat, flat, jax.ShapeDtypeStruct((2,), jnp.int32)).compile().as_text()
    widened = re.findall(r"= f32\[(\d+)\]\S* dynamic-update-slice", text)
    assert "dynamic-update-slice" in text and not [size for size in widened if int(size) >= room]
