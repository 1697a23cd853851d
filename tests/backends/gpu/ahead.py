"""Programs lowered for a GPU in a process without one, and the operations in them beside the kernel."""

import math
import re

import jax
import jax.numpy as jnp

from trencadis.core.devices import CARDS
from trencadis.core.jax_compat import abstract_device

H200 = CARDS["h200"]
_KERNEL = re.compile(r"stablehlo\.custom_call @mosaic_gpu\w*\(")
_TRANSPOSE = re.compile(r"stablehlo\.transpose [^\n]*dims = \[([\d, ]+)\] : \(tensor<([\dx]+)x[a-z]+\d+>\)")
_OPERATION = re.compile(r"^\s*%[\w:]+ = \"?stablehlo\.(\w+)\"?.*?-> \(?tensor<([\dx]*?)x?[a-z]+\d+>", re.MULTILINE)


def structs(*shapes):
    """Abstract arrays of some (shape, dtype)."""
    return [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in shapes]


def lowered(fn, *shapes, kind=H200.kind, cores=H200.cores):
    """The StableHLO text of a call that is lowered for a GPU; kernels in it are bytes."""
    with abstract_device(kind, cores, platform="cuda"):
        return jax.jit(fn).trace(*structs(*shapes)).lower(lowering_platforms=("cuda",)).as_text()


def kernels(text):
    """The number of kernels in a lowered module."""
    return len(_KERNEL.findall(text))


def largest_result(text):
    """The size of the largest result of an operation that is not a kernel, and the name of the operation."""
    found = [(0, "nothing")]
    for line in text.splitlines():
        if (moved := _TRANSPOSE.search(line)) and _is_reshape(moved):
            text = text.replace(line, "")
    for operation, shape in _OPERATION.findall(text):
        if operation not in ("custom_call", "reshape"):
            found.append((math.prod(map(int, filter(None, shape.split("x")))), operation))
    return max(found)


def _is_reshape(moved):
    """Whether a transpose moves only dimensions of size one."""
    order, shape = (list(map(int, re.findall(r"\d+", part))) for part in moved.groups())
    kept = [axis for axis in order if shape[axis] > 1]
    return kept == sorted(kept)
