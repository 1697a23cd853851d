"""What every result of `show` and `show_gemm` can do: print as text, draw as SVG, and be saved."""

from __future__ import annotations

import abc
import pathlib
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

from trencadis.viz import terminal

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text


class Picture(abc.ABC):
    """A picture that is text in a terminal, and SVG in a notebook or a file."""

    @abc.abstractmethod
    def lines(self, width: int) -> list[terminal.Line]:
        """The lines of the text, with the colours of groups."""

    @abc.abstractmethod
    def svg(self) -> str:
        """The picture as an SVG document."""

    @property
    @abc.abstractmethod
    def huge(self) -> bool:
        """Whether the picture is too large for a notebook, which then shows the text."""

    def text(self, width: int = 80) -> str:
        """The picture as plain text, no wider than `width` columns where that is possible."""
        return terminal.plain(self.lines(width))

    def save(self, path: str | pathlib.Path) -> pathlib.Path:
        """Write the SVG document to a file, whose name has to end in .svg, and return its path."""
        path = pathlib.Path(path)
        if path.suffix.lower() != ".svg":
            raise ValueError(f"path: want a file name that ends in .svg, the one format there is; got {str(path)!r}")
        path.write_text(self.svg(), encoding="utf-8")
        return path

    def __str__(self) -> str:
        return self.text(shutil.get_terminal_size().columns)

    __repr__ = __str__

    def _repr_svg_(self) -> str | None:
        return None if self.huge else self.svg()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        del console
        yield from terminal.coloured(self.lines(options.max_width))
