"""What happens to a finished sum before it is stored: `existing_out + activation(sum * scales + bias)`.

An `Epilogue` is a value of the problem. A backend that can applies it to each tile while the tile is hot; under
differentiation and `vmap` the calculus takes it apart into bilinear problems and elementwise operations (autodiff.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trencadis.core.dtypes import accumulator

Activation = Callable[[jax.Array], jax.Array]

IN_PARTS = "scales change along k, and it multiplies each part of the sum by itself"  # why a backend refuses blocks
CALLS = ("jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call")  # what does nothing but hold operations


class Extras(NamedTuple):
    """The operands of an epilogue, in their order; None where absent."""

    by_row: Any = None  # float32 [m], or [g, k] in a contraction: what rows of the result are multiplied with
    by_column: Any = None  # float32 [g, n]
    bias: Any = None  # [g, n]
    existing: Any = None  # as the result

    @property
    def given(self) -> list[Any]:
        """Those there are."""
        return [x for x in self if x is not None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Epilogue:
    """Which steps follow the product."""

    by_row: bool = False  # scales of rows follow
    by_column: bool = False  # scales of columns follow
    blocks: int = 0  # both change along the sum: [m, k / blocks] and [g, k / blocks, n / blocks]
    bias: np.dtype[Any] | None = None  # an operand [g, n] of this dtype follows
    activation: Activation | None = None  # a function of one number
    accumulate: bool = False  # an operand of the result's shape follows; the product is added to it

    def __bool__(self) -> bool:
        return self.scaled or self.bias is not None or self.activation is not None or self.accumulate

    @property
    def scaled(self) -> bool:
        """Whether the product is multiplied with scales."""
        return self.by_row or self.by_column

    @property
    def scaling(self) -> Epilogue:
        """That alone."""
        return Epilogue(by_row=self.by_row, by_column=self.by_column, blocks=self.blocks)

    def __str__(self) -> str:
        scales = f"scales of {self.blocks}" if self.blocks else "scales"
        steps = [scales] * self.scaled + ["bias"] * (self.bias is not None)
        if self.activation is not None:
            steps.append(getattr(self.activation, "__name__", type(self.activation).__name__))
        return " + ".join(steps + ["existing_out"] * self.accumulate)

    def split(self, extras: tuple[Any, ...]) -> Extras:
        """The operands that follow the four of every problem, by name."""
        rest = iter(extras)
        given = (self.by_row, self.by_column, self.bias is not None, self.accumulate)
        return Extras(*(next(rest) if there else None for there in given))

    def finish(self, acc: jax.Array, extras: Extras, out: Any) -> jax.Array:
        """A tile of sums [rows, n] for a result of dtype `out`; scales of rows are [rows, 1], the others [1, n]."""
        for scale in (extras.by_row, extras.by_column):
            acc = acc if scale is None else acc.astype(accumulator(acc.dtype, scale.dtype)) * scale
        if extras.bias is not None:
            acc = add(acc, extras.bias)
        return acc if self.activation is None else activated(self.activation, acc, out)


def add(a: jax.Array, b: jax.Array) -> jax.Array:
    """The sum of two arrays in a dtype that holds both: a float bias is not cut to the integers it is added to."""
    dtype = accumulator(a.dtype, b.dtype)
    return a.astype(dtype) + b.astype(dtype)


def activated(activation: Activation, z: jax.Array, out: Any) -> jax.Array:
    """The activation of sums z, which it sees in a dtype that holds the result too: floats for a float result."""
    return elementwise(activation)(z.astype(accumulator(z.dtype, out)))


def elementwise(activation: Activation) -> Activation:
    """The activation over a matrix, one number at a time: whatever it does, it cannot look at a neighbour."""
    return jax.vmap(jax.vmap(activation))


def inlined(activation: Activation) -> Activation:
    """The activation without the functions and derivative rules it is wrapped into: its operations, one by one.

    >>> jax.make_jaxpr(inlined(jax.nn.relu))(1.0)
    { lambda ; a:f32[]. let b:f32[] = max a 0.0:f32[] in (b,) }
    """

    def evaluate(jaxpr: Any, consts: Any, *args: Any) -> list[Any]:
        known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

        def read(var: Any) -> Any:
            return var.val if hasattr(var, "val") else known[var]

        for equation in jaxpr.eqns:
            values = [read(var) for var in equation.invars]
            if equation.primitive.name in CALLS:
                inner = equation.params.get("call_jaxpr", equation.params.get("jaxpr"))
                out = evaluate(inner.jaxpr, inner.consts, *values)
            else:
                out = equation.primitive.bind(*values, **equation.params)
                out = out if equation.primitive.multiple_results else [out]
            known.update(zip(equation.outvars, out, strict=True))
        return [read(var) for var in jaxpr.outvars]

    def apply(x: jax.Array) -> jax.Array:
        closed = jax.make_jaxpr(activation)(jax.ShapeDtypeStruct(x.shape, x.dtype))
        (out,) = evaluate(closed.jaxpr, closed.consts, x)
        return jnp.asarray(out)

    return apply


def check_activation(activation: Any, dtype: Any, result: Any) -> bool:
    """Whether a kernel may carry this activation; an error if it is not a function of one number.

    One that closes over traced values, or that has no hash, cannot be a static part of the problem: it is applied
    after the product.
    """
    if not callable(activation):
        raise TypeError(f"activation: want a function of one number, such as jax.nn.relu; got {activation!r}")
    number = jax.ShapeDtypeStruct((), accumulator(dtype, result))
    try:
        traced = jax.make_jaxpr(activation)(number)
        (out,) = traced.out_avals
    except Exception as error:
        raise ValueError(
            "activation: want a function that maps one number to one number; "
            f"{activation!r} failed on a scalar {number.dtype}"
        ) from error
    if out.shape != () or not jnp.issubdtype(out.dtype, jnp.number):
        raise ValueError(f"activation: want one number out for one number in; got {out.str_short()}")
    if jnp.issubdtype(out.dtype, jnp.complexfloating) and not jnp.issubdtype(result, jnp.complexfloating):
        raise ValueError(f"activation: gives {out.dtype}, which the result's {result} cannot hold")
    try:
        hash(activation)
    except TypeError:
        return False
    return not any(isinstance(const, jax.core.Tracer) for const in traced.consts)
