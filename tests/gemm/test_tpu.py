"""The TPU kernels of the general form: values in the interpreter, what they compile to, and what the plan says."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax._src.pallas.mosaic.interpret import race_detection_state
from jax.experimental.pallas import tpu as pltpu
from sweep import sweep

import trencadis as tr
from tests.backends.tpu.ahead import compiled, kernels
from trencadis import GroupedTensor, PerformanceWarning
from trencadis.backends.tpu.ragged.multiply import Parts
from trencadis.core.decision import Plan, Refusal
from trencadis.core.devices import CHIPS, target_of
from trencadis.core.target import Target
from trencadis.gemm import plan as planning
from trencadis.gemm import tpu
from trencadis.gemm.problem import Buffer, Dim, GemmProblem, Groups

pytestmark = pytest.mark.core

STRICT = pltpu.InterpretParams(uninitialized_memory="nan", out_of_bounds_reads="raise")
SMALL = tpu.GemmLayout(
    parts=Parts(granule=128, tile_m=1, tile_n=1, m=(1,), n=(1,), k=(1,)), longest=300, window=16384
)  # a tile of one block: several tiles and steps in a group
# a group of two row blocks and two steps along k, empty ones, a sum of no terms, and one whose rows are too long
M, K, N = [2, 0, 130, 4, 1], [129, 3, 2, 0, 1], [1, 2, 3, 5, 301]


def flat(matrices, room, dtype, transposed=False):
    """The matrices one after the other, and NaN after the last, in a buffer of `room` entries."""
    entries = np.concatenate([(x.T if transposed else x).ravel() for x in matrices])
    return np.pad(entries, (0, room - entries.size), constant_values=np.nan).astype(dtype)


def starts(rows, columns):
    entries = np.multiply(rows, columns)
    return (np.cumsum(entries) - entries).astype(np.int32)


def drawn(rng, dtype, transposes, **epilogue):
    """A problem whose m, k and n are all ragged, its operands, and its meaning in float64."""
    draw = lambda *shape: rng.normal(size=shape).astype(dtype)
    lefts, rights = [draw(*s) for s in zip(M, K, strict=True)], [draw(*s) for s in zip(K, N, strict=True)]
    rooms = 777, 700, 1100
    dim, names = Dim(size=max(rooms), ragged=True), ("lhs", "rhs", "out")
    buffers = {
        name: Buffer(shape=(room,), dtype=np.dtype(dtype), ragged=(True, True), transposed=transposed)
        for name, room, transposed in zip(names, rooms, transposes, strict=True)
    }
    wide = np.dtype(np.float32) if epilogue.get("alpha") else None
    problem = GemmProblem(groups=len(M), m=dim, k=dim, n=dim, wide=wide, **buffers, **epilogue)
    groups = Groups(starts(M, K), starts(K, N), starts(M, N), *(np.asarray(x, np.int32) for x in (M, K, N)))
    existing = draw(rooms[2])
    existing[: 130 * 3] = np.nan if problem.beta else 1  # beta is 0 there
    alpha, beta = draw(len(M)).astype(np.float32), np.asarray([1, 2, 0, 3, 1], np.float32)
    given = [x for x, on in ((existing, problem.accumulate), (alpha, problem.alpha), (beta, problem.beta)) if on]
    if problem.beta:
        existing[: starts(M, N)[2]] = existing[starts(M, N)[3] :][:1]
    want = existing.astype(np.float64) if problem.accumulate else np.zeros(rooms[2])
    for i, (x, y) in enumerate(zip(lefts, rights, strict=True)):
        product = x.astype(np.float64) @ y.astype(np.float64) * (alpha[i] if problem.alpha else 1)
        product = (product.T if transposes[2] else product).ravel()
        at = slice(groups.out[i], groups.out[i] + product.size)
        kept = (want[at] * beta[i] if beta[i] else 0) if problem.beta else want[at]
        want[at] = product + kept
    operands = [flat(lefts, 777, dtype, transposes[0]), flat(rights, 700, dtype, transposes[1]), *groups, *given]
    return problem, operands, want


KINDS = [
    ("bfloat16", (False, False, False), {"accumulate": True, "alpha": True, "beta": True}),
    ("float32", (True, True, True), {}),
    ("bfloat16", (True, False, False), {}),
    ("bfloat16", (False, True, False), {"accumulate": True}),
    ("float32", (False, False, True), {"accumulate": True}),
]


@pytest.mark.parametrize(("dtype", "transposes", "epilogue"), sweep(KINDS, KINDS[:1]))
def test_values_are_those_of_a_loop(dtype, transposes, epilogue, rng):
    """Nothing leaks: unowned entries are NaN, and uninitialized memory is too; rows that are too long go to XLA."""
    problem, operands, want = drawn(rng, jnp.dtype(dtype), transposes, **epilogue)

    def call(*operands):
        lhs, rhs, *rest = operands
        out, left = tpu.execute(problem, SMALL, *operands, interpret=STRICT)
        return tpu.with_loops(problem, Target(platform="cpu"), out, left, lhs, rhs, *rest), left

    out, left = jax.jit(call)(*operands)
    assert left.tolist() == [False, False, False, False, not all(transposes[1:])]  # n of the last group is a row
    out, exact = np.asarray(out, np.float64), 1e-5 if dtype == "float32" else 2**-7
    np.testing.assert_allclose(out, want, rtol=exact, atol=40 * exact)


@pytest.mark.sweep
def test_there_is_no_race(rng, monkeypatch):
    """A slice with a stride, which the detector does not know, counts as all that it spans."""
    plain = race_detection_state._slices_overlap
    whole = lambda x: slice(x.start, x.stop) if isinstance(x, slice) and x.step else x
    monkeypatch.setattr(race_detection_state, "_slices_overlap", lambda a, b: plain(whole(a), whole(b)))
    problem, operands, _ = drawn(rng, jnp.dtype("bfloat16"), (False,) * 3)
    strict = dataclasses.replace(STRICT, detect_races=True)
    jax.block_until_ready(jax.jit(lambda *x: tpu.execute(problem, SMALL, *x, interpret=strict))(*operands))
    assert not interpreter.races.races_found


# ---------------------------------------------------------------------------------------------------------------------
# The plan


def flat_problem(sizes, dtype="bfloat16", **changes):
    """A problem whose m, k and n are all ragged, with room for square matrices of these sizes."""
    room = sum(size * size for size in sizes)
    dim, one = Dim(size=room, ragged=True), Buffer(shape=(room,), dtype=jnp.dtype(dtype), ragged=(True, True))
    return GemmProblem(groups=len(sizes), m=dim, k=dim, n=dim, lhs=one, rhs=one, out=one, **changes)


V6E = target_of("v6e")


@pytest.mark.parametrize(
    ("problem", "target", "reason"),
    [
        (flat_problem([9] * 3), Target(platform="cpu", kind="cpu"), "it runs on TPU"),
        (flat_problem([9] * 3), dataclasses.replace(V6E, partitioned=True), "partition"),
        (flat_problem([9] * 3, "int16"), V6E, "lhs is int16"),
        (flat_problem([9] * 3, "float32", precision=jax.lax.Precision.HIGH), V6E, "precision is"),
        (flat_problem([9] * 9000), V6E, "9000 groups are too many"),
        (flat_problem([45000]), V6E, "2025000000 entries"),
        (flat_problem([0] * 3), V6E, "nothing to multiply"),
    ],
)
def test_refusals(problem, target, reason):
    answer = tpu.plan(problem, target)
    assert isinstance(answer, Refusal) and re.search(reason, answer.reason)
    assert planning.plan(problem, target).backend == "xla"


@pytest.mark.parametrize("chip", CHIPS)
def test_the_layout_fits_into_vmem(chip):
    for dtype, size in (("bfloat16", 2304), ("float32", 2304), ("bfloat16", 40)):
        problem = flat_problem([size] * 32, dtype)
        answer = tpu.plan(problem, target_of(chip))
        assert isinstance(answer, Plan) and answer.layout.parts.granule == (256 if size > 40 else 128)
        scratch = tpu.multiplier(problem, answer.layout, tpu.room_for(problem.out, 32, answer.layout)).scratch()
        held = sum(np.prod(x.shape) * 4 for x in scratch.values() if getattr(x, "memory_space", None) == pltpu.VMEM)
        assert held <= 0.8 * CHIPS[chip].vmem


def test_groups_that_do_not_fit_are_left_to_loops():
    """A column of many rows would take 128 times its entries; the others are computed by the kernel."""
    problem = flat_problem([40] * 3)
    groups = Groups(*(jnp.asarray(x, jnp.int32) for x in ([0, 9, 4000], [0, 9, 18], [0, 9, 18],
                                                          [3, 3990, 20], [3, 1, 20], [3, 1, 20])))  # fmt: skip
    found = tpu.tables(problem, tpu.layout_for(problem, CHIPS["v6e"]), groups)
    assert found.left.tolist() == [False, True, False]
    assert found.products[:3].tolist() == [[1, 0, 1]] * 3


def call(x, m, k, n, **options):
    lhs, rhs, out = (GroupedTensor.fully_ragged(x, *pair) for pair in ((m, k), (k, n), (m, n)))
    return tr.grouped_gemm(lhs, rhs, contracting_dims=((1,), (0,)), out=out, **options).data


@pytest.mark.parametrize("chip", sweep(["v5e", "v5p", "v6e", "v7x"], ["v5e"]))
def test_compiles_to_kernels_and_a_condition(chip):
    """Two copies to blocks, the products, and the results; the loops are behind a condition. There is no warning."""
    sizes = ((3,), "int32")
    text = compiled(CHIPS[chip], call, ((3000,), "bfloat16"), sizes, sizes, sizes)
    assert sorted(kernels(text)) == ["trencadis_align", "trencadis_align", "trencadis_collect", "trencadis_ragged"]
    assert "conditional" in text


def test_it_warns_where_there_is_no_kernel():
    struct = jax.ShapeDtypeStruct((99,), jnp.int16), *[jax.ShapeDtypeStruct((2,), jnp.int32)] * 3
    with tr.target("v6e"), pytest.warns(PerformanceWarning, match="XLA loops instead of a kernel: lhs is int16"):
        jax.jit(call).trace(*struct).lower(lowering_platforms=("tpu",))


def test_why_shows_the_kernels():
    struct = jax.ShapeDtypeStruct((9999,), jnp.bfloat16), *[jax.ShapeDtypeStruct((4,), jnp.int32)] * 3
    text = str(tr.why(call, *struct, target="v6e"))
    assert text.count("copied to and from blocks of 128 x 128") == 3
    assert "not triton: it runs on GPUs" in text
