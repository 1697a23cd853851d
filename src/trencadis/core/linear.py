"""Linear functions with a transpose of their own, and functions with a backward pass of their own.

`jax.custom_vjp` gives a function a backward pass and takes forward mode from it. Here a function keeps both: its
tangents are a linear function, which runs as it is in forward mode, and which reverse mode transposes by the given
rule. Both are ordinary JAX code that can be differentiated again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from trencadis.core.jax_compat import Value, vary_alike
from trencadis.core.mesh import mapped_alike, resharded_as, resharded_like

Tree: TypeAlias = Any  # a pytree of arrays
Arrays: TypeAlias = Sequence[Any]

linear_p = Primitive("linear_function")
linear_p.multiple_results = True


@dataclasses.dataclass(frozen=True)
class Linear:
    """A linear function of arrays, and its transpose; both take constants first."""

    apply: Callable[[Arrays, Arrays], Arrays]  # constants, inputs -> outputs
    transpose: Callable[[Arrays, Arrays], Arrays]  # constants, cotangents of the outputs -> those of the inputs
    constants: int  # how many of the operands are constants

    def __call__(self, *operands: Value) -> Arrays:
        return list(self.apply(operands[: self.constants], operands[self.constants :]))


def linear(
    apply: Callable[[Tree, Tree], Tree], transpose: Callable[[Tree, Tree], Tree], constants: Tree, inputs: Tree
) -> Tree:
    """`apply(constants, inputs)`, a function linear in inputs, which reverse mode transposes by another function.

    `transpose(constants, cotangents)` gives the cotangents of the inputs from those of the result. Differentiation with
    respect to constants, of either of the two, looks into them.

    >>> def shift(_, x): return jnp.roll(x, 1)
    >>> def unshift(_, ct): return jnp.roll(ct, -1)
    >>> jax.grad(lambda x: linear(shift, unshift, (), x)[0])(jnp.arange(3.0))
    Array([0., 0., 1.], dtype=float32)
    """
    known, known_tree = jax.tree.flatten(constants)
    given, given_tree = jax.tree.flatten(inputs)
    out_tree = jax.tree.structure(jax.eval_shape(apply, constants, inputs))

    def flat_apply(known: Arrays, given: Arrays) -> Arrays:
        return jax.tree.leaves(apply(jax.tree.unflatten(known_tree, known), jax.tree.unflatten(given_tree, given)))

    def flat_transpose(known: Arrays, cotangents: Arrays) -> Arrays:
        found = transpose(jax.tree.unflatten(known_tree, known), jax.tree.unflatten(out_tree, cotangents))
        pairs = zip(jax.tree.leaves(found), given, strict=True)
        return [resharded_like(x.astype(like.dtype), like) for x, like in pairs]

    function = Linear(flat_apply, flat_transpose, len(known))
    operands = vary_alike(*map(jnp.asarray, (*known, *given)))
    return jax.tree.unflatten(out_tree, linear_p.bind(*operands, linear=function))


def with_backward(
    value: Callable[[Tree, Tree], Tree],
    forward: Callable[[Tree, Tree], tuple[Tree, Tree]],
    backward: Callable[[Tree, Tree, Tree, Tree], Tree],
) -> Callable[[Tree, Tree], Tree]:
    """A function of constants and inputs that is differentiable in its inputs, with a backward pass of its own.

    Args:
      value: `(constants, inputs) -> result`. It runs where nothing is differentiated, and its own derivatives are those
        of forward mode.
      forward: the same with a second result: arrays to keep for the backward pass.
      backward: `(constants, inputs, kept, cotangents of the result) -> cotangents of the inputs`.

    Constants are arrays without a derivative, such as indices. The backward pass keeps them, the inputs and what
    `forward` says, and nothing else.

    >>> def sine(_, x): return jnp.sin(x)
    >>> def keep(_, x): return jnp.sin(x), jnp.cos(x)
    >>> f = with_backward(sine, keep, lambda _, x, cosine, ct: cosine * ct)
    >>> float(jax.grad(f, argnums=1)((), 0.0)), float(jax.jvp(lambda x: f((), x), (0.0,), (2.0,))[1])
    (1.0, 2.0)
    """
    function = jax.custom_jvp(value)

    @function.defjvp
    def jvp(primals: tuple[Tree, Tree], tangents: tuple[Tree, Tree]) -> tuple[Tree, Tree]:
        (constants, inputs), (_, d_inputs) = primals, tangents
        out, kept = forward(constants, inputs)

        def tangent(known: tuple[Tree, Tree, Tree], d_inputs: Tree) -> Tree:
            constants, inputs, _ = known
            return jax.jvp(functools.partial(value, constants), (inputs,), (d_inputs,))[1]

        def cotangent(known: tuple[Tree, Tree, Tree], ct: Tree) -> Tree:
            return backward(*known, ct)

        return out, linear(tangent, cotangent, (constants, inputs, kept), d_inputs)

    return function


def jvp_of_varied(function: Callable[..., Any], primals: Sequence[Value], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """`jax.jvp` of a function in the arguments that have tangents; others, such as integers, have symbolic zeros."""
    varied = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

    def of_varied(*xs: Value) -> Any:
        operands = list(primals)
        for i, x in zip(varied, xs, strict=True):
            operands[i] = x
        return function(*operands)

    return jax.jvp(of_varied, [primals[i] for i in varied], [tangents[i] for i in varied])


# ---------------------------------------------------------------------------------------------------------------------
# The rules of the primitive


def _abstract(*operands: ShapedArray, linear: Linear) -> Sequence[ShapedArray]:
    return jax.make_jaxpr(linear)(*operands).out_avals


def _jvp(primals: Sequence[Value], tangents: Sequence[Any], *, linear: Linear) -> tuple[Arrays, Arrays]:
    """The tangent of the inputs goes through the function; those of constants are found by differentiating it."""
    out = linear_p.bind(*primals, linear=linear)
    known, given = primals[: linear.constants], primals[linear.constants :]
    d_known, d_given = tangents[: linear.constants], tangents[linear.constants :]
    found: list[Arrays] = []
    if any(not isinstance(x, ad.Zero) for x in d_given):
        operands = vary_alike(*known, *map(ad.instantiate_zeros, d_given))
        found.append(linear_p.bind(*operands, linear=linear))
    if any(not isinstance(x, ad.Zero) for x in d_known):
        found.append(jvp_of_varied(lambda *constants: linear(*constants, *given), known, d_known)[1])
    return out, [functools.reduce(ad.add_jaxvals, each) for each in zip(*found, strict=True)]


def _transpose(cts: Sequence[Any], *operands: Any, linear: Linear) -> Sequence[Any]:
    known, given = operands[: linear.constants], operands[linear.constants :]
    found = linear.transpose(known, [ad.instantiate_zeros(ct) for ct in cts])
    return [None] * len(known) + [
        resharded_as(ct, x.aval.sharding) if isinstance(x, ad.UndefinedPrimal) else None
        for ct, x in zip(found, given, strict=True)
    ]


def _batch(operands: Sequence[Value], axes: Sequence[int | None], *, linear: Linear) -> tuple[Arrays, Sequence[int]]:
    """Each input gets a batch axis, so that each cotangent has one."""
    (size,) = {x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None}
    known = tuple(axes[: linear.constants])
    given = [
        jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(operands[linear.constants :], axes[linear.constants :], strict=True)
    ]
    batched = Linear(
        jax.vmap(linear.apply, in_axes=(known, 0)), jax.vmap(linear.transpose, in_axes=(known, 0)), linear.constants
    )
    alike = mapped_alike([*operands[: linear.constants], *given], [*known, *(0 for _ in given)])
    out = linear_p.bind(*alike, linear=batched)
    return out, [0] * len(out)


linear_p.def_impl(lambda *operands, linear: linear(*operands))
linear_p.def_abstract_eval(_abstract)
ad.primitive_jvps[linear_p] = _jvp
ad.primitive_transposes[linear_p] = _transpose
batching.primitive_batchers[linear_p] = _batch
mlir.register_lowering(linear_p, mlir.lower_fun(lambda *operands, linear: linear(*operands), multiple_results=True))
