"""`Recipe`: what a layer quantizes as it trains, and how."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from trencadis.quant.formats import Format, format_of
from trencadis.quant.scaled import Scaled, calibrated

Array = jax.Array
Way = str | tuple[str, Any] | None  # a format, or a format and a granularity


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """What `grouped_dense` quantizes on its way: each a format, a pair (format, granularity), or None for nothing.

    Formats and granularities are those of `quantize`. A granularity is that of x as `[m, k]`, of kernel as `[g, k, n]`
    and of the gradient as `[m, n]`, with the axes merged that are summed over, and those that are not.

    Attributes:
      lhs: x; by default one scale for each row. Rows that no group owns never count.
      rhs: the kernel; by default one scale for each column of each group.
      grad: the gradient of the result, as both products of the backward pass read it. In that of d x the sum runs
        along n: by default there is one scale for each row. In that of d kernel it runs along the rows: there is
        one for each column of each group, whatever the granularity is.

    Block formats have blocks along the sum by default; in d kernel, float32 scales as the others.

    >>> Recipe(lhs="int8", rhs="int8")
    Recipe(lhs='int8', rhs='int8', grad=None)
    >>> Recipe("float8_e4m3fn", ("float8_e4m3fn", (1, 128, 128)), "float8_e5m2").rhs
    ('float8_e4m3fn', (1, 128, 128))
    """

    lhs: Way = None
    rhs: Way = None
    grad: Way = None

    def __post_init__(self) -> None:
        for name in ("lhs", "rhs", "grad"):
            object.__setattr__(self, name, _checked(name, getattr(self, name)))

    def bound(self, name: str, most: Array) -> Array:
        """What scales of lhs, rhs or grad are made for, where these are the largest magnitudes: those."""
        del name
        return most

    def rows(self, x: Array) -> Any:
        """X `[m, k]` as it is multiplied."""
        return self._quantized("lhs", x, "row", None)

    def weights(self, w: Array) -> Any:
        """A kernel `[g, k, n]` as it is multiplied."""
        return self._quantized("rhs", w, "column", lambda kind: (1, kind.block, 1))

    def gradient(self, y: Array) -> Any:
        """A gradient `[m, n]`, as d x reads it."""
        return self._quantized("grad", y, "row", None)

    @property
    def summed(self) -> Format:
        """The format of a gradient as d kernel reads it: without blocks of its own."""
        assert self.grad is not None
        kind = format_of(_pair(self.grad)[0])
        return dataclasses.replace(kind, scales=format_of("int8").scales, block=0, total=False)

    def _quantized(self, name: str, x: Array, usual: Any, blocks: Any) -> Array | Scaled:
        """X as the recipe has it. Where it has no granularity, that is `usual`, or `blocks` in a block format."""
        way = getattr(self, name)
        if way is None:
            return x
        format, granularity = _pair(way)
        kind = format_of(format)
        if granularity is None:
            granularity = usual if not kind.block else None if blocks is None else blocks(kind)
        return calibrated(x, kind, granularity, functools.partial(self.bound, name))


def _checked(name: str, way: Any) -> Way:
    """None, a format or a pair; an error that names the argument otherwise."""
    if way is None:
        return None
    if not isinstance(way, str) and not (isinstance(way, (tuple, list)) and len(way) == 2):
        raise TypeError(f"{name}: want None, a format, or a pair of a format and a granularity; got {way!r}")
    try:
        format, granularity = _pair(way)
        kind = format_of(format).name
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name}: {error}") from None
    given = granularity if granularity is None or isinstance(granularity, str) else tuple(granularity)
    return kind if given is None else (kind, given)


def _pair(way: Any) -> tuple[str, Any]:
    return (way, None) if isinstance(way, str) else tuple(way)
