"""Laws of the kernels, interpreted in layouts so small that few rows cross the boundaries of all tiles and blocks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from poisoned import numbers, rows_problem, spans, spoil, sum_problem
from sweep import sweep

from trencadis.core.devices import CHIPS
from trencadis.core.epilogue import Epilogue

from .interpreted import STRICT, boundary_sizes, check, contraction_layout, races_found, rows_layout, run

pytestmark = pytest.mark.core

HIGHEST = jax.lax.Precision.HIGHEST


def relu(z):
    return np.maximum(z, 0) if isinstance(z, np.ndarray) else jnp.maximum(z, 0)


def scaled(epilogue=Epilogue(), by_row=True):
    return dataclasses.replace(epilogue, by_row=by_row, by_column=True)


def along_k(k, n=1, scales="float32", **steps):
    return Epilogue(by_column=True, column_block=(k, n), column_scales=np.dtype(jnp.dtype(scales)), **steps)


BIAS, ACCUMULATE = Epilogue(bias=np.dtype("float32"), activation=relu), Epilogue(accumulate=True)
BITS16, BITS8 = dict(sublane_tile=16, heights=(32, 64)), dict(sublane_tile=32, dma_align=32, heights=(32, 64))
MOVED = dict(sublane_tile=16, dma_align=32, heights=(32, 48))  # 8-bit rows start between the rows at which copies can

CASES = {
    # a window; the last column block has one chunk less; m and k are not aligned
    "rows": (rows_problem(70, 60, 384, 6, local=4), rows_layout(out_buffers=2, lhs_buffers=3)),
    "rows, single numbers": (rows_problem(37, 1, 1, 6, transpose_rhs=True), rows_layout(block_n=1, chunk=1)),
    "rows, bias": (
        rows_problem(100, 128, 200, 6, "bf16 bf16 bf16", epilogue=BIAS),
        rows_layout(block_n=200, chunk=200, **BITS16),
    ),
    # the last chunk is smaller than the others; a column block that both cores computed would be added twice
    "rows, existing_out": (
        rows_problem(61, 128, 640, 5, local=3, epilogue=ACCUMULATE),
        rows_layout(block_n=512, chunk=256, cores=2),
    ),
    "rows, int8": (
        rows_problem(96, 130, 384, 6, "s8 s8 s32", transpose_rhs=True),
        rows_layout(block_n=128, **BITS8),
    ),
    "rows, batch": (
        rows_problem(45, 96, 256, 5, "bf16 f32 bf16", local=4, batch=2, rhs_batch=2, precision=HIGHEST),
        rows_layout(dma_align=16, **BITS16),
    ),
    "rows, batch that shares weights": (
        rows_problem(37, 96, 256, 4, "s8 bf16 f32", local=3, batch=2, transpose_rhs=True),
        rows_layout(block_n=128, **BITS8),
    ),
    # row tiles start inside of lane vectors of 128 scales; two cores
    "rows, int8 with scales": (
        rows_problem(200, 130, 384, 6, "s8 s8 f32", local=4, epilogue=scaled(BIAS)),
        rows_layout(block_n=128, cores=2, sublane_tile=32, dma_align=32, heights=(32, 160)),
    ),
    # a row tile is taller than the tile of the dtype, and the last one is read to the end of the operand
    "rows, float8 that is moved": (
        rows_problem(93, 130, 256, 5, "e4 e4 f32", local=4, epilogue=scaled(BIAS)),
        rows_layout(block_n=128, cores=2, lhs_buffers=3, **MOVED),
    ),
    "rows, int8 that is moved": (
        rows_problem(93, 130, 384, 6, "s8 s8 s32"), rows_layout(**(MOVED | dict(sublane_tile=8))),
    ),
    "rows, float8 weights": (
        rows_problem(61, 128, 256, 5, "bf16 e4 f32", transpose_rhs=True, epilogue=scaled(ACCUMULATE, by_row=False)),
        rows_layout(block_n=128, **BITS16),
    ),
    "rows, int4 weights": (
        rows_problem(61, 130, 200, 5, "s8 s4 f32", epilogue=scaled(by_row=False)),
        rows_layout(block_n=200, chunk=200, **BITS8),
    ),
    # the last block of scales and the last native tile of weights are not whole; the last chunk is smaller
    "rows, mxfp4": (
        rows_problem(61, 592, 384, 5, "bf16 f4 f32", local=4, epilogue=along_k(32, scales="float8_e8m0fnu")),
        rows_layout(block_n=256, chunk=256, cores=2, weight_parts=1, **BITS16),
    ),
    "rows, nvfp4 on a chip that multiplies no bfloat16 vectors": (
        rows_problem(61, 160, 200, 5, "bf16 f4 bf16", epilogue=along_k(16, scales="float8_e4m3fn", by_row=True)),
        rows_layout(block_n=200, chunk=200, chip=CHIPS["v5e"], weight_parts=1, **BITS16),
    ),
    "rows, mxfp8": (
        rows_problem(61, 128, 256, 5, "bf16 e4 f32", epilogue=along_k(32, scales="float8_e8m0fnu", accumulate=True)),
        rows_layout(block_n=128, weight_parts=1, **BITS16),
    ),
    "rows, int4 weights with scales along k": (
        rows_problem(61, 320, 256, 5, "bf16 s4 f32", transpose_rhs=True, epilogue=along_k(128)),
        rows_layout(block_n=128, **BITS16),
    ),
    "rows, mxfp4 stored [g, n, k]": (
        rows_problem(61, 128, 128, 5, "bf16 f4 f32", transpose_rhs=True, epilogue=along_k(32, scales="float8_e8m0fnu")),
        rows_layout(block_n=128, **BITS16),
    ),
    "rows, int4 weights with short blocks of scales": (
        rows_problem(61, 200, 256, 5, "bf16 s4 f32", epilogue=along_k(32, bias=np.dtype("float32"), activation=relu)),
        rows_layout(block_n=128, **BITS16),
    ),
    "rows, float8 with square blocks of scales": (
        rows_problem(61, 256, 384, 5, "e4 e4 f32", epilogue=along_k(128, 128, by_row=True)),
        rows_layout(block_n=256, **BITS8),
    ),
    # the last chunk has fewer scales than the others; two chunks of a column block
    "rows, float8 with square blocks of scales that the kernel repeats": (
        rows_problem(61, 256, 640, 5, "bf16 e4 f32", epilogue=along_k(128, 128)),
        rows_layout(block_n=512, chunk=256, **BITS16),
    ),
    "rows, square blocks of scales that reach over chunks": (
        rows_problem(61, 128, 384, 5, "bf16 s8 f32", epilogue=along_k(64, 96)),
        rows_layout(block_n=256, **BITS16),
    ),
    "rows, scaled weights in two parts": (
        rows_problem(61, 592, 256, 5, "bf16 s4 f32", local=4, epilogue=along_k(32, bias=np.dtype("float32"))),
        rows_layout(block_n=128, weight_parts=2, **BITS16),
    ),
    "rows, scaled weights that are rounded": (
        rows_problem(61, 592, 256, 5, "bf16 s4 bf16", local=4, epilogue=along_k(32)),
        rows_layout(block_n=128, weight_parts=1, **BITS16),
    ),
    "rows, scaled weights that are rounded, on a chip that multiplies no bfloat16 vectors": (
        rows_problem(61, 192, 256, 5, "bf16 s8 bf16", epilogue=along_k(64, 64)),
        rows_layout(block_n=128, chip=CHIPS["v5e"], weight_parts=1, **BITS16),
    ),
    "rows, scaled float8 weights that are rounded": (
        rows_problem(61, 192, 256, 5, "bf16 e4 bf16", epilogue=along_k(128, 128)),
        rows_layout(block_n=128, chip=CHIPS["v7x"], weight_parts=1, **BITS16),
    ),
    "rows, scaled float8 weights in two parts": (
        rows_problem(61, 192, 256, 5, "e4 e4 f32", epilogue=along_k(64, 64, by_row=True)),
        rows_layout(block_n=128, weight_parts=2, **MOVED),
    ),
    # a window; the last block of k, the last block of n and its last chunk are smaller than the others; a step has more
    # rows than a sublane tile, so that the last step of a span is padded with rows that were never copied
    "contraction": (
        sum_problem(90, 384, 640, 6, local=4),
        contraction_layout(block_k=256, block_n=512, chunk=256, heights=(32,), step_m=16, k_outer=False, cores=2),
    ),
    "contraction, single numbers": (
        sum_problem(37, 1, 1, 6, epilogue=ACCUMULATE),
        contraction_layout(block_k=1, block_n=1, chunk=1, step_m=8, heights=(16,)),
    ),
    "contraction, stored [k, m]": (
        sum_problem(700, 60, 200, 6, "bf16 bf16 bf16", transpose_lhs=True),
        contraction_layout(
            sublane_tile=128, dma_align=128, heights=(256,), step_m=128, block_k=60, block_n=200, chunk=200,
            out_buffers=4,
        ),
    ),
    "contraction, int8": (
        sum_problem(110, 128, 256, 6, "s8 s8 s32", epilogue=ACCUMULATE),
        contraction_layout(sublane_tile=32, dma_align=32, step_m=64, heights=(128,)),
    ),
    "contraction, float8 with scales": (
        sum_problem(110, 384, 640, 6, "e4 e5 f32", local=4, epilogue=scaled(ACCUMULATE)),
        contraction_layout(
            sublane_tile=32, dma_align=32, step_m=64, heights=(128,), block_k=256, block_n=512, chunk=256, cores=2
        ),
    ),
    # rows are moved to multiples of a sublane, of four; the operands are of one width, and of different ones
    "contraction, int8 that is moved": (
        sum_problem(110, 128, 256, 6, "s8 s8 s32", local=4, epilogue=ACCUMULATE),
        contraction_layout(sublane_tile=4, dma_align=32, step_m=64, heights=(128,)),
    ),
    "contraction, float8 that is moved": (
        sum_problem(110, 384, 640, 6, "e4 e4 f32", epilogue=scaled()),
        contraction_layout(
            sublane_tile=4, dma_align=32, step_m=32, heights=(64,), block_k=256, block_n=512, chunk=256, cores=2
        ),
    ),
    "contraction, float8 beside wider rows": (
        sum_problem(75, 128, 256, 5, "f32 e4 f32", local=4, batch=2),
        contraction_layout(sublane_tile=8, dma_align=32, step_m=32, block_n=128),
    ),
    "contraction, batch": (
        sum_problem(75, 128, 256, 5, "bf16 f32 f32", local=4, batch=2, precision=HIGHEST),
        contraction_layout(sublane_tile=16, step_m=32, block_n=128),
    ),
}  # fmt: skip
DEFAULT = [
    "rows, bias", "rows, existing_out", "rows, mxfp4", "rows, int4 weights with scales along k",
    "rows, float8 that is moved", "contraction", "contraction, batch", "contraction, float8 that is moved",
]  # fmt: skip


@pytest.fixture(autouse=True)
def clean():
    """Reset the interpreter, in which an exception may leave state behind for the next test."""
    yield
    pltpu.reset_tpu_interpret_mode_state()


def windows(problem):
    """First groups: of the last window, of one in the middle, and of some that reach outside of the groups."""
    outside = problem.groups - problem.local_groups
    return [outside, outside // 2, 0, -1, problem.groups - 1, outside] if outside else [0]


@pytest.mark.once
@pytest.mark.parametrize("name", sweep(CASES, DEFAULT))
def test_equals_float64_with_poison_in_other_groups(name):
    """NaN and Inf in the rows and weights of another group and in unowned rows, which are kept bit by bit."""
    problem, layout = CASES[name]
    for i, sizes in enumerate(boundary_sizes(problem, layout.sublane_tile, seed=len(name))):
        first = np.roll(np.resize(windows(problem), max(6, problem.batch)), -i)[: problem.batch]
        clean = numbers(problem, i)
        lhs, rhs, *extras = spoil(problem, sizes, first, clean, i % problem.spans, (np.nan, np.inf)[i % 2])
        got = np.asarray(check(problem, layout, lhs, rhs, sizes, first, *extras))
        if problem.epilogue.accumulate and got.ndim == 2:
            owned = [row for span in spans(problem, sizes, first) for row in span]
            rest = np.setdiff1d(np.arange(problem.rows), owned)
            assert got[rest].tobytes() == extras[-1][rest].tobytes()


def test_int8_is_exact_where_it_is_multiplied_as_bfloat16():
    """The sum is odd and above 2**24: float32 would round it."""
    problem, layout = rows_problem(40, 1300, 128, 2, "s8 s8 s32"), rows_layout(chip=CHIPS["v4"], block_n=128, **BITS8)
    lhs, rhs = np.full((40, 1300), -128, np.int8), np.full((2, 1300, 128), -128, np.int8)
    lhs[:, 0] = rhs[:, 0] = 1
    got = run(problem, layout, lhs, rhs, np.array([[23, 17]], np.int32), np.zeros(1, np.int32))
    np.testing.assert_array_equal(got, 1299 * 2**14 + 1)


def test_two_cores_do_not_race():
    """Both cores at the same time, with the detection of races between them; slow, so one run."""
    problem, layout = rows_problem(20, 128, 256, 3), rows_layout(heights=(16,), block_n=128, out_buffers=2, cores=2)
    params = dataclasses.replace(STRICT, num_cores_or_threads=2)
    parallel = pltpu.CompilerParams(dimension_semantics=("parallel",))
    check(problem, layout, *numbers(problem, 0), [5, 6, 7], [0], params=params, compiler_params=parallel)


def test_the_interpreter_finds_a_race():
    """A copy whose target is read before the wait."""

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
