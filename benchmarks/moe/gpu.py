"""Layers on a GPU: each shape has a process, all of which compile at once, and then each is timed alone."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from benchmarks import processes
from benchmarks.moe import parts, torch_layer
from benchmarks.moe.layers import Operands
from benchmarks.moe.parts import Part
from benchmarks.moe.prepared import OTHERS, PRODUCTS, Key, Prepared
from benchmarks.moe.shapes import SHAPES, MoeShape
from benchmarks.peers import JaxCall
from benchmarks.processes import SAYS, ChildFailed, Job
from benchmarks.report import OURS, Record
from benchmarks.timing import CuptiClock, HostClock, Stats, bursts, device_clock, reason_of

TURNS = 3  # of each contender, a burst each
THREADS = 6  # functions that a process compiles at a time
SILENCE_S = 200.0
MOST_RESULTS = 32 << 30  # bytes of results of one contender at a time: the gradients of gpt-oss take 6 GiB a call


def measure_all(shapes: Sequence[MoeShape], peers: Sequence[str], jobs: int, keep: Callable[[Record], None]) -> None:
    """Measure all shapes, and keep each record as it comes: of a run that is cut off, nothing is lost that was made."""
    lock = threading.Lock()

    def task(shape: MoeShape, contender: str, job: Job) -> None:
        try:
            for value in processes.run(job, silence_s=SILENCE_S, child=jobs > 0):
                if SAYS in value:
                    print(value[SAYS], flush=True)
                    continue
                with lock:
                    keep(Record.from_json(value))
        except ChildFailed as failure:
            record = Record(problem=shape.name, dtype=shape.label, contender=contender, which=shape.passes[-1])
            with lock:
                keep(dataclasses.replace(record, why=f"failed: {failure}"))

    tasks = [functools.partial(task, *each) for each in _jobs(shapes, peers)]
    for _ in processes.in_parallel(tasks, workers=jobs):
        pass


def _jobs(shapes: Sequence[MoeShape], peers: Sequence[str]) -> Iterator[tuple[MoeShape, str, Job]]:
    layers = [OURS, *(peer for peer in peers if peer != torch_layer.NAME)]
    for shape in shapes:
        names = [OURS] if shape.weights else layers
        yield shape, OURS, Job(function="benchmarks.moe.gpu:measure", arguments=(shape.name, names))
    if torch_layer.NAME not in peers:
        return
    if importlib.util.find_spec("torch") is None:
        print("torch is not installed", flush=True)
        return
    for shape in shapes:
        if not shape.weights:
            job = Job(function="benchmarks.moe.torch_layer:measure", arguments=(shape.name,))
            yield shape, torch_layer.NAME, job


# ---------------------------------------------------------------------------------------------------------------------
# A process


def measure(name: str, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the records of the layers named and of the parts of one shape, as JSON, and what is printed meanwhile."""
    began = time.monotonic()
    with processes.together():
        prepared = Prepared(SHAPES[name], names, THREADS)
    yield {SAYS: f"{name}: compiled in {time.monotonic() - began:.0f} s"}
    with processes.alone():
        x = jax.block_until_ready(prepared.make())
        for record in timed(prepared, x, names):
            yield record.to_json()


def timed(prepared: Prepared, x: Operands, names: Sequence[str]) -> Iterator[Record]:
    """Yield a record of each layer and pass, of products and of their sequence, and of what is no product.

    The layers of a pass, its products and their sequences take turns.
    """
    shape = prepared.shape
    for which in shape.passes:
        calls: dict[Key, tuple[JaxCall, HostClock | CuptiClock]] = {}
        records: dict[Key, Record] = {}
        for name in names:
            call, record = prepared.layer(x, which, name)
            records[which, name] = record
            if call is not None:
                calls[which, name] = call, _clock(prepared.bytes_of(*prepared.layers[which, name]))
        found = {key: part for key, part in prepared.sequences.items() if key[1] == which}
        for key in found:
            records[key] = Record(problem=shape.name, dtype=shape.label, which=which, contender=key[0])
        found |= {(PRODUCTS, name): prepared.products[name] for name in parts.products(shape, which)}
        times, why = _times(prepared, x, found, calls)
        for key, record in records.items():
            yield dataclasses.replace(record, time=times.get(key), why=record.why or why.get(key, ""))
        seconds = {name: time for (kind, name), time in times.items() if kind == PRODUCTS}
        yield prepared.products_record(which, seconds, "; ".join(dict.fromkeys(why.values())))
    times, why = _times(prepared, x, {(OTHERS, name): part for name, part in prepared.others.items()}, {})
    for name, part in prepared.others.items():
        record = Record(problem=shape.name, dtype=shape.label, which=name, details={"bytes": part.bytes})
        yield dataclasses.replace(record, time=times.get((OTHERS, name)), why=why.get((OTHERS, name), ""))


def _times(
    prepared: Prepared,
    x: Operands,
    found: Mapping[Key, Part],
    calls: Mapping[Key, tuple[JaxCall, HostClock | CuptiClock]],
) -> tuple[dict[Key, Stats], dict[Key, str]]:
    """The times of parts, and of calls that take turns with them, and why some have none."""
    every, failed = dict(calls), {}
    for key, part in found.items():
        try:
            every[key] = prepared.call(x, key, part), _clock(prepared.bytes_of(part.fn, part.args))
        except Exception as failure:
            failed[key] = reason_of(failure)
    times, why = bursts(every, TURNS)
    return times, failed | why


def _clock(result_bytes: int) -> HostClock | CuptiClock:
    """The clock of the device, which keeps no more results than there is memory for."""
    clock = device_clock(jax.default_backend())
    if isinstance(clock, CuptiClock):
        return dataclasses.replace(clock, kept=max(1, min(clock.kept, MOST_RESULTS // result_bytes)))
    return clock
