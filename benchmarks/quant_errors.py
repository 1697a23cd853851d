"""The errors of quantized operands, which do not depend on the machine but for the last bits of float32 sums.

`formats`: every format and granularity, against the float64 product of what was quantized, on three kinds of data. A
figure is the relative error of a row of the result in the norm: the root of the mean square over all rows.
`gradients`: a layer with silu and its gradients with a quantization recipe, against the layer without one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import trencadis as tr
from benchmarks.report import Record, Results, environment
from tests.support import oracle as float64
from trencadis.quant import FORMATS, Recipe, quantize

GROUPS, EACH, K, N = 4, 64, 2048, 512
SIZES = np.full(GROUPS, EACH)
DATA = {
    "normal": "rows and weights are normal",
    "outlier channels": "1 % of the channels of the rows are 10 to 100 times as large",
    "heavy tails": "Student's t, 4 degrees of freedom; experts differ in size by up to 4",
}
# what shares a scale, in rows [m, k] and weights [g, k, n]
SCALES: dict[str, tuple[Any, Any]] = {
    "tensor": ("tensor", "tensor"),
    "tensor x group": ("tensor", "group"),
    "row x column": ("row", "column"),
    "1x128 by 128x128": ((1, 128), (1, 128, 128)),
    "128 along k": ((1, 128), (1, 128, 1)),
    "32 along k": ((1, 32), (1, 32, 1)),
    "16 along k": ((1, 16), (1, 16, 1)),
}
BASELINE = "bfloat16"  # the format that the others are compared with
BOTH, WEIGHTS, MULTIPLYING = "both", "weights", "multiplying"  # which operands are quantized; the product by itself


def formats(words: Sequence[str]) -> Results:
    """The errors of all formats and granularities on all kinds of data."""
    records = []
    for name in DATA:
        x, w = operands(name)
        for format, scales in cases():
            about = {"scales": scales, "bits": bits(format, scales, w)}
            for contender, error in errors(format, scales, x, w).items():
                records.append(
                    Record(problem=name, dtype=format, which="forward", contender=contender, error=error, details=about)
                )
    shape = {"m": GROUPS * EACH, "k": K, "n": N, "g": GROUPS}
    notes = {"data": DATA, "all over ordinary": loudness(*operands("outlier channels"))}
    return Results(
        command="quant", environment=_where(words), shapes=dict.fromkeys(DATA, shape), records=records, notes=notes
    )


def _where(words: Sequence[str]) -> dict[str, Any]:
    found = environment(words, "")
    return {name: found[name] for name in ("date", "command", "platform", "versions")}


def cases() -> Iterator[tuple[str, str]]:
    """Yield the formats, each with the names of what may share a scale in it."""
    yield BASELINE, "none"
    for name, format in FORMATS.items():
        fitting = [f"{format.block} along k"] if format.block else [each for each in SCALES if each != "16 along k"]
        yield from ((name, scales) for scales in SCALES if scales in fitting)


def operands(name: str) -> tuple[np.ndarray, np.ndarray]:
    """The rows [m, k] and weights [g, k, n] of a kind of data, float32, the same each time."""
    rng = np.random.default_rng(0)
    draw: Callable[..., np.ndarray] = (
        functools.partial(rng.standard_t, 4) if name == "heavy tails" else rng.standard_normal
    )
    x, w = draw(size=(GROUPS * EACH, K)), draw(size=(GROUPS, K, N)) / np.sqrt(K)
    if name == "outlier channels":
        few = rng.choice(K, K // 100, replace=False)
        x[:, few] *= 10 ** rng.uniform(1, 2, size=len(few))
    if name == "heavy tails":
        w *= np.geomspace(0.5, 2, GROUPS)[:, None, None]
    return x.astype(np.float32), w.astype(np.float32)


def loudness(x: np.ndarray, w: np.ndarray) -> float:
    """The norm of the result over its norm without the outlier channels."""
    ordinary = np.where(np.sqrt(np.mean(x**2, axis=0)) > 5, 0, x)
    whole, rest = (np.linalg.norm(float64.rows(each, w, SIZES)) for each in (x, ordinary))
    return float(whole / rest)


def errors(format: str, scales: str, x: np.ndarray, w: np.ndarray) -> dict[str, float]:
    """The errors with both operands quantized, with the weights alone, and of the multiplication by itself."""
    q, r = quantized(format, scales, x, w)
    want, both = float64.rows(x, w, SIZES), product(q, r)
    return {
        BOTH: row_error(both, want),
        WEIGHTS: row_error(product(x, r), want),
        MULTIPLYING: row_error(both, float64.rows(numbers(q), numbers(r), SIZES)),
    }


def quantized(format: str, scales: str, x: np.ndarray, w: np.ndarray) -> tuple[Any, Any]:
    """Rows and weights in a format."""
    if format == BASELINE:
        return jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16)
    left, right = SCALES[scales]
    return quantize(x, format, left), quantize(w, format, right)


def bits(format: str, scales: str, w: np.ndarray) -> float:
    """The bits that a weight takes, with its share of the scales."""
    return quantized(format, scales, w[0], w)[1].nbytes * 8 / w.size


def product(x: Any, w: Any) -> np.ndarray:
    """The grouped product of rows and weights, in float64."""
    return np.asarray(tr.grouped_matmul(x, w, SIZES), np.float64)


def numbers(x: Any) -> np.ndarray:
    """The numbers that an operand represents, exactly."""
    return float64.wide(x.values) * float64.wide(x.scales()) if hasattr(x, "scales") else float64.wide(x)


def row_error(found: np.ndarray, want: np.ndarray) -> float:
    """The relative error of a row in the norm: the root of the mean square over the rows."""
    least = np.finfo(np.float64).tiny  # a row may be all zeros, and right
    by_row = np.linalg.norm(found - want, axis=1) / np.maximum(np.linalg.norm(want, axis=1), least)
    return float(np.sqrt(np.mean(by_row**2)))


# ---------------------------------------------------------------------------------------------------------------------
# The table of formats


Row = tuple[str, str, float, dict[str, dict[str, float]]]  # format, scales, bits, and errors by data and contender


def rows(results: Results) -> list[Row]:
    """The errors of each format and granularity."""
    found: dict[tuple[str, str], Row] = {}
    for r in results.records:
        scales, width = r.details["scales"], r.details["bits"]
        row = found.setdefault((r.dtype, scales), (r.dtype, scales, width, {}))
        row[3].setdefault(r.problem, {})[r.contender] = r.error or 0.0
    return list(found.values())


def table(results: Results) -> str:
    """The errors in percent, both operands quantized / weights alone, as the Markdown of docs/quantized-numerics.md."""
    names = results.notes["data"]
    lines = ["| format | scales | bits a weight | " + " | ".join(names) + " |", "|---|---|--:|" + "--:|" * len(names)]
    for format, scales, width, found in rows(results):
        figures = [f"{percent(found[name][BOTH])} / {percent(found[name][WEIGHTS])}" for name in names]
        lines.append(f"| `{format}` | {scales} | {width:.2f} | {' | '.join(figures)} |")
    return "\n".join(lines)


def span(row: Row, which: str) -> str:
    """The least and the largest error of a row over the kinds of data, in percent."""
    each = [found[which] for found in row[3].values()]
    return f"{percent(min(each))} to {percent(max(each))}"


def percent(error: float) -> str:
    """An error in percent, with two digits."""
    return f"{100 * error:.2f}" if error < 0.00995 else f"{100 * error:.1f}" if error < 0.0995 else f"{100 * error:.0f}"


# ---------------------------------------------------------------------------------------------------------------------
# Gradients

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
BLOCKS = ((E4M3, (1, 128)), (E4M3, (1, 128, 128)))
RECIPES: tuple[tuple[Any, ...], ...] = (
    ("int8", "int8"), ("int8", "int8", "int8"), ("int8", "int8", E5M2),
    (E4M3, E4M3), (E4M3, E4M3, E4M3), (E4M3, E4M3, E5M2), BLOCKS, (*BLOCKS, E5M2),
    ("mxfp8", "mxfp8"), ("mxfp8", "mxfp8", "mxfp8"),
)  # fmt: skip
RESULTS = ("forward", "d_lhs", "d_rhs")  # of a layer and its gradients
LAYER_K, LAYER_N = 1024, 256


def layers() -> dict[str, tuple[Any, Any, Any]]:
    """Rows, weights and a cotangent: normal ones, and rows with large columns and weights with heavy tails."""
    rng = np.random.default_rng(0)
    m = GROUPS * EACH
    x = rng.normal(size=(m, LAYER_K)) * np.exp(0.5 * rng.normal(size=(m, 1)))
    large = x.copy()
    large[:, rng.integers(0, LAYER_K, 8)] *= 20
    weights = [
        rng.normal(size=(GROUPS, LAYER_K, LAYER_N)) / 32,
        rng.standard_t(5, size=(GROUPS, LAYER_K, LAYER_N)) / 32,
    ]
    y = jnp.asarray(rng.normal(size=(m, LAYER_N)), jnp.float32)
    rows = [jnp.asarray(each, jnp.float32) for each in (x, large)]
    w = [jnp.asarray(each, jnp.float32) for each in weights]
    return {"normal": (rows[0], w[0], y), "large columns": (rows[1], w[1], y)}


@functools.partial(jax.jit, static_argnums=0)
def layer(recipe: Recipe | None, x: Any, w: Any, y: Any) -> Any:
    """The result of a layer with silu, and its gradients in the rows and in the weights."""
    dense = functools.partial(tr.grouped_dense, group_sizes=SIZES, activation=jax.nn.silu)
    out, pull = jax.vjp(lambda x, w: dense(x, w, quantization=recipe), x, w)
    return out, *pull(y)


def gradients(words: Sequence[str]) -> Results:
    """The relative errors of a layer and its gradients, in the norm, for each recipe."""
    records = []
    for name, data in layers().items():
        want = layer(None, *data)
        for ways in RECIPES:
            found = layer(Recipe(*ways), *data)
            off = [float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in zip(found, want, strict=True)]
            label = str(Recipe(*ways))
            records += [Record(problem=name, dtype=label, which=r, error=e) for r, e in zip(RESULTS, off, strict=True)]
    return Results(command="quant", environment=_where(words), records=records)


def gradient_table(results: Results) -> str:
    """The errors of each recipe: result, d lhs and d rhs, on both kinds of data."""
    lines = []
    for recipe in dict.fromkeys(r.dtype for r in results.records):
        figures = [f"{r.error:6.3f}" for r in results.records if r.dtype == recipe]
        lines.append(" ".join([*figures, recipe]))
    return "\n".join(lines)
