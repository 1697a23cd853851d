"""The errors of quantized operands as a picture: `python -m benchmarks.quantized_picture results/<file>.json`.

A line for each format and granularity, a panel for each kind of data; errors run to the right, on a log axis.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import pathlib
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.quantized_errors import percent
from trencadis.viz.elements import LINE, MARGIN, WIDTH, num, page, text
from trencadis.viz.palette import colour

PICTURE = pathlib.Path("docs/img/quantized-errors.svg")
TITLE = "How far off products of quantized operands are"
BOTH, WEIGHTS = colour(0), colour(1)
SCALES, BITS, PANELS = 156.0, 322.0, 356.0  # where columns of words begin, or end, and the first panel begins
TOP, STEP, GAP = 176.0, 19.0, 9.0  # of the first line; from a line to the next; more from a format to the next
LEAST, MOST = 0.001, 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class _Panel:
    """A log axis of its own."""

    left: float
    width: float

    def x(self, error: float) -> float:
        share = math.log(min(max(error, LEAST), MOST) / LEAST) / math.log(MOST / LEAST)
        return self.left + self.width * share


def draw(found: dict[str, Any]) -> str:
    """The SVG document."""
    names = list(found["data"])
    pitch = (WIDTH - MARGIN - PANELS + 22) / len(names)
    panels = {name: _Panel(PANELS + i * pitch, pitch - 22) for i, name in enumerate(names)}
    lines = list(_lines(found["rows"]))
    foot = lines[-1][1] + STEP * 0.8
    parts = [*_head(found), *_key()]
    for name, panel in panels.items():
        parts += [*_axis(panel, name, found["data"][name], foot)]
    for row, y, first in lines:
        parts += [*_words(row, y, first)]
        for name, panel in panels.items():
            parts += [*_marks(panel, row, name, y)]
    return page(TITLE, foot + 34, parts)


def _lines(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], float, bool]]:
    """The rows, where each of them lies, and whether it is the first of its format: formats are apart."""
    y = TOP - STEP - GAP
    for _, alike in itertools.groupby(rows, key=lambda row: row["format"]):
        y += GAP
        for i, row in enumerate(alike):
            y += STEP
            yield row, y, i == 0


def _head(found: dict[str, Any]) -> Iterator[str]:
    yield text(MARGIN, 46, TITLE, 23, weight=600)
    shape = found["shape"]
    about = f"error of a row of the result, in its norm, against float64  ·  k = {shape['k']:,}"
    yield text(MARGIN, 73, about, 15, faint=True)
    for x, words, anchor in ((MARGIN, "format", ""), (SCALES, "scales", ""), (BITS, "bits", "end")):
        yield text(x, TOP - 26, words, 12, anchor=anchor, faint=True)


def _key() -> Iterator[str]:
    """What a disc and a ring are."""
    for x, mark, words in ((WIDTH - 300, _disc, "both quantized"), (WIDTH - 164, _ring, "weights alone")):
        yield mark(x, 68.5, "")
        yield text(x + 11, 73, words, 13, faint=True)


def _axis(panel: _Panel, name: str, words: str, foot: float) -> Iterator[str]:
    yield text(panel.left, 108, name, 14, weight=600)
    for i, line in enumerate(textwrap.wrap(words, 34)):
        yield text(panel.left, 125 + 14 * i, line, 11.5, faint=True)
    top = TOP - 15
    for tick, anchor in ((0.001, ""), (0.01, "middle"), (0.1, "middle"), (1.0, "end")):
        x = num(panel.x(tick))
        yield f'<path class="line" d="M{x} {num(top)}V{num(foot)}" stroke="{LINE}" stroke-width="1" opacity="0.45"/>'
        yield text(panel.x(tick), foot + 16, f"{100 * tick:g} %", 11.5, anchor=anchor, faint=True)


def _words(row: dict[str, Any], y: float, first: bool) -> Iterator[str]:
    if first:
        yield text(MARGIN, y + 4, row["format"], 13, weight=600)
    yield text(SCALES, y + 4, row["scales"], 12.5)
    yield text(BITS, y + 4, f"{row['bits']:.2f}", 12.5, anchor="end", faint=True)


def _marks(panel: _Panel, row: dict[str, Any], name: str, y: float) -> Iterator[str]:
    """Both errors of a line, and what lies between them."""
    both, weights = (row[name][which] for which in ("both", "weights"))
    low, high = sorted((panel.x(both), panel.x(weights)))
    if high - low > 10:
        path = f"M{num(low + 5)} {num(y)}H{num(high - 5)}"
        yield f'<path class="line" d="{path}" stroke="{LINE}" stroke-width="1.5"/>'
    yield _disc(panel.x(both), y, f"{row['format']}, {row['scales']}: both quantized, {percent(both)} %")
    yield _ring(panel.x(weights), y, f"{row['format']}, {row['scales']}: weights alone, {percent(weights)} %")


def _disc(x: float, y: float, tip: str) -> str:
    return _circle(x, y, 4.6, f'fill="{BOTH}"', tip)


def _ring(x: float, y: float, tip: str) -> str:
    return _circle(x, y, 3.8, f'fill="none" stroke="{WEIGHTS}" stroke-width="2.2"', tip)


def _circle(x: float, y: float, radius: float, look: str, tip: str) -> str:
    inside = f"><title>{tip}</title></circle>" if tip else "/>"
    return f'<circle cx="{num(x)}" cy="{num(y)}" r="{num(radius)}" {look}{inside}'


def main(argv: Sequence[str] | None = None) -> None:
    """Draw a file of results."""
    ask = argparse.ArgumentParser(prog="python -m benchmarks.quantized_picture", description=__doc__)
    ask.add_argument("results", type=pathlib.Path)
    ask.add_argument("--out", type=pathlib.Path, default=PICTURE, help="default: %(default)s")
    asked = ask.parse_args(argv)
    asked.out.write_text(draw(json.loads(asked.results.read_text())), encoding="utf-8")
    print(asked.out)


if __name__ == "__main__":
    main()
