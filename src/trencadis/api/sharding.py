"""`sharded`: says how arrays are sharded, where their types do not."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import PyTreeDef

from trencadis.core.mesh import entries
from trencadis.core.programs import run_once


def sharded(mesh: Mesh | None, *specs: PartitionSpec) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run a function whose arguments are sharded over a mesh in a known way, although its axes are automatic.

    On a mesh with automatic axes XLA decides how arrays are sharded, after the program is traced. Its compiler for TPUs
    cannot be told how to divide a kernel then. Inside of the function the axes of the mesh are explicit, so that every
    grouped product divides itself; see `docs/sharding.md`. It is differentiable, and works on every platform.

    Args:
      mesh: the mesh of the program; None is that of `jax.set_mesh` where the function is called.
      *specs: one for each positional argument; for a quantized array, of its values as they are stored. Keyword
        arguments are passed on as they are, and are not arrays.

    Returns:
      A decorator for functions of arrays, such as `grouped_matmul` or a whole layer.

    >>> from jax.sharding import AxisType, PartitionSpec as P
    >>> import jax.numpy as jnp
    >>> import trencadis as tr
    >>> mesh = jax.make_mesh((1,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    >>> multiply = sharded(mesh, P(), P("expert"), P())(tr.grouped_matmul)
    >>> multiply(jnp.ones((4, 2)), jnp.ones((2, 2, 1)), jnp.array([1, 2])).ravel()
    Array([2., 2., 2., 0.], dtype=float32)
    """
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(f"mesh: want a jax.sharding.Mesh, or None; got {type(mesh).__name__}")
    if mesh is not None:
        _check(mesh)
    for i, spec in enumerate(specs):
        if not isinstance(spec, PartitionSpec):
            raise TypeError(f"specs: want a jax.sharding.PartitionSpec for each argument; number {i} is {spec!r}")
    return functools.partial(_wrapped, mesh, specs)


def _check(mesh: Mesh | AbstractMesh) -> None:
    """The mesh has automatic axes."""
    if mesh.empty:
        raise ValueError("mesh: want a mesh, or one that jax.set_mesh has set; got None, and none is set")
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ValueError(f"mesh: want automatic axes; on explicit ones, types say how arrays are sharded; got {mesh}")


def _wrapped(mesh: Mesh | None, specs: Sequence[PartitionSpec], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        used = jax.sharding.get_abstract_mesh() if mesh is None else mesh
        _check(used)
        if len(args) != len(specs):
            raise TypeError(f"specs: want one for each of {len(args)} positional arguments; got {len(specs)}")
        leaves, tree = jax.tree.flatten(args)
        fitted: list[PartitionSpec] = []
        for number, (spec, arg) in enumerate(zip(specs, args, strict=True)):
            fitted += _fitted_specs(f"specs: number {number}", used, spec, arg)
        program = _Program(function, tuple(options.items()), tree, used, tuple(fitted))
        with jax.sharding.use_abstract_mesh(used.abstract_mesh):
            return run_once(_Program.run, (program,), *map(jax.numpy.asarray, leaves))

    return call


@dataclasses.dataclass(frozen=True, slots=True)
class _Program:
    """A function of leaves that are sharded over a mesh, as its specs say.

    Only programs of this package's functions are compiled once: those of users may read variables that change.
    """

    function: Callable[..., Any]
    options: tuple[tuple[str, Any], ...]
    tree: PyTreeDef
    mesh: Mesh | AbstractMesh
    specs: tuple[PartitionSpec, ...]

    def run(self, *leaves: Any) -> Any:
        shardings = [NamedSharding(self.mesh, spec) for spec in self.specs]
        placed = map(jax.lax.with_sharding_constraint, leaves, shardings)
        return jax.sharding.explicit_axes(self.inside, in_sharding=self.specs)(*placed)

    def inside(self, *leaves: Any) -> Any:
        """The function, where the axes of the mesh are explicit."""
        return self.function(*jax.tree.unflatten(self.tree, leaves), **dict(self.options))


def _fitted_specs(name: str, mesh: Mesh | AbstractMesh, spec: PartitionSpec, arg: Any) -> list[PartitionSpec]:
    """The spec for each array of an argument. Scales of a quantized one leave out axes that do not divide them."""
    for axis in itertools.chain.from_iterable(entries(spec, len(spec))):
        if axis not in mesh.axis_names:
            raise ValueError(f"{name}: want axes of the mesh, {', '.join(map(repr, mesh.axis_names))}; got {axis!r}")
    leaves, fitted = jax.tree.leaves(arg), []
    for leaf in leaves:
        shape = jax.numpy.shape(leaf)
        axes = entries(spec, len(shape))
        divided = [size % math.prod(mesh.shape[a] for a in over) == 0 for over, size in zip(axes, shape, strict=False)]
        if len(leaves) == 1 and (any(axes[len(shape) :]) or not all(divided)):
            raise ValueError(f"{name}: want axes that divide an array of shape {shape} evenly; got {spec} over {mesh}")
        fitted.append(
            PartitionSpec(*(over or None if fits else None for over, fits in zip(axes, divided, strict=False)))
        )
    return fitted
