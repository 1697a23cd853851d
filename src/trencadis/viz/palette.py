"""A colour for every group.

There are seven hues that stay apart for every kind of colour vision (Okabe and Ito), in an order in which neighbours
differ in lightness too. The same hues follow as tints, then as shades: 21 colours, which repeat. Groups lie in order,
so a group has to differ from the next few, and not from all others.
"""

from __future__ import annotations

RGB = tuple[int, int, int]

HUES: tuple[RGB, ...] = (
    (0, 114, 178),  # cobalt
    (230, 159, 0),  # ochre
    (0, 158, 115),  # malachite
    (86, 180, 233),  # sky
    (213, 94, 0),  # terracotta
    (240, 228, 66),  # lemon
    (204, 121, 167),  # rose
)
WHITE, BLACK = (255, 255, 255), (0, 0, 0)
LAYERS: tuple[tuple[RGB, float], ...] = ((WHITE, 0.0), (WHITE, 0.55), (BLACK, 0.4))  # what to mix in, and how much


def colour(group: int) -> str:
    """The colour of a group as a hexadecimal string, for the terminal and for SVG.

    >>> colour(0), colour(7), colour(21)
    ('#0072b2', '#8cc0dc', '#0072b2')
    """
    return "#" + "".join(f"{channel:02x}" for channel in _rgb(group))


def ink(group: int) -> str:
    """Black or white, whichever is easier to read on the colour of the group.

    >>> ink(0), ink(5)
    ('#ffffff', '#1d1b18')
    """
    r, g, b = ((c / 255) ** 2.2 for c in _rgb(group))
    return "#ffffff" if 0.2126 * r + 0.7152 * g + 0.0722 * b < 0.25 else "#1d1b18"


def _rgb(group: int) -> RGB:
    layer, hue = divmod(group, len(HUES))
    other, share = LAYERS[layer % len(LAYERS)]
    r, g, b = (round(c + (o - c) * share) for c, o in zip(HUES[hue], other, strict=True))
    return r, g, b
