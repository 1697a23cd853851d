"""Activations: functions of one number, or of two in a gated layer, as hashable parts of a problem.

Users pass fresh lambdas. So an activation is known by what it computes, and equal ones share a program: by the text of
its traced operations, with the values of the arrays that it closes over.
"""

from __future__ import annotations

import functools
import hashlib
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var, jaxpr_as_fun
from jax.sharding import AbstractMesh
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Num

from trencadis.core.dtypes import accumulator
from trencadis.core.jax_compat import has_own_rules
from trencadis.core.programs import is_fixed

Activation = Callable[..., Array]  # of one number; of two, the gate first, in a gated layer

CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call")  # what does nothing but hold operations
LARGEST = 2**20  # bytes of the arrays that an activation may close over to be known by their values


def activated(activation: Activation, z: Num[Array, "rows n"], out: DTypeLike) -> Num[Array, "rows n"]:
    """The activation of sums z, which it sees in a dtype that holds the result too: floats for a float result."""
    return elementwise(activation)(z.astype(accumulator(z.dtype, out)))


def elementwise(activation: Activation) -> Activation:
    """The activation over a matrix, one number at a time: whatever it does, it cannot look at a neighbour."""
    return jax.vmap(jax.vmap(activation))


def inlined(activation: Callable[..., Any], rules: Mapping[str, Callable[..., Any]] = {}) -> Callable[..., Any]:
    """The activation without the functions and derivative rules it is wrapped into: its operations, one by one.

    Rules are functions to call instead of operations, by name.

    >>> jax.make_jaxpr(inlined(jax.nn.relu))(1.0)
    { lambda ; a:f32[]. let b:f32[] = max a 0.0:f32[] in (b,) }
    """

    def evaluate(jaxpr: Jaxpr, consts: Sequence[ArrayLike], *args: ArrayLike) -> list[ArrayLike]:
        known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

        def read(var: Var | Literal) -> ArrayLike:
            return var.val if hasattr(var, "val") else known[var]

        for equation in jaxpr.eqns:
            values = [read(var) for var in equation.invars]
            if equation.primitive.name in CALLS:
                inner = equation.params["call_jaxpr" if "call_jaxpr" in equation.params else "jaxpr"]
                out = evaluate(inner.jaxpr, inner.consts, *values)
            elif equation.primitive.name in rules:
                out = [rules[equation.primitive.name](*values)]
            else:
                out = equation.primitive.bind(*values, **equation.params)
                out = out if equation.primitive.multiple_results else [out]
            known.update(zip(equation.outvars, out, strict=True))
        return [read(var) for var in jaxpr.outvars]

    def apply(*xs: Array) -> Any:
        closed = jax.make_jaxpr(activation)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in xs))
        outs = [jnp.asarray(out) for out in evaluate(closed.jaxpr, closed.consts, *xs)]
        return outs[0] if len(outs) == 1 else outs

    return apply


class Elementwise:
    """The traced operations of an activation: it equals any other of the same ones, and so compiles nothing anew.

    It computes these and does not call the function of the user again, which may read variables that have changed. But
    on a mesh operations have types of their own: there the function has to be traced again, and an error says so if it
    has changed.
    """

    __slots__ = ("__name__", "dtype", "fn", "key", "traced")

    def __init__(self, fn: Activation, traced: ClosedJaxpr, dtype: np.dtype[Any], key: tuple[Any, ...]) -> None:
        self.fn, self.traced, self.dtype, self.key = fn, traced, dtype, key
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)

    def __call__(self, *xs: Array) -> Array:
        xs = tuple(x.astype(aval.dtype) for x, aval in zip(xs, self.traced.in_avals, strict=True))
        if jax.sharding.get_abstract_mesh().empty and all(jax.typeof(x).sharding.mesh.empty for x in xs):
            (out,) = jaxpr_as_fun(self.traced)(*xs)
            return out.astype(self.dtype)
        if not is_fixed(self.fn) and _key([_trace(self.fn, self.traced.in_avals)]) != _key([self.traced]):
            raise RuntimeError(
                f"activation: {self.__name__} reads a variable that has changed since it was given, and on a mesh it "
                "is traced again; want one that computes the same"
            )
        return self.fn(*xs).astype(self.dtype)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Elementwise) and other.key == self.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"Elementwise({self.__name__})"


def static_activation(activation: object, dtype: DTypeLike, result: DTypeLike, arguments: int = 1) -> Activation | None:
    """The activation as a hashable part of a problem; an error if it is not a function of so many numbers.

    None if it closes over traced values, or calls Python functions or reads large arrays, so that none can be known to
    be the same: then it has to be applied after the product. A function of a user is traced in every call, since it may
    read variables that change.
    """
    if isinstance(activation, Elementwise):  # of a layer that was given this one
        return activation
    find = _static_value if is_fixed(activation) else _static_activation
    return find(activation, np.dtype(dtype), np.dtype(result), arguments)


def _static_activation(
    activation: Any, dtype: np.dtype[Any], result: np.dtype[Any], arguments: int
) -> Activation | None:
    if not callable(activation):
        such = "one number, such as jax.nn.relu" if arguments == 1 else "two numbers, such as moe.swiglu()"
        raise TypeError(f"activation: want a function of {such}; got {reprlib.repr(activation)}")
    number = jax.ShapeDtypeStruct((), accumulator(dtype, result))
    try:
        traced = _trace(activation, (number,) * arguments)
        (out,) = traced.out_avals
    except Exception as error:
        raise ValueError(
            f"activation: want a function that maps {'one number' if arguments == 1 else 'two numbers'} to one number; "
            f"{activation!r} failed on {'a scalar' if arguments == 1 else 'two scalars'} {number.dtype}: "
            f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        ) from error
    if out.shape != () or not jnp.issubdtype(out.dtype, jnp.number):
        raise ValueError(f"activation: want one number as the result; got {out.str_short()}")
    if jnp.issubdtype(out.dtype, jnp.complexfloating) and not jnp.issubdtype(result, jnp.complexfloating):
        raise ValueError(f"activation: gives {out.dtype}, which the result's {result} cannot hold")
    _check_elementwise(traced.jaxpr)
    known: list[ClosedJaxpr] = [traced]
    differentiable = all(jnp.issubdtype(x.dtype, jnp.inexact) for x in (number, out))
    if differentiable and any(has_own_rules(equation) for equation in _equations(traced.jaxpr)):
        known += _pullbacks(traced)
    floats = all(jnp.issubdtype(x.dtype, jnp.floating) for x in (number, out))
    kept = number.dtype if floats else out.dtype
    key = _key(known)
    return None if key is None else Elementwise(activation, traced, np.dtype(kept), (kept, *key))


def _trace(activation: Activation, numbers: Sequence[Any]) -> ClosedJaxpr:
    """The operations of an activation, without a mesh: each would belong to the one that is set while it is traced.

    JAX does not trace a function again that it knows: this is a fresh one.
    """
    given = (jax.ShapeDtypeStruct(each.shape, each.dtype) for each in numbers)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        return jax.make_jaxpr(lambda *xs: activation(*xs))(*given)


def _check_elementwise(jaxpr: Jaxpr) -> None:
    """Raise if a function of one number reduces it, as of a row: it would see one number, and leave it as it is."""
    for equation in _equations(jaxpr):
        name = equation.primitive.name
        if name.startswith("reduce_") and equation.invars[0].aval.ndim == 0:
            raise ValueError(
                f"activation: want a function of each number by itself; it reduces its argument, by {name}, as if "
                "it were a row. Apply it to the result"
            )
        if name.startswith("random_"):
            raise ValueError(
                "activation: want a function of each number by itself; it draws random numbers, which would be the "
                "same for all. Apply it to the result"
            )


_static_value = functools.lru_cache(maxsize=64)(_static_activation)


def _pullbacks(traced: ClosedJaxpr) -> Iterator[ClosedJaxpr]:
    """Yield the pullback of a traced activation, and the pullback of that: what its rules compute.

    Activations of the same operations may have other rules (`jax.custom_jvp`, `jax.custom_vjp`), of which the text of a
    jaxpr has only the names. Many rules call the function itself again, so that this has to end at some order.
    """
    for _ in range(2):

        def pullback(*operands: Any, function: Callable[..., Any] = jaxpr_as_fun(traced)) -> Any:
            return jax.vjp(function, *operands[:-1])[1](operands[-1])

        operands, results = (
            [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in some] for some in (traced.in_avals, traced.out_avals)
        )
        try:
            traced = jax.make_jaxpr(pullback)(*operands, results)
        except Exception:  # a rule that fails, where nothing may ever ask for it
            return
        yield traced


def _key(known: Sequence[ClosedJaxpr]) -> tuple[Any, ...] | None:
    """What traced functions compute, as a key: their texts, and digests of arrays, which are not in them.

    None if they call Python functions, or hold traced or large arrays, or some that are on several devices.
    """
    texts, values = tuple(str(each.jaxpr) for each in known), []
    if any(" at 0x" in text for text in texts):
        return None
    for each in known:
        for equation in _equations(each.jaxpr):
            if "callback" in equation.primitive.name:
                return None
        values += [*each.consts, *_arrays(each.jaxpr)]
    if any(isinstance(x, jax.core.Tracer) or not hasattr(x, "dtype") for x in values):
        return None
    if any(isinstance(x, jax.Array) and len(x.devices()) > 1 for x in values):
        return None
    if any(jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in values) or sum(x.nbytes for x in values) > LARGEST:
        return None
    return texts, tuple((x.dtype, x.shape, hashlib.blake2b(np.asarray(x).tobytes()).digest()) for x in values)


def _equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a traced function, and of the functions in it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner, _ in _inner(equation):
            yield from _equations(inner)


def _arrays(jaxpr: Any) -> Iterator[Any]:
    """The arrays that functions inside of a traced function close over, and those among its operands."""
    for equation in jaxpr.eqns:
        yield from (x.val for x in equation.invars if np.ndim(getattr(x, "val", 0)))
        for inner, consts in _inner(equation):
            yield from consts
            yield from _arrays(inner)


def _inner(equation: Any) -> Iterator[tuple[Any, Sequence[Any]]]:
    """The functions that an equation calls, each with its constants."""
    for value in equation.params.values():
        for inner in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(inner, "jaxpr"):
                yield inner.jaxpr, inner.consts
            elif hasattr(inner, "eqns"):
                yield inner, ()
