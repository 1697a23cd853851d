"""The kernels around the products of an MoE layer: rows and sums of rows, interpreted, and as compiled."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from sweep import sweep

import trencadis as tr
from trencadis import inspect as tpu
from trencadis import moe
from trencadis.backends.tpu import moe as kernels
from trencadis.core.devices import CHIPS

from .ahead import compiled
from .ahead import kernels as names

pytestmark = pytest.mark.core

T, K = 21, 3
RNG = np.random.default_rng(0)
TOKEN = RNG.permutation(np.repeat(np.arange(T, dtype=np.int32), K))
ROWS = RNG.permutation(T * K).reshape(T, K).astype(np.int32)


@pytest.fixture
def small(monkeypatch):
    """Blocks so small that few rows cross the edges of all of them; the interpreter is reset."""
    for name, value in {"MOST_ROWS": 48, "PACKED_ROWS": 32, "COLUMNS": 128}.items():
        monkeypatch.setattr(kernels, name, value)
    yield
    pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("dtype", "width"), [("bfloat16", 300), ("float32", 130), ("float8_e4m3fn", 40)])
def test_rows_are_copied_as_they_are(dtype, width):
    """Any bits, NaN among them."""
    bits = RNG.integers(0, 256, (T, width * jnp.dtype(dtype).itemsize), np.uint8)
    x = jnp.asarray(bits.view(jnp.dtype(dtype)))
    found = kernels.spread_rows(x, jnp.asarray(TOKEN), interpret=True)
    np.testing.assert_array_equal(found.astype(jnp.float32), x[TOKEN].astype(jnp.float32))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sums_of_rows(dtype, weighted):
    """NaN and Inf in rows that do not count, which share words with rows that do, change nothing."""
    masked = RNG.random((T, K)) < 0.3
    masked[4] = True
    y = np.asarray(RNG.integers(-64, 64, (T * K, 300)) / 8)
    weights = RNG.integers(-8, 8, (T, K)) / 4  # products and sums are exact
    want = np.sum(np.where(masked, 0, weights if weighted else 1)[:, :, None] * y[ROWS], axis=1)
    y[ROWS[masked]] = np.where(RNG.random((masked.sum(), 1)) < 0.5, np.nan, np.inf)
    given = jnp.asarray(weights, jnp.float32) if weighted else None
    rows = jnp.asarray(np.where(masked, -1, ROWS))
    found = kernels.sum_rows(jnp.asarray(y, dtype), rows, given, masked=True, interpret=True)
    np.testing.assert_array_equal(found, np.asarray(jnp.asarray(want, jnp.float32).astype(dtype)))
    assert not np.asarray(found)[4].any()


def test_an_operand_that_the_kernels_do_not_take():
    rows, token = jnp.asarray(ROWS), jnp.asarray(TOKEN)
    assert kernels.sum_rows(jnp.ones((T * K, 8), jnp.float16), rows, None) is None
    assert kernels.sum_rows(jnp.ones((T * K, 1 << 20), jnp.bfloat16), rows, None) is None
    assert kernels.sum_rows(jnp.ones((66, 8), jnp.bfloat16), jnp.arange(66).reshape(2, 33), None) is None
    assert kernels.spread_rows(jnp.ones((0, 8), jnp.bfloat16), token[:0]) is None
    assert kernels.spread_rows(jnp.ones((T, 1 << 20), jnp.bfloat16), token) is None


def test_64_bits(x64):
    """With x64 on, scalars of the kernels stay int32."""
    rows, token, weights = jnp.asarray(ROWS), jnp.asarray(TOKEN), jnp.ones((T, K), jnp.float64)
    x, y = jnp.ones((T, 256), jnp.bfloat16), jnp.ones((T * K, 256), jnp.bfloat16)
    both = jax.jit(lambda x, y, weights: (kernels.spread_rows(x, token), kernels.sum_rows(y, rows, weights)))
    assert "trencadis_sum_rows" in both.trace(x, y, weights).lower(lowering_platforms=("tpu",)).as_text()


CASES = [(chip, dtype) for chip in ("v5e", "v5p", "v6e", "v7x") for dtype in ("bfloat16", "float32", "int8")]


@pytest.mark.parametrize(("chip", "dtype"), sweep(CASES, CASES[::5]))
def test_compiles_without_a_pass_over_rows(chip, dtype):
    """XLA makes no array of tokens or rows around the kernels; it may fetch one to VMEM as it is."""
    t, k, d, size = 256, 4, 768, jnp.dtype(dtype).itemsize
    passes = functools.partial(re.findall, rf"\[(?:{t}|{t * k}),{d}\]\S* (?:copy|fusion|transpose|pad|reshape)\(")
    x, y, weights = ((t, d), dtype), ((t * k, d), dtype), ((t, k), "float32")
    text = compiled(CHIPS[chip], kernels.spread_rows, x, ((t * k,), "int32"))
    assert names(text) == ["trencadis_pack_rows"] * (size < 4) + ["trencadis_spread_rows"]
    assert not passes(text)
    if dtype in kernels.SUMMED:
        text = compiled(CHIPS[chip], kernels.sum_rows, y, ((t, k), "int32"), weights)
        assert names(text) == ["trencadis_sum_rows"] and not passes(text)


@pytest.mark.sweep
@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_rows_take_little_longer_than_a_copy(chip):
    """With the time to pack tokens, of which there are an eighth as many."""
    t, k, d = 1024, 8, 2048
    token = RNG.permutation(np.repeat(np.arange(t, dtype=np.int32), k))
    x = jax.ShapeDtypeStruct((t, d), jnp.bfloat16)
    found = tpu.inspect(kernels.spread_rows, x, token, generation=chip)
    assert not any(kernel.warnings for kernel in found.kernels)
    copy = 2 * (2 * t * k * d) / (0.9 * CHIPS[chip].hbm)
    assert found.seconds < copy / 0.85


TOKENS, WIDTH, HIDDEN, EXPERTS = 64, 640, 128, 4
SHAPES = [
    ((TOKENS, WIDTH), "bfloat16"),
    ((TOKENS, EXPERTS), "float32"),
    *[((EXPERTS, WIDTH, HIDDEN), "bfloat16")] * 2,
    ((EXPERTS, HIDDEN, WIDTH), "bfloat16"),
]


@jax.jit
@functools.partial(jax.grad, argnums=range(5))
def step(x, logits, gate, up, down):
    return jnp.sum(tr.moe_mlp(x, moe.route(logits, 2), gate, up, down).astype(jnp.float32))


def test_a_training_step_is_lowered_without_a_scatter_of_floats():
    args = [jax.ShapeDtypeStruct(*each) for each in SHAPES]
    with tr.target("v6e"):
        text = step.trace(*args).lower(lowering_platforms=("tpu",)).as_text()
    assert "stablehlo.scatter" not in text and "trencadis_sum_rows" in text


@pytest.mark.sweep
def test_a_training_step_is_compiled_without_a_scatter_of_floats():
    """Rows and sums by kernels, forward and backward, and no pass that adds up rows."""
    text = compiled(CHIPS["v6e"], step, *SHAPES)
    found = names(text)
    assert found.count("trencadis_sum_rows") == 1  # the result itself is not needed
    assert found.count("trencadis_spread_rows") >= 2 and "trencadis_gated_pullback" in found
    assert not re.findall(r" = (?:f32|bf16)\S* scatter\(", text)
