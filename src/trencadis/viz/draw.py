"""The functions that draw: `show` for the row tiles of a call, `show_gemm` for a product of grouped tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy.typing as npt
from jax.typing import DTypeLike

from trencadis.core.devices import target_of
from trencadis.core.problem import Form
from trencadis.core.target import Target
from trencadis.gemm.tensor import GroupedTensor
from trencadis.viz.mosaic import Mosaic, checked_rows
from trencadis.viz.planned import planned, problem_of_call
from trencadis.viz.product import Product, product
from trencadis.viz.raster import raster

Axes = Sequence[int]


def show(
    group_sizes: npt.ArrayLike,
    *,
    m: int | None = None,
    k: int | None = None,
    n: int | None = None,
    dtype: DTypeLike | None = None,
    preferred_element_type: DTypeLike | None = None,
    form: Form | str | None = None,
    transpose_rhs: bool | None = None,
    target: Target | jax.Device | str | None = None,
    group_offset: npt.ArrayLike | None = None,
    num_groups: int | None = None,
    tile: int | None = None,
) -> Mosaic:
    """Draw which rows are computed together for which group; the result prints as text, and can be saved as a picture.

    By default these are the row tiles of the backend that a call of this shape gets on the target. With `tile`, it is
    a fixed raster of tiles of that height, as megablox has it, and the arguments that describe a call are refused.

    Args:
      group_sizes: integers, one per group; a list or an array, known now.
      m: rows; by default the sum of the sizes. Rows past that sum are unowned.
      k: columns of lhs; 1024 by default.
      n: columns of rhs; 1024 by default.
      dtype: of lhs and rhs; bfloat16 by default.
      preferred_element_type: dtype of the result; float32 by default, as in `grouped_matmul`.
      form: "rows", the form of `grouped_matmul` and the default, or "contraction", the form of a weight gradient.
      transpose_rhs: whether rhs is stored [g, n, k]; False by default.
      target: what to plan for: a `Target`, a device, "cpu", "cuda", "rocm", "tpu", a TPU generation such as "v6e", or
        a GPU such as "h200"; by default the default device.
      group_offset: the first of the local groups, as in `grouped_matmul`; rows of other groups count as unowned.
      num_groups: how many groups are local; by default all from group_offset on.
      tile: rows of a tile of a fixed raster.

    Returns:
      A `Mosaic`, or, with `tile`, a `Raster`; `save("tiles.svg")` writes the picture, as a notebook shows it.

    >>> show([3, 0, 5], m=12, dtype="float32", target="cpu")
    rows     0  1  2 │  3  4  5  6 │  7 │  8  9 10 11
    group    0  0  0 │  2  2  2  2 │  2 │  ·  ·  ·  ·
    tiles   group 0: 0-3; group 2: 3-6, 7-10
    total   3 tiles of 4 rows, 8 of 12 rows owned, 1 empty group, 33% waste
    backend xla on cpu: rows m=12 k=1024 n=1024 g=3: float32 x float32 -> float32
    >>> show([3, 0, 5], tile=4)
    rows    0 1 2 3 │ 4 5 6 7
    group   0 0 0 2 │ 2 2 2 2
    visits  (0,0) (2,0) (2,1)
    total   3 visits, 2 tiles of 4 rows, 8 of 8 rows owned, 1 empty group, 33% waste
    drawn   a fixed-raster schedule, as in megablox; not the tiles of our kernels
    """
    out = preferred_element_type
    call: dict[str, Any] = dict(
        k=k, n=n, dtype=dtype, preferred_element_type=out, form=form, transpose_rhs=transpose_rhs
    )
    if tile is None:
        rows = checked_rows(group_sizes, m, group_offset, num_groups)
        return planned(rows, problem_of_call(rows, **call), target_of(target))
    for name, value in {**call, "target": target}.items():
        if value is not None:
            raise ValueError(f"{name}: goes with the tiles of a backend, not with the fixed raster of `tile`")
    return raster(group_sizes, tile, m=m, group_offset=group_offset, num_groups=num_groups)


def show_gemm(
    lhs: GroupedTensor,
    rhs: GroupedTensor,
    *,
    contracting_dims: tuple[Axes, Axes],
    group_offset: npt.ArrayLike | None = None,
) -> Product:
    """Draw which part of lhs `grouped_gemm` multiplies with which part of rhs, and where the result goes.

    Only shapes and sizes count, and nothing is computed. Print the result, or save it as a picture.

    Args:
      lhs: a grouped tensor with sizes that are known now.
      rhs: likewise.
      contracting_dims: the axes of lhs, and those of rhs, that are summed over together, as in `grouped_gemm`.
      group_offset: the first of the local groups, as in `grouped_gemm`.

    Returns:
      A `Product`.

    >>> import jax.numpy as jnp
    >>> x, w = GroupedTensor.ragged_rows(jnp.ones((3, 2)), [1, 2]), GroupedTensor.stacked(jnp.ones((2, 2, 4)))
    >>> show_gemm(x, w, contracting_dims=((1,), (1,)))
    lhs      ·  rhs         =  result
    [3, Σ2]     [2, Σ2, 4]     [3, 4]
    00          0000           0000
    11          0000           1111
    11                         1111
                1111
                1111
    <BLANKLINE>
    group 0  lhs[0:1] · rhs[0] = result[0:1]   [1, 2] · [2, 4] = [1, 4]
    group 1  lhs[1:3] · rhs[1] = result[1:3]   [2, 2] · [2, 4] = [2, 4]
    total    2 groups, 24 multiply-adds
    """
    return product(lhs, rhs, contracting_dims=contracting_dims, group_offset=group_offset)
