"""The commands `show` and `show-gemm`: the row tiles of a call, and the products of a layer, drawn."""

import dataclasses
import enum
import pathlib
from collections.abc import Sequence
from typing import Annotated

import jax
import numpy as np
import typer
from rich.console import Console

from trencadis.cli.options import Skew, TargetOption, TransposeRhs, integers, target_named
from trencadis.cli.sizes import random_sizes
from trencadis.core.problem import Form
from trencadis.gemm.tensor import GroupedTensor
from trencadis.viz.draw import show, show_gemm
from trencadis.viz.mosaic import checked_sizes
from trencadis.viz.picture import Picture

Size = int | tuple[int, ...]  # one for all groups, or one for each


class Pass(enum.StrEnum):
    """The three products of a layer: forward, and the gradients of both operands."""

    forward = "forward"
    d_lhs = "d_lhs"
    d_rhs = "d_rhs"


FACTORS = {
    Pass.forward: ("mk", "kn"),
    Pass.d_lhs: ("mn", "kn"),
    Pass.d_rhs: ("mk", "mn"),
}  # rows and columns of a group


@dataclasses.dataclass  # rather than a function: commands have more options than a function may have arguments
class Drawing:
    """The options that both commands have: where sizes come from, and where the picture goes."""

    sizes: Annotated[list[str] | None, typer.Argument(help="Group sizes: 3 0 5, or 3,0,5.", show_default=False)] = None
    m: Annotated[int | None, typer.Option("-m", "--m", help="Rows; by default the sum of the sizes.")] = None
    random: Annotated[int | None, typer.Option(help="Random sizes for this many groups; needs -m.")] = None
    skew: Annotated[Skew, typer.Option(help="How uneven random sizes are.")] = Skew.zipf
    seed: Annotated[int, typer.Option(help="Seed of the random sizes.")] = 0
    svg: Annotated[pathlib.Path | None, typer.Option(help="Draw into this .svg file as well.")] = None

    def __post_init__(self) -> None:
        """Draw the picture, print it, and save it if asked to."""
        if self.svg is not None and self.svg.suffix.lower() != ".svg":
            raise ValueError(f"--svg: want a file name that ends in .svg, the one format there is; got '{self.svg}'")
        picture = self.picture()
        Console(soft_wrap=True).print(picture)
        if self.svg is not None:
            try:
                typer.echo(f"saved   {picture.save(self.svg)}")
            except OSError as error:
                raise ValueError(f"--svg: cannot write {self.svg}: {error.strerror}") from None

    def picture(self) -> Picture:
        """The picture that the options ask for."""
        raise NotImplementedError

    def group_sizes(self) -> list[int]:
        """The group sizes that were given, or random ones."""
        if (self.random is None) == (not self.sizes):
            raise ValueError("sizes: want group sizes, or --random with a number of groups")
        if self.random is None:
            return integers("sizes", self.sizes or [])
        if self.m is None:
            raise ValueError("--random: also needs -m")
        return random_sizes(self.random, self.m, skew=self.skew.value, seed=self.seed)


@dataclasses.dataclass
class Show(Drawing):
    """Draw the row tiles that a grouped matmul of these group sizes gets; with --tile, a fixed raster as in megablox.

    trencadis show 100 150 50 -k 4096 -n 14336 --target h200

    trencadis show --random 32 -m 8192 --tile 128
    """

    k: Annotated[int | None, typer.Option("-k", "--k", help="Columns of lhs; 1024 by default.")] = None
    n: Annotated[int | None, typer.Option("-n", "--n", help="Columns of rhs; 1024 by default.")] = None
    dtype: Annotated[str | None, typer.Option(help="Of lhs and rhs; bfloat16 by default.")] = None
    preferred_element_type: Annotated[str | None, typer.Option(help="Of the result; float32 by default.")] = None
    form: Annotated[Form | None, typer.Option(help="rows by default; contraction is a weight gradient.")] = None
    transpose_rhs: TransposeRhs = False
    target: TargetOption = None
    group_offset: Annotated[int | None, typer.Option(help="The first local group; by default 0.")] = None
    num_groups: Annotated[int | None, typer.Option(help="How many groups are local; by default the rest.")] = None
    tile: Annotated[int | None, typer.Option(help="Draw a fixed raster with tiles of this many rows instead.")] = None

    def picture(self) -> Picture:
        """The picture of the row tiles of the call, or of a fixed raster."""
        return show(
            self.group_sizes(), m=self.m, k=self.k, n=self.n, dtype=self.dtype,
            preferred_element_type=self.preferred_element_type, form=self.form,
            transpose_rhs=self.transpose_rhs or None, target=target_named(self.target),
            group_offset=self.group_offset, num_groups=self.num_groups, tile=self.tile,
        )  # fmt: skip


@dataclasses.dataclass
class ShowGemm(Drawing):
    """Draw which part of lhs multiplies which part of rhs in a product of a layer.

    trencadis show-gemm 3 0 5 -k 4 -n 6

    trencadis show-gemm 3 0 5 -k 4,2,3 -n 6,1,2 --pass d_rhs
    """

    k: Annotated[str | None, typer.Option("-k", "--k", metavar="SIZE", help="Columns of lhs; 4,2,3: by group.")] = None
    n: Annotated[str | None, typer.Option("-n", "--n", metavar="SIZE", help="Columns of rhs; 6,1,2: by group.")] = None
    which: Annotated[Pass, typer.Option("--pass", help="Which product of the layer.")] = Pass.forward

    def picture(self) -> Picture:
        """The picture of one product of the layer."""
        rows = checked_sizes(self.group_sizes())
        groups, sizes = len(rows), dict[str, Size](m=rows)
        if (most := max(sum(rows), self.m or 0)) >= 2**31:
            raise ValueError(f"sizes: want fewer than 2**31 rows; got {most}")
        if self.m is not None and self.m < sum(rows):
            raise ValueError(f"-m: want at least {sum(rows)}, the sum of the sizes; got {self.m}")
        for name, text in (("k", self.k), ("n", self.n)):
            if text is None:
                raise ValueError(f"show-gemm: also needs -{name}")
            sizes[name] = _size(f"-{name}", text, groups)
        if self.m is not None and any(isinstance(sizes[name], tuple) for name in "kn"):
            raise ValueError("-m: goes with one size for k and one for n")
        factors = FACTORS[self.which]
        tensors = [tensor([sizes[name] for name in names], groups, self.m) for names in factors]
        (summed,) = set(factors[0]) & set(factors[1])
        axes = [names.index(summed) + (x.ndim == 3) for names, x in zip(factors, tensors, strict=True)]
        return show_gemm(tensors[0], tensors[1], contracting_dims=((axes[0],), (axes[1],)))


def tensor(sizes: Sequence[Size], groups: int, m: int | None = None) -> GroupedTensor:
    """A grouped tensor without data, of that many rows and columns for all groups, or for each.

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
    numbers = integers(name, [text])
    if min(numbers, default=-1) < 0:
        raise ValueError(f"{name}: want sizes >= 0; got {text!r}")
    if sum(numbers) >= 2**31:
        raise ValueError(f"{name}: want fewer than 2**31 in all; got {sum(numbers)}")
    if "," not in text and len(numbers) == 1:
        return numbers[0]
    if len(numbers) != groups:
        raise ValueError(f"{name}: want one size, or {groups}, one for each group; got {len(numbers)}")
    return tuple(numbers)
