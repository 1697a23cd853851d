"""The picture of a grouped GEMM as text: a character for each entry where that fits, and an equation per group."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from trencadis.viz.panel import Panel
from trencadis.viz.terminal import LETTERS, UNOWNED, Line, paragraph

if TYPE_CHECKING:
    from trencadis.viz.product import Product

TALL = 32  # lines that entries may take
EQUATIONS = 12  # groups that have an equation each
NOTHING = "∅"
GUTTER = 9  # columns before a line's content


def layout(product: Product, width: int) -> list[Line]:
    """The lines of a product for a terminal of that width."""
    width = min(max(width, 40), 120)
    places = [place for panel in product.panels for place in panel.unowned_places()]
    entries = _entries(product, width)
    lines = entries + _equations(product, width)
    if not entries:
        lines += paragraph("picture", "too large for text: .save('gemm.svg'), or --svg gemm.svg", width, GUTTER)
    if places:
        marked = entries and any(panel.unowned() for panel in product.panels if not panel.separate)
        lines += paragraph("unowned", ", ".join(places) + (f", marked {UNOWNED}" if marked else ""), width, GUTTER)
    lines += paragraph("total", ", ".join(product_facts(product)), width, GUTTER)
    return [_trimmed(line) for line in lines]


def _trimmed(line: Line) -> Line:
    """The line without blanks at its end."""
    while line and not line[-1][0].strip():
        line = line[:-1]
    return [*line[:-1], (line[-1][0].rstrip(), line[-1][1])] if line else []


def product_facts(product: Product) -> list[str]:
    """The numbers of groups, of empty groups and of multiply-adds, in words."""
    facts = [f"{len(product.local):,} group{'' if len(product.local) == 1 else 's'}"]
    if len(product.local) != product.groups:
        facts[0] += f" of {product.groups:,}"
    if product.empty:
        facts.append(f"{len(product.empty):,} empty")
    return [*facts, f"{product.work:,} multiply-adds"]


def _equations(product: Product, width: int) -> list[Line]:
    """An equation for each group, in indexing expressions and, if there is room, in shapes."""
    some = product.local if len(product.local) <= EQUATIONS else product.local[: EQUATIONS - 1]
    gutter = max(GUTTER, len(f"group {some[-1]} ") if some else 0)
    rows = [
        (product.equation(group), product.shapes(group), "" if product.work_of(group) else "empty") for group in some
    ]
    wide = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
    shapes = gutter + sum(wide) + 6 <= width
    lines: list[Line] = []
    for group, (place, shape, empty) in zip(some, rows, strict=True):
        words = f"{place:<{wide[0]}}   " + (f"{shape:<{wide[1]}}   " if shapes else "") + empty
        lead = f"group {group}"
        lines.append([(lead, group), (" " * (gutter - len(lead)) + words, None)])
    if len(some) < len(product.local):
        lines.append([(f"{'':<{gutter}}and {len(product.local) - len(some):,} more", None)])
    return lines


# ---------------------------------------------------------------------------------------------------------------------
# Entries


def _entries(product: Product, width: int) -> list[Line]:
    """The three tensors side by side, with a character for each entry; [] if that does not fit."""
    separate = [panel for panel in product.panels if panel.separate]
    tall = [max((panel.box(group).rows for panel in separate), default=0) or 1 for group in product.local]
    rows = [panel.extent[0] for panel in product.panels if not panel.separate]
    wide = [max(len(panel.name), len(panel.title), _columns(panel)) for panel in product.panels]
    if max([*rows, sum(tall) + len(tall) - 1 if separate else 0]) > TALL or sum(wide) + 10 > width:
        return []
    heads = [[[(panel.name, None)], [(panel.title, None)]] for panel in product.panels]
    blocks = [h + (_matrices(p, tall) if p.separate else _bands(p)) for h, p in zip(heads, product.panels, strict=True)]
    lines: list[Line] = []
    for i, parts in enumerate(itertools.zip_longest(*blocks, fillvalue=[])):
        signs = ("  ·  ", "  =  ", "") if i == 0 else ("     ", "     ", "")
        lines.append([])
        for part, room, sign in zip(parts, wide, signs, strict=True):
            lines[-1] += [*part, (" " * (room - sum(len(piece) for piece, _ in part)) + sign, None)]
    return [*lines, []]


def _columns(panel: Panel) -> int:
    """The width of a panel in characters."""
    return max((panel.box(group).columns for group in panel.local), default=0) if panel.separate else panel.extent[1]


def _bands(panel: Panel) -> list[Line]:
    """The lines of an array that holds all groups as bands."""
    owner: list[list[int | None]] = [[None] * panel.extent[1] for _ in range(panel.extent[0])]
    for group in panel.local:
        row, column, rows, columns = panel.box(group)
        for line in owner[row : row + rows]:
            line[column : column + columns] = [group] * columns
    return [_runs(line) for line in owner]


def _runs(owner: list[int | None]) -> Line:
    """A line in which neighbouring entries of one group are one piece."""
    pieces = ((group, len(list(run))) for group, run in itertools.groupby(owner))
    return [((UNOWNED if g is None else LETTERS[g % len(LETTERS)]) * length, g) for g, length in pieces]


def _matrices(panel: Panel, tall: list[int]) -> list[Line]:
    """The lines of separate matrices, one below the other, each as tall as in the other panels."""
    lines: list[Line] = []
    for group, room in zip(panel.local, tall, strict=True):
        box = panel.box(group)
        matrix = [_runs([group] * box.columns) for _ in range(box.rows) if box.columns] or [[(NOTHING, None)]]
        lines += [*matrix, *([] for _ in range(room - len(matrix) + 1))]
    return lines[:-1]
