"""Tile sizes and other overrides of the plan: how a caller writes them, and what each derivative makes of them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class Tiling:
    """A tile of m rows by k by n, in the units of the caller's m, k and n.

    >>> Tiling(128, 512, 512)
    Tiling(m=128, k=512, n=512)
    """

    m: int
    k: int
    n: int

    def swapped(self) -> Tiling:
        """The tiling of a pass in which k and n change roles."""
        return Tiling(self.m, self.n, self.k)

    def __str__(self) -> str:
        return f"{self.m}·{self.k}·{self.n}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tilings:
    """One tiling per pass, each in the caller's m, k and n; None lets the plan choose.

    >>> Tilings(forward=(128, 512, 512), d_rhs=(512, 256, 256)).forward
    (128, 512, 512)
    """

    forward: Any = None
    d_lhs: Any = None
    d_rhs: Any = None

    def swapped(self) -> Tilings:
        """The tilings of a derived problem in which k and n change roles."""
        each = (t and t.swapped() for t in (self.forward, self.d_lhs, self.d_rhs))
        return Tilings(**dict(zip(("forward", "d_lhs", "d_rhs"), each, strict=True)))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """What the caller decided instead of the plan: backend, interpretation, tilings of all passes.

    `advise` is False for products whose operands the caller does not store, such as those of derivatives: there is no
    advice on how to store them. It does not change what runs, and is not compared.
    """

    backend: str | None = None
    interpret: bool = False
    tilings: Tilings = Tilings()
    advise: bool = dataclasses.field(default=True, compare=False)

    def derive(self, tiling: Tiling | None, *, swap: bool) -> Overrides:
        """The overrides of a derivative with its own tiling; one tile for all passes follows its dimensions."""
        same = self.tilings.forward == self.tilings.d_lhs == self.tilings.d_rhs
        tilings = self.tilings if same else Tilings(forward=tiling)
        return dataclasses.replace(self, tilings=tilings.swapped() if swap else tilings, advise=False)

    @property
    def untiled(self) -> Overrides:
        """The overrides without tilings, for a part of k: the caller's tiles are meant for all of k."""
        return dataclasses.replace(self, tilings=Tilings())


TilingLike = Tiling | Tilings | tuple[int, int, int] | Callable[[int, int, int], Any] | None


def resolve(tiling: object, m: int, k: int, n: int) -> Tilings:
    """The tilings of all passes from any spelling of the argument `tiling`, for a problem of m, k, n."""
    if callable(tiling):
        tiling = _called(tiling, m, k, n)
    if isinstance(tiling, Tilings):
        one = {name: _one(getattr(tiling, name), m, k, n) for name in ("forward", "d_lhs", "d_rhs")}
        return Tilings(**one)
    tile = _one(tiling, m, k, n)
    return Tilings(forward=tile, d_lhs=tile, d_rhs=tile)


def _called(tiling: Callable[..., object], m: int, k: int, n: int) -> object:
    """What a function given as `tiling` returns; an error that names the argument if it does not take m, k and n."""
    try:
        inspect.signature(tiling).bind(m, k, n)
    except TypeError as error:
        raise TypeError(f"tiling: want a function of (m, k, n); got {tiling!r}, {error}") from None
    except ValueError:  # a builtin without a signature
        pass
    return tiling(m, k, n)


def _one(tiling: object, m: int, k: int, n: int) -> Tiling | None:
    if callable(tiling):
        tiling = _called(tiling, m, k, n)
    if tiling is None:
        return None
    sizes = (tiling.m, tiling.k, tiling.n) if isinstance(tiling, Tiling) else tiling
    if not isinstance(sizes, (tuple, list)) or len(sizes) != 3:
        raise ValueError(
            "tiling: want None, a Tiling, a Tilings, a tuple (tm, tk, tn), or a function of (m, k, n) that gives one "
            f"of these; got {tiling!r}"
        )
    for name, size in zip(("tm", "tk", "tn"), sizes, strict=True):
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
            raise ValueError(f"tiling: {name} must be a positive int; got {size!r} in {tiling!r}")
    return Tiling(*(int(size) for size in sizes))
