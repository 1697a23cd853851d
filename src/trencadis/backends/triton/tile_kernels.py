"""Kernels that list the tiles of a product, in Triton: XLA takes 8 to 36 us for what they do in 3.

A program writes the tiles of one span, the rows of a group or unowned rows between groups, and finds out for itself how
many come before them. Groups of all batch entries are counted one after the other, and unowned rows after all groups.
"""

import triton
import triton.language as tl


@triton.jit
def entry_spans(
    sizes, first, entry,
    M: tl.constexpr, GROUPS: tl.constexpr, LOCAL: tl.constexpr, ALL: tl.constexpr, BLOCK: tl.constexpr,
    SUM: tl.constexpr,
):  # fmt: skip
    """The first row of each local group of a batch entry, and the row after its last, counted within the entry.

    ALL and BLOCK are powers of two that are not below GROUPS and LOCAL. Sums are taken in the dtype SUM, which holds
    GROUPS times M. A negative size counts as 0, an end past M is M, and a group outside of [0, GROUPS) is empty.
    """
    every = tl.arange(0, ALL)
    size = tl.load(sizes + entry * GROUPS + every, mask=every < GROUPS, other=0)
    size = tl.minimum(tl.maximum(size, 0), M).to(SUM)
    past = tl.cumsum(size, axis=0)
    start = tl.minimum(past - size, M).to(tl.int32)
    end = tl.minimum(past, M).to(tl.int32)
    window = tl.load(first + entry)
    window = tl.minimum(tl.maximum(window, -LOCAL), GROUPS)  # so that no sum with it overflows
    group = window + tl.arange(0, BLOCK)
    at = tl.minimum(tl.maximum(group, 0), GROUPS - 1)
    to = tl.gather(end, at, axis=0)
    begin = tl.where(group < GROUPS, tl.gather(start, at, axis=0), to)
    return begin, tl.where(group >= 0, to, begin)


@triton.jit
def tiles_of(rows, BLOCK_M: tl.constexpr):
    """How many row tiles some rows have."""
    return (rows + (BLOCK_M - 1)) // BLOCK_M


@triton.jit
def store_tiles(group_of, row_of, end_of, at, count, group, row, end, BLOCK_M: tl.constexpr, STEP: tl.constexpr):
    """Store the `count` tiles of a span from position `at` of the list on."""
    for done in range(0, count, STEP):
        nth = done + tl.arange(0, STEP)
        inside = nth < count
        tl.store(group_of + at + nth, tl.full((STEP,), 0, tl.int32) + group, mask=inside)
        tl.store(row_of + at + nth, row + nth * BLOCK_M, mask=inside)
        tl.store(end_of + at + nth, tl.full((STEP,), 0, tl.int32) + end, mask=inside)


@triton.jit
def list_rows(
    sizes, first, number, group_of, row_of, end_of,
    M: tl.constexpr, BATCH: tl.constexpr, GROUPS: tl.constexpr, LOCAL: tl.constexpr, ALL: tl.constexpr,
    BLOCK: tl.constexpr, SUM: tl.constexpr, BLOCK_M: tl.constexpr, UNOWNED: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The rows form: program i lists the tiles of span i; the first of them stores the numbers of tiles, too.

    Spans are the groups of each entry and, if UNOWNED, the unowned rows before those of each entry, and after them.
    """
    SPANS: tl.constexpr = BATCH * LOCAL
    mine = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    owned = 0  # tiles of groups
    unowned = 0
    before = 0  # tiles of the spans before mine
    row = 0
    end = 0
    for entry in range(BATCH):
        begin, past = entry_spans(sizes, first, entry, M, GROUPS, LOCAL, ALL, BLOCK, SUM)
        index = entry * LOCAL + lane
        here = tl.where(lane < LOCAL, tiles_of(past - begin, BLOCK_M), 0)
        owned += tl.sum(here, axis=0)
        before += tl.sum(tl.where(index < mine, here, 0), axis=0)
        this = (index == mine) & (lane < LOCAL)
        row += tl.sum(tl.where(this, begin + entry * M, 0), axis=0)
        end += tl.sum(tl.where(this, past + entry * M, 0), axis=0)
        if UNOWNED:
            top = tl.sum(tl.where(lane == 0, begin, 0), axis=0)  # of the window, and its bottom
            bottom = tl.max(tl.where(lane < LOCAL, past, 0), axis=0)
            above = tiles_of(top, BLOCK_M)
            below = tiles_of(M - bottom, BLOCK_M)
            unowned += above + below
            before += tl.where(SPANS + entry < mine, above, 0) + tl.where(SPANS + BATCH + entry < mine, below, 0)
            row += tl.where(SPANS + entry == mine, entry * M, 0)
            end += tl.where(SPANS + entry == mine, entry * M + top, 0)
            row += tl.where(SPANS + BATCH + entry == mine, entry * M + bottom, 0)
            end += tl.where(SPANS + BATCH + entry == mine, entry * M + M, 0)
    group = tl.where(mine < SPANS, mine, -1)
    store_tiles(group_of, row_of, end_of, before, tiles_of(end - row, BLOCK_M), group, row, end, BLOCK_M, STEP)
    if mine == 0:
        tl.store(number, owned)
        tl.store(number + 1, owned + unowned)


@triton.jit
def list_contraction(
    sizes, first, number, group_of, row_of, end_of,
    M: tl.constexpr, BATCH: tl.constexpr, GROUPS: tl.constexpr, LOCAL: tl.constexpr, ALL: tl.constexpr,
    BLOCK: tl.constexpr, SUM: tl.constexpr, BLOCK_K: tl.constexpr, ALIGN: tl.constexpr, TILES: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    """The contraction form: program i stores the rows of span i, and the steps of persistent program i.

    A group has TILES tiles, and PROGRAMS programs take them in turn.
    """
    mine = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    steps = 0
    for entry in range(BATCH):
        begin, past = entry_spans(sizes, first, entry, M, GROUPS, LOCAL, ALL, BLOCK, SUM)
        begin += entry * M
        past += entry * M
        index = entry * LOCAL + lane
        this = (index == mine) & (lane < LOCAL)
        tl.store(group_of + index, index, mask=this)
        tl.store(row_of + index, begin, mask=this)
        tl.store(end_of + index, past, mask=this)
        if PROGRAMS > 0:
            each = tl.maximum((past - begin // ALIGN * ALIGN + (BLOCK_K - 1)) // BLOCK_K, 1)  # zero is stored in a step
            least = PROGRAMS - 1 - mine
            taken = ((index + 1) * TILES + least) // PROGRAMS - (index * TILES + least) // PROGRAMS
            steps += tl.sum(tl.where(lane < LOCAL, each * taken, 0), axis=0)
    if mine < (PROGRAMS if PROGRAMS > 0 else 1):
        tl.store(number + mine, steps)
