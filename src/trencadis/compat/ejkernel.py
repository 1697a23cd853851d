"""ejkernel's grouped matmul: `from trencadis.compat.ejkernel import grouped_matmul`, and its two companions.

Signatures are ejkernel's. existing_out is added to, as its documentation says, on every backend; precision is
honoured; any m runs; rows that no group covers are 0, in results and in gradients. Operands are floating point numbers,
or a `trencadis.quant.Scaled` or `qwix.QArray` that stands for them: for integers there is `trencadis.grouped_matmul`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from trencadis.api import matmul as api
from trencadis.api.matmul import make_group_metadata as make_group_metadata
from trencadis.compat import CUBE, planned, tilings
from trencadis.quant.operand import array_operand
from trencadis.quant.scaled import Scaled


def grouped_matmul(
    lhs: Float[Array, "m k"],
    rhs: Float[Array, "g k n"],
    group_sizes: Integer[Array, " groups"],
    preferred_element_type: Any = jnp.float32,
    tiling: Any = CUBE,
    group_offset: Any = None,
    existing_out: Float[Array, "m n"] | None = None,
    transpose_rhs: bool = False,
    interpret: bool = False,
    precision: Any = jax.lax.Precision.DEFAULT,
) -> Float[Array, "m n"]:
    """`out[s_i:e_i] = lhs[s_i:e_i] @ rhs[i]`. Arguments not named here are those of `trencadis.grouped_matmul`.

    Args:
      tiling: None or the default for planned tiles; else three numbers, or a function as `trencadis.compat.tilings`
        reads it. ejkernel reuses the forward tile for the gradients as it stands; here k's number stays with k.

    >>> x, w = jnp.ones((300, 64)), jnp.ones((3, 64, 32))
    >>> grouped_matmul(x, w, jnp.array([100, 150, 50])).shape  # m need not be divisible by the tile
    (300, 32)
    """
    lhs, rhs = _floats(lhs=lhs, rhs=rhs)
    return api.grouped_matmul(
        lhs, rhs, group_sizes, preferred_element_type, tilings(tiling), group_offset, existing_out, transpose_rhs,
        interpret, precision,
    )  # fmt: skip


def transposed_grouped_matmul(
    lhs: Float[Array, "k m"],
    rhs: Float[Array, "m n"],
    group_sizes: Integer[Array, " groups"],
    preferred_element_type: Any = jnp.float32,
    tiling: Any = CUBE,
    group_offset: Any = None,
    num_actual_groups: int | None = None,
    existing_out: Float[Array, "g k n"] | None = None,
    interpret: bool = False,
) -> Float[Array, "g k n"]:
    """`out[i] = lhs[:, s_i:e_i] @ rhs[s_i:e_i]`. Other arguments: those of `trencadis.transposed_grouped_matmul`.

    Args:
      tiling: None or the default for planned tiles; else three numbers or a function of (m, k, n).
      num_actual_groups: by default all groups from group_offset on, as ejkernel documents (its code computes as many
        as group_sizes has). Needed when group_offset is traced.

    >>> x, y = jnp.ones((64, 300)), jnp.ones((300, 32))
    >>> transposed_grouped_matmul(x, y, jnp.array([100, 150, 50]))[:, 0, 0]
    Array([100., 150.,  50.], dtype=float32)
    """
    lhs, rhs = _floats(lhs=lhs, rhs=rhs)
    return api.transposed_grouped_matmul(
        lhs, rhs, group_sizes, preferred_element_type, planned(tiling), group_offset, num_actual_groups, existing_out,
        interpret,
    )  # fmt: skip


def _floats(**operands: Any) -> tuple[Array, ...]:
    arrays: dict[str, Any] = {name: array_operand(name, x) for name, x in operands.items()}
    for name, x in arrays.items():
        if not isinstance(x, Scaled) and not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(
                f"{name}: want a floating point dtype; got {x.dtype} (trencadis.grouped_matmul takes integers too)"
            )
    return tuple(arrays.values())
