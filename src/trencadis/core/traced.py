"""What a traced program says of meshes: its grouped products, whether XLA divides them, and what devices exchange."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Primitive

from trencadis.core.jax_compat import newly_manual_axes
from trencadis.core.mesh import Axes, entries
from trencadis.core.tiling import Overrides

# by the name of the primitive; of "reshard" the types of its operand and result say which it is
KINDS = {
    "psum": "all-reduce", "psum_invariant": "all-reduce", "all_gather": "all-gather", "all_to_all": "all-to-all",
    "ragged_all_to_all": "all-to-all", "reduce_scatter": "reduce-scatter", "ppermute": "collective-permute",
}  # fmt: skip


class Product(NamedTuple):
    """A grouped product in a traced program."""

    problem: Any
    overrides: Overrides
    partitioned: bool  # whether XLA will divide it over devices
    devices: int = 1  # of the `shard_map` in which it is


class Collective(NamedTuple):
    """An exchange between the devices along some axes of a mesh."""

    kind: str
    axes: Axes
    shape: tuple[int, ...]  # of the array on each device, before a reduce-scatter or after an all-gather
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """The bytes of the array: about what each device sends and receives; twice that for an all-reduce."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        array = f"{self.dtype.name}[{','.join(map(str, self.shape))}]"
        return f"{self.kind} of {array} over {', '.join(map(str, self.axes))}: {self.nbytes:,} bytes"


def products(
    jaxpr: Any,
    primitives: Collection[Primitive],
    partitioned: bool,
    manual: frozenset[Any] = frozenset(),
    devices: int = 1,
) -> Iterator[Product]:
    """The grouped products of a traced program, in order; inside `shard_map`, over which axes the program is manual."""
    for equation in jaxpr.eqns:
        params = equation.params
        if equation.primitive in primitives:
            yield Product(params["problem"], params["overrides"], partitioned, devices)
        inside, axes, several = partitioned, manual, devices
        if equation.primitive.name == "shard_map":
            axes = manual | newly_manual_axes(params)
            inside = spread_mesh(params["mesh"], axes)
            several = devices * math.prod(params["mesh"].shape[axis] for axis in newly_manual_axes(params))
        for inner in programs(params):
            yield from products(inner, primitives, inside, axes, several)


def collectives(jaxpr: Any) -> Iterator[Collective]:
    """The exchanges that a traced program asks for, in order; those that XLA adds by itself are not among them."""
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "reshard":
            yield from _resharding(equation)
        elif name in KINDS:
            axes = params.get("axes", params.get("axis_name", ()))
            axes = axes if isinstance(axes, tuple) else (axes,)
            for given, made in zip(equation.invars, equation.outvars, strict=True):
                aval = max(given.aval, made.aval, key=lambda x: x.size)
                yield Collective(KINDS[name], axes, aval.shape, np.dtype(aval.dtype))
        for inner in programs(params):
            yield from collectives(inner)


def _resharding(equation: Any) -> Iterator[Collective]:
    """The exchange of a change of types: a gather, or an all-to-all if what one dimension loses another gets.

    There is none where the axes of the mesh become explicit or automatic, and arrays stay where they are.
    """
    given, made = (x.aval for x in (equation.invars[0], equation.outvars[0]))
    if given.sharding.mesh.empty or given.sharding.mesh.axis_types != made.sharding.mesh.axis_types:
        return
    before, after = (entries(x.sharding.spec, x.ndim) for x in (given, made))
    lost = tuple(axis for old, new in zip(before, after, strict=True) for axis in old if axis not in new)
    if lost:
        kept = {axis for axes in after for axis in axes}
        kind = "all-to-all" if set(lost) <= kept else "all-gather"
        devices = made.sharding.mesh.shape
        shape = [
            size // math.prod(devices[axis] for axis in axes) for size, axes in zip(made.shape, after, strict=True)
        ]
        yield Collective(kind, lost, tuple(shape), np.dtype(made.dtype))


def programs(params: dict[str, Any]) -> Iterator[Any]:
    """The traced programs among the parameters of an equation."""
    for value in params.values():
        for inner in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield inner


def spread(sharding: Any) -> bool:
    """Whether an array is on several devices."""
    return sharding is not None and getattr(sharding, "num_devices", 1) > 1


def spread_mesh(mesh: Any, manual: Any) -> bool:
    """Whether a mesh has several devices along axes that are not manual."""
    return any(size > 1 for name, size in mesh.shape.items() if name not in manual)


def spreads(jaxpr: Any) -> bool:
    """Whether a traced program is for several devices, as a sharding or a `shard_map` anywhere in it says."""
    for equation in jaxpr.eqns:
        params = equation.params
        shardings = (*params.get("in_shardings", ()), *params.get("out_shardings", ()), params.get("sharding"))
        mesh = params["mesh"] if equation.primitive.name == "shard_map" else None
        if any(map(spread, shardings)) or (mesh is not None and spread_mesh(mesh, ())):
            return True
        if any(map(spreads, programs(params))):
            return True
    return False
