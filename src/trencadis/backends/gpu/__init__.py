"""Pallas kernels for Hopper GPUs: copies, products and stores run beside each other, in tiles as tall as a group needs.

run         operands as the kernel wants them; the kernel; the result as the problem wants it
choose      the layout for a problem
kernel      the roles of the warpgroups of a block; what the form does in each (rows, contraction)
shapes      what a warpgroup multiplies at a time
unpack      weights of few bits in registers
walk, mail  the order of tiles, and how the warpgroups hear of it
stores      the epilogue, and the way out
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from trencadis.backends.gpu.choose import choose, multiplied, obey, packed, split, tiling_of
from trencadis.backends.gpu.layout import BLOCK, GRAIN, Layout, line
from trencadis.backends.prepare import filled, flat_sizes, up
from trencadis.core.devices import Card, card_for
from trencadis.core.dtypes import accumulator
from trencadis.core.epilogue import activated, elementwise, inlined
from trencadis.core.jax_compat import apart, gpu_interpreter
from trencadis.core.problem import Form, Problem
from trencadis.core.spans import owned
from trencadis.core.target import Target
from trencadis.core.tiling import Tiling

Array = jax.Array

RESULTS = ("bfloat16", "float16", "float32")
OPERANDS = (*RESULTS, "float8_e4m3fn", "float8_e5m2", "int8")
BOX = 256  # entries that one copy takes along an axis
TF32 = ("tensorfloat32", lax.DotAlgorithmPreset.TF32_TF32_F32, lax.DotAlgorithmPreset.DEFAULT)


def supports(problem: Problem, target: Target) -> str | None:
    """Products of operands that the tensor cores of a Hopper GPU multiply."""
    if target.platform != "cuda":
        return f"it runs on NVIDIA GPUs; the target is {target}"
    if target.partitioned:
        return "XLA cannot partition a kernel over devices; wrap the call in jax.shard_map"
    if target.kind is None:
        return "its kernels are for Hopper GPUs, and which GPU this is for is not known here"
    if card_for(target) is None:
        return f"its kernels are for Hopper GPUs; the target is {target}"
    return _arithmetic(problem) or _size(problem) or _missing()


@functools.cache
def _missing() -> str | None:
    """Why Pallas for GPUs cannot be had here: that of jax < 0.11 wants a package which jax does not bring along."""
    try:
        importlib.import_module("trencadis.backends.gpu.kernel")
    except ImportError as error:
        return f"Pallas for GPUs does not import: {error}"
    return None


def _arithmetic(problem: Problem) -> str | None:
    """Why the kernels cannot compute it."""
    weights = (*OPERANDS, "int4") if packed(problem) else OPERANDS
    dtypes = [("lhs", problem.lhs, OPERANDS), ("rhs", problem.rhs, weights), ("the result", problem.out, RESULTS)]
    if problem.epilogue.bias is not None:
        dtypes.append(("bias", problem.epilogue.bias, RESULTS))
    for name, dtype, known in dtypes:
        if dtype.name not in known:
            return f"{name} is {dtype.name}; it takes {', '.join(known)}"
    if problem.epilogue.blocks and multiplied(problem).itemsize > 1:
        return f"scales change along k; it takes them with operands of 8 bits, not {problem.lhs.name}"
    if problem.epilogue.blocks and problem.k > BOX * problem.epilogue.blocks:
        return f"scales change along k; it takes at most {BOX} of them, for k = {problem.k} there are more"
    if (
        (multiplied(problem) == jnp.float32 or split(problem))
        and problem.asked not in TF32
        and problem.precisions != {lax.Precision.DEFAULT}
    ):
        how = "two bfloat16 numbers" if split(problem) else "tf32"
        return f"precision is {problem.asked}; it multiplies float32 as {how}"
    return None


def _size(problem: Problem) -> str | None:
    """Why there is no work for the kernels, or too much."""
    if 0 in (problem.k, *problem.out_shape, problem.rows, problem.spans, problem.groups):
        return "there is nothing to multiply"
    high = -(-problem.rows // BLOCK) + 3 * problem.spans  # at most so many tiles in a column
    if problem.form is Form.CONTRACTION:
        high = problem.spans * -(-problem.k // BLOCK)
    tiles = high * -(-problem.n // BLOCK)
    return None if tiles < 2**31 else f"{tiles} tiles are too many to count in 32 bits"


def tiling(problem: Problem, target: Target) -> Tiling:
    """The tallest tile of the result, and the step of its sum."""
    return tiling_of(problem, choose(problem, _card(target)))


def run(problem: Problem, plan: Any, *operands: Array) -> Array:
    """The result of a problem."""
    activation = problem.epilogue.activation
    if activation is not None and not _lowers(activation, accumulator(problem.sum, problem.out)):
        epilogue = dataclasses.replace(problem.epilogue, activation=None)
        sums = run(problem.replace(epilogue=epilogue, out=problem.sum), plan, *operands)
        mine = owned(problem, *operands[2:4])[:, None]
        return jnp.where(mine, activated(activation, sums, problem.out), 0).astype(problem.out)
    layout = choose(problem, _card(plan.target))
    if plan.tiling != tiling_of(problem, layout):
        layout = obey(problem, _card(plan.target), plan.tiling)
    return execute(problem, layout, *operands, interpret=gpu_interpreter() if plan.interpret else None)


def execute(problem: Problem, layout: Layout, *operands: Array, interpret: Any = None) -> Array:
    """The result of a problem by a kernel of this layout; each operand is padded where a copy engine wants it."""
    from trencadis.backends.gpu import store as stores  # here, so that who has no GPU needs nothing of what it imports
    from trencadis.backends.gpu.kernel import call
    from trencadis.backends.gpu.upcast import ordered

    lhs, rhs, sizes, first, *extras = operands
    ends = problem.epilogue.split(tuple(extras))
    if interpret is not None:  # which has no atomic operations, and no factors in registers
        layout = layout.replace(claim=False, blocks=min(layout.blocks, 2), widened=layout.packed)
    inner, named = _stored(problem, layout, lhs, rhs, interpret is not None)
    if layout.packed and not layout.widened:
        named["lhs"] = ordered(named["lhs"], inner.rhs)
    named["sizes"] = flat_sizes(sizes, problem.m)
    named["first"] = first
    out_shape = (*problem.out_shape[:-1], inner.n)
    if problem.epilogue.blocks:  # rows of what a copy finds, one step after the other
        ends = ends._replace(by_row=ends.by_row.mT, by_column=ends.by_column.mT)
        length = stores.notes(inner, layout)["by_column"][0]
        named["by_column"] = filled(ends.by_column, (*ends.by_column.shape[:2], length))
        ends = ends._replace(by_column=None)
    if ends.by_row is not None:  # what a copy finds in a row is a multiple of 16 bytes
        named["by_row"] = filled(ends.by_row, (*ends.by_row.shape[:-1], up(ends.by_row.shape[-1], 4)))
    for name, vector in (("by_column", ends.by_column), ("bias", ends.bias)):
        if vector is not None:
            named[name] = filled(vector, (problem.local_groups, inner.n))
    if ends.existing is not None:
        named["existing"] = filled(ends.existing, out_shape)
    out = call(inner, layout, named, out_shape, interpret)
    return out if out_shape == problem.out_shape else lax.slice(out, (0,) * out.ndim, problem.out_shape)


def _stored(
    problem: Problem, layout: Layout, lhs: Array, rhs: Array, interpret: bool
) -> tuple[Problem, dict[str, Array]]:
    """The problem as the kernel sees it, and the operands as they lie in memory then.

    A copy takes whole lines of columns and a few rows at a time, so that the dimensions it runs along are multiples of
    those; behind the last line it reads 0, but the interpreter has NaN there. Tensor cores take numbers that are not of
    16 bits only with the axis of the sum last.
    """
    dtype = multiplied(problem)
    problem = problem.replace(lhs=dtype, rhs=problem.rhs if layout.packed else dtype)
    run = line(dtype, layout.lines)
    ragged = problem.form is Form.ROWS
    rows, k = up(problem.rows, GRAIN), up(problem.k, layout.deep if interpret and ragged else run)
    n = up(problem.n, line(problem.out) if layout.flat else max(run, line(problem.out)))
    if problem.form is Form.ROWS:
        last = problem.transpose_rhs or layout.flat
        rhs = rhs.mT if layout.flat and not problem.transpose_rhs else rhs
        shapes = (rows, k), (problem.weights, n, k) if last else (problem.weights, k, n)
        inner = problem.replace(k=k, n=n, transpose_rhs=last)
    else:
        last = problem.transpose_lhs or layout.flat
        lhs = lhs.mT if layout.flat and not problem.transpose_lhs else lhs
        rhs = rhs.mT if layout.flat else rhs
        whole = up(problem.rows, run)
        shapes = (up(problem.k, GRAIN), whole) if last else (rows, k), (n, whole) if layout.flat else (rows, n)
        inner = problem.replace(n=n)
    named = {
        name: halves(filled(x, shape)) if layout.split == name else filled(x.astype(dtype), shape)
        for name, x, shape, dtype in zip(("lhs", "rhs"), (lhs, rhs), shapes, (problem.lhs, problem.rhs), strict=True)
    }
    return inner, named


@jax.jit
def halves(x: Array) -> Array:
    """A float32 array as the sum of two bfloat16 ones, stacked: what it rounds to, and what is left."""
    limit = float(jnp.finfo(jnp.bfloat16).max)
    high = lax.reduce_precision(x, 8, 7)  # and not a conversion there and back, which XLA may leave out
    high = jnp.where(jnp.isfinite(x), jnp.clip(high, -limit, limit), high)
    low = jnp.where(jnp.isfinite(x), x - high, 0)
    return jnp.stack([high, low]).astype(jnp.bfloat16)


def _card(target: Target) -> Card:
    card = card_for(target)
    assert card is not None, target  # or `supports` had refused
    return card


@functools.lru_cache(maxsize=256)
def _lowers(activation: Any, dtype: Any) -> bool:
    """Whether a kernel can apply the activation to a tile; one that it cannot apply is applied after it."""

    def body(x: Any, out: Any) -> None:
        out[...] = elementwise(inlined(activation))(x[...].astype(dtype)).astype(jnp.float32)

    def lower() -> None:
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import mosaic_gpu as mgpu

        from trencadis.backends.gpu.kernel import PARAMS

        tile = jax.ShapeDtypeStruct((BLOCK, BLOCK), jnp.float32)
        mesh = mgpu.Mesh(grid=(1,), grid_names=("block",), num_threads=1, thread_name="role")
        apply = pl.kernel(body, out_type=tile, mesh=mesh, compiler_params=PARAMS)
        jax.jit(apply).trace(tile).lower(lowering_platforms=("cuda",))

    try:
        apart(lower)
    except Exception:
        return False
    return True
