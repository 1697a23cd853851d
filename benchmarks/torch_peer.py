"""torch's grouped_mm, in a process of its own: two frameworks in one would share a GPU's memory and CUDA libraries.

The child makes data of its own, checks its results, and yields a record for each problem and pass.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks import processes
from benchmarks.problems import PASSES, PROBLEMS, BenchProblem
from benchmarks.report import Record
from benchmarks.timing import TIMED, WARM, reason_of, stats

NAME, DTYPE = "torch", "bf16"
SILENCE_S = 120
LIMIT = 9e-3  # of the error: that of bfloat16 results, and some room


def records(chosen: Sequence[BenchProblem], passes: Sequence[str]) -> list[Record]:
    """The records of torch, measured in a child. To be called before this process takes the GPU's memory."""
    cases = [(p.name, which) for p in chosen for which in passes if which in PASSES]
    if importlib.util.find_spec("torch") is None:
        return [_record(*case, why="is not installed") for case in cases]
    found = processes.each("benchmarks.torch_peer:measure", cases, silence_s=SILENCE_S)
    return [Record.from_json(value) if value else _record(*case, why=f"failed: {why}") for case, value, why in found]


def _record(problem: str, which: str, **more: Any) -> Record:
    return Record(problem=problem, dtype=DTYPE, which=which, contender=NAME, **more)


# ---------------------------------------------------------------------------------------------------------------------
# The child. torch is Any: it is not installed where types are checked


def measure(cases: Sequence[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """Yield the record of each problem and pass, as JSON."""
    import torch

    held, data = "", None
    for name, which in cases:
        try:
            if name != held:  # the tensors of one problem at a time
                data = None
                torch.cuda.empty_cache()
                held, data = name, Data.normal(torch, PROBLEMS[name])
            assert data is not None
            yield judged(_record(name, which, limit=LIMIT), *one(torch, data, which)).to_json()
        except Exception as failure:  # the other passes are worth measuring
            yield _record(name, which, why=reason_of(failure)).to_json()


def judged(record: Record, error: float, seconds: Sequence[float]) -> Record:
    """The record with its error, and with its time if the result is right."""
    if not error <= LIMIT:
        return dataclasses.replace(record, error=error, why=f"wrong: relative error {error:.1e}")
    return dataclasses.replace(record, error=error, time=stats(seconds))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """The tensors of one problem, in bfloat16."""

    lhs: Any  # [m, k]
    rhs: Any  # [g, k, n]
    ct: Any  # [m, n]
    ends: Any  # [g]
    sizes: Any  # numpy's [g]

    @classmethod
    def normal(cls, torch: Any, problem: BenchProblem, device: str = "cuda") -> Data:
        """Standard normal data."""
        torch.manual_seed(problem.seed)
        sizes = problem.group_sizes()
        m, k, n, g = problem.m, problem.k, problem.n, problem.g
        lhs, rhs, ct = (
            torch.randn(shape, dtype=torch.bfloat16, device=device) for shape in ((m, k), (g, k, n), (m, n))
        )
        ends = torch.tensor(sizes.cumsum().tolist(), dtype=torch.int32, device=device)
        return cls(lhs=lhs, rhs=rhs, ct=ct, ends=ends, sizes=sizes)

    def pair(self, which: str) -> tuple[Any, Any]:
        """The two operands of a pass; transposes are views."""
        if which == "d_rhs":
            return self.lhs.t(), self.ct
        return (self.ct, self.rhs.transpose(-2, -1)) if which == "d_lhs" else (self.lhs, self.rhs)


def one(torch: Any, data: Data, which: str) -> tuple[float, list[float]]:
    """The error of a pass, and the seconds of each timed call by CUDA events."""
    multiply = grouped_mm(torch)
    a, b = data.pair(which)
    off = error(data, which, multiply(a, b, offs=data.ends))
    return off, burst(torch, lambda: multiply(a, b, offs=data.ends))


def grouped_mm(torch: Any) -> Any:
    """torch's grouped matmul, which older versions have by another name."""
    return getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm


def burst(torch: Any, call: Callable[[], Any]) -> list[float]:
    """The seconds of each of a few calls after a few to warm up, by CUDA events."""
    for _ in range(WARM):
        call()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(TIMED)]
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in events]


class Tensor:
    """A tensor that the oracle can cut: an index gives a numpy array."""

    def __init__(self, tensor: Any) -> None:
        """Keep the tensor on its device."""
        self.tensor, self.shape = tensor, tuple(tensor.shape)

    def __getitem__(self, index: Any) -> Tensor:
        """The part at an index, still on the device."""
        index = index if isinstance(index, tuple) else (index,)
        return Tensor(self.tensor[tuple(i if isinstance(i, slice) else i.tolist() for i in index)])

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        """The tensor as a float32 array of numpy."""
        del dtype, copy
        return self.tensor.float().cpu().numpy()


def error(data: Data, which: str, out: Any) -> float:
    """The relative error of a result against float64."""
    from benchmarks import oracle

    if which == "d_rhs":
        whole = oracle.contraction(Tensor(data.lhs), Tensor(data.ct), data.sizes)
        busy = data.sizes.nonzero()[0]  # torch says nothing about the matrices of empty groups
        right = oracle.Answer(pick=lambda result: whole.pick(result[busy]), values=whole.values[busy])
    else:
        left = data.ct if which == "d_lhs" else data.lhs
        right = oracle.rows(Tensor(left), Tensor(data.rhs), data.sizes, transpose_rhs=which == "d_lhs")
    return oracle.error(Tensor(out), right, poisoned=True)
