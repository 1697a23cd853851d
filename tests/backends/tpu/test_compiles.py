"""Ahead-of-time compiles: every kind of problem, for every chip, becomes one kernel and no other large operation."""

import functools

import jax
import jax.numpy as jnp
import pytest
from sweep import marked, sweep

import trencadis as tr
from trencadis.core.devices import CHIPS
from trencadis.quant import Scaled, quantize

from .ahead import compiled, kernels, largest

pytestmark = pytest.mark.core

M, K, N, G = 512, 384, 640, 3
TILE = (128, 256, 256)  # three blocks of n and two of k; the last of each is smaller
KINDS = {
    "bf16": ("bfloat16", "bfloat16", "bfloat16"),
    "f32": ("float32", "float32", "float32"),
    "int8": ("int8", "int8", "int32"),
    "mixed": ("bfloat16", "float32", "bfloat16"),
}
OPTIONS = ("plain", "transposed", "bias", "existing_out", "window", "batch")
CHIP = ("v5e", "v5p", "v6e", "v7x")
# every pair of values of kind, option, chip and form occurs
COVER = [
    (("rows", "contraction")[(i // 2 + j) % 2 if option != "bias" else 0], kind, option, CHIP[(i + j) % 4])
    for i, kind in enumerate(KINDS)
    for j, option in enumerate(OPTIONS)
]
# every kind, option, chip and form occurs
DEFAULT = [case for at, case in enumerate(COVER) if at // 6 in (at % 6 % 4, (at + 1) % 6 % 4)]
# v4 has the least VMEM; each kind and option once, in both forms
OLDEST = [
    (("rows", "contraction")[option != "bias" and j % 2], list(KINDS)[j % 4], option, "v4")
    for j, option in enumerate(OPTIONS)
]
COVER, DEFAULT = COVER + OLDEST, DEFAULT + OLDEST[:2]


def call(form, option, lhs, rhs, out):
    """A function and the shapes of its operands; existing_out comes last."""
    groups = 2 * G if option == "window" else G
    flip, sizes = option == "transposed", ((groups,), "int32")
    common = dict(preferred_element_type=jnp.dtype(out), tiling=TILE, backend="tpu")
    offset = 1 if option == "window" else None
    if form == "rows":
        shapes = [((M, K), lhs), ((G, N, K) if flip else (G, K, N), rhs), sizes]
        extra = [((G, N), "float32")] if option == "bias" else [((M, N), out)]
        run = functools.partial(tr.grouped_matmul, transpose_rhs=flip, group_offset=offset, **common)
    else:
        shapes = [((K, M) if flip else (M, K), lhs), ((M, N), rhs), sizes]
        extra = [((G, K, N), out)]
        run = functools.partial(
            tr.transposed_grouped_matmul, transpose_lhs=not flip, group_offset=offset, num_actual_groups=G, **common
        )
    if option == "bias":
        return lambda x, w, s, b: run(x, w, s, bias=b, activation=jax.nn.silu), shapes + extra
    if option == "existing_out":
        return lambda x, w, s, e: run(x, w, s, existing_out=e), shapes + extra
    if option == "batch":
        return jax.vmap(run), [((2, *shape), dtype) for shape, dtype in shapes]
    return run, shapes


@pytest.mark.parametrize(("form", "kind", "option", "chip"), sweep(COVER, DEFAULT))
def test_compiles_to_a_kernel_and_nothing_else(form, kind, option, chip):
    """There is no transpose, no copy of an operand, no cumsum of sizes: nothing with more than a few numbers."""
    fn, shapes = call(form, option, *KINDS[kind])
    text = compiled(CHIPS[chip], fn, *shapes, donate=(3,) if option == "existing_out" else ())
    assert kernels(text) == [f"trencadis_{form}"]
    assert largest(text)[0] <= 16 * G * N, largest(text)


@pytest.mark.parametrize(
    ("form", "lhs", "rhs", "flip", "chip"),
    [
        ("rows", "int8", "int8", False, "v5e"),
        marked(("rows", "bfloat16", "int8", False, "v5p")),
        ("rows", "bfloat16", "float8_e4m3fn", False, "v7x"),
        marked(("rows", "float8_e4m3fn", "float8_e4m3fn", True, "v6e")),
        marked(("contraction", "int8", "int8", True, "v7x")),
        ("contraction", "float8_e4m3fn", "float8_e5m2", False, "v5e"),
    ],
)
def test_quantized_operands_compile_to_a_kernel(form, lhs, rhs, flip, chip):
    """The kernel reads values as they are stored; XLA makes nothing but vectors of scales."""
    common = dict(preferred_element_type=jnp.bfloat16, tiling=TILE, backend="tpu")
    if form == "rows":
        shapes = [((M, K), lhs), ((G, N, K) if flip else (G, K, N), rhs)]
        scales = [((M, 1), "float32"), ((G, N, 1) if flip else (G, 1, N), "float32")]
        blocks, run = [(1, K), (1, 1, K) if flip else (1, K, 1)], tr.grouped_matmul
        common["transpose_rhs"] = flip
    else:
        shapes, scales = [((K, M) if flip else (M, K), lhs), ((M, N), rhs)], [((K, 1) if flip else (1, K), "float32")]
        blocks, run = [(1, M) if flip else (M, 1), (M, 1)], tr.transposed_grouped_matmul
        scales.append(((1, N), "float32"))
        common["transpose_lhs"] = not flip

    def fn(x, w, s, *scales):
        given = [
            value if value.dtype == jnp.bfloat16 else Scaled(value, scale, value.dtype.name, block)
            for value, scale, block in zip((x, w), scales, blocks, strict=True)
        ]
        return run(*given, s, **common)

    text = compiled(CHIPS[chip], fn, *shapes, ((G,), "int32"), *scales)
    assert kernels(text) == [f"trencadis_{form}"]
    assert largest(text)[0] <= 4 * G * N, largest(text)


def test_int4_weights_are_read_as_they_are_stored():
    fn, shapes = call("rows", "plain", "bfloat16", "int4", "bfloat16")
    text = compiled(CHIPS["v6e"], fn, *shapes)
    assert kernels(text) == ["trencadis_rows"]
    assert largest(text)[0] <= 16 * G * N, largest(text)


@pytest.mark.parametrize(
    ("format", "block", "chip"),
    [
        ("mxfp4", (1, 32, 1), "v5e"),
        ("int4", (1, 128, 1), "v7x"),
        *map(marked, [
            ("mxfp4", (1, 32, 1), "v5p"), ("mxfp4", (1, 32, 1), "v6e"), ("mxfp4", (1, 32, 1), "v7x"),
            ("nvfp4", (1, 16, 1), "v6e"), ("nvfp4", (1, 16, 1), "v7x"), ("mxfp8", (1, 32, 1), "v5e"),
            ("mxfp8", (1, 32, 1), "v7x"), ("int4", (1, 128, 1), "v5e"), ("int4", (1, 32, 1), "v6e"),
            ("int8", (1, 128, 1), "v5p"), ("float8_e4m3fn", (1, 128, 1), "v5e"), ("float8_e4m3fn", (1, 32, 1), "v6e"),
            ("int4", (1, 32, 1), "v5e"), ("float8_e4m3fn", (1, 32, 1), "v5p"), ("int8", (1, 32, 1), "v7x"),
            *(("float8_e4m3fn", (1, 128, 128), chip) for chip in CHIP),
        ]),
    ],
)  # fmt: skip
def test_scales_along_k_are_read_as_they_are_stored(format, block, chip):
    """XLA makes no weights, no scales, and no product for each block of k."""
    w = jax.eval_shape(lambda: quantize(jnp.zeros((G, K, N)), format, block, contracting=-1))
    leaves, tree = jax.tree.flatten(w)

    def fn(x, s, *leaves):
        return tr.grouped_matmul(x, jax.tree.unflatten(tree, leaves), s, jnp.bfloat16, tiling=TILE, backend="tpu")

    text = compiled(CHIPS[chip], fn, ((M, K), "bfloat16"), ((G,), "int32"), *((x.shape, x.dtype) for x in leaves))
    assert kernels(text) == ["trencadis_rows"]
    assert largest(text)[0] <= 8 * M, largest(text)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("format", "block", "chip"), [("mxfp4", 32, "v5e"), ("nvfp4", 16, "v6e"), ("int4", 128, "v7x")]
)
def test_weights_with_k_last_and_scales_along_k_compile(format, block, chip):
    w = jax.eval_shape(lambda: quantize(jnp.zeros((G, K, N)), format, (1, block, 1)))
    leaves, tree = jax.tree.flatten(w)
    assert w.transposed

    def fn(x, s, *leaves):
        return tr.grouped_matmul(x, jax.tree.unflatten(tree, leaves), s, jnp.bfloat16, backend="tpu")

    shapes = ((x.shape, x.dtype) for x in leaves)
    assert kernels(compiled(CHIPS[chip], fn, ((M, K), "bfloat16"), ((G,), "int32"), *shapes)) == ["trencadis_rows"]


@pytest.mark.parametrize("form", ["rows", "contraction"])
def test_export_for_tpu_from_a_process_without_one(form):
    fn, shapes = call(form, "plain", *KINDS["bf16"])
    args = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in shapes]
    exported = jax.export.deserialize(jax.export.export(jax.jit(fn), platforms=["tpu"])(*args).serialize())
    assert exported.platforms == ("tpu",)
    assert f"trencadis_{form}" in exported.mlir_module()


@pytest.mark.parametrize("form", ["rows", "contraction"])
def test_the_platform_decides_at_lowering(form):
    """One traced function gives the kernel for a TPU, XLA loops for a CPU, and both in a program for both."""
    fn, shapes = call(form, "plain", *KINDS["bf16"])
    anywhere = jax.jit(functools.partial(fn, backend=None))
    args = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in shapes]
    traced = anywhere.trace(*args)
    tpu, cpu = (traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("tpu", "cpu"))
    assert f"trencadis_{form}" in tpu and "stablehlo.while" not in tpu
    assert "trencadis" not in cpu and "stablehlo.while" in cpu
    both = jax.export.export(anywhere, platforms=["cpu", "tpu"])(*args).mlir_module()
    assert f"trencadis_{form}" in both and "stablehlo.while" in both


def test_equal_products_of_a_program_are_one_kernel_in_it():
    """Each kernel is lowered into one function, however many layers call it."""

    def layers(x, w, s):
        for _ in range(3):
            x = jnp.tanh(tr.grouped_matmul(x, w, s, jnp.bfloat16, backend="tpu"))
        return x

    args = [
        jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
        for shape, dtype in (((M, K), "bfloat16"), ((G, K, K), "bfloat16"), ((G,), "int32"))
    ]
    text = jax.jit(layers).trace(*args).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("stablehlo.custom_call @tpu_custom_call") == 1


@pytest.mark.parametrize(
    ("flip", "chip"),
    [
        (False, "v5e"),
        (True, "v7x"),
        *(marked((flip, chip)) for flip, chip in ((True, "v5e"), (False, "v5p"), (True, "v6e"))),
    ],
)
def test_columns_that_are_not_whole_lanes_are_not_padded(flip, chip):
    """Copies of the last ones reach into the padding of their tiles, or are shorter where columns are rows."""
    n, k = 2112, 256
    shapes = [((M, k), "bfloat16"), ((G, n, k) if flip else (G, k, n), "bfloat16"), ((G,), "int32")]
    run = functools.partial(tr.grouped_matmul, preferred_element_type=jnp.bfloat16, backend="tpu", transpose_rhs=flip)
    text = compiled(CHIPS[chip], lambda x, w, s: run(x, w, s), *shapes)
    assert kernels(text) == ["trencadis_rows"] and " pad(" not in text and " slice(" not in text


@pytest.mark.parametrize("form", ["rows", "contraction"])
def test_weights_whose_last_axis_is_short_are_not_copied(form):
    """XLA stores them with the other axis last, and so the kernel reads and writes them."""
    k, n = 1024, 96
    rows, summed = ((G, k, n), "bfloat16"), ((M, n), "bfloat16")
    shapes = [((M, k), "bfloat16"), rows if form == "rows" else summed, ((G,), "int32")]
    run = tr.grouped_matmul if form == "rows" else functools.partial(tr.transposed_grouped_matmul, transpose_lhs=True)
    text = compiled(CHIPS["v6e"], lambda x, w, s: run(x, w, s, jnp.bfloat16, backend="tpu"), *shapes)
    assert kernels(text) == [f"trencadis_{form}"]
    assert largest(text)[0] <= 2 * M * n, largest(text)
