"""The autodiff rules: one primitive for both forms, closed under differentiation, transposition and batching.

    rows         out[m, n]    = lhs[m, k] rhs[g, k, n]     d lhs: rows, with rhs transposed    d rhs: contraction
    contraction  out[g, k, n] = lhs[m, k] rhs[m, n]        d lhs: rows                         d rhs: rows

Derivatives are defined here, above the backends, so that a backend is never differentiated. The product is bilinear;
an epilogue is expanded into separate operations (`expand`) where a transformation has to look inside. A bias is itself
a product, of a column of ones with `[g, 1, n]`: its gradient is a contraction, summed in the accumulator's dtype over
owned rows only.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Effect, Primitive
from jax.interpreters import ad
from jax.sharding import AbstractMesh, AxisType
from jaxtyping import Array

from trencadis.backends import INTERPRETED
from trencadis.core import unfused
from trencadis.core.alike import sharded_like
from trencadis.core.dtypes import accumulator, cast
from trencadis.core.epilogue import Epilogue, Extras
from trencadis.core.execute import execute
from trencadis.core.jax_compat import Value, interpreter_effects, result_type, vary_alike
from trencadis.core.mesh import Spec, all_manual, explicit_axes, explicit_mesh, mapped, replicated, spec_of
from trencadis.core.partition import compute, dimensions, partition, result_dimensions
from trencadis.core.plan import plan, warn_if_slow
from trencadis.core.primitive import Divided, Factors, Rules, register
from trencadis.core.problem import Form, Problem
from trencadis.core.spans import clamped
from trencadis.core.split import sums_by_parts
from trencadis.core.target import Target
from trencadis.core.tiling import Overrides

Tangent: TypeAlias = Value | ad.Zero  # or a cotangent; symbolic zeros cost nothing
Linear: TypeAlias = Value | ad.UndefinedPrimal  # undefined where the transpose rule gives a cotangent

grouped_p = Primitive("grouped_matmul")
# the same inside `jax.shard_map`, where nothing is left to divide, and devices need not be known at lowering
local_p = Primitive("grouped_matmul")
PRODUCTS = (grouped_p, local_p)


def run(problem: Problem, overrides: Overrides, *operands: Value) -> Array:
    """The result of a problem: operands are lhs, rhs, sizes [batch, groups], first group [batch], then extras."""
    primitive = local_p if all_manual(*operands) else grouped_p
    return primitive.bind(*vary_alike(*map(replicated, operands)), problem=problem, overrides=overrides)


def expand(problem: Problem, overrides: Overrides, *operands: Value) -> Array:
    """The same result with the epilogue expanded into products and elementwise operations."""
    lhs, rhs, sizes, first, *extras = operands
    given = problem.epilogue.split(tuple(extras))
    if problem.epilogue.along_k:

        def multiply(part: Problem, *parts: Value) -> Array:
            return run(part, overrides.untiled, *parts)

        scales = Extras(by_row=given.by_row, by_column=given.by_column).given
        z = sums_by_parts(problem, multiply, lhs, rhs, sizes, first, *scales)
    else:
        products = problem.replace(out=problem.acc, epilogue=Epilogue(), summed=False)
        z = unfused.summed(problem, run(products, overrides, lhs, rhs, sizes, first))
        z = unfused.scale(problem, z, given, sizes, first)
    bias = None if given.bias is None else _bias_rows(problem, given.bias, sizes, first, problem.sum)
    return unfused.finish(problem, z, sizes, first, bias=bias, existing=given.existing)


def _bias_rows(problem: Problem, bias: Value, sizes: Value, first: Value, out: np.dtype) -> Array:
    ones = _ones(problem, bias)
    return run(_bias_problem(problem, ones, out), Overrides(), ones, bias[:, None, :], sizes, first)


def _ones(problem: Problem, other: Value) -> Array:
    """A column of ones [m, 1]: in the dtype of the other operand, if products of that are summed in `problem.sum`."""
    dtype = np.dtype(other.dtype)
    return jnp.ones((problem.rows, 1), dtype if accumulator(dtype, dtype) == problem.sum else problem.sum)


def _bias_problem(problem: Problem, ones: Value, out: np.dtype) -> Problem:
    """A bias as a product: a column of ones [m, 1] with [g, 1, n]; at full precision, since it is really a sum.

    It runs without overrides: those of the caller are meant for the product itself.
    """
    return problem.replace(
        k=1,
        lhs=np.dtype(ones.dtype),
        rhs=problem.epilogue.bias,
        out=out,
        transpose_rhs=False,
        interleaved=False,
        epilogue=Epilogue(),
        precision=jax.lax.Precision.HIGHEST,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Forward mode


def _jvp(
    primals: Sequence[Value], tangents: Sequence[Tangent], *, problem: Problem, overrides: Overrides
) -> tuple[Array, Tangent]:
    if not jnp.issubdtype(problem.out, jnp.inexact):
        out = run(problem, overrides, *primals)
        return out, _no_tangent(out)
    lhs, rhs, sizes, first, *extras = primals
    d_lhs, d_rhs, _, _, *d_extras = tangents
    d_by_row, d_by_column, d_bias, d_existing = problem.epilogue.split(tuple(d_extras))
    if any(x is not None and not isinstance(x, ad.Zero) for x in (d_by_row, d_by_column)):
        return jax.jvp(functools.partial(expand, problem, overrides), *_instantiated(primals, tangents))
    *scales, bias, _ = problem.epilogue.split(tuple(extras))
    plain = problem.replace(epilogue=problem.epilogue.scaling)
    after = (sizes, first, *(x for x in scales if x is not None))
    d_z: list[Value] = []
    if not isinstance(d_lhs, ad.Zero):
        d_z.append(run(plain, overrides, sharded_like(d_lhs, lhs), rhs, *after))
    if not isinstance(d_rhs, ad.Zero):
        d_z.append(run(plain, overrides, lhs, sharded_like(d_rhs, rhs), *after))
    if bias is not None and not isinstance(d_bias, ad.Zero):
        d_bias = sharded_like(d_bias, bias)
        d_z.append(_bias_rows(problem, d_bias, sizes, first, problem.out))
    if d_existing is not None and not isinstance(d_existing, ad.Zero):
        d_z.append(d_existing)

    activation = problem.epilogue.activation
    if activation is None:
        out = run(problem, overrides, *primals)
        return out, functools.reduce(ad.add_jaxvals, d_z) if d_z else _no_tangent(out)
    z = run(problem.without_activation, overrides, *primals)

    def finish(z: Array) -> Array:
        return unfused.activate(problem, activation, z, sizes, first)

    if not d_z:
        out = finish(z)
        return out, _no_tangent(out)
    return jax.jvp(finish, (z,), (functools.reduce(ad.add_jaxvals, d_z).astype(problem.sum),))


def _instantiated(primals: Sequence[Value], tangents: Sequence[Tangent]) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
    """Primals and tangents as `jax.jvp` takes them, with arrays for symbolic zeros."""
    return tuple(primals), tuple(map(ad.instantiate_zeros, tangents))


def _no_tangent(out: Array) -> ad.Zero:
    return ad.Zero(jax.typeof(out).to_tangent_aval())


# ---------------------------------------------------------------------------------------------------------------------
# Reverse mode: the adjoint table


def _transpose(
    ct: Tangent,
    lhs: Linear,
    rhs: Linear,
    sizes: Value,
    first: Value,
    *extras: Linear,
    problem: Problem,
    overrides: Overrides,
) -> Sequence[Tangent | None]:
    operands = (lhs, rhs, sizes, first, *extras)
    if isinstance(ct, ad.Zero):
        return [ad.Zero(x.aval) if isinstance(x, ad.UndefinedPrimal) else None for x in operands]
    ct = jnp.asarray(ct) if isinstance(ct, np.ndarray) else ct
    if problem.epilogue.activation is not None:
        raise ValueError(f"cannot transpose {problem}: it is not linear")
    steps, scales = problem.epilogue, problem.epilogue.split(extras)
    d_lhs, d_rhs = ADJOINTS[problem.form]
    d_product = unfused.scale(problem, ct, scales, sizes, first)  # those that do not change along k are factors of ct
    narrow = ct.dtype == jnp.bfloat16  # its exponents hold the scaled values; other 16-bit floats may underflow
    d_product = d_product.astype(ct.dtype) if narrow else d_product
    plain = problem.replace(epilogue=Epilogue(), out=np.dtype(d_product.dtype))
    known_lhs, known_rhs = typing.cast("tuple[Value, Value]", (lhs, rhs))  # where a rule reads them
    of_lhs, of_rhs = unfused.along_k(problem, scales, sizes, first)  # of each entry of lhs and rhs, where they change

    def d_left() -> Array:
        transposed = [scales.by_column.mT] if scales.by_column is not None and steps.column_block[0] else []
        scaled = plain.replace(epilogue=steps.transposed)
        found = d_lhs(scaled, overrides, d_product, known_rhs, sizes, first, *transposed)
        return unfused.times(found, of_lhs, problem.lhs)

    def d_right() -> Array:
        known = unfused.times(known_lhs, of_lhs, ct.dtype if narrow else problem.sum)
        return unfused.times(d_rhs(plain, overrides, d_product, known, sizes, first), of_rhs, problem.rhs)

    def d_bias() -> Array:
        ones = _ones(problem, ct)
        return _rows_d_rhs(_bias_problem(problem, ones, problem.out), Overrides(), ct, ones, sizes, first)[:, 0]

    d_extras = [d_bias] * (problem.epilogue.bias is not None) + [lambda: ct] * problem.epilogue.accumulate
    rules: list[Callable[[], Value | None]] = [
        d_left,
        d_right,
        lambda: None,
        lambda: None,
        *[lambda: None] * (problem.epilogue.by_row + problem.epilogue.by_column),
        *d_extras,
    ]
    return [rule() if isinstance(x, ad.UndefinedPrimal) else None for x, rule in zip(operands, rules, strict=True)]


def _rows_d_lhs(problem: Problem, overrides: Overrides, ct: Value, *operands: Value) -> Array:
    """ct [m, n] x rhs [g, k, n] -> [m, k]: rows again, with rhs and its scales transposed."""
    derived = problem.replace(k=problem.n, n=problem.k, lhs=problem.out, out=problem.lhs,
                              transpose_rhs=not problem.transpose_rhs)  # fmt: skip
    return run(derived, overrides.derive(overrides.tilings.d_lhs, swap=True), ct, *operands)


def _rows_d_rhs(problem: Problem, overrides: Overrides, ct: Value, lhs: Value, sizes: Value, first: Value) -> Array:
    """lhs [m, k] x ct [m, n] -> [g, k, n]: a contraction; batch entries that share weights are summed."""
    swap, shared = problem.transpose_rhs, problem.batch // problem.rhs_batch
    a, b = (ct, lhs) if swap else (lhs, ct)
    derived = problem.replace(
        form=Form.CONTRACTION,
        k=problem.n if swap else problem.k,
        n=problem.k if swap else problem.n,
        lhs=np.dtype(a.dtype),
        rhs=np.dtype(b.dtype),
        out=problem.rhs if shared == 1 or problem.rhs_batch == 1 else problem.acc,
        transpose_rhs=False,
        interleaved=False,
        rhs_batch=1,
        summed=shared > 1 and problem.rhs_batch == 1,
    )
    out = run(derived, overrides.derive(overrides.tilings.d_rhs, swap=swap), a, b, sizes, first)
    if shared > 1 and not derived.summed:
        out = cast(out.reshape(shared, problem.weights, *out.shape[1:]).sum(axis=0), problem.rhs)
    return out


def _contraction_d_lhs(
    problem: Problem, overrides: Overrides, ct: Value, rhs: Value, sizes: Value, first: Value
) -> Array:
    """rhs [m, n] x ct [g, k, n] -> [m, k]: rows, with ct transposed."""
    derived = _rows_of(problem, k=problem.n, n=problem.k, lhs=problem.rhs, out=problem.lhs, transpose_rhs=True)
    out = run(derived, overrides.derive(overrides.tilings.d_lhs, swap=True), rhs, ct, sizes, first)
    return out.T if problem.transpose_lhs else out


def _contraction_d_rhs(
    problem: Problem, overrides: Overrides, ct: Value, lhs: Value, sizes: Value, first: Value
) -> Array:
    """lhs [m, k] x ct [g, k, n] -> [m, n]: rows."""
    derived = _rows_of(problem, lhs=problem.lhs, out=problem.rhs)
    lhs = lhs.T if problem.transpose_lhs else lhs
    return run(derived, overrides.derive(overrides.tilings.d_rhs, swap=False), lhs, ct, sizes, first)


def _rows_of(problem: Problem, **changes: Any) -> Problem:
    """The rows problem whose weights have the shape and dtype of this contraction's result."""
    entries = 1 if problem.summed else problem.batch
    return problem.replace(
        form=Form.ROWS, rhs=problem.out, rhs_batch=entries, transpose_lhs=False, summed=False, **changes
    )


ADJOINTS: dict[Form, tuple[Callable[..., Array], Callable[..., Array]]] = {
    Form.ROWS: (_rows_d_lhs, _rows_d_rhs),
    Form.CONTRACTION: (_contraction_d_lhs, _contraction_d_rhs),
}


# ---------------------------------------------------------------------------------------------------------------------
# Batching


def _batch(
    args: Sequence[Value], dims: Sequence[int | None], *, problem: Problem, overrides: Overrides
) -> tuple[Array, int]:
    mesh = explicit_mesh(*args)
    if mesh is not None and any(kind == AxisType.Manual for kind in mesh.axis_types):
        args = tuple(map(replicated, args))  # XLA refuses a `shard_map` inside of another here
    elif mesh is not None:  # the axis itself is sharded
        return _batch_on_mesh(mesh, args, dims, problem, overrides)
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    if not size:  # no problem below has a batch of 0
        empty: Value = jnp.zeros((0, *problem.out_shape), problem.out)
        return jnp.asarray(vary_alike(empty, *args)[0]), 0
    if problem.epilogue or problem.summed:
        return jax.vmap(functools.partial(expand, problem, overrides), in_axes=tuple(dims))(*args), 0
    lhs, rhs, sizes, first = (x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims, strict=True))
    batched = tuple(d is not None for d in dims)
    if problem.form is Form.ROWS and batched == (True, False, False, False):
        return _fold_rows(problem, overrides, lhs, rhs, sizes, first)
    if problem.form is Form.CONTRACTION and batched in ((True, False, False, False), (False, True, False, False)):
        return _fold_columns(problem, overrides, lhs, rhs, sizes, first)
    shared = problem.form is Form.ROWS and not batched[1]  # all entries meet the same weights: no copies of them

    def everywhere(x: Value, b: bool) -> Value:
        return x if b else jnp.broadcast_to(x, (size, *x.shape))

    lhs, sizes, first = (everywhere(x, batched[i]) for i, x in ((0, lhs), (2, sizes), (3, first)))
    rhs = rhs if shared else everywhere(rhs, batched[1])
    return _lay_end_to_end(problem, overrides, size, shared, lhs, rhs, sizes, first)


def _batch_on_mesh(
    mesh: AbstractMesh, args: Sequence[Value], dims: Sequence[int | None], problem: Problem, overrides: Overrides
) -> tuple[Array, int]:
    """Each device has the entries of an axis that are on it; other dimensions are not sharded here."""
    specs = [spec_of(jax.typeof(x).sharding, mesh, x.ndim) for x in args]
    over = next((spec[d] for spec, d in zip(specs, dims, strict=True) if d is not None and spec[d]), ())

    def local(*args: Array) -> Array:
        out, axis = _batch(args, dims, problem=problem, overrides=overrides)
        return jnp.moveaxis(out, axis, 0)

    divided = [
        tuple(over if i == d else () for i in range(x.ndim)) for x, d in zip(args, dims, strict=True)
    ]  # fmt: skip
    result = (over, *((),) * len(problem.out_shape))
    return mapped(local, mesh, divided, result, explicit_axes(mesh))(*args), 0


def _fold_rows(
    problem: Problem, overrides: Overrides, lhs: Value, rhs: Value, sizes: Value, first: Value
) -> tuple[Array, int]:
    """Only lhs [b, m, k] is batched: b rows for each row, in groups b times as tall, meet each weight once."""
    size = lhs.shape[0]
    rows = jnp.moveaxis(lhs, 0, 1).reshape(problem.rows * size, problem.k)
    taller = clamped(sizes, problem.m) * np.int32(size)
    out = run(problem.replace(m=problem.m * size), overrides, rows, rhs, taller, first)
    return out.reshape(problem.rows, size, problem.n), 1


def _fold_columns(
    problem: Problem, overrides: Overrides, lhs: Value, rhs: Value, sizes: Value, first: Value
) -> tuple[Array, int]:
    """A contraction with only one operand batched: the batch is more columns of it, k or n."""
    k, n = problem.k, problem.n
    if rhs.ndim == 3:
        size = rhs.shape[0]
        wide: Value = jnp.moveaxis(rhs, 0, 1).reshape(problem.rows, size * n)
        out = run(problem.replace(n=size * n), overrides, lhs, wide, sizes, first)
        return out.reshape(problem.spans, k, size, n), 2
    size = lhs.shape[0]
    stored = (size * k, problem.rows) if problem.transpose_lhs else (problem.rows, size * k)
    wide = (lhs if problem.transpose_lhs else jnp.moveaxis(lhs, 0, 1)).reshape(stored)
    out = run(problem.replace(k=size * k), overrides, wide, rhs, sizes, first)
    return out.reshape(problem.spans, size, k, n), 1


def _lay_end_to_end(
    problem: Problem, overrides: Overrides, size: int, shared: bool, lhs: Value, rhs: Value, sizes: Value, first: Value
) -> tuple[Array, int]:
    """The general case: `size` times as many batch entries, in an order in which weights repeat modulo their number."""
    entries, cycle = problem.batch, problem.rhs_batch
    own_weights = problem.form is Form.ROWS and not shared
    # entries that shared weights so far go outside of the new axis, along which the weights differ
    turns = entries // cycle if own_weights else 1

    def lay(x: Value) -> Array:  # [size, entries * per, ...] -> [turns, size, rest, ...] -> [turns * size * rest, ...]
        _, length, *tail = x.shape
        x = jnp.moveaxis(x.reshape(size, turns, length // turns, *tail), 0, 1)
        return x.reshape(size * length, *tail)

    def unlay(out: Value) -> Array:
        length, *tail = problem.out_shape
        out = jnp.moveaxis(out.reshape(turns, size, length // turns, *tail), 1, 0)
        return out.reshape(size, length, *tail)

    if problem.transpose_lhs:  # [size, k, rows] -> [k, size * rows]
        lhs = jnp.moveaxis(lhs, 0, 1).reshape(problem.k, size * problem.rows)
    else:
        lhs = lay(lhs)
    if not shared:
        rhs = rhs.reshape(size * rhs.shape[1], *rhs.shape[2:])
    larger = problem.replace(batch=entries * size, rhs_batch=cycle * size if own_weights else cycle)
    return unlay(run(larger, overrides, lhs, rhs, lay(sizes), lay(first))), 0


# ---------------------------------------------------------------------------------------------------------------------
# Registration


def _abstract(*operands: ShapedArray, problem: Problem, overrides: Overrides) -> tuple[ShapedArray, set[Effect]]:
    interpreted = overrides.interpret and overrides.backend in INTERPRETED
    return result_type(operands, problem.out_shape, problem.out), interpreter_effects() if interpreted else set()


def executed(*operands: Array, problem: Problem, overrides: Overrides, target: Target) -> Array:
    """The result of a problem for a target: planned, with a warning if no kernel runs it, and executed."""
    chosen = plan(problem, target, overrides)
    warn_if_slow(chosen, overrides)
    with jax.named_scope(f"{problem.form.value}_{chosen.backend}"):
        return execute(chosen, *operands)


@functools.partial(jax.jit, static_argnames=("problem", "overrides"))
def _eager(*operands: Value, problem: Problem, overrides: Overrides) -> Array:
    return grouped_p.bind(*operands, problem=problem, overrides=overrides)


def _divide(
    specs: Sequence[Spec], devices: Mapping[Hashable, int], wanted: Spec, *, problem: Problem, overrides: Overrides
) -> Divided:
    """What each device computes of a problem that XLA divides over a mesh."""
    part = partition(problem, specs, devices, wanted)

    def multiply(problem: Problem, *operands: Value) -> Array:
        return local_p.bind(*operands, problem=problem, overrides=overrides)

    return Divided(functools.partial(compute, part, multiply), part.operands, part.result)


def _factors(*, problem: Problem, overrides: Overrides) -> Factors:
    """The dimensions of a problem by name; those of sizes and of blocks have names of their own."""
    operands = [
        [f"{name}{i}" if name in "bhRKN" else name for name in names] for i, names in enumerate(dimensions(problem))
    ]
    whole = [name for names in operands for name in names if len(name) > 1]
    return Factors(operands, list(result_dimensions(problem)), whole)


register(local_p, Rules(_eager, _abstract, _jvp, _transpose, _batch, executed))
register(grouped_p, Rules(_eager, _abstract, _jvp, _transpose, _batch, executed, _divide, _factors))
