"""The steps of an epilogue as XLA operations on a finished sum, for products whose kernel does not apply them.

Autodiff differentiates these operations, and a plan runs them after its kernel for the steps that it peels off.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Num

from trencadis.core.activation import Activation, activated
from trencadis.core.dtypes import accumulator, cast
from trencadis.core.epilogue import Extras, add
from trencadis.core.jax_compat import Value
from trencadis.core.problem import Form, Problem
from trencadis.core.spans import First, Sizes, local_group, owned, spans


def scale(problem: Problem, z: Array, extras: Extras, sizes: Sizes, first: First) -> Array:
    """Sums z, or their cotangents, times scales that are constant along k; unowned rows are 0 whatever their scales."""
    steps = problem.epilogue
    by_row, by_column = None if steps.row_block else extras.by_row, None if steps.column_block[0] else extras.by_column
    if by_row is None and by_column is None:
        return z
    z = z.astype(accumulator(z.dtype, np.float32))
    if problem.spans == 0:
        return jnp.zeros_like(z)
    if problem.form is Form.CONTRACTION:
        entries = z.shape[0] // problem.local_groups
        z = z if by_row is None else z * jnp.tile(by_row[:, :, None], (entries, 1, 1))
        z = z if by_column is None else z * jnp.tile(by_column[:, None, :], (entries, 1, 1))
        starts, ends = spans(problem, sizes, first)
        return jnp.where((ends > starts).reshape(-1, z.shape[0]).any(axis=0)[:, None, None], z, 0)
    if by_row is not None:
        z = z * by_row[:, None]
    if by_column is not None:
        z = z * jnp.take(by_column, local_group(problem, sizes, first), axis=0)
    return jnp.where(owned(problem, sizes, first)[:, None], z, 0)


def summed(problem: Problem, z: Num[Array, spans * shape]) -> Num[Array, g * shape]:
    """The results of a contraction, those of all batch entries added up if the problem says so."""
    return z.reshape(problem.batch, problem.local_groups, *z.shape[1:]).sum(axis=0) if problem.summed else z


def along_k(problem: Problem, extras: Extras, sizes: Sizes, first: First) -> tuple[Array | None, Array | None]:
    """The scales that change along k, one for each entry of lhs [rows, k] and of rhs; None where they do not change.

    Those of unowned rows and of empty groups, which may be anything, are 1.
    """
    by_row, by_column, (k, n) = extras.by_row, extras.by_column, problem.epilogue.column_block
    of_lhs = of_rhs = None
    if problem.epilogue.row_block and by_row is not None:
        spread = jnp.repeat(by_row, problem.epilogue.row_block, axis=1)[:, : problem.k]
        of_lhs = jnp.where(owned(problem, sizes, first)[:, None], spread, 1)
    if k and by_column is not None:
        starts, ends = (x.reshape(problem.batch, -1) for x in spans(problem, sizes, first))
        spread = jnp.repeat(jnp.repeat(by_column, k, axis=1), n, axis=2)[:, : problem.k, : problem.n]
        of_rhs = jnp.where((ends > starts).any(axis=0)[:, None, None], spread.astype(np.float32), 1)
        of_rhs = of_rhs.mT if problem.transpose_rhs else of_rhs
    return of_lhs, of_rhs


def times(x: Value, scales: Array | None, dtype: DTypeLike) -> Array:
    """An array times a scale for each of its entries, in a dtype; the array as it is if there are none."""
    x = jnp.asarray(x)
    return x if scales is None else cast(x.astype(accumulator(x.dtype, np.float32)) * scales, dtype)


def finish(
    problem: Problem, z: Array, sizes: Sizes, first: First, *, bias: Array | None = None, existing: Array | None = None
) -> Array:
    """The result from scaled sums z: plus bias [rows, n], then the activation, plus existing; in the result's dtype."""
    if bias is not None:
        z = add(z, bias)
    if problem.epilogue.activation is not None:
        return activate(problem, problem.epilogue.activation, z, sizes, first)
    if existing is None:
        return cast(z, problem.out)
    total = cast(add(existing, z), problem.out)
    if problem.form is Form.CONTRACTION:
        return total
    return jnp.where(owned(problem, sizes, first)[:, None], total, existing)


def bias_rows(problem: Problem, bias: Num[Value, "g n"], sizes: Sizes, first: First) -> Num[Array, "rows n"]:
    """The bias of each row [m, n]: that of its group, or 0 for unowned rows."""
    if problem.spans == 0:
        return jnp.zeros((problem.rows, problem.n), bias.dtype)
    rows = jnp.take(bias, local_group(problem, sizes, first), axis=0)
    return jnp.where(owned(problem, sizes, first)[:, None], rows, jnp.zeros_like(rows))


def activate(
    problem: Problem, activation: Activation, z: Num[Array, "rows n"], sizes: Sizes, first: First
) -> Num[Array, "rows n"]:
    """The result [rows, n] from sums z: the activation over owned rows, and 0 in unowned ones.

    While it runs, unowned rows hold a copy of an owned row: the activation never sees a 0 that is not a sum, where its
    slope may be infinite, and whatever it closes over gets no gradient from unowned rows.
    """
    mine = owned(problem, sizes, first)[:, None]  # [rows, 1]
    if problem.rows == 0:
        return jnp.zeros(problem.out_shape, problem.out)
    some = jax.lax.stop_gradient(jnp.take(z, jnp.argmax(mine[:, 0]), axis=0))[None]  # [1, n]
    some = jnp.where(jnp.any(mine), some, jnp.ones_like(some))
    y = cast(activated(activation, jnp.where(mine, z, some), problem.out), problem.out)
    return jnp.where(mine, y, jnp.zeros_like(y))
