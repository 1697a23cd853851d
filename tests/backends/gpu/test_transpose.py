"""The transpose of bytes in shared memory, by a model of its instructions."""

import itertools
import re

import numpy as np
import pytest

from trencadis.backends.gpu import transpose as t

pytestmark = pytest.mark.core

LANES = np.arange(32)
SHAPES = [(128, 128, 128, 128), (128, 128, 64, 64), (64, 128, 128, 64), (128, 64, 64, 128)]


def matrices(memory, addresses):
    """The four matrices [4, 8 rows, 16 bytes] whose rows start at these addresses, one to a lane."""
    return memory[addresses[:, None] + np.arange(16)].reshape(4, 8, 16)


def loaded(memory, addresses):
    """ldmatrix.x4.trans: the words of each lane, [4, 32 lanes, 4 bytes]."""
    units = matrices(memory, addresses).reshape(4, 8, 8, 2)  # of 16 bits, as two bytes
    return units.transpose(0, 2, 1, 3).reshape(4, 32, 4)


def permuted(first, second, selectors):
    """prmt.b32: for each lane, the bytes of two words that the nibbles of its selector name."""
    both = np.concatenate([first, second], axis=1)
    return np.stack([both[LANES, selectors >> 4 * i & 15] for i in range(4)], axis=1)


def run(source, shape):
    """A tile in shared memory, transposed as a warpgroup does it; and the banks of each access, [.., 8 rows]."""
    rows, columns, of_source, of_target = shape
    target, banks = np.zeros(rows * columns, np.uint8), []
    steps = itertools.product(range(0, rows, t.UNIT), range(0, columns, t.WARPS * t.CHUNK), range(t.WARPS))
    for top, left, warp in steps:
        threads = 32 * warp + LANES
        reads = np.array([t.read_offset(x, top, left, columns=columns, swizzle=of_source) for x in threads])
        writes = np.array([t.write_offset(x, top, left, rows=rows, swizzle=of_target) for x in threads])
        first = np.array([t.first_selector(x) for x in threads])
        words = loaded(source, reads)
        out = [permuted(*words[i : i + 2], how) for i in (0, 2) for how in (first, first ^ t.OTHER_COLUMN)]
        target[writes[:, None] + np.arange(16)] = np.concatenate([word.reshape(8, 16) for word in out])
        banks += [each // 16 % 8 for x in (reads, writes) for each in x.reshape(4, 8)]
    return target, banks


def place(tile, swizzle):
    """A matrix in shared memory."""
    rows, columns = tile.shape
    memory = np.zeros(tile.size, np.uint8)
    for row, column in np.ndindex(rows, columns):
        memory[t.offset(row, column, columns, swizzle)] = tile[row, column]
    return memory


@pytest.mark.parametrize("shape", SHAPES)
def test_the_transpose_without_bank_conflicts(shape):
    rows, columns, of_source, of_target = shape
    tile = np.random.default_rng(0).integers(0, 256, (rows, columns), np.uint8)
    got, banks = run(place(tile, of_source), shape)
    np.testing.assert_array_equal(got, place(tile.T, of_target))
    assert all(len(set(each)) == 8 for each in banks)


@pytest.mark.parametrize("shape", SHAPES)
def test_places_are_xor_of_those_of_the_bits_of_a_thread(shape):
    rows, columns, of_source, of_target = shape
    places = [
        lambda x, *at: t.read_offset(x, *at, columns=columns, swizzle=of_source),
        lambda x, *at: t.write_offset(x, *at, rows=rows, swizzle=of_target),
        lambda x, *at: t.first_selector(x),
    ]
    units = [(rows - t.UNIT, columns - t.WARPS * t.CHUNK), (0, 0)]
    for each, unit, thread in itertools.product(places, units, range(128)):
        bits = [each(1 << bit) ^ each(0) for bit in range(t.THREAD_BITS) if thread >> bit & 1]
        assert each(thread, *unit) == np.bitwise_xor.reduce([each(0, *unit), *bits], initial=0)


def test_the_instructions_of_the_model_are_those_of_the_kernel():
    names = re.findall(r"(ldmatrix|stmatrix|prmt)", t.TEXT)
    assert names == ["ldmatrix", *["prmt"] * 4, "stmatrix"]
