"""The kernels of both forms, in Triton; every size and dtype of a problem is a constant of its kernel.

A kernel reads the list of its tiles from memory (`tiles`), and walks it in L2 rasterization groups: `RASTER` row tiles
of one column run before the next column, so that what they bring into L2 serves their neighbours.

Nothing of another group, of an unowned row or from outside of an array reaches a sum: rows and columns past the end of
a tile repeat one that belongs to it, and are not stored; entries past the end of a sum are masked in both operands.
"""

import triton
import triton.language as tl


@triton.jit
def raster(index, down, ACROSS: tl.constexpr, RASTER: tl.constexpr):
    """The row and the column of a tile in a grid of down x ACROSS tiles, in L2 rasterization groups."""
    width = RASTER * ACROSS
    above = index // width * RASTER
    height = tl.minimum(down - above, RASTER)
    inside = index % width
    return above + inside % height, inside // height


@triton.jit
def rows_step(
    acc, a, b, left,
    MASKED: tl.constexpr, BLOCK_K: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The accumulator after one step of BLOCK_K along k, of which only `left` belong to the sum where it is MASKED."""
    if MASKED:
        inside = tl.arange(0, BLOCK_K) < left
        x = tl.load(a, mask=inside[None, :], other=0.0)
        y = tl.load(b, mask=inside[:, None], other=0.0)
    else:
        x = tl.load(a)
        y = tl.load(b)
    return tl.dot(x.to(DOT), y.to(DOT), acc, input_precision=PRECISION, out_dtype=acc.dtype)


@triton.jit
def finish(
    acc, some, by_row, by_column, bias, existing, row_at, column_at, at, inside,
    ACTIVATION: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """A tile of sums after the epilogue: zero if `some` is false, that is, if nobody owns the tile.

    The operands of the epilogue are pointers, or None; `row_at`, `column_at` and `at` are the offsets of a tile in
    those of rows, of columns and of the result, and `inside` is the mask of what is stored.
    """
    z = acc
    if FLOAT:
        z = z.to(tl.float32)
    if by_row is not None:
        z = z * tl.load(by_row + row_at)[:, None]
    if by_column is not None:
        z = z * tl.load(by_column + column_at)[None, :]
    if bias is not None:
        z = z + tl.load(bias + column_at)[None, :].to(tl.float32)
    if ACTIVATION is not None:
        z = ACTIVATION(z)
    z = tl.where(some, z, tl.full(z.shape, 0, z.dtype))
    if existing is not None:
        z = z + tl.load(existing + at, mask=inside, other=0).to(z.dtype)
    return z


@triton.jit
def rows_tile(
    index, total, group_of, row_of, end_of, lhs, rhs, by_row, by_column, bias, existing, out,
    K: tl.constexpr, N: tl.constexpr, TRANSPOSED: tl.constexpr, WEIGHTS: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, RASTER: tl.constexpr, PEELED: tl.constexpr,
    DOT: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, ACTIVATION: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """Compute and store one tile of `out[start:end] = lhs[start:end] @ rhs[group]`."""
    tile, column = raster(index, total, (N + BLOCK_N - 1) // BLOCK_N, RASTER)
    group = tl.load(group_of + tile)  # -1 for unowned rows
    row = tl.load(row_of + tile)
    end = tl.load(end_of + tile)
    # rows and columns past the end repeat the first: their results are not stored
    down = tl.arange(0, BLOCK_M)
    rows_inside = down < end - row
    m = tl.where(rows_inside, down, 0)  # [block_m]
    across = tl.arange(0, BLOCK_N)
    n_inside = across < N - column * BLOCK_N
    n = across
    if N % BLOCK_N != 0:
        n = tl.max_contiguous(tl.multiple_of(tl.where(n_inside, across, 0), BLOCK_N), BLOCK_N)  # [block_n]
    acc = tl.full((BLOCK_M, BLOCK_N), 0, ACC)
    k = tl.arange(0, BLOCK_K)
    weights = rhs + (tl.maximum(group, 0) % WEIGHTS).to(tl.int64) * (K * N)
    a = lhs + row.to(tl.int64) * K + m[:, None] * K + k[None, :]  # [block_m, block_k]
    if TRANSPOSED:
        step = BLOCK_K
        b = weights + (column * BLOCK_N).to(tl.int64) * K + n[None, :] * K + k[:, None]  # [block_k, block_n]
    else:
        step = BLOCK_K * N
        b = weights + column * BLOCK_N + k[:, None] * N + n[None, :]
    owned = tl.where(group >= 0, 1, 0)
    if PEELED:
        for _ in range(owned * (K // BLOCK_K)):
            acc = rows_step(acc, a, b, K, False, BLOCK_K, DOT, PRECISION)
            a += BLOCK_K
            b += step
        if K % BLOCK_K != 0:
            acc = rows_step(acc, a, b, K % BLOCK_K, True, BLOCK_K, DOT, PRECISION)
    else:
        for done in range(0, owned * K, BLOCK_K):
            acc = rows_step(acc, a, b, K - done, True, BLOCK_K, DOT, PRECISION)
            a += BLOCK_K
            b += step
    local = tl.maximum(group, 0) % GROUPS
    at = row.to(tl.int64) * N + column * BLOCK_N
    offsets = m[:, None] * N + n[None, :]
    inside = rows_inside[:, None] & n_inside[None, :]
    kept = existing
    if existing is not None:
        kept = existing + at
    z = finish(
        acc, group >= 0, by_row, by_column, bias, kept, row + m, local * N + column * BLOCK_N + n, offsets, inside,
        ACTIVATION, FLOAT,
    )  # fmt: skip
    tl.store(out + at + offsets, z.to(out.dtype.element_ty), mask=inside)


@triton.jit
def rows(
    count, group_of, row_of, end_of, lhs, rhs, by_row, by_column, bias, existing, out,
    K: tl.constexpr, N: tl.constexpr, TRANSPOSED: tl.constexpr, WEIGHTS: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, RASTER: tl.constexpr,
    PEELED: tl.constexpr, PROGRAMS: tl.constexpr, FLATTEN: tl.constexpr,
    DOT: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, ACTIVATION: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """The rows form: a program for each tile, or PROGRAMS persistent ones, each of which runs several tiles."""
    total = tl.load(count)  # row tiles
    tiles = total * ((N + BLOCK_N - 1) // BLOCK_N)
    if PROGRAMS > 0:
        for index in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=FLATTEN):
            rows_tile(
                index, total, group_of, row_of, end_of, lhs, rhs, by_row, by_column, bias, existing, out,
                K, N, TRANSPOSED, WEIGHTS, GROUPS, BLOCK_M, BLOCK_N, BLOCK_K, RASTER, PEELED,
                DOT, ACC, PRECISION, ACTIVATION, FLOAT,
            )  # fmt: skip
    elif tl.program_id(0) < tiles:
        rows_tile(
            tl.program_id(0), total, group_of, row_of, end_of, lhs, rhs, by_row, by_column, bias, existing, out,
            K, N, TRANSPOSED, WEIGHTS, GROUPS, BLOCK_M, BLOCK_N, BLOCK_K, RASTER, PEELED,
            DOT, ACC, PRECISION, ACTIVATION, FLOAT,
        )  # fmt: skip


@triton.jit
def contraction_step(
    acc, lhs, rhs, row, start, end, k, n,
    ROWS: tl.constexpr, K: tl.constexpr, N: tl.constexpr, TRANSPOSED: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_K: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The accumulator after one step over the rows [row, row + BLOCK_K), of which [start, end) belong to the sum."""
    r = tl.arange(0, BLOCK_K)
    y_at = rhs + tl.cast(row, tl.int64) * N + r[:, None] * N + n[None, :]  # [block_k, block_n]
    if TRANSPOSED:
        x_at = lhs + row + k[:, None].to(tl.int64) * ROWS + r[None, :]  # [block_m, block_k]
    else:
        x_at = lhs + tl.cast(row, tl.int64) * K + r[None, :] * K + k[:, None]
    if MASKED:
        inside = (r >= start - row) & (r < end - row)
        x = tl.load(x_at, mask=inside[None, :], other=0.0)
        y = tl.load(y_at, mask=inside[:, None], other=0.0)
    else:
        x = tl.load(x_at)
        y = tl.load(y_at)
    return tl.dot(x.to(DOT), y.to(DOT), acc, input_precision=PRECISION, out_dtype=acc.dtype)


@triton.jit
def contraction_tile(
    index, groups, group_of, row_of, end_of, lhs, rhs, by_row, by_column, existing, out,
    ROWS: tl.constexpr, K: tl.constexpr, N: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, RASTER: tl.constexpr, ALIGN: tl.constexpr,
    PEELED: tl.constexpr, DOT: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """Compute and store one tile of `out[group] = lhs[:, start:end] @ rhs[start:end]`."""
    DOWN: tl.constexpr = (K + BLOCK_M - 1) // BLOCK_M
    ACROSS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    span = index // (DOWN * ACROSS)
    tile, column = raster(index % (DOWN * ACROSS), DOWN, ACROSS, RASTER)
    group = tl.load(group_of + span)
    start = tl.load(row_of + span)
    end = tl.load(end_of + span)
    down = tl.arange(0, BLOCK_M)
    k_inside = down < K - tile * BLOCK_M
    k = tile * BLOCK_M + down
    if K % BLOCK_M != 0:
        k = tl.max_contiguous(tl.multiple_of(tl.where(k_inside, k, 0), BLOCK_M), BLOCK_M)  # [block_m]
    across = tl.arange(0, BLOCK_N)
    n_inside = across < N - column * BLOCK_N
    n = column * BLOCK_N + across
    if N % BLOCK_N != 0:
        n = tl.max_contiguous(tl.multiple_of(tl.where(n_inside, n, 0), BLOCK_N), BLOCK_N)  # [block_n]
    acc = tl.full((BLOCK_M, BLOCK_N), 0, ACC)
    row = start
    if TRANSPOSED:  # rows are contiguous in lhs: steps start at an aligned row
        row = start // ALIGN * ALIGN
    if PEELED:
        if TRANSPOSED:
            if start < end:
                acc = contraction_step(
                    acc, lhs, rhs, row, start, end, k, n, ROWS, K, N, TRANSPOSED, True, BLOCK_K, DOT, PRECISION
                )
            row += BLOCK_K
        for here in range(row, end - (BLOCK_K - 1), BLOCK_K):
            acc = contraction_step(
                acc, lhs, rhs, here, start, end, k, n, ROWS, K, N, TRANSPOSED, False, BLOCK_K, DOT, PRECISION
            )
        row += tl.maximum(end - row, 0) // BLOCK_K * BLOCK_K
        if row < end:
            acc = contraction_step(
                acc, lhs, rhs, row, start, end, k, n, ROWS, K, N, TRANSPOSED, True, BLOCK_K, DOT, PRECISION
            )
    else:
        for here in range(row, end, BLOCK_K):
            acc = contraction_step(
                acc, lhs, rhs, here, start, end, k, n, ROWS, K, N, TRANSPOSED, True, BLOCK_K, DOT, PRECISION
            )
    at = group.to(tl.int64) * K * N
    offsets = k[:, None].to(tl.int64) * N + n[None, :]
    inside = k_inside[:, None] & n_inside[None, :]
    kept = existing
    if existing is not None:
        kept = existing + at
    z = finish(
        acc, start < end, by_row, by_column, None, kept, group * K + k, group * N + n, offsets, inside, None, FLOAT
    )
    if existing is not None:  # an empty group keeps its values to the bit
        inside = inside & (start < end)
    tl.store(out + at + offsets, z.to(out.dtype.element_ty), mask=inside)


@triton.jit
def contraction(
    count, group_of, row_of, end_of, lhs, rhs, by_row, by_column, existing, out,
    ROWS: tl.constexpr, K: tl.constexpr, N: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, RASTER: tl.constexpr, ALIGN: tl.constexpr,
    PEELED: tl.constexpr, PROGRAMS: tl.constexpr, FLATTEN: tl.constexpr,
    DOT: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """The contraction form: a program for each tile, or PROGRAMS persistent ones, each of which runs several tiles."""
    groups = tl.load(count)
    tiles = groups * ((K + BLOCK_M - 1) // BLOCK_M) * ((N + BLOCK_N - 1) // BLOCK_N)
    if PROGRAMS > 0:
        for index in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=FLATTEN):
            contraction_tile(
                index, groups, group_of, row_of, end_of, lhs, rhs, by_row, by_column, existing, out,
                ROWS, K, N, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, RASTER, ALIGN, PEELED, DOT, ACC, PRECISION, FLOAT,
            )  # fmt: skip
    elif tl.program_id(0) < tiles:
        contraction_tile(
            tl.program_id(0), groups, group_of, row_of, end_of, lhs, rhs, by_row, by_column, existing, out,
            ROWS, K, N, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, RASTER, ALIGN, PEELED, DOT, ACC, PRECISION, FLOAT,
        )  # fmt: skip
