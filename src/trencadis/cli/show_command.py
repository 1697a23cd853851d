"""The command `show`: the schedule of sizes, or the product of grouped tensors of those sizes."""

import dataclasses
import enum
import pathlib
from collections.abc import Sequence
from typing import Annotated

import jax
import numpy as np
import typer
from rich.console import Console

from trencadis.cli.sizes import random_sizes
from trencadis.gemm.tensor import GroupedTensor
from trencadis.viz.mosaic import checked_sizes, schedule
from trencadis.viz.picture import Picture
from trencadis.viz.product import Product, product

Size = int | tuple[int, ...]  # one for all groups, or one for each


class Skew(enum.StrEnum):
    """How uneven made-up sizes are."""

    zipf = "zipf"
    uniform = "uniform"
    balanced = "balanced"


class Pass(enum.StrEnum):
    """The three products of a layer."""

    forward = "forward"
    d_lhs = "d_lhs"
    d_rhs = "d_rhs"


FACTORS = {
    Pass.forward: ("mk", "kn"),
    Pass.d_lhs: ("mn", "kn"),
    Pass.d_rhs: ("mk", "mn"),
}  # rows and columns of a group


@dataclasses.dataclass  # rather than a function: it has more options than a function may have arguments
class Show:
    """Draw which group works on which tile of rows; with --gemm, which part of lhs multiplies which part of rhs.

    trencadis show 3 0 5 --tile 4

    trencadis show 3 0 5 --gemm forward --k 4 --n 6

    trencadis show 3 0 5 --gemm forward --k 4,2,3 --n 6,1,2
    """

    sizes: Annotated[list[str] | None, typer.Argument(help="Group sizes: 3 0 5, or 3,0,5.", show_default=False)] = None
    tile: Annotated[int | None, typer.Option(help="Rows of a tile; by default 128.")] = None
    m: Annotated[int | None, typer.Option("--m", "--rows", help="Rows; by default the sum of the sizes.")] = None
    window: Annotated[
        tuple[int, int] | None, typer.Option(metavar="FIRST COUNT", help="The local groups; by default all.")
    ] = None
    gemm: Annotated[Pass | None, typer.Option(help="Draw this product of a layer; needs --k and --n.")] = None
    k: Annotated[str | None, typer.Option(metavar="SIZE", help="Columns of lhs; 4,2,3 is one for each group.")] = None
    n: Annotated[str | None, typer.Option(metavar="SIZE", help="Columns of rhs; 6,1,2 is one for each group.")] = None
    random: Annotated[int | None, typer.Option(help="Make up sizes of so many groups; needs --rows.")] = None
    skew: Annotated[Skew, typer.Option(help="How uneven made-up sizes are.")] = Skew.zipf
    seed: Annotated[int, typer.Option(help="Of the made-up sizes.")] = 0
    svg: Annotated[pathlib.Path | None, typer.Option(help="Draw into this file as well.")] = None

    def __post_init__(self) -> None:
        """Run the command."""
        picture: Picture = self._schedule() if self.gemm is None else self._product(self.gemm)
        Console(soft_wrap=True).print(picture)
        if self.svg is not None:
            try:
                typer.echo(f"drawn   {picture.save(self.svg)}")
            except OSError as error:
                raise ValueError(f"--svg: cannot write {self.svg}: {error.strerror}") from None

    def _group_sizes(self) -> list[int]:
        if (self.random is None) == (not self.sizes):
            raise ValueError("show: want group sizes, or --random with a number of groups")
        if self.random is None:
            return _numbers("sizes", self.sizes or [])
        if self.m is None:
            raise ValueError("--random: also needs --rows")
        return random_sizes(self.random, self.m, skew=self.skew.value, seed=self.seed)

    def _schedule(self) -> Picture:
        for name, value in (("--k", self.k), ("--n", self.n)):
            if value is not None:
                raise ValueError(f"{name}: goes with --gemm")
        first, local = self.window or (0, None)
        tile = 128 if self.tile is None else self.tile
        return schedule(self._group_sizes(), tile, m=self.m, group_offset=first, num_groups=local)

    def _product(self, which: Pass) -> Product:
        for name, value in (("--tile", self.tile), ("--window", self.window)):
            if value is not None:
                raise ValueError(f"{name}: goes with a schedule, not with --gemm")
        rows = checked_sizes(self._group_sizes())
        groups, sizes = len(rows), dict[str, Size](m=rows)
        if (most := max(sum(rows), self.m or 0)) >= 2**31:
            raise ValueError(f"sizes: want fewer than 2**31 rows; got {most}")
        if self.m is not None and self.m < sum(rows):
            raise ValueError(f"--rows: want at least {sum(rows)}, the sum of the sizes; got {self.m}")
        for name, text in (("k", self.k), ("n", self.n)):
            if text is None:
                raise ValueError(f"--gemm: also needs --{name}")
            sizes[name] = _size(f"--{name}", text, groups)
        if self.m is not None and any(isinstance(sizes[name], tuple) for name in "kn"):
            raise ValueError("--rows: goes with one size for k and one for n")
        factors = FACTORS[which]
        tensors = [tensor([sizes[name] for name in names], groups, self.m) for names in factors]
        (summed,) = set(factors[0]) & set(factors[1])
        axes = [names.index(summed) + (x.ndim == 3) for names, x in zip(factors, tensors, strict=True)]
        return product(*tensors, contracting_dims=((axes[0],), (axes[1],)))


def tensor(sizes: Sequence[Size], groups: int, m: int | None = None) -> GroupedTensor:
    """A grouped tensor without numbers: of that many rows and columns for all groups, or for each.

    >>> tensor([(3, 5), 4], groups=2), tensor([(3, 5), (1, 2)], groups=2).shape
    (GroupedTensor(float32[8,4], 2 groups of 3, 5 rows), (13,))
    """
    first, last = (np.array(size, np.int32) if isinstance(size, tuple) else None for size in sizes)
    if first is not None and last is not None:
        shape: tuple[int, ...] = (sum(int(rows) * int(columns) for rows, columns in zip(first, last, strict=True)),)
    else:
        totals = [sum(size) if isinstance(size, tuple) else size for size in sizes]
        shape = (groups, *totals) if first is None and last is None else tuple(totals)
        shape = (m, shape[1]) if m is not None and first is not None else shape
    return GroupedTensor(jax.ShapeDtypeStruct(shape, np.float32), first, last, shape)


def _size(name: str, text: str, groups: int) -> Size:
    """One size for all groups, or one for each."""
    numbers = _numbers(name, [text])
    if min(numbers, default=-1) < 0:
        raise ValueError(f"{name}: want sizes >= 0; got {text!r}")
    if sum(numbers) >= 2**31:
        raise ValueError(f"{name}: want fewer than 2**31 in all; got {sum(numbers)}")
    if "," not in text and len(numbers) == 1:
        return numbers[0]
    if len(numbers) != groups:
        raise ValueError(f"{name}: want one size, or {groups}, one for each group; got {len(numbers)}")
    return tuple(numbers)


def _numbers(name: str, words: list[str]) -> list[int]:
    words = [word for some in words for word in some.replace(",", " ").split()]
    try:
        return [int(word) for word in words]
    except ValueError:
        wrong = next(word for word in words if not word.lstrip("+-").isdigit())
        raise ValueError(f"{name}: want integers; got {wrong!r}") from None
