"""Layouts fit into VMEM, and a tile that the caller asks for is taken or refused with an error."""

import math

import hypothesis
import jax.numpy as jnp
import pytest
from hypothesis import strategies as st
from sweep import marked

import trencadis as tr
from trencadis.backends import tpu
from trencadis.backends.prepare import round_up
from trencadis.backends.tpu.choose import choose, choose_for_tile, padded, vmem
from trencadis.core.arguments import problem_of
from trencadis.core.decision import Refusal
from trencadis.core.devices import CHIPS
from trencadis.core.plan import plan
from trencadis.core.problem import Form
from trencadis.core.target import Target
from trencadis.core.tiling import Overrides, Tiling, resolve

from .ahead import compiled, kernels


def refusal(problem, target):
    """The reason why the backend refuses a problem; None if it has a plan."""
    answer = tpu.plan(problem, target, Overrides())
    return answer.reason if isinstance(answer, Refusal) else None


pytestmark = pytest.mark.core

CHIP = [CHIPS[name] for name in ("v5e", "v5p", "v6e", "v7x")]


def target(chip):
    return Target(platform="tpu", kind=chip.kind)


def question(form, m, k, n, g, dtype="bfloat16"):
    shapes = ((m, k), (g, k, n)) if form == "rows" else ((k, m), (m, n))
    problem = problem_of(*shapes, groups=g, dtype=dtype)
    return problem.replace(out=problem.acc) if problem.lhs.itemsize == 1 else problem


def size(limit):
    """A strategy for sizes of all magnitudes up to a limit."""
    return st.floats(0, math.log2(limit)).map(lambda x: round(2**x))


@pytest.mark.parametrize("form", ["rows", "contraction"])
@hypothesis.settings(max_examples=40)
@hypothesis.given(
    m=size(20000),
    k=size(20000),
    n=size(20000),
    g=size(1024),
    dtype=st.sampled_from(["bfloat16", "float32", "int8", "float8_e4m3fn"]),
)
def test_a_layout_fits_or_the_refusal_says_why(form, m, k, n, g, dtype):
    problem = question(form, m, k, n, g, dtype)
    inner = padded(problem)
    assert (inner.k, inner.n) >= (problem.k, problem.n)
    for chip in CHIP:
        layout, reason = choose(inner, chip), refusal(problem, target(chip))
        if layout is None:
            assert f"fits into the {chip.vmem >> 20} MiB of VMEM of a {chip.name}" in reason
            continue
        assert reason is None
        assert vmem(inner, layout) <= chip.vmem
        assert layout.block_n % layout.chunk == 0
        assert all(height % layout.sublane_tile == 0 for height in (*layout.heights, *layout.height_table))
        assert set(layout.height_table) <= set(layout.heights)
        assert layout.num_blocks(inner) >= layout.cores
        if inner.form is Form.CONTRACTION:
            assert layout.block_m % (2 * layout.step_m) == 0 == layout.step_m % layout.sublane_tile
        else:  # zeros are written a row tile at a time
            assert layout.block_m <= round_up(m, layout.sublane_tile)


@pytest.mark.parametrize(
    "shape", [marked(((8192, 4096, 14336, 8),)), (8192, 7168, 2048, 32), marked(((16384, 2048, 768, 128),))]
)
@pytest.mark.parametrize("form", ["rows", "contraction"])
def test_large_layers_have_a_layout(form, shape):
    """Mixtral, DeepSeek-V3 and Qwen3, and their gradients, run on the TPU backend on every chip."""
    problem = question(form, *shape)
    for chip in CHIP:
        for flipped in (problem, problem.replace(k=problem.n, n=problem.k, transpose_rhs=form == "rows")):
            assert plan(flipped, target(chip)).backend == "tpu"
            assert vmem(flipped, choose(padded(flipped), chip)) <= chip.vmem


@pytest.mark.parametrize(
    ("chip", "form", "m", "k", "n", "g", "dtype"),
    [
        marked(("v5e", "rows", 2**20, 1024, 1024, 1024, "bfloat16")),
        marked(("v5p", "rows", 4096, 20000, 640, 8, "float32")),
        marked(("v7x", "rows", 4096, 20000, 1, 8, "float32")),
        marked(("v7x", "contraction", 2**20, 1024, 1024, 1024, "bfloat16")),
        marked(("v5p", "contraction", 4096, 16384, 1, 8, "float32")),
        ("v6e", "contraction", 4096, 512, 16384, 8, "float32"),
    ],
)
def test_a_layout_that_fits_compiles(chip, form, m, k, n, g, dtype):
    options = dict(preferred_element_type=jnp.dtype(dtype), backend="tpu")
    if form == "rows":
        fn, shapes = tr.grouped_matmul, [((m, k), dtype), ((g, k, n), dtype)]
    else:
        fn, shapes = tr.transposed_grouped_matmul, [((k, m), dtype), ((m, n), dtype)]
    text = compiled(CHIPS[chip], lambda *xs: fn(*xs, **options), *shapes, ((g,), "int32"))
    assert kernels(text) == [f"trencadis_{form}"]


@pytest.mark.parametrize("chip", CHIP, ids=lambda chip: chip.name)
@pytest.mark.parametrize("asked", [(128, 1024, 512), (64, 1024, 256), (256, 1024, 1024), (1000, 5000, 5000)])
def test_the_tile_of_the_caller_is_taken_in_rows(chip, asked):
    problem = question("rows", 4096, 1024, 1024, 8)
    layout = choose_for_tile(problem, chip, Tiling(*asked))
    assert layout.sublane_tile * -(-asked[0] // layout.sublane_tile) == layout.block_m
    assert layout.block_n == min(asked[2], 1024)
    planned = plan(problem, target(chip), Overrides(backend="tpu", tilings=resolve(asked, 4096, 1024, 1024)))
    assert planned.tiling == Tiling(layout.block_m, 1024, layout.block_n)  # the tile that runs: k is never split
    assert planned.because.endswith("tile nearest to the one asked for")


@pytest.mark.parametrize("chip", CHIP, ids=lambda chip: chip.name)
@pytest.mark.parametrize("asked", [(512, 256, 512), (1024, 1024, 128), (512, 5000, 5000)])
def test_the_tile_of_the_caller_is_taken_in_a_contraction(chip, asked):
    problem = question("contraction", 4096, 1024, 1024, 8)
    layout = choose_for_tile(problem, chip, Tiling(*asked))
    assert (layout.block_m, layout.block_k, layout.block_n) == (asked[0], min(asked[1], 1024), min(asked[2], 1024))


def test_a_tile_that_does_not_fit_is_refused():
    problem = question("rows", 4096, 20000, 1024, 8, "float32")
    with pytest.raises(ValueError, match=r"tiling: 4096·20000·1024 does not fit into the 128 MiB of VMEM of a v6e"):
        choose_for_tile(problem, CHIPS["v6e"], Tiling(4096, 20000, 1024))


def test_the_plan_names_the_tile_of_the_layout():
    problem = question("rows", 8192, 7168, 2048, 32)
    for chip in CHIP:
        layout = choose(problem, chip)
        assert plan(problem, target(chip)).tiling == Tiling(layout.block_m, layout.block_k, layout.block_n)


@pytest.mark.parametrize("n", [2176, 2432, 2944])
def test_a_tile_of_more_columns_than_n_is_taken(n):
    """For an n that no chunk divides."""
    layout = choose_for_tile(question("rows", 4096, 1024, n, 8), CHIPS["v6e"], Tiling(512, 1024, 4096))
    assert layout.block_n >= n > layout.block_n - layout.chunk
