"""The picture of a grouped GEMM as SVG: lhs, rhs and the result side by side, each group in its colour.

One scale holds for all three tensors. A dimension that would be a sliver beside the others is stretched, as a whole and
wherever it occurs, so that sizes of one dimension can always be compared.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from trencadis.viz.elements import FAINT, LINE, MARGIN, PAPER, UNOWNED, WIDTH, dashed, label, num, page, text
from trencadis.viz.palette import colour
from trencadis.viz.panel import Kind, Panel
from trencadis.viz.product_text import product_facts

if TYPE_CHECKING:
    from trencadis.viz.product import Product

TOP, TALLEST, LARGEST = 172.0, 340.0, 40.0  # where tensors start, how tall they may be, pixels of an entry
SIGN = 84.0  # between two tensors
WORDS = 220.0  # the width that words above a tensor may ask for
SLENDER = 6.0  # no dimension is drawn shorter than the longest by more than that
SMALLEST = 12.0  # the side of a matrix without entries
FEW = 8  # groups that have an equation each, and are best seen below each other
COLUMNS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)  # of matrices in one tensor
Rectangle = tuple[float, float, float, float]  # x, y, width, height


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """The size of an entry, and the arrangement of separate matrices: in columns, at one height in all tensors."""

    product: Product
    stretch: dict[str, float]  # by the role of a dimension
    per: int  # matrices of a column
    gap: float
    scale: float = 1.0

    def size(self, panel: Panel, group: int) -> tuple[float, float]:
        """The width and the height of a group in pixels."""
        box = panel.box(group)
        return box.columns * self.unit(panel.across), box.rows * self.unit(panel.down)

    def unit(self, role: str) -> float:
        return self.scale * self.stretch[role]

    def widths(self, panel: Panel) -> list[float]:
        """The widths of the columns of a tensor; a tensor in one piece is one column."""
        if not panel.separate:
            return [panel.extent[1] * self.unit(panel.across)]
        each = [self.size(panel, group)[0] for group in panel.local]
        return [max(each[i : i + self.per]) for i in range(0, len(each), self.per)]

    def heights(self) -> list[float]:
        """The heights of the lines of matrices, which are the same in all tensors."""
        apart = [panel for panel in self.product.panels if panel.separate]
        each = [max((self.size(panel, group)[1] for panel in apart), default=0.0) for group in self.product.local]
        return [max(each[i :: self.per]) for i in range(min(self.per, len(each)))]

    def height(self, panel: Panel) -> float:
        if not panel.separate:
            return panel.extent[0] * self.unit(panel.down)
        return _spaced(self.heights(), self.gap)

    def width(self, panel: Panel) -> float:
        return _spaced(self.widths(panel), self.gap)

    def slot(self, panel: Panel) -> float:
        """The width that a tensor takes on the page, with the words above it."""
        return max(self.width(panel), min(7.5 * len(panel.title), WORDS), SMALLEST)

    def fitted(self) -> _Plan:
        """The same plan at the largest scale at which all of it lies on the page."""
        lines = self.heights()
        tall = [(self.height(panel), 0.0) for panel in self.product.panels if not panel.separate]
        tall += [(sum(lines), _spaced(lines, self.gap) - sum(lines))] if len(tall) < 3 else []
        scale = min([LARGEST, *((TALLEST - between) / length for length, between in tall if length)])
        room = WIDTH - 2 * MARGIN - 2 * SIGN - 44
        plan = dataclasses.replace(self, scale=scale)
        while (over := sum(map(plan.slot, self.product.panels)) - room) > 1 and plan.scale > 0:
            elastic = sum(sum(plan.widths(p)) for p in self.product.panels if plan.width(p) >= plan.slot(p))
            # where words and gaps alone are too wide, there is no such scale
            plan = dataclasses.replace(plan, scale=plan.scale * (1 - over / elastic) if over < elastic else 0.0)
        return plan


def _spaced(lengths: list[float], gap: float) -> float:
    return sum(lengths) + gap * max(len(lengths) - 1, 0)


def draw(product: Product) -> str:
    """The SVG document of a product."""
    plan = _arranged(product)
    tall = max(max(plan.height(panel) for panel in product.panels), 24.0)
    slots = [plan.slot(panel) for panel in product.panels]
    x = (WIDTH - sum(slots) - 2 * SIGN) / 2
    parts = [
        text(MARGIN, 46, _title(product), 23, weight=600),
        text(MARGIN, 73, "  ·  ".join(product_facts(product)[1:]), 15, faint=True),
    ]
    for panel, slot, sign in zip(product.panels, slots, ("×", "=", ""), strict=True):
        parts += [text(x, 116, panel.name, 16, weight=600), text(x, 136, panel.title, 13, faint=True)]
        parts += _tensor(plan, panel, x, TOP + (tall - plan.height(panel)) / 2)
        if sign:
            parts.append(text(x + slot + SIGN / 2 - 6, TOP + tall / 2 + 9, sign, 28, anchor="middle", faint=True))
        x += slot + SIGN
    key, bottom = _key(plan, TOP + tall + 30)
    equations, bottom = _equations(product, bottom + 28)
    return page(_title(product), bottom + MARGIN * 0.75, [*parts, *key, *equations])


def _title(product: Product) -> str:
    left, right, result = (panel.kind.value for panel in product.panels)
    return f"{product_facts(product)[0]}: {left} × {right} = {result}"


def _arranged(product: Product) -> _Plan:
    """The arrangement with the fewest columns in which entries are not much smaller than they could be."""
    longest = {role: 1 for panel in product.panels for role in (panel.down, panel.across)}
    for panel in product.panels:
        sizes = [(box.rows, box.columns) for box in map(panel.box, panel.local)] if panel.separate else [panel.extent]
        for rows, columns in sizes:
            for role, length in ((panel.down, rows), (panel.across, columns)):
                longest[role] = max(longest[role], length)
    stretch = {role: max(1.0, max(longest.values()) / SLENDER / length) for role, length in longest.items()}
    groups = max(len(product.local), 1)
    gap = 12.0 if groups <= FEW else 5.0 if groups <= 64 else 1.5
    lines = [-(-groups // columns) for columns in COLUMNS if columns <= groups]
    gaps = [min(gap, 0.3 * TALLEST / each) for each in lines]  # they never take all the room
    plans = [_Plan(product=product, stretch=stretch, per=p, gap=g).fitted() for p, g in zip(lines, gaps, strict=True)]
    best = max(plan.scale for plan in plans)
    return next(plan for plan in plans if plan.scale >= (0.6 if groups <= FEW else 1.0) * best)


# ---------------------------------------------------------------------------------------------------------------------
# Tensors


def _tensor(plan: _Plan, panel: Panel, x: float, y: float) -> Iterator[str]:
    """A tensor: its unowned parts, then its groups, and a line along the axes that are summed over."""
    across, down = plan.unit(panel.across), plan.unit(panel.down)
    whole = (x, y, panel.extent[1] * across, panel.extent[0] * down)
    if not panel.separate:
        for start, stop in panel.unowned():
            yield _hatched(panel, whole, start, stop)
    places = _matrices(plan, panel, x, y) if panel.separate else _bands(plan, panel, x, y)
    after = -12.0  # where the last number of an empty group was written
    for group, (left, top, width, height) in zip(panel.local, places, strict=True):
        tip = f"group {group}: {panel.where(group)}, {list(panel.shape_of(group))}"
        if plan.product.work_of(group):
            yield _filled(group, (left, top, width, height), tip)
        elif (width and height) or panel.separate:
            yield from _hollow(group, (left, top, max(width, SMALLEST), max(height, SMALLEST)))
        else:
            at = top if panel.kind is Kind.ROWS else left
            yield from _nothing(group, panel, (left, top, width, height), written=at - after >= 12)
            after = at if at - after >= 12 else after
    for place in _marked(panel, whole, places):
        yield from _summed(panel, place)


def _marked(panel: Panel, whole: Rectangle, places: list[Rectangle]) -> list[Rectangle]:
    """The rectangles marked as summed over: the first matrix, every band where sums end with a group, or the whole."""
    seen = [place for place in places if min(place[2:]) >= 8]
    if panel.separate:
        return seen[:1]
    ends = panel.down if panel.kind is Kind.ROWS else panel.across
    return seen if ends == "k" else [whole]


def _bands(plan: _Plan, panel: Panel, x: float, y: float) -> list[Rectangle]:
    across, down = plan.unit(panel.across), plan.unit(panel.down)
    boxes = map(panel.box, panel.local)
    return [(x + b.column * across, y + b.row * down, b.columns * across, b.rows * down) for b in boxes]


def _matrices(plan: _Plan, panel: Panel, x: float, y: float) -> list[Rectangle]:
    """The places of matrices in columns, each in the middle of its line, so that those of a group lie side by side."""
    lefts = list(itertools.accumulate((width + plan.gap for width in plan.widths(panel)), initial=x))
    heights = plan.heights()
    tops = list(itertools.accumulate((height + plan.gap for height in heights), initial=y))
    places = []
    for i, group in enumerate(panel.local):
        column, line = divmod(i, plan.per)
        width, height = plan.size(panel, group)
        places.append((lefts[column], tops[line] + (heights[line] - height) / 2, width, height))
    return places


def _filled(group: int, place: Rectangle, tip: str) -> str:
    fine = min(place[2], place[3]) < 4
    edge = "" if fine else f' class="edge" stroke="{PAPER}"'
    number = "".join(label(group, *place, 7.0))
    return f'<g class="group"><rect {_box(*place)} fill="{colour(group)}"{edge}><title>{tip}</title></rect>{number}</g>'


def _hollow(group: int, place: Rectangle) -> Iterator[str]:
    """The dashed outline of a matrix or a band that has nothing to be multiplied with."""
    yield dashed(*place)
    x, y, width, height = place
    size = min(height, 13.0)
    if size >= 7 and width >= 7 * len(str(group)):
        yield text(x + width / 2, y + height / 2 + size * 0.36, f"{group}", size, anchor="middle", faint=True)


def _nothing(group: int, panel: Panel, place: Rectangle, *, written: bool) -> Iterator[str]:
    """A dashed line where a band without rows or columns would be, and its number where there is room."""
    x, y, width, height = place
    path = (
        f"M{num(x)} {num(y)}h{num(width + 6)}" if panel.kind is Kind.ROWS else f"M{num(x)} {num(y)}v{num(height + 6)}"
    )
    yield f'<path class="empty line" d="{path}" stroke="{FAINT}" stroke-width="1.5" stroke-dasharray="3 2"/>'
    if written and panel.kind is Kind.ROWS:
        yield text(x + width + 9, y + 4, f"{group}", 12, faint=True)
    elif written:
        yield text(x, y + height + 17, f"{group}", 12, anchor="middle", faint=True)


def _hatched(panel: Panel, whole: Rectangle, start: int, stop: int) -> str:
    x, y, width, height = whole
    if panel.kind is Kind.ROWS:
        unit = height / panel.extent[0]
        place = x, y + start * unit, width, (stop - start) * unit
    else:
        unit = width / panel.extent[1]
        place = x + start * unit, y, (stop - start) * unit, height
    return f'<rect class="unowned" {_box(*place)} {UNOWNED}/>'


def _summed(panel: Panel, place: Rectangle) -> Iterator[str]:
    """A bracket and a Σ along each side that is summed over."""
    x, y, width, height = place
    look = f'fill="none" stroke="{FAINT}" stroke-width="1.5"'
    if panel.across == "k":
        yield f'<path class="summed line" d="M{num(x)} {num(y - 5)}v-4h{num(width)}v4" {look}/>'
        yield text(x + width / 2, y - 13, "Σ", 13, anchor="middle", faint=True)
    if panel.down == "k":
        yield f'<path class="summed line" d="M{num(x - 5)} {num(y)}h-4v{num(height)}h4" {look}/>'
        yield text(x - 13, y + height / 2 + 5, "Σ", 13, anchor="end", faint=True)


def _box(x: float, y: float, width: float, height: float) -> str:
    return f'x="{num(x)}" y="{num(y)}" width="{num(max(width, 0.5))}" height="{num(max(height, 0.5))}"'


# ---------------------------------------------------------------------------------------------------------------------
# Words


def _key(plan: _Plan, y: float) -> tuple[list[str], float]:
    """The legend of the signs that occur, and where it ends."""
    parts, x = [text(MARGIN, y + 12.5, "Σ  summed over", 13, faint=True)], MARGIN + 126
    if plan.product.empty:
        parts += [
            dashed(x, y, 28.0, 16.0),
            text(x + 36, y + 12.5, "an empty group: nothing to multiply", 13, faint=True),
        ]
        x += 290
    if max(plan.stretch.values()) > 1:
        parts.append(text(x, y + 12.5, "dimensions are drawn to different scales", 13, faint=True))
    return parts, y + 16


def _equations(product: Product, y: float) -> tuple[list[str], float]:
    """The equations of all groups, unless there are many, then the unowned parts; and where that ends."""
    parts = [f'<path class="line" d="M{MARGIN:g} {num(y - 10)}H{num(WIDTH - MARGIN)}" stroke="{LINE}"/>']
    some = product.local if len(product.local) <= FEW else range(0)
    wide = max((len(product.equation(group)) for group in some), default=0)
    for group in some:
        chip = MARGIN, y, 28.0, 16.0
        parts += [_filled(group, chip, f"group {group}")] if product.work_of(group) else _hollow(group, chip)
        parts.append(text(MARGIN + 40, y + 12.5, product.equation(group), 13))
        parts.append(text(MARGIN + 70 + 7.2 * wide, y + 12.5, product.shapes(group), 13, faint=True))
        y += 22
    places = [place for panel in product.panels for place in panel.unowned_places()]
    if places:
        parts.append(f'<rect class="key" {_box(MARGIN, y, 28, 16)} {UNOWNED}/>')
        parts.append(text(MARGIN + 40, y + 12.5, f"{', '.join(places)}: unowned", 13))
        y += 22
    return (parts, y - 4) if len(parts) > 1 else ([], y - 28)
