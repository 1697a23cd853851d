"""Gated activations in the rows form: the operands and results that they add, and their arithmetic on one chunk.

    forward     rhs, rhs_up -> out = activation(gate, up); to be kept, out_gate and out_up
    pullback    d h = lhs @ rhs, z_gate, z_up, weight -> d_gate, d_up, weighted = weight * h, row_sums of d h * h

The sums over n in row_sums are those of one chunk each, in a vector of 128 lanes per row that is 0 beside the first;
XLA adds them up. Their order is fixed, so the total is the same in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from trencadis.backends.tpu.indexing import LANES, BlockedAxis, Value
from trencadis.backends.tpu.layout import Layout
from trencadis.core.activation import elementwise
from trencadis.core.epilogue import Gate
from trencadis.core.problem import Problem

FLOAT32 = np.dtype(np.float32)


class Result(NamedTuple):
    """A matrix that a kernel of the rows form writes: its columns in blocks and chunks, and its dtype."""

    axis: BlockedAxis
    dtype: np.dtype[Any]


def is_pullback(problem: Problem) -> bool:
    """Whether a problem is the pullback of a gated activation."""
    return problem.gate is not None and problem.gate.pullback


def weights(problem: Problem) -> tuple[str, ...]:
    """The names of the weights, each of which is multiplied by lhs."""
    return ("rhs",) if problem.gate is None or problem.gate.pullback else ("rhs", "rhs_up")


def matrices(problem: Problem) -> tuple[str, ...]:
    """The names of the operands [m, n], of the shape and dtype of the result."""
    return ("z_gate", "z_up") if is_pullback(problem) else ("existing",) * problem.epilogue.accumulate


def results(problem: Problem, layout: Layout) -> dict[str, Result]:
    """The results of the kernel by name, in order."""
    n = BlockedAxis(problem.n, layout.block_n, layout.chunk)
    names = ["out"]
    if problem.gate is not None:
        names = (
            ["d_gate", "d_up", "weighted"]
            if problem.gate.pullback
            else names + ["out_gate", "out_up"] * problem.gate.keep
        )
    found = {name: Result(n, problem.out) for name in names}
    if is_pullback(problem):
        found["row_sums"] = Result(BlockedAxis(n.num_chunks * LANES, layout.chunks * LANES, LANES), FLOAT32)
    return found


def activated(gate: Gate, out: np.dtype[Any], sums: Sequence[Value]) -> list[Value]:
    """The activation of two tiles of sums, and with `gate.keep` both sums; it sees them rounded, as they are kept."""
    z = [each.astype(out) for each in sums]
    assert gate.activation is not None
    h = elementwise(gate.activation)(*(each.astype(FLOAT32) for each in z))
    return [h, *z] if gate.keep else [h]


def pulled_back(gate: Gate, d_h: Value, z: Sequence[Value], weight: Value, real: Value | None) -> list[Value]:
    """The results of the pullback from tiles of d h and z and the weights [rows, 1].

    `real` marks the columns that exist, in a chunk that has others.
    """
    assert gate.activation is not None
    h, pullback = jax.vjp(elementwise(gate.activation), *(each.astype(FLOAT32) for each in z))
    d_gate, d_up = pullback((weight * d_h).astype(h.dtype))
    product = d_h * h if real is None else jnp.where(real, d_h * h, 0)
    total = jnp.sum(product, axis=1, keepdims=True)  # [rows, 1]
    lane = lax.broadcasted_iota(jnp.int32, (total.shape[0], LANES), 1)
    return [d_gate, d_up, weight * h, jnp.where(lane == 0, total, 0)]
