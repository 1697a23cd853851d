import subprocess
import types

import pytest

from benchmarks import schedules
from benchmarks.report import Record
from benchmarks.timing import ScheduleClock
from trencadis.inspect import CompilerMissing

RECORD = Record(problem="p", dtype="bf16", which="forward", device="v6e", details={"tiling": [1, 2, 3]})


def kernel(**more):
    fields = {"seconds": 2.0, "runs": 2, "vmem_bytes": 5, "spill_bytes": 1, "mxu_busy": 0.5, "cycles": 7}
    return types.SimpleNamespace(**fields, bytes_in=3, bytes_out=1, warnings=more.pop("warnings", ()), **more)


def inspection(**more):
    fields = {"compiled": True, "kernels": [kernel()], "warnings": (), "seconds": 4.5, "message": ""}
    return types.SimpleNamespace(**fields | more)


def scheduled(monkeypatch, found):
    def clock(*_, **__):
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(ScheduleClock, "__call__", clock)
    clock = ScheduleClock(generation="v6e", timeout_s=5)
    return schedules.scheduled(RECORD, lambda: (len, ()), clock, {"peer": "1"})


def test_a_schedule_as_a_record(monkeypatch):
    found = scheduled(monkeypatch, inspection())
    assert found.seconds == 4.5 and not found.why
    assert found.details["tiling"] == [1, 2, 3] and found.details["versions"]["peer"] == "1"
    assert (found.details["kernel_seconds"], found.details["cycles"], found.details["mxu"]) == (4, 14, 0.5)
    assert "4500000 us" in schedules.line(found)


@pytest.mark.parametrize(
    "found, why",
    [
        (inspection(compiled=False, message="no room\n  in /home/me/x.py"), "no room in ..."),
        (inspection(kernels=[]), "no kernel: left to XLA's general operations"),
        (inspection(kernels=[kernel(warnings=("a lower bound",))]), "no reliable figure: a lower bound"),
        (subprocess.TimeoutExpired("x", 5), "not compiled within 5 s"),
        (KeyError("tile"), "KeyError: 'tile'"),
    ],
    ids=str,
)
def test_a_failure_is_a_record_with_a_reason(monkeypatch, found, why):
    record = scheduled(monkeypatch, found)
    assert record.why == why and record.time is None and why in schedules.line(record)


def test_a_compiler_that_is_missing_ends_the_run(monkeypatch):
    with pytest.raises(CompilerMissing):
        scheduled(monkeypatch, CompilerMissing("no libtpu"))


def test_a_failure_is_told_in_a_line_without_paths():
    assert schedules.reason("foo.RuntimeError: no room\n  in /home/me/x.py") == "foo.RuntimeError: no room in ..."
