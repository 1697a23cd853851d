"""Cotangents that are sharded like the arrays they belong to, over automatic axes of a mesh.

XLA infers shardings from operands to results. The gradient of matrices, a contraction, has groups only in its result:
if nothing says that these are sharded, each device computes all of them. On explicit axes types say it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Effect, Primitive
from jax.interpreters import ad
from jaxtyping import Array

from trencadis.core.jax_compat import Value
from trencadis.core.mesh import has_automatic_axes
from trencadis.core.primitive import Divided, Factors, Rules, register
from trencadis.core.target import Target

alike_p = Primitive("sharded_alike")


def sharded_like(x: Any, like: Value) -> Any:
    """x, which is sharded like another array of its shape, as its cotangent is; on a mesh with automatic axes."""
    return alike_p.bind(x, like, rank=like.ndim) if has_automatic_axes(like) else x


def _abstract(x: ShapedArray, like: ShapedArray, *, rank: int) -> tuple[ShapedArray, set[Effect]]:
    return x, set()


def _jvp(primals: Sequence[Value], tangents: Sequence[Any], *, rank: int) -> tuple[Array, Any]:
    (x, like), (d_x, _) = primals, tangents
    out = alike_p.bind(x, like, rank=rank)
    return out, d_x if isinstance(d_x, ad.Zero) else alike_p.bind(d_x, like, rank=rank)


def _transpose(ct: Any, x: Any, like: Value, *, rank: int) -> Sequence[Any]:
    return [ct if isinstance(ct, ad.Zero) else alike_p.bind(ct, like, rank=rank), None]


def _batch(operands: Sequence[Value], axes: Sequence[int | None], *, rank: int) -> tuple[Array, int]:
    (size,) = {x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None}
    x, like = (
        jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(operands, axes, strict=True)
    )
    return alike_p.bind(x, like, rank=rank + 1), 0


def _execute(x: Array, like: Array, *, rank: int, target: Target) -> Array:
    return x


def _divide(specs: Sequence[Any], devices: Mapping[Hashable, int], wanted: Any, *, rank: int) -> Divided:
    return Divided(lambda x, _: x, [specs[1], specs[1]], specs[1])


def _factors(*, rank: int) -> Factors:
    names = [f"d{i}" for i in range(rank)]
    return Factors([names, names], names)


register(alike_p, Rules(lambda x, like, rank: x, _abstract, _jvp, _transpose, _batch, _execute, _divide, _factors))
