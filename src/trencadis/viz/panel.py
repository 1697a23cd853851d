"""One tensor in the picture of a grouped GEMM: where the rectangle of each group lies in it."""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import math
from typing import NamedTuple


class Kind(enum.StrEnum):
    """How the groups of a tensor lie in its array."""

    ROWS = "ragged rows"
    COLUMNS = "ragged columns"
    STACK = "stack"
    FLAT = "fully ragged"


class Box(NamedTuple):
    """A rectangle of entries, given by its first row, its first column and its extents."""

    row: int
    column: int
    rows: int
    columns: int


@dataclasses.dataclass(frozen=True, kw_only=True)  # no slots: it caches
class Panel:
    """A tensor, with its groups' axes split into those that go down the page and those that go across.

    >>> sizes = dict(shape=(8, 4), first_dims=(3, 0, 5), last_dims=None)
    >>> panel = Panel(name="lhs", **sizes, roles="mk", split=1, local=range(3))
    >>> panel.kind.value, panel.box(2), panel.where(2), panel.title
    ('ragged rows', Box(row=3, column=0, rows=5, columns=4), 'lhs[3:8]', '[8, Σ4]')
    """

    name: str
    shape: tuple[int, ...]  # of the array of all groups
    first_dims: tuple[int, ...] | None
    last_dims: tuple[int, ...] | None
    roles: str  # of each axis of a group: m, k or n; k is summed over
    split: int  # how many axes of a group go down
    local: range  # the groups that are multiplied; a stack holds no others

    @functools.cached_property
    def kind(self) -> Kind:
        """How the groups lie in the array."""
        ragged = self.first_dims is not None, self.last_dims is not None
        return {(True, False): Kind.ROWS, (False, True): Kind.COLUMNS, (True, True): Kind.FLAT}.get(ragged, Kind.STACK)

    @property
    def separate(self) -> bool:
        """Whether each group is a matrix of its own, rather than a band of one array."""
        return self.kind in (Kind.STACK, Kind.FLAT)

    @property
    def down(self) -> str:
        """The roles of the axes that go down the page."""
        return "".join(sorted(set(self.roles[: self.split])))

    @property
    def across(self) -> str:
        """The roles of the axes that go across the page."""
        return "".join(sorted(set(self.roles[self.split :])))

    @property
    def extent(self) -> tuple[int, int]:
        """The numbers of rows and columns of the array that holds the bands of all groups."""
        return math.prod(self.shape[: self.split]), math.prod(self.shape[self.split :])

    @property
    def title(self) -> str:
        """The shape as text, with a Σ at the axes that are summed over."""
        if self.kind is Kind.FLAT:
            summed = {0: ", Σ down", 1: ", Σ across"}.get(self.roles.find("k"), "")
            return f"[{self.shape[0]}]{summed}"
        roles = self.roles.rjust(len(self.shape))  # a stack has the axis of the groups before those of a group
        axes = (f"{'Σ' if role == 'k' else ''}{size}" for role, size in zip(roles, self.shape, strict=True))
        return f"[{', '.join(axes)}]"

    def shape_of(self, group: int) -> tuple[int, ...]:
        """The shape of the part that belongs to a group."""
        first, last = self.first_dims, self.last_dims
        if first is not None and last is not None:
            return first[group], last[group]
        if first is not None:
            return first[group], *self.shape[1:]
        return self.shape[1:] if last is None else (*self.shape[:-1], last[group])

    def box(self, group: int) -> Box:
        """The rectangle of a group in its array."""
        shape = self.shape_of(group)
        rows, columns = math.prod(shape[: self.split]), math.prod(shape[self.split :])
        start = 0 if self.separate else self._bounds[group]
        return Box(0, start, rows, columns) if self.kind is Kind.COLUMNS else Box(start, 0, rows, columns)

    def where(self, group: int) -> str:
        """The place of a group as an indexing expression, such as lhs[3:8]."""
        if self.kind is Kind.STACK:
            return f"{self.name}[{group - self.local.start}]"
        return self._slice(self._bounds[group], self._bounds[group + 1])

    def unowned(self) -> list[tuple[int, int]]:
        """The ranges of rows, of columns, or of entries of a flat buffer that no local group owns."""
        if self.kind is Kind.STACK:
            return []
        whole = self.shape[-1] if self.kind is Kind.COLUMNS else self.shape[0]
        mine = self._bounds[self.local.start], self._bounds[self.local.stop]
        return [(a, b) for a, b in ((0, mine[0]), (mine[1], whole)) if a < b]

    def unowned_places(self) -> list[str]:
        """The unowned ranges as indexing expressions, such as lhs[8:10]."""
        return [self._slice(a, b) for a, b in self.unowned()]

    @functools.cached_property
    def _bounds(self) -> tuple[int, ...]:
        """Where each group starts, and where the last one ends, along the ragged axis."""
        first, last = self.first_dims, self.last_dims
        if first is not None and last is not None:
            lengths = tuple(rows * columns for rows, columns in zip(first, last, strict=True))
        else:
            lengths = first or last or ()
        return tuple(itertools.accumulate(lengths, initial=0))

    def _slice(self, start: int, stop: int) -> str:
        lead = "" if self.kind is not Kind.COLUMNS else ":, " if len(self.shape) == 2 else "..., "
        return f"{self.name}[{lead}{start}:{stop}]"
