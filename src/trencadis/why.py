"""Why a call runs as it does: the plan of every grouped product in it, forward and backward, with its reasons.

The problems are read from the traced program, and the plans are those of `core.plan`, so what is printed will run.
"""

from __future__ import annotations

import dataclasses
import functools
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from trencadis.api.matmul import grouped_matmul, transposed_grouped_matmul
from trencadis.backends import BACKENDS, KERNELS
from trencadis.core import arguments
from trencadis.core.autodiff import PRODUCTS
from trencadis.core.cost import Cost, cost
from trencadis.core.decision import PARTITIONED
from trencadis.core.devices import target_of
from trencadis.core.execute import execute
from trencadis.core.gated import gated_p
from trencadis.core.jax_compat import current_target
from trencadis.core.mesh import entries
from trencadis.core.partition import dimensions, partition
from trencadis.core.plan import Plan, Refusal, answers, gated_answers, gated_plan, gathered, plan
from trencadis.core.primitive import DIVIDED_BY_RULE
from trencadis.core.problem import Problem
from trencadis.core.split import part_of
from trencadis.core.target import Target
from trencadis.core.tiling import Overrides
from trencadis.core.traced import Collective, Product, collectives, products, spread, spread_mesh, spreads
from trencadis.gemm import plan as gemm_plan
from trencadis.gemm.autodiff import gemm_p
from trencadis.gemm.problem import GemmProblem
from trencadis.quant.qarray import from_qarray, is_qarray
from trencadis.quant.scaled import Scaled

T = TypeVar("T")

SMALL = 1 << 16  # bytes of an array that is too small to be reported as a copy
PRIMITIVES = (*PRODUCTS, gated_p, gemm_p)
FREE = "in_memory_order"  # a transposition that moves nothing
FUSED = (FREE, "hi_lo", "three_parts", "permute_k", "interleave_columns", "deinterleave")  # each is one operation


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One grouped product of a call: the problem it is, its plan, and what every backend says; or why there is none."""

    name: str
    plan: Plan | None = None
    backends: tuple[Plan | Refusal, ...] = ()  # in the order of preference
    copies: tuple[str, ...] = ()  # large arrays that are made of operands and results beside the kernel
    cost: Cost | None = None
    mesh: str = ""  # how it is divided over the devices of a mesh, if it is
    reason: str = ""  # why there is no product

    @property
    def problem(self) -> Problem | None:
        """The problem that the call asks; None if there is no product."""
        return None if self.plan is None else self.plan.asked

    @property
    def refusals(self) -> dict[str, Refusal]:
        """The refusals of backends, by their names."""
        return {each.backend: each for each in self.backends if isinstance(each, Refusal)}

    def __str__(self) -> str:
        if self.plan is None:
            return f"{self.name:<10} none: {self.reason}"
        lines = [f"{self.name:<10} {self.plan.asked}", f"{'':<10} {self.plan}"]
        lines += [f"{'':<10} {note}" for note in (*self.plan.notes, self.mesh) if note]
        lines += [f"{'':<10} slow: {self.plan.slow}; {self.plan.advice}"] if self.plan.slow else []
        return "\n".join(lines + [f"{'':<10} besides: {copy}" for copy in self.copies])

    def news(self, known: dict[str, Refusal]) -> str:
        """The refusals of this pass that another does not have, as lines of text."""
        new = [each for name, each in self.refusals.items() if known.get(name) != each]
        return "".join(f"\n{'':<10} not {each.backend}: {each.reason}" for each in new)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Why:
    """The answer of `why`: the grouped products of a call and their plans. It prints itself.

    >>> answer = why(jnp.ones((4, 2)), jnp.ones((1, 2, 3)), jnp.array([4]), target="cpu")
    >>> answer.passes[0].plan.backend, sorted(answer.passes[0].refusals)
    ('xla', ['cpu', 'gpu', 'tpu', 'triton'])
    """

    target: Target
    passes: tuple[Pass, ...]  # forward, d lhs, d rhs; of a function, all its products, then those of its gradient
    exchanges: tuple[tuple[str, Collective], ...] = ()  # between devices, by the pass in which they are

    @property
    def problem(self) -> Problem:
        """The problem of the first product; a ValueError if there is none."""
        if not self.passes or self.passes[0].problem is None:
            raise ValueError("why: there is no grouped product in this function")
        return self.passes[0].problem

    @property
    def cost(self) -> Cost:
        """The cost of the first product; a ValueError if there is no product, or if its cost is not known."""
        asked, found = self.problem, self.passes[0].cost
        if found is None:
            raise ValueError(f"why: the cost of a general grouped GEMM is not known; got {asked}")
        return found

    @property
    def backends(self) -> tuple[Plan | Refusal, ...]:
        """What each backend says of the first product, in the order of preference."""
        return self.passes[0].backends if self.passes else ()

    def __str__(self) -> str:
        if not self.passes:
            return f"target       {self.target}\nthere is no grouped product in this function"
        if self.passes[0].name != "forward":
            lines, known = [f"target       {self.target}"], dict[str, Refusal]()
            for each in self.passes:
                lines.append(f"{each}{each.news(known)}")
                known |= each.refusals
            return "\n".join(lines) + self._exchanged()
        first = self.passes[0]
        backends = "\n".join(_verdict(each, first.plan) for each in self.backends)
        passes = "\n".join(f"{each}{each.news(first.refusals)}" for each in self.passes)
        return "\n".join([
            f"problem      {self.problem}",
            f"target       {self.target}",
            f"cost         {self.cost}",
            "backends",
            textwrap.indent(backends, "  "),
            "passes",
            textwrap.indent(passes, "  "),
        ]) + self._exchanged()  # fmt: skip

    def _exchanged(self) -> str:
        return "".join(f"\nexchange     {name}: {collective}" for name, collective in self.exchanges)

    __repr__ = __str__


def _verdict(answer: Plan | Refusal, chosen: Plan | None) -> str:
    if isinstance(answer, Refusal):
        return f"{answer.backend:<10} no   {answer.reason}"
    mark = " <- chosen" if chosen is not None and answer.backend == chosen.backend else ""
    return f"{answer.backend:<10} yes  tile {answer.tiling}{mark}"


def why(
    fn_or_lhs: Callable[..., Any] | Any, *args: Any, target: Target | jax.Device | str | None = None, **options: Any
) -> Why:
    """Say what a call would run and why, without running it.

    `why(fn, *args)` traces any function and explains each grouped product in it, those of its gradient included:
    sharded arguments, quantized operands, bias, activation, tiling, windows and `grouped_gemm` count as they will.
    `why(lhs, rhs, group_sizes)` explains one `grouped_matmul` (rhs of rank 3) or `transposed_grouped_matmul` (rank 2).

    Args:
      fn_or_lhs: a function; or lhs as for the operation, where `jax.ShapeDtypeStruct` may stand for any array.
      *args: the arguments of the function; or rhs, group_sizes and optionally the dtype of the result.
      target: what to plan for: a `Target`, a device, "cpu", "cuda", "rocm", "tpu", a TPU generation such as "v6e", or
        a GPU such as "h200"; by default that of `trencadis.target`, the devices of the arguments, or the
        default device.
      **options: the other arguments of the function, or of the operation.

    Returns:
      A `Why`: print it, or read its passes, each with a problem, a plan and the refusals of other backends.

    >>> x, w = jax.ShapeDtypeStruct((64, 8), jnp.bfloat16), jax.ShapeDtypeStruct((4, 8, 16), jnp.bfloat16)
    >>> answer = why(x, w, jnp.array([16, 0, 40, 8]), target="cpu")
    >>> print(answer.problem)
    rows m=64 k=8 n=16 g=4: bfloat16 x bfloat16 -> float32
    >>> print(*(f"{each.name}: {each.problem.form.value}" for each in answer.passes), sep=", ")
    forward: rows, d lhs: rows, d rhs: contraction
    >>> sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
    >>> layer = lambda x, w, s: jax.nn.silu(grouped_matmul(x, w, s, x.dtype))
    >>> print(*(each.name for each in why(layer, x, w, sizes, target="cpu").passes), sep=", ")
    product 1, gradient 1, gradient 2
    """
    if callable(fn_or_lhs):
        return _function(fn_or_lhs, args, options, target)
    return _operation((fn_or_lhs, *args), options, target)


# ---------------------------------------------------------------------------------------------------------------------
# Any function


def _function(fn: Callable[..., Any], args: Any, options: dict[str, Any], target: Any) -> Why:
    leaves, tree = jax.tree.flatten((args, options))
    given = [i for i, leaf in enumerate(leaves) if _traced(leaf)]
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
    seen = _target(shardings, target)
    arrays = [_struct(leaves[i]) for i in given]

    def call(*arrays: Any) -> list[Any]:
        filled = dict(zip(given, arrays, strict=True))
        args, options = jax.tree.unflatten(tree, [filled.get(i, leaf) for i, leaf in enumerate(leaves)])
        return [x for x in jax.tree.leaves(fn(*args, **options)) if hasattr(x, "dtype")]

    traced = jax.make_jaxpr(call)(*arrays).jaxpr
    split = any(map(spread, shardings)) or spread_mesh(jax.sharding.get_abstract_mesh(), ()) or spreads(traced)
    passes = [_pass(f"product {i + 1}", each, seen) for i, each in enumerate(products(traced, PRIMITIVES, split))]
    pulled, exchanged = _gradient(call, arrays, split, seen)
    return Why(target=seen, passes=(*passes, *pulled), exchanges=(*_named("forward", collectives(traced)), *exchanged))


def _gradient(
    call: Callable[..., Any], arrays: list[Any], split: bool, target: Target
) -> tuple[list[Pass], Sequence[tuple[str, Collective]]]:
    """The products that the gradient in all float arguments adds to those of the call itself; its exchanges."""
    inexact = [i for i, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.inexact)]

    def primal(*arrays: Any) -> Any:
        def of(*floats: Any) -> Any:
            filled = dict(zip(inexact, floats, strict=True))
            outs = call(*(filled.get(i, x) for i, x in enumerate(arrays)))
            return [x for x in outs if jnp.issubdtype(x.dtype, jnp.inexact)]

        return jax.vjp(of, *(arrays[i] for i in inexact))

    def pull(*arrays: Any) -> Any:
        outs, pullback = primal(*arrays)
        return pullback([jnp.ones_like(x) for x in outs])

    try:
        before = jax.make_jaxpr(lambda *x: primal(*x)[0])(*arrays).jaxpr
        after = jax.make_jaxpr(pull)(*arrays).jaxpr
    except Exception as error:  # not every function has a gradient; what JAX says is the answer
        return [Pass(name="gradient", reason=f"{type(error).__name__}: {str(error).splitlines()[0]}")], ()
    found = _added(lambda jaxpr: products(jaxpr, PRIMITIVES, split), before, after)
    passes = [_pass(f"gradient {i + 1}", each, target) for i, each in enumerate(found)]
    return passes, _named("gradient", _added(collectives, before, after))


def _added(find: Callable[[Any], Iterator[T]], before: Any, after: Any) -> list[T]:
    """What is found in one program and not in another that it starts with."""
    return list(find(after))[len(list(find(before))) :]


def _named(name: str, found: Iterable[Collective]) -> list[tuple[str, Collective]]:
    return [(name, each) for each in found]


def _traced(x: Any) -> bool:
    """Whether an argument is traced: an array whose numbers do not decide what runs, or has none.

    Integers that are known stay known, as in the call itself: shapes may depend on them.
    """
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        return False
    known = isinstance(x, (np.ndarray, np.generic, jax.Array)) and not isinstance(x, jax.core.Tracer)
    return not known or jnp.issubdtype(x.dtype, jnp.inexact)


def _struct(x: Any) -> jax.ShapeDtypeStruct:
    """An array without its numbers, but with its sharding if that is over a mesh."""
    sharding = getattr(x, "sharding", None)
    named = sharding if isinstance(sharding, jax.sharding.NamedSharding) else None
    return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype), sharding=named)


def _target(shardings: list[Any], target: Any) -> Target:
    """The target that was asked for, or that of the devices on which the arguments are."""
    if target is None:
        sets = [getattr(sharding, "device_set", ()) for sharding in shardings if sharding is not None]
        target = current_target() or next((device for devices in sets for device in devices), None)
    return target_of(target)


def _pass(name: str, found: Product, target: Target, sizes: list[int] | None = None, stored: Any = None) -> Pass:
    """The explanation of a product."""
    divided = found.partitioned and target.platform in DIVIDED_BY_RULE and not isinstance(found.problem, GemmProblem)
    target = dataclasses.replace(target, partitioned=target.partitioned or (found.partitioned and not divided))
    mesh = f"one device of {found.devices} computes this part, under shard_map" if found.devices > 1 else ""
    mesh = "XLA divides it over the mesh by its sharding rule, and chooses the collectives" if divided else mesh
    if isinstance(found.problem, GemmProblem):
        general = gemm_plan.answers(found.problem, target, found.overrides)
        return Pass(
            name=name, plan=gemm_plan.plan(found.problem, target, found.overrides), backends=tuple(general.values())
        )
    chosen = _plan(found.problem, target, found.overrides)
    if found.problem.gate is not None:
        said = gated_answers(found.problem, target, found.overrides)
    elif chosen.split:
        said = answers(part_of(found.problem), target, found.overrides.untiled)
    else:
        said = answers(found.problem, target, found.overrides)
    if target.partitioned:
        mesh = f"XLA partitions it{gathered(chosen)}; {PARTITIONED[1]}"
    copies = tuple(_copies(chosen))
    price = cost(found.problem, sizes, stored)
    return Pass(name=name, plan=chosen, backends=tuple(said.values()), copies=copies, cost=price, mesh=mesh)


def _plan(problem: Problem, target: Target, overrides: Overrides) -> Plan:
    """The plan of a problem; that of its products where no kernel applies its gated activation."""
    if problem.gate is None:
        return plan(problem, target, overrides)
    products = dataclasses.replace(plan(problem.replace(gate=None), target, overrides), asked=problem)
    return gated_plan(problem, target, overrides) or products


def _copies(chosen: Plan) -> Iterator[str]:
    """The large arrays that are made before a kernel and after it."""
    if chosen.backend not in {name for names in KERNELS.values() for name in names}:
        return
    asked = chosen.asked.replace(gate=chosen.problem.gate)
    if chosen.problem.gate is None:
        shapes = asked.operands
        run = functools.partial(execute, dataclasses.replace(chosen, asked=asked))
    else:
        shapes = asked.operands + asked.gate_operands
        run = functools.partial(BACKENDS[chosen.backend].run, chosen)
    operands = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    equations = list(_plain(jax.make_jaxpr(run)(*operands).jaxpr))
    product = next((each for each in reversed(equations) if "kernel" in each.params), None)  # Triton's last kernel
    for equation in equations:
        source, made = equation.invars[0].aval, equation.outvars[0].aval
        size = sum(each.aval.size * each.aval.dtype.itemsize for each in equation.outvars)
        if size >= SMALL and equation is not product and _name(equation) != FREE:
            yield f"{_name(equation)} {source.str_short()} -> {made.str_short()}, {size / 1e6:.3g} MB"


def _name(equation: Any) -> str:
    """What an operation is called: the function of a jaxpr or of a Triton kernel, or the primitive."""
    if "kernel" in equation.params:
        return str(equation.params["kernel"].function.__name__)
    return str(equation.params["name"] if "jaxpr" in equation.params else equation.primitive.name)


def _plain(jaxpr: Any) -> Iterator[Any]:
    """The operations of a traced program that are not kernels."""
    for equation in jaxpr.eqns:
        if "pallas" in equation.primitive.name or "mpmd" in equation.primitive.name:
            continue
        inner = equation.params.get("jaxpr")
        if inner is not None and equation.params.get("name") not in FUSED:
            yield from _plain(getattr(inner, "jaxpr", inner))
        elif equation.outvars and hasattr(equation.outvars[0].aval, "dtype") and equation.invars:
            yield equation


# ---------------------------------------------------------------------------------------------------------------------
# One operation


def _operation(arrays: tuple[Any, ...], options: dict[str, Any], target: Any) -> Why:
    """The answer for one grouped matmul of the rank that rhs says."""
    if not 3 <= len(arrays) <= 4:
        raise TypeError(
            f"why: want a function and its arguments, or lhs, rhs and group_sizes; got {len(arrays)} arrays"
        )
    *operands, out = (*arrays, jnp.float32)[:4]
    lhs, rhs, sizes = (_abstract(n, x) for n, x in zip(("lhs", "rhs", "group_sizes"), operands, strict=True))
    rank = len(rhs.shape)
    if rank not in (2, 3):
        raise ValueError(
            f"rhs: want 3 dimensions (grouped_matmul) or 2 (transposed_grouped_matmul); got shape {rhs.shape}"
        )
    other = "transpose_lhs" if rank == 3 else "transpose_rhs"
    if arguments.checked_flag(other, options.pop(other, False)):
        raise ValueError(f"{other}: want rhs of rank {5 - rank}; got rhs of shape {rhs.shape}")
    out = options.pop("preferred_element_type", out)
    call = grouped_matmul if rank == 3 else transposed_grouped_matmul
    shapes = {name: x for name, x in options.items() if isinstance(x, jax.ShapeDtypeStruct)}

    def product(lhs: Any, rhs: Any, sizes: Any) -> jax.Array:
        return call(lhs, rhs, sizes, out, **options | {name: jnp.zeros(x.shape, x.dtype) for name, x in shapes.items()})

    shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves(tuple(operands))]
    seen, split = _target(shardings, target), any(map(spread, shardings))
    traced = jax.make_jaxpr(product)(lhs, rhs, sizes).jaxpr
    found = next(products(traced, PRIMITIVES, split))
    unknown = found.devices > 1 or "group_offset" in shapes
    known = None if unknown else _known_sizes(operands[2], options.get("group_offset"), found.problem)
    forward = _pass("forward", found, seen, known, (_bytes(lhs) // found.devices, _bytes(rhs) // found.devices))
    passes, exchanged = [forward], _named("forward", collectives(traced))
    if found.partitioned and seen.platform in DIVIDED_BY_RULE:
        exchanged = _named("forward", _by_rule(found.problem, (lhs, rhs)))
    for which in (0, 1):
        pulled, more = _derivative(product, which, (lhs, rhs, sizes), split, seen)
        passes.append(pulled)
        exchanged += _named(pulled.name, more[len(list(collectives(traced))) :])
    return Why(target=seen, passes=tuple(passes), exchanges=tuple(exchanged))


def _by_rule(problem: Problem, operands: tuple[Any, Any]) -> list[Collective]:
    """What devices exchange of a product that XLA divides by its rule, as the shardings of lhs and rhs imply."""
    leaves = [jax.tree.leaves(x)[0] for x in operands]
    named = [x.sharding for x in leaves if isinstance(x.sharding, jax.sharding.NamedSharding)]
    if not named:
        return []
    specs = [entries(x.sharding.spec if x.sharding in named else PartitionSpec(), x.ndim) for x in leaves]
    rest = [((),) * len(names) for names in dimensions(problem)[2:]]
    return partition(problem, [*specs, *rest], dict(named[0].mesh.shape)).exchanges


def _abstract(name: str, x: Any) -> Any:
    """An array without its numbers; of a quantized one, all its leaves."""
    if is_qarray(x):
        x = from_qarray(name, x)
    elif not (hasattr(x, "shape") and hasattr(x, "dtype")):
        x = arguments.as_array(name, x)
    return jax.tree.map(_struct, x)


def _bytes(x: Any) -> int:
    return int(x.nbytes if isinstance(x, Scaled) else x.size * x.dtype.itemsize)


def _known_sizes(group_sizes: Any, group_offset: Any, asked: Problem | GemmProblem) -> list[int] | None:
    """The sizes of the local groups, checked, where they are known."""
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in (group_sizes, group_offset)):
        return None
    sizes, first = arguments.concrete(group_sizes), arguments.concrete(arguments.first_group(group_offset))
    if sizes is None or first is None or sizes.ndim != 1 or isinstance(asked, GemmProblem):
        return None
    arguments.check_sizes(sizes, asked.m)
    return [int(size) for size in np.asarray(sizes)[int(first) :][: asked.local_groups]]


def _derivative(
    call: Callable[..., Any], which: int, operands: Any, split: bool, target: Target
) -> tuple[Pass, list[Collective]]:
    """The pass that gives the cotangent of lhs (0) or rhs (1), and the exchanges of both passes."""
    name = ("d lhs", "d rhs")[which]
    if isinstance(operands[which], Scaled):
        return Pass(name=name, reason=f"{name[2:]} is quantized, and a constant"), []
    if not jnp.issubdtype(operands[which].dtype, jnp.inexact):
        return Pass(name=name, reason=f"{name[2:]} is {operands[which].dtype.name}, which has no derivative"), []
    out = jax.eval_shape(call, *operands)
    if not jnp.issubdtype(out.dtype, jnp.inexact):
        return Pass(name=name, reason=f"the result is {out.dtype.name}, which has no derivative"), []

    def pull(lhs: Any, rhs: Any, sizes: Any, cotangent: Any) -> Any:
        given = [lhs, rhs]
        _, pullback = jax.vjp(lambda x: call(*given[:which], x, *given[which + 1 :], sizes), given[which])
        return pullback(cotangent)

    traced = jax.make_jaxpr(pull)(*operands, out).jaxpr
    *_, last = products(traced, PRIMITIVES, split)  # the first is the forward pass, which vjp runs as well
    return _pass(name, last, target), list(collectives(traced))
