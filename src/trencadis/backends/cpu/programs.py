"""Activations as programs of the native kernels: the operations of a trace, one by one, on float32.

An activation with an operation that has no line here is left to XLA.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from trencadis.core.activation import Activation, inlined
from trencadis.core.epilogue import Gate

# as they are numbered in `native/src/program.h`
OPERATIONS = (
    "add", "sub", "mul", "div", "max", "min", "gt", "ge", "eq", "select",
    "abs", "sqrt", "exp", "expm1", "log", "log1p", "tanh", "logistic", "erf", "erfc",
)  # fmt: skip
MOST = 1 << 10  # operations of a program: a longer one is left to XLA, which compiles it

# the number of an operation whose result is meant, or of an input if it is negative; or a constant, by `float.hex`
Value = int | str
ZERO, ONE, MINUS_ONE = (x.hex() for x in (0.0, 1.0, -1.0))


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """The operations of an elementwise function, each with the register of its result and those of its operands.

    Registers are numbered from the inputs on, then constants, then those that operations write.
    """

    code: tuple[tuple[int, ...], ...]
    constants: tuple[float, ...]
    results: tuple[int, ...]
    registers: int

    @property
    def attributes(self) -> dict[str, Any]:
        """The program as the attributes of a custom call."""
        return {
            "code": np.array(self.code, np.int64).reshape(-1),
            "constants": np.array(self.constants, np.float32),
            "results": np.array(self.results, np.int64),
            "registers": np.int64(self.registers),
        }


@functools.lru_cache(maxsize=256)
def of_activation(activation: Activation) -> Program | None:
    """The program of a function of one number, or None if the kernels lack an operation of it."""
    return program(lambda x: [activation(x)], 1)


@functools.lru_cache(maxsize=256)
def of_gate(gate: Gate) -> Program | None:
    """The program of a gated activation without gathered rows, of its pullback, or of the sum of two products."""
    activation = gate.activation
    if activation is None:
        return program(lambda x, y: [x + y], 2)

    def forward(z_gate: Any, z_up: Any) -> list[Any]:
        return [activation(z_gate, z_up), *((z_gate, z_up) if gate.keep else ())]

    def pullback(d_h: Any, z_gate: Any, z_up: Any, weight: Any) -> list[Any]:
        h, pull = jax.vjp(activation, z_gate, z_up)
        return [*pull(weight * d_h), weight * h, d_h * h]

    return program(pullback, 4) if gate.pullback else program(forward, 2)


def program(function: Callable[..., list[Any]], inputs: int) -> Program | None:
    """The program of a function of float32 numbers that gives a list of them, or None.

    >>> relu = program(lambda x: [jax.nn.relu(x)], 1)
    >>> [(OPERATIONS[operation], *operands) for operation, *operands in relu.code], relu.constants, relu.results
    ([('max', 2, 0, 1, 0)], (0.0,), (2,))
    """
    try:
        closed = jax.make_jaxpr(inlined(function))(*[jax.ShapeDtypeStruct((), np.float32)] * inputs)
        steps = _Steps()
        known: dict[Any, Value] = {var: -1 - i for i, var in enumerate(closed.jaxpr.invars)}
        known |= {var: float(value).hex() for var, value in zip(closed.jaxpr.constvars, closed.consts, strict=True)}
        for equation in closed.jaxpr.eqns:
            known[equation.outvars[0]] = steps.of(equation, [_value(var, known) for var in equation.invars])
        return steps.program(inputs, [_value(var, known) for var in closed.jaxpr.outvars])
    except (LookupError, TypeError, ValueError, jax.errors.JAXTypeError):  # an operation that the kernels lack
        return None


def _value(var: Any, known: dict[Any, Value]) -> Value:
    if var.aval.shape or np.dtype(var.aval.dtype) not in (np.float32, np.bool_):
        raise TypeError(f"{var.aval} is no float32 number")
    return float(var.val).hex() if hasattr(var, "val") else known[var]


class _Steps:
    """Operations in the order in which they are computed, each of which is there once."""

    def __init__(self) -> None:
        self.steps: dict[tuple[str, tuple[Value, ...]], int] = {}

    def add(self, name: str, *operands: Value) -> Value:
        """The value of an operation."""
        return self.steps.setdefault((name, operands), len(self.steps))

    def of(self, equation: Any, x: Sequence[Value]) -> Value:
        """The value of an operation of JAX; a comparison gives 1 or 0."""
        name, dtype, add = equation.primitive.name, equation.outvars[0].aval.dtype, self.add
        if np.dtype(dtype) not in (np.float32, np.bool_) or len(self.steps) > MOST:
            raise TypeError(f"{name} gives {dtype}")
        if name in ("copy", "stop_gradient", "convert_element_type"):
            to_bool = np.dtype(dtype) == np.bool_ and np.dtype(equation.invars[0].aval.dtype) != np.bool_
            return add("sub", ONE, add("eq", x[0], ZERO)) if to_bool else x[0]
        if name == "integer_pow":
            return self._power(x[0], equation.params["y"])
        if name == "select_n":
            no, yes = x[1:]
            return add("select", x[0], yes, no)
        composed: dict[str, Callable[[], Value]] = {
            "add_any": lambda: add("add", *x),
            "neg": lambda: add("mul", x[0], MINUS_ONE),
            "square": lambda: add("mul", x[0], x[0]),
            "one_minus_square": lambda: add("sub", ONE, add("mul", x[0], x[0])),
            "rsqrt": lambda: add("div", ONE, add("sqrt", x[0])),
            "sign": lambda: self._sign(x[0]),
            "clamp": lambda: add("min", add("max", x[1], x[0]), x[2]),
            "lt": lambda: add("gt", x[1], x[0]),
            "le": lambda: add("ge", x[1], x[0]),
            "ne": lambda: add("sub", ONE, add("eq", *x)),
            "and": lambda: add("mul", *x),
            "or": lambda: add("max", *x),
            "not": lambda: add("sub", ONE, x[0]),
        }
        if name in composed:
            return composed[name]()
        OPERATIONS.index(name)  # a ValueError if there is none
        return add(name, *x)

    def _sign(self, x: Value) -> Value:
        negative = self.add("select", self.add("gt", ZERO, x), MINUS_ONE, x)
        return self.add("select", self.add("gt", x, ZERO), ONE, negative)

    def _power(self, x: Value, power: int) -> Value:
        if not 0 < abs(power) <= 8:
            raise ValueError(f"a power of {power}")
        product = x
        for _ in range(abs(power) - 1):
            product = self.add("mul", product, x)
        return product if power > 0 else self.add("div", ONE, product)

    def program(self, inputs: int, results: Sequence[Value]) -> Program:
        """The program of the operations that these results need, in as few registers as values are needed at a time."""
        steps, needed = list(self.steps), {x for x in results if isinstance(x, int)}
        for i in reversed(range(len(steps))):
            needed |= {x for x in steps[i][1] if isinstance(x, int)} if i in needed else set()
        order = [i for i in range(len(steps)) if i in needed]
        constants = dict.fromkeys(x for i in order for x in steps[i][1] if isinstance(x, str))
        constants |= dict.fromkeys(x for x in results if isinstance(x, str))
        fixed = inputs + len(constants)
        register: dict[Value, int] = {-1 - i: i for i in range(inputs)}
        place = {x: inputs + i for i, x in enumerate(constants)}
        last = {x: i for i in order for x in steps[i][1] if isinstance(x, int)}
        free, count, code = list[int](), fixed, []

        def read(x: Value) -> int:
            return place[x] if isinstance(x, str) else register[x]

        for i in order:
            name, operands = steps[i]
            held = [read(x) for x in operands]
            done = {x for x in operands if isinstance(x, int) and x >= 0 and last[x] == i and x not in results}
            free += [register[x] for x in sorted(done)]
            register[i], count = (free.pop(), count) if free else (count, count + 1)
            code.append((OPERATIONS.index(name), register[i], *held, *[0] * (3 - len(held))))
        return Program(tuple(code), tuple(map(float.fromhex, constants)), tuple(read(x) for x in results), count)
