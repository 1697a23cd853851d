"""A fixed raster as text: every row of a small one, one character for many rows of a large one."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from trencadis.viz.mosaic_text import owner, remarks, repeats, row_lines, sizes, totals
from trencadis.viz.terminal import GUTTER, LETTERS, UNOWNED, Line, counted, paragraph

if TYPE_CHECKING:
    from trencadis.viz.raster import Raster


def layout(raster: Raster, width: int) -> list[Line]:
    """The lines of a raster for a terminal of that width."""
    width = min(max(width, 40), 120)
    lines = _each_row(raster, width) or _large(raster, width)
    tiles = f"{counted(raster.tiles, 'tile')} of {counted(raster.tile, 'row')}"
    lines += totals(raster, [counted(raster.visits, "visit"), tiles], width)
    return lines + paragraph("drawn", raster.note, width)


def _each_row(raster: Raster, width: int) -> list[Line]:
    """Rows, groups and visits in full; [] if that does not fit."""
    lines = row_lines(raster, set(range(0, raster.m, raster.tile)), width)
    pairs = " ".join(f"({group},{tile})" for group, tile in raster.pairs) or "none"
    return lines and [*lines, *paragraph("visits", pairs, width)]


def _large(raster: Raster, width: int) -> list[Line]:
    lines: list[Line] = []
    if raster.m:
        lines += _bands(raster, width - max(GUTTER, len(str(raster.m)) + 2))
    shared = raster.shared
    if shared:
        most = max(range(raster.tiles), key=raster.visits_per_tile.__getitem__)
        lines += paragraph("shared", f"{len(shared)} of {counted(raster.tiles, 'tile')}, most by "
                            f"{raster.visits_per_tile[most]} groups (tile {most})", width)  # fmt: skip
    return lines + remarks(raster, width) + sizes(raster, width)


def _resolution(raster: Raster, usable: int) -> tuple[int, int]:
    """The number of characters for each tile, or else of tiles for each character; the other is 1."""
    most = min(usable - 1, 4 * usable // raster.tiles - 1, raster.tile, 64)
    if most < 2:
        return 1, -(-raster.tiles // (16 * usable))
    even = max(c for c in range(1, most + 1) if raster.tile % c == 0)  # as many rows for each, unless too coarse
    return (even if 2 * even >= most else most), 1


def _bands(raster: Raster, usable: int) -> list[Line]:
    """Lines of tiles, and beneath each the number of groups that share a tile."""
    per_tile, per_char = _resolution(raster, usable)
    border = "│" if per_tile > 1 else ""
    step = per_char * raster.tile  # rows of a unit: what one border, or one character, encloses
    units = -(-raster.tiles // per_char)
    in_line = usable // (per_tile + len(border))
    if in_line > 8:
        in_line -= in_line % 8
    lines = paragraph("rows", _explain(raster, per_tile, per_char), usable + GUTTER)
    gutter = max(GUTTER, len(str(raster.m)) + 2)
    for low in range(0, units, in_line):
        line: Line = [(f"{low * step:>{gutter - 2}}  ", None)]
        marks = " " * gutter
        for unit in range(low, min(low + in_line, units)):
            cuts = [unit * step + i * step // per_tile for i in range(per_tile + 1)]
            owners = [owner(raster, a, b) for a, b in itertools.pairwise(cuts) if a < raster.m]
            line += [(UNOWNED if g is None else LETTERS[g % len(LETTERS)], g) for g in owners]
            line.append((border, None))
            most = max(raster.visits_per_tile[unit * per_char : (unit + 1) * per_char])
            marks += f"{_mark(most):<{per_tile + len(border)}}"
        lines.append(line)
        if marks.strip():
            lines.append([(marks.rstrip(), None)])
    return lines


def _mark(visits: int) -> str:
    return "" if visits < 2 else str(visits) if visits < 10 else "+"


def _explain(raster: Raster, per_tile: int, per_char: int) -> str:
    """The words that say what a character stands for."""
    if per_tile > 1:
        about = "" if raster.tile % per_tile == 0 else "about "
        each = f"a character is {about}{counted(round(raster.tile / per_tile), 'row')}, │ ends a tile"
    else:
        each = f"a character is {counted(per_char, 'tile') if per_char > 1 else 'a tile'}, by the group with most of it"
    marks = "; below: groups that share it" if raster.shared else ""
    return each + marks + repeats(raster)
