"""The Triton kernels of the general form: by value in the interpreter, what is planned, and what they compile to."""

import dataclasses
import itertools
import re
import warnings

import grouped_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sweep import sweep

import trencadis as tr
from trencadis import GroupedTensor
from trencadis.backends import triton as backend
from trencadis.backends.triton.layout import Layout
from trencadis.core.decision import PerformanceWarning, Plan, Refusal
from trencadis.core.devices import CARDS, card_for, target_of
from trencadis.core.target import Target
from trencadis.gemm import plan as planning
from trencadis.gemm import triton
from trencadis.gemm.matrices import inside
from trencadis.gemm.problem import Buffer, Dim, GemmProblem, Groups

SEVERAL = [case for case in cases.CASES if sum(case) > 1]
SMALL = Layout(block_m=16, block_n=16, block_k=16, warps=4, stages=2, raster_group=2, programs=2)
A100 = Target(platform="cuda", kind="NVIDIA A100-SXM4-80GB")


# ---------------------------------------------------------------------------------------------------------------------
# By value


@pytest.fixture
def small(monkeypatch):
    """Tiles so small that few entries cross every boundary, of tiles, steps and copies; some rows are too short."""
    pytest.importorskip("triton")
    chosen = triton.plan

    def plan(problem, target, overrides):
        layout = triton.GemmLayout(tile=SMALL, copy_programs=2)
        return dataclasses.replace(chosen(problem, target, overrides), layout=layout)

    monkeypatch.setattr(triton, "plan", plan)
    monkeypatch.setattr(triton, "COPY_BLOCK", 128)
    monkeypatch.setattr(triton, "COPY_WIDTHS", (16, 16))
    monkeypatch.setattr(triton, "CLEAR_BLOCK", 128)
    monkeypatch.setattr(triton, "SHORT", 32)
    monkeypatch.setattr(cases, "UNIFORM", (17, 12, 19))
    monkeypatch.setattr(cases, "TOTAL", 45)
    monkeypatch.setattr(cases, "MOST", 20)


def kernel(*args, **options):
    return cases.gemm(*args, backend="triton", interpret=True, **options)


@pytest.mark.parametrize(
    ("case", "transposes"),
    sweep(itertools.product(SEVERAL, cases.TRANSPOSES), zip(SEVERAL, cases.TRANSPOSES, strict=True)),
    ids=str,
)
def test_equals_a_loop_over_groups_with_poison_elsewhere(case, transposes, small):
    """Forward, added to `out`, and gradients: NaN in unowned entries reaches no sum; unowned results are 0, or kept."""
    ragged = [18, 0, 17, 9], [11, 16, 0, 17], [16, 5, 20, 3]
    sizes = [each if on else [u] * 4 for each, on, u in zip(ragged, case, cases.UNIFORM, strict=True)]
    a, b, old, ct = cases.drawn(sizes, 0)

    @jax.jit
    def call(x, y, old, ct, *sizes):
        out, back = jax.vjp(lambda *xs: kernel(case, transposes, *xs, sizes), x, y, old)
        return out, *back(ct)

    put = lambda which, xs, fill=np.nan: cases.lay(case, transposes, sizes, which, xs, fill)
    found = call(put(0, a), put(1, b), put(2, old, 7), put(2, ct), *map(np.asarray, sizes))
    get = lambda which, x, rest=0.0: cases.take(case, transposes, sizes, which, x, rest)
    cases.check(get(2, found[0], 7), cases.add(cases.product(a, b), old))
    cases.check(get(0, found[1]), cases.product(ct, cases.transposed(b)))
    cases.check(get(1, found[2]), cases.product(cases.transposed(a), ct))
    cases.check(get(2, found[3], np.nan), ct)


@pytest.mark.parametrize(
    ("case", "backend"),
    sweep(
        itertools.product(SEVERAL, ("triton", "xla", "tpu")),
        [(SEVERAL[-1], "triton"), (SEVERAL[-2], "triton"), (SEVERAL[-1], "xla")],
    ),
    ids=str,
)
def test_alpha_beta_and_bias_with_all_gradients(case, backend, small):
    """Of each group its own numbers; beta is 0 where `out` is NaN, and unowned entries of `out` stay."""
    sizes = [
        each if on else [u] * 4
        for each, on, u in zip(([18, 0, 17, 9], [11, 16, 0, 17], [16, 5, 20, 3]), case, cases.UNIFORM, strict=True)
    ]
    a, b, old, ct = cases.drawn(sizes, 1)
    alpha, beta = np.array([2.0, 3.0, -1.0, 0.5], np.float32), np.array([0.0, 1.5, -2.0, 1.0], np.float32)
    bias = None if case[2] else np.random.default_rng(0).normal(size=(4, cases.UNIFORM[2])).astype(np.float32)
    held = [np.full_like(old[0], np.nan), *old[1:]]
    how = {"backend": backend, "interpret": backend != "xla"}

    @jax.jit
    def call(x, y, old, alpha, beta, bias, ct, *sizes):
        fn = lambda x, y, old, alpha, beta, bias: cases.gemm(
            case, (False, True), x, y, old, sizes, alpha=alpha, beta=beta, bias=bias, **how
        )
        out, back = jax.vjp(fn, x, y, old, alpha, beta, bias)
        return out, *back(ct)

    put = lambda which, xs, fill=np.nan: cases.lay(case, (False, True), sizes, which, xs, fill)
    get = lambda which, x, rest=0.0: cases.take(case, (False, True), sizes, which, x, rest)
    given = put(0, a), put(1, b), put(2, held, 7), alpha, beta, bias, put(2, ct)
    out, da, db, d_old, d_alpha, d_beta, d_bias = call(*given, *map(np.asarray, sizes))
    times = lambda xs, by: [x * float(s) for x, s in zip(xs, by, strict=True)]
    rows = [np.zeros(1)] * 4 if bias is None else list(bias)
    cases.check(get(2, out, 7), cases.add(times(cases.product(a, b), alpha), rows, times(old, beta)))
    cases.check(get(0, da), times(cases.product(ct, cases.transposed(b)), alpha))
    cases.check(get(1, db), times(cases.product(cases.transposed(a), ct), alpha))
    cases.check(get(2, d_old, np.nan), times(ct, beta))
    dots = lambda xs: [np.sum(x * y) for x, y in zip(xs, ct, strict=True)]
    np.testing.assert_allclose(d_alpha, dots(cases.product(a, b)), 1e-4, 1e-4)
    np.testing.assert_allclose(d_beta, [0.0, *dots(old)[1:]], 1e-4, 1e-4)
    if bias is not None:
        np.testing.assert_allclose(d_bias, [x.sum(axis=0) for x in ct], 1e-4, 1e-4)


def test_aligned_matrices_are_read_where_they_are(small, rng):
    """Rows of a multiple of 16 bytes; bfloat16, with alpha, and under vmap, where entries follow one another."""
    sizes = [8, 0, 16], [16, 8, 24], [8, 16, 24]
    x, y = (
        jnp.asarray(rng.normal(size=(2, sum(r * c for r, c in zip(*pair, strict=True)))), jnp.bfloat16)
        for pair in (sizes[:2], sizes[1:])
    )
    alpha = jnp.asarray([1.0, 2.0, -0.5])

    def call(x, y):
        lhs, rhs = GroupedTensor.fully_ragged(x, *sizes[:2]), GroupedTensor.fully_ragged(y, *sizes[1:])
        ask = {"backend": "triton", "interpret": True, "preferred_element_type": jnp.float32}
        return tr.grouped_gemm(lhs, rhs, contracting_dims=((1,), (0,)), alpha=alpha, **ask).data

    found = jax.jit(jax.vmap(call))(x, y)
    for got, one, two in zip(found, np.asarray(x, np.float64), np.asarray(y, np.float64), strict=True):
        groups = zip(matrices(one, *sizes[:2]), matrices(two, *sizes[1:]), alpha, strict=True)
        np.testing.assert_allclose(got, np.concatenate([float(s) * (a @ b).ravel() for a, b, s in groups]), 1e-5, 1e-5)


def matrices(flat, rows, columns):
    ends = np.cumsum(np.multiply(rows, columns))[:-1]
    return [x.reshape(shape) for x, *shape in zip(np.split(flat, ends), rows, columns, strict=True)]


def test_sizes_that_do_not_fit_write_nothing_outside():
    """Where traced sizes are wrong, the rows of a flat buffer that lie inside count, and no other."""
    problem = flat_problem([40] * 2)
    groups = Groups(*(np.asarray(x, np.int32) for x in ([0, 1600], [0, 1600], [0, 1600], [40, 99], [40, 40], [40, 40])))
    m, k, n = inside(problem, groups)
    assert (m.tolist(), k.tolist(), n.tolist()) == ([40, 40], [40, 40], [40, 40])


# ---------------------------------------------------------------------------------------------------------------------
# The plan


def flat_problem(sizes, dtype=jnp.bfloat16, transposes=(False, False), out=None, **changes):
    """A problem whose m, k and n are all ragged, with room for square matrices of these sizes."""
    room = sum(size * size for size in sizes)
    dim = Dim(size=room, ragged=True)
    buffers = [
        Buffer(shape=(room,), dtype=jnp.dtype(kind), ragged=(True, True), transposed=transposed)
        for kind, transposed in zip((dtype, dtype, out or dtype), (*transposes, False), strict=True)
    ]
    lhs, rhs, out = buffers
    return GemmProblem(groups=len(sizes), m=dim, k=dim, n=dim, lhs=lhs, rhs=rhs, out=out, **changes)


@pytest.fixture
def installed(monkeypatch):
    """Planning needs no Triton."""
    monkeypatch.setattr(backend, "_missing", lambda: None)


@pytest.mark.parametrize("name", CARDS)
def test_every_card_has_a_kernel(name, installed):
    for sizes in ([300] * 32, [2300] * 32, [5] * 4):
        answer = planning.plan(flat_problem(sizes), target_of(name))
        assert answer.backend == "triton" and answer.layout.tile.programs >= CARDS[name].cores


def test_the_plan_says_what_is_copied(installed):
    every = planning.plan(flat_problem([300] * 32), target_of("h200"))
    assert "32 groups of 300 x 300 x 300 (m, k, n)" in every.because
    assert every.because.endswith("lhs and rhs copied to rows at multiples of 16 bytes")
    rows = Buffer(shape=(4096, 64), dtype=jnp.dtype(jnp.bfloat16), ragged=(True, False))
    dims = {"m": Dim(size=4096, ragged=True), "k": Dim(size=64), "n": Dim(size=4096, ragged=True)}
    out = Buffer(shape=(1 << 20,), dtype=rows.dtype, ragged=(True, True))
    scores = GemmProblem(groups=16, lhs=rows, rhs=rows.flip(), out=out, **dims)
    assert "copied" not in planning.plan(scores, target_of("h200")).because
    assert "lhs copied" in planning.plan(scores.d_lhs(), target_of("h200")).because


@pytest.mark.parametrize(
    ("problem", "target", "reason"),
    [
        (flat_problem([9] * 3), Target(platform="cpu", kind="cpu"), "the triton backend runs on GPUs"),
        (flat_problem([9] * 3), Target(platform="cuda"), "which GPU this is for is not known"),
        (flat_problem([9] * 3), dataclasses.replace(A100, partitioned=True), "cannot partition"),
        (flat_problem([9] * 3, "int16"), A100, "lhs is int16"),
        (flat_problem([9] * 3, "float32", precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32), A100, "precision is"),
        (flat_problem([45000]), A100, "2025000000 entries"),
        (flat_problem([0] * 3), A100, "nothing to multiply"),
    ],
)  # fmt: skip
def test_refusals(problem, target, reason, installed):
    answer = triton.plan(problem, target)
    assert isinstance(answer, Refusal) and re.search(reason, answer.reason)
    assert planning.plan(problem, target).backend == "xla"


def test_operands_that_a_card_does_not_multiply_are_converted(installed):
    chosen = planning.plan(flat_problem([9] * 3, "float8_e4m3fn", out="float32"), A100)
    assert chosen.backend == "triton" and chosen.problem.lhs.dtype == chosen.problem.rhs.dtype == jnp.bfloat16


def test_known_sizes_run_as_the_kernel_too(installed):
    problem = flat_problem([9] * 3).replace(known=Groups(*[(9, 9, 9)] * 6))
    assert planning.plan(problem, A100).backend == "triton"
    assert planning.plan(problem, Target(platform="cuda")).layout.unrolled


def lowered(target, sizes=(3, 4), **options):
    """The program of a product with traced sizes, lowered for a GPU that is not here."""
    dims = jax.ShapeDtypeStruct((len(sizes),), jnp.int32)
    x = jax.ShapeDtypeStruct((99,), jnp.bfloat16)

    def call(x, m, k, n):
        lhs, rhs, out = (GroupedTensor.fully_ragged(x, *pair) for pair in ((m, k), (k, n), (m, n)))
        return tr.grouped_gemm(lhs, rhs, contracting_dims=((1,), (0,)), out=out, **options).data

    with tr.target(target):
        return jax.jit(call).trace(x, dims, dims, dims).lower(lowering_platforms=("cuda",)).as_text()


def test_a_kernel_is_called_unless_xla_is_asked_for():
    pytest.importorskip("triton")
    with warnings.catch_warnings():
        warnings.simplefilter("error", PerformanceWarning)
        assert lowered("a100").count("custom_call @triton_kernel_call") == 3  # two copies
        assert "triton" not in lowered("a100", backend="xla")


def test_without_triton_it_warns(monkeypatch):
    monkeypatch.setattr(backend, "_missing", lambda: Refusal("triton", "Triton does not import", "pip install it"))
    with pytest.warns(PerformanceWarning, match=r"XLA loops instead of a kernel: Triton does not import; pip install"):
        assert "while" in lowered("a100", (1, 2, 3))


def test_why_shows_the_kernel_and_its_figures(installed):
    rows, columns = jnp.ones((64, 8), jnp.bfloat16), jnp.ones((8, 64), jnp.bfloat16)

    def call(x, y, sizes):
        lhs, rhs = GroupedTensor.ragged_rows(x, sizes), GroupedTensor.ragged_cols(y, sizes)
        out = GroupedTensor.fully_ragged(jnp.zeros(2048, jnp.bfloat16), sizes, sizes)
        return tr.grouped_gemm(lhs, rhs, contracting_dims=((1,), (0,)), out=out).data

    text = str(tr.why(call, rows, columns, jax.ShapeDtypeStruct((4,), jnp.int32), target="h200"))
    assert text.count("persistent programs for 4 groups") == 3 and "rhs copied" in text
    assert "not triton: the triton backend runs on GPUs" in str(
        tr.why(call, rows, columns, jax.ShapeDtypeStruct((4,), jnp.int32), target="cpu")
    )


# ---------------------------------------------------------------------------------------------------------------------
# What it compiles to


INSTRUCTIONS = {
    "a100": "mma.sync", "l40s": "mma.sync", "h200": "wgmma.mma_async", "b200": "tcgen05.mma", "rtx5090": "mma.sync",
    "mi300x": "v_mfma", "mi355x": "v_mfma",
}  # fmt: skip
KINDS = [
    ("h200", "bfloat16", (False, False), "bfloat16"), ("h200", "bfloat16", (True, False), "bfloat16"),
    ("a100", "bfloat16", (False, True), "bfloat16"), ("mi300x", "bfloat16", (False, False), "bfloat16"),
    ("l40s", "bfloat16", (False, False), "bfloat16"), ("b200", "bfloat16", (False, False), "bfloat16"),
    ("rtx5090", "bfloat16", (False, False), "bfloat16"), ("mi355x", "bfloat16", (False, False), "bfloat16"),
    ("a100", "float32", (False, False), "float32"), ("h200", "float32", (True, True), "float32"),
    ("a100", "int8", (False, True), "int32"), ("h200", "int8", (False, False), "int32"),
    ("h200", "float8_e4m3fn", (False, True), "float32"), ("h200", "float8_e5m2", (False, False), "float32"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "dtype", "transposes", "out"), sweep(KINDS, KINDS[:4]))
def test_tensor_cores_and_wide_copies(name, dtype, transposes, out):
    """Aligned groups are copied to shared memory 16 bytes at a time, in any order of storage, without a GPU here."""
    pytest.importorskip("triton")
    from trencadis.backends.triton.bridge import compiled

    problem, card = flat_problem([400] * 32, dtype, transposes, out), CARDS[name]
    answer = triton.plan(problem, target_of(name))
    assert isinstance(answer, Plan), answer
    arch = card_for(answer.target).arch
    binary = compiled(triton.gemm_kernel(problem, answer.layout, arch))
    assert INSTRUCTIONS[name] in binary.text and 0 < binary.shared <= card.shared
    if card.platform == "cuda" and dtype == "bfloat16":
        assert "cp.async.cg.shared.global" in binary.text and "ld.global.b16" in binary.text
    assert compiled(triton.copy_kernel(problem, answer.layout, arch, "lhs")).text
