"""The sizes of the kernel for a chip: what fits into its VMEM."""

from __future__ import annotations

import dataclasses

from trencadis.backends.prepare import round_up
from trencadis.backends.tpu.indexing import LANES
from trencadis.backends.tpu.ragged.flat import TILE
from trencadis.backends.tpu.resident.align import MARGIN
from trencadis.backends.tpu.resident.sizes import CHUNK, COLUMNS, PAIR, WIDE, Sizes
from trencadis.core.devices import MIB, Chip

SHARE = 0.94  # of VMEM that the buffers take; the rest is for what the compiler keeps there
SMALL = 192  # mean size below which products are smaller
# rows and k of a product, and products of a basic block: where MXUs are 256 wide, sums have to be added less often
LARGE_MXU = 256, 512, 20
SMALL_MXU = 256, 256, 24


def sizes_for(chip: Chip, itemsize: int, out_size: int, mean: int, *, streamed: bool, cores: int) -> Sizes:
    """The sizes for matrices of this mean size, of entries of so many bytes; a streamed lhs needs few blocks."""
    packing = 4 // itemsize
    longest = chip.vmem // (16 * MIB) * 512 * packing
    large = LARGE_MXU if chip.mxus == 2 else SMALL_MXU
    rows, depth, products = large if mean >= SMALL or not streamed else (64, 256, 8)
    strip = max(longest, chip.vmem // 128)
    base = Sizes(
        rows=rows, depth=depth, products=products, longest=longest, strip=strip, lhs=0, rhs=0,
        raw=2 * (-(-rows * longest // TILE) + MARGIN), sums=2 * (longest // LANES), slot_rows=64,
        cores=cores,
    )  # fmt: skip
    panel = -(-longest // depth) * depth * rows // (LANES * packing)
    left = int(chip.vmem * SHARE) - _fixed(base, itemsize, out_size) - (2 * panel * LANES * 4 if streamed else 0)
    words = left // (LANES * 4)
    tile = depth * COLUMNS // (LANES * packing)
    rhs = words // tile * tile if streamed else words // (2 * tile) * tile
    return dataclasses.replace(base, lhs=2 * panel if streamed else rhs, rhs=rhs)


def _fixed(sizes: Sizes, itemsize: int, out_size: int) -> int:
    """The bytes of all buffers but those of the blocks."""
    packing = 4 // itemsize
    room = round_up(sizes.strip, 2 * TILE) + (2 + sizes.converted) * 2 * TILE
    rows = (
        sizes.rows // PAIR * CHUNK * (PAIR + 1)  # spread
        + (CHUNK + 2) * sizes.rows  # staged, carried, and unused blocks
        + (sizes.sums + (WIDE + 1) * CHUNK) * sizes.pitch
        + 2 * sizes.flat_rows
    )
    entries = sizes.raw * TILE + CHUNK * LANES * packing
    return rows * LANES * 4 + entries * itemsize + (3 * room + 3 * 2 * TILE) * out_size + (1 << 18)
