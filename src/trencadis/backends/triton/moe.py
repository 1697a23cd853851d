"""The Triton kernels around the products of an MoE layer: their blocks, and their calls.

Each function returns None where its kernel does not take the arrays; XLA computes the same then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array

MOVED = ("bfloat16", "float16", "float32", "int8", "uint8", "int32", "float8_e4m3fn", "float8_e5m2")
FLOATS = ("bfloat16", "float16", "float32")
MOST_K = 32  # assignments of a token: the loops over them are unrolled
TILE_BYTES = 4096  # of rows that a program copies
IDS = 128  # a block of ids: each is compared with each
MOST_SORTED, MOST_ROUTED = 4096, 1024  # experts
MOST_INDEXED = 2**31  # entries of a table of tokens or blocks and experts, whose indices have 32 bits
COUNTS = 8192  # counts that a program reads at a time
COLUMNS = 8  # experts whose counts a program sums
MOST_COUNTS = 1 << 22  # bytes that all programs read of the counts; of more, `sum_counts` sums them first
LOGITS = 512  # of a tile of tokens


def spread_rows(x: Array, rows: Array, weights: Array | None, arch: str, *, interpret: bool = False) -> Array | None:
    """The array [t * k, d] in which each row of x [t, d], times weights [t, k] if any, is at its `rows` [t, k]."""
    from trencadis.backends.triton import row_kernels

    (tokens, k), width, size = rows.shape, x.shape[1], x.dtype.itemsize
    if x.dtype.name not in (MOVED if weights is None else FLOATS) or not 0 < k <= MOST_K or 0 in x.shape:
        return None
    across = min(_power(width), TILE_BYTES // size)
    down = TILE_BYTES // (across * size)
    constants = {
        "TOKENS": tokens, "WIDTH": width, "K": k, "ROWS": tokens * k, "BLOCK_T": down, "BLOCK_D": across,
    }  # fmt: skip
    grid = math.ceil(tokens / down) * math.ceil(width / across)
    given = {"x": x, "rows": rows, "weights": weights}
    results = {"out": jax.ShapeDtypeStruct((tokens * k, width), x.dtype)}
    (out,) = _call(row_kernels.spread_rows, grid, given, results, constants, arch, interpret)
    return out


def sort_by_expert(
    experts: Array, num_experts: int, arch: str, *, interpret: bool = False
) -> tuple[Array, Array, Array] | None:
    """The token of each row, the row of each assignment, and the rows of each expert, from experts [t, k]."""
    from trencadis.backends.triton import sort_kernels

    size = experts.size
    blocks, bins = math.ceil(size / IDS), max(_power(num_experts), 32)
    if not (0 < size < 2**30 and 0 < num_experts <= MOST_SORTED and blocks * num_experts < MOST_INDEXED):
        return None
    sizes = _ints(num_experts)
    common = {"SIZE": size, "EXPERTS": num_experts, "BLOCK": IDS, "BINS": bins}
    given: dict[str, Array | None] = {"ids": experts}
    if blocks > 1:
        table = _ints(blocks, num_experts)
        (counts,) = _call(sort_kernels.block_counts, blocks, given, {"counts": table}, common, arch, interpret)
        if 4 * blocks**2 * num_experts <= MOST_COUNTS:
            given |= {"counts": counts}
        else:
            chunk = min(_power(blocks), COUNTS // COLUMNS)
            shape = {"BLOCKS": blocks, "EXPERTS": num_experts, "CHUNK": chunk, "COLUMNS": COLUMNS}
            before, total = _call(
                sort_kernels.sum_counts, math.ceil(num_experts / COLUMNS), {"counts": counts},
                {"before": table, "sizes": sizes}, shape, arch, interpret, warps=8,
            )  # fmt: skip
            given |= {"before": before, "total": total}
    constants = common | {
        "K": experts.shape[1], "BLOCKS": blocks, "STEP": min(IDS, 32), "CHUNK": max(COUNTS // bins, 1),
    }  # fmt: skip
    results = {"token": _ints(size), "inverse": _ints(size), "sizes": sizes}
    token, inverse, found = _call(sort_kernels.place, blocks, given, results, constants, arch, interpret, warps=8)
    return token, inverse, found


def route(
    logits: Array, keys: Array | None, k: int, score: str, normalize: bool, arch: str, *, interpret: bool = False
) -> tuple[Array, Array, Array] | None:
    """The k experts of each token by its keys [t, e], by default the scores, their weights, and all scores."""
    from trencadis.backends.triton import route_kernels

    if not _routes(logits, k):
        return None
    t, e = logits.shape
    blocks, constants = _tokens(logits, k, score, normalize)
    constants |= {"BLOCK_K": _power(k)}
    results = {
        "experts": _ints(t, k),
        "weights": jax.ShapeDtypeStruct((t, k), jnp.float32),
        "probs": jax.ShapeDtypeStruct((t, e), jnp.float32),
    }
    given = {"logits": logits, "keys": keys}
    experts, weights, probs = _call(route_kernels.route, blocks, given, results, constants, arch, interpret)
    return experts, weights, probs


def route_backward(
    logits: Array, experts: Array, d_weights: Array, d_probs: Array, score: str, normalize: bool, arch: str, *,
    interpret: bool = False,
) -> Array | None:  # fmt: skip
    """The gradient of the logits, from those of the weights and of the scores that `route` returns."""
    from trencadis.backends.triton import route_kernels

    if not _routes(logits, experts.shape[1]):
        return None
    blocks, constants = _tokens(logits, experts.shape[1], score, normalize)
    given = {"logits": logits, "experts": experts, "d_weights": d_weights, "d_probs": d_probs}
    results = {"d_logits": jax.ShapeDtypeStruct(logits.shape, logits.dtype)}
    (found,) = _call(route_kernels.pull_back, blocks, given, results, constants, arch, interpret)
    return found


def _routes(logits: Array, k: int) -> bool:
    """Whether the kernels have room for these logits."""
    some = 0 < logits.shape[1] <= MOST_ROUTED and 0 < logits.size < MOST_INDEXED
    return logits.dtype.name in FLOATS and some and k <= MOST_K


def _tokens(logits: Array, k: int, score: str, normalize: bool) -> tuple[int, dict[str, Any]]:
    """The blocks of tokens, and what the kernels of routing are compiled for."""
    t, e = logits.shape
    block_t = max(LOGITS // _power(e), 1)
    constants = {"TOKENS": t, "EXPERTS": e, "K": k, "SCORE": score, "NORMALIZE": normalize}
    return math.ceil(t / block_t), constants | {"BLOCK_T": block_t, "BLOCK_E": _power(e)}


def _call(
    function: Any, grid: int, given: dict[str, Any], results: dict[str, jax.ShapeDtypeStruct],
    constants: dict[str, Any], arch: str, interpret: bool, warps: int = 4,
) -> Sequence[Array]:  # fmt: skip
    """The arrays that a kernel writes, from those that it is given; None is one that is not there."""
    from trencadis.backends.triton import bridge, interpreter

    operands = {name: x for name, x in given.items() if x is not None}
    # bytes are only moved: their dtype may be one that the GPU does not have, as float8 before Ada
    pointers = tuple(
        (name, "uint8" if x.dtype.itemsize == 1 else np.dtype(x.dtype).name) for name, x in (operands | results).items()
    )
    kernel = bridge.Kernel(
        function=function, pointers=pointers, constants=tuple(constants.items()), arch=arch, warps=warps, stages=1
    )
    run = interpreter.call_for_several if interpret else bridge.call_for_several
    return run(kernel, grid, list(operands.values()), list(results.values()))


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _power(size: int) -> int:
    """The least power of two that is not below a size."""
    return 1 << max(size - 1, 0).bit_length()
