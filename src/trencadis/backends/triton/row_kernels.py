"""The kernel that copies the tokens of an MoE layer to their rows, in Triton: each token is read once.

`rows` [tokens, k] holds the row, sorted by expert, of each assignment of a token. Nothing is stored at a row that is
outside of the result.
"""

import triton
import triton.language as tl


@triton.jit
def tile_of(TOKENS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    """The tokens and the columns of a program, which broadcast against each other, and which of them there are.

    One token is a number, and not a block of one: every thread would load its row once for each column.
    """
    ACROSS: tl.constexpr = (WIDTH + BLOCK_D - 1) // BLOCK_D
    first = tl.program_id(0) // ACROSS * BLOCK_T
    column = tl.program_id(0) % ACROSS * BLOCK_D + tl.arange(0, BLOCK_D)
    if BLOCK_T > 1:
        token = (first + tl.arange(0, BLOCK_T))[:, None]
        column = column[None, :]
    else:
        token = first
    return token, column, token < TOKENS, column < WIDTH


@triton.jit
def spread_rows(
    x, rows, weights, out,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Copy the row of each token, times a weight if there are any, to its K rows of the result."""
    token, column, there, inside = tile_of(TOKENS, WIDTH, BLOCK_T, BLOCK_D)
    values = tl.load(x + token.to(tl.int64) * WIDTH + column, mask=there & inside)
    for j in tl.static_range(K):
        row = tl.load(rows + token * K + j, mask=there, other=-1)
        each = values
        if weights is not None:
            weight = tl.load(weights + token * K + j, mask=there, other=0.0).to(tl.float32)
            each = (values.to(tl.float32) * weight).to(out.dtype.element_ty)
        tl.store(out + row.to(tl.int64) * WIDTH + column, each, mask=(row >= 0) & (row < ROWS) & inside)
