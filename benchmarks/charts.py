"""Charts as SVG in the style of the library's pictures: the same page, words and palette, light and dark.

A dot chart has a line for each case and a panel for each kind of data; a curve chart has times against a size.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence

from trencadis.viz.elements import FAINT, LINE, MARGIN, WIDTH, num, page, text
from trencadis.viz.palette import colour

TITLE_Y, ABOUT_Y = 46.0, 73.0
PANEL_GAP = 22.0


# ---------------------------------------------------------------------------------------------------------------------
# Marks


@dataclasses.dataclass(frozen=True)
class Look:
    """The colour of a contender, and its shape, which tells it from others without colour."""

    colour: str
    shape: str  # "disc", "ring", "square", "diamond", "up" or "down"


LOOKS = {
    "ours": Look(colour(0), "disc"),
    "numpy": Look(colour(1), "square"),
    "dense": Look(colour(3), "diamond"),
    "ragged_dot": Look(colour(4), "up"),
    "megablox": Look(colour(2), "down"),
    "tokamax": Look(colour(6), "square"),
    "torch": Look(colour(4), "up"),
    "mgpu8": Look(colour(2), "down"),
    "mgpu4": Look(colour(9), "down"),
}
OTHER = Look(FAINT, "ring")
CORNERS = {  # in units of the size of a mark
    "square": ((-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)),
    "diamond": ((0, -1.2), (1.2, 0), (0, 1.2), (-1.2, 0)),
    "up": ((0, -1.1), (1.1, 0.85), (-1.1, 0.85)),
    "down": ((0, 1.1), (1.1, -0.85), (-1.1, -0.85)),
}


@dataclasses.dataclass(frozen=True)
class Mark:
    """A figure of a line: where it lies on the axis, how it looks, and what is said when it is pointed at."""

    value: float
    look: Look
    tip: str


def draw_mark(look: Look, x: float, y: float, tip: str = "", size: float = 4.6) -> str:
    """The SVG element of a mark."""
    words = f"<title>{tip}</title>" if tip else ""
    if look.shape in CORNERS:
        points = " ".join(f"{num(x + size * dx)},{num(y + size * dy)}" for dx, dy in CORNERS[look.shape])
        return f'<polygon points="{points}" fill="{look.colour}">{words}</polygon>'
    ring = look.shape == "ring"
    fill = f'fill="none" stroke="{look.colour}" stroke-width="2.2"' if ring else f'fill="{look.colour}"'
    return f'<circle cx="{num(x)}" cy="{num(y)}" r="{num(size - 0.8 * ring)}" {fill}>{words}</circle>'


def key(entries: Mapping[str, Look], y: float) -> Iterator[str]:
    """The legend, in one line at the right of the page."""
    x = WIDTH - MARGIN - sum(_room(name) for name in entries)
    for name, look in entries.items():
        yield draw_mark(look, x + 5, y - 4.5)
        yield text(x + 16, y, name, 13, faint=True)
        x += _room(name)


def _room(name: str) -> float:
    return 36 + 7 * len(name)


# ---------------------------------------------------------------------------------------------------------------------
# Axes


@dataclasses.dataclass(frozen=True)
class Axis:
    """A range of values with ticks; logarithmic, or linear from its lower end."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = True

    def share(self, value: float) -> float:
        """Where a value lies between the ends, from 0 to 1; what is outside lies at an end."""
        value = min(max(value, self.low), self.high)
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def log_axis(values: Iterable[float], unit: str = "") -> Axis:
    """A logarithmic axis around the values, with ticks at 1, 2 and 5, or at powers of ten where the range is wide."""
    found = list(values)
    low, high = min(found) / 1.15, max(found) * 1.15
    leads = (1, 2, 5) if high / low < 300 else (1,)
    tens = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [lead * 10.0**ten for ten in tens for lead in leads]
    inside = tuple((tick, f"{tick:,g}{unit}") for tick in ticks if low <= tick <= high)
    return Axis(low, high, inside)


def linear_axis(values: Iterable[float], step: float) -> Axis:
    """A linear axis from 0, with a tick at each step."""
    high = math.ceil(max(values) / step) * step
    count = round(high / step)
    return Axis(0.0, high, tuple((i * step, f"{i * step:,g}") for i in range(count + 1)), log=False)


def _anchor(share: float) -> str:
    """Which part of the words of a tick lies at the tick: words at the ends of an axis stay inside."""
    return "" if share < 0.04 else "end" if share > 0.96 else "middle"


# ---------------------------------------------------------------------------------------------------------------------
# Dots


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a dot chart: a heading that it may share with others, its name, and its marks in each panel."""

    heading: str
    name: str
    marks: Mapping[str, Sequence[Mark]]
    note: str = ""  # a figure behind the name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dots:
    """A dot chart: lines down, panels across, figures along an axis that all panels share."""

    title: str
    about: str
    panels: Mapping[str, str]  # names, and what is said below them
    lines: Sequence[Line]
    axis: Axis
    key: Mapping[str, Look]
    columns: tuple[float, float, float] = (156.0, 322.0, 356.0)  # where names begin, notes end, and panels begin
    heads: tuple[str, str, str] = ("", "", "")  # of the headings, the names and the notes
    reference: float | None = None  # a value with a stronger line
    joined: bool = False  # marks of a line are joined

    def draw(self) -> str:
        """The SVG document."""
        top = 176.0 if any(self.panels.values()) else 144.0
        step, gap = 19.0, 9.0
        left, count = self.columns[2], len(self.panels)
        pitch = (WIDTH - MARGIN - left + PANEL_GAP) / count
        spots = {name: (left + i * pitch, pitch - PANEL_GAP) for i, name in enumerate(self.panels)}
        placed, y = [], top - step - gap
        for _, alike in itertools.groupby(self.lines, key=lambda line: line.heading):
            y += gap
            for i, line in enumerate(alike):
                y += step
                placed.append((line, y, i == 0))
        foot = y + step * 0.8
        parts = [text(MARGIN, TITLE_Y, self.title, 23, weight=600), text(MARGIN, ABOUT_Y, self.about, 15, faint=True)]
        parts += [*key(self.key, TITLE_Y), *self._heads(top - 26)]
        for name, spot in spots.items():
            parts += self._panel(name, spot, top - 15, foot)
        for line, at, first in placed:
            parts += self._line(line, at, first, spots)
        return page(self.title, foot + 34, parts)

    def _heads(self, y: float) -> Iterator[str]:
        names, notes, _ = self.columns
        for x, words, anchor in zip((MARGIN, names, notes), self.heads, ("", "", "end"), strict=True):
            if words:
                yield text(x, y, words, 12, anchor=anchor, faint=True)

    def _panel(self, name: str, spot: tuple[float, float], top: float, foot: float) -> Iterator[str]:
        left, width = spot
        yield text(left, 108, name, 14, weight=600)
        for i, line in enumerate(textwrap.wrap(self.panels[name], 34)):
            yield text(left, 125 + 14 * i, line, 11.5, faint=True)
        for tick, words in self.axis.ticks[:: self._every(width)]:
            x, strong = left + width * self.axis.share(tick), tick == self.reference
            yield (
                f'<path class="line" d="M{num(x)} {num(top)}V{num(foot)}" stroke="{LINE}" '
                f'stroke-width="{2 if strong else 1}" opacity="{1 if strong else 0.45}"/>'
            )
            yield text(x, foot + 16, words, 11.5, anchor=_anchor(self.axis.share(tick)), faint=True)

    def _every(self, width: float) -> int:
        """How many ticks to go on by, so that their words have room."""
        return -(-sum(9 * len(words) for _, words in self.axis.ticks) // int(width)) if self.axis.ticks else 1

    def _line(self, line: Line, y: float, first: bool, spots: Mapping[str, tuple[float, float]]) -> Iterator[str]:
        if first:
            yield text(MARGIN, y + 4, line.heading, 13, weight=600)
        yield text(self.columns[0], y + 4, line.name, 12.5)
        if line.note:
            yield text(self.columns[1], y + 4, line.note, 12.5, anchor="end", faint=True)
        for name, (left, width) in spots.items():
            marks = [(left + width * self.axis.share(mark.value), mark) for mark in line.marks.get(name, ())]
            ends = sorted(x for x, _ in marks)
            if self.joined and ends and ends[-1] - ends[0] > 10:
                path = f"M{num(ends[0] + 5)} {num(y)}H{num(ends[-1] - 5)}"
                yield f'<path class="line" d="{path}" stroke="{LINE}" stroke-width="1.5"/>'
            yield from (draw_mark(mark.look, x, y, mark.tip) for x, mark in marks)


# ---------------------------------------------------------------------------------------------------------------------
# Curves


@dataclasses.dataclass(frozen=True)
class Point:
    """A point of a curve, with the quartiles around it where they are known."""

    x: float
    y: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Panel:
    """Curves by contender over one axis."""

    title: str
    across: str  # what x is
    curves: Mapping[str, Sequence[Point]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curves:
    """Rows of panels with curves, both axes logarithmic; the y axis is shared."""

    title: str
    about: str
    rows: Sequence[Sequence[Panel]]
    unit: str
    key: Mapping[str, Look]

    def draw(self) -> str:
        """The SVG document."""
        height, gap, left = 190.0, 66.0, 74.0
        across = max(len(row) for row in self.rows)
        pitch = (WIDTH - MARGIN - left + PANEL_GAP) / across
        parts = [text(MARGIN, TITLE_Y, self.title, 23, weight=600), text(MARGIN, ABOUT_Y, self.about, 15, faint=True)]
        parts += key(self.key, TITLE_Y)
        y = 128.0
        for row in self.rows:
            values = [v for panel in row for curve in panel.curves.values() for p in curve for v in (p.low, p.high)]
            axis = log_axis(values)
            for i, panel in enumerate(row):
                parts += self._panel(panel, axis, (left + i * pitch, y, pitch - PANEL_GAP, height), first=i == 0)
            y += height + gap
        return page(self.title, y - gap + 46, parts)

    def _panel(self, panel: Panel, axis: Axis, box: tuple[float, float, float, float], *, first: bool) -> Iterator[str]:
        left, top, width, height = box
        foot = top + height
        yield text(left, top - 10, panel.title, 14, weight=600)
        sizes = sorted({point.x for curve in panel.curves.values() for point in curve})
        across = Axis(sizes[0], sizes[-1], tuple((size, f"{size:,g}") for size in sizes))
        for tick, words in axis.ticks:
            y = foot - height * axis.share(tick)
            yield f'<path class="line" d="M{num(left)} {num(y)}h{num(width)}" stroke="{LINE}" opacity="0.45"/>'
            if first:
                yield text(left - 8, y + 4, f"{words} {self.unit}", 11.5, anchor="end", faint=True)
        for i, (tick, words) in enumerate(across.ticks):
            if i % (1 + len(across.ticks) // 5) == 0:
                share = across.share(tick)
                yield text(left + width * share, foot + 16, words, 11.5, anchor=_anchor(share), faint=True)
        yield text(left + width / 2, foot + 33, panel.across, 11.5, anchor="middle", faint=True)
        for name, curve in panel.curves.items():
            look = LOOKS.get(name, OTHER)
            xs = [left + width * across.share(point.x) for point in curve]
            ys, lows, highs = (
                [foot - height * axis.share(value) for value in values]
                for values in zip(*((p.y, p.low, p.high) for p in curve), strict=True)
            )
            band = _path([*zip(xs, highs, strict=True), *zip(xs[::-1], lows[::-1], strict=True)])
            yield f'<path d="{band}Z" fill="{look.colour}" opacity="0.18"/>'
            yield f'<path d="{_path(zip(xs, ys, strict=True))}" fill="none" stroke="{look.colour}" stroke-width="1.8"/>'
            for x, y, point in zip(xs, ys, curve, strict=True):
                tip = f"{name}, {panel.across} {point.x:,g}: {point.y:.3g} {self.unit}"
                yield draw_mark(look, x, y, tip, size=3.6)


def _path(points: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{num(x)} {num(y)}" for x, y in points)
