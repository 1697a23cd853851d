"""The schedule of one call by the TPU compiler, as a record."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax

from benchmarks.kernels import libtpu_version
from benchmarks.report import Record
from benchmarks.timing import ScheduleClock, Stats
from trencadis import inspect

if TYPE_CHECKING:
    from trencadis.inspect import Inspection

Build = Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]  # the call and its operands; may raise


def scheduled(record: Record, build: Build, clock: ScheduleClock, versions: Mapping[str, str], **how: Any) -> Record:
    """The record with what the schedule says; a failure is part of the record, but for a compiler that is missing."""
    about = {"versions": {"jax": jax.__version__, "libtpu": libtpu_version(), **versions}}
    record = dataclasses.replace(record, details={**record.details, **about})
    begin = time.monotonic()
    try:
        fn, operands = build()
        found = clock(fn, *operands, **how)
    except subprocess.TimeoutExpired:
        return dataclasses.replace(record, why=f"not compiled within {clock.timeout_s:.0f} s")
    except inspect.CompilerMissing:
        raise
    except Exception as failure:  # whatever a peer raises when it is traced
        return dataclasses.replace(record, why=reason(f"{type(failure).__name__}: {failure}"))
    finally:
        jax.clear_caches()  # some ask for the chip when they are traced, which the cache does not know
    figures = _figures(found)
    details = {**record.details, **figures.pop("details", {}), "taken": round(time.monotonic() - begin, 1)}
    return dataclasses.replace(record, **figures, details=details)


def _figures(found: Inspection) -> dict[str, Any]:
    """The fields of a record that an inspection gives."""
    if not found.compiled:
        return {"why": reason(found.message or "does not compile")}
    if not found.kernels:  # loops of unknown length of XLA's own, or all groups densely
        return {"why": "no kernel: left to XLA's general operations"}
    warnings = [warning for kernel in found.kernels for warning in kernel.warnings]
    if guessed := [warning for warning in warnings if "not known" in warning or "lower bound" in warning]:
        return {"why": reason(f"no reliable figure: {guessed[0]}")}
    total = sum(kernel.seconds * kernel.runs for kernel in found.kernels)
    details: dict[str, Any] = {
        "kernel_seconds": total,
        "vmem": max(kernel.vmem_bytes for kernel in found.kernels),
        "spills": sum(kernel.spill_bytes for kernel in found.kernels),
        "mxu": sum(kernel.mxu_busy * kernel.seconds * kernel.runs for kernel in found.kernels) / total,
        "cycles": sum(kernel.cycles * kernel.runs for kernel in found.kernels),
        "bytes": sum((kernel.bytes_in + kernel.bytes_out) * kernel.runs for kernel in found.kernels),
    }
    if notes := [reason(text) for text in (*found.warnings, *warnings)]:
        details["warnings"] = notes
    return {"time": Stats(median=found.seconds), "details": details}


def reason(text: str) -> str:
    """A message in one line, without paths."""
    return re.sub(r"(/[\w.\-]+){2,}", "...", " ".join(text.split()))[:300]


def line(record: Record) -> str:
    """The record in a line, to be printed as it is made: microseconds of a TPU, milliseconds elsewhere."""
    seconds = record.why
    if record.seconds is not None:
        seconds = f"{record.seconds * 1e6:.0f} us" if record.device else f"{record.seconds * 1e3:.4g} ms"
    words = (record.device, record.problem, record.which, record.dtype, record.contender, record.details.get("tiling"))
    return " ".join([*(str(word) for word in words if word), seconds])
