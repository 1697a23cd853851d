"""The elements of a picture as SVG text: the page, words and shapes, with nothing but the standard library."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from trencadis.viz.palette import ink

WIDTH, MARGIN = 1000.0, 36.0
# Colours of what is not a group are attributes, for the light page; where the reader's page is dark, the style wins.
PAPER, TEXT, FAINT, LINE, EDGE = "#fbf9f5", "#2b2926", "#77716a", "#b9b2a8", "#e6e1d8"
STYLE = """\
.trencadis text { font-family: system-ui, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif; }
@media (prefers-color-scheme: dark) {
  .trencadis .paper { fill: #201f1d; stroke: #3a3733; }
  .trencadis .text { fill: #ece8e1; }
  .trencadis .faint { fill: #a8a299; }
  .trencadis .line { stroke: #6d675f; }
  .trencadis .edge { stroke: #201f1d; }
  .trencadis .ground { fill: #33302c; }
  .trencadis .hatch { fill: #6d675f; }
}"""
UNOWNED = 'fill="url(#trencadis-unowned)"'


def page(title: str, height: float, parts: Iterable[str]) -> str:
    """The SVG document: a page with a title, and the parts that are drawn on it."""
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" class="trencadis" role="img" aria-label="{title}" '
        f'width="{WIDTH:g}" height="{num(height)}" viewBox="0 0 {WIDTH:g} {num(height)}">',
        f"<title>{title}</title>",
        f"<style>\n{STYLE}\n</style>",
        '<defs><pattern id="trencadis-unowned" width="7" height="7" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><rect class="ground" width="7" height="7" fill="{EDGE}"/>'
        f'<rect class="hatch" width="1.6" height="7" fill="{LINE}"/></pattern></defs>',
        f'<rect class="paper" x="0.5" y="0.5" width="{num(WIDTH - 1)}" height="{num(height - 1)}" rx="12" '
        f'fill="{PAPER}" stroke="{EDGE}"/>',
        *parts, "</svg>", "",
    ])  # fmt: skip


def count(n: int, thing: str) -> str:
    """A number with thousands separated, and what it counts, in the singular or the plural."""
    return f"{n:,} {thing}" if n == 1 else f"{n:,} {thing}s"


def label(group: int, x: float, y: float, width: float, height: float, least: float) -> Iterator[str]:
    """The number of a group in the middle of a box, unless its letters had to be smaller than the least size."""
    size = min(max(height * 0.46, min(height, 10.0)), 26.0, (width - 3) / (0.6 * len(str(group))))
    if size >= least:
        yield text(x + width / 2, y + height / 2 + size * 0.36, f"{group}", size, anchor="middle", fill=ink(group))


def num(x: float) -> str:
    """A coordinate as text, rounded to a hundredth of a pixel."""
    return f"{x:.2f}".rstrip("0").rstrip(".")


def text(
    x: float,
    y: float,
    words: str,
    size: float,
    *,
    anchor: str = "",
    faint: bool = False,
    fill: str = "",
    weight: int = 0,
) -> str:
    """An SVG text whose baseline starts at (x, y), or has its middle or its end there."""
    look = f'fill="{fill}" ' if fill else f'class="faint" fill="{FAINT}" ' if faint else f'class="text" fill="{TEXT}" '
    look += f'font-weight="{weight}" ' if weight else ""
    middle = f'text-anchor="{anchor}" ' if anchor else ""
    return f'<text x="{num(x)}" y="{num(y)}" {look}{middle}font-size="{num(size)}">{words}</text>'


def shape(kind: str, path: str, look: str, tip: str | None = None) -> str:
    """An SVG path of a class, with a tooltip if there is one."""
    inside = f"><title>{tip}</title></path>" if tip else "/>"
    return f'<path class="{kind}" d="{path}" {look}{inside}'


def dashed(x: float, y: float, width: float, height: float) -> str:
    """The dashed outline of an empty box."""
    box = f'x="{num(x + 0.5)}" y="{num(y + 0.5)}" width="{num(max(width - 1, 0.5))}" height="{num(height - 1)}"'
    return f'<rect class="past line" {box} rx="2" fill="none" stroke="{LINE}" stroke-dasharray="3 3"/>'


def quad(
    x: float,
    y: float,
    width: float,
    height: float,
    slants: tuple[float, float] = (0.0, 0.0),
    radii: tuple[float, float] = (2.0, 2.0),
) -> str:
    """The path of a box whose left and right edges lean by the slants; a side with a radius is rounded instead."""
    left, right = (min(radius, width / 2) for radius in radii)
    end, foot = x + width, y + height
    path = [f"M{num(x + slants[0] + left)} {num(y)}H{num(end + slants[1] - right)}"]
    if right:
        path.append(f"Q{num(end)} {num(y)} {num(end)} {num(y + right)}V{num(foot - right)}")
        path.append(f"Q{num(end)} {num(foot)} {num(end - right)} {num(foot)}")
    else:
        path.append(f"L{num(end - slants[1])} {num(foot)}")
    path.append(f"H{num(x - slants[0] + left)}")
    if left:
        path.append(f"Q{num(x)} {num(foot)} {num(x)} {num(foot - left)}V{num(y + left)}")
        path.append(f"Q{num(x)} {num(y)} {num(x + left)} {num(y)}")
    return "".join([*path, "Z"])


def visible(widths: list[float], joint: float) -> list[float]:
    """The widths with slivers made wide enough to be seen, at the cost of the wider ones; unchanged if all are narrow.

    >>> visible([1.0, 30.0, 60.0], joint=1.0)
    [3.0, 29.357..., 58.642...]
    """
    least = 2.0 + joint
    if len(widths) < 2 or sum(widths) < 3 * least * len(widths):
        return widths
    extra = [max(width - least, 0.0) for width in widths]
    share = (sum(widths) - least * len(widths)) / sum(extra)
    return [least + each * share for each in extra]
