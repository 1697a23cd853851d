"""Everything here that looks below the public API: kernels with a given layout, and figures of devices.

No other module of the benchmarks imports the internals of trencadis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.problems import BenchProblem
from trencadis.backends import gpu, triton
from trencadis.core.devices import card_for, chip_of
from trencadis.core.epilogue import Epilogue
from trencadis.core.problem import Form, Problem
from trencadis.core.target import Target
from trencadis.inspect.bundles import libtpu_version as libtpu_version

BF16, E4M3 = "bfloat16", "float8_e4m3fn"
# dtypes of lhs and rhs, and whether weights are stored [g, n, k]
FORMATS = {
    "bf16": (BF16, BF16, False),
    "e4m3": (E4M3, E4M3, True),
    "deepseek": (E4M3, E4M3, True),
    "int8": ("int8", "int8", True),
    "w-int8": (BF16, "int8", True),
    "w-int8-kn": (BF16, "int8", False),
    "w-e4m3": (BF16, E4M3, True),
    "w-int4": (BF16, "int4", True),
}
BLOCK = 128  # of the scales of "deepseek", along k and n

Kernel = tuple[Callable[..., Any], list[Any], str]  # a jitted call, its operands, and the layout


def roofline(generation: str, flops: int, moved: int, *, int8: bool = False) -> float:
    """The seconds below which no kernel can be on one device of JAX: FLOPs over the peak, or bytes over the bandwidth.

    A device is one TensorCore; on v5p two, and some peers use both.
    """
    chip = chip_of(generation)
    return max(flops / (chip.peak_bf16 * chip.cores * (2 if int8 else 1)), moved / chip.hbm)


def gpu_problem(problem: BenchProblem, which: str, format: str) -> Problem:
    """A pass of a problem as the GPU kernels see it, with scales of rows and columns for what is quantized."""
    k, n = (problem.n, problem.k) if which == "d_lhs" else (problem.k, problem.n)
    lhs, rhs, k_last = FORMATS[format]
    both = lhs == rhs != BF16
    return Problem(
        form=Form.CONTRACTION if which == "d_rhs" else Form.ROWS,
        m=problem.m, k=k, n=n, groups=problem.g, local_groups=problem.g,
        lhs=jnp.dtype(lhs), rhs=jnp.dtype(rhs), out=jnp.dtype(BF16),
        transpose_rhs=which != "d_rhs" and (which == "d_lhs" or k_last), transpose_lhs=which == "d_rhs" and both,
        epilogue=_epilogue(format),
    )  # fmt: skip


def _epilogue(format: str) -> Epilogue:
    """The scales of a format: of rows and columns, of blocks along k, or none."""
    if format == "deepseek":
        return Epilogue(by_row=True, by_column=True, row_block=BLOCK, column_block=(BLOCK, BLOCK))
    lhs, rhs, _ = FORMATS[format]
    return Epilogue(by_row=lhs == rhs != BF16, by_column=format != "bf16")


def with_layout(problem: BenchProblem, which: str, fields: str, format: str, backend: str = "gpu") -> Kernel:
    """A kernel whose layout has these fields, as "stages=3", and is otherwise the one that the plan chooses."""
    card = card_for(Target.of(jax.devices()[0]))
    if card is None:
        raise RuntimeError(f"device: want a GPU that has a kernel; got {jax.devices()[0].device_kind}")
    asked = gpu_problem(problem, which, format)
    changes = {name: int(value) for name, value in (field.split("=") for field in fields.split())}
    layout = (triton if backend == "triton" else gpu).choose(asked, card).replace(**changes)
    transposed = which == "d_rhs" and asked.transpose_lhs  # 8-bit operands have m last

    def call(lhs: Any, rhs: Any, *rest: Any) -> Any:
        rhs = rhs.mT if transposed else rhs
        if backend == "triton":
            return triton.execute(asked, layout, card.arch, lhs, rhs, *rest)
        return gpu.execute(asked, layout, lhs, rhs, *rest)

    rhs_shape = asked.rhs_shape[::-1] if transposed else asked.rhs_shape
    lhs, rhs = (random(i, *each) for i, each in enumerate(((asked.lhs_shape, asked.lhs), (rhs_shape, asked.rhs))))
    sizes, first = jnp.asarray(problem.group_sizes()).reshape(1, -1), jnp.zeros((1,), jnp.int32)
    return jax.jit(call), [lhs, rhs, sizes, first, *_scales(asked)], str(layout)


def _scales(asked: Problem) -> list[jax.Array]:
    """Constant scales of the rows and of the columns, as far as the epilogue has them."""
    by_row = (asked.groups, asked.k) if asked.form is Form.CONTRACTION else (asked.m,)
    by_column: tuple[int, ...] = (asked.groups, asked.n)
    if asked.epilogue.blocks:
        blocks = -(-asked.k // BLOCK)
        by_row, by_column = (asked.m, blocks), (asked.groups, blocks, -(-asked.n // BLOCK))
    shapes = [by_row] * bool(asked.epilogue.by_row) + [by_column] * bool(asked.epilogue.by_column)
    return [jnp.full(shape, 0.5) for shape in shapes]


def random(seed: int, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Normal data; that of an integer dtype is scaled to its range."""
    return _random(seed, shape, jnp.dtype(dtype).name)


def _normal(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    x = jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
    return (x * {"int8": 30, "int4": 2}.get(dtype, 1)).astype(dtype)


_random = jax.jit(_normal, static_argnums=(0, 1, 2))
