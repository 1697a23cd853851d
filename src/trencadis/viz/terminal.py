"""Lines of text for a terminal: a line is a list of pieces, each a string and the group whose colour it takes.

`plain` drops the colours, `coloured` hands them to rich.
"""

from __future__ import annotations

import string
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from trencadis.viz.palette import colour, ink

if TYPE_CHECKING:
    from rich.text import Text

Piece = tuple[str, int | None]
Line = list[Piece]

GUTTER = 8  # columns before a line's content
LETTERS = string.digits + string.ascii_lowercase + string.ascii_uppercase
UNOWNED = "·"
BAR = "█"


def plain(lines: list[Line]) -> str:
    """The lines as one string without colour."""
    return "\n".join("".join(piece for piece, _ in line).rstrip() for line in lines)


def coloured(lines: list[Line]) -> Iterator[Text]:
    """The lines as rich texts, which rich writes in the colours the terminal has, or in none."""
    from rich.text import Text  # only those who print through rich need it

    for line in lines:
        text = Text(no_wrap=True, overflow="ignore")
        for piece, group in line:
            text.append(piece, style=_style(piece, group))
        yield text


def _style(piece: str, group: int | None) -> str:
    if group is None:
        return ""
    return colour(group) if piece.startswith(BAR) else f"{ink(group)} on {colour(group)}"


def counted(n: int, thing: str) -> str:
    """A number and what it counts, in the singular or the plural.

    >>> counted(1, "tile"), counted(3, "tile")
    ('1 tile', '3 tiles')
    """
    return f"{n} {thing}" if n == 1 else f"{n} {thing}s"


def paragraph(label: str, content: str, width: int, gutter: int = GUTTER) -> list[Line]:
    """The lines of a text after a label, wrapped to a width."""
    lines = textwrap.wrap(content, max(width - gutter, 20), break_long_words=False) or [""]
    return [[(f"{label if i == 0 else '':<{gutter}}{line}", None)] for i, line in enumerate(lines)]
