"""`Recipe`: which operands a layer quantizes during training, and how."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from trencadis.quant.calibrate import Granularity, block_shape, calibrated
from trencadis.quant.formats import Format, FormatLike, format_name, format_of
from trencadis.quant.scaled import Scaled

Array = jax.Array
Choice = FormatLike | tuple[FormatLike, Any] | None  # a format, or a format and a granularity

_USUAL = {"lhs": "row", "rhs": "column", "grad": "row"}
_NDIM = {"lhs": 2, "rhs": 3, "grad": 2}


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """What `grouped_dense` quantizes: for each operand a format, a pair (format, granularity), or None for nothing.

    Formats and granularities are those of `quantize`. A granularity applies to x as `[m, k]`, to the kernel as
    `[g, k, n]` and to the gradient as `[m, n]`, after all contracted axes are merged into k and the others into m or n.

    Attributes:
      lhs: x; by default with one scale for each row. Unowned rows have no effect on scales.
      rhs: the kernel; by default with one scale for each column of each group.
      grad: the gradient of the result, which both products of the backward pass read. The one for d x contracts n, and
        by default has one scale for each row. The one for d kernel contracts the rows, and always has one scale for
        each column of each group.

    Block formats have their blocks along the contracted axis by default; for d kernel they use float32 scales, one for
    each column of each group.

    >>> Recipe(lhs="int8", rhs="int8")
    Recipe(lhs='int8', rhs='int8', grad=None)
    >>> Recipe("float8_e4m3fn", ("float8_e4m3fn", (1, 128, 128)), "float8_e5m2").rhs
    ('float8_e4m3fn', (1, 128, 128))
    """

    lhs: Choice = None
    rhs: Choice = None
    grad: Choice = None

    def __post_init__(self) -> None:
        for name in _NDIM:
            object.__setattr__(self, name, _checked(name, getattr(self, name)))

    def bound(self, name: str, absmax: Array) -> Array:
        """The magnitudes to calibrate scales of lhs, rhs or grad against; override it to change the calibration."""
        del name
        return absmax

    def rows(self, x: Array) -> Array | Scaled:
        """x [m, k] as it is multiplied: quantized as the recipe says for lhs, or as it is."""
        return self._quantized("lhs", x)

    def weights(self, w: Array) -> Array | Scaled:
        """A kernel [g, k, n] as it is multiplied: quantized as the recipe says for rhs, or as it is."""
        return self._quantized("rhs", w)

    def gradient(self, y: Array) -> Array | Scaled:
        """A gradient [m, n] as the product for d x reads it: quantized as the recipe says for grad, or as it is."""
        return self._quantized("grad", y)

    @property
    def summed(self) -> Format:
        """The format of a gradient in the product for d kernel: that of grad, with float32 scales and no blocks."""
        assert self.grad is not None
        kind = format_of(_pair(self.grad)[0])
        return dataclasses.replace(kind, scales=format_of("int8").scales, block=0, total=False)

    @property
    def spanned(self) -> str:
        """The dimensions, of m, g and n, along which a scale of lhs or rhs spans several entries."""
        found = ""
        for name, letters in (("lhs", "mk"), ("rhs", "gkn")):
            if getattr(self, name) is not None:
                kind, granularity = self._granularity(name)
                lengths = block_shape(kind, granularity, (2**30,) * len(letters))
                found += "".join(letter for letter, length in zip(letters, lengths, strict=True) if length > 1)
                found += letters if kind.total else ""
        return found.replace("k", "")

    def _quantized(self, name: str, x: Array) -> Array | Scaled:
        """x as the recipe has it."""
        if getattr(self, name) is None:
            return x
        return calibrated(x, *self._granularity(name), functools.partial(self.bound, name))

    def _granularity(self, name: str) -> tuple[Format, Granularity]:
        """The format of an operand and its granularity; by default that of `_USUAL`, or blocks along k or n."""
        format, granularity = _pair(getattr(self, name))
        kind = format_of(format)
        if granularity is None and not kind.block:
            granularity = _USUAL[name]
        elif granularity is None and name == "rhs":
            granularity = (1, kind.block, 1)
        return kind, granularity


def _checked(name: str, choice: Any) -> Choice:
    """The choice for an operand, with formats by name; raises an error that names the operand if it makes no sense."""
    if choice is None:
        return None
    if len(choice) != 2 if isinstance(choice, (tuple, list)) else not format_name(choice):
        raise TypeError(f"{name}: want None, a format, or a pair of a format and a granularity; got {choice!r}")
    try:
        format, granularity = _pair(choice)
        kind = format_of(format)
        block_shape(kind, granularity, (1,) * _NDIM[name])
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name}: {error}") from None
    given = tuple(granularity) if isinstance(granularity, list) else granularity
    return kind.name if given is None else (kind.name, given)


def _pair(choice: Any) -> tuple[FormatLike, Granularity]:
    """The format and the granularity of a choice; without a granularity, None."""
    return (choice[0], choice[1]) if isinstance(choice, (tuple, list)) else (choice, None)
