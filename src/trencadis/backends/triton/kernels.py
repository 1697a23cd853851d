"""The kernels of both forms, in Triton; every size and dtype of a problem is a constant of its kernel.

A kernel reads the list of its tiles from memory (`tiles`), and walks it in L2 rasterization groups: `RASTER` row tiles
of one column run before the next column, so that what they bring into L2 serves their neighbours.

Nothing of another group, of an unowned row or from outside of an array reaches a sum: rows and columns past the end of
a tile repeat one that belongs to it, and are not stored; entries past the end of a sum are masked in both operands.
"""

import triton
import triton.language as tl

from trencadis.backends.triton.products import both, multiply, six_products


@triton.jit
def raster(index, down, ACROSS: tl.constexpr, RASTER: tl.constexpr):
    """The row and the column of a tile in a grid of down x ACROSS tiles, in L2 rasterization groups."""
    width = RASTER * ACROSS
    above = index // width * RASTER
    height = tl.minimum(down - above, RASTER)
    inside = index % width
    return above + inside % height, inside // height


@triton.jit
def finish(
    acc, by_row, by_column, bias, existing, row_at, column_at, at, inside,
    ACTIVATION: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """A tile of sums after the epilogue.

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
    if existing is not None:
        z = z + tl.load(existing + at, mask=inside, other=0).to(z.dtype)
    return z


# ---------------------------------------------------------------------------------------------------------------------
# The rows form


@triton.jit
def rows_sum(
    weight, row, end, first, lhs, rhs,
    ROWS: tl.constexpr, K: tl.constexpr, N: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PEELED: tl.constexpr,
    DOT: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sums of the tile of `lhs[row:end] @ rhs[weight]` with the columns from `first` on."""
    # rows and columns past the end repeat the first: their results are not stored
    down = tl.arange(0, BLOCK_M)
    m = tl.where(down < end - row, down, 0)  # [block_m]
    n = tl.arange(0, BLOCK_N)
    if N % BLOCK_N != 0:
        n = tl.max_contiguous(tl.multiple_of(tl.where(n < N - first, n, 0), BLOCK_N), BLOCK_N)  # [block_n]
    k = tl.arange(0, BLOCK_K)
    left = lhs + row.to(tl.int64) * K + m[:, None] * K + k[None, :]  # [block_m, block_k]
    right = rhs + weight.to(tl.int64) * (K * N)
    if TRANSPOSED:
        right += first.to(tl.int64) * K + n[None, :] * K + k[:, None]  # [block_k, block_n]
        stride = 1
    else:
        right += first + k[:, None] * N + n[None, :]
        stride = N
    if PRECISION == "bf16x6":
        acc = tl.trans(swapped_sum(tl.trans(right), tl.trans(left), stride, ROWS, K, BLOCK_M, BLOCK_N, BLOCK_K))
    else:
        acc = tl.full((BLOCK_M, BLOCK_N), 0, ACC)
        if PEELED:
            for _ in range(K // BLOCK_K):
                acc = multiply(acc, left, right, None, False, DOT, PRECISION)
                left += BLOCK_K
                right += BLOCK_K * stride
            if K % BLOCK_K != 0:
                acc = multiply(acc, left, right, k < K % BLOCK_K, True, DOT, PRECISION)
        else:
            for done in range(0, K, BLOCK_K):
                acc = multiply(acc, left, right, k < K - done, True, DOT, PRECISION)
                left += BLOCK_K
                right += BLOCK_K * stride
    return acc


@triton.jit
def swapped_sum(
    weights, x, stride, ROWS: tl.constexpr, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The sums of a tile by six products, [n, k] @ [k, m]: weights are the left factor, which is split in registers."""
    k = tl.arange(0, BLOCK_K)
    acc = tl.full((BLOCK_N, BLOCK_M), 0, tl.float32)
    rest = tl.full((BLOCK_N, BLOCK_M), 0, tl.float32)
    for done in range(0, K, BLOCK_K):
        acc, rest = six_products(acc, rest, weights + done * stride, x + done, ROWS * K, k < K - done, K % BLOCK_K != 0)
    return both(acc, rest)


@triton.jit
def rows_store(
    acc, group, row, end, first, by_row, by_column, bias, existing, out,
    N: tl.constexpr, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    ACTIVATION: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """Store a tile of sums after the epilogue."""
    down = tl.arange(0, BLOCK_M)
    m_inside = down < end - row
    m = tl.where(m_inside, down, 0)  # [block_m]
    n = tl.arange(0, BLOCK_N)
    n_inside = n < N - first
    if N % BLOCK_N != 0:
        n = tl.max_contiguous(tl.multiple_of(tl.where(n_inside, n, 0), BLOCK_N), BLOCK_N)  # [block_n]
    at = row.to(tl.int64) * N + first
    offsets = m[:, None] * N + n[None, :]
    inside = m_inside[:, None] & n_inside[None, :]
    kept = existing
    if existing is not None:
        kept = existing + at
    z = finish(
        acc, by_row, by_column, bias, kept, row + m, group % GROUPS * N + first + n, offsets, inside, ACTIVATION, FLOAT
    )
    tl.store(out + at + offsets, z.to(out.dtype.element_ty), mask=inside)


@triton.jit
def rows_at(
    group, row, end, first, lhs, rhs, by_row, by_column, bias, existing, out,
    ROWS: tl.constexpr, K: tl.constexpr, N: tl.constexpr, TRANSPOSED: tl.constexpr, WEIGHTS: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PEELED: tl.constexpr,
    DOT: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, ACTIVATION: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """Compute and store one tile of `out[row:end] = lhs[row:end] @ rhs[group]`."""
    acc = rows_sum(
        group % WEIGHTS, row, end, first, lhs, rhs,
        ROWS, K, N, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, PEELED, DOT, ACC, PRECISION,
    )  # fmt: skip
    rows_store(
        acc, group, row, end, first, by_row, by_column, bias, existing, out,
        N, GROUPS, BLOCK_M, BLOCK_N, ACTIVATION, FLOAT,
    )  # fmt: skip


@triton.jit
def rows_persistent(
    owned, group_of, row_of, end_of, lhs, rhs, by_row, by_column, bias, existing, out,
    ROWS: tl.constexpr, K: tl.constexpr, N: tl.constexpr, TRANSPOSED: tl.constexpr, WEIGHTS: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, RASTER: tl.constexpr,
    PROGRAMS: tl.constexpr, DOT: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    ACTIVATION: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """All tiles of one persistent program, with copies by TMA: those of a tile start before the last one is stored.

    A copy brings rows of other groups too, whose results are not stored, and zeros from outside of an array.
    """
    ACROSS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    left = tl.make_tensor_descriptor(lhs, [ROWS, K], [K, 1], [BLOCK_M, BLOCK_K])
    if TRANSPOSED:
        right = tl.make_tensor_descriptor(rhs, [WEIGHTS, N, K], [N * K, K, 1], [1, BLOCK_N, BLOCK_K])
    else:
        right = tl.make_tensor_descriptor(rhs, [WEIGHTS, K, N], [N * K, N, 1], [1, BLOCK_K, BLOCK_N])
    for index in tl.range(tl.program_id(0), owned * ACROSS, PROGRAMS, flatten=True):
        tile, column = raster(index, owned, ACROSS, RASTER)
        group = tl.load(group_of + tile)
        row = tl.load(row_of + tile)
        end = tl.load(end_of + tile)
        first = column * BLOCK_N
        acc = tl.full((BLOCK_M, BLOCK_N), 0, ACC)
        for done in range(0, K, BLOCK_K):
            x = left.load([row, done])
            if TRANSPOSED:
                y = right.load([group % WEIGHTS, first, done]).reshape(BLOCK_N, BLOCK_K).T
            else:
                y = right.load([group % WEIGHTS, done, first]).reshape(BLOCK_K, BLOCK_N)
            acc = tl.dot(x.to(DOT), y.to(DOT), acc, input_precision=PRECISION, out_dtype=ACC)
        rows_store(
            acc, group, row, end, first, by_row, by_column, bias, existing, out,
            N, GROUPS, BLOCK_M, BLOCK_N, ACTIVATION, FLOAT,
        )  # fmt: skip


@triton.jit
def unowned_at(index, row_of, end_of, out, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Fill the tile of an index, whose rows are unowned, with zeros."""
    ACROSS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    row = tl.load(row_of + index // ACROSS)
    end = tl.load(end_of + index // ACROSS)
    m = tl.arange(0, BLOCK_M)
    n = index % ACROSS * BLOCK_N + tl.arange(0, BLOCK_N)
    zeros = tl.full((BLOCK_M, BLOCK_N), 0, out.dtype.element_ty)
    inside = (m < end - row)[:, None] & (n < N)[None, :]
    tl.store(out + row.to(tl.int64) * N + m[:, None] * N + n[None, :], zeros, mask=inside)


@triton.jit
def rows(
    count, group_of, row_of, end_of, lhs, rhs, by_row, by_column, bias, existing, out,
    ROWS: tl.constexpr, K: tl.constexpr, N: tl.constexpr, TRANSPOSED: tl.constexpr, WEIGHTS: tl.constexpr,
    GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, SHORT_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    RASTER: tl.constexpr, PEELED: tl.constexpr, PROGRAMS: tl.constexpr,
    DOT: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, ACTIVATION: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """The rows form: a program for each tile, or PROGRAMS persistent ones, each of which runs several tiles.

    A program for one tile has SHORT_M rows instead of BLOCK_M, if no more are left.
    """
    ACROSS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    index = tl.program_id(0)
    owned = tl.load(count)  # row tiles; those of unowned rows come after them
    total = tl.load(count + 1)
    if PROGRAMS > 0:
        rows_persistent(
            owned, group_of, row_of, end_of, lhs, rhs, by_row, by_column, bias, existing, out,
            ROWS, K, N, TRANSPOSED, WEIGHTS, GROUPS, BLOCK_M, BLOCK_N, BLOCK_K, RASTER, PROGRAMS,
            DOT, ACC, PRECISION, ACTIVATION, FLOAT,
        )  # fmt: skip
        for unowned in range(owned * ACROSS + index, total * ACROSS, PROGRAMS):
            unowned_at(unowned, row_of, end_of, out, N, BLOCK_M, BLOCK_N)
    elif index < owned * ACROSS:
        tile, column = raster(index, owned, ACROSS, RASTER)
        group = tl.load(group_of + tile)
        row = tl.load(row_of + tile)
        end = tl.load(end_of + tile)
        if end - row > SHORT_M:
            rows_at(
                group, row, end, column * BLOCK_N, lhs, rhs, by_row, by_column, bias, existing, out,
                ROWS, K, N, TRANSPOSED, WEIGHTS, GROUPS, BLOCK_M, BLOCK_N, BLOCK_K, PEELED,
                DOT, ACC, PRECISION, ACTIVATION, FLOAT,
            )  # fmt: skip
        elif SHORT_M > 0:
            rows_at(
                group, row, end, column * BLOCK_N, lhs, rhs, by_row, by_column, bias, existing, out,
                ROWS, K, N, TRANSPOSED, WEIGHTS, GROUPS, SHORT_M, BLOCK_N, BLOCK_K, PEELED,
                DOT, ACC, PRECISION, ACTIVATION, FLOAT,
            )  # fmt: skip
    elif index < total * ACROSS:
        unowned_at(index, row_of, end_of, out, N, BLOCK_M, BLOCK_N)


# ---------------------------------------------------------------------------------------------------------------------
# The contraction form


@triton.jit
def columns(tile, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The columns of a tile, of which those past the end repeat the first of all, and the mask of the others."""
    at = tile * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    if SIZE % BLOCK != 0:
        at = tl.max_contiguous(tl.multiple_of(tl.where(inside, at, 0), BLOCK), BLOCK)
    return at, inside


@triton.jit
def contraction_pointers(
    lhs, rhs, row, k, n, ROWS: tl.constexpr, K: tl.constexpr, N: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The pointers to both factors of a step that starts at a row: [block_m, block_k] and [block_k, block_n]."""
    r = tl.arange(0, BLOCK_K)
    right = rhs + tl.cast(row, tl.int64) * N + r[:, None] * N + n[None, :]
    if TRANSPOSED:
        left = lhs + row + k[:, None].to(tl.int64) * ROWS + r[None, :]
    else:
        left = lhs + tl.cast(row, tl.int64) * K + r[None, :] * K + k[:, None]
    return left, right


@triton.jit
def contraction_sum(
    start, end, k, n, lhs, rhs,
    ROWS: tl.constexpr, K: tl.constexpr, N: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ALIGN: tl.constexpr,
    DOT: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The sums of one tile of `lhs[:, start:end] @ rhs[start:end]`."""
    acc = tl.full((BLOCK_M, BLOCK_N), 0, ACC)
    r = tl.arange(0, BLOCK_K)
    row = start // ALIGN * ALIGN
    if PRECISION == "bf16x6":
        rest = acc
        for here in range(row, end, BLOCK_K):
            left, right = contraction_pointers(lhs, rhs, here, k, n, ROWS, K, N, TRANSPOSED, BLOCK_K)
            inside = (r >= start - here) & (r < end - here)
            acc, rest = six_products(acc, rest, left, right, ROWS * N, inside, True)
        acc = both(acc, rest)
    else:
        for here in range(row, end, BLOCK_K):
            left, right = contraction_pointers(lhs, rhs, here, k, n, ROWS, K, N, TRANSPOSED, BLOCK_K)
            inside = (r >= start - here) & (r < end - here)
            acc = multiply(acc, left, right, inside, True, DOT, PRECISION)
    return acc


@triton.jit
def contraction_store(
    acc, group, some, tile, column, by_row, by_column, existing, out,
    K: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
    FLOAT: tl.constexpr,
):  # fmt: skip
    """Store a tile of sums of a group after the epilogue; `some`: whether it has rows at all."""
    k, k_inside = columns(tile, K, BLOCK_M)
    n, n_inside = columns(column, N, BLOCK_N)
    at = group.to(tl.int64) * K * N
    offsets = k[:, None].to(tl.int64) * N + n[None, :]
    inside = k_inside[:, None] & n_inside[None, :]
    kept = existing
    if existing is not None:
        kept = existing + at
    z = finish(acc, by_row, by_column, None, kept, group * K + k, group * N + n, offsets, inside, None, FLOAT)
    if existing is not None:  # an empty group keeps its values to the bit
        inside = inside & some
    elif FLOAT:
        z = tl.where(some, z, tl.full(z.shape, 0, z.dtype))  # zero, whatever its scales are
    if TMA:
        out.store([group, tile * BLOCK_M, column * BLOCK_N], z.to(out.dtype).reshape(1, BLOCK_M, BLOCK_N))
    else:
        tl.store(out + at + offsets, z.to(out.dtype.element_ty), mask=inside)


@triton.jit
def contraction_at(
    index, group_of, row_of, end_of, lhs, rhs, by_row, by_column, existing, out,
    ROWS: tl.constexpr, K: tl.constexpr, N: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, RASTER: tl.constexpr, ALIGN: tl.constexpr,
    TMA: tl.constexpr, DOT: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """Compute and store one tile of `out[group] = lhs[:, start:end] @ rhs[start:end]`."""
    DOWN: tl.constexpr = (K + BLOCK_M - 1) // BLOCK_M
    ACROSS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    span = index // (DOWN * ACROSS)
    tile, column = raster(index % (DOWN * ACROSS), DOWN, ACROSS, RASTER)
    group = tl.load(group_of + span)
    start = tl.load(row_of + span)
    end = tl.load(end_of + span)
    k, _ = columns(tile, K, BLOCK_M)
    n, _ = columns(column, N, BLOCK_N)
    acc = contraction_sum(
        start, end, k, n, lhs, rhs,
        ROWS, K, N, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, ALIGN, DOT, ACC, PRECISION,
    )  # fmt: skip
    contraction_store(
        acc, group, start < end, tile, column, by_row, by_column, existing, out, K, N, BLOCK_M, BLOCK_N, TMA, FLOAT
    )


@triton.jit
def contraction_flat(
    steps, group_of, row_of, end_of, lhs, rhs, by_row, by_column, existing, out,
    ROWS: tl.constexpr, K: tl.constexpr, N: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, RASTER: tl.constexpr, ALIGN: tl.constexpr,
    PROGRAMS: tl.constexpr, TMA: tl.constexpr, DOT: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    FLOAT: tl.constexpr,
):  # fmt: skip
    """The `steps` steps of all tiles of a program in one loop: the copies of a tile start before the last one ends."""
    DOWN: tl.constexpr = (K + BLOCK_M - 1) // BLOCK_M
    ACROSS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    index = tl.program_id(0) - PROGRAMS
    start = index
    end = index
    here = index
    last = index * 0 - 1
    nth = index * 0 - 1  # the step of the tile
    k, _k = columns(0, K, BLOCK_M)
    n, _n = columns(0, N, BLOCK_N)
    left, right = contraction_pointers(lhs, rhs, 0, k, n, ROWS, K, N, TRANSPOSED, BLOCK_K)
    r = tl.arange(0, BLOCK_K)
    acc = tl.full((BLOCK_M, BLOCK_N), 0, ACC)
    for _ in range(steps):
        nth = tl.where(nth == last, 0, nth + 1)
        if nth == 0:
            index += PROGRAMS
            span = index // (DOWN * ACROSS)
            tile, column = raster(index % (DOWN * ACROSS), DOWN, ACROSS, RASTER)
            start = tl.load(row_of + span)
            end = tl.load(end_of + span)
            here = start // ALIGN * ALIGN
            last = tl.maximum((end - here + BLOCK_K - 1) // BLOCK_K, 1) - 1
            k, _k = columns(tile, K, BLOCK_M)
            n, _n = columns(column, N, BLOCK_N)
            left, right = contraction_pointers(lhs, rhs, here, k, n, ROWS, K, N, TRANSPOSED, BLOCK_K)
        else:
            here += BLOCK_K
            left += BLOCK_K * (1 if TRANSPOSED else K)
            right += BLOCK_K * N
        inside = (r >= start - here) & (r < end - here)
        acc = multiply(acc, left, right, inside, True, DOT, PRECISION)
        if nth == last:
            tile, column = raster(index % (DOWN * ACROSS), DOWN, ACROSS, RASTER)
            group = tl.load(group_of + index // (DOWN * ACROSS))
            contraction_store(
                acc, group, start < end, tile, column, by_row, by_column, existing, out,
                K, N, BLOCK_M, BLOCK_N, TMA, FLOAT,
            )  # fmt: skip
            acc = tl.full((BLOCK_M, BLOCK_N), 0, ACC)


@triton.jit
def contraction(
    count, group_of, row_of, end_of, lhs, rhs, by_row, by_column, existing, out,
    ROWS: tl.constexpr, K: tl.constexpr, N: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, RASTER: tl.constexpr, ALIGN: tl.constexpr,
    PROGRAMS: tl.constexpr, TMA: tl.constexpr, SPANS: tl.constexpr,
    DOT: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr, FLOAT: tl.constexpr,
):  # fmt: skip
    """The contraction form: a program for each tile, or PROGRAMS persistent ones, each of which runs several tiles."""
    z = out
    if TMA:
        z = tl.make_tensor_descriptor(out, [SPANS, K, N], [K * N, N, 1], [1, BLOCK_M, BLOCK_N])
    if PROGRAMS > 0:
        contraction_flat(
            tl.load(count + tl.program_id(0)), group_of, row_of, end_of, lhs, rhs, by_row, by_column, existing, z,
            ROWS, K, N, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, RASTER, ALIGN, PROGRAMS, TMA, DOT, ACC, PRECISION, FLOAT,
        )  # fmt: skip
    else:
        contraction_at(
            tl.program_id(0), group_of, row_of, end_of, lhs, rhs, by_row, by_column, existing, z,
            ROWS, K, N, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K, RASTER, ALIGN, TMA, DOT, ACC, PRECISION, FLOAT,
        )  # fmt: skip
