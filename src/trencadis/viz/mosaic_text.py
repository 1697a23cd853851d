"""The tiles of a backend as text: every row of a small call, one character for several rows of a large one."""

from __future__ import annotations

import bisect
import itertools
from typing import TYPE_CHECKING

from trencadis.viz.terminal import BAR, GUTTER, LETTERS, UNOWNED, Line, counted, paragraph

if TYPE_CHECKING:
    from trencadis.viz.mosaic import Mosaic

SMALL = 32  # rows that are shown one by one
BARS = 12  # groups whose sizes are drawn one by one
LISTED = 24  # empty groups that are named
LINES = 6  # of rows, at most, in a large picture
START = "╵"  # below a character in which a tile starts


def layout(mosaic: Mosaic, width: int) -> list[Line]:
    """The lines of a mosaic for a terminal of that width."""
    width = min(max(width, 40), 120)
    lines = _each_row(mosaic, width) or _large(mosaic, width)
    tiles = counted(len(mosaic.cells), "tile") + (f" of {mosaic.heights_range}" if mosaic.cells else "")
    return lines + totals(mosaic, [tiles], width) + paragraph("backend", mosaic.note, width)


def totals(mosaic: Mosaic, facts: list[str], width: int) -> list[Line]:
    """The line of a text that says what there is to count."""
    facts = [*facts, f"{mosaic.owned} of {counted(mosaic.m, 'row')} owned"]
    if mosaic.empty:
        facts.append(counted(len(mosaic.empty), "empty group"))
    words = ", ".join([*facts, f"{mosaic.waste:.0%} waste"])
    return paragraph("total", words, max(width, 100))


# ---------------------------------------------------------------------------------------------------------------------
# Small: every row


def row_lines(mosaic: Mosaic, cuts: set[int], width: int) -> list[Line]:
    """The numbers of all rows and below them their groups, with a bar before each row in cuts; [] if too wide."""
    if not 0 < mosaic.m <= SMALL:
        return []
    owner: list[int | None] = [None] * mosaic.m
    for group, _, owned in mosaic.cells:
        owner[owned.start : owned.stop] = [group] * len(owned)
    labels = [UNOWNED if group is None else str(group) for group in owner]
    wide = max(len(label) for label in [*labels, str(mosaic.m - 1)])
    rows: Line = [(f"{'rows':<{GUTTER}}", None)]
    groups: Line = [(f"{'group':<{GUTTER}}", None)]
    for row, (label, mine) in enumerate(zip(labels, owner, strict=True)):
        if row:
            same = row not in cuts and mine == owner[row - 1]
            gap = " │ " if row in cuts else " "
            rows.append((gap, None))
            groups.append((gap, mine if same else None))
        rows.append((f"{row:>{wide}}", None))
        groups.append((f"{label:>{wide}}", mine))
    return [rows, groups] if sum(len(piece) for piece, _ in rows) <= width else []


def _each_row(mosaic: Mosaic, width: int) -> list[Line]:
    """Rows, groups and tiles in full; [] if that does not fit."""
    cuts = {cut for cell in mosaic.cells for cut in (cell.owned.start, cell.owned.stop)}
    lines = row_lines(mosaic, cuts, width)
    by_group = itertools.groupby(mosaic.cells, key=lambda cell: cell.group)
    tiles = [f"group {group}: " + ", ".join(_range(cell.rows) for cell in run) for group, run in by_group]
    return lines and [*lines, *paragraph("tiles", "; ".join(tiles) or "none", width)]


def _range(rows: range) -> str:
    return str(rows.start) if len(rows) == 1 else f"{rows.start}-{rows.stop - 1}"


# ---------------------------------------------------------------------------------------------------------------------
# Large: one character for several rows


def _large(mosaic: Mosaic, width: int) -> list[Line]:
    gutter = max(GUTTER, len(str(mosaic.m)) + 2)
    lines = _bands(mosaic, width - gutter, gutter) if mosaic.m else []
    heights = ", ".join(f"{count} of {height}" for height, count in mosaic.heights_count.items())
    lines += paragraph("tiles", f"{heights} rows" if heights else "none", width)
    return lines + remarks(mosaic, width) + sizes(mosaic, width)


def _bands(mosaic: Mosaic, usable: int, gutter: int) -> list[Line]:
    """Lines of rows by their groups, and below each a mark where a tile starts, unless tiles are too many for that."""
    usable -= usable % 8 if usable > 8 else 0
    each = next(size for power in itertools.count() if (size := 2**power) * usable * LINES >= mosaic.m)
    starts = {cell.owned.start // each for cell in mosaic.cells}
    marked = len(starts) == len(mosaic.cells) and 2 * len(starts) * each <= mosaic.m
    words = f"a character is {counted(each, 'row')}" + (f", {START} starts a tile" if marked else "")
    lines = paragraph("rows", words + repeats(mosaic), usable + gutter)
    for low in range(0, -(-mosaic.m // each), usable):
        some = range(low, min(low + usable, -(-mosaic.m // each)))
        owners = [owner(mosaic, i * each, (i + 1) * each) for i in some]
        letters: Line = [(UNOWNED if g is None else LETTERS[g % len(LETTERS)], g) for g in owners]
        lines.append([(f"{low * each:>{gutter - 2}}  ", None), *letters])
        if marked:
            marks = "".join(START if i in starts else " " for i in some).rstrip()
            lines += [[(" " * gutter + marks, None)]] if marks else []
    return lines


def repeats(mosaic: Mosaic) -> str:
    """What to say of letters that stand for several groups each, if they do."""
    many = len(mosaic.sizes) > len(LETTERS)
    return f"; {LETTERS[0]}-{LETTERS[-1]} repeat every {len(LETTERS)} groups" if many else ""


def owner(mosaic: Mosaic, low: int, high: int) -> int | None:
    """The local group with most of the rows [low, high), or None if most are unowned."""
    ends, high = mosaic.ends, min(high, mosaic.m)
    have: dict[int | None, int] = {}
    at = low
    while at < high:
        group = bisect.bisect_right(ends, at)
        end = min(ends[group], high) if group < len(ends) else high
        local = group if group in mosaic.local else None
        have[local] = have.get(local, 0) + end - at
        at = end
    return max(have, key=have.__getitem__)


def remarks(mosaic: Mosaic, width: int) -> list[Line]:
    """Lines on unowned rows and on empty groups, where there are any."""
    lines: list[Line] = []
    if mosaic.unowned:
        lines += paragraph("unowned", f"{counted(mosaic.unowned, 'row')}, marked {UNOWNED}", width)
    if mosaic.empty:
        lines += paragraph("empty", _listing(mosaic.empty), width)
    return lines


def _listing(groups: tuple[int, ...]) -> str:
    named = ", ".join(map(str, groups[:LISTED]))
    return f"group {named}" if len(groups) == 1 else f"groups {named}" + (", …" if len(groups) > LISTED else "")


# ---------------------------------------------------------------------------------------------------------------------
# Sizes


def sizes(mosaic: Mosaic, width: int) -> list[Line]:
    """A bar for the size of each local group, or for each range of sizes when there are many groups."""
    if not mosaic.local:
        return []
    if len(mosaic.local) <= BARS:
        bars: list[tuple[str, int, int | None]] = [(str(g), mosaic.sizes[g], g) for g in mosaic.local]
    else:
        bars = [(name, count, None) for name, count in _histogram([mosaic.sizes[g] for g in mosaic.local])]
    wide = max(len(name) for name, _, _ in bars)
    room = max(min(width - GUTTER - wide - 14, 48), 8)
    most = max(max(count for _, count, _ in bars), 1)
    lines: list[Line] = []
    for i, (name, count, group) in enumerate(bars):
        bar = BAR * max(round(count / most * room), 1 if count else 0)
        lead = f"{'sizes' if i == 0 else '':<{GUTTER}}{name:>{wide}}  "
        tail = f" {count}" if group is not None else f" {counted(count, 'group')}"
        lines.append([(lead, None), (bar, group), (tail if bar else tail[1:], None)])
    return lines


def _histogram(sizes: list[int]) -> list[tuple[str, int]]:
    """The number of groups that have a size in each range; ranges double, from the smallest size to the largest."""
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
