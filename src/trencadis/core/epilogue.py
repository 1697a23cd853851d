"""What happens to a finished sum before it is stored: `existing_out + activation(sum * scales + bias)`.

An `Epilogue` is a static part of the problem. A backend that can applies it to each tile while the tile is in registers
or on-chip memory; otherwise `core.unfused` computes the same steps with XLA operations.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Num

from trencadis.core.dtypes import accumulator

Activation = Callable[..., Array]  # of one number; of two, the gate first, in a gated layer

ALONG_K = "scales change along k, and it applies only scales that are constant along k"  # a reason to refuse
CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call")  # what does nothing but hold operations


class Extras(NamedTuple):
    """The array operands of an epilogue, in the order in which they are passed; None where there is none."""

    by_row: Array | None = None  # float32 [m], [m, k / block], or [g, k] in a contraction: scales of rows
    by_column: Array | None = None  # float32 [g, n], or [g, k / block, n / block] of any dtype: scales of columns
    bias: Array | None = None  # [g, n]
    existing: Array | None = None  # of the shape and dtype of the result

    @property
    def given(self) -> list[Array]:
        """The operands that are not None."""
        return [x for x in self if x is not None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Epilogue:
    """The steps that follow the product, each with a static description of its operand."""

    by_row: bool = False  # scales of rows follow
    by_column: bool = False  # scales of columns follow
    row_block: int = 0  # entries of k that share a scale of a row; 0: all of them
    column_block: tuple[int, int] = (0, 1)  # entries of k and of n that share a scale of a column; 0: all of k
    column_scales: np.dtype[Any] = np.dtype(np.float32)  # the dtype of scales of columns that change along k
    bias: np.dtype[Any] | None = None  # an operand [g, n] of this dtype follows
    activation: Activation | None = None  # a function of one number
    accumulate: bool = False  # an operand of the result's shape follows; the product is added to it

    def __bool__(self) -> bool:
        return bool(self.steps)

    @property
    def scaled(self) -> bool:
        """Whether the product is multiplied by scales."""
        return self.by_row or self.by_column

    @property
    def along_k(self) -> bool:
        """Whether scales change along k, so that no single factor of the finished sum can apply them."""
        return bool(self.row_block or self.column_block[0])

    @property
    def blocks(self) -> int:
        """The block length of scales that are 1 x L for lhs and L x L for rhs; 0 for any other granularity."""
        return self.row_block if self.column_block == (self.row_block, self.row_block) else 0

    @property
    def part(self) -> int:
        """The longest part of k in which every scale is constant; 0 if scales do not change along k."""
        return math.gcd(self.row_block, self.column_block[0])

    @property
    def columnwise(self) -> bool:
        """Whether scales of columns change with every entry of k, and are constant in blocks of n."""
        return self.row_block == 0 and self.column_block[0] == 1 < self.column_block[1]

    @property
    def transposed(self) -> Epilogue:
        """The scales of rhs that change along k, for the product with rhs transposed: k and n change places."""
        k, n = self.column_block
        return Epilogue(by_column=True, column_block=(n, k), column_scales=self.column_scales) if k else Epilogue()

    @property
    def scaling(self) -> Epilogue:
        """An epilogue with only the scales."""
        return dataclasses.replace(self, bias=None, activation=None, accumulate=False)

    @property
    def without_activation(self) -> Epilogue:
        """The epilogue without its activation."""
        return dataclasses.replace(self, activation=None)

    @property
    def steps(self) -> tuple[str, ...]:
        """The names of the steps, in the order in which they are applied."""
        scales = f"scales per {self.part} of k" if self.along_k else "scales"
        steps = [scales] * self.scaled + ["bias"] * (self.bias is not None)
        if self.activation is not None:
            steps.append(getattr(self.activation, "__name__", type(self.activation).__name__))
        return (*steps, *["existing_out"] * self.accumulate)

    def __str__(self) -> str:
        return " + ".join(self.steps)

    def split(self, extras: tuple[Any, ...]) -> Extras:
        """The operands that follow the four of every problem, by name."""
        rest = iter(extras)
        given = (self.by_row, self.by_column, self.bias is not None, self.accumulate)
        return Extras(*(next(rest) if there else None for there in given))

    def finish(self, acc: Num[Array, "rows n"], extras: Extras, out: DTypeLike) -> Num[Array, "rows n"]:
        """A tile of sums [rows, n] after scales, bias and activation; scales of rows are [rows, 1], others [1, n]."""
        for scale in (extras.by_row, extras.by_column):
            acc = acc if scale is None else acc.astype(accumulator(acc.dtype, scale.dtype)) * scale
        if extras.bias is not None:
            acc = add(acc, extras.bias)
        return acc if self.activation is None else activated(self.activation, acc, out)


@dataclasses.dataclass(frozen=True, slots=True)
class Gather:
    """Rows of a product that are gathered from those of an operand: row i is lhs[token[i]], or rhs[token[i]].

    Two operands follow all others: `token`, i32[m], and the inverse of the permutation, i32[m], which gradients need.
    """

    tokens: int  # the rows of the operand
    rows: Callable[[Array, Array, Array], Array]  # of the operand, token and inverse: its rows, m of them
    operand: str = "lhs"  # or "rhs", in a contraction


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """A gated activation in the epilogue of a rows product, its pullback, or the products of their gradients.

        forward     lhs @ gate, lhs @ up -> activation of both    a second rhs follows; `keep`: both sums are results
        pullback    the product is d h                            both sums follow, and the weight of each row [m]
        sum         lhs @ gate + lhs_up @ up                      a second lhs and rhs follow; there is no activation
        weights     lhsᵀ @ rhs of each group, a contraction       `pair`: a second rhs follows, and has a second result

    The pullback gives the cotangents of both sums, of `weight * d h`; then `weight * h`, and the sum over n of d h * h.
    All but the sum may have rows that are gathered.
    """

    activation: Activation | None  # of gate and up; None: products without one
    keep: bool = False
    pullback: bool = False
    pair: bool = False
    gather: Gather | None = None

    def __str__(self) -> str:
        gathered = ", rows gathered" * (self.gather is not None)
        if self.activation is None:
            return ("two products" if self.pair or self.gather is None else "one product") + gathered
        name = getattr(self.activation, "__name__", type(self.activation).__name__)
        if self.pullback:
            return f"pullback of {name}{gathered}"
        return f"{name} of gate and up" + ", both kept" * self.keep + gathered


def add(a: Array, b: Array) -> Array:
    """The sum of two arrays in a dtype that holds both: a float bias is not cut to the integers it is added to."""
    dtype = accumulator(a.dtype, b.dtype)
    return a.astype(dtype) + b.astype(dtype)


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


def _says_all(jaxpr: Any, consts: Any) -> bool:
    """Whether the text of a traced function says what it computes: it holds no arrays and calls no Python function.

    Arrays that a jitted function closes over are constants of an inner jaxpr, whose values are not in the text. Rules
    for derivatives are not in it either: see `_pullbacks`.
    """
    if consts:
        return False
    for equation in jaxpr.eqns:
        if "callback" in equation.primitive.name or any(np.ndim(getattr(x, "val", 0)) for x in equation.invars):
            return False
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(inner, "jaxpr") and not _says_all(inner.jaxpr, inner.consts):
                    return False
                if hasattr(inner, "eqns") and not _says_all(inner, ()):
                    return False
    return True


def _pullbacks(activation: Activation, *numbers: jax.ShapeDtypeStruct, out: Any) -> list[ClosedJaxpr]:
    """The first and the second derivative of an activation, traced: its rules by what they compute.

    Activations of the same operations may have other rules (`jax.custom_jvp`, `jax.custom_vjp`), of which the text of a
    jaxpr has only the names. Many rules call the function itself again, so that this has to end at some order.
    """

    def pullback(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *operands: jax.vjp(function, *operands[:-1])[1](operands[-1])

    first = pullback(activation)
    cotangent = jax.ShapeDtypeStruct(out.shape, out.dtype)
    operands = (*numbers, cotangent)
    return [jax.make_jaxpr(first)(*operands), jax.make_jaxpr(pullback(first))(*operands, numbers)]


class Elementwise:
    """An activation that equals any other of the same operations, so that a fresh lambda compiles nothing anew."""

    __slots__ = ("__name__", "fn", "key")

    def __init__(self, fn: Activation, key: str) -> None:
        self.fn, self.key = fn, key
        self.__name__ = getattr(fn, "__name__", type(fn).__name__)

    def __call__(self, *xs: Array) -> Array:
        return self.fn(*xs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Elementwise) and other.key == self.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"Elementwise({self.__name__})"


@dataclasses.dataclass(frozen=True, slots=True)
class Converted:
    """An activation whose result has another dtype, converted to that of its operands."""

    fn: Activation

    def __call__(self, *xs: Array) -> Array:
        return self.fn(*xs).astype(xs[0].dtype)

    @property
    def __name__(self) -> str:
        return getattr(self.fn, "__name__", type(self.fn).__name__)


def static_activation(activation: object, dtype: DTypeLike, result: DTypeLike, arguments: int = 1) -> Activation | None:
    """The activation as a hashable part of a problem; an error if it is not a function of so many numbers.

    None if it closes over traced values or has no hash: then it has to be applied after the product.
    """
    find = _static_value if is_constant(activation) else _static_activation
    return find(activation, np.dtype(dtype), np.dtype(result), arguments)


def is_constant(activation: Any) -> bool:
    """Whether it never changes, so that it need not be traced for every call.

    A function of JAX does not, nor does a value that is its fields and nothing else, as `moe.swiglu()` is.
    """
    name = getattr(activation, "__name__", "")
    if isinstance(activation, Elementwise) or any(
        getattr(module, name, None) is activation for module in (jax.nn, jnp, jax.lax)
    ):
        return True
    params = vars(type(activation)).get("__dataclass_params__")  # and no subclass, which may have a state of its own
    if params is None or not params.frozen or not params.eq:
        return False
    values = (getattr(activation, field.name) for field in dataclasses.fields(activation))
    return all(isinstance(value, (int, float, str, np.number, type(None))) or is_constant(value) for value in values)


def is_hashable(x: object) -> bool:
    """Whether a value has a hash, so that it can be a part of what a program is found by."""
    try:
        hash(x)
    except TypeError:
        return False
    return True


def _static_activation(
    activation: Any, dtype: np.dtype[Any], result: np.dtype[Any], arguments: int
) -> Activation | None:
    if not callable(activation):
        such = "one number, such as jax.nn.relu" if arguments == 1 else "two numbers, such as moe.swiglu()"
        raise TypeError(f"activation: want a function of {such}; got {reprlib.repr(activation)}")
    number = jax.ShapeDtypeStruct((), accumulator(dtype, result))
    try:  # by a fresh function: JAX does not trace one again that it knows, which may read variables that change
        traced = jax.make_jaxpr(lambda *xs: activation(*xs))(*(number,) * arguments)
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
    known = [traced]
    if "custom_" in str(traced.jaxpr) and all(jnp.issubdtype(x.dtype, jnp.inexact) for x in (number, out)):
        try:
            known += _pullbacks(activation, *(number,) * arguments, out=out)
        except Exception:  # a rule that fails, where nothing may ever ask for it
            return _by_identity(activation, known)
    if out.dtype != number.dtype and all(jnp.issubdtype(x.dtype, jnp.floating) for x in (number, out)):
        activation = Converted(activation)
    texts = [str(each.jaxpr) for each in known]
    if not any(" at 0x" in text for text in texts) and all(_says_all(each.jaxpr, each.consts) for each in known):
        return Elementwise(activation, "\n".join(texts))
    return _by_identity(activation, known)


def _by_identity(activation: Any, known: Sequence[ClosedJaxpr]) -> Activation | None:
    """The activation, which equals itself alone; None if it has no hash, or holds traced values."""
    traced = any(isinstance(const, jax.core.Tracer) for each in known for const in each.consts)
    return activation if is_hashable(activation) and not traced else None


_static_value = functools.lru_cache(maxsize=64)(_static_activation)
