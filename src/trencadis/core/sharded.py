"""Grouped products on a mesh with explicit axes: shardings are read from types, and each device computes its part.

The product runs under `jax.shard_map`, so that kernels see the arrays of one device, and derivatives, batching and
rematerialization are those of the product inside it.
"""

from __future__ import annotations

import functools
from typing import TypeAlias

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from trencadis.core import autodiff
from trencadis.core.jax_compat import Value, vmapped_axes
from trencadis.core.mesh import (
    Spec,
    explicit_axes,
    explicit_mesh,
    mapped,
    partly_explicit,
    resharded,
    spec_of,
    with_automatic_axes,
)
from trencadis.core.partition import Partition, compute, partition
from trencadis.core.problem import Problem
from trencadis.core.tiling import Overrides

OutSharding: TypeAlias = NamedSharding | PartitionSpec | None


def run(problem: Problem, overrides: Overrides, *operands: Value, out_sharding: OutSharding = None) -> Array:
    """The result of a problem whose operands may be sharded over explicit axes of a mesh."""
    mesh = explicit_mesh(*operands)
    if mesh is None:
        return autodiff.run(problem, overrides, *operands)
    part = partition_of(problem, mesh, operands, out_sharding)
    if vmapped_axes() and not any(map(any, (*part.operands, part.result))):
        return autodiff.run(problem, overrides, *operands)  # batching divides it; inside of shard_map it would not
    call = _by_rule if partly_explicit(mesh) else _on_mesh
    out = call(*operands, part=part, overrides=overrides, mesh=mesh)
    return out if out_sharding is None else resharded(out, mesh, spec_of(out_sharding, mesh, out.ndim))


def partition_of(
    problem: Problem, mesh: AbstractMesh, operands: tuple[Value, ...], out_sharding: OutSharding = None
) -> Partition:
    """How a problem is divided over the explicit axes of a mesh, from the types of its operands."""
    specs = [spec_of(jax.typeof(x).sharding, mesh, x.ndim) for x in operands]
    wanted: Spec | None = None
    if out_sharding is not None:
        wanted = spec_of(out_sharding, mesh, len(problem.out_shape))
    return partition(problem, specs, explicit_axes(mesh), wanted)


@functools.partial(jax.jit, static_argnames=("part", "overrides", "mesh"))
def _by_rule(*operands: Value, part: Partition, overrides: Overrides, mesh: AbstractMesh) -> Array:
    """The result on a mesh some of whose axes are automatic: XLA divides the product over all of them."""
    return with_automatic_axes(functools.partial(autodiff.run, part.problem, overrides), mesh, part.result)(*operands)


@functools.partial(jax.jit, static_argnames=("part", "overrides", "mesh"))
def _on_mesh(*operands: Value, part: Partition, overrides: Overrides, mesh: AbstractMesh) -> Array:
    """The result on all devices; a function of its own, so that equal products are lowered once."""

    def multiply(problem: Problem, *operands: Value) -> Array:
        return autodiff.run(problem, overrides, *operands)

    function = functools.partial(compute, part, multiply)
    return mapped(function, mesh, part.operands, part.result, dict(part.devices))(*operands)
