"""The rules of a primitive: derivatives, batching, and its lowering, divided over the automatic axes of a mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Effect, Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from trencadis.core.jax_compat import (
    ANY_TPU,
    IrValue,
    partitioned,
    require_devices,
    spec_from_xla,
    target,
    without_mesh,
    without_vma,
)
from trencadis.core.mesh import entries

# The platforms on which XLA asks a rule how to divide a primitive over automatic axes of a mesh; TPU is not among them.
DIVIDED_BY_RULE = ("cpu", "cuda", "rocm")


class Factors(NamedTuple):
    """The dimensions of a primitive's operands and of its result by name, as Shardy's sharding rules have them."""

    operands: Sequence[Sequence[str]]
    result: Sequence[str]
    whole: Sequence[str] = ()  # dimensions that are never divided


class Divided(NamedTuple):
    """What each device computes of a primitive: a function of its parts of the operands; how all arrays are divided."""

    function: Callable[..., Any]
    operands: Sequence[Sequence[tuple[Hashable, ...]]]
    result: Sequence[tuple[Hashable, ...]]


class Rules(NamedTuple):
    """The rules of a primitive."""

    impl: Callable[..., Any]
    abstract: Callable[..., tuple[Any, set[Effect]]]
    jvp: Callable[..., tuple[Any, Any]]
    transpose: Callable[..., Sequence[Any]] | None
    batch: Callable[..., tuple[Any, Any]]
    execute: Callable[..., Any]  # what it lowers to, from its operands, its parameters and a `target`
    divide: Callable[..., Divided] | None = None  # over a mesh with automatic axes: see `Divided`
    factors: Callable[..., Factors] | None = None


def register(primitive: Primitive, rules: Rules) -> None:
    """Give a primitive its rules, the last of them on every platform."""

    def impl(*operands: Any, **params: Any) -> Any:
        with jax.disable_jit(False):  # there is nothing below a primitive to run without jit
            return rules.impl(*operands, **params)

    primitive.def_impl(impl)
    primitive.def_effectful_abstract_eval(rules.abstract)
    ad.primitive_jvps[primitive] = rules.jvp
    if rules.transpose is not None:
        ad.primitive_transposes[primitive] = rules.transpose
    batching.primitive_batchers[primitive] = rules.batch
    for platform in ("cpu", "cuda", "rocm", "tpu", None):  # None: any other
        rule = functools.partial(_lower, primitive, rules, platform=platform or "other")
        mlir.register_lowering(primitive, rule, platform=platform, inline=False)
    if rules.divide is not None:
        require_devices(primitive)


def _lower(
    primitive: Primitive, rules: Rules, context: mlir.LoweringRuleContext, *operands: IrValue,
    platform: str, **params: Any,
) -> Sequence[IrValue]:  # fmt: skip
    """The program of a call, traced without meshes: what it makes is local by then.

    A kernel's references, and what it returns, cannot vary over manual axes or be sharded over explicit ones.
    """
    several = primitive.multiple_results
    if rules.divide is not None and divided_by_rule(context, platform):
        call = _divided(primitive, rules, params)
    else:
        call = functools.partial(rules.execute, target=target(context, platform), **params)
    avals_in: Sequence[Any] = context.avals_in  # the types of arrays
    plain = context.replace(
        avals_in=[ShapedArray(x.shape, x.dtype, weak_type=x.weak_type) for x in avals_in],
        avals_out=[ShapedArray(x.shape, x.dtype, weak_type=x.weak_type) for x in context.avals_out],
    )
    kind = (target(context, platform).kind or ANY_TPU) if platform == "tpu" else None
    with without_vma(), without_mesh(kind):
        out = mlir.lower_fun(call, multiple_results=several)(plain, *operands)
    if plain.tokens_out is not None:  # of a kernel that is interpreted
        context.set_tokens_out(plain.tokens_out)
    return out


def divided_by_rule(context: mlir.LoweringRuleContext, platform: str) -> bool:
    """Whether XLA will ask how to divide a primitive: on CPU and GPU, over the automatic axes of a mesh.

    The compiler for TPUs knows no custom partitioning, nor does any inside `jax.shard_map`. A program that is exported
    cannot call Python, and an interpreted kernel has effects, which cannot be divided.
    """
    module = context.module_context
    mesh = getattr(module.axis_context, "abstract_mesh", None)
    if platform not in DIVIDED_BY_RULE or mesh is None or not partitioned(context):
        return False
    return not (module.lowering_parameters.for_export or len(context.tokens_in))


def _divided(primitive: Primitive, rules: Rules, params: dict[str, Any]) -> Callable[..., Any]:
    """The call of a primitive that XLA divides over a mesh by the rules of the primitive."""
    assert rules.divide is not None and rules.factors is not None
    divide, factors = rules.divide, rules.factors(**params)
    call = custom_partitioning(lambda *operands: primitive.bind(*operands, **params))

    def parts(mesh: jax.sharding.Mesh, operands: Sequence[Any], result: Any) -> tuple[Any, ...]:
        mesh = _in_primes(mesh)
        *specs, result_spec = (entries(spec_from_xla(x, mesh), len(x.shape)) for x in (*operands, result))
        found = divide(specs, dict(mesh.shape), result_spec, **params)
        sharding = [NamedSharding(mesh, PartitionSpec(*(axes or None for axes in spec))) for spec in found.operands]
        out = NamedSharding(mesh, PartitionSpec(*(axes or None for axes in found.result)))

        def local(*operands: Any) -> Any:
            with without_mesh():
                return found.function(*operands)

        return mesh, local, out, tuple(sharding)

    names = dict.fromkeys(name for operand in factors.operands for name in operand)  # in order of appearance
    summed = (name for name in names if name not in factors.result and name not in factors.whole)
    call.def_partition(
        partition=parts,
        sharding_rule=f"{', '.join(map(' '.join, factors.operands))} -> {' '.join(factors.result)}",
        reduction_factors=tuple(summed),
        need_replication_factors=tuple(factors.whole),
        decode_shardings=False,
    )
    return call


def _in_primes(mesh: jax.sharding.Mesh) -> jax.sharding.Mesh:
    """The mesh with an axis for each prime factor of its axes: XLA may shard an array over a part of an axis."""
    factors = {(name, i): p for name, size in mesh.shape.items() for i, p in enumerate(_primes(size))}
    names = [f"{name}.{i}" for name, i in factors]
    return jax.sharding.Mesh(mesh.devices.reshape(*factors.values()), names)


def _primes(number: int) -> list[int]:
    """The prime factors of a number."""
    least = next((p for p in range(2, number + 1) if number % p == 0), None)
    return [] if least is None else [least, *_primes(number // least)]
