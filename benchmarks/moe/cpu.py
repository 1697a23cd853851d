"""Layers on a CPU: the layers and each of the products take turns in one race."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import jax

from benchmarks.moe import parts
from benchmarks.moe.prepared import PRODUCTS, Prepared
from benchmarks.moe.shapes import MoeShape
from benchmarks.report import OURS, Record
from benchmarks.timing import Call, Clock, race

THREADS = 1  # functions that are compiled at a time


def records(shape: MoeShape, peers: Sequence[str], clock: Clock, rounds: int) -> Iterator[Record]:
    """Yield a record of each layer and pass, and of the sum of the products; without rounds nothing is timed."""
    names = [OURS, *peers]
    prepared = Prepared(shape, names, THREADS)
    x = jax.block_until_ready(prepared.make())
    for which in shape.passes:
        calls: dict[str, Call] = {}
        found: list[Record] = []
        for name in names:
            call, record = prepared.layer(x, which, name)
            calls |= {} if call is None else {name: call}
            found.append(record)
        for name, part in parts.products(shape, which).items():
            calls[name] = prepared.call(x, (PRODUCTS, name), part)
            calls[name]()
        times = race(calls, clock, rounds=rounds) if rounds else {}
        yield from (dataclasses.replace(record, time=times.get(record.contender)) for record in found)
        yield prepared.products_record(which, times, "" if rounds else "is not timed")
