"""A loop over groups with a full matmul of all rows for each: slow and simple, the reference for other backends."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from trencadis.backends.prepare import int4_as_int8
from trencadis.core.decision import Plan, Refusal
from trencadis.core.dtypes import cast
from trencadis.core.epilogue import ALONG_K, Extras, add
from trencadis.core.problem import Form, Problem
from trencadis.core.schedule import RowTile
from trencadis.core.spans import spans
from trencadis.core.target import Target
from trencadis.core.tiling import Overrides, Tiling


def plan(problem: Problem, target: Target, overrides: Overrides) -> Plan | Refusal:
    """A plan for any problem on any target, or a refusal if its scales change along k."""
    if problem.epilogue.along_k:
        return Refusal(backend="reference", reason=ALONG_K)
    tiling = overrides.tilings.forward or Tiling(max(problem.m, 1), max(problem.k, 1), max(problem.n, 1))
    because = f"{problem.spans} full matmuls of all {problem.rows} rows, one for each group"
    return Plan(asked=problem, problem=problem, target=target, backend="reference", tiling=tiling, because=because)


def run(plan: Plan, *operands: jax.Array) -> jax.Array:
    """The result of a plan's problem: for each group, mask its rows, multiply, and select its part of the result."""
    problem = int4_as_int8(plan.problem)
    lhs, rhs, group_sizes, first, *extras = operands
    by_row, by_column, bias, existing = problem.epilogue.split(tuple(extras))
    starts, ends = spans(problem, group_sizes, first)
    lhs = (lhs.T if problem.transpose_lhs else lhs).astype(problem.acc)  # [rows, k]
    row = jnp.arange(problem.rows)[:, None]

    def rows(i: Any, out: jax.Array) -> jax.Array:
        mine = (row >= starts[i]) & (row < ends[i])
        w = rhs[i % problem.weights].astype(problem.acc)  # [k, n] or [n, k]
        y = jnp.dot(jnp.where(mine, lhs, 0), w.T if problem.transpose_rhs else w, precision=precision)
        row_scale = None if by_row is None else by_row[:, None]
        y = problem.epilogue.finish(y, Extras(row_scale, _of(by_column, i), _of(bias, i)), problem.out)
        y = y if existing is None else add(existing, y)
        return jnp.where(mine, cast(y, problem.out), out)

    def contraction(i: Any, out: jax.Array) -> jax.Array:
        mine = (row >= starts[i]) & (row < ends[i])
        x, y = jnp.where(mine, lhs, 0), jnp.where(mine, rhs.astype(problem.acc), 0)  # float8_e8m0fnu has no 0
        row_scale = None if by_row is None else by_row[i][:, None]
        z = jnp.dot(x.T, y, precision=precision)
        z = problem.epilogue.finish(z, Extras(row_scale, _of(by_column, i)), problem.out)
        z = cast(z if existing is None else add(existing[i], z), problem.out)
        return out.at[i].set(jnp.where(ends[i] > starts[i], z, out[i]))  # scales of an empty group may be NaN

    precision = problem.precision if problem.precision is not None else lax.Precision.HIGHEST
    body = rows if problem.form is Form.ROWS else contraction
    out = jnp.zeros(problem.out_shape, problem.out) if existing is None else existing
    if problem.spans == 0:
        return out
    return lax.fori_loop(0, problem.spans, body, out)


def row_tiles(problem: Problem, layout: None, start: int, end: int) -> list[RowTile]:
    """The one tile of a group that owns the rows [start, end): all rows."""
    return [RowTile(range(problem.rows), range(start, end))] if start < end else []


def _of(x: jax.Array | None, i: Any) -> jax.Array | None:
    """Row i of an array [g, n] as [1, n]; None if there is no array."""
    return None if x is None else x[i][None]
