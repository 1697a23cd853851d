"""Precise products of float32 in bfloat16 passes, and float16, which XLA converts: values, poison, and compiles."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import poisoned
import pytest
from poisoned import numbers, rows_problem, spoil, sum_problem
from sweep import marked, sweep

import trencadis as tr
from trencadis.backends.tpu.passes import passes, precision_of, without_float16
from trencadis.core.devices import CHIPS
from trencadis.core.epilogue import Epilogue

from .ahead import compiled, kernels
from .interpreted import contraction_layout, rows_layout, run

pytestmark = [pytest.mark.core, pytest.mark.once]

HIGH, HIGHEST, DEFAULT = jax.lax.Precision.HIGH, jax.lax.Precision.HIGHEST, jax.lax.Precision.DEFAULT
ALGORITHMS = jax.lax.DotAlgorithmPreset
SIZES, FIRST = np.array([[10, 20, 7, 13, 3, 5]], np.int32), np.array([1], np.int32)


@pytest.mark.parametrize(
    ("kinds", "precision", "count"),
    [
        ("f32 f32", DEFAULT, 1),
        ("f32 f32", HIGH, 3),
        ("f32 f32", HIGHEST, 6),
        ("bf16 f32", HIGH, 2),
        ("f32 bf16", HIGHEST, 3),
        ("f32 s8", HIGHEST, 3),
        ("bf16 bf16", HIGHEST, 1),
        ("f16 f16", DEFAULT, 1),
        ("f16 f16", HIGHEST, 3),
        ("f16 bf16", HIGH, 2),
        ("f16 f32", HIGHEST, 6),
        ("f32 f32", (HIGH, DEFAULT), 3),
        ("f32 f32", ALGORITHMS.BF16_BF16_F32_X3, 3),
        ("f32 f32", "BF16_BF16_F32_X6", 6),
    ],
)
def test_the_passes_of_each_precision(kinds, precision, count):
    asked = rows_problem(64, 128, 128, 2, f"{kinds} f32", precision=precision)
    problem = without_float16(asked)
    assert len(passes(problem.replace(precision=precision_of(problem)))) == count


@pytest.mark.parametrize("form", ["rows", "contraction"])
@pytest.mark.parametrize(
    ("kinds", "precision", "limit"),
    [
        ("f32 f32", HIGH, 1.5e-5),
        ("f32 f32", HIGHEST, 1e-6),
        marked(("bf16 f32", HIGH, 1.5e-5)),
        marked(("f32 bf16", HIGHEST, 1e-6)),
    ],
)
def test_parts_hold_the_bits_and_keep_poison_apart(form, kinds, precision, limit):
    """An infinity gives what it gives in one pass, though the parts after its first are NaN and meet zeros."""
    if form == "rows":
        problem = rows_problem(70, 96, 256, 6, f"{kinds} f32", local=4, precision=precision)
        layout = rows_layout(block_n=128, sublane_tile=16, heights=(32, 64))
    else:
        problem = sum_problem(70, 200, 128, 6, f"{kinds} f32", local=4, precision=precision)
        layout = contraction_layout(sublane_tile=16, heights=(64,), block_k=200, block_n=128, step_m=32)
    operands = numbers(problem, 0)
    for poison in (None, np.nan, np.inf):
        given = operands if poison is None else spoil(problem, SIZES, FIRST, operands, 1, poison)
        got = np.asarray(run(problem, layout, *given[:2], SIZES, FIRST), np.float64)
        with np.errstate(invalid="ignore"):
            want = poisoned.meaning(problem, *given[:2], SIZES, FIRST)
        finite = np.isfinite(want)
        assert np.abs(got[finite] - want[finite]).max() <= limit * np.abs(want[finite]).max()
        np.testing.assert_array_equal(got[~finite], want[~finite])


@pytest.mark.parametrize("chip", sweep(CHIPS, ["v4"]))
def test_float16_and_high_precision_compile_to_a_kernel(chip):
    cases = [("rows", "float16", None), ("contraction", "float32", "high"), ("rows", "float32", "highest")]
    for form, dtype, precision in cases:
        options = dict(precision=precision, backend="tpu")
        if form == "rows":
            fn = functools.partial(tr.grouped_matmul, preferred_element_type=jnp.dtype(dtype), **options)
            shapes = [((256, 128), dtype), ((4, 128, 256), dtype)]
        else:
            fn = functools.partial(tr.transposed_grouped_matmul, preferred_element_type=jnp.dtype(dtype), **options)
            shapes = [((128, 256), dtype), ((256, 256), dtype)]
        assert kernels(compiled(CHIPS[chip], fn, *shapes, ((4,), "int32"))) == [f"trencadis_{form}"]


@pytest.mark.parametrize("precision", [None, "high"])
def test_float16_operands_results_and_bias(precision, rng):
    """They are rounded to bfloat16 by default, and not at all with a higher precision."""
    m, k, n, sizes = 40, 64, 32, np.array([7, 0, 30], np.int32)
    x, w, bias = (rng.normal(size=shape).astype(np.float16) for shape in ((m, k), (3, k, n), (3, n)))
    options = dict(precision=precision, bias=bias, activation=jnp.tanh, backend="tpu", interpret=True)
    got = tr.grouped_matmul(x, w, sizes, jnp.float16, **options)
    assert got.dtype == jnp.float16
    problem = rows_problem(m, k, n, 3, "f16 f16 f16", epilogue=Epilogue(bias=np.dtype("float16"), activation=np.tanh))
    want = poisoned.meaning(problem, x, w, sizes[None], np.zeros(1, np.int32), bias)
    error = np.abs(np.asarray(got, np.float64) - want).max()
    assert error <= 6e-4 if precision else 1e-3 < error < 0.1
