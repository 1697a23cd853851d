"""The product of two blocks in a kernel: one of the tensor cores, or the six of float32 with its full precision.

A float32 number has 24 significant bits, and is the sum of three bfloat16 numbers of 8 bits each: x = x0 + x1 + x2. Of
the nine products of two such sums, six are not below the precision of float32.
"""

import triton
import triton.language as tl


@triton.jit
def high(x):
    """The first 8 of the 24 significant bits of float32 numbers, which bfloat16 holds."""
    return (x.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def split(x, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Split float32 numbers into three bfloat16 parts, [3, SIZE], of 8 bits each; the first part of an Inf is Inf."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    whole = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    first = tl.where(whole == whole, high(whole), whole)
    second = high(whole - first)
    tl.store(out + at, first.to(tl.bfloat16), mask=inside)
    tl.store(out + SIZE + at, second.to(tl.bfloat16), mask=inside)
    tl.store(out + 2 * SIZE + at, (whole - first - second).to(tl.bfloat16), mask=inside)


@triton.jit
def six_products(acc, rest, left, right, part, inside, MASKED: tl.constexpr):
    """Sums plus a float32 block by one of three bfloat16 parts: of the first parts, and of the five products below.

    Products of the last parts with the last two are below float32's precision. The left block is split here, in
    registers, from which the tensor cores take a left factor. The sum of the first parts in one step is added outside
    of the tensor cores, for two reasons: they round sums toward zero, and such errors add up; and they have read their
    registers then, before the next block is split into the same ones.
    """
    if MASKED:
        x = tl.load(left, mask=inside[None, :], other=0.0)
        y0 = tl.load(right, mask=inside[:, None], other=0.0)
        y1 = tl.load(right + part, mask=inside[:, None], other=0.0)
        y2 = tl.load(right + 2 * part, mask=inside[:, None], other=0.0)
    else:
        x = tl.load(left)
        y0 = tl.load(right)
        y1 = tl.load(right + part)
        y2 = tl.load(right + 2 * part)
    x = x.to(tl.float32)
    x0 = high(x)
    x1 = high(x - x0)
    x2 = (x - x0 - x1).to(tl.bfloat16)
    x0 = x0.to(tl.bfloat16)
    x1 = x1.to(tl.bfloat16)
    rest = tl.dot(x2, y0, rest)
    rest = tl.dot(x0, y2, rest)
    rest = tl.dot(x1, y1, rest)
    rest = tl.dot(x1, y0, rest)
    rest = tl.dot(x0, y1, rest)
    step = tl.dot(x0, y0)
    return tl.fma(step, tl.full(step.shape, 1.0, tl.float32), acc), rest  # the compiler makes a product of a plain sum


@triton.jit
def multiply(acc, left, right, inside, MASKED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """The accumulator plus a product of two blocks, given by pointers; MASKED: of those steps of the sum `inside`."""
    if MASKED:
        x = tl.load(left, mask=inside[None, :], other=0.0)
        y = tl.load(right, mask=inside[:, None], other=0.0)
    else:
        x = tl.load(left)
        y = tl.load(right)
    return tl.dot(x.to(DOT), y.to(DOT), acc, input_precision=PRECISION, out_dtype=acc.dtype)


@triton.jit
def both(acc, rest):
    """Sums by six products from those of the first parts and of the others: of an Inf, the others are NaN."""
    z = acc + rest
    return tl.where((z != z) & (tl.abs(acc) == float("inf")), acc, z)
