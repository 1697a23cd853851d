"""Low-precision weights beside rows of 16 bits: values in the interpreter, compilation for every card, and plans."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from poisoned import spans
from sweep import sweep

pytest.importorskip("triton")

import trencadis as tr
from trencadis.backends import triton
from trencadis.backends.triton import weights_layout
from trencadis.backends.triton.bridge import compiled
from trencadis.backends.triton.layout import Layout
from trencadis.core.arguments import problem_of
from trencadis.core.devices import CARDS, target_of
from trencadis.core.epilogue import Epilogue
from trencadis.core.interleave import interleave
from trencadis.core.plan import plan
from trencadis.core.tiling import Overrides, Tiling

pytestmark = pytest.mark.core

VALUES = ("int8", "int4", "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn")
E8M0, E4M3 = (np.dtype(dtype) for dtype in (ml_dtypes.float8_e8m0fnu, ml_dtypes.float8_e4m3fn))


def relu(z):
    return np.maximum(z, 0) if isinstance(z, np.ndarray) else jnp.maximum(z, 0)


def asked(values, *, scales="float32", length=0, across=1, m=75, k=96, n=40, rows="bfloat16", out="float32", **changes):
    """A product of 6 groups, of which 4 are held here; scales of columns are constant along k if length is 0."""
    last = changes.pop("last", True)
    steps = Epilogue(
        by_column=True, column_block=(length, across), column_scales=np.dtype(jnp.dtype(scales)), **changes
    )
    problem = problem_of((m, k), (4, n, k) if last else (4, k, n), groups=6, transpose_rhs=last)
    dtypes = {"lhs": rows, "rhs": values, "out": out}
    return problem.replace(epilogue=steps, **{name: np.dtype(jnp.dtype(x)) for name, x in dtypes.items()})


def interleaved(values, **more):
    """A product with weights that are stored interleaved."""
    return asked(values, **more).replace(interleaved=True)


BIAS = {"by_row": True, "bias": np.dtype("float32"), "activation": relu}
CASES = {
    **{f"{values}, a scale per column": (asked(values), {}) for values in VALUES},
    **{f"{values}, by 32": (asked(values, length=32), {}) for values in VALUES},
    "mxfp8": (asked("float8_e4m3fn", scales=E8M0, length=32, k=100), {"block_k": 64}),
    "mxfp8, e5m2": (asked("float8_e5m2", scales=E8M0, length=32, k=80), {"block_k": 16}),
    "mxfp4": (asked("float4_e2m1fn", scales=E8M0, length=32, k=160, out="bfloat16"), {"block_k": 64}),
    "nvfp4": (asked("float4_e2m1fn", scales=E4M3, length=16, k=72, **BIAS), {"block_k": 64}),
    "nvfp4, float16": (asked("float4_e2m1fn", scales=E4M3, length=16, rows="float16", out="float16"), {}),
    "mxfp4, each of k": (asked("float4_e2m1fn", scales=E8M0, length=1, across=32, k=98, n=72), {"block_k": 64}),
    "nvfp4, each of k": (asked("float4_e2m1fn", scales=E4M3, length=1, across=16, rows="float16", by_row=True), {}),
    "mxfp4, float16": (asked("float4_e2m1fn", scales=E8M0, length=32, rows="float16"), {}),
    "mxfp8, float16": (asked("float8_e4m3fn", scales=E8M0, length=32, rows="float16"), {}),
    "int8, float16": (asked("int8", length=48, rows="float16", n=41), {"block_k": 16}),
    "blocks of 64 x 32": (asked("float8_e4m3fn", length=64, across=32, n=72, k=130), {"block_k": 64}),
    "int4 by 32, steps of two blocks": (asked("int4", length=32, k=160), {"block_k": 64}),
    "int8 by 16, steps of four blocks": (asked("int8", length=16, k=72, last=False), {"block_k": 64}),
    "int4, e4m3 scales": (asked("int4", scales=E4M3, length=64, n=33), {}),
    "bfloat16 scales": (asked("int4", scales="bfloat16", length=32, accumulate=True), {}),
    "stored [g, k, n]": (asked("int8", length=32, last=False, bias=np.dtype("float32")), {}),
    "int8 by 64, rows by 32": (asked("int8", length=64, by_row=True, row_block=32, k=100), {}),
    "mxfp4, rows by 64": (asked("float4_e2m1fn", scales=E8M0, length=32, k=144, by_row=True, row_block=64), {}),
    "int4, rows by 32": (asked("int4", by_row=True, row_block=32, bias=np.dtype("float32")), {}),
    "int8 by 32, interleaved": (interleaved("int8", length=32, k=112), {"block_k": 64}),
    "int4, interleaved": (interleaved("int4", rows="float16"), {"block_k": 64}),
    "mxfp4, interleaved": (interleaved("float4_e2m1fn", scales=E8M0, length=32, k=160), {"block_k": 64}),
    "float8, stored [g, k, n]": (asked("float8_e5m2", scales=E8M0, length=32, last=False, accumulate=True), {}),
}
SMALL = Layout(block_m=16, block_n=32, block_k=32, warps=4, stages=2, raster_group=2)


def numbers(problem, sizes, first, seed):
    """Operands in numpy: NaN in unowned rows and their scales, in all of one group, and in its scales of weights."""
    rng, steps = np.random.default_rng(seed), problem.epilogue
    x = rng.normal(size=(problem.m, problem.k)).astype(problem.lhs)
    if problem.rhs.name.startswith("int"):
        most = 8 if problem.rhs.name == "int4" else 128
        w = rng.integers(-most, most, problem.rhs_shape).astype(problem.rhs)
    else:
        w = (2 * rng.normal(size=problem.rhs_shape)).astype(problem.rhs)
    (length, across), local = steps.column_block, problem.local_groups
    shape = (local, -(-problem.k // length), -(-problem.n // across)) if length else (local, problem.n)
    scale = np.exp2(rng.integers(-3, 3, shape)) * (1 if steps.column_scales == E8M0 else rng.uniform(1, 2, shape))
    scale = scale.astype(steps.column_scales if length else np.float32)
    mine = spans(problem, sizes, first)
    nobodys = np.setdiff1d(np.arange(problem.m), [row for i, span in enumerate(mine) if i != 1 for row in span])
    x[nobodys] = np.nan
    scale[1] = np.nan
    if problem.rhs.name.startswith("float8"):
        w[1] = np.nan
    extras = [scale]
    if steps.by_row:
        parts = (-(-problem.k // steps.row_block),) if steps.row_block else ()
        by_row = rng.uniform(1, 2, (problem.m, *parts)).astype(np.float32)
        by_row[nobodys] = np.nan
        extras.insert(0, by_row)
    if steps.bias is not None:
        extras.append(rng.normal(size=(local, problem.n)).astype(steps.bias))
    if steps.accumulate:
        extras.append(rng.normal(size=problem.out_shape).astype(problem.out))
    return x, w, extras


def meaning(problem, x, w, sizes, first, extras):
    """The result in float64, by operands that are multiplied by their scales."""
    steps = problem.epilogue
    by_row, by_column, bias, existing = steps.split(tuple(extras))
    length, across = steps.column_block
    w, scale = w.astype(np.float64), by_column.astype(np.float64)
    w = np.swapaxes(w, 1, 2) if problem.transpose_rhs else w
    scale = scale[:, None] if not length else np.repeat(np.repeat(scale, length, 1), across, 2)
    w = w * scale[:, : problem.k, : problem.n]
    if steps.row_block:
        x, by_row = x.astype(np.float64) * np.repeat(by_row, steps.row_block, 1)[:, : problem.k], None
    out = oracle.rows(
        x, w, sizes[0], first=int(first[0]), bias=bias, activation=steps.activation, scales=(by_row, None)
    )
    return out if existing is None else out + existing.astype(np.float64)


DEFAULT = [
    name for name in CASES if not re.match("float8_e4m3fn,|int8, a|int4, [be]|float4.* a|.*8, float16|float8, st", name)
]


@pytest.mark.parametrize("name", sweep(CASES, DEFAULT))
def test_equals_the_oracle_with_poison_elsewhere(name):
    problem, changes = CASES[name]
    sizes, first = np.asarray([[5, 7, 33, 0, 17, 9]], np.int32), np.asarray([1], np.int32)
    x, w, extras = numbers(problem, sizes, first, len(name))
    run = functools.partial(weights_layout.execute, problem, SMALL.replace(**changes), "8.0", interpret=True)
    got = np.asarray(jax.jit(run)(x, interleave(w) if problem.interleaved else w, sizes, first, *extras))
    with np.errstate(invalid="ignore"):
        want = meaning(problem, x, w, sizes, first, extras)
    assert np.isfinite(want[5:12]).all() and not np.isfinite(want[12:45]).any()
    oracle.check(got, want, scale=float(np.abs(want[np.isfinite(want)]).max()))
    rest = np.r_[0:5, 62:75]  # unowned
    kept = extras[-1] if problem.epilogue.accumulate else np.zeros_like(got)
    assert got[rest].tobytes() == kept[rest].tobytes()


@pytest.mark.parametrize(
    ("left", "right"),
    [(("float8_e4m3fn", (1, 32)), ("float8_e4m3fn", "column")), (("int8", "row"), ("int4", (1, 32, 1))),
     (("nvfp4", (1, 16)), ("int8", (1, 32, 1))), (("int8", "row"), ("int4", "column"))],
)  # fmt: skip
def test_rows_of_8_bits_are_bfloat16_in_one_kernel(left, right):
    """No product is split along k, whatever scales rows of 8 or 4 bits have."""

    def call(x, w, sizes):
        return tr.grouped_matmul(tr.quant.quantize(x, *left), tr.quant.quantize(w, *right), sizes)

    args = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((64, 256), (2, 256, 64))]
    product = tr.why(call, *args, jax.ShapeDtypeStruct((2,), "int32"), target="a100").passes[0]
    assert product.plan.backend == "triton" and not product.plan.split and product.plan.problem.lhs == jnp.bfloat16


# ---------------------------------------------------------------------------------------------------------------------
# Compilation and plans

INSTRUCTIONS = {
    "a100": "mma.sync", "l40s": "mma.sync", "h200": "wgmma.mma_async", "b200": "tcgen05.mma", "rtx5090": "mma.sync",
    "mi300x": "v_mfma", "mi355x": "v_mfma",
}  # fmt: skip
REAL = {"m": 512, "k": 2048, "n": 1536, "out": "bfloat16"}
FORMATS = {
    "int8": asked("int8", **REAL),
    "int4 by 128": asked("int4", length=128, **REAL),
    "mxfp4": asked("float4_e2m1fn", scales=E8M0, length=32, **REAL),
    "nvfp4": asked("float4_e2m1fn", scales=E4M3, length=16, by_row=True, **REAL),
    "mxfp8": asked("float8_e4m3fn", scales=E8M0, length=32, **REAL),
    "float8 by 128 x 128": asked("float8_e5m2", length=128, across=128, **REAL),
    "mxfp4, float16": asked("float4_e2m1fn", scales=E8M0, length=32, rows="float16", **REAL),
    "int4 by 128, rows by 32": asked("int4", length=128, by_row=True, row_block=32, **REAL),
}
INTERLEAVED = {
    f"{name}, interleaved": FORMATS[name].replace(interleaved=True) for name in ("int8", "int4 by 128", "mxfp4")
}
PAIRS = [
    *((card, name) for card in INSTRUCTIONS for name in FORMATS),
    *(("h200", name) for name in INTERLEAVED),  # on no other card
]


@pytest.mark.parametrize(
    ("card", "name"), sweep(PAIRS, [("a100", "mxfp4"), ("mi300x", "nvfp4"), ("h200", "int8, interleaved")])
)
def test_compiles_to_tensor_cores(card, name):
    problem, some = (FORMATS | INTERLEAVED)[name], CARDS[card]
    layout = weights_layout.choose(problem, some)
    binary = compiled(weights_layout.kernel_of(problem, layout, some.arch))
    assert binary.shared <= some.shared
    # a tile of few columns is multiplied by mma.sync on cards that have more
    assert INSTRUCTIONS[card] in binary.text or "mma.sync" in binary.text
    # a product that is not waited for in its step would read registers in which the next one has its weights
    assert not re.search(r"wgmma.wait_group.sync.aligned [1-9]", binary.text)


@pytest.mark.parametrize("name", FORMATS)
def test_every_card_has_one_kernel(name):
    for card in CARDS:
        answer = triton.plan(FORMATS[name], target_of(card), Overrides())
        assert not answer.split and f"{answer.layout.block_m} x" in answer.because
    small = weights_layout.choose(FORMATS[name], CARDS["a100"], Tiling(1, 1, 1))
    assert small.block_m == 16 and small.block_n == 64


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (
            asked("float4_e2m1fn", length=32, k=97),
            r"4-bit weights are unpacked where they are stored \[g, n, k\], and k is even",
        ),
        (asked("int8", length=24), "every 24"),
        (asked("float4_e2m1fn", length=16), "every 16"),
        (asked("int8", length=32, rows="float32"), "rows of bfloat16 or float16"),
    ],
)
def test_refusals(problem, reason):
    assert re.search(reason, triton.plan(problem, target_of("a100"), Overrides()).reason)
    assert plan(problem, target_of("a100"), Overrides()).split


def test_interleaved_weights_are_read_as_they_are_on_hopper():
    """Also where the other kernel for Hopper refuses: a result of float32 with scales along k."""
    problem = asked("int4", length=128, m=512, k=512, n=256).replace(interleaved=True)
    chosen = plan(problem, target_of("h200"))
    assert chosen.backend == "triton" and chosen.problem.interleaved and not chosen.slow
    assert chosen.layout.warps >= 4  # wgmma, for which they are interleaved
    elsewhere = plan(problem, target_of("a100"))
    assert not elsewhere.problem.interleaved and "interleaved" in elsewhere.slow and "False" in elsewhere.advice


def test_4_bit_weights_as_they_lie_are_transposed_before_the_kernel():
    answer = triton.plan(asked("int4", length=32, last=False), target_of("a100"), Overrides())
    assert answer.problem.transpose_rhs and not answer.asked.transpose_rhs
    assert "transposed before each product" in answer.slow and "prepare" in answer.advice


@pytest.mark.parametrize(("name", "length"), [("mxfp4", 32), ("nvfp4", 16), ("mxfp8", 32), ("int4", 128)])
def test_quantized_weights_are_one_kernel_without_a_warning(name, length):
    w, x = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4, 256, 128), (64, 256)))
    w = jax.eval_shape(lambda w: tr.quant.quantize(w, name, (1, length, 1)), w)
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
    (forward, *_) = tr.why(x, w, sizes, jnp.bfloat16, target="a100").passes
    assert forward.plan.backend == "triton" and not forward.plan.split
    with tr.target("a100"), warnings.catch_warnings():
        warnings.simplefilter("error")
        program = jax.jit(lambda x, w, s: tr.grouped_matmul(x, w, s, jnp.bfloat16)).trace(x, w, sizes)
        text = program.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@triton_kernel_call") == 2  # the list of tiles, and the product
    assert "4x128x128xui8" not in text and "4x128x256xui8" not in text  # no pass over the weights


BY_COLUMN = [(card, name) for card in ("a100", "h200", "b200", "mi300x") for name in ("mxfp4", "nvfp4")]


@pytest.mark.parametrize(("card", "name"), sweep(BY_COLUMN, [("a100", "mxfp4"), ("h200", "nvfp4")]))
def test_the_gradient_of_rows_beside_4_bit_floats_is_one_kernel(card, name):
    """Its scales change with each entry of its k, so that both values of a byte have their own."""
    x, w, sizes = (
        jax.ShapeDtypeStruct(*each) for each in (((64, 256), "bfloat16"), ((4, 256, 128), "float32"), ((4,), "int32"))
    )
    w = jax.eval_shape(lambda w: tr.quant.quantize(w, name, (1, 32 if name == "mxfp4" else 16, 1)), w)

    def d_x(x, w, sizes):
        return jax.vjp(lambda x: tr.grouped_matmul(x, w, sizes, jnp.bfloat16), x)[1](jnp.ones((64, 128), jnp.bfloat16))

    last = tr.why(d_x, x, w, sizes, target=card).passes[-1].plan
    assert last.backend == "triton" and not last.split and "times their scales" in last.because
    with tr.target(card):
        text = jax.jit(d_x).trace(x, w, sizes).lower(lowering_platforms=(target_of(card).platform,)).as_text()
    assert text.count("@triton_kernel_call") == 2


def test_interleaved_weights_with_a_scale_for_each_of_k_are_multiplied_in_order():
    problem = interleaved("float4_e2m1fn", scales=E8M0, length=1, across=32)
    answer = plan(problem, target_of("h200"))
    assert answer.backend == "triton" and not answer.problem.interleaved
