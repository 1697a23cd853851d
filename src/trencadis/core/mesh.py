"""Meshes in the types of arrays: explicit axes, how arrays are sharded over them, and `jax.shard_map` over them."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from trencadis.core.jax_compat import Value, vmapped_axes

V = TypeVar("V", bound=Value)
Axes: TypeAlias = tuple[Hashable, ...]  # names of mesh axes, the slowest first
Spec: TypeAlias = tuple[Axes, ...]  # over which axes each dimension of an array is sharded


class Over(NamedTuple):
    """The mesh axes over which the dimensions of a grouped product are divided."""

    m: Axes = ()
    k: Axes = ()
    n: Axes = ()
    g: Axes = ()


def explicit_axes(mesh: AbstractMesh) -> dict[Hashable, int]:
    """The explicit axes of a mesh, and how many devices lie along each; without those that `jax.vmap` maps over."""
    taken = vmapped_axes()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = [name for name, kind in kinds if kind == AxisType.Explicit]
    return {name: mesh.shape[name] for name in explicit if name not in taken}


def all_manual(*xs: Value) -> bool:
    """Whether arrays are inside `jax.shard_map`, over all axes of the mesh."""
    meshes = [mesh for x in xs if not (mesh := jax.typeof(x).sharding.mesh).empty]
    return bool(meshes) and all(mesh.are_all_axes_manual for mesh in meshes)


def has_automatic_axes(x: Value) -> bool:
    """Whether an array is on several devices of a mesh with automatic axes, as far as its type says."""
    return AxisType.Auto in _kinds(jax.typeof(x).sharding.mesh)


def partly_explicit(mesh: AbstractMesh) -> bool:
    """Whether some axes of a mesh are explicit, others automatic, and none is manual."""
    return _kinds(mesh) == {AxisType.Auto, AxisType.Explicit}


def _kinds(mesh: AbstractMesh) -> set[AxisType]:
    """The types of the axes along which a mesh has several devices."""
    return {kind for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if mesh.shape[name] > 1}


def is_local(*xs: Value) -> bool:
    """Whether arrays are those of one device, as far as their types say: without a mesh, or inside `jax.shard_map`."""
    return all(_kinds(jax.typeof(x).sharding.mesh) <= {AxisType.Manual} for x in xs)


def explicit_mesh(*xs: Value) -> AbstractMesh | None:
    """The mesh of arrays whose types say how they are sharded; None if there is none, or it has no explicit axis."""
    for x in xs:
        mesh: AbstractMesh = jax.typeof(x).sharding.mesh
        if not mesh.empty:
            return mesh if explicit_axes(mesh) else None
    return None


def entries(spec: PartitionSpec, rank: int) -> Spec:
    """The mesh axes of each of `rank` dimensions."""
    found = [() if each is None else each if isinstance(each, tuple) else (each,) for each in spec]
    return (*found, *((),) * (rank - len(found)))


def spec_of(sharding: Any, mesh: AbstractMesh, rank: int) -> Spec:
    """The explicit mesh axes of each of `rank` dimensions, from a sharding or a `PartitionSpec`."""
    known = explicit_axes(mesh)
    found = entries(getattr(sharding, "spec", sharding), rank)
    return tuple(tuple(axis for axis in axes if axis in known) for axes in found)


def resharded(x: Array, mesh: AbstractMesh, spec: Sequence[Axes]) -> Array:
    """The array with the type that its dimensions are sharded over these mesh axes."""
    wanted = PartitionSpec(*(axes or None for axes in spec))
    if not jax.typeof(x).sharding.mesh.empty and spec_of(jax.typeof(x).sharding, mesh, x.ndim) == tuple(spec):
        return x
    return jax.sharding.reshard(x, NamedSharding(mesh, wanted))


def mapped_alike(xs: Sequence[V], axes: Sequence[int | None]) -> Sequence[V | Array]:
    """Arrays that `jax.vmap` maps along these axes, all of them sharded along theirs over the same explicit axes."""
    found = [(jax.typeof(x).sharding, axis) for x, axis in zip(xs, axes, strict=True) if axis is not None]
    over = {sharding.spec[axis] for sharding, axis in found}
    if len(over) < 2:
        return xs
    mesh, (chosen, *_) = found[0][0].mesh, [each for each in over if each is not None]

    def along(x: V, axis: int | None) -> V | Array:
        if axis is None or jax.typeof(x).sharding.spec[axis] == chosen:
            return x
        spec = list(jax.typeof(x).sharding.spec)
        spec[axis] = chosen
        return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*spec)))

    return [along(x, axis) for x, axis in zip(xs, axes, strict=True)]


def placed(mesh: AbstractMesh | Mesh, given: Any, specs: Any) -> Any:
    """A pytree of arrays, each sharded over explicit axes of a mesh as its spec says."""
    return jax.tree.map(lambda x, spec: jax.sharding.reshard(x, NamedSharding(mesh, spec)), given, specs)


def sharding_of(x: Value) -> NamedSharding | None:
    """How an array is sharded over explicit axes of a mesh; None if there are none."""
    return jax.typeof(x).sharding if explicit_mesh(x) is not None else None


def resharded_like(x: Array, like: Value) -> Array:
    """The array, sharded over explicit axes like another of its shape."""
    mesh = explicit_mesh(like)
    return x if mesh is None else resharded(x, mesh, spec_of(jax.typeof(like).sharding, mesh, x.ndim))


def resharded_as(x: Array, sharding: NamedSharding) -> Array:
    """The array, sharded over explicit axes as its type is to be."""
    mesh = sharding.mesh.abstract_mesh
    if mesh.empty or jax.typeof(x).sharding.spec == sharding.spec or not explicit_axes(mesh):
        return x
    return resharded(x, mesh, spec_of(sharding, mesh, x.ndim))


def flattened(x: Array, axes: int) -> Array:
    """The array with its first axes, so many, as one, over all explicit mesh axes that these are sharded over.

    >>> flattened(jax.numpy.ones((2, 3, 4)), 2).shape
    (6, 4)
    """
    shape = (math.prod(x.shape[:axes]), *x.shape[axes:])
    mesh = explicit_mesh(x)
    if mesh is None:
        return x.reshape(shape)
    spec = spec_of(jax.typeof(x).sharding, mesh, x.ndim)
    return reshaped(x, shape, mesh, (sum(spec[:axes], ()), *spec[axes:]))


def unflattened(x: Array, like: Array) -> Array:
    """The array with the shape of another, sharded over explicit mesh axes as that one is."""
    mesh = explicit_mesh(like)
    if mesh is None:
        return x.reshape(like.shape)
    return reshaped(x, like.shape, mesh, spec_of(jax.typeof(like).sharding, mesh, like.ndim))


def reshaped(x: Array, shape: Sequence[int], mesh: AbstractMesh, spec: Spec) -> Array:
    """The array in another shape, whose dimensions are sharded over these explicit mesh axes."""
    sharding = NamedSharding(mesh, PartitionSpec(*(axes or None for axes in spec)))
    return lax.reshape(x, shape, out_sharding=sharding)


def mapped(
    function: Callable[..., Any],
    mesh: AbstractMesh,
    operands: Sequence[Sequence[Axes]],
    results: Any,
    axes: Iterable[Hashable],
) -> Callable[..., Any]:
    """A function of one device's parts as a function of sharded arrays, over some explicit axes of a mesh.

    Each of `operands` says over which axes the dimensions of an array are sharded, `results` likewise, as one or as a
    list; arrays of another type are resharded.
    """

    def spec(dimensions: Sequence[Axes]) -> PartitionSpec:
        return PartitionSpec(*(each or None for each in dimensions))

    out = [spec(each) for each in results] if isinstance(results, list) else spec(results)
    inside = jax.shard_map(
        function, mesh=mesh, in_specs=tuple(map(spec, operands)), out_specs=out, axis_names=set(axes)
    )

    def call(*xs: Array) -> Any:
        return inside(*(resharded(x, mesh, each) for x, each in zip(xs, operands, strict=True)))

    return call


def with_automatic_axes(
    function: Callable[..., Array], mesh: AbstractMesh, result: Sequence[Axes]
) -> Callable[..., Array]:
    """A function inside of which all axes of a mesh are automatic, so that XLA divides its products.

    Its result is sharded over explicit axes as `result` says.
    """
    spec = PartitionSpec(*(axes or None for axes in result))
    names: Any = tuple(explicit_axes(mesh))
    return jax.sharding.auto_axes(function, axes=names, out_sharding=NamedSharding(mesh, spec))


def replicated(x: V) -> V:
    """The array with no dimension sharded over an explicit mesh axis; shards are gathered where there are any."""
    sharding: NamedSharding = jax.typeof(x).sharding
    if all(axis is None for axis in sharding.spec):
        return x
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(*(None,) * x.ndim)))


def repeated(x: Array, times: int, axis: int) -> Array:
    """Each entry along an axis repeated so many times, as `jnp.repeat` has it, also along an explicit mesh axis.

    >>> repeated(jax.numpy.array([3, 5]), 2, 0).tolist()
    [3, 3, 5, 5]
    """
    shape = (*x.shape[: axis + 1], times, *x.shape[axis + 1 :])
    spread = lax.broadcast_in_dim(x, shape, tuple(i + (i > axis) for i in range(x.ndim)))
    return lax.collapse(spread, axis, axis + 2)
