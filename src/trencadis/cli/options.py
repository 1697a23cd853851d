"""Options that several commands have, and how their texts become values."""

import enum
from collections.abc import Sequence
from typing import Annotated, Any

import jax.numpy as jnp
import typer

from trencadis.core.devices import CARDS, CHIPS, PLATFORMS
from trencadis.core.problem import Form

TARGETS = (*PLATFORMS, *CHIPS, *CARDS)

M = Annotated[int, typer.Option("-m", "--m", help="Rows of all groups.")]
K = Annotated[int, typer.Option("-k", "--k", help="Columns of lhs.")]
N = Annotated[int, typer.Option("-n", "--n", help="Columns of rhs.")]
Groups = Annotated[int, typer.Option("-g", "--groups", help="Number of groups.")]
FormOption = Annotated[Form, typer.Option(help="The ragged axis: rows, or the contraction of a weight gradient.")]
TransposeRhs = Annotated[bool, typer.Option("--transpose-rhs", help="rhs is stored g x n x k.")]
TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target", "--platform", metavar="NAME", help=f"Plan for {', '.join(TARGETS)}; by default for this machine."
    ),
]


class Skew(enum.StrEnum):
    """How uneven random group sizes are."""

    zipf = "zipf"
    uniform = "uniform"
    balanced = "balanced"


def target_named(name: str | None) -> str | None:
    """The name of a target if there is such a target, or an error that lists them all."""
    if name is None or name in TARGETS:
        return name
    raise ValueError(f"--target: want one of {', '.join(TARGETS)}; got {name!r}")


def dtype_named(option: str, name: str) -> Any:
    """The dtype of a name, or an error that names the option."""
    try:
        return jnp.dtype(name)
    except TypeError:
        raise ValueError(f"{option}: want a dtype such as bfloat16 or float32; got {name!r}") from None


def integers(name: str, words: Sequence[str]) -> list[int]:
    """The integers in words such as "3" or "3,0,5", or an error that names the option.

    >>> integers("sizes", ["3", "0,5"])
    [3, 0, 5]
    """
    words = [word for some in words for word in some.replace(",", " ").split()]
    try:
        return [int(word) for word in words]
    except ValueError:
        wrong = next(word for word in words if not word.lstrip("+-").isdigit())
        raise ValueError(f"{name}: want integers such as 3,0,5; got {wrong!r}") from None
