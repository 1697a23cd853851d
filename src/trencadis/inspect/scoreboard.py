"""The cycles in which the bundles of a basic block issue.

One bundle a cycle and in order, held back by three things only: a scalar result that is not there yet, an MXU that is
busy with a vmatmul or a vmatpush, and a product that is not there to pop. The compiler has placed vector instructions
so that they never wait. Every block starts with idle units.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Sequence

from trencadis.core.devices import Chip
from trencadis.inspect.bundles import Bundle, Instruction

# Cycles until a scalar result can be read; 1 where it is not here. From libtpu's schedules.
SCALAR_LATENCY = {
    "sld": 6, "scmp": 2, "por": 2, "pand": 2, "pnand": 2, "pneg": 2, "pmov": 2, "pxor": 2, "pnor": 2,
    "scalar_select": 2, "smul": 3, "smulhi": 3,
}  # fmt: skip
LATCH = 3  # from the last vmatpush until the matrix can be latched by a vmatmul
RESULT_BUFFERS = 4  # consecutive entries of the result buffer that one vmatmul fills


@functools.cache
def unit_of(op: str) -> str | None:
    """The number of the MXU that an operation uses, or None if it uses none.

    >>> unit_of("vmatmul.mubr.bf16.gmra.mxu1"), unit_of("vpop.trf.xlu0")
    ('1', None)
    """
    found = re.search(r"mxu(\d)", op)
    return found[1] if found and op.startswith(("vmat", "vpop")) else None


@functools.cache
def _buffer_of(op: str) -> int | None:
    """The result buffer entry that an operation names; None on older chips, which have a queue of results."""
    found = re.search(r"mrb\[(\d+)\]", op)
    return int(found[1]) if found else None


def cycles_of_vmatmul(op: str, chip: Chip) -> int:
    """The number of cycles for which a vmatmul holds its MXU."""
    return chip.vmatmul_cycles[_operand_type(op, tuple(chip.vmatmul_cycles))]


@functools.cache
def _operand_type(op: str, known: tuple[str, ...]) -> str:
    found = re.search(r"vmatmul(?:\.mubr)?(?:\.msk)?\.(\w+)\.", op)
    kind = found[1] if found else "bf16"
    if kind.startswith("f8"):
        return "f8"
    kind = {"u4": "s4"}.get(kind, kind)
    return kind if kind in known else "bf16"


@dataclasses.dataclass(slots=True)
class _Unit:
    """The state of one MXU: when it is free again, and when its results can be popped."""

    parts: int  # pops that one vmatmul feeds
    matmul_free: int = 0
    push_free: int = 0
    last_push: int = -99
    queue: list[int] = dataclasses.field(default_factory=list)
    popped: int = 0
    buffers: dict[int, int] = dataclasses.field(default_factory=dict)

    def earliest(self, op: str) -> int:
        """The first cycle in which an operation can issue on this MXU."""
        if op.startswith("vmatmul"):
            return max(self.matmul_free, self.last_push + LATCH if "vlgmr" in op else 0)
        if op.startswith("vmatpush"):
            return self.push_free
        if not op.startswith("vpop"):
            return 0
        buffer = _buffer_of(op)
        if buffer is not None:
            return self.buffers.get(buffer, 0)
        return self.queue[self.popped] if self.popped < len(self.queue) else 0

    def issue(self, op: str, at: int, chip: Chip) -> None:
        """Update the state for an operation that issues now."""
        if op.startswith("vmatmul"):
            self.matmul_free = at + cycles_of_vmatmul(op, chip)
            buffer = _buffer_of(op)
            if buffer is None:
                self.queue += [at + chip.vpop_latency + part * chip.vpop_interval for part in range(self.parts)]
            else:
                for part in range(RESULT_BUFFERS):
                    self.buffers[buffer + part] = at + chip.vpop_latency + part * chip.vpop_interval
        elif op.startswith("vmatpush"):
            self.push_free, self.last_push = at + chip.vmatpush_cycles, at
        elif op.startswith("vpop") and _buffer_of(op) is None:
            self.popped += 1


def issue_times(bundles: Sequence[Bundle], chip: Chip) -> tuple[list[int], int]:
    """The cycle in which each bundle issues, and the length of the block in cycles."""
    units = _units(bundles, chip)
    ready: dict[str, int] = {}  # scalar register: when its value can be read
    times: list[int] = []
    now = -1
    for bundle in bundles:
        now += 1
        scalars = [x for x in bundle.instructions if _waits_for_scalars(x)]
        products = [(x.op, units[name]) for x in bundle.instructions if (name := unit_of(x.op)) is not None]
        for x in scalars:
            now = max([now, *(ready.get(register, 0) for register in x.reads)])
        for op, unit in products:
            now = max(now, unit.earliest(op))
        for op, unit in products:
            unit.issue(op, now, chip)
        for x in scalars:
            if written := x.writes:
                ready[written] = now + SCALAR_LATENCY.get(x.root, 1)
        times.append(now)
    return times, now + 1


def _waits_for_scalars(x: Instruction) -> bool:
    return x.op[0] in "spd" and x.op not in ("sphi", "pphi")


def _units(bundles: Sequence[Bundle], chip: Chip) -> dict[str, _Unit]:
    """The MXUs of a block; the ratio of its pops to its vmatmuls says how many pops one vmatmul feeds."""
    matmuls, pops = collections.Counter[str](), collections.Counter[str]()
    for x in (x for bundle in bundles for x in bundle.instructions):
        unit = unit_of(x.op)
        if unit is not None:
            matmuls[unit] += x.op.startswith("vmatmul")
            pops[unit] += x.op.startswith("vpop") and f"mrf.mxu{unit}" in x.op
    return {
        unit: _Unit(parts=max(1, round(pops[unit] / count)) if (count := matmuls[unit]) else chip.vpops)
        for unit in matmuls
    }
