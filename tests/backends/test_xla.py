"""The row tiles of the XLA backend cover a group at about the cost of its rows, and no whole operand is copied."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import trencadis as tr
from trencadis.backends import loops, xla
from trencadis.core.arguments import problem_of
from trencadis.core.plan import plan
from trencadis.core.target import Target

pytestmark = pytest.mark.core

CPU = Target(platform="cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("transpose_rhs", [False, True])
@pytest.mark.parametrize("k, groups", [(16, 8), (256, 8), (256, 256), (256, 4096), (4096, 8)])
def test_row_tiles_cover_a_group_and_little_more(dtype, transpose_rhs, k, groups):
    problem = problem_of((4096, k), (groups, k, k), dtype=dtype).replace(transpose_rhs=transpose_rhs)
    platform = "cpu" if dtype == "float32" else "tpu"  # not all CPUs multiply bfloat16
    layout = xla._layout(problem, Target(platform=platform), 256)
    fixed = 2**18 / k**2  # rows of arithmetic that take as long as what a tile costs by itself
    for size in range(1, 1200):
        tiles = [len(tile.rows) for tile in xla.row_tiles(problem, layout, 0, size)]
        assert sum(tiles) >= size
        assert sum(tiles[:-1]) < size
        assert sum(tiles) <= size + max(3 * size, 16, fixed)
    assert sum(len(tile.rows) for tile in xla.row_tiles(problem, layout, 0, 1000)) < 1.1 * 1000 + max(64, fixed)


@pytest.mark.parametrize("m, block_m", [(1, 256), (3, 256), (4096, 1), (4096, 5), (4096, 10**6), (300, 256)])
def test_tiles_are_no_taller_than_the_tiling_and_the_array(m, block_m):
    for problem in (problem_of((m, 8), (2, 8, 8)), problem_of((8, m), (m, 8), groups=2)):
        for dtype in ("float32", "bfloat16"):
            layout = xla._layout(problem.replace(lhs=np.dtype(dtype), rhs=np.dtype(dtype)), CPU, block_m)
            assert list(layout.heights) == sorted(set(layout.heights))
            assert 1 <= layout.heights[0] <= layout.heights[-1] <= min(m, block_m)
            assert layout.min_rows[0] == 1
            assert all(least <= height for least, height in zip(layout.min_rows, layout.heights, strict=True))


@pytest.mark.parametrize("rhs", [(4, 8, 8), (400, 8)], ids=["rows", "contraction"])
def test_row_tiles_are_those_of_the_loops(rhs, monkeypatch):
    """What pictures are drawn from: the loops compute the same tiles, and no others, when they run."""
    problem = problem_of((400, 8) if len(rhs) == 3 else (8, 400), rhs, groups=4)
    sizes, seen, tile_at = np.array([37, 0, 300, 60]), [], loops.tile_at

    def noted(problem, rows, height, *, whole):
        def note(start, end):
            row = min(start, problem.rows - height)
            seen.append((range(row, row + height), range(start, min(end, start + height))))

        jax.debug.callback(lambda *values: note(*map(int, values)), rows.start, rows.end)
        return tile_at(problem, rows, height, whole=whole)

    monkeypatch.setattr(loops, "tile_at", noted)
    operands = jnp.ones((400, 8) if len(rhs) == 3 else (8, 400)), jnp.ones(rhs)
    xla.run(plan(problem, CPU), *operands, jnp.asarray(sizes)[None], jnp.zeros(1, jnp.int32))
    jax.effects_barrier()
    layout = plan(problem, CPU).layout
    tiles = [t for start, end in oracle.bounds(sizes, 400) for t in xla.row_tiles(problem, layout, start, end)]
    assert sorted(map(str, seen)) == sorted(str(tuple(tile)) for tile in tiles)
    assert [row for tile in tiles for row in tile.owned] == list(range(397))


@pytest.mark.parametrize("sizes", [[1, 0, 255, 256, 257, 1000, 31, 2], [1802, 0, 0, 0, 0, 0, 0, 0], [0] * 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_groups_around_every_tile_height(sizes, dtype, rng):
    """Sizes that need one tile, several tiles, and tiles of every height."""
    m, k, n = 1802, 5, 3
    x, w, y = (jnp.asarray(rng.normal(size=s), dtype) for s in ((m, k), (8, k, n), (m, n)))
    out = tr.grouped_matmul(x, w, np.array(sizes), backend="xla")
    oracle.check(out, oracle.rows(x, w, sizes), dtype=dtype)
    flipped = tr.grouped_matmul(y, w, np.array(sizes), transpose_rhs=True, backend="xla")
    oracle.check(flipped, oracle.rows(y, w, sizes, transpose_rhs=True), dtype=dtype)
    summed = tr.transposed_grouped_matmul(x, y, np.array(sizes), transpose_lhs=True, backend="xla")
    oracle.check(summed, oracle.contraction(x, y, sizes), dtype=dtype)


@pytest.mark.parametrize("g", [1, 64])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_temporaries_are_a_few_matrices(g, dtype):
    """No temporary has the size of lhs or rhs, and none grows with the number of groups."""
    m, k, n = 2048, 128, 128
    x, w, y = (jax.ShapeDtypeStruct(s, dtype) for s in ((m, k), (g, k, n), (m, n)))
    sizes = jax.ShapeDtypeStruct((g,), jnp.int32)
    rows = functools.partial(tr.grouped_matmul, preferred_element_type=jnp.float32)
    summed = functools.partial(tr.transposed_grouped_matmul, preferred_element_type=jnp.float32, transpose_lhs=True)
    for f, args in ((rows, (x, w)), (summed, (x, y))):
        used = jax.jit(f).lower(*args, sizes).compile().memory_analysis().temp_size_in_bytes
        tile = 4 * (256 * (k + n) + 2 * k * n)  # a tile of each operand and two matrices, in float32
        assert used <= 2 * tile + 64 * 1024


def layers(multiply, count):
    """Value and gradients of layers of three products each, and the shapes of its arguments."""

    def loss(weights, x, sizes):
        for gate, up, down in weights:
            x = multiply(multiply(x, gate, sizes) * multiply(x, up, sizes), down, sizes)
        return x.sum()

    wide, narrow = (jax.ShapeDtypeStruct((16, *shape), jnp.float32) for shape in ((512, 1024), (1024, 512)))
    x, sizes = jax.ShapeDtypeStruct((2048, 512), jnp.float32), jax.ShapeDtypeStruct((16,), jnp.int32)
    return jax.jit(jax.value_and_grad(loss, (0, 1))), ([(wide, wide, narrow)] * count, x, sizes)


def test_compiled_layers_stay_small():
    """What XLA takes its time for: kernels, of which equal ones are compiled once, and instructions of all products."""

    def compiled(multiply):
        fn, arguments = layers(multiply, 2)
        text = fn.lower(*arguments).compile().as_text()
        text = re.sub(r", metadata={[^}]*}", "", text)
        bodies = re.findall(r"^%(?:fused|wrapped)[^\n]*\n(.*?)^}", text, re.DOTALL | re.MULTILINE)
        kernels = {re.sub(r"%[\w.-]+", "", body) for body in bodies if " dot(" not in body}
        return len(re.findall(r"^ .* = ", text, re.MULTILINE)), len(kernels), text.count(" while(")

    ours, theirs = compiled(functools.partial(tr.grouped_matmul, backend="xla")), compiled(jax.lax.ragged_dot)
    assert ours[0] <= 10 * theirs[0], "instructions"
    assert ours[1] <= theirs[1] + 16, "kernels"
    assert ours[2] == 18 * 3, "loops: three in each product"


def test_an_entry_of_a_batch_may_start_with_empty_groups(rng):
    """After unowned rows: no sum of an earlier group is stored for them."""
    sizes = np.array([[0, 3, 0, 1], [0, 0, 2, 0], [0, 0, 0, 0], [1, 0, 0, 4]])
    x, y = (jnp.asarray(rng.normal(size=(4, 9, n)), jnp.bfloat16) for n in (6, 5))
    summed = functools.partial(tr.transposed_grouped_matmul, transpose_lhs=True, preferred_element_type=jnp.bfloat16)
    found = jax.vmap(functools.partial(summed, backend="xla"))(x, y, jnp.asarray(sizes))
    for out, *operands in zip(found, x, y, sizes, strict=True):
        oracle.check(out, oracle.contraction(*operands), dtype="bfloat16")


def test_plan_names_the_tallest_tile():
    assert plan(problem_of((4096, 64), (8, 64, 64)), CPU).tiling == tr.Tiling(256, 64, 64)
    assert plan(problem_of((64, 100), (100, 32), groups=3), CPU).tiling == tr.Tiling(32, 64, 32)


def test_operands_are_converted_only_where_the_machine_needs_it():
    def operand(dtype, platform):
        return xla._operand_dtype(problem_of((8, 8), (2, 8, 8), dtype=dtype), Target(platform=platform))

    assert operand("bfloat16", "tpu") == operand("bfloat16", "cuda") == jnp.bfloat16
    assert operand("float16", "cuda") == jnp.float16
    assert operand("float16", "cpu") == operand("float8_e4m3fn", "cpu") == operand("float32", "tpu") == jnp.float32
    assert operand("int8", "cpu") == operand("int4", "cpu") == jnp.int8
    mixed = problem_of((8, 8), (2, 8, 8), dtype="bfloat16").replace(rhs=np.dtype("float32"))
    assert xla._operand_dtype(mixed, Target(platform="tpu")) == jnp.float32
