"""Ahead-of-time compiles for TPUs in this process, and what their HLO contains beside the kernel."""

import functools
import math
import os
import re

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from trencadis.core.jax_compat import abstract_device
from trencadis.inspect.aot import ENVIRONMENT

_SHAPE = re.compile(r"^\s*(?:ROOT )?%[\w.\-]+ = (\(?)(\w+)\[([\d,]*)\]\S* ([\w\-]+)\(", re.MULTILINE)
_BITS = {"pred": 8, "s8": 8, "u8": 8, "bf16": 16, "f32": 32, "s32": 32, "u32": 32}


@functools.cache
def device(chip):
    for name, value in {**ENVIRONMENT, "TPU_LOG_DIR": "disabled"}.items():
        os.environ.setdefault(name, value)
    return topologies.get_topology_desc(platform="tpu", topology_name=chip.topology).devices[0]


def compiled(chip, fn, *shapes, donate=()):
    """The compiled HLO text of a call for a chip; operands are pairs (shape, dtype)."""
    sharding = jax.sharding.SingleDeviceSharding(device(chip))
    args = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding) for shape, dtype in shapes]
    with abstract_device(chip.kind, chip.cores):
        lowered = jax.jit(fn, donate_argnums=donate).trace(*args).lower(lowering_platforms=("tpu",))
    return lowered.compile().as_text()


def kernels(text):
    """The names of the Pallas kernels in a compiled HLO text."""
    return re.findall(r"%(trencadis_\w+?)(?:\.[\w.]+)? = [^\n]*custom_call_target=\"tpu_custom_call\"", text)


def largest(text):
    """Bytes and operation of the largest array that is made outside of the kernels; a bitcast makes none."""
    made = [(0, "nothing")]
    for _, dtype, shape, operation in _SHAPE.findall(text):
        if operation not in ("parameter", "custom-call", "bitcast", "get-tuple-element", "tuple"):
            made.append((math.prod(map(int, filter(None, shape.split(",")))) * _BITS[dtype] // 8, operation))
    return max(made)
