"""Groups that differ in m, k and n, against a loop over numpy: `python -m benchmarks.ragged --pin 1`.

Forward, and both gradients by autodiff. `known`: sizes are known when the program is made; `traced`: they are not.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks import timing

if TYPE_CHECKING:
    import numpy as np

GROUPS, LEAST, MOST = 32, 64, 512
AXES = ((1,), (0,))


def main(argv: Sequence[str] | None = None) -> None:
    """Print a table, and write it if asked to."""
    ask = argparse.ArgumentParser(prog="python -m benchmarks.ragged", description=__doc__)
    ask.add_argument("--pin", type=int, metavar="CORE", help="one core, CPU time; otherwise all cores, wall time")
    ask.add_argument("--rounds", type=int, default=9, help="turns of each contender (default: %(default)s)")
    ask.add_argument("--out", type=pathlib.Path, help="write the table there, as JSON")
    asked = ask.parse_args(argv)
    if asked.pin is not None:
        timing.pin(asked.pin)
    timing.no_tpu_here()
    clock = timing.wall_clock() if asked.pin is None else timing.cpu_clock()
    rows = [(name, which, _race(name, which, clock, asked.rounds)) for name in ("f32", "bf16") for which in PASSES]
    print(f"{GROUPS} groups of {LEAST} to {MOST} in m, k and n; {clock.name}, ms")
    print(f"{'dtype':6} {'pass':8} {'numpy':>8} {'known':>8} {'traced':>8}  known / numpy  traced / numpy")
    for name, which, times in rows:
        numpy, known, traced = (times[peer].median for peer in ("numpy", "known", "traced"))
        figures = " ".join(f"{1e3 * x:8.2f}" for x in (numpy, known, traced))
        print(f"{name:6} {which:8} {figures}  {known / numpy:13.2f}  {traced / numpy:14.2f}")
    if asked.out:
        found = [{"dtype": n, "pass": w, **{p: t.median for p, t in times.items()}} for n, w, times in rows]
        asked.out.write_text(json.dumps({"clock": clock.name, "rows": found}, indent=1) + "\n")


PASSES = ("forward", "d_lhs", "d_rhs")


def _race(name: str, which: str, clock: Any, rounds: int) -> dict[str, timing.Stats]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    dtype = {"f32": jnp.float32, "bf16": jnp.bfloat16}[name]
    rng = np.random.default_rng(0)
    sizes = [rng.integers(LEAST, MOST + 1, GROUPS).astype(np.int32) for _ in range(3)]
    m, k, n = sizes
    data = [
        jnp.asarray(rng.standard_normal(int((x * y).sum()), np.float32), dtype) for x, y in ((m, k), (k, n), (m, n))
    ]
    known = jax.jit(functools.partial(_ours, which, sizes))
    traced = jax.jit(lambda data, *sizes: _ours(which, sizes, data, room=data[2]))
    host = [np.asarray(x) for x in data]
    calls = {
        "numpy": functools.partial(_loop, which, sizes, host),
        "known": lambda: known(data).block_until_ready(),
        "traced": lambda: traced(data, *sizes).block_until_ready(),
    }
    want, *got = (np.asarray(call()).astype(np.float32) for call in calls.values())
    for found in got:
        off = np.linalg.norm(found - want) / np.linalg.norm(want)
        if off > (1e-5 if name == "f32" else 1e-2):
            raise RuntimeError(f"{name} {which}: off by {off:.1e}")
    return timing.race(calls, clock, rounds=rounds)


def _ours(which: str, sizes: Sequence[Any], data: Sequence[Any], room: Any = None) -> Any:
    import jax

    import trencadis as tr

    (m, k, n), (a, b, c) = sizes, data
    out = None if room is None else tr.GroupedTensor.fully_ragged(room * 0, m, n)

    def forward(a: Any, b: Any) -> Any:
        lhs, rhs = tr.GroupedTensor.fully_ragged(a, m, k), tr.GroupedTensor.fully_ragged(b, k, n)
        return tr.grouped_gemm(lhs, rhs, contracting_dims=AXES, out=out).data

    if which == "forward":
        return forward(a, b)
    if which == "d_lhs":
        return jax.vjp(lambda a: forward(a, b), a)[1](c)[0]
    return jax.vjp(lambda b: forward(a, b), b)[1](c)[0]


def _loop(which: str, sizes: Sequence[np.ndarray], data: Sequence[np.ndarray]) -> np.ndarray:
    """One matmul for each group, into a fresh result; bfloat16 through float32."""
    import numpy as np

    m, k, n = sizes
    a, b, c = (_matrices(x, *dims) for x, dims in zip(data, ((m, k), (k, n), (m, n)), strict=True))
    pairs = {
        "forward": lambda i: (a[i], b[i]),
        "d_lhs": lambda i: (c[i], b[i].T),
        "d_rhs": lambda i: (a[i].T, c[i]),
    }[which]
    like = data[{"forward": 2, "d_lhs": 0, "d_rhs": 1}[which]]
    out, at = np.empty_like(like), 0
    for i in range(GROUPS):
        x, y = pairs(i)
        room = out[at : at + x.shape[0] * y.shape[1]].reshape(x.shape[0], y.shape[1])
        if out.dtype == np.float32:
            np.matmul(x, y, out=room)
        else:
            room[...] = np.matmul(x.astype(np.float32), y.astype(np.float32)).astype(out.dtype)
        at += room.size
    return out


def _matrices(x: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> list[np.ndarray]:
    found, at = [], 0
    for r, c in zip(rows.tolist(), columns.tolist(), strict=True):
        found.append(x[at : at + r * c].reshape(r, c))
        at += r * c
    return found


if __name__ == "__main__":
    main()
