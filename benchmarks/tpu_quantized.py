"""Operands of few bits by the TPU compiler's schedules, with no TPU: `python -m benchmarks.tpu_quantized --help`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trencadis.inspect import Inspection

GENERATIONS = ("v5e", "v5p", "v6e", "v7x")
BF16, INT8, E4, E5 = "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2"
PAIRS = ((BF16, BF16), (INT8, INT8), (E4, E4), (E5, E5), (BF16, INT8), (BF16, E4))
SIZES = {"dsv3": (8192, 7168, 2048, 32), "decode": (256, 7168, 2048, 32)}  # m, k, n, g


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table of docs/performance.md, as it is made."""
    ask = argparse.ArgumentParser(prog="python -m benchmarks.tpu_quantized", description=__doc__)
    ask.add_argument("--generations", default=",".join(GENERATIONS), metavar="G,G", help="default: %(default)s")
    ask.add_argument("--problems", default=",".join(SIZES), metavar="P,P", help="default: %(default)s")
    asked = ask.parse_args(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    for problem in asked.problems.split(","):
        for form in ("rows", "contraction") if problem == "dsv3" else ("rows",):
            for pair in PAIRS if form == "rows" else PAIRS[:4]:
                for chip in asked.generations.split(","):
                    found = one(SIZES[problem], form, pair, chip)
                    (kernel,) = found.kernels
                    moved = (kernel.bytes_in + kernel.bytes_out) / 1e6
                    times = f"{found.seconds * 1e6:.0f} us, {kernel.cycles} cycles, {moved:.0f} MB"
                    print(problem, form, " x ".join(pair), chip, times, f"MXU {kernel.mxu_busy:.0%}", flush=True)


def one(sizes: tuple[int, int, int, int], form: str, pair: tuple[str, str], chip: str) -> Inspection:
    """What one call takes, with scales of rows and columns for what is quantized; the result is bfloat16."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import trencadis as tr
    from trencadis import inspect as tpu
    from trencadis.quant import Scaled

    m, k, n, g = sizes
    right = (g, k, n) if form == "rows" else (m, n)
    blocks = ((1, k), (1, k, 1)) if form == "rows" else ((m, 1), (m, 1))

    def shapes(shape: tuple[int, ...], dtype: str, block: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
        scales = tuple(size // length for size, length in zip(shape, block, strict=True))
        both = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)), jax.ShapeDtypeStruct(scales, jnp.float32)]
        return both[:1] if dtype == BF16 else both

    def call(lhs: Any, rhs: Any, group_sizes: Any) -> jax.Array:
        left, right = (
            x[0] if dtype == BF16 else Scaled(*x, dtype, block)
            for x, dtype, block in zip((lhs, rhs), pair, blocks, strict=True)
        )
        if form == "rows":
            return tr.grouped_matmul(left, right, group_sizes, jnp.bfloat16, backend="tpu")
        return tr.transposed_grouped_matmul(left, right, group_sizes, jnp.bfloat16, transpose_lhs=True, backend="tpu")

    lhs, rhs = (shapes(*each) for each in zip(((m, k), right), pair, blocks, strict=True))
    group_sizes = np.random.default_rng(0).multinomial(m, np.full(g, 1 / g)).astype(np.int32)
    return tpu.inspect(call, lhs, rhs, group_sizes, generation=chip, xla=True)


if __name__ == "__main__":
    main()
