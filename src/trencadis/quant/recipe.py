"""`Recipe`: which operands a layer quantizes during training, and how."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from trencadis.core.mesh import Over
from trencadis.quant.calibrate import Granularity, block_shape, calibrated, pmax_of_magnitudes
from trencadis.quant.formats import Format, FormatLike, format_name, format_of
from trencadis.quant.scaled import Scaled

Array = jax.Array
Choice = FormatLike | tuple[FormatLike, Any] | None  # a format, or a format and a granularity

_USUAL = {"lhs": "row", "rhs": "column", "grad": "row"}
_DIMENSIONS = {"lhs": "mk", "rhs": "gkn", "grad": "mn"}
_WHOLE = 2**30  # the length of a block that spans a dimension


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
        for name in _DIMENSIONS:
            object.__setattr__(self, name, _checked(name, getattr(self, name)))

    def __eq__(self, other: object) -> bool:
        if type(self) is not Recipe or type(other) is not Recipe:
            return self is other  # a subclass may have a state beside the fields
        return (self.lhs, self.rhs, self.grad) == (other.lhs, other.rhs, other.grad)

    def __hash__(self) -> int:
        return hash((self.lhs, self.rhs, self.grad))

    def bound(self, name: str, absmax: Array) -> Array:
        """The magnitudes to calibrate scales of lhs, rhs or grad against; override it to change the calibration."""
        del name
        return absmax

    def rows(self, x: Array, over: Over = Over()) -> Array | Scaled:
        """x [m, k] as it is multiplied: quantized as the recipe says for lhs, or as it is.

        Where x is a part of an array that is divided over mesh axes, scales that span several parts are those of all.
        """
        return self._quantized("lhs", x, over)

    def weights(self, w: Array, over: Over = Over()) -> Array | Scaled:
        """A kernel [g, k, n] as it is multiplied: quantized as the recipe says for rhs, or as it is."""
        return self._quantized("rhs", w, over)

    def gradient(self, y: Array, over: Over = Over()) -> Array | Scaled:
        """A gradient [m, n] as the product for d x reads it: quantized as the recipe says for grad, or as it is."""
        return self._quantized("grad", y, over)

    @property
    def summed(self) -> Format:
        """The format of a gradient in the product for d kernel: that of grad, with float32 scales and no blocks."""
        assert self.grad is not None
        kind = format_of(_pair(self.grad)[0])
        return dataclasses.replace(kind, scales=format_of("int8").scales, block=0, total=False)

    @property
    def units(self) -> dict[str, int]:
        """The lengths, of m, k, n and g, that parts of an operand are multiples of so that no block is cut in two."""
        found = dict.fromkeys("mkng", 1)
        for name, letters in _DIMENSIONS.items():
            for letter, length in zip(letters, self._blocks(name), strict=True):
                found[letter] = found[letter] if length == _WHOLE else math.lcm(found[letter], length)
        return found

    def spans(self, name: str, dimension: str) -> bool:
        """Whether each block of lhs, rhs or grad spans a dimension, one of m, k, n and g."""
        return self._blocks(name)[_DIMENSIONS[name].index(dimension)] == _WHOLE

    def _blocks(self, name: str) -> tuple[int, ...]:
        """The length of a block along each dimension of an operand; 1 where it is not quantized."""
        letters = _DIMENSIONS[name]
        if getattr(self, name) is None:
            return (1,) * len(letters)
        return block_shape(*self._granularity(name), (_WHOLE,) * len(letters))

    def _quantized(self, name: str, x: Array, over: Over) -> Array | Scaled:
        """x as the recipe has it."""
        if getattr(self, name) is None:
            return x
        letters, lengths = _DIMENSIONS[name], self._blocks(name)
        axes = [getattr(over, letter) for letter in letters]
        groups = over.g if letters[0] == "m" and lengths[0] > 1 else ()  # a device has 0 in rows of other groups
        spanned = tuple(a for each, length in zip(axes, lengths, strict=True) if length == _WHOLE for a in each)
        everywhere = (*(a for each in axes for a in each), *(over.g if letters[0] == "m" else ()))
        return calibrated(
            x, *self._granularity(name), lambda absmax: self.bound(name, pmax_of_magnitudes(absmax, spanned + groups)),
            lambda most: pmax_of_magnitudes(most, everywhere),
        )  # fmt: skip

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
        block_shape(kind, granularity, (1,) * len(_DIMENSIONS[name]))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name}: {error}") from None
    given = tuple(granularity) if isinstance(granularity, list) else granularity
    return kind.name if given is None else (kind.name, given)


def _pair(choice: Any) -> tuple[FormatLike, Granularity]:
    """The format and the granularity of a choice; without a granularity, None."""
    return (choice[0], choice[1]) if isinstance(choice, (tuple, list)) else (choice, None)
