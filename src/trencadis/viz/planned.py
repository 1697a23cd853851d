"""The tiles that the planned backend takes, for a call that is described by its shapes, its dtypes and its target."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from trencadis.backends import BACKENDS
from trencadis.core import arguments
from trencadis.core.epilogue import Epilogue
from trencadis.core.plan import plan
from trencadis.core.problem import Form, Problem
from trencadis.core.schedule import RowTile
from trencadis.core.target import Target
from trencadis.viz.mosaic import Mosaic, Rows, cells, checked_int

SIZE = 1024  # k and n where they are not given
RowTiles = Callable[[int, int], list[RowTile]]  # of a group, by its first row and the row after its last


def planned(rows: Rows, problem: Problem, target: Target) -> Mosaic:
    """The picture of the tiles that the planned backend takes for a problem on a target.

    >>> rows = Rows(sizes=(3, 0, 5), m=8, first=0, local_groups=3)
    >>> planned(rows, problem_of_call(rows, None, None, "float32", None, "rows", False), Target(platform="cpu")).heights
    (4, 4, 1)
    """
    backend, row_tiles = planned_row_tiles(problem, target)
    return Mosaic(**rows._asdict(), cells=cells(rows, row_tiles), note=f"{backend} on {target}: {problem}")


def planned_row_tiles(problem: Problem, target: Target) -> tuple[str, RowTiles]:
    """The name of the backend that the plan chooses, and its function from the rows of a group to their tiles."""
    chosen = plan(problem, target)
    return chosen.backend, functools.partial(BACKENDS[chosen.backend].row_tiles, chosen.problem, chosen.layout)


def problem_of_call(
    rows: Rows,
    k: int | None,
    n: int | None,
    dtype: DTypeLike | None,
    preferred_element_type: DTypeLike | None,
    form: Form | str | None,
    transpose_rhs: bool | None,
) -> Problem:
    """The problem of a call on these rows, by the arguments of `show`, each None where the default is meant.

    >>> print(problem_of_call(Rows((3, 0, 5), 8, 0, 3), 64, 64, None, None, "contraction", None))
    contraction m=8 k=64 n=64 g=3: bfloat16 x bfloat16 -> float32
    """
    k, n = (checked_int(name, SIZE if size is None else size) for name, size in (("k", k), ("n", n)))
    flip = arguments.checked_flag("transpose_rhs", False if transpose_rhs is None else transpose_rhs)
    out = jnp.float32 if preferred_element_type is None else preferred_element_type
    sizes = jax.ShapeDtypeStruct((len(rows.sizes),), jnp.int32)
    operand = functools.partial(jax.ShapeDtypeStruct, dtype=_dtype(dtype))
    if _form(form) is Form.ROWS:
        rhs = operand((rows.local_groups, *((n, k) if flip else (k, n))))
        return arguments.rows_problem(
            operand((rows.m, k)), rhs, sizes, out, transpose_rhs=flip, epilogue=Epilogue(), precision=None
        )
    if flip:
        raise ValueError("transpose_rhs: goes with form 'rows'; the rhs of a contraction is [m, n]")
    return arguments.contraction_problem(
        operand((rows.m, k)), operand((rows.m, n)), sizes, out,
        transpose_lhs=False, local=rows.local_groups, precision=None,
    )  # fmt: skip


def _form(form: Form | str | None) -> Form:
    if form is None or isinstance(form, Form):
        return form or Form.ROWS
    try:
        return Form(form)
    except ValueError:
        raise ValueError(f"form: want 'rows' or 'contraction'; got {form!r}") from None


def _dtype(dtype: DTypeLike | None) -> np.dtype[Any]:
    try:
        return jnp.dtype(jnp.bfloat16 if dtype is None else dtype)
    except TypeError:
        raise ValueError(f"dtype: want a dtype such as bfloat16 or float32; got {dtype!r}") from None
