"""The collectives of a compiled program, and the bytes that each device gets from others in them."""

from __future__ import annotations

import dataclasses
import math
import re

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
_CALL = re.compile(rf"= (?P<types>.*?) (?P<kind>{'|'.join(KINDS)})(?P<start>-start)?\((?P<rest>.*)$")
_TYPE = re.compile(r"\b((?:pred|[a-z]+[0-9]+)[0-9a-z]*)\[([0-9,]*)\]")


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a program."""

    kind: str  # as HLO calls it, such as "all-gather"
    group: int  # the number of devices that take part
    result: int  # bytes of the result on one device

    @property
    def received(self) -> int:
        """The bytes that a device gets from others, if every part of the result is moved once."""
        share = {"all-reduce": 2.0, "reduce-scatter": float(self.group)}.get(self.kind, 1.0)
        if self.kind == "collective-permute":
            return self.result
        return math.ceil(share * self.result * (self.group - 1) / self.group)


def collectives(text: str, devices: int) -> list[Collective]:
    """The collectives in the text of an HLO module for so many devices; a loop's body counts once.

    >>> line = "  %g = f32[8,4]{1,0} all-gather(%x), channel_id=1, replica_groups={{0,1},{2,3}}, dimensions={0}"
    >>> collectives(line, 4)
    [Collective(kind='all-gather', group=2, result=128)]
    >>> collectives(line, 4)[0].received
    64
    """
    found = []
    for line in text.splitlines():
        call = _CALL.search(line)
        if call is None:
            continue
        sizes = [_bytes(*each) for each in _TYPE.findall(call["types"])]
        if call["start"]:  # an asynchronous one: a tuple of operands and results
            sizes = sizes[len(sizes) // 2 :] if call["kind"] != "all-reduce" else sizes
        found.append(Collective(call["kind"], _group(call["rest"], devices), sum(sizes)))
    return found


def _group(rest: str, devices: int) -> int:
    """The size of the first replica group."""
    listed = re.search(r"replica_groups=\{\{([0-9,]*)\}", rest)
    if listed:
        return listed[1].count(",") + 1
    iota = re.search(r"replica_groups=\[[0-9]+,([0-9]+)\]", rest)
    return int(iota[1]) if iota else devices


def _bytes(dtype: str, shape: str) -> int:
    """The bytes of an array, whose dtype is written as HLO does: a letter or two, and the bits of a number."""
    numbers = math.prod(map(int, shape.split(","))) if shape else 1
    width = re.search(r"[0-9]+", dtype)
    return math.ceil(numbers * (int(width[0]) if width else 8) / 8)
