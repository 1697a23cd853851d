"""`moe_mlp` on a mesh with explicit axes: each device has some tokens, some experts, or a part of their width.

    tokens over an axis            each device sorts and multiplies its own; nothing is exchanged forward
    experts, or their width f      each device has a part of the sum of every token; the parts are added up
    both over the same axis        tokens are gathered over it, and the sums are scattered as the tokens were
    tokens and d of the weights    weights are gathered, and sums of their gradients are scattered as they were

The exchange is `[t, d]` once, forward and backward, whatever the number of experts of a token.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array

from trencadis.core.mesh import Axes, Spec, explicit_axes, explicit_mesh, partly_explicit, placed, spec_of
from trencadis.core.programs import run_once
from trencadis.core.spread import spread
from trencadis.moe.layer import Experts
from trencadis.quant.operand import operand_specs
from trencadis.quant.scaled import Scaled

# of tokens [t, d], their experts and weights [t, k], the parameters of experts, and the first of these experts
Apply: TypeAlias = Callable[[Array, Array, Array, Experts, Array], Array]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """The mesh axes over which the tokens, the experts, the width of experts and d of the weights are divided."""

    mesh: AbstractMesh
    tokens: Axes
    experts: Axes
    width: Axes
    along_d: Axes

    @property
    def gathered(self) -> Axes:
        """The axes of the tokens that experts or their width are divided over, too."""
        return tuple(axis for axis in self.tokens if axis in self.experts + self.width)

    @property
    def local(self) -> Axes:
        """The other axes of the tokens: their rows stay on the device."""
        return tuple(axis for axis in self.tokens if axis not in self.gathered)

    @property
    def summed(self) -> Axes:
        """The axes over which results are added up, and which do not divide tokens."""
        return tuple(axis for axis in self.experts + self.width if axis not in self.tokens)


def division_of(x: Array, k: int, experts: Experts) -> Division | None:
    """How a layer is divided over explicit axes, from the types of its operands; None if its products do it better.

    That is so on a mesh with automatic axes, too, and for weights that are not divided alike, or along d, unless tokens
    are divided over the same axes, as in FSDP, and there are so many of them that gathering the weights moves fewer
    numbers than sums of products.
    """
    mesh = explicit_mesh(x, *jax.tree.leaves(experts))
    if mesh is None or partly_explicit(mesh):
        return None
    over = _weight_spec(mesh, experts.up)
    tokens, (of_experts, along_d, width) = spec_of(jax.typeof(x).sharding, mesh, 2)[0], over
    alike = experts.gate is None or _weight_spec(mesh, experts.gate) == over
    alike = alike and _weight_spec(mesh, experts.down) == (of_experts, width, along_d)
    sums = x.shape[0] * k * experts.up.shape[2] * (1 if experts.gate is None else 2)
    fully_sharded = (
        set(along_d) <= set(tokens) and sum(math.prod(w.shape) for w in experts[:3] if w is not None) <= sums
    )
    divided = Division(mesh=mesh, tokens=tokens, experts=of_experts, width=width, along_d=along_d)
    fits = not width or all(_divides(divided, w) for w in experts[:3])
    whole = not along_d or fully_sharded
    return divided if alike and fits and whole and (tokens or of_experts or width) else None


def _weight_spec(mesh: AbstractMesh, w: Any) -> Spec:
    """The mesh axes of each dimension of weights [e, ., .]."""
    if not isinstance(w, Scaled):
        return spec_of(jax.typeof(w).sharding, mesh, 3)
    e, k, n = spec_of(jax.typeof(w.stored).sharding, mesh, 3)
    return (e, n, k) if w.transposed else (e, k, n)


def _divides(division: Division, w: Any) -> bool:
    """Whether shards of the width are whole blocks of scales."""
    parts = math.prod(division.mesh.shape[axis] for axis in division.width)
    if not isinstance(w, Scaled):
        return True
    return not w.interleaved and all(n == 1 or n % parts == 0 for n in w.scale.shape[1:])


def run(apply: Apply, division: Division, *operands: Any) -> Array:
    """The result [t, d] of a layer, divided over the tokens as they are; `apply` is the layer of one device.

    Operands are x, the chosen experts, their weights, the parameters of the experts, and the first of these experts.
    """
    return run_once(_run, (apply, division), *operands)


def _run(
    apply: Apply, division: Division, x: Array, chosen: Array, weights: Array, experts: Experts, first: Array
) -> Array:
    tokens, e, f = (axes or None for axes in (division.tokens, division.experts, division.width))
    d = [None if isinstance(w, Scaled) else division.along_d or None for w in experts[:3]]  # these are moved as bytes
    by_name = Experts((e, d[0], f), (e, d[1], f), (e, f, d[2]), (e, f), (e, f), (e, None))
    params = Experts(*(None if w is None else operand_specs(w, s) for w, s in zip(experts, by_name, strict=True)))
    rows = PartitionSpec(tokens, None)
    specs = (rows, rows, rows, params, PartitionSpec())

    def part(x: Array, chosen: Array, weights: Array, experts: Experts, first: Array) -> Array:
        if division.gathered:
            x, chosen, weights = (lax.all_gather(a, division.gathered, tiled=True) for a in (x, chosen, weights))
        experts = Experts(*(_shared(division, w, d) for w, d in zip(experts, (1, 1, 2, None, None, None), strict=True)))
        if division.experts:
            first = first + lax.axis_index(division.experts).astype(np.int32) * np.int32(experts.up.shape[0])
        if division.width and experts.bias_down is not None:  # it is added once
            bias = jnp.where(lax.axis_index(division.width) == 0, experts.bias_down, 0)
            experts = experts._replace(bias_down=bias)
        y = apply(x, chosen, weights, experts, first)
        y = lax.psum(y, division.summed) if division.summed else y
        return lax.psum_scatter(y, division.gathered, tiled=True) if division.gathered else y

    mapped = jax.shard_map(
        part, mesh=division.mesh, in_specs=specs, out_specs=rows, axis_names=set(explicit_axes(division.mesh))
    )
    return mapped(*placed(division.mesh, (x, chosen, weights, experts, first), specs))


def _shared(division: Division, w: Any, d: int | None) -> Any:
    """A parameter for the tokens of this device: all of its dimension d, and with gradients of all tokens."""
    if w is None or isinstance(w, Scaled):
        return w
    w = spread(w, tuple(axis for axis in division.tokens if axis not in division.along_d))
    return lax.all_gather(w, division.along_d, axis=d, tiled=True) if d is not None and division.along_d else w
