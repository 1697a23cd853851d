"""Every layout fits into shared memory and registers, and a tile that the caller asks for is rounded to one of them."""

import functools
import itertools
import math

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from sweep import marked

import trencadis as tr
from trencadis.backends.gpu.choose import choose, choose_for_tile, mma_dtype, tiling_of
from trencadis.backends.gpu.kernel import REGISTERS, REGISTERS_OF_MORE_CONSUMERS, REGISTERS_OF_PIPELINES
from trencadis.backends.gpu.layout import CONSUMERS, WGMMA_M
from trencadis.backends.gpu.rows import PART
from trencadis.core.arguments import problem_of
from trencadis.core.devices import CARDS
from trencadis.core.dtypes import bits
from trencadis.core.epilogue import Epilogue
from trencadis.core.plan import plan
from trencadis.core.problem import Form
from trencadis.core.target import Target
from trencadis.core.tiling import Overrides, Tiling, resolve

from .ahead import H200, kernels, lowered

pytestmark = pytest.mark.core

DTYPES = ["bfloat16", "float16", "float32"]
EIGHT = ["int8", "float8_e4m3fn"]
PAIRS = [*itertools.product([*DTYPES, *EIGHT], repeat=2), ("bfloat16", "int4")]


def question(form, m, k, n, g, dtype="bfloat16", **changes):
    if form == "rows":
        return problem_of((m, k), (g, k, n), dtype=dtype).replace(**changes)
    return problem_of((k, m), (m, n), groups=g, dtype=dtype).replace(**changes)


def size(limit):
    """Sizes up to a limit, of all magnitudes."""
    return st.floats(0, math.log2(limit)).map(lambda x: round(2**x))


def shared(problem, layout):
    """The bytes of shared memory of a kernel, from its arrays: Mosaic places each at a multiple of 1024."""
    whole = lambda size: -(-size // 1024) * 1024
    item = mma_dtype(problem).itemsize
    rhs_bits = bits(problem.rhs) if layout.upcast else 8 * item
    stages = whole(layout.stages * layout.block_m * layout.block_k * item)
    stages += whole(layout.stages * layout.block_n * layout.block_k * rhs_bits // 8)
    upcast = whole(2 * layout.block_n * layout.block_k * item) * layout.upcast_in_smem
    stores = whole(CONSUMERS * layout.store_buffers * (layout.block_m if layout.swap_ab else WGMMA_M) * 128)
    steps = problem.epilogue
    vector = lambda length, size: whole(CONSUMERS * -(-length // 128) * 128 * size)
    vectors = 0 if steps.bias is None else vector(layout.block_n, steps.bias.itemsize)
    if steps.blocks:
        vectors += whole(layout.stages * layout.block_m * 4) + vector(-(-problem.k // 128), 4)
    else:
        vectors += vector(layout.block_m, 4) * steps.by_row + vector(layout.block_n, 4) * steps.by_column
    barriers = 8 * (3 * layout.stages + 2 * 2 + 2 * 4 + 1 + (1 + layout.store_buffers) * CONSUMERS)
    return stages + upcast + stores + vectors + whole(5 * 9 * 4) + barriers


def check(problem, layout):
    assert shared(problem, layout) <= H200.shared
    assert 2 <= layout.stages <= 8  # with fewer, copies and wgmma would wait for each other
    item = mma_dtype(problem).itemsize
    swizzle = 64 if item == 1 and problem.form is Form.CONTRACTION else 128
    assert layout.block_k in ([128, 256] if layout.upcast else [swizzle // item])
    assert layout.k_major == (item != 2)
    if layout.swap_ab:
        assert problem.form is Form.ROWS and problem.out.itemsize == 2
        if layout.upcast:
            assert layout.block_m in range(16, 193, 16) and layout.block_n == 128
        else:
            assert (
                layout.block_m in (64, 128, 192) and layout.block_n == 256
            )  # half the columns to each consumer, in blocks
    assert layout.swap_ab or (layout.block_m in (128, 256) and layout.block_n % WGMMA_M == 0)
    assert layout.block_m * layout.block_n <= (
        128 * 128 if problem.epilogue.blocks else 256 * 192
    )  # accumulators in registers
    assert layout.block_n <= (256 if problem.form is Form.ROWS else 192)  # N of one wgmma
    assert layout.raster_group >= 1 and layout.num_ctas == H200.cores


@pytest.mark.parametrize(
    ("scales", "length", "k", "steps"),
    [
        ("float8_e8m0fnu", 32, 2880, (576, 192)),
        ("float8_e8m0fnu", 32, 2048, (512, 256)),
        ("float8_e4m3fn", 16, 2880, (192, 0)),
    ],
)
def test_steps_of_mxfp4_for_few_rows_have_several_parts_that_divide_k(scales, length, k, steps):
    along_k = Epilogue(by_column=True, column_block=(length, 1), column_scales=np.dtype(jnp.dtype(scales)))
    changes = {"rhs": np.dtype(jnp.float4_e2m1fn), "transpose_rhs": True, "epilogue": along_k}
    layout = choose(question("rows", 32, k, 1536, 8, **changes), H200)
    assert (layout.block_k, layout.part_k) == steps and k % layout.block_k == 0


@pytest.mark.parametrize("rows", [4, 40, 256, 4096])
@pytest.mark.parametrize(
    ("values", "scales", "length"),
    [("float4_e2m1fn", "float8_e8m0fnu", 32), ("float4_e2m1fn", "float8_e4m3fn", 16),
     ("float8_e4m3fn", "float8_e8m0fnu", 32), ("int8", "float32", 128), ("int4", "float32", 64)],
)  # fmt: skip
def test_weights_with_scales_along_k_fit(values, scales, length, rows):
    steps = Epilogue(by_column=True, column_block=(length, 1), column_scales=np.dtype(jnp.dtype(scales)))
    changes = {"rhs": np.dtype(jnp.dtype(values)), "transpose_rhs": True, "epilogue": steps}
    problem = question("rows", 8 * rows, 2048, 1536, 8, **changes)
    layout = choose(problem, H200)
    assert layout.block_n == layout.consumers * WGMMA_M
    stage = layout.block_k * (layout.block_m * 16 + layout.block_n * bits(problem.rhs)) // 8
    stores = layout.consumers * layout.block_m * layout.swizzle
    assert layout.stages >= 2 and layout.pipelines * (layout.stages * stage + stores) <= H200.shared
    sums, parts = layout.block_m // 2 * (1 + layout.promoted), layout.block_m >= WGMMA_M  # or whole steps
    operand = (2 * PART if parts else layout.unpacked_k) // 4
    registers = REGISTERS_OF_MORE_CONSUMERS[layout.consumers] if layout.consumers > CONSUMERS else REGISTERS[""]
    registers = registers if layout.pipelines == 1 else REGISTERS_OF_PIPELINES
    spare = 8 if layout.promoted else 24  # accumulators of promoted sums are free while weights are unpacked
    assert sums + operand + spare <= registers[0]
    assert layout.pipelines == 1 + (rows == 4 and bits(problem.rhs) == 4)
    groups = layout.pipelines * (layout.consumers + 1)
    assert layout.pipelines * (layout.consumers * registers[0] + registers[1]) <= 512 // groups // 8 * 8 * groups


@pytest.mark.parametrize("k", [576, 960, 2048, 2080, 2880])
@pytest.mark.parametrize(("scales", "length"), [("float8_e8m0fnu", 32), ("float8_e4m3fn", 16)])
def test_a_step_of_4_bit_floats_starts_with_a_word_of_scales(scales, length, k):
    """A word is as many scales as divide those of a row, up to four. Steps of 192 divide k if those of 256 do not."""
    steps = Epilogue(by_column=True, column_block=(length, 1), column_scales=np.dtype(jnp.dtype(scales)))
    changes = {"rhs": np.dtype(jnp.float4_e2m1fn), "transpose_rhs": True, "epilogue": steps}
    layout = choose(question("rows", 32, k, 1536, 8, **changes), H200)
    assert layout.block_k % PART == 0 and layout.block_k // length % math.gcd(k // length, 4) == 0
    assert k % layout.block_k == 0 or k % 192


@pytest.mark.parametrize("form", ["rows", "contraction"])
@hypothesis.settings(max_examples=150)
@hypothesis.given(
    m=size(2**20), k=size(20000), n=size(20000), g=size(1024), pair=st.sampled_from(PAIRS), out=st.sampled_from(DTYPES),
    extra=st.sampled_from(["none", "bfloat16", "float32", "accumulate", "blocks"]),
    flip=st.booleans(), by_row=st.booleans(), by_column=st.booleans(),
)  # fmt: skip
def test_a_layout_fits(form, m, k, n, g, pair, out, extra, flip, by_row, by_column):
    lhs, rhs = pair
    blocks = 128 if extra == "blocks" and form == "rows" and lhs == rhs and jnp.dtype(lhs).itemsize == 1 else 0
    by_row, by_column = by_row or blocks > 0, by_column or blocks > 0
    extra = "none" if extra == "blocks" else extra
    bias = None if extra in ("none", "accumulate") or form == "contraction" else np.dtype(jnp.dtype(extra))
    kinds = {name: np.dtype(jnp.dtype(x)) for name, x in (("lhs", lhs), ("rhs", rhs), ("out", out))}
    flips = {"transpose_rhs": flip} if form == "rows" else {"transpose_lhs": flip}
    problem = question(form, m, k, n, g, **kinds, **flips)
    scales = {"by_row": by_row, "by_column": by_column}
    scales |= {"row_block": blocks, "column_block": (blocks, blocks)} if blocks else {}
    problem = problem.replace(epilogue=Epilogue(bias=bias, accumulate=extra == "accumulate", **scales))
    layout = choose(problem, H200)
    check(problem, layout)
    for tile in ((m, k, n), (1, 1, 1), (128, 64, 256), (10**6, 10**6, 10**6)):
        check(problem, choose_for_tile(problem, H200, Tiling(*tile)))


@pytest.mark.parametrize(
    ("form", "dtype", "out", "tile", "bias"),
    [
        ("rows", "bfloat16", "float32", (128, 64, 256), True),
        marked(("rows", "bfloat16", "bfloat16", (192, 64, 256), True)),
        marked(("rows", "float32", "float32", (256, 32, 128), True)),
        marked(("contraction", "bfloat16", "float32", (64, 256, 64), False)),
        ("contraction", "float32", "float32", (32, 128, 256), False),
    ],
)
def test_mosaic_agrees_that_a_layout_fits(form, dtype, out, tile, bias):
    """Mosaic raises if a kernel needs more shared memory; one more stage would not fit."""
    m, k, n, g = 1024, 512, 512, 4
    options = dict(preferred_element_type=out, backend="gpu", tiling=tile)
    shapes = [((m, k), dtype), ((g, k, n) if form == "rows" else (m, n), dtype), ((g,), "int32")]
    if form == "rows":
        fn = functools.partial(tr.grouped_matmul, **options)
        if bias:
            fn, shapes = (
                (lambda x, w, s, b: tr.grouped_matmul(x, w, s, bias=b, **options)),
                [*shapes, ((g, n), "float32")],
            )
    else:
        fn = functools.partial(tr.transposed_grouped_matmul, transpose_lhs=True, **options)
    assert kernels(lowered(fn, *shapes)) == 1
    epilogue = Epilogue(bias=np.dtype("float32") if bias else None)
    problem = question(form, m, k, n, g, dtype, out=np.dtype(jnp.dtype(out)), epilogue=epilogue)
    layout = choose_for_tile(problem, H200, Tiling(*tile))
    more = shared(problem, layout.replace(stages=layout.stages + 1))
    assert more > H200.shared


@pytest.mark.parametrize(
    ("asked", "block_m", "block_n"),
    [
        ((128, 64, 256), 128, 256), ((256, 64, 128), 256, 128), ((256, 64, 256), 256, 192), ((255, 1, 200), 128, 192),
        ((1, 1, 1), 128, 64), ((1000, 5000, 5000), 256, 192), ((200, 64, 5000), 192, 256), ((512, 64, 100), 256, 64),
        ((100, 64, 300), 64, 256), ((20, 64, 256), 64, 256),
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", ["swap-AB", "rows", "contraction"])
def test_a_tile_is_rounded_to_one_that_the_kernels_have(form, asked, block_m, block_n):
    """Swap-AB tiles, for groups that are not large, have any number of 64-row blocks; others have two or four."""
    if form != "swap-AB":
        block_m = 256 if block_m >= 256 else 128
        block_n = min(block_n, 192) if form == "contraction" else block_n
    m = 16384 if form == "rows" else 4096
    form = "rows" if form == "swap-AB" else form
    problem = question(form, m, 1024, 1024, 8)
    m, k, n = asked
    tile = Tiling(m, k, n) if form == "rows" else Tiling(k, m, n)
    layout = choose_for_tile(problem, H200, tile)
    assert (layout.block_m, layout.block_n) == (block_m, block_n)
    target = Target(platform="cuda", kind=H200.kind)
    planned = plan(problem, target, Overrides(backend="gpu", tilings=resolve(tile, problem.m, problem.k, problem.n)))
    assert planned.tiling == tiling_of(problem, layout) and planned.layout == layout


@pytest.mark.parametrize("name", [name for name, card in CARDS.items() if card.hopper])
@pytest.mark.parametrize("form", ["rows", "contraction"])
def test_the_plan_names_the_tile_of_the_layout(form, name):
    card = CARDS[name]
    problem = question(form, 8192, 7168, 2048, 32)
    layout = choose(problem, card)
    tile = (layout.block_m, layout.block_k) if form == "rows" else (layout.block_k, layout.block_m)
    want = Tiling(*tile, layout.block_n)
    assert plan(problem, Target(platform="cuda", kind=card.kind)).tiling == want == tiling_of(problem, layout)


def test_the_larger_the_groups_the_taller_the_tiles():
    layouts = [choose(question("rows", 32 * rows, 4096, 4096, 32), H200) for rows in (4, 60, 500, 4000)]
    assert [(x.block_m, x.block_n, x.swap_ab) for x in layouts] == [
        (64, 256, True), (128, 256, True), (192, 256, True), (256, 192, False),
    ]  # fmt: skip
    assert choose(question("rows", 4096, 4096, 40, 8), H200).block_n == 64


def test_float32_results_do_not_swap_ab():
    small = question("rows", 4096, 4096, 4096, 32, out=np.dtype(np.float32))
    assert not choose(small, H200).swap_ab and choose(small.replace(out=np.dtype(np.float16)), H200).swap_ab


def test_a_layout_prints_itself():
    layout = choose(question("rows", 16384, 4096, 14336, 8), H200)
    assert str(layout) == f"256x192x64, {layout.stages} stages, 132 CTAs, dynamic scheduling"
    assert "static scheduling" in str(layout.replace(dynamic=False))
    assert "192x256x64 swap-AB" in str(choose(question("rows", 16384, 4096, 4096, 32), H200))


def test_small_problems_get_tiles_small_enough_for_all_sms():
    def tile(form, *shape):
        layout = choose(question(form, *shape), H200)
        return layout.block_m, layout.block_n

    # 16 x 22 tiles of 256 x 192 would be two waves and a part of a third; 16 x 32 of 256 x 128 are almost four waves
    assert tile("contraction", 8192, 4096, 4096, 1) == tile("rows", 8192, 4096, 4096, 1) == (256, 128)
    # 18 tiles for a group that may have half of the rows
    assert tile("contraction", 32768, 1536, 512, 40) == (128, 128)
    # many waves of tiles
    assert tile("contraction", 16384, 7168, 4096, 32) == (256, 192)


@pytest.mark.parametrize("block_m", [None, 1, 48, 100])
def test_scales_of_rows_are_copied_to_multiples_of_128_bytes(block_m):
    """In each stage, however few rows a tile has: that is where TMA writes."""
    scales = Epilogue(by_row=True, by_column=True, row_block=128, column_block=(128, 1))
    problem = problem_of((512, 2048), (128, 2048, 1536), dtype="bfloat16").replace(
        rhs=np.dtype(jnp.int4), transpose_rhs=True, epilogue=scales
    )
    card = CARDS["h200"]
    layout = choose(problem, card) if block_m is None else choose_for_tile(problem, card, Tiling(block_m, 128, 128))
    assert layout.upcast and layout.block_m * np.dtype(np.float32).itemsize % 128 == 0
