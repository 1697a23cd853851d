"""What the two consumers multiply covers a tile, whatever its height and its width."""

import jax.numpy as jnp
import pytest

from trencadis.backends.gpu.layout import Layout
from trencadis.backends.gpu.mma_shapes import fit, shapes
from trencadis.backends.gpu.walk import Tile

pytestmark = pytest.mark.core

LAYOUTS = [
    *({"tall": tall, "wide": wide} for tall, wide in [(256, 192), (256, 64), (128, 256), (128, 192)]),
    *({"tall": tall, "wide": wide, "turned": True} for tall, wide in [(192, 256), (128, 256), (64, 256), (96, 128)]),
]


def tile(units, across):
    fields = dict.fromkeys(Tile._fields, jnp.int32(0))
    return Tile(**fields)._replace(units=jnp.int32(units), across=jnp.int32(across))


def multiplied(kinds, at):
    """The blocks of each consumer, and the columns of its product."""
    blocks = int(kinds.blocks(at))
    for mine in (-(-blocks // 2), blocks // 2):
        if mine:
            shape = kinds.all[int(kinds.branch(at, jnp.int32(mine)))]
            assert shape.blocks == mine
            yield shape


@pytest.mark.parametrize("columns", [64, 192, 256, 320, 384, 448, 512, 4096])
@pytest.mark.parametrize("fields", LAYOUTS, ids=str)
def test_covers_every_tile(fields, columns):
    layout = Layout(**fields, deep=64, stages=3, panel=8, blocks=132)
    kinds = shapes(layout, columns)
    assert len(set(kinds.all)) == len(kinds.all)
    last = (columns - 1) // layout.wide * layout.wide
    for across in {0, last}:
        wide = min(layout.wide, columns - across)
        for units in range(1, layout.tall // layout.unit + 1):
            at = tile(units, across)
            rows = units * layout.unit
            copied = layout.heights[int(fit(layout, at, layout.heights))]
            assert rows <= copied <= layout.tall
            found = list(multiplied(kinds, at))
            down, right = 64 * sum(shape.blocks for shape in found), {shape.columns for shape in found}
            if not layout.turned:
                assert (down, right) == (rows, {wide}) and copied == rows
                continue
            assert down == wide
            assert rows <= min(right) and max(right) <= layout.tall
            if wide == layout.wide:  # hardly any padding, where most of the work is
                assert right == {copied} and (copied == rows or (rows <= layout.tall // 2 and copied - rows < 64))
