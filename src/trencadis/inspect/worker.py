"""The process that compiles: `python -m trencadis.inspect.worker FOLDER`.

libtpu reads its options once, when it is loaded, so a compile that dumps its schedules has a process of its own. The
folder holds the question (`question.json`, `program.bin`, `known.npz`); the answer goes there as `answer.json`.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies

from trencadis.inspect.kernel_operands import LARGEST, integer_operands

# An instruction whose attributes have line breaks in them, as the metadata of a kernel can, goes on where no other
# instruction or computation begins or ends.
_BROKEN = re.compile(r"\n(?!\s*(?:ROOT )?%|[ \t]*$|[A-Z]|\}(?:, execution_thread|[ \t]*$))", re.MULTILINE)
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \([^\n]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_KERNEL = re.compile(
    r"%([\w.\-]+) = [^\n]*? custom-call\(([^)]*)\), custom_call_target=\"tpu_custom_call\"[^\n]*?\"body\":\"([^\"]*)\""
)
_ELEMENT = re.compile(r"%([\w.\-]+) = [^\n]*? get-tuple-element\([^%\n]*%([\w.\-]+)\), index=(\d+)")
_LOOP = re.compile(
    r"%(?P<name>[\w.\-]+) = [^\n]*? while\(%(?P<start>[\w.\-]+)\), "
    r"condition=%(?P<condition>[\w.\-]+), body=%(?P<body>[\w.\-]+)"
)
# "%name = type operation(operands), attributes"
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%([\w.\-]+) = [^\n]*? ([\w\-]+)\(([^\n]*)$", re.MULTILINE)
_WORDS = re.compile(r"^\s*(?:ROOT )?%([\w.\-]+) = \(?[su]32\[[^\n]*? ([\w\-]+)\(([^\n]*)$", re.MULTILINE)
_UNCHANGED = ("bitcast", "copy", "copy-start", "copy-done", "reshape")  # what moves numbers and leaves them as they are


def whole_lines(text: str) -> str:
    """A module's text with each instruction on one line.

    >>> print(whole_lines('%k = f32[] custom-call(%a), frontend_attributes={kernel_metadata={\\n"tile":8\\n}}\\n}'))
    %k = f32[] custom-call(%a), frontend_attributes={kernel_metadata={ "tile":8 }}
    }
    """
    return _BROKEN.sub(" ", text)


def modules_kernels(text: str) -> list[dict[str, Any]]:
    """The kernel calls in a compiled module's text: name, body, and the source of each operand."""
    elements = {name: (source, int(index)) for name, source, index in _ELEMENT.findall(text)}
    found = []
    for name, operands, body in _KERNEL.findall(text):
        sources = [part.split("%")[-1].strip() for part in operands.split(",") if "%" in part]
        found.append({"name": name, "body": body, "sources": [elements.get(s, (s, 0)) for s in sources]})
    return found


def modules_integers(text: str, known: Mapping[int, Any]) -> dict[str, list[int]]:
    """The integers that a compiled module has from the start, by name: constants, and known arguments.

    XLA makes kernels of its own, say for `lax.ragged_dot`, which no module shows before it is compiled.
    """
    entry = re.search(r"^ENTRY [^\n]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL)
    values: dict[str, list[int]] = {}
    for name, operation, rest in _WORDS.findall(entry[1] if entry else ""):
        inputs = _names(rest)
        if operation == "parameter":
            position = int(rest.partition(")")[0])
            if position in known and np.size(known[position]) <= LARGEST:
                values[name] = np.asarray(known[position]).astype(np.int64).ravel().tolist()
        elif operation == "constant":
            if numbers := re.match(r"\{?(-?\d+(?:, -?\d+)*)\}?\)", rest):
                values[name] = [int(number) for number in numbers[1].split(", ")]
        elif operation in _UNCHANGED and inputs and inputs[0] in values:
            values[name] = values[inputs[0]]
    return values


def modules_repeats(text: str) -> tuple[dict[str, int], dict[str, list[str]]]:
    """How often each instruction of a compiled module runs, and the instructions in loops of unknown length."""
    module = _Module(text)
    times: dict[str, int] = {}
    uncounted: dict[str, list[str]] = {}

    def visit(computation: str, runs: int, loops: tuple[str, ...]) -> None:
        body = module.computations.get(computation, "")
        names = [found[1] for found in _INSTRUCTION.finditer(body)]
        times.update(dict.fromkeys(names, runs))
        for name in loops:
            uncounted.setdefault(name, []).extend(names)
        for loop in _LOOP.finditer(body):
            trips = module.trips(loop)
            visit(loop["body"], runs * (trips or 1), loops if trips else (*loops, loop["name"]))

    if entry := re.search(r"^ENTRY %?([\w.\-]+)", text, re.MULTILINE):
        visit(entry[1], 1, ())
    return times, uncounted


class _Module:
    """The text of a compiled module, parsed as far as it takes to count the trips of loops."""

    def __init__(self, text: str) -> None:
        self.computations = dict(_COMPUTATION.findall(text))
        self.steps = {found[1]: (found[2], _names(found[3]), found[3]) for found in _INSTRUCTION.finditer(text)}

    def trips(self, loop: re.Match[str]) -> int | None:
        """The trip count of a loop over a counter with constant start, step and limit; None for other loops."""
        ends, turn = (self._root(loop[name]) for name in ("condition", "body"))
        if not ends or not turn or ends[0] != "compare" or turn[0] != "tuple" or "direction=LT" not in ends[2]:
            return None
        counter = re.search(r"index=(\d+)", self.steps.get(ends[1][0], ("", [], ""))[2])
        start = self.steps.get(loop["start"], ("", [], ""))
        if counter is None or start[0] != "tuple":
            return None
        first, limit = self._constant(start[1][int(counter[1])]), self._constant(ends[1][1])
        add = self.steps.get(turn[1][int(counter[1])], ("", [], ""))
        step = next(filter(None, map(self._constant, add[1])), None) if add[0] == "add" else None
        if first is None or limit is None or step is None or step < 1 or limit <= first:
            return None
        return -(-(limit - first) // step)

    def _root(self, computation: str) -> tuple[str, list[str], str] | None:
        root = re.search(r"^\s*ROOT %([\w.\-]+) = ", self.computations.get(computation, ""), re.MULTILINE)
        return self.steps.get(root[1]) if root else None

    def _constant(self, name: str) -> int | None:
        while (step := self.steps.get(name)) and step[0] in ("copy", "bitcast") and step[1]:
            name = step[1][0]
        value = re.match(r"-?\d+", step[2]) if step and step[0] == "constant" else None
        return int(value[0]) if value else None


def _names(operands: str) -> list[str]:
    return re.findall(r"%([\w.\-]+)", operands.partition(")")[0])


def compile_program(exported: Any, topology: str) -> str:
    """Compile a program and return the text of the module; the compiler dumps its schedules meanwhile."""
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    operands = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in exported.in_avals]
    args, options = jax.tree.unflatten(exported.in_tree, operands)
    traced = jax.jit(exported.call).trace(*args, **options)
    return str(traced.lower(lowering_platforms=("tpu",)).compile().as_text())


def main(folder: pathlib.Path) -> None:
    """Compile the program in a folder, and write the answer there."""
    question = json.loads((folder / "question.json").read_text())
    exported = jax.export.deserialize(bytearray((folder / "program.bin").read_bytes()))
    known = {int(name): values for name, values in np.load(folder / "known.npz").items()}
    answer: dict[str, Any] = {"error": None, "calls": [], "note": None}
    (folder / "compiling").touch()  # from here on, a process that dies has met a bug of the compiler
    start = time.monotonic()
    try:
        text = whole_lines(compile_program(exported, question["topology"]))
    except jax.errors.JaxRuntimeError as error:
        text, answer["error"] = "", str(error)
    answer["seconds"] = time.monotonic() - start
    answer["kernels"], integers = modules_kernels(text), modules_integers(text, known)
    for kernel in answer["kernels"]:
        kernel["values"] = {i: integers[name] for i, (name, _) in enumerate(kernel["sources"]) if name in integers}
    answer["times"], answer["uncounted"] = modules_repeats(text)
    try:
        answer["calls"] = [dataclasses.asdict(call) for call in integer_operands(exported, known)] if text else []
    except Exception as error:  # a kernel without known operands can still be looked at, and the report says so
        answer["note"] = f"the integer operands could not be computed: {type(error).__name__}: {str(error)[:300]}"
    (folder / "answer.tmp").write_text(json.dumps(answer))
    (folder / "answer.tmp").rename(folder / "answer.json")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
