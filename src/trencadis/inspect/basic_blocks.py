"""Basic blocks: runs of bundles that are entered at the top only, with the cycles each takes once it is entered."""

from __future__ import annotations

import collections
import dataclasses
import re

from trencadis.core.devices import Chip
from trencadis.inspect.bundles import Bundle, Instruction, Schedule
from trencadis.inspect.scoreboard import cycles_of_vmatmul, issue_times, unit_of

_REGION = re.compile(r"target = \$region(\d+)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """The branch of a bundle: the block it leads to where its predicate holds, or always if it has none."""

    predicate: str | None
    block: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A basic block: the bundles from `first` to before `end`, with their issue times and instruction counts."""

    first: int
    end: int
    issue: tuple[int, ...]  # when each bundle issues, in cycles after the first
    cycles: int
    mxu: float  # cycles for which the MXUs are busy, on average over them
    counts: dict[str, int]  # of the kinds of instruction that a report shows


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """The basic blocks of a schedule, and its branches by the number of their bundle."""

    blocks: tuple[Block, ...]
    branches: dict[int, Branch]


def flow(schedule: Schedule, chip: Chip) -> Flow:
    """Cut a schedule into basic blocks, where branches start and end."""
    bundles = schedule.bundles
    end = len(bundles)
    begins: dict[int, int] = {}  # region: its first bundle
    for i, bundle in enumerate(bundles):
        for region in bundle.starts:
            begins.setdefault(region, i)
    targets: dict[int, tuple[str | None, int]] = {}
    leaders = {0}
    for i, bundle in enumerate(bundles):
        for x in bundle.instructions:
            if x.op.startswith("sbr"):
                targets[i] = x.predicate, _destination(schedule, x, begins)
                leaders |= {targets[i][1], _last_slot(schedule, chip, i) + 1}
    starts = sorted(i for i in leaders if i < end)
    number = {first: j for j, first in enumerate(starts)} | {end: len(starts)}
    return Flow(
        blocks=tuple(_block(bundles, chip, a, b) for a, b in zip(starts, [*starts[1:], end], strict=True)),
        branches={i: Branch(predicate=p, block=number[to]) for i, (p, to) in targets.items()},
    )


def _destination(schedule: Schedule, branch: Instruction, begins: dict[int, int]) -> int:
    found = _REGION.search(branch.rest)
    if found is None:
        raise schedule.unknown(f"a branch that names no region: {branch.op} {branch.rest}", branch.line)
    if int(found[1]) in begins:
        return begins[int(found[1])]
    if not schedule.bundles[-1].exits:
        raise schedule.unknown(f"a branch to region {found[1]}, which begins nowhere", branch.line)
    return len(schedule.bundles)  # the empty region behind the last bundle is not written out


def _last_slot(schedule: Schedule, chip: Chip, i: int) -> int:
    """The last bundle that runs whether the branch of bundle i is taken or not.

    Final bundles of v7x have runs of empty bundles folded into one, so the slots are not simply the next few: the
    schedule before that step says which instructions lie in them.
    """
    at, slots, bundles = schedule.unfolded, chip.delay_slots, schedule.bundles
    branch = next(x.target for x in bundles[i].instructions if x.op.startswith("sbr"))
    if slots == 4 or branch not in at:
        return i + slots
    limit = at[branch] + slots

    def places(bundle: Bundle) -> list[int]:
        return [at[x.target] for x in bundle.instructions if x.target in at and x.op not in ("sphi", "pphi")]

    last, reached = i, max(places(bundles[i]), default=at[branch])
    while last + 1 < len(bundles) and last - i < slots:
        here = places(bundles[last + 1])
        if min(here, default=reached + 1) > limit:  # an empty bundle folds what follows all that was placed so far
            break
        last, reached = last + 1, max([reached, *here])
    return last


def _block(bundles: tuple[Bundle, ...], chip: Chip, first: int, end: int) -> Block:
    body = bundles[first:end]
    issue, cycles = issue_times(body, chip)
    counts, busy = collections.Counter[str](), 0
    for x in (x for bundle in body for x in bundle.instructions):
        counts.update(_kinds(x))
        if x.op.startswith("vmatmul"):
            busy += cycles_of_vmatmul(x.op, chip)
    return Block(
        first=first, end=end, issue=tuple(issue), cycles=cycles, mxu=busy / chip.mxus, counts=dict(counts)
    )  # fmt: skip


def _kinds(x: Instruction) -> list[str]:
    op = x.op
    if op.startswith(("vmatmul", "vmatpush")):
        return [op[: 7 if op.startswith("vmatmul") else 8]]
    if op.startswith("vpop") and unit_of(op):
        return ["vpop"]
    if op.startswith(("vst", "vld")):
        return [op[:3], "spill"] if "_spill" in x.rest else [op[:3]]
    if op.startswith(("vsel", "vcmp", "vmand")):
        return ["mask"]
    if op.startswith("dma.") and op != "dma.done.wait":
        return ["dma"]
    return []
