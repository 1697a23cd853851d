"""The one way to run a part of a benchmark in another process.

A job names a generator function of this package and its arguments, which are JSON values. A child process runs it and
prints each value that it yields as one line of JSON, so that nothing is lost when the child hangs or dies later. It is
needed for another framework on the GPU (torch), for another interpreter, for kernels that may hang, and for cases
that need all of the memory of a GPU.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import importlib
import json
import os
import pathlib
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, TypeVar

T = TypeVar("T")

ROOT = pathlib.Path(__file__).parents[1]
MARK = "@benchmarks "  # begins each line that the parent reads; everything else that a child prints is ignored
LOCK = "TRENCADIS_BENCHMARKS_LOCK"
SILENCE_S = 300.0
SAYS = "says"  # the one key of a value that is a line for the parent to print, and no result


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A generator function, "package.module:name", and its arguments."""

    function: str
    arguments: tuple[Any, ...] = ()

    def values(self) -> Iterator[Any]:
        """Run the job in this process."""
        module, _, name = self.function.partition(":")
        yield from getattr(importlib.import_module(module), name)(*self.arguments)


class ChildFailed(RuntimeError):
    """A child process printed nothing for too long, or ended with an error; the message says which."""


def run(
    job: Job,
    *,
    silence_s: float = SILENCE_S,
    python: str = sys.executable,
    child: bool = True,
    more_env: Mapping[str, str] | None = None,
) -> Iterator[Any]:
    """Yield the values of a job as they come; raises `ChildFailed` after the last one if the child fails.

    Without a child the job runs in this process, which a debugger can follow. `more_env` are variables that the child
    has unless this process has them.
    """
    if not child:
        yield from job.values()
        return
    paths = [str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        **(more_env or {}),
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
    }
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [python, "-u", "-m", "benchmarks.processes", json.dumps(dataclasses.asdict(job))],
            cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip
        try:
            yield from _values(process, silence_s)
            if code := process.wait():
                errors.seek(0)
                raise ChildFailed((errors.read().strip().splitlines() or [f"exit code {code}"])[-1][:200])
        finally:
            process.kill()
            process.wait()


def _values(process: subprocess.Popen[str], silence_s: float) -> Iterator[Any]:
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=silence_s)
        except queue.Empty:
            raise ChildFailed(f"no answer within {silence_s:.0f} s") from None
        if line is None:
            return
        if line.startswith(MARK):
            yield json.loads(line.removeprefix(MARK))


def _read(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(None)


def each(
    function: str, items: Sequence[Any], *more: Any, silence_s: float = SILENCE_S, child: bool = True
) -> Iterator[tuple[Any, Any, str]]:
    """Yield (item, value, why) for a function that takes the items, and `more`, and yields a value for each item.

    Where a child hangs or dies the value is None, and another child takes the items behind that one.
    """
    at = 0
    while at < len(items):
        job = Job(function=function, arguments=(list(items[at:]), *more))
        try:
            for value in run(job, silence_s=silence_s, child=child):
                yield items[at], value, ""
                at += 1
            why = "no value" if at < len(items) else ""
        except ChildFailed as failure:
            why = str(failure)
        if why and at < len(items):
            yield items[at], None, why
            at += 1


def in_parallel(tasks: Sequence[Callable[[], T]], *, workers: int) -> Iterator[T]:
    """Yield the result of each task, in order. Tasks run in threads, and wait for the children that they start."""
    with tempfile.NamedTemporaryFile() as lock, concurrent.futures.ThreadPoolExecutor(max(workers, 1)) as pool:
        os.environ[LOCK] = lock.name
        try:
            yield from pool.map(lambda task: task(), tasks)
        finally:
            pool.shutdown(cancel_futures=True)
            del os.environ[LOCK]


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Hold the device for this process: of the children of one `in_parallel`, one at a time is inside."""
    import fcntl

    with _lock(fcntl.LOCK_EX):
        yield


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Use the device beside other children, but not while one is `alone`: XLA times matmuls as it compiles them."""
    import fcntl

    with _lock(fcntl.LOCK_SH):
        yield


@contextlib.contextmanager
def _lock(kind: int) -> Iterator[None]:
    path = os.environ.get(LOCK)
    if path is None:
        yield
        return
    import fcntl

    with open(path) as lock:
        fcntl.flock(lock, kind)
        yield  # closing the file gives the lock back, also when the process is killed


def main() -> None:
    """Run the job of the command line, in the child."""
    asked = json.loads(sys.argv[1])
    for value in Job(function=asked["function"], arguments=tuple(asked["arguments"])).values():
        print(MARK + json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
