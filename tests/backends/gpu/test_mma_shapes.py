"""The products of the two consumers cover a tile, whatever its height and its width."""

import jax.numpy as jnp
import pytest

from trencadis.backends.gpu.layout import Layout
from trencadis.backends.gpu.mma_shapes import fit, mma_shapes
from trencadis.backends.gpu.tile_scheduler import Tile

from .interpreted import rows_problem, sum_problem

pytestmark = pytest.mark.core

LAYOUTS = [
    *({"block_m": block_m, "block_n": block_n} for block_m, block_n in [(256, 192), (256, 64), (128, 256), (128, 192)]),
    *(
        {"block_m": block_m, "block_n": block_n, "swap_ab": True}
        for block_m, block_n in [(192, 256), (128, 256), (64, 256), (96, 128)]
    ),
]


def tile(units, column):
    fields = dict.fromkeys(Tile._fields, jnp.int32(0))
    return Tile(**fields)._replace(units=jnp.int32(units), column=jnp.int32(column))


def products(shapes, at):
    """The shape of the product of each consumer that has blocks in a tile, and its blocks."""
    blocks = int(shapes.blocks(at))
    for mine in (-(-blocks // 2), blocks // 2):
        assert mine or shapes.may_skip
        if mine:
            yield shapes.all[int(shapes.branch(at, jnp.int32(mine)))], mine


@pytest.mark.parametrize("columns", [64, 192, 256, 320, 384, 448, 512, 4096, 14336])
@pytest.mark.parametrize("fields", LAYOUTS, ids=str)
def test_covers_every_tile(fields, columns):
    problem = rows_problem(1024, 64, columns, 4)
    layout = Layout(**fields, block_k=64, stages=3, raster_group=8, num_ctas=132)
    shapes = mma_shapes(problem, layout)
    assert len(set(shapes.all)) == len(shapes.all)
    last = (columns - 1) // layout.block_n * layout.block_n
    padding = last + layout.block_n - columns
    for column in {0, last}:
        wide = min(layout.block_n, columns - column)
        for units in range(1, layout.block_m // layout.m_unit + 1):
            at = tile(units, column)
            rows = units * layout.m_unit
            copied = layout.heights[int(fit(layout, at, layout.heights))]
            assert rows <= copied <= layout.block_m
            found = list(products(shapes, at))
            assert all(shape.blocks == mine for shape, mine in found)
            assert all(part <= whole for shape, _ in found for part, whole in zip(shape, shapes.largest, strict=True))
            down, right = 64 * sum(shape.blocks for shape, _ in found), {shape.n for shape, _ in found}
            down, across = (right, {down}) if layout.swap_ab else ({down}, right)  # rows and columns of the result
            assert across == {wide} or (across == {layout.block_n} and 50 * padding <= columns)
            if not layout.swap_ab:
                assert down == {rows} and (copied == rows or rows < layout.block_m // 2)
                continue
            assert rows <= min(down) and max(down) <= layout.block_m
            if wide == layout.block_n:  # hardly any padding, where most of the work is
                assert down == {copied} and (copied == rows or (rows <= layout.block_m // 2 and copied - rows < 64))


@pytest.mark.parametrize("k", [64, 128, 192, 256, 320, 2880, 4096])
def test_contraction_has_products_only_for_the_heights_that_occur(k):
    layout = Layout(block_m=256, block_n=192, block_k=64, stages=3, raster_group=8, num_ctas=132)
    shapes = mma_shapes(sum_problem(1024, k, 192, 4), layout)
    blocks = -(-k // 64)
    tiles = -(-blocks // 4)
    found = {
        product for units in (blocks // tiles, -(-blocks // tiles)) for product in products(shapes, tile(units, 0))
    }
    assert {shape for shape, _ in found} == set(shapes.all)
