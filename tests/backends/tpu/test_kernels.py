"""Laws of the kernels in layouts so small that few rows cross every boundary: spans, slabs, tiles, chunks, blocks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from poisoned import numbers, rows_problem, spans, spoil, sum_problem

from trencadis.core.devices import CHIPS
from trencadis.core.epilogue import Epilogue

from .interpreted import STRICT, check, races_found, rows_layout, run, sum_layout, tricky

pytestmark = pytest.mark.core

HIGHEST = jax.lax.Precision.HIGHEST


def relu(z):
    return np.maximum(z, 0) if isinstance(z, np.ndarray) else jnp.maximum(z, 0)


def scaled(ends=Epilogue(), by_row=True):
    return dataclasses.replace(ends, by_row=by_row, by_column=True)


BIAS, MORE = Epilogue(bias=np.dtype("float32"), activation=relu), Epilogue(accumulate=True)
HALF, BYTE = dict(slab=16, heights=(32, 64)), dict(slab=32, grain=32, heights=(32, 64))

CASES = {
    # a window; the last block has one chunk less; m and k are multiples of nothing
    "rows": (rows_problem(70, 60, 384, 6, local=4), rows_layout(out_slots=2, x_slots=3)),
    "rows, single numbers": (rows_problem(37, 1, 1, 6, transpose_rhs=True), rows_layout(wide=1, chunk=1)),
    "rows, bias": (
        rows_problem(100, 128, 200, 6, "bf16 bf16 bf16", epilogue=BIAS),
        rows_layout(wide=200, chunk=200, **HALF),
    ),
    # the last chunk is smaller than the others; a block that both cores had would be added twice
    "rows, existing_out": (
        rows_problem(61, 128, 640, 5, local=3, epilogue=MORE),
        rows_layout(wide=512, chunk=256, cores=2),
    ),
    "rows, int8": (
        rows_problem(96, 130, 384, 6, "s8 s8 s32", transpose_rhs=True),
        rows_layout(wide=128, **BYTE),
    ),
    "rows, batch": (
        rows_problem(45, 96, 256, 5, "bf16 f32 bf16", local=4, batch=2, rhs_batch=2, precision=HIGHEST),
        rows_layout(grain=16, **HALF),
    ),
    "rows, batch that shares weights": (
        rows_problem(37, 96, 256, 4, "s8 bf16 f32", local=3, batch=2, transpose_rhs=True),
        rows_layout(wide=128, **BYTE),
    ),
    # tiles begin inside lines of 128 scales; two cores
    "rows, int8 with scales": (
        rows_problem(200, 130, 384, 6, "s8 s8 f32", local=4, epilogue=scaled(BIAS)),
        rows_layout(wide=128, cores=2, slab=32, grain=32, heights=(32, 160)),
    ),
    "rows, float8 weights": (
        rows_problem(61, 128, 256, 5, "bf16 e4 f32", transpose_rhs=True, epilogue=scaled(MORE, by_row=False)),
        rows_layout(wide=128, **HALF),
    ),
    "rows, int4 weights": (
        rows_problem(61, 130, 200, 5, "s8 s4 f32", epilogue=scaled(by_row=False)),
        rows_layout(wide=200, chunk=200, **BYTE),
    ),
    # a window; the last block of k, the last block of n and its last chunk are smaller than the others; steps are
    # taller than slabs, so that a span's last step is filled up with rows that were never copied
    "contraction": (
        sum_problem(90, 384, 640, 6, local=4),
        sum_layout(deep=256, wide=512, chunk=256, heights=(32,), fine=16, k_outside=False, cores=2),
    ),
    "contraction, single numbers": (
        sum_problem(37, 1, 1, 6, epilogue=MORE),
        sum_layout(deep=1, wide=1, chunk=1, fine=8, heights=(16,)),
    ),
    "contraction, stored [k, m]": (
        sum_problem(700, 60, 200, 6, "bf16 bf16 bf16", transpose_lhs=True),
        sum_layout(slab=128, grain=128, heights=(256,), fine=128, deep=60, wide=200, chunk=200, out_slots=4),
    ),
    "contraction, int8": (
        sum_problem(110, 128, 256, 6, "s8 s8 s32", epilogue=MORE),
        sum_layout(slab=32, grain=32, fine=64, heights=(128,)),
    ),
    "contraction, float8 with scales": (
        sum_problem(110, 384, 640, 6, "e4 e5 f32", local=4, epilogue=scaled(MORE)),
        sum_layout(slab=32, grain=32, fine=64, heights=(128,), deep=256, wide=512, chunk=256, cores=2),
    ),
    "contraction, batch": (
        sum_problem(75, 128, 256, 5, "bf16 f32 f32", local=4, batch=2, precision=HIGHEST),
        sum_layout(slab=16, fine=32, wide=128),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def clean():
    """What an exception leaves in the interpreter is not for the next test."""
    yield
    pltpu.reset_tpu_interpret_mode_state()


def windows(problem):
    """First groups: the last window, one in the middle, and some that reach out of the groups."""
    outside = problem.groups - problem.local_groups
    return [outside, outside // 2, 0, -1, problem.groups - 1, outside] if outside else [0]


@pytest.mark.parametrize("name", CASES)
def test_equals_its_meaning_whatever_others_hold(name):
    """NaN and Inf in all that is somebody else's or nobody's; what nobody owns is kept to the bit."""
    problem, layout = CASES[name]
    for i, sizes in enumerate(tricky(problem, layout.slab, seed=len(name))):
        first = np.roll(np.resize(windows(problem), max(6, problem.batch)), -i)[: problem.batch]
        clean = numbers(problem, i)
        lhs, rhs, *extras = spoil(problem, sizes, first, clean, i % problem.spans, (np.nan, np.inf)[i % 2])
        got = np.asarray(check(problem, layout, lhs, rhs, sizes, first, *extras))
        if problem.epilogue.accumulate and got.ndim == 2:
            owned = [row for span in spans(problem, sizes, first) for row in span]
            rest = np.setdiff1d(np.arange(problem.rows), owned)
            assert got[rest].tobytes() == extras[-1][rest].tobytes()


def test_int8_is_exact_where_it_is_multiplied_as_bfloat16():
    """A sum of more than 2**24 is odd: float32 would round it."""
    problem, layout = rows_problem(40, 1300, 128, 2, "s8 s8 s32"), rows_layout(chip=CHIPS["v4"], wide=128, **BYTE)
    lhs, rhs = np.full((40, 1300), -128, np.int8), np.full((2, 1300, 128), -128, np.int8)
    lhs[:, 0] = rhs[:, 0] = 1
    got = run(problem, layout, lhs, rhs, np.array([[23, 17]], np.int32), np.zeros(1, np.int32))
    np.testing.assert_array_equal(got, 1299 * 2**14 + 1)


def test_cores_do_not_meet():
    """Two cores at the same time, and the detector of races between them; slow, so one run."""
    problem, layout = rows_problem(20, 128, 256, 3), rows_layout(heights=(16,), wide=128, out_slots=2, cores=2)
    params = dataclasses.replace(STRICT, num_cores_or_threads=2)
    parallel = pltpu.CompilerParams(dimension_semantics=("parallel",))
    check(problem, layout, *numbers(problem, 0), [5, 6, 7], [0], params=params, compiler_params=parallel)


def test_a_race_would_be_found():
    """A copy that is not waited for before its target is read."""

    def body(x, y, buffer, sem):
        copy = pltpu.make_async_copy(x, buffer, sem)
        copy.start()
        y[...] = buffer[...]
        copy.wait()

    shape = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    racy = pl.pallas_call(
        body, out_shape=shape, in_specs=[pl.BlockSpec(memory_space=pl.ANY)], interpret=STRICT,
        scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32), pltpu.SemaphoreType.DMA],
    )  # fmt: skip
    try:
        jax.block_until_ready(racy(jnp.ones((8, 128))))
    except Exception as error:  # since jax 0.11
        assert "race" in str(error).lower()
    else:
        assert races_found()
