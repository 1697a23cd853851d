"""How far off products of quantized operands are: `python -m benchmarks.quantized_errors`.

Every format and granularity, against the float64 product of what was quantized, on three kinds of data. A figure is the
relative error of a row of the result in the norm: the root of the mean square over all rows. Nothing is timed.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks import report, timing

if TYPE_CHECKING:
    import numpy as np

RESULTS = pathlib.Path(__file__).parent / "results" / "quantized-errors"
GROUPS, EACH, K, N = 4, 64, 2048, 512

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
HALF = "bfloat16"  # what everything is held against


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table of docs/quantized-numerics.md, and write the results."""
    ask = argparse.ArgumentParser(prog="python -m benchmarks.quantized_errors", description=__doc__)
    ask.add_argument("--out", help="a file, or none (default: benchmarks/results/quantized-errors/<date>.json)")
    asked = ask.parse_args(argv)
    timing.no_tpu_here()
    found = measure()
    print(table(found))
    if asked.out != "none":
        path = pathlib.Path(asked.out) if asked.out else RESULTS / f"{found['environment']['date']}.json"
        print(report.write_beside(path, json.dumps(found, indent=1) + "\n"))


def measure() -> dict[str, Any]:
    """All figures, and where they were made."""
    where = report.environment((), "", None)
    rows = [{"format": name, "scales": scales} for name, scales in cases()]
    for name in DATA:
        x, w = operands(name)
        for row in rows:
            row |= {"bits": _bits(row["format"], row["scales"], w)} if "bits" not in row else {}
            row[name] = errors(row["format"], row["scales"], x, w)
    return {
        "environment": {key: where[key] for key in ("date", "platform", "versions")},
        "shape": {"g": GROUPS, "m": GROUPS * EACH, "k": K, "n": N},
        "data": DATA,
        "all over ordinary": _loud(*operands("outlier channels")),
        "rows": rows,
    }


def cases() -> Iterator[tuple[str, str]]:
    """Formats, and the names of what may share a scale in them."""
    from trencadis.quant import FORMATS

    yield HALF, "none"
    for name, kind in FORMATS.items():
        yield from ((name, scales) for scales in SCALES if scales in _fitting(kind.block))


def _fitting(block: int) -> list[str]:
    return [f"{block} along k"] if block else [name for name in SCALES if name != "16 along k"]


def operands(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows [m, k] and weights [g, k, n], float32, of a kind of data; the same each time."""
    import numpy as np

    rng = np.random.default_rng(0)
    draw = functools.partial(rng.standard_t, 4) if name == "heavy tails" else rng.standard_normal
    x, w = draw(size=(GROUPS * EACH, K)), draw(size=(GROUPS, K, N)) / np.sqrt(K)
    if name == "outlier channels":
        few = rng.choice(K, K // 100, replace=False)
        x[:, few] *= 10 ** rng.uniform(1, 2, size=len(few))
    if name == "heavy tails":
        w *= np.geomspace(0.5, 2, GROUPS)[:, None, None]
    return x.astype(np.float32), w.astype(np.float32)


def _loud(x: np.ndarray, w: np.ndarray) -> float:
    """How large the result is over what it is without the outlier channels."""
    import numpy as np

    ordinary = np.where(np.sqrt(np.mean(x**2, axis=0)) > 5, 0, x)
    return float(np.linalg.norm(_exact(x, w)) / np.linalg.norm(_exact(ordinary, w)))


def errors(name: str, scales: str, x: np.ndarray, w: np.ndarray) -> dict[str, float]:
    """Of the product with both operands quantized, with the weights alone; and of the multiplication by itself."""
    q, r = _few_bits(name, scales, x, w)
    want = _exact(x, w)
    both = _product(q, r)
    return {
        "both": _off(both, want),
        "weights": _off(_product(x, r), want),
        "multiplying": _off(both, _exact(_numbers(q), _numbers(r))),
    }


def _few_bits(name: str, scales: str, x: np.ndarray, w: np.ndarray) -> tuple[Any, Any]:
    import jax.numpy as jnp

    from trencadis.quant import quantize

    if name == HALF:
        return jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16)
    left, right = SCALES[scales]
    return quantize(x, name, left), quantize(w, name, right)


def _bits(name: str, scales: str, w: np.ndarray) -> float:
    return _few_bits(name, scales, w[0], w)[1].nbytes * 8 / w.size


def _product(x: Any, w: Any) -> np.ndarray:
    import numpy as np

    import trencadis as tr

    return np.asarray(tr.grouped_matmul(x, w, np.full(GROUPS, EACH)), np.float64)


def _numbers(x: Any) -> np.ndarray:
    """What an operand stands for, exactly."""
    import numpy as np

    if not hasattr(x, "scales"):
        return np.asarray(x).astype(np.float64)
    return np.asarray(x.values).astype(np.float64) * np.asarray(x.scales(), np.float64)


def _exact(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    import numpy as np

    rows = x.astype(np.float64).reshape(GROUPS, EACH, K)
    return np.matmul(rows, w.astype(np.float64)).reshape(GROUPS * EACH, N)


def _off(found: np.ndarray, want: np.ndarray) -> float:
    import numpy as np

    least = np.finfo(np.float64).tiny  # a row may be nothing but zeros, and right
    by_row = np.linalg.norm(found - want, axis=1) / np.maximum(np.linalg.norm(want, axis=1), least)
    return float(np.sqrt(np.mean(by_row**2)))


def table(found: dict[str, Any]) -> str:
    """The figures in percent, both quantized / weights alone, as Markdown."""
    lines = ["| format | scales | bits a weight | " + " | ".join(found["data"]) + " |", "|---|---|--:|" + "--:|" * 3]
    for row in found["rows"]:
        cells = [f"{percent(row[name]['both'])} / {percent(row[name]['weights'])}" for name in found["data"]]
        lines.append(f"| `{row['format']}` | {row['scales']} | {row['bits']:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def span(found: dict[str, Any], row: dict[str, Any], which: str) -> str:
    """The least and the most of an error over the kinds of data, in percent."""
    each = [row[name][which] for name in found["data"]]
    return f"{percent(min(each))} to {percent(max(each))}"


def percent(error: float) -> str:
    """Two digits."""
    return f"{100 * error:.2f}" if error < 0.00995 else f"{100 * error:.1f}" if error < 0.0995 else f"{100 * error:.0f}"


if __name__ == "__main__":
    main()
