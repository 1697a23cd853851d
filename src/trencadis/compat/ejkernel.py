"""ejkernel's grouped matmul: `from trencadis.compat.ejkernel import grouped_matmul`, and its two companions.

The signatures are ejkernel's. On every backend the product is added to existing_out, as ejkernel's documentation says;
precision is honoured; m need not be divisible by the tile; unowned rows are 0, in results and in gradients. Operands
are arrays of floats, or a `trencadis.quant.Scaled` or `qwix.QArray`; for integers use `trencadis.grouped_matmul`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from trencadis.api import matmul as api
from trencadis.api.matmul import make_group_metadata as make_group_metadata
from trencadis.compat import DEFAULT_TILE, PeerTiling, none_if_default, tilings
from trencadis.quant.operand import array_operand
from trencadis.quant.scaled import Scaled


def grouped_matmul(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "g k n"],
    group_sizes: Integer[Array, " groups"],
    preferred_element_type: Any = jnp.float32,
    tiling: PeerTiling = DEFAULT_TILE,
    group_offset: Any = None,
    existing_out: Float[Array, "m n"] | None = None,
    transpose_rhs: bool = False,
    interpret: bool = False,
    precision: Any = jax.lax.Precision.DEFAULT,
) -> Float[Array, "m n"]:
    """Multiply groups of rows, each by its own matrix: `out[s_i:e_i] = lhs[s_i:e_i] @ rhs[i]`.

    Arguments that are not listed are those of `trencadis.grouped_matmul`.

    Args:
      tiling: None or the default for planned tiles; else three numbers, or a function as `trencadis.compat.tilings`
        reads it. ejkernel reuses the forward tile for the gradients unchanged; here the size for k stays with k.

    >>> x, w = jnp.ones((300, 64)), jnp.ones((3, 64, 32))
    >>> grouped_matmul(x, w, jnp.array([100, 150, 50])).shape  # m need not be divisible by the tile
    (300, 32)
    """
    lhs, rhs = _floats(lhs=lhs, rhs=rhs)
    return api.grouped_matmul(
        lhs, rhs, group_sizes, preferred_element_type, tilings(tiling), 0 if group_offset is None else group_offset,
        existing_out, transpose_rhs,
        interpret, precision,
    )  # fmt: skip


def transposed_grouped_matmul(
    lhs: Float[Array, "k m"],
    rhs: Float[Array, "m n"],
    group_sizes: Integer[Array, " groups"],
    preferred_element_type: Any = jnp.float32,
    tiling: PeerTiling = DEFAULT_TILE,
    group_offset: Any = None,
    num_actual_groups: int | None = None,
    existing_out: Float[Array, "g k n"] | None = None,
    interpret: bool = False,
) -> Float[Array, "g k n"]:
    """Multiply groups of columns by the rows that match: `out[i] = lhs[:, s_i:e_i] @ rhs[s_i:e_i]`.

    Arguments that are not listed are those of `trencadis.transposed_grouped_matmul`.

    Args:
      tiling: None or the default for planned tiles; else three numbers or a function of (m, k, n).
      num_actual_groups: the number of groups to compute; by default all from group_offset on, as ejkernel documents
        (its code computes as many as group_sizes has). Needed when group_offset is traced.

    >>> x, y = jnp.ones((64, 300)), jnp.ones((300, 32))
    >>> transposed_grouped_matmul(x, y, jnp.array([100, 150, 50]))[:, 0, 0]
    Array([100., 150.,  50.], dtype=float32)
    """
    lhs, rhs = _floats(lhs=lhs, rhs=rhs)
    return api.transposed_grouped_matmul(
        lhs, rhs, group_sizes, preferred_element_type, none_if_default(tiling), group_offset, num_actual_groups,
        existing_out, interpret,
    )  # fmt: skip


def _floats(**operands: Any) -> tuple[Array, ...]:
    """The operands as arrays, in order; a TypeError that names the argument unless their dtypes are floats."""
    arrays: dict[str, Any] = {name: array_operand(name, x) for name, x in operands.items()}
    for name, x in arrays.items():
        if not isinstance(x, Scaled) and not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(
                f"{name}: want a floating point dtype; got {x.dtype} (trencadis.grouped_matmul takes integers too)"
            )
    return tuple(arrays.values())
