"""Megablox, on every platform: `from trencadis.compat.megablox import gmm, tgmm, make_group_metadata`.

The signatures and error texts are those of `jax.experimental.pallas.ops.tpu.megablox`; `gmm` also takes the nine-number
tiling and the `interpret=None` of MaxText's megablox. Where this module differs, it does more:

- m, the dtypes of the operands and the integer dtype of group_sizes may be any; group_offset may be an int or have
  shape `(1,)`;
- unowned rows are 0, in results and in gradients, where the original leaves uninitialized memory;
- either operand may be a `trencadis.quant.Scaled` or, as in MaxText, a `qwix.QArray`, also with existing_out;
- operands that do not match in k or in the number of groups raise an error;
- every derivative exists, also of `tgmm`, and the gradient of existing_out is right.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Integer, Num

from trencadis.api.matmul import grouped_matmul, transposed_grouped_matmul
from trencadis.api.matmul import make_group_metadata as make_group_metadata
from trencadis.compat import DEFAULT_TILE, PeerTiling, none_if_default, tilings
from trencadis.core import arguments
from trencadis.core.spans import owned_by_window
from trencadis.quant.operand import array_operand


def gmm(
    lhs: Num[Array, "m k"],
    rhs: Num[Array, "g k n"],
    group_sizes: Integer[Array, " groups"],
    preferred_element_type: Any = jnp.float32,
    tiling: PeerTiling = DEFAULT_TILE,
    group_offset: Any = None,
    existing_out: Num[Array, "m n"] | None = None,
    transpose_rhs: bool = False,
    interpret: bool | None = False,
) -> Num[Array, "m n"]:
    """Multiply groups of rows, each by its own matrix: `out[s_i:e_i] = lhs[s_i:e_i] @ rhs[i]`.

    Arguments that are not listed are those of `trencadis.grouped_matmul`.

    Args:
      tiling: three numbers, nine, or a function, as `trencadis.compat.tilings` reads them. The default means planned
        tiles. None, or a function that returns None for this call, raises.
      existing_out: owned rows are overwritten and the others keep its values (`trencadis.grouped_matmul` adds). The
        gradient of an overwritten row is 0.
      interpret: None means False.

    >>> x, w, old = jnp.ones((3, 2)), jnp.ones((1, 2, 1)), jnp.full((3, 1), 7.0)
    >>> gmm(x, w, jnp.array([2]), existing_out=old).reshape(3)
    Array([2., 2., 7.], dtype=float32)
    """
    _check_existing_dtype(existing_out, preferred_element_type)
    lhs, rhs, group_sizes = checked(lhs, rhs, group_sizes, group_offset, rhs_rank=3)
    tiling = _nothing if tiling is None else tiling
    tiles = tilings(tiling)
    if callable(tiling):
        tiles = dataclasses.replace(tiles, forward=_found(tiling))
    out = grouped_matmul(
        lhs, rhs, group_sizes, preferred_element_type, tiles, 0 if group_offset is None else group_offset,
        transpose_rhs=transpose_rhs, interpret=False if interpret is None else interpret,
    )  # fmt: skip
    return overwritten(out, existing_out, group_sizes, group_offset, rhs.shape[0])


def tgmm(
    lhs: Num[Array, "k m"],
    rhs: Num[Array, "m n"],
    group_sizes: Integer[Array, " groups"],
    preferred_element_type: Any = jnp.float32,
    tiling: PeerTiling = DEFAULT_TILE,
    group_offset: Any = None,
    num_actual_groups: int | None = None,
    existing_out: Num[Array, "g k n"] | None = None,
    interpret: bool | None = False,
) -> Num[Array, "g k n"]:
    """Multiply groups of columns by the rows that match: `out[i] = lhs[:, s_i:e_i] @ rhs[s_i:e_i]`.

    Arguments that are not listed are those of `trencadis.transposed_grouped_matmul`.

    Args:
      tiling: three numbers or a function of (m, k, n). The default means planned tiles. None, or a function that
        returns None, raises.
      num_actual_groups: the number of groups to compute; by default as many as group_sizes has, whatever group_offset
        is. Groups past the last one are empty, so that their matrices are 0.
      existing_out: the product is added to it, as in megablox.
      interpret: None means False.

    >>> tgmm(jnp.ones((1, 3)), jnp.ones((3, 1)), jnp.array([1, 2]), group_offset=1).reshape(2)
    Array([2., 0.], dtype=float32)
    """
    _check_existing_dtype(existing_out, preferred_element_type)
    lhs, rhs, group_sizes = checked(lhs, rhs, group_sizes, group_offset, rhs_rank=2)
    groups = group_sizes.shape[0]
    count = groups if num_actual_groups is None else _count(num_actual_groups)
    if group_offset is not None or count > groups:
        pad = np.pad if isinstance(group_sizes, np.ndarray) else jnp.pad  # concrete sizes stay concrete under jit
        group_sizes = pad(group_sizes, (0, count))
    tiling = _nothing if tiling is None else tiling
    tile = _found(tiling) if callable(tiling) else none_if_default(tiling)
    return transposed_grouped_matmul(
        lhs,
        rhs,
        group_sizes,
        preferred_element_type,
        tile,
        group_offset,
        count,
        existing_out,
        False if interpret is None else interpret,
    )


def overwritten(out: Array, existing_out: Any, group_sizes: Any, group_offset: Any, groups: int) -> Array:
    """existing_out with the rows of so many groups replaced by those of out; out itself if there is no existing_out."""
    if existing_out is None:
        return out
    arguments.check_existing_out(existing_out, out.shape, out.dtype)
    mine = owned_by_window(group_sizes, out.shape[0], arguments.first_group(group_offset), groups)
    return jnp.where(mine[:, None], out, existing_out)


def _nothing(m: int, k: int, n: int) -> None:
    """A tiling function that has no tile for any problem."""
    del m, k, n


def _found(table: Callable[[int, int, int], Any]) -> Callable[[int, int, int], Any]:
    """The tiling function, raising megablox's error where it returns None."""

    def ask(m: int, k: int, n: int) -> Any:
        tile = table(m, k, n)
        if tile is None:
            raise ValueError(f"No tuned tiling found for (m, k, n) = ({m}, {k}, {n})")
        return tile

    return ask


def checked(lhs: Any, rhs: Any, group_sizes: Any, group_offset: Any, *, rhs_rank: int) -> tuple[Any, Any, Any]:
    """The operands and sizes as arrays; what megablox refuses raises its error, the operation checks the rest."""
    lhs, rhs, group_sizes = array_operand("lhs", lhs), array_operand("rhs", rhs), arguments.as_sizes(group_sizes)
    shape = jnp.shape(group_offset) if group_offset is not None else ()
    if shape not in ((), (1,)):
        raise ValueError(f"group_offset must be a ()-shaped array. Got: {shape}.")
    if lhs.ndim != 2:
        raise ValueError(f"Expected 2-tensor for 'lhs' but got {lhs.ndim}-tensor.")
    if rhs.ndim != rhs_rank:
        raise ValueError(f"Expected {rhs_rank}-tensor for 'rhs' but got {rhs.ndim}-tensor.")
    if group_sizes.ndim != 1:
        raise ValueError(f"Expected 1-tensor for 'group_sizes' but got {group_sizes.ndim}-tensor.")
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise ValueError(f"Expected 32-bit integer 'group_sizes' but got {group_sizes.dtype}.")
    return lhs, rhs, group_sizes


def _count(num_actual_groups: Any) -> int:
    """num_actual_groups as an int, or an error that names it."""
    try:
        count = operator.index(num_actual_groups)
    except TypeError:
        count = -1
    if count < 0 or isinstance(num_actual_groups, bool):
        raise ValueError(f"num_actual_groups: want None or a nonnegative int; got {num_actual_groups!r}")
    return count


def _check_existing_dtype(existing_out: Any, preferred_element_type: Any) -> None:
    """Raise megablox's error if existing_out has another dtype than the result."""
    if existing_out is None:
        return
    if not hasattr(existing_out, "dtype"):
        raise TypeError(f"existing_out: want an array; got {type(existing_out).__name__}")
    if existing_out.dtype != arguments.result_dtype(preferred_element_type):
        raise ValueError("Existing output dtype must match preferred_element_type.")
