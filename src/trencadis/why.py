"""The reasons of a plan: what a call asks, what it costs, which backends can do it, and which one will, in each pass.

The derived problems are read from the traced program, so that what is printed is what will run.
"""

from __future__ import annotations

import dataclasses
import functools
import textwrap
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from trencadis.api.matmul import grouped_matmul, transposed_grouped_matmul
from trencadis.backends import BACKENDS, INTERPRETED, NOTES
from trencadis.core import problem as what
from trencadis.core.autodiff import grouped_p
from trencadis.core.cost import Cost, cost
from trencadis.core.devices import target_of
from trencadis.core.plan import Plan, plan, refusals, taken
from trencadis.core.problem import Form, Problem
from trencadis.core.split import part_of
from trencadis.core.target import Target
from trencadis.core.tiling import Pins, Tiling
from trencadis.quant.qarray import from_qarray, is_qarray
from trencadis.quant.scaled import Scaled

SMALL = 1 << 16  # bytes of an array that is not worth a word
FUSED = ("halves", "ordered")  # functions that count as one operation, whatever they consist of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one backend says: the tile it would take, or the reason why it cannot; and why it was chosen, if it was."""

    backend: str
    tiling: Tiling | None = None
    reason: str | None = None
    because: str | None = None
    note: str | None = None  # how it would do it, where that is worth a word

    def __str__(self) -> str:
        if self.reason is not None:
            return f"{self.backend:<10} no   {self.reason}"
        chosen, note = f" <- {self.because}" if self.because else "", f"; {self.note}" if self.note else ""
        return f"{self.backend:<10} yes  tile {self.tiling}{chosen}{note}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One of forward, d lhs and d rhs: the problem it is and the plan for it, or why there is none."""

    name: str
    problem: Problem | None = None
    plan: Plan | None = None
    backends: tuple[Verdict, ...] = ()
    copies: tuple[str, ...] = ()  # what is made of operands and results beside the kernel
    reason: str | None = None

    def __str__(self) -> str:
        if self.problem is None:
            return f"{self.name:<10} none: {self.reason}"
        copies = "".join(f"\n{'':<10} besides: {copy}" for copy in self.copies)
        return f"{self.name:<10} {self.problem}\n{'':<10} {self.plan}{copies}"

    def news(self, forward: Pass) -> str:
        """The refusals of this pass that the forward pass does not have."""
        known = {(v.backend, v.reason) for v in forward.backends}
        new = [v for v in self.backends if v.reason is not None and (v.backend, v.reason) not in known]
        return "".join(f"\n{'':<10} not {v.backend}: {v.reason}" for v in new)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Why:
    """The answer of `why`; prints itself.

    >>> answer = why(jnp.ones((4, 2)), jnp.ones((1, 2, 3)), jnp.array([4]), target="cpu")
    >>> [verdict.reason for verdict in answer.backends if verdict.backend == "reference"]
    [None]
    """

    problem: Problem
    target: Target
    cost: Cost
    passes: tuple[Pass, ...]  # forward, d lhs, d rhs

    @property
    def backends(self) -> tuple[Verdict, ...]:
        """What each backend says of the problem, in the order of preference."""
        return self.passes[0].backends

    def __str__(self) -> str:
        backends = "\n".join(map(str, self.backends))
        passes = "\n".join(f"{each}{each.news(self.passes[0])}" for each in self.passes)
        return "\n".join([
            f"problem      {self.problem}",
            f"target       {self.target}",
            f"cost         {self.cost}",
            "backends",
            textwrap.indent(backends, "  "),
            "passes",
            textwrap.indent(passes, "  "),
        ])  # fmt: skip

    __repr__ = __str__


def why(
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    preferred_element_type: Any = jnp.float32,
    *,
    transpose_rhs: bool = False,
    transpose_lhs: bool = False,
    target: Target | jax.Device | str | None = None,
) -> Why:
    """What a call would do and why, without making it.

    Args:
      lhs: as for the operation, quantized or not; `jax.ShapeDtypeStruct` may stand for arrays.
      rhs: of rank 3 for `grouped_matmul`, of rank 2 for `transposed_grouped_matmul`.
      group_sizes: an array or a `jax.ShapeDtypeStruct`; with values, the cost is that of the rows really there.
      preferred_element_type: the dtype of the result.
      transpose_rhs: as in `grouped_matmul`.
      transpose_lhs: as in `transposed_grouped_matmul`.
      target: what to plan for: a `Target`, a device, "cpu", "cuda", "rocm", "tpu", a TPU generation such as "v6e", or
        a GPU such as "h200"; by default the default device.

    Returns:
      A `Why`: print it, or read its problem, cost, backends and passes.

    >>> x, w = jax.ShapeDtypeStruct((64, 8), jnp.bfloat16), jax.ShapeDtypeStruct((4, 8, 16), jnp.bfloat16)
    >>> answer = why(x, w, jnp.array([16, 0, 40, 8]), target="cpu")
    >>> print(answer.problem)
    rows m=64 k=8 n=16 g=4: bfloat16 x bfloat16 -> float32
    >>> print(*(f"{each.name}: {each.problem.form.value}" for each in answer.passes), sep=", ")
    forward: rows, d lhs: rows, d rhs: contraction
    """
    target = target_of(target)
    operands = tuple(_abstract(name, x) for name, x in (("lhs", lhs), ("rhs", rhs), ("group_sizes", group_sizes)))
    rank = len(operands[1].shape)
    if rank not in (2, 3):
        raise ValueError(
            f"rhs: want 3 dimensions (grouped_matmul) or 2 (transposed_grouped_matmul); got shape {operands[1].shape}"
        )
    other, flag = ("transpose_lhs", transpose_lhs) if rank == 3 else ("transpose_rhs", transpose_rhs)
    if what.checked_flag(other, flag):
        raise ValueError(f"{other}: want rhs of rank {5 - rank}; got rhs of shape {operands[1].shape}")

    def call(lhs: Any, rhs: Any, sizes: Any) -> jax.Array:
        if rank == 3:
            return grouped_matmul(lhs, rhs, sizes, preferred_element_type, transpose_rhs=transpose_rhs)
        return transposed_grouped_matmul(lhs, rhs, sizes, preferred_element_type, transpose_lhs=transpose_lhs)

    forward = _grouped(jax.make_jaxpr(call)(*operands).jaxpr)
    asked = _whole(forward[0][0], operands, preferred_element_type)
    passes = [_pass("forward", forward[0], target), *(_derivative(call, i, operands, target) for i in (0, 1))]
    return Why(
        problem=asked,
        target=target,
        cost=cost(asked, _known_sizes(group_sizes, asked), (_bytes(operands[0]), _bytes(operands[1]))),
        passes=tuple(passes),
    )


def _abstract(name: str, x: Any) -> Any:
    """An array without its numbers; of a quantized one, all its leaves."""
    if is_qarray(x):
        x = from_qarray(name, x)
    elif not (hasattr(x, "shape") and hasattr(x, "dtype")):
        x = what.as_array(name, x)
    kept = jax.dtypes.canonicalize_dtype
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, kept(leaf.dtype)), x)


def _whole(problem: Problem, operands: tuple[Any, ...], out: Any) -> Problem:
    """The problem that was asked, where quantized operands made another of it: of a part of k, or of wider values."""
    lhs, rhs, _ = operands
    if not isinstance(lhs, Scaled) and not isinstance(rhs, Scaled):
        return problem
    k = lhs.shape[1] if problem.form is Form.ROWS else problem.k
    return problem.replace(k=k, lhs=lhs.dtype, rhs=rhs.dtype, out=what.result_dtype(out))


def _bytes(x: Any) -> int:
    return int(x.nbytes if isinstance(x, Scaled) else x.size * x.dtype.itemsize)


def _known_sizes(group_sizes: Any, asked: Problem) -> list[int] | None:
    """The sizes of the local groups, checked, where they are known."""
    if isinstance(group_sizes, jax.ShapeDtypeStruct):
        return None
    sizes = what.concrete(group_sizes)
    if sizes is None:
        return None
    what.check_sizes(sizes, asked.m)
    return [int(size) for size in sizes[: asked.local_groups]]


def _pass(name: str, found: tuple[Problem, Pins], target: Target) -> Pass:
    problem, pins = found
    if problem.epilogue.blocks and not taken(problem, target, pins):
        problem = part_of(problem, problem.epilogue.blocks)
    chosen = plan(problem, target, pins)
    verdicts = tuple(_verdicts(problem, target, chosen))
    return Pass(name=name, problem=problem, plan=chosen, backends=verdicts, copies=tuple(_copies(problem, chosen)))


def _copies(problem: Problem, chosen: Plan) -> Iterator[str]:
    """The large arrays that a backend with kernels makes before its kernel and after it."""
    if chosen.backend not in INTERPRETED:
        return
    operands = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in problem.operands]
    run = functools.partial(BACKENDS[chosen.backend].run, problem, chosen)
    for equation in _plain(jax.make_jaxpr(run)(*operands).jaxpr):
        source, made = equation.invars[0].aval, equation.outvars[0].aval
        size = made.size * made.dtype.itemsize
        if size >= SMALL:
            name = equation.params["name"] if "jaxpr" in equation.params else equation.primitive.name
            yield f"{name} {source.str_short()} -> {made.str_short()}, {size / 1e6:.3g} MB"


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


def _verdicts(problem: Problem, target: Target, chosen: Plan) -> Iterator[Verdict]:
    for name, reason in refusals(problem, target).items():
        yield Verdict(
            backend=name,
            reason=reason,
            tiling=BACKENDS[name].tiling(problem, target) if reason is None else None,
            because=chosen.because if name == chosen.backend else None,
            note=NOTES[name](problem, target) if reason is None and name in NOTES else None,
        )


def _derivative(call: Any, which: int, operands: tuple[Any, ...], target: Target) -> Pass:
    """The pass that gives the cotangent of lhs (0) or rhs (1)."""
    name = ("d lhs", "d rhs")[which]
    if isinstance(operands[which], Scaled):
        return Pass(name=name, reason=f"{name[2:]} is quantized, and a constant")
    if not jnp.issubdtype(operands[which].dtype, jnp.inexact):
        return Pass(name=name, reason=f"{name[2:]} is {operands[which].dtype.name}, which has no derivative")
    out = jax.eval_shape(call, *operands)
    if not jnp.issubdtype(out.dtype, jnp.inexact):
        return Pass(name=name, reason=f"the result is {out.dtype.name}, which has no derivative")

    def pull(lhs: Any, rhs: Any, sizes: Any, cotangent: Any) -> Any:
        given = [lhs, rhs]
        _, pullback = jax.vjp(lambda x: call(*given[:which], x, *given[which + 1 :], sizes), given[which])
        return pullback(cotangent)

    traced = _grouped(jax.make_jaxpr(pull)(*operands, out).jaxpr)
    return _pass(name, traced[-1], target)  # the first is the forward pass, which vjp runs as well


def _grouped(jaxpr: Any) -> list[tuple[Problem, Pins]]:
    """The problem and the pins of every grouped matmul in a traced program, in order."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive is grouped_p:
            found.append((equation.params["problem"], equation.params["pins"]))
        for inner in equation.params.values():
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                found += _grouped(inner)
    return found
