"""`target`: lowering and exporting for a machine by its name, where it is not at hand."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax

from trencadis.core.devices import target_of
from trencadis.core.jax_compat import named_target
from trencadis.core.target import Target


def target(name: Target | jax.Device | str) -> contextlib._GeneratorContextManager[Target]:
    """A context in which products that are lowered for another platform are planned for the machine of this name.

    A process without a GPU can lower and export for one, but it does not know which one, and kernels are made for a
    model. Inside `with target("h200"):`, what is lowered for CUDA holds the kernels for an H200. What is lowered for
    other platforms, and what runs here, stays as it is; functions are traced again, and share nothing with the caches
    of `jit` outside. Contexts may be nested; each thread has its own. `target` is a decorator as well.

    Args:
      name: a GPU such as "h200", a TPU generation such as "v6e", a `Target` or a device.

    Returns:
      A context manager that gives the `Target`, for which `why` answers inside.

    >>> x, w = jax.ShapeDtypeStruct((64, 128), "bfloat16"), jax.ShapeDtypeStruct((4, 128, 128), "bfloat16")
    >>> sizes = jax.ShapeDtypeStruct((4,), "int32")
    >>> import trencadis as tr
    >>> with target("v6e"):
    ...     exported = jax.export.export(jax.jit(tr.grouped_matmul), platforms=["tpu"])(x, w, sizes)
    >>> "tpu_custom_call" in exported.mlir_module()
    True
    """
    if name is None:
        raise ValueError("target: want the name of a machine, such as 'h200' or 'v6e'; got None")
    return _planned_for(target_of(name))


@contextlib.contextmanager
def _planned_for(chosen: Target) -> Iterator[Target]:
    with named_target(chosen):
        yield chosen
