"""How long decoding with quantized weights takes: `python -m benchmarks.quantized --pin 1`."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import timing

ROUNDS = 7


def main(argv: Sequence[str] | None = None) -> None:
    """Print the figures of docs/quantization.md."""
    ask = argparse.ArgumentParser(prog="python -m benchmarks.quantized", description=__doc__)
    ask.add_argument("--pin", type=int, metavar="CORE", help="one core, CPU time; otherwise all cores, wall time")
    asked = ask.parse_args(argv)
    if asked.pin is not None:
        timing.pin(asked.pin)
    timing.no_tpu_here()
    _gradients()
    _decoding(timing.wall_clock() if asked.pin is None else timing.cpu_clock())


def _gradients() -> None:
    """Relative errors in the norm of a layer with silu and of its gradients, against one that is not quantized."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import trencadis as tr
    from trencadis.quant import Recipe

    rng = np.random.default_rng(0)
    g, each, k, n = 4, 64, 1024, 256
    rows = rng.normal(size=(g * each, k)) * np.exp(0.5 * rng.normal(size=(g * each, 1)))
    large = rows.copy()
    large[:, rng.integers(0, k, 8)] *= 20
    weights = [rng.normal(size=(g, k, n)) / 32, rng.standard_t(5, size=(g, k, n)) / 32]
    y = jnp.asarray(rng.normal(size=(g * each, n)), jnp.float32)
    data = [[jnp.asarray(z, jnp.float32) for z in pair] for pair in zip((rows, large), weights, strict=True)]

    @functools.partial(jax.jit, static_argnums=0)
    def layer(recipe: Recipe | None, x: Any, w: Any) -> Any:
        dense = functools.partial(tr.grouped_dense, group_sizes=np.full(g, each), activation=jax.nn.silu)
        out, pull = jax.vjp(lambda x, w: dense(x, w, quantization=recipe), x, w)
        return out, *pull(y)

    e4m3, e5m2 = "float8_e4m3fn", "float8_e5m2"
    blocks = ((e4m3, (1, 128)), (e4m3, (1, 128, 128)))
    recipes = [
        ("int8", "int8"), ("int8", "int8", "int8"), ("int8", "int8", e5m2),
        (e4m3, e4m3), (e4m3, e4m3, e4m3), (e4m3, e4m3, e5m2), blocks, (*blocks, e5m2),
        ("mxfp8", "mxfp8"), ("mxfp8", "mxfp8", "mxfp8"),
    ]  # fmt: skip
    for ways in recipes:
        found = []
        for x, w in data:
            want = layer(None, x, w)
            off = [
                jnp.linalg.norm(a - b) / jnp.linalg.norm(b)
                for a, b in zip(layer(Recipe(*ways), x, w), want, strict=True)
            ]
            found.append(" ".join(f"{float(one):6.3f}" for one in off))
        print("   ".join(found), Recipe(*ways))


def _decoding(clock: Any) -> None:
    """64 rows of bfloat16, 64 groups of 1024 x 1024, the contenders by turns."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import trencadis as tr
    from trencadis.quant import quantize

    rng = np.random.default_rng(0)
    m, k, n, g = 64, 1024, 1024, 64
    x = jnp.asarray(rng.normal(size=(m, k)), jnp.bfloat16)
    w = jnp.asarray(rng.normal(size=(g, k, n)), jnp.float32)
    sizes = jnp.asarray(rng.multinomial(m, np.full(g, 1 / g)), jnp.int32)
    weights = {"bf16": w.astype(jnp.bfloat16)}
    weights |= {name: quantize(w, name, "column") for name in ("int8", "float8_e4m3fn", "int4")}
    multiply = jax.jit(tr.grouped_matmul)

    def call(rhs: Any) -> Any:
        return multiply(x, rhs, sizes).block_until_ready()

    calls: dict[str, Callable[[], Any]] = {name: functools.partial(call, rhs) for name, rhs in weights.items()}
    for run in calls.values():
        run()
    print(f"decoding, {clock.name}: " + ", ".join(
        f"{name} {1e3 * each.median:.1f} ms" for name, each in timing.race(calls, clock, rounds=ROUNDS).items()
    ))  # fmt: skip


if __name__ == "__main__":
    main()
