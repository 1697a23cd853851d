"""The products of the two consumers cover a tile, whatever its height and its width."""

import jax.numpy as jnp
import pytest

from trencadis.backends.gpu.layout import Layout
from trencadis.backends.gpu.mma_shapes import fit, mma_shapes
from trencadis.backends.gpu.tile_scheduler import Tile

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
    """The shape of the product of each consumer that has blocks in a tile."""
    blocks = int(shapes.blocks(at))
    for mine in (-(-blocks // 2), blocks // 2):
        if mine:
            shape = shapes.all[int(shapes.branch(at, jnp.int32(mine)))]
            assert shape.blocks == mine
            yield shape


@pytest.mark.parametrize("columns", [64, 192, 256, 320, 384, 448, 512, 4096])
@pytest.mark.parametrize("fields", LAYOUTS, ids=str)
def test_covers_every_tile(fields, columns):
    layout = Layout(**fields, block_k=64, stages=3, raster_group=8, num_ctas=132)
    shapes = mma_shapes(layout, columns)
    assert len(set(shapes.all)) == len(shapes.all)
    last = (columns - 1) // layout.block_n * layout.block_n
    for column in {0, last}:
        wide = min(layout.block_n, columns - column)
        for units in range(1, layout.block_m // layout.m_unit + 1):
            at = tile(units, column)
            rows = units * layout.m_unit
            copied = layout.heights[int(fit(layout, at, layout.heights))]
            assert rows <= copied <= layout.block_m
            found = list(products(shapes, at))
            down, right = 64 * sum(shape.blocks for shape in found), {shape.n for shape in found}
            if not layout.swap_ab:
                assert (down, right) == (rows, {wide}) and copied == rows
                continue
            assert down == wide
            assert rows <= min(right) and max(right) <= layout.block_m
            if wide == layout.block_n:  # hardly any padding, where most of the work is
                assert right == {copied} and (copied == rows or (rows <= layout.block_m // 2 and copied - rows < 64))
