"""The rows and bytes that each strategy moves, and the choice by them."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias, get_args

from trencadis.core import arguments

Strategy: TypeAlias = Literal["all_gather", "all_to_all", "ragged"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)

RAGGED_GPUS = 32  # the most GPUs for which `lax.ragged_all_to_all` is chosen: beyond, users report crashes


def check_strategy(strategy: object) -> None:
    """Raise unless it is the name of a strategy."""
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy: want one of {', '.join(map(repr, STRATEGIES))} or None; got {strategy!r}")


def worst_case(shards: int, tokens: int, k: int, local: int) -> int:
    """The most rows that a shard can get: all tokens of all shards, each for as many of its experts as it may choose.

    >>> worst_case(shards=4, tokens=100, k=2, local=8)
    800
    """
    return shards * tokens * min(k, local)


def rows_moved(strategy: Strategy, *, shards: int, tokens: int, k: int, local: int, capacity: int | None) -> int:
    """The rows that a device gets from others on their way to the experts; those of "ragged" for an even load.

    >>> sizes = dict(shards=8, tokens=1024, k=2, local=16, capacity=None)
    >>> [rows_moved(strategy, **sizes) for strategy in STRATEGIES]
    [7168, 14336, 1792]
    """
    if strategy == "all_gather":
        return (shards - 1) * tokens
    if strategy == "ragged":
        return math.ceil((shards - 1) * tokens * k / shards)
    room = worst_case(shards, tokens, k, local) if capacity is None else capacity
    return (shards - 1) * math.ceil(room / shards)


def bytes_moved(
    strategy: Strategy, *, shards: int, tokens: int, k: int, local: int, row: int, capacity: int | None = None,
    backward: bool = False,
) -> int:  # fmt: skip
    """The bytes that a device gets from others in a forward pass: tokens, their experts and weights, and results.

    Those of "ragged" are those of an even load.

    Args:
      strategy: one of `STRATEGIES`.
      shards: the number of shards.
      tokens: the number of tokens of a shard.
      k: the number of experts of a token.
      local: the number of experts of a shard.
      row: the bytes of a token.
      capacity: as in `expert_parallel`.
      backward: of the backward pass instead: gradients of results, of tokens, and of the weights of their experts.

    >>> sizes = dict(shards=8, tokens=1024, k=2, local=16, row=8192)
    >>> [round(bytes_moved(strategy, **sizes) / 2**20) for strategy in STRATEGIES]
    [112, 224, 28]
    """
    check_strategy(strategy)
    for name, value in {"shards": shards, "tokens": tokens, "k": k, "local": local, "row": row}.items():
        if not arguments.is_int(value) or value < 1:
            raise ValueError(f"{name}: want an int of at least 1; got {value!r}")
    rows = rows_moved(strategy, shards=shards, tokens=tokens, k=k, local=local, capacity=capacity)
    if strategy == "all_gather":  # ids and weights travel apart, and ids have no gradient
        return rows * (2 * row + (4 if backward else 8) * k)
    counts = 4 * shards * (shards - 1) if strategy == "ragged" and not backward else 0
    return rows * (2 * row + 8) + counts


def choose(platform: str | None, shards: int, **sizes: Any) -> Strategy:
    """The strategy that moves the fewest rows, of those that suit the platform; the simplest of equals.

    On CPUs "ragged" is padded to the worst case and saves nothing.
    """
    suits = platform != "cpu" and (platform in (None, "tpu") or shards <= RAGGED_GPUS)
    candidates = STRATEGIES if suits else STRATEGIES[:2]
    return min(candidates, key=lambda strategy: rows_moved(strategy, shards=shards, **sizes))
