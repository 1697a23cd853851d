"""Kernels by value on any machine: Triton's interpreter, which runs a kernel in numpy, program by program."""

from __future__ import annotations

import functools
import importlib.util
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import jax
import ml_dtypes
import numpy as np
import triton
import triton.language as tl
from jax.experimental import io_callback
from triton.runtime import interpreter

from trencadis.backends.triton.bridge import TYPES, Kernel

_one_at_a_time = threading.Lock()  # the interpreter replaces functions of triton.language


@functools.cache
def _interpreted(name: str) -> ModuleType:
    """A module of kernels once more, with the interpreter in place of the compiler."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    compiles = triton.knobs.runtime.interpret
    triton.knobs.runtime.interpret = True
    try:
        spec.loader.exec_module(module)
    finally:
        triton.knobs.runtime.interpret = compiles
    for key, value in list(vars(module).items()):
        if isinstance(value, interpreter.InterpretedFunction):
            setattr(module, key, _plain(value))
        elif isinstance(value, triton.JITFunction):  # of another module
            setattr(module, key, getattr(_interpreted(value.__module__), key))
    return module


def _plain(function: Any) -> Any:
    """What the interpreter makes of a function of a kernel: one that calls the interpreted `triton.language`."""
    return function.rewrite()


@functools.cache
def rewritten(fn: Any) -> Any:
    """A function of Python, such as an activation, as the interpreter runs it."""
    return _plain(interpreter.InterpretedFunction(fn))


def call(
    kernel: Kernel, grid: int, operands: Sequence[jax.Array], out: jax.ShapeDtypeStruct, *, alias: int | None = None
) -> jax.Array:
    """As `bridge.call`, by the interpreter, behind a callback."""
    return call_for_several(kernel, grid, operands, (out,), alias=alias)[0]


def call_for_several(
    kernel: Kernel, grid: int, operands: Sequence[jax.Array], outs: Sequence[jax.ShapeDtypeStruct], *,
    alias: int | None = None,
) -> list[jax.Array]:  # fmt: skip
    """As `bridge.call_for_several`, by the interpreter, behind a callback."""

    def run(*arrays: Any) -> list[np.ndarray]:
        given = [np.ascontiguousarray(x) for x in arrays]
        results = [np.full(out.shape, _garbage(out.dtype), out.dtype) for out in outs]
        if alias is not None:
            given[alias] = results[0] = given[alias].copy()
        with _one_at_a_time:
            _run(kernel, grid, [*given, *results])
        return results

    return io_callback(run, list(outs), *operands, ordered=True)


def _garbage(dtype: Any) -> Any:
    """What memory holds before anyone has written it."""
    return np.asarray(77 if np.issubdtype(dtype, np.integer) else np.nan).astype(dtype)


def _run(kernel: Kernel, grid: int, arrays: list[np.ndarray]) -> None:
    """Run all programs of a kernel, one after the other."""
    function = getattr(_interpreted(kernel.function.__module__), kernel.function.__name__)
    arguments: dict[str, Any] = dict.fromkeys(kernel.function.arg_names) | {
        name: value.value if isinstance(value, tl.constexpr) else value for name, value in kernel.constants
    }
    for (name, dtype), array in zip(kernel.pointers, arrays, strict=True):
        kind = tl.pointer_type(TYPES[dtype])
        handle = interpreter.TensorHandle(np.array([array.ctypes.data], np.uint64), kind)
        arguments[name] = tl.tensor(handle, kind)
    with _language(function), np.errstate(all="ignore"):
        interpreter.interpreter_builder.set_grid_dim(grid, 1, 1)
        for index in range(grid):
            interpreter.interpreter_builder.set_grid_idx(index, 0, 0)
            function(**arguments)


_FLOATS = {tl.bfloat16: ml_dtypes.bfloat16, tl.float8e4nv: ml_dtypes.float8_e4m3fn, tl.float8e5: ml_dtypes.float8_e5m2}


class _Numpy(interpreter.InterpreterBuilder):
    """The operations of the interpreter, with those on narrow floats, which numpy holds as integers, by ml_dtypes."""

    def create_dot(self, a: Any, b: Any, acc: Any, *options: Any) -> Any:
        """The accumulator plus a product, of factors in float32 if numpy cannot multiply them."""
        a, b = (self.cast_impl(x, tl.float32) if x.dtype in _FLOATS else x for x in (a, b))
        return super().create_dot(a, b, acc, *options)

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        """The tensor converted to another dtype, of which one may be a narrow float."""
        source, to = src.dtype.scalar, dst_type.scalar
        if source not in _FLOATS and to not in _FLOATS:
            return super().cast_impl(src, dst_type)
        value = src.data.view(_FLOATS[source]) if source in _FLOATS else src.data
        held = interpreter._get_np_dtype(to)
        value = value.astype(_FLOATS[to]).view(held) if to in _FLOATS else value.astype(np.float32).astype(held)
        return interpreter.TensorHandle(value, to)

    def create_fp_to_fp(self, src: Any, dst_type: Any, _: Any) -> Any:
        """The tensor converted to another float dtype, rounded to nearest whatever the rounding asked for."""
        return self.cast_impl(src, dst_type)


_REDUCTIONS = (
    ("sum", "reduce", tl.standard._sum_combine),
    ("max", "reduce", tl.standard._elementwise_max),
    ("min", "reduce", tl.standard._elementwise_min),
    ("cumsum", "associative_scan", tl.standard._sum_combine),
)


@contextmanager
def _language(function: Any) -> Iterator[None]:
    """A context in which `triton.language` computes in numpy."""
    scope, builder = interpreter._patch_lang(function), interpreter.interpreter_builder
    scope.set_attr(tl.tensor, "__index__", lambda x: int(x.handle.data.item()))  # numbers are arrays of length 1
    for name, over, combine in _REDUCTIONS:  # these are compiled functions of triton.language
        scope.set_attr(tl, name, lambda x, axis, over=over, combine=combine: getattr(tl, over)(x, axis, combine))
    builder.__class__ = _Numpy
    try:
        yield
    finally:
        builder.__class__ = interpreter.InterpreterBuilder
        scope.restore()
