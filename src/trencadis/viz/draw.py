"""What `show` is asked to draw: the schedule of sizes, or the product of grouped tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

from trencadis.gemm.tensor import GroupedTensor
from trencadis.viz.mosaic import Mosaic, schedule
from trencadis.viz.product import Product, product

Axes = Sequence[int]


@overload
def show(
    group_sizes: GroupedTensor,
    tile: GroupedTensor,
    *,
    contracting_dims: tuple[Axes, Axes],
    group_offset: Any = None,
) -> Product: ...
@overload
def show(
    group_sizes: Any, tile: int, *, m: int | None = None, group_offset: Any = None, num_groups: int | None = None
) -> Mosaic: ...
def show(
    group_sizes: Any,
    tile: Any,
    *,
    m: int | None = None,
    group_offset: Any = None,
    num_groups: int | None = None,
    contracting_dims: tuple[Axes, Axes] | None = None,
) -> Mosaic | Product:
    """Who works where: a schedule over row tiles, or a product of grouped tensors. Print it, or save it as a picture.

    `show(group_sizes, tile)` draws the schedule of a kernel. `show(lhs, rhs, contracting_dims=...)` draws which part of
    one grouped tensor `grouped_gemm` multiplies with which part of the other, and where the result goes.

    Args:
      group_sizes: integers, one per group; a list or an array, known now. Or lhs, with sizes known now.
      tile: rows of a tile. Or rhs.
      m: rows; by default the sum of the sizes. Rows past that sum belong to nobody.
      group_offset: the first of the local groups, as in `grouped_matmul`; rows of other groups count as unowned.
      num_groups: how many groups are local; by default all from group_offset on.
      contracting_dims: the axes of lhs, and those of rhs, that are summed over together, as in `grouped_gemm`.

    Returns:
      A `Mosaic`, or a `Product`.

    >>> show([3, 0, 5], tile=4)
    rows    0 1 2 3 │ 4 5 6 7
    group   0 0 0 2 │ 2 2 2 2
    visits  (0,0) (2,0) (2,1)
    total   3 visits, 2 tiles of 4 rows, 8 of 8 rows owned, 1 empty group, 33% waste
    >>> show([100, 150, 50], tile=128).svg()[:4]
    '<svg'
    >>> import jax.numpy as jnp
    >>> x, w = GroupedTensor.ragged_rows(jnp.ones((3, 2)), [1, 2]), GroupedTensor.stacked(jnp.ones((2, 2, 4)))
    >>> show(x, w, contracting_dims=((1,), (1,)))
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
    if not isinstance(group_sizes, GroupedTensor) and not isinstance(tile, GroupedTensor):
        if contracting_dims is not None:
            raise ValueError("contracting_dims: goes with two grouped tensors; got group sizes and a tile")
        return schedule(group_sizes, tile, m=m, group_offset=group_offset, num_groups=num_groups)
    for name, value in (("m", m), ("num_groups", num_groups)):
        if value is not None:
            raise ValueError(f"{name}: goes with group sizes and a tile; grouped tensors say it themselves")
    if contracting_dims is None:
        raise ValueError("contracting_dims: want the axes that are summed over, as in grouped_gemm; got None")
    return product(group_sizes, tile, contracting_dims=contracting_dims, group_offset=group_offset)
