"""The transpose of a tile of bytes in shared memory: wgmma multiplies 8-bit operands only K-major.

A warp reads 32 rows of 16 bytes by `ldmatrix.trans`, which transposes 8 x 8 matrices of 16 bits, that is, of two bytes.
Byte permutations separate the two, and `stmatrix` writes 16 rows of 32 bytes:

    ldmatrix.trans     lanes 4 q to 4 q + 3 get columns 2 q and 2 q + 1, four rows each
    prmt               in each lane, a word for either column
    stmatrix           rows 2 q and 2 q + 1 of the transpose, four bytes from each lane

Which rows make up a matrix is chosen so that no two are in the same banks, with a swizzle of 64 or of 128 bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from trencadis.backends.gpu.layout import ROW_ALIGN
from trencadis.backends.gpu.tile_scheduler import Ref

Value = Any  # an MLIR value: its type is generic or not, by the version of jaxlib
Place = Callable[[int], int]  # of a thread
CHUNK = 16  # bytes of a row of a matrix, and columns that a warp transposes at a time
UNIT = 32  # rows that a warp transposes at a time
WARPS = 4
THREAD_BITS = 7  # of the number of a thread in its warpgroup

# operands are the addresses to read and to write, and the bytes for the first and the second matrix
TEXT = """{
    .reg .b32 a, b, c, d, e, f, g, h;
    ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {a, b, c, d}, [$0];
    prmt.b32 e, a, b, $2;
    prmt.b32 f, a, b, $3;
    prmt.b32 g, c, d, $2;
    prmt.b32 h, c, d, $3;
    stmatrix.sync.aligned.m8n8.x4.shared.b16 [$1], {e, f, g, h};
}"""


def transpose_bytes(source: Ref, target: Ref, source_swizzle: int, target_swizzle: int) -> None:
    """Write the transpose of a tile [rows, columns] of bytes to a tile [columns, rows].

    All warps of a warpgroup do so together. Rows are a multiple of 32, columns one of 64.
    """
    rows, columns = source.shape
    reads = functools.partial(read_offset, columns=columns, swizzle=source_swizzle)
    writes = functools.partial(write_offset, rows=rows, swizzle=target_swizzle)
    types = tuple(mgpu.RefType(_transforms(swizzle)) for swizzle in (source_swizzle, target_swizzle))

    @mgpu.inline_mgpu(arg_types=types)
    def transpose(_: Any, source: Value, target: Value) -> None:
        i32 = ir.IntegerType.get_signless(32)
        from_, to = (llvm.ptrtoint(i32, utils.memref_ptr(ref)) for ref in (source, target))
        read, write, first = (_of_thread(place) for place in (reads, writes, first_selector))
        second = arith.xori(first, utils.c(OTHER_COLUMN, i32))
        for top in range(0, rows, UNIT):
            for left in range(0, columns, WARPS * CHUNK):
                here = arith.addi(from_, arith.xori(read, utils.c(reads(0, top, left), i32)))
                there = arith.addi(to, arith.xori(write, utils.c(writes(0, top, left), i32)))
                llvm.inline_asm(None, [here, there, first, second], TEXT, "r,r,r,r,~{memory}", has_side_effects=True)

    transpose(source, target)


def offset(row: int, column: int, columns: int, swizzle: int) -> int:
    """Where a byte of a tile with so many columns is in shared memory."""
    runs = columns // swizzle
    at = (row // ROW_ALIGN * runs + column // swizzle) * ROW_ALIGN * swizzle + row % ROW_ALIGN * swizzle
    at += column % swizzle
    return at ^ at // 128 % (swizzle // CHUNK) * CHUNK


def read_offset(thread: int, top: int = 0, left: int = 0, *, columns: int, swizzle: int) -> int:
    """Where the row of a matrix is whose address a thread passes to ldmatrix, in the unit at this row and column.

    Of 16 rows, those with bit 1 and bit 3 equal are in the first matrix, and the others in the second.
    """
    lane, warp = thread % 32, thread // 32
    low, middle, high, matrix, half = (lane >> bit & 1 for bit in range(5))
    row = low + 4 * middle + 8 * high + 2 * (high ^ matrix) + 16 * half
    return offset(top + row, left + CHUNK * warp, columns, swizzle)


def write_offset(thread: int, top: int = 0, left: int = 0, *, rows: int, swizzle: int) -> int:
    """Where the row of a matrix is whose address a thread passes to stmatrix, in the transpose of the same unit.

    The first matrix has the even ones of columns 0 to 7 and the odd ones of columns 8 to 15, the second the others.
    """
    lane, warp = thread % 32, thread // 32
    matrix, half = lane >> 3 & 1, lane >> 4
    column = 2 * (lane % 8) + (lane >> 2 & 1 ^ matrix)
    return offset(left + CHUNK * warp + column, top + CHUNK * half, rows, swizzle)


OTHER_COLUMN = 0x1111  # what selectors of the two columns that lanes have differ by


def first_selector(thread: int) -> int:
    """The bytes of two words from ldmatrix, for the permutation, that a lane passes to the first matrix of stmatrix.

    They are 0, 2, 4 and 6 for an even column. In the upper two of four lanes, the words hold their rows in reverse.
    """
    return 0x6420 ^ (thread >> 1 & 1) * 0x4444 ^ (thread >> 4 & 1) * OTHER_COLUMN


def _of_thread(place: Place) -> Value:
    """The place of the thread that runs this: XOR of one number for each bit of the thread."""
    i32 = ir.IntegerType.get_signless(32)
    thread, found = utils.thread_idx(), utils.c(place(0), i32)
    for bit in range(THREAD_BITS):
        is_set = arith.andi(arith.shrui(thread, utils.c(bit, i32)), utils.c(1, i32))
        found = arith.xori(found, arith.muli(is_set, utils.c(place(1 << bit) ^ place(0), i32)))
    return found


def _transforms(swizzle: int) -> tuple[Any, Any]:
    return mgpu.TilingTransform((ROW_ALIGN, swizzle)), mgpu.SwizzleTransform(swizzle)
