"""The integer operands of a module's kernels, as far as the caller's known integers determine them.

A kernel is controlled by numbers that are computed just before it, such as offsets and tile ids. The lowered module
computes them, so the module is cut at its kernels, made to return their integer operands, and run on the CPU. Operands
that depend on arrays without values, or on the result of another kernel, stay unknown.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

from trencadis.core.jax_compat import host_program

KERNEL = "tpu_custom_call"
LARGEST = 1 << 16  # numbers; no kernel keeps more in scalar memory


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The body and the known operands of one kernel call; calls are in program order."""

    body: str  # the kernel itself, which tells kernels of one name apart
    values: dict[int, list[int]]  # the operands that are known, by their number


def integer_operands(exported: Any, known: Mapping[int, np.ndarray[Any, Any]]) -> list[Call]:
    """The kernel calls of an exported program, given those of its arguments that are known, by position."""
    with mlir.make_ir_context(), ir.Location.unknown():
        cut = _Cut(ir.Module.parse(exported.mlir_module()))
        kept = exported.module_kept_var_idx
        sites = cut.find([position in known for position in kept])
        inputs = [position for position in kept if position in known]
        outputs = cut.expose([position in known for position in kept])
        if not outputs:
            return [Call(body=site.body, values={}) for site in sites]
        call = host_program(exported, cut.module, [exported.in_avals[p] for p in inputs], outputs)
    results = iter(jax.jit(call)(*(known[p] for p in inputs)))
    return [
        Call(
            body=site.body, values={i: np.asarray(next(results)).astype(np.int64).ravel().tolist() for i in site.known}
        )
        for site in sites
    ]


@dataclasses.dataclass(frozen=True, slots=True)
class _Site:
    body: str
    known: tuple[int, ...]


class _Cut:
    """A module that is rewritten so that it returns the operands of its kernels."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.functions: dict[str, Any] = {f.name.value: f for f in module.body.operations if isinstance(f, func.FuncOp)}  # type: ignore[attr-defined]
        # the operands of each kernel that are known wherever its function is called from
        self.known: dict[Any, frozenset[int]] = {}
        self.idle: dict[Any, bool] = {}  # whether nothing that an operation yields is known, wherever it is called from
        self.exposed: dict[str, list[Any]] = {}  # types of the results that a function has gained

    def find(self, known: Sequence[bool]) -> list[_Site]:
        """Every kernel that a call of main reaches, and which of its operands can be computed."""
        calls: list[Any] = []
        self._follow("main", known, calls)
        return [_Site(_body(op), tuple(sorted(self.known[op.operation]))) for op in calls]

    def _follow(self, name: str, known: Sequence[bool], calls: list[Any]) -> list[bool]:
        """Which results of a function are known, given which arguments are; appends the kernels to `calls`."""
        block = self.functions[name].regions[0].blocks[0]
        unknown = {argument for argument, yes in zip(block.arguments, known, strict=True) if not yes}
        for op in block.operations:
            inputs = list(op.operands)
            if isinstance(op, func.CallOp):
                results = self._follow(op.callee.value, [x not in unknown for x in inputs], calls)
                unknown |= {x for x, yes in zip(op.results, results, strict=True) if not yes}
            elif _is_kernel(op):
                calls.append(op)
                here = frozenset(i for i, x in enumerate(inputs) if x not in unknown and _is_small_integer(x.type))
                self.known[op.operation] = here & self.known.get(op.operation, here)
                unknown.update(op.results)
            elif op.operation.name == "func.return":
                return [x not in unknown for x in inputs]
            else:
                lost = any(x in unknown for x in _all_inputs(op))
                self.idle[op.operation] = lost and self.idle.get(op.operation, True)
                unknown.update(op.results if lost else ())
        raise ValueError(f"function {name} does not return")

    def expose(self, known: Sequence[bool]) -> list[Any]:
        """Make main a function of its known arguments that returns the known operands, and return their types."""
        main = self.functions["main"]
        types = self._expose("main", only=True)
        block = main.regions[0].blocks[0]
        for i, yes in reversed(list(enumerate(known))):
            if not yes:
                with ir.InsertionPoint.at_block_begin(block):
                    block.arguments[i].replace_all_uses_with(_zeros(block.arguments[i].type))
                block.erase_argument(i)
        for name in ("arg_attrs", "res_attrs"):
            if name in main.attributes:
                del main.attributes[name]
        _retype(main, types)
        return [jax.core.ShapedArray(tuple(t.shape), _dtype(t)) for t in types]

    def _expose(self, name: str, *, only: bool = False) -> list[Any]:
        """Add the operands of a function's kernels to its results, or make them the only ones; drop unknown values."""
        if name in self.exposed:
            return self.exposed[name]
        function = self.functions[name]
        gained: list[Any] = []
        # looked up before anything is replaced: an operation's hash follows its operands
        operations = [
            (op, sorted(self.known.get(op.operation, ())), self.idle.get(op.operation, False))
            for op in function.regions[0].blocks[0].operations
        ]
        for op, known, idle in operations:
            with ir.InsertionPoint(op):
                if isinstance(op, func.CallOp) and (more := self._expose(op.callee.value)):
                    old = list(op.results)
                    new = func.CallOp([*(x.type for x in old), *more], op.callee.value, list(op.operands))
                    _replace(op, list(new.results)[: len(old)])
                    gained += list(new.results)[len(old) :]
                elif _is_kernel(op):
                    gained += [op.operands[i] for i in known]
                    _replace(op, [_zeros(x.type) for x in op.results])
                elif idle and all(_has_zeros(x.type) for x in op.results):
                    _replace(op, [_zeros(x.type) for x in op.results])
                elif op.operation.name == "func.return":
                    results = gained if only else [*op.operands, *gained]
                    func.ReturnOp(results)
                    _replace(op, [])
                    _retype(function, [x.type for x in results])
        self.exposed[name] = [x.type for x in gained]
        return self.exposed[name]


def _replace(op: Any, values: Sequence[Any]) -> None:
    for old, new in zip(op.results, values, strict=True):
        old.replace_all_uses_with(new)
    op.operation.erase()


def _retype(function: Any, results: Sequence[Any]) -> None:
    inputs = [argument.type for argument in function.regions[0].blocks[0].arguments]
    function.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(inputs, list(results)))
    if "res_attrs" in function.attributes:
        del function.attributes["res_attrs"]


def _is_kernel(op: Any) -> bool:
    return op.operation.name == "stablehlo.custom_call" and op.attributes["call_target_name"].value == KERNEL


def _body(op: Any) -> str:
    config = json.loads(op.attributes["backend_config"].value)
    return str(config.get("custom_call_config", {}).get("body", ""))


def _all_inputs(op: Any) -> Iterator[Any]:
    """The operands of an operation and of those in its regions, which may reach out for values."""
    yield from op.operands
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from _all_inputs(inner)


def _is_small_integer(kind: Any) -> bool:
    return isinstance(kind.element_type, ir.IntegerType) and math.prod(kind.shape) <= LARGEST


def _has_zeros(kind: Any) -> bool:
    numbers = ir.IntegerType, ir.FloatType
    return isinstance(kind, ir.RankedTensorType) and kind.has_static_shape and isinstance(kind.element_type, numbers)


def _dtype(kind: Any) -> Any:
    element = kind.element_type
    if element.width == 1:
        return np.dtype(bool)
    return np.dtype(f"{'u' if element.is_unsigned else ''}int{max(8, element.width)}")


def _zeros(kind: Any) -> Any:
    element = kind.element_type
    zero = ir.IntegerAttr.get(element, 0) if isinstance(element, ir.IntegerType) else ir.FloatAttr.get(element, 0.0)
    attribute = ir.DenseElementsAttr.get_splat(kind, zero)
    return ir.Operation.create("stablehlo.constant", results=[kind], attributes={"value": attribute}).results[0]
