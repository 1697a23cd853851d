"""torch's grouped_mm, in a process of its own: two frameworks in one would share a GPU's memory and CUDA libraries.

The child makes data of its own, checks itself, and prints one line of JSON for each problem and pass, so that what it
measured before a crash is not lost: `python -m benchmarks.torch_peer mixtral-8x7b,zipf-64 forward,d_rhs`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import problems
from benchmarks.timing import TIMED, WARM, Stats, reason_of, stats

NAME = "torch"
TIMEOUT_S = 120
SAMPLE = 64  # rows, columns and groups that are checked
TOLERANCE = 1e-2  # of the largest value: that of bf16 results

Key = tuple[str, str]  # problem and pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outside:
    """What the child found in one pass of one problem; without times, why there are none."""

    times: Stats | None = None
    error: float | None = None
    why: str | None = None


def outside(chosen: Sequence[problems.BenchProblem], passes: Sequence[str]) -> dict[Key, Outside]:
    """Measure in a child. To be called before this process takes the GPU's memory for itself."""
    keys = [(p.name, which) for p in chosen for which in passes if which in problems.PASSES]
    if importlib.util.find_spec("torch") is None:
        return dict.fromkeys(keys, Outside(why="is not installed"))
    names = ",".join(dict.fromkeys(name for name, _ in keys))
    command = [sys.executable, "-m", "benchmarks.torch_peer", names, ",".join(dict.fromkeys(w for _, w in keys))]
    try:
        root = pathlib.Path(__file__).parents[1]
        ended = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        said, complaint = ended.stdout, (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
    except subprocess.TimeoutExpired as late:
        said = late.stdout.decode() if isinstance(late.stdout, bytes) else late.stdout or ""
        complaint = f"no answer within {TIMEOUT_S} s"
    missing = Outside(why=f"failed: {complaint[:200]}")
    return dict.fromkeys(keys, missing) | dict(read(said))


def read(said: str) -> Iterator[tuple[Key, Outside]]:
    """What the child printed; lines that are not its own are passed over."""
    for line in said.splitlines():
        if not line.startswith("{"):
            continue
        found = json.loads(line)
        times, off, why = found.get("seconds"), found.get("error"), found.get("why")
        if times and not off <= TOLERANCE:
            times, why = None, f"wrong: off by {off:.1e} of the largest value"
        yield (found["problem"], found["which"]), Outside(times=stats(times) if times else None, error=off, why=why)


# ---------------------------------------------------------------------------------------------------------------------
# The child. torch is Any: it is not installed where types are checked


def main(argv: Sequence[str]) -> int:
    """Print what each pass of each problem takes."""
    import torch

    names, passes = argv
    for problem in problems.select(names, ""):
        data = Data.normal(torch, problem)
        for which in passes.split(","):
            found: dict[str, Any] = {"problem": problem.name, "which": which}
            try:
                found |= one(torch, data, which)
            except Exception as failure:  # the other passes are worth knowing, too
                found["why"] = reason_of(failure)
            print(json.dumps(found), flush=True)
        del data
        torch.cuda.empty_cache()
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """The tensors of one problem, bf16."""

    lhs: Any  # [m, k]
    rhs: Any  # [g, k, n]
    ct: Any  # [m, n]
    ends: Any  # [g]
    bounds: list[tuple[int, int]]

    @classmethod
    def normal(cls, torch: Any, problem: problems.BenchProblem, device: str = "cuda") -> Data:
        torch.manual_seed(problem.seed)
        sizes = problem.group_sizes()
        m, k, n, g, ends = problem.m, problem.k, problem.n, problem.g, sizes.cumsum()
        lhs, rhs, ct = (
            torch.randn(shape, dtype=torch.bfloat16, device=device) for shape in ((m, k), (g, k, n), (m, n))
        )
        bounds = list(zip((ends - sizes).tolist(), ends.tolist(), strict=True))
        offsets = torch.tensor(ends.tolist(), dtype=torch.int32, device=device)
        return cls(lhs=lhs, rhs=rhs, ct=ct, ends=offsets, bounds=bounds)

    def pair(self, which: str) -> tuple[Any, Any]:
        """The two operands of a pass; transposes are views."""
        if which == "d_rhs":
            return self.lhs.t(), self.ct
        return (self.ct, self.rhs.transpose(-2, -1)) if which == "d_lhs" else (self.lhs, self.rhs)


def one(torch: Any, data: Data, which: str) -> dict[str, Any]:
    """Error, and seconds of each timed call by CUDA events."""
    grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    a, b = data.pair(which)
    off = error(data, which, grouped_mm(a, b, offs=data.ends))
    for _ in range(WARM):
        grouped_mm(a, b, offs=data.ends)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(TIMED)]
    for start, end in events:
        start.record()
        grouped_mm(a, b, offs=data.ends)
        end.record()
    torch.cuda.synchronize()
    return {"error": off, "seconds": [start.elapsed_time(end) / 1e3 for start, end in events]}


def error(data: Data, which: str, out: Any) -> float:
    """The largest difference from float64 sums, as a share of the largest value: some rows, columns and busy groups."""
    a, b = data.pair(which)
    cols = list(range(0, out.shape[-1], -(-out.shape[-1] // SAMPLE)))
    worst = largest = 0.0
    busy = [i for i, (start, end) in enumerate(data.bounds) if end > start]
    for i in busy[:: -(-len(busy) // SAMPLE)]:
        start, end = data.bounds[i]
        if which == "d_rhs":
            rows = slice(0, SAMPLE)
            want, got = a[rows, start:end].double() @ b[start:end, cols].double(), out[i, rows][:, cols]
        else:
            rows = slice(max(start, end - SAMPLE), end)  # the last of the group
            want, got = a[rows].double() @ b[i][:, cols].double(), out[rows][:, cols]
        if not bool(got.isfinite().all()):
            return float("inf")
        worst = max(worst, float((got.double() - want).abs().max()))
        largest = max(largest, float(want.abs().max()))
    return worst / max(largest, 1e-30)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
