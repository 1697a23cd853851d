"""TPU kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from trencadis.backends.tpu.kernel import call
from trencadis.backends.tpu.layout import Layout, up
from trencadis.problem import Form, Problem

Array = jax.Array


def execute(problem: Problem, layout: Layout, *operands: Array, **options) -> Array:
    lhs, rhs, group_sizes, first, *extras = operands
    bias, existing = problem.epilogue.split(tuple(extras))
    rows = up(problem.rows, layout.slab)
    pad = rows - problem.rows
    by_axis = lambda x, axis: jnp.pad(x, [(0, pad if i == axis else 0) for i in range(x.ndim)]) if pad else x
    lhs = by_axis(lhs, 1 if problem.transpose_lhs else 0)
    out_shape = problem.out_shape
    if problem.form is Form.CONTRACTION:
        rhs = by_axis(rhs, 0)
    else:
        out_shape = (rows, problem.n)
    named = {"sizes": group_sizes.astype(jnp.int32).reshape(-1), "first": first, "table": jnp.asarray(layout.table, jnp.int32), "lhs": lhs, "rhs": rhs}
    if bias is not None:
        named["bias"] = bias[:, None, :]
    if existing is not None:
        named["existing"] = by_axis(existing, 0) if problem.form is Form.ROWS else existing
    out = call(problem, layout, named, out_shape, **options)
    return out[: problem.rows] if problem.form is Form.ROWS and pad else out
