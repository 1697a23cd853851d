"""Operations that are computed in another way on GPUs, by a small Triton kernel, or on TPUs: one primitive for all.

Where they are differentiated or batched they are what they are composed of. A function that needs a kernel in its
derivative as well gives it one with `core.linear`.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Effect, Primitive
from jaxtyping import Array

from trencadis.backends import KERNELS
from trencadis.backends.triton import card_of
from trencadis.core.devices import Card
from trencadis.core.jax_compat import Value, result_type, vary_alike
from trencadis.core.linear import jvp_of_varied
from trencadis.core.mesh import mapped_alike, replicated
from trencadis.core.plan import warn_slow
from trencadis.core.primitive import Rules, register
from trencadis.core.target import Target

operation_p = Primitive("operation")
operation_p.multiple_results = True


class Operation(abc.ABC):
    """A function of arrays. It is hashable, and equal to another that computes the same."""

    @abc.abstractmethod
    def composed(self, *operands: Any, **_: Any) -> Sequence[Array]:
        """The results by operations of JAX."""

    def on_gpu(self, arch: str, *operands: Any, **_: Any) -> Sequence[Array] | None:
        """The results by Triton kernels for an architecture, or None where they do not take these operands."""
        return None

    def on_tpu(self, target: Target, *operands: Any, **_: Any) -> Sequence[Array] | None:
        """The results by Pallas kernels, or by operations of JAX that suit a TPU better; None if there are none."""
        return None


def run(operation: Operation, *operands: Value) -> list[Array]:
    """The results of an operation, in the way of the machine that it is lowered for."""
    return operation_p.bind(*vary_alike(*map(replicated, operands)), operation=operation)


def _abstract(*operands: ShapedArray, operation: Operation) -> tuple[list[ShapedArray], set[Effect]]:
    plain = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands)
    found = jax.eval_shape(operation.composed, *plain)
    return [result_type(operands, x.shape, x.dtype) for x in found], set()


def _jvp(
    primals: Sequence[Value], tangents: Sequence[Any], *, operation: Operation
) -> tuple[list[Array], Sequence[Any]]:
    """Values by the operation, and tangents of what it is composed of, in the operands that have tangents."""
    _, found = jvp_of_varied(operation.composed, primals, tangents)
    return operation_p.bind(*primals, operation=operation), found


def _batch(
    operands: Sequence[Value], axes: Sequence[int | None], *, operation: Operation
) -> tuple[Sequence[Array], list[int]]:
    out = jax.vmap(operation.composed, in_axes=tuple(axes))(*mapped_alike(operands, axes))
    return out, [0] * len(out)


def _execute(*operands: Array, operation: Operation, target: Target) -> Sequence[Array]:
    found = operation.on_tpu(target, *operands) if target.platform == "tpu" else _on_gpu(operation, target, *operands)
    return operation.composed(*operands) if found is None else found


def _on_gpu(operation: Operation, target: Target, *operands: Array) -> Sequence[Array] | None:
    """The results by Triton kernels; None if there are none, with a warning where they were wanted."""
    card = card_of(target)
    if isinstance(card, Card):
        return operation.on_gpu(card.arch, *operands)
    if target.platform in KERNELS and not target.partitioned and type(operation).on_gpu is not Operation.on_gpu:
        what = "routing, sort and gathers of an MoE layer run as XLA operations instead of kernels"
        warn_slow(f"{what}: {card.reason}", card.advice)
    return None


@functools.partial(jax.jit, static_argnames="operation")
def _eager(*operands: Value, operation: Operation) -> list[Array]:
    return operation_p.bind(*operands, operation=operation)


register(operation_p, Rules(_eager, _abstract, _jvp, None, _batch, _execute))
