"""The tiles of a backend as a picture, written as SVG text with nothing but the standard library.

Tiles lie in reading order, each as wide as it has rows. The rows of its group are in the colour of the group; rows that
are computed and not kept are pale; rows that no local group owns are hatched. Below stand the sizes, as a legend.
"""

from __future__ import annotations

import dataclasses
import html
import itertools
import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from trencadis.viz.elements import (
    FAINT,
    LINE,
    MARGIN,
    UNOWNED,
    WIDTH,
    count,
    label,
    num,
    page,
    quad,
    shape,
    text,
    visible,
)
from trencadis.viz.palette import colour

if TYPE_CHECKING:
    from trencadis.viz.mosaic import Mosaic, Tile

SHAPES = ((64, 8, 60.0), (400, 16, 33.0), (800, 32, 24.0), (2560, 64, 16.0))  # up to so many tiles: in a line, height
FINEST = (128, 11.0)
ONE_LINE = 12  # tiles that fit in one line
WIDEST = 64.0  # pixels of a row
TOP = 118.0
TOOLTIPS = 4096  # tiles; more than that and the file is better small
BARS_TOP, BARS_HEIGHT = 34.0, 84.0
LEAST = 7.0  # size of letters
PALE = 'fill-opacity="0.3"'


class _Piece(NamedTuple):
    """A tile, or a stretch of unowned rows."""

    start: int  # its first row
    rows: int
    tile: Tile | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    """The pieces of one line of the picture, with their left edges and widths in pixels."""

    pieces: tuple[_Piece, ...]
    lefts: tuple[float, ...]
    widths: tuple[float, ...]
    top: float
    height: float


def draw(mosaic: Mosaic) -> str:
    """The SVG document of a mosaic."""
    lines, bottom = _lay(mosaic)
    name = title(mosaic, count(len(mosaic.cells), "tile"))
    facts = [f"tiles of {mosaic.heights_range}"] if mosaic.cells else []
    parts = [*head(mosaic, name, facts, f"backend {mosaic.note}")]
    for line in lines:
        parts += [*_axis(line, len(lines) == 1), *_pieces(mosaic, line), *_labels(line)]
    legend, bottom = _key(mosaic, bottom)
    chart, bottom = bars(mosaic, bottom)
    return page(name, bottom + MARGIN * 0.75, [*parts, *legend, *chart])


# ---------------------------------------------------------------------------------------------------------------------
# Words above


def title(mosaic: Mosaic, tiles: str) -> str:
    """The first line of a picture, which ends with what its tiles are."""
    window = f", {mosaic.local_groups:,} of them local," if mosaic.local_groups != len(mosaic.sizes) else ""
    return f"{count(len(mosaic.sizes), 'group')}{window} over {count(mosaic.m, 'row')} in {tiles}"


def head(mosaic: Mosaic, title: str, facts: list[str], note: str) -> Iterator[str]:
    """The title of a picture, what there is to count, and a note on what was drawn."""
    yield text(MARGIN, 46, title, 23, weight=600)
    facts = [*facts, f"{count(mosaic.owned, 'row')} owned"]
    facts += [f"{mosaic.unowned:,} unowned"] if mosaic.unowned else []
    yield text(MARGIN, 73, "  ·  ".join([*facts, f"{mosaic.waste:.0%} waste"]), 15, faint=True)
    yield text(MARGIN, 94, html.escape(note, quote=False), 13, faint=True)


# ---------------------------------------------------------------------------------------------------------------------
# Tiles


def _lay(mosaic: Mosaic) -> tuple[list[_Line], float]:
    """The lines of tiles, and where the last of them ends."""
    pieces = _all_pieces(mosaic)
    if not pieces:
        return [], TOP - 22
    one = len(pieces) <= ONE_LINE
    in_line, height = (len(pieces), 104.0) if one else _shape(len(pieces))
    left = MARGIN if one else MARGIN + 14 + 7 * len(str(mosaic.m))
    total, tallest = sum(piece.rows for piece in pieces), max(piece.rows for piece in pieces if piece.tile or one)
    room = max(-(-total * in_line // len(pieces)), tallest)  # rows of a line
    scale = min((WIDTH - left - MARGIN) / room, WIDEST)
    top, gap = (TOP + 20, 0.0) if one else (TOP, max(2.0, height * 0.12))
    lines = []
    for i, some in enumerate(_wrapped(pieces, room)):
        widths = visible([piece.rows * scale for piece in some], 1.0)
        lefts = itertools.accumulate(widths[:-1], initial=left)
        lines.append(
            _Line(
                pieces=tuple(some),
                lefts=tuple(lefts),
                widths=tuple(widths),
                top=top + i * (height + gap),
                height=height,
            )
        )
    return lines, lines[-1].top + height + (26 if one else 8)


def _shape(pieces: int) -> tuple[int, float]:
    """How many pieces are in a line on average, and how tall the line is."""
    return next(((columns, height) for most, columns, height in SHAPES if pieces <= most), FINEST)


def _all_pieces(mosaic: Mosaic) -> list[_Piece]:
    """The tiles in order, with the unowned rows before the first local group and after the last."""
    pieces = [_Piece(tile.owned.start, len(tile.rows), tile) for tile in mosaic.cells]
    low = mosaic.ends[mosaic.first - 1] if mosaic.first else 0
    high = low + mosaic.owned
    before = [_Piece(0, low, None)] if low else []
    return [*before, *pieces, *([_Piece(high, mosaic.m - high, None)] if high < mosaic.m else [])]


def _wrapped(pieces: list[_Piece], room: int) -> list[list[_Piece]]:
    """The pieces in lines of at most that many rows; only unowned rows are cut to fill a line."""
    lines: list[list[_Piece]] = [[]]
    left = room
    for piece in pieces:
        while piece.tile is None and piece.rows > left:
            if left:
                lines[-1].append(_Piece(piece.start, left, None))
            piece = _Piece(piece.start + left, piece.rows - left, None)
            lines.append([])
            left = room
        if piece.rows > left:
            lines.append([])
            left = room
        lines[-1].append(piece)
        left -= piece.rows
    return [line for line in lines if line]


def _axis(line: _Line, only: bool) -> Iterator[str]:
    """The number of the first row: before a line, or, if there is but one line, below each piece that has room."""
    if not only:
        y = line.top + line.height / 2 + 4
        yield text(
            line.lefts[0] - 10, y, f"{line.pieces[0].start}", min(11, line.height * 0.9), anchor="end", faint=True
        )
        return
    for piece, x, wide in zip(line.pieces, line.lefts, line.widths, strict=True):
        if wide >= 7.5 * len(str(piece.start)):
            yield text(x, line.top + line.height + 17, f"{piece.start}", 12, faint=True)
        words = f"{piece.rows:,}" if wide < 60 else count(piece.rows, "row")
        if piece.tile and wide >= 7.5 * len(words):
            yield text(x + wide / 2, line.top - 9, words, 12, anchor="middle", faint=True)


def _pieces(mosaic: Mosaic, line: _Line) -> Iterator[str]:
    for piece, x, wide in zip(line.pieces, line.lefts, line.widths, strict=True):
        radius = min(0.1 * line.height, 0.2 * wide)
        box = x, line.top, max(wide - _joint(line, wide), 0.5), line.height
        if piece.tile is None:
            yield shape("unowned", quad(*box, radii=(radius, radius)), UNOWNED)
            continue
        tip = _tip(piece.tile) if len(mosaic.cells) <= TOOLTIPS else None
        yield from _tile(piece.tile, box, radius, tip)


def _joint(line: _Line, wide: float) -> float:
    """The width of the gap after a piece."""
    return min(3.0, 0.06 * line.height, 0.3 * wide)


def _tip(tile: Tile) -> str:
    group, rows, owned = tile
    return f"group {group}, rows {owned.start} to {owned.stop - 1}, computed {rows.start} to {rows.stop - 1}"


def _owned(tile: Tile, x: float, wide: float) -> tuple[float, float]:
    """The left edge and the width of a tile's owned rows, given those of the tile."""
    each = wide / len(tile.rows)
    return x + (tile.owned.start - tile.rows.start) * each, max(len(tile.owned) * each, 0.5)


def _tile(tile: Tile, box: tuple[float, float, float, float], radius: float, tip: str | None) -> Iterator[str]:
    """A tile: all its rows pale, and those of its group in full colour; only the latter if there are no others."""
    fill = f'fill="{colour(tile.group)}"'
    if len(tile.rows) > len(tile.owned):
        yield shape("wasted", quad(*box, radii=(radius, radius)), f"{fill} {PALE}")
    x, wide = _owned(tile, box[0], box[2])
    first, last = tile.owned.start == tile.rows.start, tile.owned.stop == tile.rows.stop
    radii = radius if first else 0.0, radius if last else 0.0
    yield shape("tile", quad(x, box[1], wide, box[3], radii=radii), fill, tip)


def _labels(line: _Line) -> Iterator[str]:
    """The number of a group on each of its tiles; or one for all its tiles of a line, if none has room alone."""
    runs = itertools.groupby(zip(line.pieces, line.lefts, line.widths, strict=True), key=lambda at: _group(at[0]))
    for group, run in runs:
        if group is None:
            continue
        places = [_owned(piece.tile, x, wide - _joint(line, wide)) for piece, x, wide in run if piece.tile]
        if max(wide for _, wide in places) < 3 + 0.6 * LEAST * len(str(group)):
            (first, _), (last, wide) = places[0], places[-1]
            places = [(first, last + wide - first)]
        for x, wide in places:
            yield from label(group, x, line.top, wide, line.height, LEAST)


def _group(piece: _Piece) -> int | None:
    return None if piece.tile is None else piece.tile.group


def _key(mosaic: Mosaic, top: float) -> tuple[list[str], float]:
    """What full, pale and hatched pieces are, as far as they occur; and where that ends."""
    pale = any(len(tile.rows) > len(tile.owned) for tile in mosaic.cells)
    occur = [
        (bool(mosaic.cells), f'fill="{FAINT}"', "a tile, as wide as it has rows"),
        (pale, f'fill="{FAINT}" {PALE}', "computed, and not of its group"),
        (mosaic.unowned > 0, UNOWNED, "rows of no local group"),
    ]
    parts, x, y = [], MARGIN, top + 10
    for present, look, words in occur:
        if present:
            parts += [shape("key", quad(x, y, 28.0, 16.0), look), text(x + 36, y + 12.5, words, 13, faint=True)]
            x += 36 + 6.4 * len(words) + 26
    return parts, y + 16 if parts else top


# ---------------------------------------------------------------------------------------------------------------------
# Sizes


def bars(mosaic: Mosaic, top: float) -> tuple[list[str], float]:
    """One bar for the size of each group, in its colour; and where they end."""
    groups = len(mosaic.sizes)
    if not groups:
        return [], top
    base = top + BARS_TOP + BARS_HEIGHT + 10
    pitch = min((WIDTH - 2 * MARGIN) / groups, 76.0)
    wide = pitch * (0.82 if pitch > 6 else 0.9 if pitch > 2 else 1.0)
    most = max(*mosaic.sizes, 1)
    power = 0.5 if most > 12 * statistics.median([size for size in mosaic.sizes if size] or [1]) else 1.0
    scale = "size of each group" + (" (heights by the square root)" if power < 1 else "")
    parts = [text(MARGIN, top + BARS_TOP - 2, scale, 13, faint=True)]
    values = pitch > 7.4 * len(str(most))  # room for the size above each bar
    for group, size in enumerate(mosaic.sizes):
        x, tall = MARGIN + group * pitch, (size / most) ** power * (BARS_HEIGHT - 12)
        if size:
            box = f'x="{num(x)}" y="{num(base - max(tall, 1))}" width="{num(wide)}" height="{num(max(tall, 1))}"'
            dim = "" if group in mosaic.local else ' opacity="0.25"'
            parts.append(f'<rect class="size" {box} fill="{colour(group)}"{dim}/>')
        if values:
            parts.append(text(x + wide / 2, base - tall - 5, f"{size}", 12, anchor="middle", faint=True))
    parts.append(f'<path class="line" d="M{MARGIN:g} {num(base + 0.5)}h{num(groups * pitch)}" stroke="{LINE}"/>')
    if not values:
        parts.append(text(WIDTH - MARGIN, top + BARS_TOP - 2, f"largest {most:,}", 13, anchor="end", faint=True))
    step = next(s for s in _steps() if s * pitch >= 8 * len(str(groups - 1)) + 10 or s >= groups)
    for group in range(0, groups, step):
        parts.append(text(MARGIN + group * pitch + wide / 2, base + 17, f"{group}", 12, anchor="middle"))
    if not mosaic.empty:
        return parts, base + 22
    named = ", ".join(map(str, mosaic.empty[:24])) + (", …" if len(mosaic.empty) > 24 else "")
    words = f"{len(mosaic.empty):,} of {mosaic.local_groups:,} empty: group {named}"
    return [*parts, text(MARGIN, base + 44, words, 13, faint=True)], base + 44


def _steps() -> Iterator[int]:
    for power in itertools.count():
        yield from (10**power, 2 * 10**power, 5 * 10**power)
