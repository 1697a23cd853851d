"""The kernels of the general grouped GEMM, in Triton: groups of any m, k and n, whose rows have any length.

A row length that is no multiple of 16 bytes puts rows at any address, and the copies into shared memory that run beside
the products take 4, 8 or 16 aligned bytes. So `aligned_copy` first writes such matrices with longer rows, which end in
zeros, and `ragged_gemm` reads those. Groups with a matrix of very short rows are read where they are, entry by entry.

Both kernels are persistent. Tiles are counted over all groups, and the group of a tile is searched for in the counts,
which XLA has summed up. A table has a row for each field, and a column for each group.

Nothing of another group, of an unowned entry or from outside of an array reaches a sum: rows and columns past the end
of a matrix repeat some that belong to it, and are not stored; entries past the end of a sum are masked in both
operands.
"""

import triton
import triton.language as tl


@triton.jit
def group_of(past, index, GROUPS: tl.constexpr, STEPS: tl.constexpr):
    """The first group whose last tile comes after a tile: a binary search in `past`, the tiles up to each one's end."""
    low = index * 0
    high = low + (GROUPS - 1)
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        before = tl.load(past + middle) <= index
        low = tl.where(before, middle + 1, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit
def aligned_copy(
    table, source, out,
    GROUPS: tl.constexpr, STEPS: tl.constexpr, PROGRAMS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy matrices of the rows and columns in the table, with zeros up to the longer rows of the copy."""
    for index in range(tl.program_id(0), tl.load(table + (GROUPS - 1)), PROGRAMS):
        group = group_of(table, index, GROUPS, STEPS)
        field = table + group
        tile = index - tl.load(field + GROUPS)
        rows = tl.load(field + 2 * GROUPS)
        columns = tl.load(field + 3 * GROUPS)
        start = tl.load(field + 4 * GROUPS)
        stride = tl.load(field + 5 * GROUPS)
        to = tl.load(field + 6 * GROUPS)
        wide = tl.load(field + 7 * GROUPS)
        across = (wide + (BLOCK_COLUMNS - 1)) // BLOCK_COLUMNS
        row = tile // across * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        column = tile % across * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        inside = (row < rows)[:, None]
        x = tl.load(
            source + start + row[:, None] * stride + column[None, :],
            mask=inside & (column < columns)[None, :], other=0.0,
        )  # fmt: skip
        tl.store(out + to + row[:, None] * wide + column[None, :], x, mask=inside & (column < wide)[None, :])


@triton.jit
def along(first, size, BLOCK: tl.constexpr, ALIGN: tl.constexpr):
    """The rows or columns of a tile; those past the end, which has room up to a multiple of ALIGN, are the first."""
    at = first + tl.arange(0, BLOCK)
    if ALIGN > 1:
        room = (size + (ALIGN - 1)) // ALIGN * ALIGN
        return tl.max_contiguous(tl.multiple_of(tl.where(at < room, at, 0), ALIGN), ALIGN)
    return tl.max_contiguous(tl.where(at < size, at, 0), BLOCK)  # for the order of loads, of one entry each


@triton.jit
def sums(
    lhs, rhs, lhs_stride, rhs_stride, down, across, m, k, n,
    LHS_T: tl.constexpr, RHS_T: tl.constexpr, LHS_ALIGN: tl.constexpr, RHS_ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DOT: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sums of the tile that starts at (down, across), from the matrices of its group at `lhs` and `rhs`.

    A transposed lhs is stored [k, m], a transposed rhs [n, k]. Rows start at multiples of LHS_ALIGN and RHS_ALIGN.
    """
    i = tl.arange(0, BLOCK_K)
    lhs_end = k
    rhs_end = k
    if LHS_T:
        rows = along(down, m, BLOCK_M, LHS_ALIGN)
        a = lhs + i[None, :] * lhs_stride + rows[:, None]
        a_step = BLOCK_K * lhs_stride
    else:
        a = lhs + along(down, m, BLOCK_M, 1)[:, None] * lhs_stride + i[None, :]
        a_step = BLOCK_K
        lhs_end = (k + (LHS_ALIGN - 1)) // LHS_ALIGN * LHS_ALIGN  # what lies between is 0
    if RHS_T:
        b = rhs + along(across, n, BLOCK_N, 1)[None, :] * rhs_stride + i[:, None]
        b_step = BLOCK_K
        rhs_end = (k + (RHS_ALIGN - 1)) // RHS_ALIGN * RHS_ALIGN
    else:
        columns = along(across, n, BLOCK_N, RHS_ALIGN)
        b = rhs + i[:, None] * rhs_stride + columns[None, :]
        b_step = BLOCK_K * rhs_stride
    acc = tl.full((BLOCK_M, BLOCK_N), 0, ACC)
    for done in range(0, k, BLOCK_K):
        x = tl.load(a, mask=(i < lhs_end - done)[None, :], other=0.0)
        y = tl.load(b, mask=(i < rhs_end - done)[:, None], other=0.0)
        acc = tl.dot(x.to(DOT), y.to(DOT), acc, input_precision=PRECISION, out_dtype=ACC)
        a += a_step
        b += b_step
    return acc


@triton.jit
def finish(
    acc, existing, alpha, bias, beta, group, at, column, inside, n, N: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Sums after the epilogue `alpha * acc + bias + beta * existing`, each of them a pointer or None; in the dtype SUM.

    As in BLAS, existing values do not count where beta is 0, whatever they are.
    """
    z = acc
    if alpha is not None:
        z = z.to(SUM) * tl.load(alpha + group)
    if bias is not None:
        z = z.to(SUM) + tl.load(bias + group * N + column, mask=column < n, other=0.0)
    if existing is not None:
        old = tl.load(existing + at, mask=inside, other=0.0).to(SUM)
        if beta is not None:
            scale = tl.load(beta + group)
            old = tl.where(scale != 0, old * scale, 0.0)
        z = z.to(SUM) + old
    return z


@triton.jit
def store(
    acc, existing, alpha, bias, beta, group, out, start, stride, down, across, m, n,
    OUT_T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, N: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Store the tile that starts at (down, across) of an m x n matrix, stored [n, m] if OUT_T, after the epilogue.

    Existing values are in the same memory.
    """
    row = down + tl.arange(0, BLOCK_M)[:, None]
    column = across + tl.arange(0, BLOCK_N)[None, :]
    inside = (row < m) & (column < n)
    if OUT_T:
        at = column * stride + row
    else:
        at = row * stride + column
    kept = existing
    if existing is not None:
        kept = existing + start
    z = finish(acc, kept, alpha, bias, beta, group, at, column, inside, n, N, SUM)
    tl.store(out + start + at, z.to(out.dtype.element_ty), mask=inside)


@triton.jit
def put(
    acc, existing, alpha, bias, beta, group, out, start, stride, down, across, m, n,
    OUT_T: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, N: tl.constexpr, SUM: tl.constexpr,
    HALVES: tl.constexpr,
):  # fmt: skip
    """Store a tile, in two HALVES if it is large: one entry is stored at a time, and addresses take registers."""
    if HALVES:
        left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
        store(
            left, existing, alpha, bias, beta, group, out, start, stride, down, across, m, n,
            OUT_T, BLOCK_M, BLOCK_N // 2, N, SUM,
        )  # fmt: skip
        store(
            right, existing, alpha, bias, beta, group, out, start, stride, down, across + BLOCK_N // 2, m, n,
            OUT_T, BLOCK_M, BLOCK_N // 2, N, SUM,
        )  # fmt: skip
    else:
        store(
            acc, existing, alpha, bias, beta, group, out, start, stride, down, across, m, n,
            OUT_T, BLOCK_M, BLOCK_N, N, SUM,
        )  # fmt: skip


@triton.jit
def clear(
    gaps, out,
    GAPS: tl.constexpr, STEPS: tl.constexpr, PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr, STRIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write zeros to what no group owns: ROWS pieces of each gap, of which one starts STRIDE after the other."""
    for index in range(tl.program_id(0), tl.load(gaps + (GAPS - 1)), PROGRAMS):
        gap = group_of(gaps, index, GAPS, STEPS)
        field = gaps + gap
        tile = index - tl.load(field + GAPS)
        start = tl.load(field + 2 * GAPS)
        length = tl.load(field + 3 * GAPS)
        across = (length + (BLOCK_COLUMNS - 1)) // BLOCK_COLUMNS
        row = tile // across * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        column = tile % across * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        at = out + start + row[:, None] * STRIDE + column[None, :]
        zero = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0, tl.float32).to(out.dtype.element_ty)
        tl.store(at, zero, mask=(row < ROWS)[:, None] & (column < length)[None, :])


@triton.jit
def ragged_gemm(
    table, gaps, lhs, rhs, lhs_copy, rhs_copy, existing, alpha, bias, beta, out,
    GROUPS: tl.constexpr, STEPS: tl.constexpr, PROGRAMS: tl.constexpr, RASTER: tl.constexpr, ALWAYS: tl.constexpr,
    LHS_T: tl.constexpr, RHS_T: tl.constexpr, OUT_T: tl.constexpr, LHS_ALIGN: tl.constexpr, RHS_ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SLOW_K: tl.constexpr, N: tl.constexpr,
    DOT: tl.constexpr, ACC: tl.constexpr, SUM: tl.constexpr, PRECISION: tl.constexpr, HALVES: tl.constexpr,
    GAP_STEPS: tl.constexpr, GAP_ROWS: tl.constexpr, GAP_STRIDE: tl.constexpr,
    GAP_BLOCK_ROWS: tl.constexpr, GAP_BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute all tiles of the result of each group, and clear what lies between, or add to the existing values.

    A bias has rows of N entries. The table lists groups in another order than alpha, bias and beta do.
    """
    if existing is None:
        clear(
            gaps, out, GROUPS + 1, GAP_STEPS, PROGRAMS, GAP_ROWS, GAP_STRIDE, GAP_BLOCK_ROWS, GAP_BLOCK_COLUMNS,
        )  # fmt: skip
    for index in range(tl.program_id(0), tl.load(table + (GROUPS - 1)), PROGRAMS):
        group = group_of(table, index, GROUPS, STEPS)
        field = table + group
        tile = index - tl.load(field + GROUPS)
        m = tl.load(field + 2 * GROUPS)
        k = tl.load(field + 3 * GROUPS)
        n = tl.load(field + 4 * GROUPS)
        lhs_start = tl.load(field + 5 * GROUPS)
        lhs_stride = tl.load(field + 6 * GROUPS)
        rhs_start = tl.load(field + 7 * GROUPS)
        rhs_stride = tl.load(field + 8 * GROUPS)
        out_start = tl.load(field + 9 * GROUPS)
        out_stride = tl.load(field + 10 * GROUPS)
        fast = tl.load(field + 11 * GROUPS) != 0
        given = tl.load(field + 14 * GROUPS)  # the group, in the order of the arrays
        # tiles of a column, RASTER of them, run before those of the next
        width = RASTER * ((n + (BLOCK_N - 1)) // BLOCK_N)
        above = tile // width * RASTER
        height = tl.minimum((m + (BLOCK_M - 1)) // BLOCK_M - above, RASTER)
        down = (above + tile % width % height) * BLOCK_M
        across = tile % width // height * BLOCK_N
        if ALWAYS or fast:
            a = lhs
            if lhs_copy is not None:
                a = tl.where(tl.load(field + 12 * GROUPS) != 0, lhs_copy, lhs)
            b = rhs
            if rhs_copy is not None:
                b = tl.where(tl.load(field + 13 * GROUPS) != 0, rhs_copy, rhs)
            # a hint would count for the other branch as well; what these divisions drop is 0
            acc = sums(
                a + lhs_start // LHS_ALIGN * LHS_ALIGN, b + rhs_start // RHS_ALIGN * RHS_ALIGN,
                lhs_stride // LHS_ALIGN * LHS_ALIGN, rhs_stride // RHS_ALIGN * RHS_ALIGN, down, across, m, k, n,
                LHS_T, RHS_T, LHS_ALIGN, RHS_ALIGN, BLOCK_M, BLOCK_N, BLOCK_K, DOT, ACC, PRECISION,
            )  # fmt: skip
            put(
                acc, existing, alpha, bias, beta, given, out, out_start, out_stride, down, across, m, n,
                OUT_T, BLOCK_M, BLOCK_N, N, SUM, HALVES,
            )  # fmt: skip
        else:
            acc = sums(
                lhs + lhs_start, rhs + rhs_start, lhs_stride, rhs_stride, down, across, m, k, n,
                LHS_T, RHS_T, 1, 1, BLOCK_M, BLOCK_N, SLOW_K, DOT, ACC, PRECISION,
            )  # fmt: skip
            put(
                acc, existing, alpha, bias, beta, given, out, out_start, out_stride, down, across, m, n,
                OUT_T, BLOCK_M, BLOCK_N, N, SUM, HALVES,
            )  # fmt: skip
