"""Random group sizes, to look at when there are no real ones."""

from __future__ import annotations

import numpy as np

SKEWS = ("zipf", "uniform", "balanced")


def random_sizes(groups: int, m: int, *, skew: str = "zipf", seed: int = 0) -> list[int]:
    """The sizes of that many groups, which sum to m.

    With skew "zipf", the i-th most popular group draws rows in proportion to 1 / i, in a random order of groups; with
    "uniform", each row picks any group; with "balanced", sizes are as equal as they can be.

    >>> random_sizes(4, 10, skew="balanced"), sum(random_sizes(4, 1000))
    ([3, 3, 2, 2], 1000)
    """
    if groups < 1:
        raise ValueError(f"groups: want a positive int; got {groups}")
    if m < 0:
        raise ValueError(f"m: want a nonnegative int; got {m}")
    if skew not in SKEWS:
        raise ValueError(f"skew: want one of {', '.join(SKEWS)}; got {skew!r}")
    if skew == "balanced":
        return [m // groups + (i < m % groups) for i in range(groups)]
    rng = np.random.default_rng(seed)
    share = np.ones(groups) if skew == "uniform" else 1 / rng.permutation(np.arange(1, groups + 1))
    return [int(size) for size in rng.multinomial(m, share / share.sum())]
