"""Everything that depends on JAX's internals or on its version, in one place.

Written for jax 0.10.2 to 0.12. Nothing outside this file asks for a version or touches a manual axis type.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.core import ShapedArray
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

JAX = tuple(int(part) for part in jax.__version__.split(".")[:2])

# XLA:CPU of jax < 0.12 turns a slice of a narrow float array inside a loop into a conversion of the whole array.
SLICES_WIDEN_NARROW_FLOATS = JAX < (0, 12)


def varying_axes(x: Any) -> frozenset[Any]:
    """The manual mesh axes over which x varies inside `jax.shard_map`; empty outside."""
    axes: frozenset[Any] = jax.typeof(x).manual_axis_type.varying
    return axes


def replicated(x: Any) -> Any:
    """The array with no dimension sharded over an explicit mesh axis; shards are gathered where there are any."""
    sharding = jax.typeof(x).sharding
    if all(axis is None for axis in sharding.spec):
        return x
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*(None,) * x.ndim)))


def vary_alike(*xs: Any) -> tuple[Any, ...]:
    """The arrays, each varying over every manual mesh axis that one of them varies over."""
    axes = [varying_axes(x) for x in xs]
    union = frozenset().union(*axes)
    return tuple(
        lax.pcast(x, tuple(sorted(union - mine, key=str)), to="varying") if union - mine else x
        for x, mine in zip(xs, axes, strict=True)
    )


def result_type(operands: tuple[ShapedArray, ...], shape: tuple[int, ...], dtype: Any) -> ShapedArray:
    """The type of a result that varies as its operands do and is sharded over no automatic axis by itself."""
    mesh = operands[0].sharding.mesh
    if mesh.empty:
        return ShapedArray(shape, dtype)
    varying = frozenset().union(*(x.manual_axis_type.varying for x in operands))
    return ShapedArray(
        shape,
        dtype,
        sharding=NamedSharding(mesh, PartitionSpec(*(None,) * len(shape))),
        manual_axis_type=operands[0].manual_axis_type.update(varying=varying),
    )


def without_mesh() -> Any:
    """A context in which types carry no sharding."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))
