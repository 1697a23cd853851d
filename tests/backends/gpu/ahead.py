"""Lowered for a GPU in a process without one: the text, and what is in it beside the kernel."""

import math
import re

import jax
import jax.numpy as jnp

from trencadis.core.devices import CARDS
from trencadis.core.jax_compat import abstract_device

H200 = CARDS["h200"]
_KERNEL = re.compile(r"stablehlo\.custom_call @mosaic_gpu\w*\(")
_MOVED = re.compile(r"stablehlo\.transpose [^\n]*dims = \[([\d, ]+)\] : \(tensor<([\dx]+)x[a-z]+\d+>\)")
_OPERATION = re.compile(r"^\s*%[\w:]+ = \"?stablehlo\.(\w+)\"?.*?-> \(?tensor<([\dx]*?)x?[a-z]+\d+>", re.MULTILINE)


def structs(*shapes):
    """Shapes are (shape, dtype)."""
    return [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in shapes]


def lowered(fn, *shapes, kind=H200.kind, cores=H200.cores):
    """The text of a call lowered for a card; kernels in it are bytes."""
    with abstract_device(kind, cores, platform="cuda"):
        return jax.jit(fn).trace(*structs(*shapes)).lower(lowering_platforms=("cuda",)).as_text()


def kernels(text):
    """How many kernels there are in a lowered module."""
    return len(_KERNEL.findall(text))


def made(text):
    """Entries of the largest result of an operation beside the kernels, and the operation."""
    found = [(0, "nothing")]
    for line in text.splitlines():
        if (moved := _MOVED.search(line)) and _stays(moved):
            text = text.replace(line, "")
    for operation, shape in _OPERATION.findall(text):
        if operation not in ("custom_call", "reshape"):
            found.append((math.prod(map(int, filter(None, shape.split("x")))), operation))
    return max(found)


def _stays(moved):
    """Whether a transpose moves nothing but dimensions of one entry."""
    order, shape = (list(map(int, re.findall(r"\d+", part))) for part in moved.groups())
    kept = [axis for axis in order if shape[axis] > 1]
    return kept == sorted(kept)
