"""The results of an inspection, as values that print as text."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from trencadis.core.devices import Chip, chip_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A basic block of a kernel, with its counts and its share of the kernel's time."""

    first: int  # address of its first bundle
    last: int
    runs: int
    bundles: int
    cycles: int  # of one run, without waiting for copies
    wait: float  # cycles of one run, on average
    share: float  # of the kernel's cycles, waiting included
    mxu_busy: float  # share of `cycles` in which an MXU works, on average over the MXUs
    vmatmul: int
    vmatpush: int
    vld: int
    vst: int
    mask: int  # comparisons and selections of vectors
    spills: int  # loads and stores of spilled registers
    copies: int

    def __str__(self) -> str:
        return (
            f"{self.share:6.1%}  {self.first:#06x}-{self.last:#06x} {self.runs:9d} {self.bundles:8d} {self.cycles:7d} "
            f"{self.wait:8.0f} {self.mxu_busy:5.0%} {self.vmatmul:8d} {self.vmatpush:5d} {self.vld:5d} {self.vst:5d} "
            f"{self.mask:5d} {self.spills:7d} {self.copies:5d}"
        )


HEAD = (
    "  share  block              runs  bundles  cycles     wait   MXU  vmatmul  push   vld   vst  mask  spills  copies"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A Pallas kernel, with the predicted time of one run."""

    name: str  # in the compiled module
    runs: int  # of the kernel in one call of the function
    bundles: int
    vmem_bytes: int
    spill_bytes: int
    cycles: int
    seconds: float
    mxu_busy: float  # share of the time in which an MXU works, on average over the MXUs
    dma_wait: float  # share of the time in which the program waits for copies
    bytes_in: int  # from HBM
    bytes_out: int
    copies: int
    compute_seconds: float  # as if memory had no limit of bandwidth
    dma_seconds: float  # as if computing took no time
    blocks: tuple[Block, ...]  # that ran, the longest first
    operands_known: tuple[int, ...]
    warnings: tuple[str, ...]

    @property
    def hot(self) -> Block | None:
        """The block with most vmatmuls over all its runs, or None if there is none."""
        return max((b for b in self.blocks if b.vmatmul), key=lambda b: b.runs * b.vmatmul, default=None)

    def __str__(self) -> str:
        lines = [
            f"kernel {self.name}" + (f", {self.runs} runs" if self.runs != 1 else ""),
            f"  predicted     {self.cycles:,} cycles, {_time(self.seconds)}",
            f"  compute alone {_time(self.compute_seconds)}, copies alone {_time(self.dma_seconds)}",
            f"  MXU busy      {self.mxu_busy:.1%}, waiting for copies {self.dma_wait:.1%}",
            f"  HBM           {_bytes(self.bytes_in)} in, {_bytes(self.bytes_out)} out, {self.copies:,} copies",
            f"  VMEM          {_bytes(self.vmem_bytes)}, of it {_bytes(self.spill_bytes)} spilled registers",
            f"  schedule      {self.bundles:,} bundles",
        ]
        if hot := self.hot:
            lines.append(
                f"  hot block     {hot.bundles} bundles, {hot.cycles} cycles, MXU {hot.mxu_busy:.0%}, "
                f"{hot.spills} spills, {hot.runs:,} runs"
            )
        lines += [f"  warning: {warning}" for warning in self.warnings]
        return "\n".join([*lines, HEAD, *map(str, self.blocks[:SHOWN])])


SHOWN = 10  # rows of a table that are printed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """An operation that XLA made, with the predicted time of one run on operands in HBM."""

    name: str
    runs: int
    bundles: int
    cycles: int | None  # None where the program could not be followed
    seconds: float | None
    mxu_busy: float
    bytes_in: int
    bytes_out: int
    warnings: tuple[str, ...]

    @property
    def total(self) -> float:
        """The predicted seconds of all runs; 0 if they are not known."""
        return (self.seconds or 0.0) * self.runs

    def __str__(self) -> str:
        time = "not known" if self.seconds is None else _time(self.total)
        moved = _bytes(self.bytes_in + self.bytes_out)
        return f"  {time:>10}  {self.runs:6d} x {self.name:<40} MXU {self.mxu_busy:4.0%}  {moved} moved"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Inspection:
    """What the TPU compiler makes of a call; prints as a report.

    >>> done = Inspection(generation="v6e", jax="0.10.2", libtpu="0.0.42", compiled=True, message=None)
    >>> done.chip.name, done.cycles, done.peak_share
    ('v6e', 0, None)
    """

    generation: str
    jax: str
    libtpu: str
    compiled: bool
    message: str | None  # the compiler's, where it did not compile
    kernels: tuple[Kernel, ...] = ()
    operations: tuple[Operation, ...] | None = None  # None where they were not asked for
    flops: float | None = None
    warnings: tuple[str, ...] = ()

    @property
    def chip(self) -> Chip:
        """The chip that the call was compiled for."""
        return chip_of(self.generation)

    @property
    def cycles(self) -> int:
        """The predicted cycles of all kernels, and of XLA's operations where asked for, one after the other."""
        kernels = sum(kernel.cycles * kernel.runs for kernel in self.kernels)
        return kernels + sum((op.cycles or 0) * op.runs for op in self.operations or ())

    @property
    def seconds(self) -> float:
        """The predicted time in seconds: `cycles` at the chip's clock."""
        return self.cycles / self.chip.clock

    @property
    def peak_share(self) -> float | None:
        """The rate of `flops` as a share of the bfloat16 peak of all cores of the device; None without flops."""
        peak = self.chip.peak_bf16 * self.chip.cores
        return self.flops / self.seconds / peak if self.flops and self.cycles else None

    def asdict(self) -> dict[str, Any]:
        """The report as a dict of plain values, properties included."""
        return {
            **dataclasses.asdict(self),
            "cycles": self.cycles,
            "seconds": self.seconds,
            "peak_share": self.peak_share,
            "hot": [None if kernel.hot is None else dataclasses.asdict(kernel.hot) for kernel in self.kernels],
        }

    def to_json(self, *, indent: int | None = 1) -> str:
        """The report as a JSON text."""
        return json.dumps(self.asdict(), indent=indent)

    def __str__(self) -> str:
        chip = self.chip
        lines = [
            f"{chip.name} ({chip.kind}), one TensorCore: {chip.clock / 1e9:.2f} GHz, {chip.mxus} MXUs, "
            f"{chip.peak_bf16 / 1e12:.0f} TFLOP/s bfloat16, HBM {chip.hbm / 1e9:.0f} GB/s",
            f"jax {self.jax}, libtpu {self.libtpu}",
        ]
        if not self.compiled:
            return "\n".join([*lines, "does not compile:", f"  {self.message}"])
        lines += [f"warning: {warning}" for warning in self.warnings]
        lines += map(str, self.kernels)
        if self.operations is not None:
            lines.append(f"operations of XLA: {len(self.operations)}, {_time(sum(op.total for op in self.operations))}")
            lines += map(str, self.operations[:SHOWN])
            lost = [f"  warning: {op.name}: {op.warnings[0]}" for op in self.operations if op.cycles is None]
            others = sum(bool(op.warnings) for op in self.operations) - len(lost)
            lines += [*lost, f"  warning: of {others} of them not everything is known"][: len(lost) + bool(others)]
        elif not self.kernels:
            lines.append("no Pallas kernel in it; xla=True (--xla) costs what XLA made")
        share = "" if self.peak_share is None else f", {self.peak_share:.1%} of the peak"
        return "\n".join([*lines, f"predicted in all: {self.cycles:,} cycles, {_time(self.seconds)}{share}"])

    __repr__ = __str__


def _time(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.1f} us"


def _bytes(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
