"""The arithmetic of the scalar unit: 32-bit words, pointers into operands, and unknown values."""

from __future__ import annotations

from typing import Any

MASK = 0xFFFFFFFF
# An address in an operand carries the operand's number above its 80th bit, and survives additions and a shift by 4,
# with which the compiler turns 16-byte words into bytes. Such numbers are never cut to 32 bits.
_TAG, _BIT = 80, 100
_SHIFT = 4


class DependsOnUnknown(Exception):
    """A step of the program depends on an unknown value."""

    def __init__(self, unknown: Unknown) -> None:
        super().__init__(unknown.what)
        self.unknown = unknown


class Unknown:
    """A value that is not known. Arithmetic passes it on; it raises where control flow or an address depends on it.

    >>> unknown = Unknown("vtos", 7)
    >>> (unknown + 1) << 2 is unknown
    True
    """

    __slots__ = ("line", "what")

    def __init__(self, what: str, line: int) -> None:
        self.what, self.line = what, line

    def _same(self, *_: Any) -> Unknown:
        return self

    def _refuse(self, *_: Any) -> Any:
        raise DependsOnUnknown(self)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _same
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _same
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __neg__ = _same
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _same  # type: ignore[assignment]
    __bool__ = __index__ = __int__ = __float__ = __hash__ = _refuse  # to be an address takes a hash


def pointer(operand: int) -> int:
    """The address of the first byte of an operand."""
    return (1 << _BIT) + (operand << _TAG)


def operand_of(address: int) -> int:
    """The number of the operand that an address lies in.

    >>> operand_of(pointer(3) + 1000), operand_of((pointer(3) + 1000) << 4)
    (3, 3)
    """
    shift = _SHIFT if address >= 1 << (_BIT + _SHIFT - 1) else 0
    return (address - (1 << (_BIT + shift))) >> (_TAG + shift)


def in_hbm(address: int) -> bool:
    """Whether an address lies in an operand, rather than in the core's own memory."""
    return address >> 60 != 0


def wrap(value: Any) -> Any:
    """The 32-bit word that a sum or product leaves in a register; pointers stay whole.

    >>> wrap(1 << 31), wrap(pointer(0) + 1) == pointer(0) + 1
    (-2147483648, True)
    """
    if value.__class__ is Unknown or abs(value) >= 1 << 59:
        return value
    return ((value + 0x80000000) & MASK) - 0x80000000


def signed(value: int) -> int:
    """The value of a 32-bit word as a signed number."""
    return value - (1 << 32) if value >= 1 << 31 else value


def left(value: Any, by: Any) -> Any:
    """A 32-bit word shifted left; a pointer stays whole."""
    if value.__class__ is Unknown or by.__class__ is Unknown:
        return value if value.__class__ is Unknown else by
    shifted = value << by
    small = abs(value) < 1 << 31 and shifted < 1 << 31
    return shifted if small or abs(value) >= 1 << 44 else wrap(shifted)


def high(a: Any, b: Any) -> Any:
    """The upper 32 bits of an unsigned product."""
    if a.__class__ is Unknown or b.__class__ is Unknown:
        return a if a.__class__ is Unknown else b
    return signed((a & MASK) * (b & MASK) >> 32)


def smin(a: Any, b: Any) -> Any:
    """The smaller of two signed words."""
    if a.__class__ is Unknown or b.__class__ is Unknown:
        return a if a.__class__ is Unknown else b
    return min(a, b)


def smax(a: Any, b: Any) -> Any:
    """The larger of two signed words."""
    if a.__class__ is Unknown or b.__class__ is Unknown:
        return a if a.__class__ is Unknown else b
    return max(a, b)


def sminu(a: Any, b: Any) -> Any:
    """The smaller of two words that are compared as unsigned."""
    return signed(smin(a & MASK, b & MASK)) if Unknown not in (a.__class__, b.__class__) else smin(a, b)


def smaxu(a: Any, b: Any) -> Any:
    """The larger of two words that are compared as unsigned."""
    return signed(smax(a & MASK, b & MASK)) if Unknown not in (a.__class__, b.__class__) else smax(a, b)


def truth(value: Any) -> Any:
    """The value as a predicate: True, False or unknown."""
    return value if value.__class__ is Unknown else bool(value)


# The functions that translated programs call by name.
FUNCTIONS = {f.__name__: f for f in (Unknown, wrap, left, high, smin, smax, sminu, smaxu, truth)}
