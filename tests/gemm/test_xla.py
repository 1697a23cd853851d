"""The backend of the general form: what it plans, unrolled products against loops over tiles, and what compiles."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trencadis as tr
from trencadis import GroupedTensor
from trencadis.core.target import Target
from trencadis.core.tiling import Tiling
from trencadis.gemm import autodiff, xla

pytestmark = pytest.mark.core

M, K, N = [3, 0, 2, 5], [4, 2, 0, 1], [1, 6, 3, 2]
DEEP = 4  # k where it is the same in all groups


def drawn(rng, ragged, transposes):
    """Matrices, and tensors that hold them; unowned entries are NaN."""
    k = K if ragged else [DEEP] * len(M)
    lefts = [rng.normal(size=s).astype(np.float32) for s in zip(M, k, strict=True)]
    rights = [rng.normal(size=s).astype(np.float32) for s in zip(k, N, strict=True)]
    stored = [
        [x.T if transposed else x for x in xs] for xs, transposed in zip((lefts, rights), transposes, strict=True)
    ]
    tensors = []
    for xs, sizes, transposed, first in zip(stored, (M, N), transposes, (True, False), strict=True):
        if ragged:
            data = np.concatenate([*(x.ravel() for x in xs), np.full(3, np.nan, np.float32)])
            rows, columns = (x.shape[0] for x in xs), (x.shape[1] for x in xs)
            tensors.append(GroupedTensor.fully_ragged(jnp.asarray(data), [*rows], [*columns]))
        else:
            axis = int(transposed == first)
            hole = np.full([2 if i == axis else DEEP for i in range(2)], np.nan, np.float32)
            data = jnp.asarray(np.concatenate([*xs, hole], axis=axis))
            tensors.append((GroupedTensor.ragged_cols if axis else GroupedTensor.ragged_rows)(data, sizes))
    return lefts, rights, tensors, ((int(not transposes[0]),), (int(transposes[1]),))


@pytest.mark.parametrize("transposes", list(itertools.product([False, True], repeat=2)), ids=["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("ragged", [False, True], ids=["mn", "mkn"])
def test_values_and_gradients_are_those_of_loops(ragged, transposes, rng, monkeypatch):
    lefts, rights, (x, y), axes = drawn(rng, ragged, transposes)

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
    monkeypatch.setattr(xla, "UNROLLED_GROUPS", 0)
    looped = jax.jit(lambda *xs: all_of(*xs))
    assert "while" in looped.lower(x.data, y.data, ct).as_text()
    for mine, theirs in zip(got, looped(x.data, y.data, ct), strict=True):
        np.testing.assert_allclose(mine, theirs, 1e-5, 1e-5)


def test_unrolled_results_of_every_packing(rng):
    """Sizes that are known in `jit` are unrolled also with `out`, and if one dimension of the result is ragged."""
    lefts, rights, (x, y), _ = drawn(rng, True, (False, False))
    wide = rng.normal(size=(sum(K), 2)).astype(np.float32)
    parts = np.split(wide, np.cumsum(K)[:-1])

    @jax.jit
    def call(a, b, wide, room):
        lhs, rhs = x.with_data(a), y.with_data(b)
        flat = tr.grouped_gemm(lhs, rhs, contracting_dims=((1,), (0,)), out=GroupedTensor.fully_ragged(room, M, N))
        return flat.data, tr.grouped_gemm(lhs, GroupedTensor.ragged_rows(wide, K), contracting_dims=((1,), (0,))).data

    room = np.ones(sum(m * n for m, n in zip(M, N, strict=True)) + 3, np.float32)
    assert "while" not in call.trace(x.data, y.data, wide, room).lower(lowering_platforms=("cuda",)).as_text()
    flat, rows = call(x.data, y.data, wide, room)
    want = np.concatenate([*((a @ b).ravel() for a, b in zip(lefts, rights, strict=True)), np.zeros(3)])
    np.testing.assert_allclose(flat, 1 + want, 1e-5, 1e-6)
    np.testing.assert_allclose(rows, np.concatenate([a @ b for a, b in zip(lefts, parts, strict=True)]), 1e-5, 1e-6)


def test_goes_through_vmap(rng):
    _, _, (x, y), axes = drawn(rng, True, (False, False))

    def call(a):
        return tr.grouped_gemm(GroupedTensor(a, x.first_dims, x.last_dims, x.shape), y, contracting_dims=axes).data

    many = jnp.stack([x.data, 2 * x.data])
    np.testing.assert_allclose(jax.vmap(call)(many), jnp.stack([call(a) for a in many]), 1e-5)


@pytest.mark.parametrize("scale", [None, np.ones(2, np.float32)], ids=["plain", "scaled"])
def test_a_small_product_of_bfloat16_into_float32_has_a_gradient(scale):
    """All operands are stored transposed: XLA:CPU has no code for the product if it transposes the sum itself."""
    m, k, n = [9, 5], [5, 0], [5, 1]
    rhs = GroupedTensor.fully_ragged(jnp.ones(25, jnp.bfloat16), n, k)

    def loss(a):
        lhs, dtype = GroupedTensor.fully_ragged(a, k, m), jnp.bfloat16
        out = tr.grouped_gemm(lhs, rhs, contracting_dims=((0,), (1,)), preferred_element_type=dtype, alpha=scale)
        return out.data.astype(jnp.float32).sum()

    assert jax.jit(jax.grad(loss))(jnp.ones(45)).tolist() == [5.0] * 45


def test_many_groups_are_looped_over():
    sizes = [1] * (xla.UNROLLED_GROUPS + 1)
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

    program = jax.jit(call).lower(x.data).as_text()
    kept = program.index("optimization_barrier")
    assert "stablehlo.select" in program[kept:] and f"tensor<{x.data.size}xi1>" not in program[:kept]


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


# ---------------------------------------------------------------------------------------------------------------------
# The plan, and how many programs there are


def planned(sizes, platform, width=3, known=True):
    """The plan of a product of rows with rows of these sizes, as the lowering makes it."""
    rows = sum(sizes)

    def call(x, traced):
        given = sizes if known else traced
        lhs, out = GroupedTensor.ragged_rows(x, given), GroupedTensor.fully_ragged(jnp.zeros(999), given, given)
        return tr.grouped_gemm(lhs, lhs, contracting_dims=((1,), (1,)), out=out).data

    program = jax.make_jaxpr(call)(jnp.ones((rows, width)), np.asarray(sizes, np.int32))
    (problem,) = (each.params["problem"] for each in program.eqns if each.primitive is autodiff.gemm_p)
    return xla.plan(problem, Target(platform=platform))


def test_a_plan_says_what_it_decides_and_why():
    few = planned([2, 0, 3], "cuda")
    assert (few.layout.unrolled, few.layout.serial) == (True, False)
    assert str(few) == (
        "xla, tile 5·3·5: 2 products of the sizes of their groups, which are known at trace time; "
        "3 groups, of at most 64"
    )
    assert planned([2, 0, 3], "cpu").layout.serial
    traced = planned([200, 0, 3], "tpu", width=300, known=False)
    assert (traced.layout.unrolled, traced.tiling) == (False, Tiling(128, 100, 128))
    assert traced.because == (
        "loops over tiles of 128 x 100 x 128 (m, k, n) of 3 groups, whose sizes are run-time operands"
    )
    many = planned([1] * 65, "cpu")
    assert not many.layout.unrolled and "65 groups, more than the 64 that are unrolled" in many.because
    assert planned([0, 0], "cpu").problem.empty
    assert str(few.problem) == "gemm m=ragged k=3 n=ragged g=3: float32 x float32 -> float32 + out"


@pytest.mark.parametrize("given", [list, np.asarray, jnp.asarray], ids=["ints", "numpy", "jax"])
def test_other_sizes_are_no_other_program_outside_of_jit(given, rng, caplog):
    """The shapes of operands and result stay: forward and gradients compile once for all sizes."""
    x, y = (rng.normal(size=shape).astype(np.float32) for shape in ((6, 3), (3, 7)))
    m, n = np.array([1, 2, 3]), np.array([2, 1, 4])  # 16 entries in any order

    def check(order):
        lhs, rhs = GroupedTensor.ragged_rows(x, given(m[order])), GroupedTensor.ragged_cols(y, given(n[order]))
        loss = lambda a: tr.grouped_gemm(lhs.with_data(a), rhs, contracting_dims=((1,), (0,))).data.sum()
        total, slope = jax.value_and_grad(loss)(lhs.data)
        groups = np.repeat(np.arange(3), m[order]), np.repeat(np.arange(3), n[order])
        mine = np.equal.outer(*groups)
        np.testing.assert_allclose(total, (x @ y)[mine].sum(), 1e-5)
        np.testing.assert_allclose(slope, mine @ y.T, 1e-5)

    check([0, 1, 2])
    programs = autodiff._eager._cache_size()
    with jax.log_compiles():
        for order in ([0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]):
            check(order)
    assert autodiff._eager._cache_size() == programs
    assert [each.getMessage() for each in caplog.records if "ompiling" in each.getMessage()] == []


def test_other_sizes_in_arguments_of_jit():
    """Arrays are traced, and one program serves all; ints are static, as a shape is, and known inside."""
    step = jax.jit(lambda t: tr.grouped_gemm(t, t, contracting_dims=((0,), (0,))))
    known = jax.jit(lambda t: [group.sum() for group in t.to_list()])
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    for sizes in ([1, 3], [2, 1], [4, 0]):
        bounds = [slice(0, sizes[0]), slice(sizes[0], sum(sizes))]
        for given in (np.array(sizes), jnp.array(sizes)):
            found = step(GroupedTensor.ragged_rows(x, given))
            np.testing.assert_array_equal(found, [x[at].T @ x[at] for at in bounds])
        assert known(GroupedTensor.ragged_rows(x, sizes)) == [x[at].sum() for at in bounds]
    assert step._cache_size() <= 2  # jax counts arguments of numpy by themselves
    assert known._cache_size() == 3


def test_stacks_of_bfloat16(rng):
    """With a contracted axis between free ones: XLA:CPU has no code for such a product of few numbers."""
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((3, 4, 2), (3, 8, 4, 2)))
    out = tr.grouped_gemm(GroupedTensor.stacked(x), GroupedTensor.stacked(w), contracting_dims=((1,), (2,)))
    want = np.einsum("gkm,gnkp->gmnp", np.asarray(x, np.float64), np.asarray(w, np.float64))
    np.testing.assert_allclose(np.asarray(out, np.float64), want, rtol=2**-8, atol=2**-8)
