"""The kernel of rows of 16 bits by weights of 8 or 4, which it unpacks in registers; scales may change along k.

Weights are the left factor of a tile, `out.T = weights.T @ rows.T`: tensor cores that read one of their factors from
registers read the left one there. 4-bit values stay packed, two to a byte. A byte holds an even and an odd entry of k,
low nibble first; each meets its own half of the rows, which come in that order (`weights_layout.even_odd`), so that no
number moves between threads. Interleaved weights (`core/interleave.py`) are read as words of 32 bits, which hold what
a thread of wgmma multiplies.

    scales        none along k    the epilogue multiplies finished sums
    in factors    exact products  weights are multiplied by them; nothing is rounded
    promotion     any other       the sum of each block of k is multiplied by them, and added to float32 sums

Scales of rows that change along k are promoted too.
"""

import triton
import triton.language as tl

from trencadis.backends.triton.kernels import finish, raster, unowned_at
from trencadis.core.interleave import FLOAT4_MOVES

MOVES = tl.constexpr(FLOAT4_MOVES)


@triton.jit
def half(bits, sign, SHIFT: tl.constexpr):
    """The float32 number of a float16 whose bits these are; the sign is to be shifted."""
    return (bits | sign << SHIFT).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def numbers(b, FORMAT: tl.constexpr):
    """The float32 numbers that the low bits of bytes stand for.

    Exponent and fraction of a float go to where float16 has them, and a product corrects the bias of the exponent.
    """
    bits = b.to(tl.int32)
    if FORMAT == "int8":
        z = ((bits ^ 128) - 128).to(tl.float32)
    elif FORMAT == "int4":
        z = ((bits & 15 ^ 8) - 8).to(tl.float32)
    elif FORMAT == "float8_e8m0fnu":
        bits = tl.where(bits == 0, 1 << 22, tl.where(bits == 255, 0x7FC00000, bits << 23))
        z = bits.to(tl.float32, bitcast=True)
    elif FORMAT == "float4_e2m1fn":
        z = half((bits & 7) << 9, bits & 8, 12) * 2.0**14
    elif FORMAT == "float8_e4m3fn":
        some = (bits & 127) << 7
        some = tl.where(some == 127 << 7, 0x7F80, some)  # NaN
        z = half(some, bits & 128, 8) * 2.0**8
    elif FORMAT == "float8_e5m2":
        z = half(0, bits, 8)
    else:
        z = b.to(tl.float32)
    return z


@triton.jit
def scales_at(scales, n, first, COUNT: tl.constexpr, SCALES: tl.constexpr, PER: tl.constexpr, EVERY: tl.constexpr = 1):
    """The scales of a step from the `first` along k on, as float32 numbers: [block_n, PER], of COUNT along k."""
    at = first + tl.arange(0, PER) * EVERY
    there = tl.load(scales + n[:, None] + at[None, :], mask=(at < COUNT)[None, :], other=0)
    return numbers(there, SCALES)


@triton.jit
def scales_of_nibbles(
    scales, n, done, COUNT: tl.constexpr, SCALES: tl.constexpr, PER: tl.constexpr, LENGTH: tl.constexpr,
    PACK: tl.constexpr,
):  # fmt: skip
    """A step's scales for the low nibbles of bytes and for the high ones: the same unless each of k has its own."""
    EVERY: tl.constexpr = PACK if LENGTH == 1 else 1
    low = scales_at(scales, n, done // LENGTH, COUNT, SCALES, PER, EVERY)
    high = low
    if EVERY == 2:
        high = scales_at(scales, n, done + 1, COUNT, SCALES, PER, EVERY)
    return low, high


@triton.jit
def spread(scale, LENGTH: tl.constexpr):
    """Scales [block_n, PER] in all places of their blocks: [block_n, PER * LENGTH]."""
    return tl.reshape(
        tl.broadcast_to(scale[:, :, None], (scale.shape[0], scale.shape[1], LENGTH)),
        (scale.shape[0], scale.shape[1] * LENGTH),
    )


@triton.jit
def factor(
    b, scale, FORMAT: tl.constexpr, UNPACK: tl.constexpr, PRODUCT: tl.constexpr, IN_FACTORS: tl.constexpr,
    PER: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The weights that bytes [block_n, step] stand for, multiplied by their scales if that is exact.

    UNPACK and PRODUCT are PTX, or None where it is not for NVIDIA: then they are computed in float32.
    """
    if UNPACK is None:
        z = numbers(b, FORMAT)
        if IN_FACTORS:
            z = z * spread(scale, b.shape[1] // PER)
        z = z.to(DOT)
    else:
        z = tl.inline_asm_elementwise(UNPACK, "=r,=r,r", [b], dtype=DOT.value, is_pure=True, pack=4)
        if IN_FACTORS:
            each = spread(scale.to(DOT), b.shape[1] // PER)
            z = tl.inline_asm_elementwise(PRODUCT, "=r,r,r", [z, each], dtype=DOT.value, is_pure=True, pack=2)
    return z


@triton.jit
def in_order(pairs):
    """Pairs [block_n, words, ...] of four words to a run, in the order of k: [block_n, all of them]."""
    WORDS: tl.constexpr = pairs.shape[1]
    PAIRS: tl.constexpr = pairs.numel // (pairs.shape[0] * WORDS)
    runs = tl.reshape(pairs, (pairs.shape[0], WORDS // 4, 4, PAIRS))
    return tl.reshape(tl.permute(runs, (0, 1, 3, 2)), (pairs.shape[0], WORDS * PAIRS))


@triton.jit
def both(low, high):
    """The two of each pair side by side: [block_n, 2 * pairs]."""
    return tl.reshape(tl.join(low, high), (low.shape[0], 2 * low.shape[1]))


@triton.jit
def nibbles(words, PAIR: tl.constexpr, FORMAT: tl.constexpr):
    """The two 4-bit values of a pair in the low bits of both halves of interleaved words."""
    z = (words >> 4 * PAIR) & 0x000F000F
    if FORMAT == "float4_e2m1fn":
        bits = words.to(tl.uint32, bitcast=True)
        moved = bits & 0
        for move in tl.static_range(len(MOVES[PAIR])):
            by: tl.constexpr = MOVES[PAIR][move][0]
            moved |= (bits << by | bits >> (32 - by) % 32) & MOVES[PAIR][move][1] * 65537
        z = (moved >> 12 & 0x00080008) | (moved >> 6 & 0x00070007)
    return z.to(tl.int32)


@triton.jit
def numbers_at(words, AT: tl.constexpr, FORMAT: tl.constexpr, PACK: tl.constexpr):
    """The float32 numbers that words have from bit AT on, in the low or the high half: [block_n, words, ...]."""
    if PACK == 1:
        z = tl.join(numbers((words >> AT) & 255, FORMAT), numbers((words >> AT + 8) & 255, FORMAT))
    else:
        p = numbers(nibbles(words, 0, FORMAT) >> AT, FORMAT)
        q = numbers(nibbles(words, 1, FORMAT) >> AT, FORMAT)
        r = numbers(nibbles(words, 2, FORMAT) >> AT, FORMAT)
        s = numbers(nibbles(words, 3, FORMAT) >> AT, FORMAT)
        z = tl.join(tl.join(p, r), tl.join(q, s))
    return z


@triton.jit
def interleaved_factor(
    words, scale, FORMAT: tl.constexpr, PACK: tl.constexpr, UNPACK: tl.constexpr, PRODUCT: tl.constexpr,
    IN_FACTORS: tl.constexpr, PER: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """As `factor`, of interleaved words [block_n, step / numbers of a word]: each thread keeps what it has unpacked."""
    if UNPACK is None:
        low = in_order(numbers_at(words, 0, FORMAT, PACK))
        z = both(low, in_order(numbers_at(words, 16, FORMAT, PACK)))
        if IN_FACTORS:
            z = z * spread(scale, z.shape[1] // PER)
        z = z.to(DOT)
    else:
        if PACK == 1:
            p, q = tl.inline_asm_elementwise(UNPACK, "=&r,=&r,r", [words], (tl.int32, tl.int32), True, 1)
            pairs = in_order(tl.join(p, q))
        else:
            p, q, r, s = tl.inline_asm_elementwise(
                UNPACK, "=&r,=&r,=&r,=&r,r", [words], (tl.int32, tl.int32, tl.int32, tl.int32), True, 1
            )
            pairs = in_order(tl.join(tl.join(p, r), tl.join(q, s)))
        if IN_FACTORS:
            each = scale.to(DOT).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
            each = spread(each | each << 16, pairs.shape[1] // PER)
            pairs = tl.inline_asm_elementwise(PRODUCT, "=r,r,r", [pairs, each], tl.int32, True, 1)
        low = pairs.to(tl.int16).to(DOT, bitcast=True)
        z = both(low, (pairs >> 16).to(tl.int16).to(DOT, bitcast=True))
    return z


@triton.jit
def complete(acc, WAIT: tl.constexpr):
    """The same sums, once they are complete.

    wgmma reads its left factor from registers while the program runs on. Triton 3.6 would let products of a step run on
    into the next one, which writes its weights to the same registers. Here each product is waited for.
    """
    if WAIT is not None:
        acc = tl.inline_asm_elementwise(WAIT, "=f,0", [acc], tl.float32, True, 1)
    return acc


@triton.jit
def step(
    acc, w_at, x_at, scale, scale_high, rows, inside, x_inside,
    FORMAT: tl.constexpr, PACK: tl.constexpr, INTERLEAVED: tl.constexpr, DOT: tl.constexpr, STEP: tl.constexpr,
    UNPACK: tl.constexpr, UNPACK_HIGH: tl.constexpr, PRODUCT: tl.constexpr, PER: tl.constexpr, IN_FACTORS: tl.constexpr,
    WAIT: tl.constexpr,
):  # fmt: skip
    """The sums [block_n, block_m] after one step along k; `rows` is the mask of rows, the others those of k, or None.

    scale_high are the scales of the high nibbles of bytes, and scale those of the low ones, or of bytes and words.
    Unowned rows are not read: where groups are small, they would be most of what a tile reads beside weights.
    """
    there = rows[None, :]
    if inside is None:
        w = tl.load(w_at)
    else:
        w = tl.load(w_at, mask=inside[None, :], other=0)
        there = there & x_inside[:, None]
    x = tl.load(x_at, mask=there, other=0.0)
    if INTERLEAVED:
        left = interleaved_factor(w, scale, FORMAT, PACK, UNPACK, PRODUCT, IN_FACTORS, PER, DOT)
    else:
        left = factor(w, scale, FORMAT, UNPACK, PRODUCT, IN_FACTORS, PER, DOT)
    acc = complete(tl.dot(left, x, acc), WAIT)
    if PACK == 2 and not INTERLEAVED:
        x = tl.load(x_at + STEP, mask=there, other=0.0)
        if UNPACK_HIGH is None:
            w = w >> 4
        left = factor(w, scale_high, FORMAT, UNPACK_HIGH, PRODUCT, IN_FACTORS, PER, DOT)
        acc = complete(tl.dot(left, x, acc), WAIT)
    return acc


@triton.jit
def promoted(acc, part, scale, by_row, rows, done, K: tl.constexpr, ROW_LENGTH: tl.constexpr):
    """Sums [block_n, block_m], plus those of the step at `done` times the scales of its columns and of its rows."""
    if ROW_LENGTH > 0:
        COUNT: tl.constexpr = (K + ROW_LENGTH - 1) // ROW_LENGTH
        part = part * tl.load(by_row + rows.to(tl.int64) * COUNT + done // ROW_LENGTH)[None, :]
    if scale is not None:
        part = part * scale
    return acc + part


@triton.jit
def nth_of(scales, NTH: tl.constexpr):
    """One of the scales [block_n, 1, 2 or 4] of a step along k: [block_n, 1]."""
    COUNT: tl.constexpr = scales.shape[1]
    z = scales
    if COUNT == 4:
        even, odd = tl.split(tl.reshape(scales, (scales.shape[0], 2, 2)))
        z = even if NTH % 2 == 0 else odd
    if COUNT > 1:
        low, high = tl.split(z)
        z = (low if NTH < COUNT // 2 else high)[:, None]
    return z


@triton.jit
def sums(
    lhs, rhs, scales, by_row, row, column, group, local, m, n, rows,
    K: tl.constexpr, N: tl.constexpr, K_LHS: tl.constexpr, TRANSPOSED: tl.constexpr, WEIGHTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr, PACK: tl.constexpr, INTERLEAVED: tl.constexpr, DOT: tl.constexpr,
    UNPACK: tl.constexpr, UNPACK_HIGH: tl.constexpr, PRODUCT: tl.constexpr,
    SCALES: tl.constexpr, LENGTH: tl.constexpr, ACROSS: tl.constexpr, PER: tl.constexpr, IN_FACTORS: tl.constexpr,
    ROW_LENGTH: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """The sums [block_n, block_m] of a tile along k.

    A step of several blocks of k is multiplied block by block where the sum of each is scaled. The number of steps is a
    constant: where it may be zero, ptxas lets each product of the tensor cores wait for the one before.
    """
    PROMOTED: tl.constexpr = LENGTH > 0 and not IN_FACTORS
    PARTS: tl.constexpr = BLOCK_K // LENGTH if PROMOTED and BLOCK_K > LENGTH else 1
    HELD: tl.constexpr = 4 * PACK if INTERLEAVED else PACK  # numbers of a word or byte of weights
    STEP: tl.constexpr = BLOCK_K // PARTS // HELD  # words or bytes along k that are multiplied at once
    STRIDE: tl.constexpr = STEP if TRANSPOSED else STEP * N
    k = tl.arange(0, STEP)
    x_k = tl.arange(0, STEP * HELD if INTERLEAVED else STEP)
    x_at = lhs + row.to(tl.int64) * K_LHS + m[None, :] * K_LHS + x_k[:, None]  # [x_k, block_m]
    w_at = rhs + (group % WEIGHTS).to(tl.int64) * (K // HELD * N)  # [block_n, step]
    if TRANSPOSED:
        w_at += (column * BLOCK_N).to(tl.int64) * (K // HELD) + n[:, None] * (K // HELD) + k[None, :]
    else:
        w_at += column * BLOCK_N + n[:, None] + k[None, :] * N
    if LENGTH > 0:
        COUNT: tl.constexpr = (K + LENGTH - 1) // LENGTH
        scales += local.to(tl.int64) * (COUNT * ((N + ACROSS - 1) // ACROSS))
        s = (column * BLOCK_N + n) // ACROSS * COUNT  # [block_n]
    if PROMOTED:
        ahead = scales_at(scales, s, 0, COUNT, SCALES, PARTS)
    acc = tl.full((BLOCK_N, BLOCK_M), 0, tl.float32)
    for first in range(0, K, BLOCK_K):
        if PROMOTED:  # those of the next step are on their way while this one is multiplied
            here = ahead
            ahead = scales_at(scales, s, (first + BLOCK_K) // LENGTH, COUNT, SCALES, PARTS)
        for nth in tl.static_range(PARTS):
            done = first + nth * (STEP * HELD)
            scale, scale_high = None, None
            if PROMOTED:
                scale = nth_of(here, nth)
            elif IN_FACTORS:
                scale, scale_high = scales_of_nibbles(scales, s, done, COUNT, SCALES, PER, LENGTH, PACK)
            inside, x_inside = None, None
            if K % BLOCK_K != 0:
                inside = k < (K - done) // HELD
                x_inside = x_k < K - done if INTERLEAVED else inside
            part = acc
            if PROMOTED or ROW_LENGTH > 0:
                part = tl.full((BLOCK_N, BLOCK_M), 0, tl.float32)
            part = step(
                part, w_at, x_at, scale, scale_high, rows, inside, x_inside,
                FORMAT, PACK, INTERLEAVED, DOT, STEP, UNPACK, UNPACK_HIGH, PRODUCT, PER, IN_FACTORS, WAIT,
            )  # fmt: skip
            if PROMOTED or ROW_LENGTH > 0:
                acc = promoted(acc, part, None if IN_FACTORS else scale, by_row, row + m, done, K, ROW_LENGTH)
            else:
                acc = part
            x_at += STEP * HELD
            w_at += STRIDE
    return acc


@triton.jit
def weights(
    count, group_of, row_of, end_of, lhs, rhs, scales, by_row, by_column, bias, existing, out,
    K: tl.constexpr, N: tl.constexpr, K_LHS: tl.constexpr, TRANSPOSED: tl.constexpr,
    WEIGHTS: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, RASTER: tl.constexpr,
    FORMAT: tl.constexpr, PACK: tl.constexpr, INTERLEAVED: tl.constexpr, DOT: tl.constexpr,
    UNPACK: tl.constexpr, UNPACK_HIGH: tl.constexpr, PRODUCT: tl.constexpr,
    SCALES: tl.constexpr, LENGTH: tl.constexpr, ACROSS: tl.constexpr, PER: tl.constexpr,
    IN_FACTORS: tl.constexpr, ROW_LENGTH: tl.constexpr, WAIT: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """A program for each tile. K_LHS is the length of rows of lhs, PACK the numbers in a byte.

    LENGTH and ACROSS are the entries of k and of n that share a scale, and PER the scales along k of what a step
    multiplies at once. ROW_LENGTH is the entries of k that share a scale of a row; 0: all of them.
    """
    owned = tl.load(count)  # row tiles; those of unowned rows come after them
    total = tl.load(count + 1)
    DOWN: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    index = tl.program_id(0)
    if index < owned * DOWN:
        tile, column = raster(index, owned, DOWN, RASTER)
        group = tl.load(group_of + tile)
        row = tl.load(row_of + tile)
        end = tl.load(end_of + tile)
        local = group % GROUPS
        # columns past the end repeat the first, and rows past it are zero: their results are not stored
        along = tl.arange(0, BLOCK_M)
        rows_inside = along < end - row
        m = tl.where(rows_inside, along, 0)  # [block_m]
        across = tl.arange(0, BLOCK_N)
        n_inside = across < N - column * BLOCK_N
        n = across
        if N % BLOCK_N != 0:
            n = tl.max_contiguous(tl.multiple_of(tl.where(n_inside, across, 0), BLOCK_N), BLOCK_N)  # [block_n]
        acc = sums(
            lhs, rhs, scales, by_row, row, column, group, local, m, n, rows_inside, K, N, K_LHS, TRANSPOSED, WEIGHTS,
            BLOCK_M, BLOCK_N, BLOCK_K, FORMAT, PACK, INTERLEAVED, DOT, UNPACK, UNPACK_HIGH, PRODUCT,
            SCALES, LENGTH, ACROSS, PER, IN_FACTORS, ROW_LENGTH, WAIT,
        )  # fmt: skip
        of_rows = by_row
        if ROW_LENGTH > 0:
            of_rows = None  # they are applied
        at = row.to(tl.int64) * N + column * BLOCK_N
        offsets = m[:, None] * N + n[None, :]
        stored = rows_inside[:, None] & n_inside[None, :]
        kept = existing
        if existing is not None:
            kept = existing + at
        z = finish(
            tl.trans(acc), of_rows, by_column, bias, kept, row + m, local * N + column * BLOCK_N + n,
            offsets, stored, ACTIVATION, True,
        )  # fmt: skip
        tl.store(out + at + offsets, z.to(out.dtype.element_ty), mask=stored)
    elif index < total * DOWN:
        unowned_at(index, row_of, end_of, out, N, BLOCK_M, BLOCK_N)
