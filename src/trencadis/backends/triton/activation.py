"""Activations in a kernel: a function of one number, traced by JAX, as a function in Triton of a tile.

The operations of the trace become lines of source, one by one. An activation with an operation that has no line here
is left to XLA, which applies it after the kernel.
"""

from __future__ import annotations

import functools
import linecache
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trencadis.core.activation import Activation, inlined

# Triton has no function for these on all GPUs; near 0, where the formula loses digits, the first terms of the series do
_TANH = "tl.where(tl.abs({0}) < 0.15, {0} * (1 - {0} * {0} * (1 / 3 - {0} * {0} * (2 / 15 - {0} * {0} * (17 / 315)))), "
_TANH += "1 - 2 / (tl.exp(2 * {0}) + 1))"
_EXPM1 = "tl.where(tl.abs({0}) < 0.15, {0} * (1 + {0} * (1 / 2 + {0} * (1 / 6 + {0} * (1 / 24 + {0} * (1 / 120))))), "
_EXPM1 += "tl.exp({0}) - 1)"
_LOG1P = "tl.where(tl.abs({0}) < 0.05, {0} * (1 - {0} * (1 / 2 - {0} * (1 / 3 - {0} * (1 / 4 - {0} * (1 / 5 - {0} * "
_LOG1P += "(1 / 6 - {0} * (1 / 7))))))), tl.log(1 + {0}))"

_MAX, _MIN = (f"tl.{name}({{0}}, {{1}}, propagate_nan=tl.PropagateNan.ALL)" for name in ("maximum", "minimum"))

OPERATIONS: dict[str, str] = {
    "add": "{0} + {1}", "add_any": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}",
    "neg": "-{0}", "abs": "tl.abs({0})", "square": "{0} * {0}", "copy": "{0}", "stop_gradient": "{0}",
    "exp": "tl.exp({0})", "exp2": "tl.exp2({0})", "log": "tl.log({0})", "erf": "tl.erf({0})", "erfc": "1 - tl.erf({0})",
    "sqrt": "tl.sqrt({0})", "rsqrt": "tl.rsqrt({0})", "sin": "tl.sin({0})", "cos": "tl.cos({0})",
    "floor": "tl.floor({0})", "ceil": "tl.ceil({0})", "sign": "tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, {0}))",
    "logistic": "1 / (1 + tl.exp(-{0}))", "tanh": _TANH, "expm1": _EXPM1, "log1p": _LOG1P,
    "max": _MAX, "min": _MIN, "clamp": _MIN.format(_MAX.format("{1}", "{0}"), "{2}"),
    "gt": "{0} > {1}", "ge": "{0} >= {1}", "lt": "{0} < {1}", "le": "{0} <= {1}", "eq": "{0} == {1}",
    "ne": "{0} != {1}", "and": "{0} & {1}", "or": "{0} | {1}", "not": "{0} == 0",
    "is_finite": "tl.abs({0}) < float('inf')", "select_n": "tl.where({0}, {2}, {1})",
}  # fmt: skip


@functools.lru_cache(maxsize=256)
def source(activation: Activation) -> str | None:
    """The source of a function of a float32 tile in Triton, or None if an operation of the activation has none."""
    try:
        closed = jax.make_jaxpr(inlined(activation))(jax.ShapeDtypeStruct((), jnp.float32))
    except Exception:
        return None
    if len(closed.consts) or len(closed.jaxpr.outvars) != 1:
        return None
    names: dict[Any, str] = {closed.jaxpr.invars[0]: "x"}
    lines = []
    for i, equation in enumerate(closed.jaxpr.eqns):
        read = [_literal(var.val) if hasattr(var, "val") else names.get(var) for var in equation.invars]
        known = [text for text in read if text is not None]
        line = _line(equation, known) if len(known) == len(read) else None
        if line is None:
            return None
        names[equation.outvars[0]] = f"v{i}"
        lines.append(f"    v{i} = {line}\n")
    (out,) = closed.jaxpr.outvars
    last = _literal(out.val) if hasattr(out, "val") else names[out]
    result = f"    return ({last}).to(tl.float32)\n" if not hasattr(out, "val") else f"    return x * 0 + {last}\n"
    return "def activation(x):\n" + "".join(lines) + result


def _line(equation: Any, read: list[str]) -> str | None:
    """The right-hand side of one operation; None if Triton has none, or if it is not one of float32 and bool."""
    name, kinds = equation.primitive.name, {np.dtype(var.aval.dtype) for var in (*equation.invars, *equation.outvars)}
    if not kinds <= {np.dtype(np.float32), np.dtype(np.bool_)} or any(var.aval.shape for var in equation.outvars):
        return None
    if name == "integer_pow":
        power = equation.params["y"]
        product = " * ".join([read[0]] * abs(power))
        return (product if power > 0 else f"1 / ({product})") if 0 < abs(power) <= 8 else None
    if name == "convert_element_type":
        to_bool = np.dtype(equation.params["new_dtype"]) == np.bool_
        return f"{read[0]} != 0" if to_bool else f"{read[0]}.to(tl.float32)" if not read[0][0].isdigit() else read[0]
    if name == "select_n" and len(read) != 3:
        return None
    return OPERATIONS[name].format(*read) if name in OPERATIONS else None


def _literal(value: Any) -> str | None:
    """A number as source; None for an array."""
    if np.ndim(value):
        return None
    number = float(value)
    return f"({number!r})" if math.isfinite(number) else f"float('{number!r}')"


@functools.lru_cache(maxsize=256)
def function(text: str, decorate: Callable[[Any], Any]) -> Any:
    """The function that a source defines, after a decorator such as `triton.jit`, which looks for its source."""
    import triton.language as tl

    path, scope = f"<trencadis activation {hash(text) & 0xFFFFFFFF:x}>", {"tl": tl, "__name__": __name__}
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    exec(compile(text, path, "exec"), scope)
    return decorate(scope["activation"])
