"""The parts of a layer, each timed alone: its grouped matmuls, and what is not a product."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import trencadis as tr
from benchmarks.moe.layers import Operands
from benchmarks.moe.shapes import FORWARD, MoeShape
from benchmarks.peers import DTYPES
from trencadis import moe


class Part(NamedTuple):
    """A jitted function, what it takes of the operands, and the bytes that it must read and write at least."""

    fn: Any
    args: Callable[[Operands], tuple[Any, ...]]
    bytes: int = 0


def products(shape: MoeShape, which: str) -> dict[str, Part]:
    """The grouped matmuls of a pass: two of a forward pass, six of a step, with gate and up as one product.

    A decode step has gate and up both as one product and as two, since layers have either.
    """
    dtype = DTYPES[shape.dtype]

    def rows(transposed: bool = False) -> Any:
        return jax.jit(lambda x, w, sizes: tr.grouped_matmul(x, w, sizes, dtype, transpose_rhs=transposed))

    def contraction() -> Any:
        call = functools.partial(tr.transposed_grouped_matmul, preferred_element_type=dtype, transpose_lhs=True)
        return jax.jit(lambda x, y, sizes: call(x, y, sizes))

    def sizes(x: Operands) -> Any:
        return x.permutation.sizes

    found = {
        "gate_up": Part(rows(), lambda x: (x.rows, x.joined.gate_up, sizes(x))),
        "down": Part(rows(), lambda x: (x.h, x.joined.down, sizes(x))),
    }
    if shape.weights:
        found["gate"] = Part(rows(), lambda x: (x.rows, x.params.gate, sizes(x)))
        found["up"] = Part(rows(), lambda x: (x.rows, x.params.up, sizes(x)))
    if which == FORWARD:
        return found
    return {
        **found,
        "d_h": Part(rows(True), lambda x: (x.rows, x.joined.down, sizes(x))),
        "d_down": Part(contraction(), lambda x: (x.h, x.rows, sizes(x))),
        "d_gate_up": Part(contraction(), lambda x: (x.rows, x.z, sizes(x))),
        "d_rows": Part(rows(True), lambda x: (x.z, x.joined.gate_up, sizes(x))),
    }


def sequence(shape: MoeShape, which: str) -> Part:
    """The same grouped matmuls as one program, which runs them one after the other."""
    each = products(shape, which).values()

    def run(*args: tuple[Any, ...]) -> list[Any]:
        return [part.fn(*given) for part, given in zip(each, args, strict=True)]

    return Part(jax.jit(run), lambda x: tuple(part.args(x) for part in each))


def dense(shape: MoeShape, which: str) -> Part:
    """Dense matmuls of as many FLOPs, one after the other: each product with one matrix for all rows."""

    def run(rows: Any, h: Any, z: Any, gate_up: Any, down: Any) -> list[Any]:
        found = [rows @ gate_up, h @ down]
        return found if which == FORWARD else [*found, rows @ down.T, h.T @ rows, rows.T @ z, z @ gate_up.T]

    return Part(jax.jit(run), lambda x: (x.rows, x.h, x.z, _first(x.joined.gate_up), _first(x.joined.down)))


def _first(w: Any) -> Any:
    """The first of some matrices, also of those that are described by a shape."""
    return jax.ShapeDtypeStruct(w.shape[1:], w.dtype) if isinstance(w, jax.ShapeDtypeStruct) else w[0]


def total(seconds: Mapping[str, float]) -> float:
    """The sum of the products; where gate and up are also two, the faster form counts."""
    others = sum(each for name, each in seconds.items() if name not in ("gate", "up", "gate_up"))
    if "gate" not in seconds:
        return others + seconds["gate_up"]
    return others + min(seconds["gate_up"], seconds["gate"] + seconds["up"])


def others(shape: MoeShape) -> dict[str, Part]:
    """What is not a product: logits, route, sort, the gather of rows, the weighted sum, and a copy to compare with."""
    wide = jnp.dtype(DTYPES[shape.dtype]).itemsize
    t, m, d, e = shape.t, shape.m, shape.d, shape.e
    tokens, rows, integers = t * d * wide, m * d * wide, 4 * m
    return {
        "logits": Part(
            jax.jit(lambda x, router: (x @ router).astype(jnp.float32)),
            lambda x: (x.params.x, x.params.router), tokens + d * e * wide + 4 * t * e,
        ),
        # experts and weights are written, and probs; sizes are few
        "route": Part(jax.jit(lambda x: moe.route(x, shape.k)), lambda x: (x.logits,), 8 * t * e + 2 * integers),
        "sort": Part(
            jax.jit(lambda experts: moe.sort_by_expert(experts, e)), lambda x: (x.routing.experts,), 3 * integers
        ),
        "gather": Part(
            jax.jit(lambda x, by: moe.permute(x, by)), lambda x: (x.params.x, x.permutation), tokens + rows + integers
        ),
        "gather_sum": Part(
            jax.jit(lambda y, w, by: moe.combine(y, w, by)),
            lambda x: (x.rows, x.routing.weights, x.permutation), rows + tokens + 2 * integers,
        ),
        "copy": Part(jax.jit(lambda y: -y), lambda x: (x.rows,), 2 * rows),  # a plain copy is no kernel
    }  # fmt: skip
