"""Programs of calls outside of `jit`, compiled once where equal calls may share them."""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec, Sharding

PLAIN = (
    type(None), int, float, complex, str, bytes, enum.Enum, np.dtype, np.generic, type, jax.tree_util.PyTreeDef,
    Mesh, AbstractMesh, PartitionSpec, Sharding, jax.lax.DotAlgorithm,
)  # fmt: skip


def run_once(function: Callable[..., Any], static: tuple[Any, ...], *operands: Any) -> Any:
    """`function(*static, *operands)`, traced and compiled once for all calls whose static values are equal.

    What may change from call to call is traced in every call: functions and classes of users read variables.
    """
    if is_fixed(static):
        return _shared(function, static, *operands)
    return jax.jit(functools.partial(function, *static))(*operands)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _shared(function: Callable[..., Any], static: tuple[Any, ...], *operands: Any) -> Any:
    return function(*static, *operands)


def is_fixed(x: Any) -> bool:
    """Whether a value means the same in every call: it has a hash, and holds no function or object of a user."""
    if isinstance(x, PLAIN):
        return True
    if isinstance(x, (tuple, frozenset)):
        return all(map(is_fixed, x))
    if type(x).__module__.startswith("trencadis.") and dataclasses.is_dataclass(x):
        return is_hashable(x) and all(is_fixed(getattr(x, field.name)) for field in dataclasses.fields(x))
    return is_fixed_function(x)


def is_fixed_function(x: Any) -> bool:
    """Whether x is a function of JAX, or one of this package that closes over nothing; a wrapper of one is not."""
    name = getattr(x, "__name__", "")
    if any(getattr(module, name, None) is x for module in (jax.nn, jnp, jax.lax)):
        return True
    if type(x).__module__.startswith("trencadis.") and not dataclasses.is_dataclass(x):
        return is_hashable(x)  # such as an activation that is known by its operations
    return inspect.isfunction(x) and x.__globals__["__name__"].startswith("trencadis.") and not x.__closure__


def is_hashable(x: object) -> bool:
    """Whether a value has a hash, so that it can be a part of a cache's key."""
    try:
        hash(x)
    except TypeError:
        return False
    return True
