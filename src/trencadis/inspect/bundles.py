"""The final schedule of a program: its bundles, read from the text that libtpu dumps.

A bundle is what a TensorCore issues in one cycle: a few instructions, for the scalar unit, the vector unit, the MXUs
and the copies. The text is made for people and may change with libtpu. What is not recognised raises
`UnknownSchedule`, which names the place: a cost that was read wrongly is worse than none.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re

# "  0x1a LB: > { %s1_s0 = sadd ... }": the address, marks of loops and regions, and how deep in loops it lies
_HEADER = re.compile(r"^\s*(0x[0-9a-f]+|\d+)\s+(?:\w\w)?\s*:\s*[> ]*\{(.*)$")
_FOOTER = re.compile(r"\}\s*(/\*(?:(?!\*/).)*\*/)?\s*$", re.DOTALL)  # the last brace; a comment after it marks regions
_STARTS = re.compile(r"Start region (\d+)|Start/End empty region (\d+)")
_INSTRUCTION = re.compile(r"\s*(%\S+)\s*=\s*(\S+)\s*(.*)$", re.DOTALL)
_PREDICATE = re.compile(r"\((!?%p\d+_p\d+)(?:,\s*([^()]*))?\)\s*,?")
_SCALAR = re.compile(r"%[sp]\d+_([sp]\d+)")  # a scalar or predicate register, e.g. %s7812_s24 is s24
_ALLOCATION = re.compile(
    r"#(?P<name>allocation\w+) \[shape = '[^']*', space=(?P<space>\w+), size = (?P<size>0x[0-9a-f]+|\d+)"
    r"(?:, offset = (?P<offset>0x[0-9a-f]+|\d+))?.*?tag = '(?P<tag>[^']*)"
)
# Comments that say something the instruction does not: what an operand is, what a division yields, where a copy goes.
_MEANT = (
    (re.compile(r"/\*(\w+)=\*/"), r"\1="),
    (re.compile(r"/\*\s*(k(?:Rem|Div|Quotient)\w*)\s*\*/"), r" @\1"),
    (re.compile(r"/\*\s*((?:hbm|vmem|smem)-to-(?:hbm|vmem|smem))\s*\*/"), r" @\1"),
)
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)


def register(operand: str) -> str | None:
    """The scalar or predicate register that an operand is.

    >>> register("%s7812_s24"), register("!%p3_p1"), register("$0x10")
    ('s24', 'p1', None)
    """
    found = _SCALAR.fullmatch(operand.removeprefix("!"))
    return found[1] if found else None


class UnknownSchedule(Exception):
    """The compiler's dump, or a step of the program in it, is not of a kind that this reader knows."""

    def __init__(self, what: str, path: pathlib.Path, line: int | None = None) -> None:
        place = str(path) if line is None else f"{path}:{line}"
        super().__init__(f"{what}\n  in {place}\n  written by libtpu {libtpu_version()}")


def libtpu_version() -> str:
    """The version of the installed TPU compiler."""
    import importlib.metadata

    for name in ("libtpu", "libtpu-nightly"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "(not installed)"


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a bundle: `%target = op (predicate, otherwise), rest`."""

    target: str
    op: str
    predicate: str | None  # it acts only where this holds, e.g. "!%p12_p3"
    otherwise: str | None  # and what its target gets where it does not
    rest: str  # operands and attributes
    reads: tuple[str, ...]  # scalar registers, e.g. ("s24", "p0")
    line: int

    @property
    def root(self) -> str:
        """The operation without its type: "scmp" of "scmp.lt.s32.totalorder"."""
        return self.op.split(".")[0]

    @property
    def writes(self) -> str | None:
        """The scalar or predicate register that it writes, e.g. "s24"."""
        return register(self.target)


@dataclasses.dataclass(frozen=True, slots=True)
class Bundle:
    """The instructions that a TensorCore issues in one cycle."""

    address: int
    instructions: tuple[Instruction, ...]
    starts: tuple[int, ...]  # regions that begin here: what a branch names as its target
    exits: bool  # the program ends with it
    line: int


def parse(text: str, path: pathlib.Path) -> tuple[Bundle, ...]:
    """The bundles in the text of one program.

    >>> (bundle,) = parse("0x3 LB: > { %s9_s1 = sadd.s32 1, %s8_s0 } /* Start region 4 */", pathlib.Path("a.txt"))
    >>> bundle.address, bundle.starts, bundle.instructions[0].op, bundle.instructions[0].reads
    (3, (4,), 'sadd.s32', ('s0',))
    """
    pieces: list[tuple[int, str, list[str]]] = []  # line, address, body
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            pieces.append((number, header[1], [header[2]]))
        elif pieces:  # a bundle that goes on over several lines
            pieces[-1][2].append(line)
    if not pieces:
        raise UnknownSchedule("no line looks like a bundle, `0x1a : { %1 = op ... }`", path)
    return tuple(_bundle(line, int(address, 0), " ".join(body), path) for line, address, body in pieces)


def _bundle(line: int, address: int, body: str, path: pathlib.Path) -> Bundle:
    footer = _FOOTER.search(body)
    if footer is None:
        raise UnknownSchedule(f"the bundle at {address:#x} has no closing brace", path, line)
    code = body[: footer.start()]
    for comment, meaning in _MEANT:
        code = comment.sub(meaning, code)
    code = _COMMENT.sub("", code)
    return Bundle(
        address=address,
        instructions=tuple(_instruction(part, path, line) for part in re.split(r"\s;;\s", code) if part.strip()),
        starts=tuple(int(a or b) for a, b in _STARTS.findall(footer[1] or "")),
        exits="exit bundle" in (footer[1] or ""),
        line=line,
    )


def _instruction(text: str, path: pathlib.Path, line: int) -> Instruction:
    found = _INSTRUCTION.match(text)
    if found is None:
        raise UnknownSchedule(f"not an instruction: {text.strip()[:80]!r}", path, line)
    target, op, rest = found.groups()
    reads = tuple(_SCALAR.findall(rest)) if op[0] in "spdi" else ()
    predicate = otherwise = None
    if op != "scalar_select" and (guard := _PREDICATE.search(rest)):
        predicate, otherwise = guard.groups()
        rest = rest[: guard.start()] + rest[guard.end() :]
    return Instruction(target, op, predicate, otherwise, rest.strip(), reads, line)


@dataclasses.dataclass(frozen=True, slots=True)
class Vmem:
    """The VMEM of a program: bytes up to the highest that it uses, and bytes that hold spilled registers."""

    bytes: int = 0
    spill_bytes: int = 0


def parse_vmem(text: str) -> Vmem:
    """The VMEM that the allocation table of a dump uses.

    >>> parse_vmem("#allocation2 [shape = 'u8[4096]{0}', space=vmem, size = 0x1000, offset = 0x400, tag = 'input']")
    Vmem(bytes=5120, spill_bytes=0)
    """
    top = spilled = 0
    for found in _ALLOCATION.finditer(text):
        if found["space"] == "vmem":
            size = int(found["size"], 0)
            top = max(top, int(found["offset"] or "0", 0) + size)
            spilled += size if "spill" in found["name"] or "spill" in found["tag"] else 0
    return Vmem(bytes=top, spill_bytes=spilled)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One program of the compiled module: a Pallas kernel, or an operation that XLA made."""

    name: str  # as in the compiled module, e.g. "gmm.1"
    path: pathlib.Path
    bundles: tuple[Bundle, ...]
    vmem: Vmem
    is_kernel: bool  # a Pallas kernel
    # Where each instruction (by its target) lay before runs of empty bundles were folded into one.
    unfolded: dict[str, int]

    def unknown(self, what: str, line: int | None = None) -> UnknownSchedule:
        """The error to raise for something in this schedule that is not understood."""
        return UnknownSchedule(f"{self.name}: {what}", self.path, line)


_FINAL = re.compile(r"(?P<stem>\d+-(?P<name>.+))-\d+-final_bundles\.txt$")


def programs(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """The files of final bundles in a dump by program name, without the code that the compiler adds to every module."""
    found = {}
    for path in sorted(folder.glob("*-final_bundles.txt")):
        match = _FINAL.match(path.name)
        if match is None:
            raise UnknownSchedule("want a name such as 123-kernel.1-05-final_bundles.txt", path)
        if match["name"] != "TLP" and not match["name"].startswith("<"):
            found[match["name"]] = path
    return found


def read(name: str, path: pathlib.Path, *, folded: bool = False) -> Schedule:
    """Read one program of a dump and the files beside it; `folded` says whether the chip folds empty bundles."""
    stem = _FINAL.match(path.name)
    assert stem is not None, path

    def beside(label: str) -> tuple[pathlib.Path, str]:
        files = sorted(p for p in path.parent.iterdir() if re.fullmatch(re.escape(stem["stem"]) + label, p.name))
        if not files:
            raise UnknownSchedule(f"{name}: there is no file {stem['stem']}{label} beside its bundles", path)
        return files[0], files[0].read_text(errors="replace")

    where, analysis = beside(r"-\d+-schedule-analysis_final_bundles\.txt")
    bundles = parse(path.read_text(errors="replace"), path)
    total = re.search(r"total scheduled bundles:\s*(\d+)", analysis)
    if total is None and analysis.strip():  # it is empty for an operation that does nothing
        raise UnknownSchedule(f"{name}: no total of scheduled bundles", where)
    if total is not None and int(total[1]) != len(bundles):
        raise UnknownSchedule(f"{name}: {len(bundles)} bundles were read, of {total[1]} that the compiler counts", path)
    unfolded = {}
    if folded:
        where, text = beside(r"-\d+-packed-bundles-post-ra\.txt")
        unfolded = {x.target: bundle.address for bundle in parse(text, where) for x in bundle.instructions}
    return Schedule(
        name=name,
        path=path,
        bundles=bundles,
        vmem=parse_vmem(beside(r"-\d+-post-delay-converter\.txt")[1]),
        is_kernel="tpu_custom_call" in analysis,
        unfolded=unfolded,
    )
