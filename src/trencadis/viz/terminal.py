"""The mosaic as text: every row of a small schedule, one character for many rows of a large one.

A line is a list of pieces, each a string and the group whose colour it takes; `plain` drops the colours, `coloured`
hands them to rich.
"""

from __future__ import annotations

import bisect
import itertools
import string
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trencadis.viz.palette import colour, ink

if TYPE_CHECKING:
    from trencadis.viz.mosaic import Mosaic

Piece = tuple[str, int | None]
Line = list[Piece]

GUTTER = 8  # columns before a line's content
SMALL = 32  # rows that are shown one by one
LETTERS = string.digits + string.ascii_lowercase + string.ascii_uppercase
UNOWNED = "·"
BAR = "█"
BARS = 12  # groups whose sizes are drawn one by one


def layout(mosaic: Mosaic, width: int) -> list[Line]:
    """The lines of a mosaic for a terminal of that width."""
    width = min(max(width, 40), 120)
    lines = _each_row(mosaic, width) or _large(mosaic, width)
    return lines + paragraph("total", _totals(mosaic), max(width, 100))


def plain(lines: list[Line]) -> str:
    """The lines without colour."""
    return "\n".join("".join(piece for piece, _ in line).rstrip() for line in lines)


def coloured(lines: list[Line]) -> Iterator[Any]:
    """The lines as rich texts, which rich writes in the colours the terminal has, or in none."""
    from rich.text import Text  # only who prints through rich needs it

    for line in lines:
        text = Text(no_wrap=True, overflow="ignore")
        for piece, group in line:
            text.append(piece, style=_style(piece, group))
        yield text


def _style(piece: str, group: int | None) -> str:
    if group is None:
        return ""
    return colour(group) if piece.startswith(BAR) else f"{ink(group)} on {colour(group)}"


def _totals(mosaic: Mosaic) -> str:
    parts = [
        _count(mosaic.visits, "visit"),
        f"{_count(mosaic.tiles, 'tile')} of {_count(mosaic.tile, 'row')}",
        f"{mosaic.owned} of {_count(mosaic.m, 'row')} owned",
    ]
    if mosaic.empty:
        parts.append(_count(len(mosaic.empty), "empty group"))
    return ", ".join([*parts, f"{mosaic.waste:.0%} waste"])


def _count(n: int, thing: str) -> str:
    return f"{n} {thing}" if n == 1 else f"{n} {thing}s"


def paragraph(label: str, content: str, width: int, gutter: int = GUTTER) -> list[Line]:
    """Words after a label, wrapped."""
    lines = textwrap.wrap(content, max(width - gutter, 20), break_long_words=False) or [""]
    return [[(f"{label if i == 0 else '':<{gutter}}{line}", None)] for i, line in enumerate(lines)]


# ---------------------------------------------------------------------------------------------------------------------
# Small: every row


def _each_row(mosaic: Mosaic, width: int) -> list[Line]:
    """Rows, groups and visits in full; nothing if that does not fit."""
    if not 0 < mosaic.m <= SMALL:
        return []
    owner: list[int | None] = [None] * mosaic.m
    for group, _, start, end in mosaic.cells():
        owner[start:end] = [group] * (end - start)
    labels = [UNOWNED if group is None else str(group) for group in owner]
    wide = max(len(label) for label in [*labels, str(mosaic.m - 1)])
    rows: Line = [(f"{'rows':<{GUTTER}}", None)]
    groups: Line = [(f"{'group':<{GUTTER}}", None)]
    for row, (label, mine) in enumerate(zip(labels, owner, strict=True)):
        if row:
            same = row % mosaic.tile != 0 and mine == owner[row - 1]
            gap = " " if row % mosaic.tile else " │ "
            rows.append((gap, None))
            groups.append((gap, mine if same else None))
        rows.append((f"{row:>{wide}}", None))
        groups.append((f"{label:>{wide}}", mine))
    if sum(len(piece) for piece, _ in rows) > width:
        return []
    pairs = " ".join(f"({group},{tile})" for group, tile in mosaic.pairs) or "none"
    return [rows, groups, *paragraph("visits", pairs, width)]


# ---------------------------------------------------------------------------------------------------------------------
# Large: one character for several rows, or for several tiles


def _large(mosaic: Mosaic, width: int) -> list[Line]:
    lines: list[Line] = []
    if mosaic.m:
        lines += _bands(mosaic, width - max(GUTTER, len(str(mosaic.m)) + 2))
    shared = mosaic.shared
    if shared:
        most = max(range(mosaic.tiles), key=mosaic.visits_per_tile.__getitem__)
        lines += paragraph("shared", f"{len(shared)} of {_count(mosaic.tiles, 'tile')}, most by "
                            f"{mosaic.visits_per_tile[most]} groups (tile {most})", width)  # fmt: skip
    if mosaic.unowned:
        lines += paragraph("unowned", f"{_count(mosaic.unowned, 'row')}, marked {UNOWNED}", width)
    if mosaic.empty:
        lines += paragraph("empty", _listing(mosaic.empty), width)
    return lines + _sizes(mosaic, width)


def _listing(groups: tuple[int, ...], most: int = 24) -> str:
    named = ", ".join(map(str, groups[:most]))
    return f"group {named}" if len(groups) == 1 else f"groups {named}" + (", …" if len(groups) > most else "")


def _resolution(mosaic: Mosaic, usable: int) -> tuple[int, int]:
    """Characters for each tile, or else tiles for each character; the other is 1."""
    most = min(usable - 1, 4 * usable // mosaic.tiles - 1, mosaic.tile, 64)
    if most < 2:
        return 1, -(-mosaic.tiles // (16 * usable))
    even = max(
        c for c in range(1, most + 1) if mosaic.tile % c == 0
    )  # as many rows for each, if that is not too coarse
    return (even if 2 * even >= most else most), 1


def _bands(mosaic: Mosaic, usable: int) -> list[Line]:
    """Lines of tiles, and beneath each the number of groups that share a tile."""
    per_tile, per_char = _resolution(mosaic, usable)
    border = "│" if per_tile > 1 else ""
    step = per_char * mosaic.tile  # rows of a unit: what one border, or one character, encloses
    units = -(-mosaic.tiles // per_char)
    in_line = usable // (per_tile + len(border))
    if in_line > 8:
        in_line -= in_line % 8
    lines = paragraph("rows", _explain(mosaic, per_tile, per_char), usable + GUTTER)
    gutter = max(GUTTER, len(str(mosaic.m)) + 2)
    for low in range(0, units, in_line):
        line: Line = [(f"{low * step:>{gutter - 2}}  ", None)]
        marks = " " * gutter
        for unit in range(low, min(low + in_line, units)):
            cuts = [unit * step + i * step // per_tile for i in range(per_tile + 1)]
            owners = [_owner(mosaic, a, b) for a, b in itertools.pairwise(cuts) if a < mosaic.m]
            line += [(UNOWNED if g is None else LETTERS[g % len(LETTERS)], g) for g in owners]
            line.append((border, None))
            most = max(mosaic.visits_per_tile[unit * per_char : (unit + 1) * per_char])
            marks += f"{_mark(most):<{per_tile + len(border)}}"
        lines.append(line)
        if marks.strip():
            lines.append([(marks.rstrip(), None)])
    return lines


def _mark(visits: int) -> str:
    return "" if visits < 2 else str(visits) if visits < 10 else "+"


def _explain(mosaic: Mosaic, per_tile: int, per_char: int) -> str:
    if per_tile > 1:
        about = "" if mosaic.tile % per_tile == 0 else "about "
        each = f"a character is {about}{_count(round(mosaic.tile / per_tile), 'row')}, │ ends a tile"
    else:
        each = f"a character is {_count(per_char, 'tile') if per_char > 1 else 'a tile'}, by the group with most of it"
    marks = "; below: groups that share it" if mosaic.shared else ""
    again = (
        f"; {LETTERS[0]}-{LETTERS[-1]} repeat every {len(LETTERS)} groups" if len(mosaic.sizes) > len(LETTERS) else ""
    )
    return each + marks + again


def _owner(mosaic: Mosaic, low: int, high: int) -> int | None:
    """The local group with most of the rows [low, high), or None if most are unowned."""
    ends, high = mosaic.ends, min(high, mosaic.m)
    have: dict[int | None, int] = {}
    at = low
    while at < high:
        group = bisect.bisect_right(ends, at)
        end = min(ends[group], high) if group < len(ends) else high
        local = group if mosaic.first <= group < mosaic.first + mosaic.local_groups else None
        have[local] = have.get(local, 0) + end - at
        at = end
    return max(have, key=have.__getitem__)


# ---------------------------------------------------------------------------------------------------------------------
# Sizes


def _sizes(mosaic: Mosaic, width: int) -> list[Line]:
    """A bar for each group, or for each range of sizes when there are many groups."""
    local = range(mosaic.first, mosaic.first + mosaic.local_groups)
    if not local:
        return []
    if len(local) <= BARS:
        bars: list[tuple[str, int, int | None]] = [(str(g), mosaic.sizes[g], g) for g in local]
    else:
        bars = [(name, count, None) for name, count in _histogram([mosaic.sizes[g] for g in local])]
    wide = max(len(name) for name, _, _ in bars)
    room = max(min(width - GUTTER - wide - 14, 48), 8)
    most = max(max(count for _, count, _ in bars), 1)
    lines: list[Line] = []
    for i, (name, count, group) in enumerate(bars):
        bar = BAR * max(round(count / most * room), 1 if count else 0)
        lead = f"{'sizes' if i == 0 else '':<{GUTTER}}{name:>{wide}}  "
        tail = f" {count}" if group is not None else f" {_count(count, 'group')}"
        lines.append([(lead, None), (bar, group), (tail if bar else tail[1:], None)])
    return lines


def _histogram(sizes: list[int]) -> list[tuple[str, int]]:
    """How many groups have a size in each range; ranges double, from the smallest size to the largest."""
    edges = [0, 1]
    while edges[-1] <= max(sizes):
        edges.append(2 * edges[-1])
    ranges = [(low, high, sum(low <= size < high for size in sizes)) for low, high in itertools.pairwise(edges)]
    used = [i for i, (_, _, count) in enumerate(ranges) if count]
    return [
        (str(low) if high == low + 1 else f"{low}-{high - 1}", count)
        for i, (low, high, count) in enumerate(ranges)
        if used[0] <= i <= used[-1] and (count or i)
    ]
