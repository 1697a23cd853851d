"""Kernels of a stable counting sort by expert, in Triton: no atomics on memory, and no order that varies.

    block_counts    how many ids of each expert a block of ids has                   [blocks, experts]
    sum_counts      how many of them the blocks before have, and all together        for many blocks only
    place           the row of each id: where its expert starts, plus those before, plus its rank in the block

Ids outside of [0, EXPERTS) count for no expert, and get the last rows.
"""

import triton
import triton.language as tl


@triton.jit
def block_of_ids(ids, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The positions of a program's block of ids, and the ids; -1 past the end."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    return at, tl.load(ids + at, mask=at < SIZE, other=-1)


@triton.jit
def histogram(expert, EXPERTS: tl.constexpr, BINS: tl.constexpr):
    """How many of these ids belong to each expert: i32[BINS]."""
    return tl.histogram(expert, BINS, mask=(expert >= 0) & (expert < EXPERTS))


@triton.jit
def block_counts(ids, counts, SIZE: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr):
    """Count the ids of each expert in a block."""
    _, expert = block_of_ids(ids, SIZE, BLOCK)
    bins = tl.arange(0, BINS)
    found = histogram(expert, EXPERTS, BINS)
    tl.store(counts + tl.program_id(0) * EXPERTS + bins, found, mask=bins < EXPERTS)


@triton.jit
def sum_counts(
    counts, before, sizes, BLOCKS: tl.constexpr, EXPERTS: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr
):
    """Sum the counts of the blocks before each block, and of all blocks, for COLUMNS experts."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.full((COLUMNS,), 0, tl.int32)
    for first in range(0, BLOCKS, CHUNK):
        block = first + tl.arange(0, CHUNK)
        at = block[:, None] * EXPERTS + column[None, :]
        inside = (block < BLOCKS)[:, None] & (column < EXPERTS)[None, :]
        found = tl.load(counts + at, mask=inside, other=0)
        tl.store(before + at, tl.cumsum(found, axis=0) - found + total[None, :], mask=inside)
        total += tl.sum(found, axis=0)
    tl.store(sizes + column, total, mask=column < EXPERTS)


@triton.jit
def rank_in_block(ids, at, expert, EXPERTS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """How many ids of the same expert, or of none, come before each id in its block, by comparing each with each."""
    mine = tl.where((expert >= 0) & (expert < EXPERTS), expert, -1)
    rank = tl.full((BLOCK,), 0, tl.int32)
    for first in range(0, BLOCK, STEP):
        other = tl.program_id(0) * BLOCK + first + tl.arange(0, STEP)
        found = tl.load(ids + other, mask=other < SIZE, other=-1)
        found = tl.where((found >= 0) & (found < EXPERTS), found, -1)
        same = (found[None, :] == mine[:, None]) & (other[None, :] < at[:, None])
        rank += tl.sum(same.to(tl.int32), axis=1)
    return rank


@triton.jit
def place(
    ids, counts, before, total, token, inverse, sizes,
    SIZE: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr, BINS: tl.constexpr, STEP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Store the row of each id of a block, the token of each of those rows, and once the rows of each expert.

    Given are `before` and `total` of `sum_counts`; or the counts, which are summed here; or nothing, for one block.
    """
    at, expert = block_of_ids(ids, SIZE, BLOCK)
    bins = tl.arange(0, BINS)
    real = bins < EXPERTS
    if before is not None:
        earlier = tl.load(before + tl.program_id(0) * EXPERTS + bins, mask=real, other=0)
        every = tl.load(total + bins, mask=real, other=0)
    else:
        earlier = tl.full((BINS,), 0, tl.int32)
        every = tl.full((BINS,), 0, tl.int32)
        if counts is not None:
            for first in range(0, BLOCKS, CHUNK):
                block = first + tl.arange(0, CHUNK)
                inside = (block < BLOCKS)[:, None] & real[None, :]
                found = tl.load(counts + block[:, None] * EXPERTS + bins[None, :], mask=inside, other=0)
                every += tl.sum(found, axis=0)
                earlier += tl.sum(tl.where((block < tl.program_id(0))[:, None], found, 0), axis=0)
        else:
            every += histogram(expert, EXPERTS, BINS)
    rank = rank_in_block(ids, at, expert, EXPERTS, SIZE, BLOCK, STEP)
    known = (expert >= 0) & (expert < EXPERTS)
    starts = tl.cumsum(every, axis=0) - every + earlier
    first_of_none = tl.sum(every, axis=0) + tl.program_id(0) * BLOCK - tl.sum(earlier, axis=0)
    row = rank + tl.where(known, tl.gather(starts, tl.where(known, expert, 0), axis=0), first_of_none)
    tl.store(inverse + at, row, mask=at < SIZE)
    tl.store(token + row, at // K, mask=at < SIZE)
    if tl.program_id(0) == 0:
        tl.store(sizes + bins, every, mask=real)
