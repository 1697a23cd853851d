"""The scalar program of a kernel, translated to Python: loops, block indices, semaphores and copies, no vector data.

Each basic block becomes one function of the registers S and predicates P, the scalar memory M and the simulator X. It
returns the number of the block to run next. Within a bundle all reads come before all writes.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trencadis.inspect.basic_blocks import Flow
from trencadis.inspect.bundles import Instruction, Schedule, register
from trencadis.inspect.scalar_arithmetic import FUNCTIONS, Unknown, pointer

Run = Callable[[list[Any], list[Any], dict[Any, Any], Any], int]

_SILENT = frozenset(  # of no consequence to where the program goes
    ("sphi", "pphi", "sfence", "shalt", "vtrace", "strace", "vdelay", "sdelay", "vnop", "snop", "svnop")
)
_BINARY = {
    "sadd": "({0}+{1})", "ssub": "({0}-{1})", "smul": "wrap({0}*{1})", "smulhi": "high({0},{1})",
    "sand": "({0}&{1})", "sor": "({0}|{1})", "sxor": "({0}^{1})",
    "sshll": "left({0},{1})", "sshrl": "((({0})&0xffffffff)>>({1}))", "sshra": "(({0})>>({1}))",
    # predicates by bits, not by `and`: Python would ask what it need not know
    "por": "({0}|{1})", "pand": "({0}&{1})", "pnand": "(({0}&{1})^True)", "pnor": "(({0}|{1})^True)",
    "pxor": "({0}^{1})",
}  # fmt: skip
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_IMMEDIATE = re.compile(r"^\$?(-?(?:0x[0-9a-f]+|\d+))(\s|$)")
_ALLOCATION = re.compile(r"^\[?#(allocation\w+)(?: \+ (.*?))?\]?$")
_SMEM = re.compile(r"\[smem:\[(.*?)\]\]\s*,?\s*(.*)$", re.DOTALL)
_OPERAND = re.compile(r"\[shape: (?P<shape>[^,]*(?:,\d+)*\]?)[^,]*, index: (?P<index>\d+), kind: (?P<kind>\w+)")
_OUTPUT = re.compile(r"index: (\d+), kind: output, shape index: \{(\d*)\}")
# What libtpu's own profiler takes for a scalar operand that it knows nothing of.
UNKNOWN_SCALAR = 42


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """One translated instruction: the value for its register, and its other effects."""

    value: str | None = None
    effects: tuple[str, ...] = ()
    place: str | None = None  # where the value goes if not into the register: scalar memory


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScalarProgram:
    """A translated program, which a `Simulator` can run."""

    schedule: Schedule
    flow: Flow
    blocks: tuple[Run, ...]
    values: Mapping[int, Sequence[int]]  # of the operands that are known, by their number
    outputs: Mapping[int, int]  # operand number of a result: which result it is
    missing: frozenset[int]  # integers that it is handed in registers, and that are unknown
    not_understood: Mapping[str, int]


def translate(schedule: Schedule, flow: Flow, values: Mapping[int, Sequence[int]]) -> ScalarProgram:
    """Translate the scalar program of a schedule, given the values of its integer operands that are known."""
    translator = _Translator(schedule, flow, values)
    blocks = tuple(translator.block(j) for j in range(len(flow.blocks)))
    outputs = {int(a): int(b or 0) for x in schedule.bundles[0].instructions for a, b in _OUTPUT.findall(x.rest)}
    return ScalarProgram(
        schedule=schedule, flow=flow, blocks=blocks, values=values, outputs=outputs,
        missing=frozenset(translator.missing), not_understood=dict(translator.not_understood),
    )  # fmt: skip


def input_shapes(schedule: Schedule) -> dict[int, str]:
    """The inputs of a program by number, with their shapes as XLA writes them: `s32[8]`."""
    inputs = (_OPERAND.search(x.rest) for x in schedule.bundles[0].instructions if x.root == "inlined_call_operand")
    return {int(m["index"]): m["shape"] for m in inputs if m and m["kind"] == "input"}


class _Translator:
    """The translation of instructions to Python text, with what it could not translate."""

    def __init__(self, schedule: Schedule, flow: Flow, values: Mapping[int, Sequence[int]]) -> None:
        self.schedule, self.flow, self.values = schedule, flow, values
        self.not_understood: collections.Counter[str] = collections.Counter()
        self.missing: set[int] = set()
        self.bases: dict[str, int] = {}
        self.unknowns: dict[str, Unknown] = {}
        self.now = 0  # when the bundle at hand issues, in cycles after the start of its block
        self.line = 0

    # -- a block -----------------------------------------------------------------------------------------------------

    def block(self, j: int) -> Run:
        """The function that runs one basic block, compiled from its Python text."""
        block = self.flow.blocks[j]
        lines = ["def run(S, P, M, X):", f" following = {j + 1}"]
        for i in range(block.first, block.end):
            self.now = block.issue[i - block.first]
            lines += self._bundle(i, j + 1)
        lines.append(" return following")
        names: dict[str, Any] = dict(FUNCTIONS) | self.unknowns
        exec(compile("\n".join(lines), f"<block {j} of {self.schedule.name}>", "exec"), names)
        run: Run = names["run"]
        return run

    def _bundle(self, i: int, following: int) -> list[str]:
        entry: list[str] = []
        effects: list[str] = []
        writes: list[tuple[str, str]] = []
        for x in self.schedule.bundles[i].instructions:
            self.line = x.line
            if x.op.startswith("sbr"):
                branch = self.flow.branches[i]
                unless = f" if {self._value(branch.predicate)} else {following}" if branch.predicate else ""
                effects.append(f"following = {branch.block}{unless}")
                continue
            if x.op.startswith("v") and not x.op.startswith("vsync") and not x.writes:
                continue  # vector data
            place, step = _place(x), self._step(x)
            if x.root == "inlined_call_operand":  # there before the program starts
                entry += [f"{place} = {step.value}", *step.effects]
                continue
            holds = self._value(x.predicate) if x.predicate else None
            effects += [f"if {holds}: {effect}" if holds else effect for effect in step.effects]
            place = step.place or place
            if step.value is not None and place is not None:
                otherwise = self._value(x.otherwise) if x.otherwise else _kept(place)
                writes.append((place, _guarded(holds, step.value, otherwise) if holds else step.value))
        reads = [f"t{q} = {value}" for q, (_, value) in enumerate(writes)]
        return [
            f" {line}" for line in [*entry, *reads, *effects, *(f"{at} = t{q}" for q, (at, _) in enumerate(writes))]
        ]

    # -- an instruction ----------------------------------------------------------------------------------------------

    def _step(self, x: Instruction) -> _Step:
        if x.root in _SILENT:
            return _Step()
        if x.root in _BINARY:
            return _Step(_BINARY[x.root].format(*self._values(x)[:2]))
        special = _SPECIAL.get(x.op) or _SPECIAL.get(x.root)
        if special is not None:
            return special(self, x)
        if x.writes is None:
            if x.op[0] in "spd":  # scalar, predicate or DMA; the rest moves vectors
                self.not_understood[x.op] += 1
            return _Step()
        self.not_understood[x.op] += 1
        return _Step(self._unknown(x.op))

    def _operand(self, x: Instruction) -> _Step:
        found = _OPERAND.search(x.rest)
        if found is None:
            raise self.schedule.unknown(f"an operand without an index: {x.rest[:80]}", x.line)
        index, space = int(found["index"]), x.op.partition(".")[2]
        known = self.values.get(index)
        if space.startswith("<no"):  # "<no memory space>": the register has the value itself
            if not known:
                self.missing.add(index)
            return _Step(str(known[0] if known else UNKNOWN_SCALAR))
        if space == "smem":
            base = self._base(f"operand {index} {found['kind']}")
            if known is None and found["kind"] == "input":
                self.missing.add(index)
            return _Step(str(base), (f"M.update(enumerate({list(known or [])!r}, {base}))",))
        return _Step(str(pointer(index)))

    def _pointer(self, x: Instruction) -> _Step:
        source = next((name for name in reversed(x.reads) if name[0] == "s"), None)
        return _Step(f"S[{source[1:]}]" if source and source != x.writes else None)

    def _extreme(self, x: Instruction) -> _Step:
        a, b = self._values(x)[:2]
        return _Step(f"{x.root}{'u' if '.u32' in x.op else ''}({a},{b})")

    def _compare(self, x: Instruction) -> _Step:
        kind = x.op.split(".")[1]
        if kind not in _COMPARE:
            self.not_understood[x.op] += 1
            return _Step(self._unknown(x.op))
        a, b = (f"(({v})&0xffffffff)" if ".u32" in x.op else v for v in self._values(x)[:2])
        return _Step(f"({a}{_COMPARE[kind]}{b})")

    def _select(self, x: Instruction) -> _Step:
        named = _named(x)
        on, yes, no = (self._value(named[name]) for name in ("predicate", "on_true", "on_false"))
        return _Step(f"({yes} if {on} else {no})")

    def _load(self, x: Instruction) -> _Step:
        return _Step(f"M.get({self._smem(x)[0]},0)")

    def _store(self, x: Instruction) -> _Step:
        address, value = self._smem(x)
        return _Step(self._value(value), place=f"M[{address}]")

    def _smem(self, x: Instruction) -> tuple[str, str]:
        found = _SMEM.search(x.rest)
        if found is None:
            raise self.schedule.unknown(f"an address that is not in SMEM: {x.op} {x.rest[:80]}", x.line)
        return self._address(found[1]), found[2]

    def _divide(self, x: Instruction) -> _Step:
        a, b = self._values(x)[:2]
        kind = re.search(r"@(\w+)", x.rest)
        return _Step(effects=(f"X.divide({a},{b},{kind[1] if kind else 'kDivAndRem'!r})",))

    def _wait(self, x: Instruction) -> _Step:
        flag, count = self._values(x)[:2]
        return _Step(effects=(f"X.wait({self.now},{flag},{count})",))

    def _copy(self, x: Instruction) -> _Step:
        named = _named(x)
        if not {"size_in_granules", "dst_syncflagno"} <= named.keys():
            raise self.schedule.unknown(f"a copy without a size or a flag: {x.op} {x.rest[:80]}", x.line)
        granules, flag = self._value(named["size_in_granules"]), self._value(named["dst_syncflagno"])
        there = named.get("hbm", named.get("vmem", "0"))
        origin, _, goal = x.op[4:].partition("_to_")
        if origin == "smem":
            smem, address = self._value(named["smem"]), self._value(there)
            return _Step(effects=(f"X.copy_smem({self.now},{smem},{granules},{flag},{address})",))
        kind = x.op[4:].replace("_to_", "-to-")
        if kind == "general" and (found := re.search(r"@(\w+-to-\w+)", x.rest)):
            kind = found[1]
        source = self._value(named.get(origin, named.get("src", next(iter(named.values())))))
        target = self._value(named.get("dst", there))
        smem = self._value(named["smem"]) if goal.startswith("smem") and "smem" in named else "None"
        return _Step(effects=(f"X.copy({self.now},{kind!r},{granules},{flag},{source},{target},{smem})",))

    # -- an operand --------------------------------------------------------------------------------------------------

    def _values(self, x: Instruction) -> list[str]:
        return [self._value(part) for part in _parts(x)]

    def _value(self, text: str | None) -> str:
        """The Python expression for an operand that an instruction reads."""
        text = re.sub(r"^\w+=", "", (text or "").strip())
        if name := register(text):
            place = f"{name[0].upper()}[{name[1:]}]"
            return f"({place}^True)" if text[0] == "!" else place
        if found := _ALLOCATION.match(text):
            more = f"+{self._address(found[2])}" if found[2] else ""
            return f"({self._base(found[1])}{more})"
        if found := _IMMEDIATE.match(text):
            value = int(found[1], 0)
            return str(value - (1 << 32) if 0x80000000 <= value < (1 << 32) else value)
        if re.match(r"^-?\d+\.\d+", text):
            return self._unknown("a float")
        self.not_understood[text[:40]] += 1
        return self._unknown(text[:40])

    def _address(self, text: str) -> str:
        return "+".join(
            self._value(f"[{part}]" if part[0] == "#" else part) for part in re.split(r"\s\+\s", text.strip())
        )

    def _base(self, name: str) -> int:
        """The base address of an allocation: allocations are kept apart, and not laid out as on the chip."""
        return self.bases.setdefault(name, (len(self.bases) + 1) << 16)

    def _unknown(self, what: str) -> str:
        name = f"unknown_{len(self.unknowns)}"
        self.unknowns[name] = Unknown(what, self.line)
        return name


def _kept(place: str) -> str:
    """The Python expression for what a place holds; scalar memory holds 0 where nothing was stored."""
    return f"M.get({place[2:-1]},0)" if place[0] == "M" else place


def _guarded(holds: str, value: str, otherwise: str) -> str:
    """The Python expression for a predicated value, which is unknown where the predicate is."""
    return f"({holds} if {holds}.__class__ is Unknown else {value} if {holds} else {otherwise})"


def _place(x: Instruction) -> str | None:
    name = x.writes
    return f"{name[0].upper()}[{name[1:]}]" if name else None


def _parts(x: Instruction) -> list[str]:
    """The operands of an instruction as texts, without attributes."""
    rest = re.sub(r"@[\w\-]+|\[resolvable:\$true\]|\[thread:\$\d+\]", "", x.rest)
    parts = [part.strip() for part in re.split(r",(?![^\[]*\])", rest) if part.strip()]
    return [re.sub(r"(?<=[\w\]])\s+\[#.*$", "", part) for part in parts]


def _named(x: Instruction) -> dict[str, str]:
    """The named operands of an instruction by name; the first of each name counts."""
    named: dict[str, str] = {}
    for part in _parts(x):
        name, equals, value = part.partition("=")
        if equals:
            named.setdefault(name, value)
    return named


_SPECIAL: dict[str, Callable[[_Translator, Instruction], _Step]] = {
    "inlined_call_operand": _Translator._operand,
    "int_to_ptr": _Translator._pointer,
    "smin": _Translator._extreme,
    "smax": _Translator._extreme,
    "smov": lambda t, x: _Step(t._values(x)[0]),
    "scmp": _Translator._compare,
    "pneg": lambda t, x: _Step(f"({t._values(x)[0]}^True)"),
    "pmov": lambda t, x: _Step(f"truth({t._values(x)[0]})"),
    "scalar_select": _Translator._select,
    "scalar_lea": lambda t, x: _Step(f"({'+'.join(t._values(x))})"),
    "sld": _Translator._load,
    "sst": _Translator._store,
    "sdivrem": _Translator._divide,
    "spop.drf": lambda t, x: _Step("X.quotient()"),
    "spop": lambda t, x: _Step(t._unknown(x.op)),  # from the vector unit: data
    "vsyncmov": lambda t, x: _Step(effects=(f"X.ask({t.now},{x.target!r},{t._values(x)[0]})",)),
    "vpop.sfrf": lambda t, x: _Step(f"X.asked({x.rest.split()[0]!r},{t._unknown('the count of a semaphore')})"),
    "dma.done.wait": _Translator._wait,
    "dma": _Translator._copy,
    "vsyncadd": lambda t, x: _Step(effects=(f"X.add({','.join(t._values(x)[:2])})",)),
    "vsyncpa": lambda t, x: _Step(effects=(f"X.clear({t._values(x)[0]})",)),
}
