"""The kernels around the products of an MoE layer: rows of tokens, and sums of the rows of each token, by DMA.

A DMA copies 32-bit words. An array of 16-bit numbers has two rows in each of its words, and one of 8-bit numbers four:

    tokens to rows     x is packed first, so that a word holds several columns of one row, and rows are copied from
                       there; in VMEM the words of several rows are turned into words of one column each
    sums of rows       the pair of rows that share their words is copied, and the one that counts is taken in VMEM

Each function returns None where its kernel does not take the arrays; XLA computes the same then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from trencadis.backends.prepare import pad_to, round_up
from trencadis.backends.tpu.indexing import LANES, Index, Ref, Value, aligned_ds, i32
from trencadis.backends.tpu.row_copies import SUBLANES, RowCopies, for_each

Array = jax.Array

BLOCK_BYTES = 1 << 21  # of rows that are in flight; there are as many again that have arrived
MOST_ROWS = 1024  # whose indices are in scalar memory at a time
MOST_K = 32  # rows of a token: the loops over them are unrolled
PACKED_ROWS = 256  # of a block that is packed
COLUMNS = 2048  # of the sums that are held in registers
MOVED = ("bfloat16", "float16", "float32", "int32", "int8", "uint8", "float8_e4m3fn", "float8_e5m2")
SUMMED = ("bfloat16", "float32")
WORD = np.dtype(np.uint32)


def spread_rows(x: Array, token: Array, *, interpret: bool = False) -> Array | None:
    """The rows [m, d] of tokens x [t, d], one for each entry of token [m]."""
    (t, d), m, packing = x.shape, token.shape[0], max(4 // x.dtype.itemsize, 1)
    rows = _block(m, packing, _words(d, packing))
    if x.dtype.name not in MOVED or 0 in (t, d, m, rows) or rows * _words(d, packing) * 4 > BLOCK_BYTES:
        return None
    words, index = x, jnp.clip(token, i32(0), i32(t - 1))  # copies are not checked
    if packing > 1:
        words = _packed(x, packing, interpret=interpret)
        index = (index % i32(packing)) * i32(words.shape[0] // packing) + index // i32(packing)
    width, dtype = words.shape[-1], np.dtype(words.dtype)
    copies = RowCopies(rows=rows, parts=packing, width=width, dtype=dtype)

    def compute(arrived: Ref, out: Ref) -> None:
        found = [arrived[:, i32(part)].reshape(rows // packing, width) for part in range(packing)]
        for c, each in enumerate(_exchanged(found)):
            out[:, c * width : (c + 1) * width] = each if packing == 1 else pltpu.bitcast(each, x.dtype)

    result = jax.ShapeDtypeStruct((m, d), x.dtype)
    return copies.call(
        compute, index, words, (), result, block=(rows, packing * width), name="trencadis_spread_rows",
        **_options(interpret),
    )  # fmt: skip


def sum_rows(
    y: Array, rows: Array, weights: Array | None, *, masked: bool = False, interpret: bool = False
) -> Array | None:
    """The sum [t, d] of the rows [t, k] of each token, times weights [t, k] if any; with masked, -1 is no row."""
    (m, d), (t, k) = y.shape, rows.shape
    block = _block(t * k, k, round_up(d, LANES)) if 0 < k <= MOST_K else 0
    if y.dtype.name not in SUMMED or 0 in (t, m, d) or block == 0:
        return None
    packing = 4 // y.dtype.itemsize
    words = y if packing == 1 else _pairs(y, interpret=interpret)
    copies = RowCopies(
        rows=block, parts=k, width=d, dtype=np.dtype(y.dtype) if packing == 1 else WORD,
        scratch=(pltpu.VMEM((block // k, d), jnp.float32),),
    )  # fmt: skip

    def compute(arrived: Ref, out: Ref, rows: Ref, *refs: Ref) -> None:
        *weights, total = refs

        def group(at: Index) -> None:
            here = aligned_ds(at * i32(SUBLANES), SUBLANES, SUBLANES)
            row, by_token = rows[here, :], [each[here, :] for each in weights]
            for c in range(0, d, COLUMNS):
                columns = slice(c, min(c + COLUMNS, d))
                total[here, columns] = _summed(arrived.at[at, :, :, columns], row, by_token, masked=masked)

        for_each(copies.groups, group)
        out[...] = total[...].astype(out.dtype)  # registers hold 8 rows of float32, and 16 of bfloat16

    index = (jnp.clip(rows, i32(0), i32(m - 1)) // i32(packing)).reshape(-1)
    known = [rows, *([] if weights is None else [weights.astype(jnp.float32)])]
    return copies.call(
        compute, index, words, known, jax.ShapeDtypeStruct((t, d), y.dtype), block=(block // k, d),
        name="trencadis_sum_rows", **_options(interpret),
    )  # fmt: skip


def _summed(arrived: Ref, row: Value, weights: Sequence[Value], *, masked: bool) -> Value:
    """The sums [8, columns] of rows [k, 8, columns], as words of pairs or numbers, by their indices row [8, k]."""
    total = jnp.zeros(arrived.shape[1:], jnp.float32)
    for j in range(arrived.shape[0]):
        each, at = arrived[i32(j)], row[:, j : j + 1]
        if each.dtype == WORD:  # the even row of a pair is in the low halves of its words
            shift = jnp.broadcast_to((i32(1) - (at & i32(1))) * i32(16), each.shape).astype(WORD)
            each = lax.shift_left(each, shift) & np.uint32(0xFFFF0000)
            each = lax.bitcast_convert_type(each, jnp.float32)
        each = jnp.where(at >= i32(0), each, np.float32(0)) if masked else each
        total += each * weights[0][:, j : j + 1] if weights else each
    return total


def _block(rows: int, parts: int, width: int) -> int:
    """The rows of a block that are in flight together, of so many words each; 0 if a group of them is too large."""
    unit = SUBLANES * max(parts, 1)
    most = min(MOST_ROWS, BLOCK_BYTES // (4 * max(width, 1)))
    return min(max(most // unit * unit, unit if 4 * unit * width <= 2 * BLOCK_BYTES else 0), round_up(rows, unit))


def _words(d: int, packing: int) -> int:
    """The words of a row of d numbers, of which a word has `packing`: whole vector registers."""
    return round_up(d, LANES * packing) // packing if packing > 1 else d


def _packed(x: Array, packing: int, *, interpret: bool) -> Array:
    """The rows of x [t, d] as words [rows, 1, d / packing] of their own.

    A word has one number of each of `packing` ranges of columns. Rows are contiguous, and sorted by their index modulo
    `packing`: those are the rows whose words were the same.
    """
    t, width = x.shape[0], _words(x.shape[1], packing)
    rows = min(PACKED_ROWS, round_up(t, SUBLANES * packing))
    blocks, each = -(-t // rows), rows // packing

    def kernel(x: Ref, out: Ref) -> None:
        found = [pltpu.bitcast(x[:, c * width : (c + 1) * width], WORD) for c in range(packing)]
        for row, words in enumerate(_exchanged(found)):
            out[i32(row)] = words.reshape(each, 1, width)

    words = pl.pallas_call(
        kernel,
        grid=(blocks,),
        in_specs=[pl.BlockSpec((rows, packing * width), lambda i: (i, i32(0)))],
        out_specs=pl.BlockSpec((packing, each, 1, width), lambda i: (i32(0), i, i32(0), i32(0))),
        out_shape=jax.ShapeDtypeStruct((packing, blocks * each, 1, width), WORD),
        name="trencadis_pack_rows",
        **_options(interpret),
    )(x)
    return words.reshape(packing * blocks * each, 1, width)


def _exchanged(words: Sequence[Value]) -> list[Value]:
    """The transpose of a square of numbers, one row in each word: number i of word j becomes number j of word i."""
    bits = 32 // len(words)

    def moved(word: Value, i: int, j: int) -> Value:
        low = lax.shift_right_logical(word, np.uint32(bits * i)) if i else word
        low = low & np.uint32((1 << bits) - 1) if i + 1 < len(words) and j + 1 < len(words) else low
        return lax.shift_left(low, np.uint32(bits * j)) if j else low

    if len(words) == 1:
        return list(words)
    found = []
    for i in range(len(words)):
        fields = [moved(word, i, j) for j, word in enumerate(words)]
        total = fields[0]
        for field in fields[1:]:
            total = total | field
        found.append(total)
    return found


def _pairs(y: Array, *, interpret: bool) -> Array:
    """y [m, d] with an even number of rows, which the kernel views as words; the interpreter cannot, and gets these."""
    y = pad_to(y, (round_up(y.shape[0], 2 * SUBLANES), y.shape[1]))
    return lax.bitcast_convert_type(y.reshape(-1, 2, y.shape[1]).swapaxes(1, 2), WORD) if interpret else y


def _options(interpret: bool) -> dict[str, Any]:
    """How a kernel is compiled. Indices of rows are in bounds; a check of each takes longer than to start its copy."""
    if interpret:
        return {"interpret": pltpu.InterpretParams(uninitialized_memory="nan")}
    return {"compiler_params": pltpu.CompilerParams(disable_bounds_checks=True)}
