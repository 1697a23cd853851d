"""The simulation of a scalar program: copies take latency and bandwidth, and a wait lasts until its copy is there.

Memory is one channel that serves copies in the order in which they start, at a share of the chip's peak. A copy of
n bytes that starts at t ends at `max(t + latency, end of the copy before) + n / bandwidth`. Blocks follow one another
with idle units; within a block the scoreboard has said when each bundle issues, and a wait delays all that follow.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

from trencadis.core.devices import Chip
from trencadis.inspect.scalar_arithmetic import MASK, DependsOnUnknown, Unknown, in_hbm, operand_of
from trencadis.inspect.scalar_program import ScalarProgram

SUSTAINED = 0.90  # share of the memory's peak that a stream of copies gets; libtpu's figure for v5e, taken for all
FREE = 1e9  # as if memory had no limit
REGISTERS = 64  # scalars; of predicates there are fewer
BLOCKS = 20_000_000  # a program that runs through more of them is given up; some minutes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The result of a simulation: cycles, waits, copies, and how often each block ran."""

    cycles: int
    waited: int  # of these, for copies
    runs: tuple[int, ...]  # how often each block ran
    waits: tuple[float, ...]  # and how long it waited in all
    bytes_in: int
    bytes_out: int
    copies: int
    unfinished: bool  # given up
    missing: frozenset[int]  # operands whose integers it read, and that are unknown
    unmet: int  # waits for a flag that no copy of this program was under way to raise
    results: dict[int, list[int]]  # integers that it wrote into its results, by number


class Simulator:
    """The state of a program besides its registers: the clock, copies under way, and flags."""

    def __init__(self, program: ScalarProgram, chip: Chip, sustained: float = SUSTAINED) -> None:
        self.program, self.chip = program, chip
        self.rate = chip.hbm * sustained / chip.clock  # bytes a cycle
        self.clock = 0.0
        self.waited = 0.0
        self.waited_before = 0.0  # when the block at hand was entered
        self.channel = 0.0  # when memory is free again
        self.memory: dict[Any, Any] = {}
        self.flags: collections.defaultdict[int, list[tuple[float, int]]] = collections.defaultdict(list)
        self.counts: collections.defaultdict[int, int] = collections.defaultdict(int)
        self.quotients: list[Any] = []
        self.answers: dict[str, int] = {}
        self.bytes_in = self.bytes_out = self.copies = self.unmet = 0
        self.missing: set[int] = set()
        self.results: dict[int, list[int]] = {}

    def run(self, blocks: int = BLOCKS) -> Trace:
        """Run from the first block until the program leaves the last one."""
        flow, run = self.program.flow, self.program.blocks
        cycles = [block.cycles for block in flow.blocks]
        runs, waits = [0] * len(run), [0.0] * len(run)
        scalars: list[Any] = [0] * REGISTERS
        predicates: list[Any] = [False] * REGISTERS
        at = left = 0
        try:
            while at < len(run) and left < blocks:
                self.waited_before = self.waited
                following = run[at](scalars, predicates, self.memory, self)
                wait = self.waited - self.waited_before
                self.clock += cycles[at] + wait
                runs[at] += 1
                waits[at] += wait
                at = following
                left += 1
        except DependsOnUnknown as error:
            raise self._lost(at, f"what it does next depends on {error}", error.unknown.line) from None
        return Trace(
            cycles=int(self.clock), waited=int(self.waited), runs=tuple(runs), waits=tuple(waits),
            bytes_in=self.bytes_in, bytes_out=self.bytes_out, copies=self.copies, unfinished=at < len(run),
            missing=frozenset(self.missing | self.program.missing), unmet=self.unmet,
            results=self.results,
        )  # fmt: skip

    def _lost(self, block: int, why: str, line: int | None = None) -> Exception:
        schedule = self.program.schedule
        first = schedule.bundles[self.program.flow.blocks[block].first]
        return schedule.unknown(f"the program cannot be followed: {why}", line or first.line)

    # -- what translated programs call -------------------------------------------------------------------------------

    def now(self, issue: int) -> float:
        """The clock at a bundle; waits met earlier in the block have delayed it."""
        return self.clock + issue + (self.waited - self.waited_before)

    def copy(self, issue: int, kind: str, granules: int, flag: int, source: Any, target: Any, smem: Any) -> None:
        """Start a copy, whose granules its flag counts when it is there."""
        size = self.chip.dma_granule * int(granules)
        if kind == "general":
            out = not in_hbm(source) and in_hbm(target)
        else:
            out = kind.startswith("vmem-to-hbm")
        if smem is not None:
            self._read_operand(operand_of(source), smem)
        if "hbm" in kind or kind == "general":
            self.bytes_in += 0 if out else size
            self.bytes_out += size if out else 0
        self.copies += 1
        latency = self.chip.dma_out if out else self.chip.dma_in
        self.channel = max(self.now(issue) + latency, self.channel) + size / self.rate
        self.flags[flag].append((self.channel, granules))

    def _read_operand(self, operand: int, smem: int) -> None:
        values = self.program.values.get(operand)
        if values is None:
            self.missing.add(operand)
        self.memory.update(enumerate(values or (), smem))

    def copy_smem(self, issue: int, source: int, granules: int, flag: int, target: int) -> None:
        """Start a copy of integers into a result; a later kernel may read them."""
        words = self.chip.dma_granule * int(granules) // 4
        result = self.program.outputs.get(operand_of(target))
        values = [self.memory.get(source + word, 0) for word in range(words)]
        if result is not None and not any(isinstance(value, Unknown) for value in values):
            self.results[result] = values
        self.flags[flag].append((self.now(issue) + self.chip.dma_out, granules))

    def wait(self, issue: int, flag: int, count: int) -> None:
        """Hold the program until a flag has reached a count."""
        queue = self.flags[flag]
        have = self.counts[flag]
        if have >= count:
            return
        now = self.now(issue)
        queue.sort()
        while queue and have < count:
            there, granules = queue.pop(0)
            have += granules
            if there > now:
                self.waited += there - now
                now = there
        self.counts[flag] = have
        self.unmet += have < count

    def add(self, flag: int, count: int) -> None:
        """Add to the count of a flag; programs subtract what they waited for."""
        self.counts[flag] = max(0, self.counts[flag] + count)

    def clear(self, flag: int) -> None:
        """Drop the copies that a flag waits for."""
        self.flags[flag] = []

    def ask(self, issue: int, name: str, flag: Any) -> None:
        """Record the count of a flag under a name, if this program has used the flag."""
        self.answers.pop(name, None)
        if not isinstance(flag, Unknown) and (flag in self.flags or flag in self.counts):
            now = self.now(issue)
            there = sum(granules for at, granules in self.flags.get(flag, ()) if at <= now)
            self.answers[name] = self.counts.get(flag, 0) + there

    def asked(self, name: str, otherwise: Unknown) -> Any:
        """The count recorded under a name, or unknown: a flag that this program does not use may be another core's."""
        return self.answers.get(name, otherwise)

    def quotient(self) -> Any:
        """The oldest quotient or remainder that was not read yet."""
        if not self.quotients:
            raise self.program.schedule.unknown("a quotient is read that was not divided for")
        return self.quotients.pop(0)

    def divide(self, a: Any, b: Any, kind: str) -> None:
        """Queue a quotient, a remainder, or both."""
        if isinstance(a, Unknown) or isinstance(b, Unknown):
            unknown = a if isinstance(a, Unknown) else b
            self.quotients += [unknown] * (1 + ("Rem" in kind and "Div" in kind))
            return
        quotient, remainder = divmod(a & MASK, max(1, b & MASK))
        if "Rem" not in kind:
            self.quotients.append(quotient)
        else:
            self.quotients += [quotient, remainder] if "Div" in kind else [remainder]
