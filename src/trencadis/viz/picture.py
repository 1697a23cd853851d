"""What every answer of `show` can do: print as text, draw as SVG, be saved."""

from __future__ import annotations

import abc
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

from trencadis.viz import terminal


class Picture(abc.ABC):
    """A thing to look at: as text in a terminal, as SVG in a notebook or a file."""

    @abc.abstractmethod
    def lines(self, width: int) -> list[terminal.Line]:
        """The lines of the text, with the colours of groups."""

    @abc.abstractmethod
    def svg(self) -> str:
        """The picture as an SVG document."""

    @property
    @abc.abstractmethod
    def huge(self) -> bool:
        """Whether it is too much for a notebook, which then shows the text."""

    def text(self, width: int = 80) -> str:
        """The picture as plain text, no wider than `width` columns where that is possible."""
        return terminal.plain(self.lines(width))

    def save(self, path: str | pathlib.Path) -> pathlib.Path:
        """Write the SVG document to a file."""
        path = pathlib.Path(path)
        path.write_text(self.svg(), encoding="utf-8")
        return path

    def __str__(self) -> str:
        return self.text(shutil.get_terminal_size().columns)

    __repr__ = __str__

    def _repr_svg_(self) -> str | None:
        return None if self.huge else self.svg()

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        del console
        yield from terminal.coloured(self.lines(options.max_width))
