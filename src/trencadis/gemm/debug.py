"""Run-time checks of grouped tensors whose sizes are traced; off unless `debug_checks` is on."""

from __future__ import annotations

import jax.numpy as jnp
from jax.experimental import checkify

from trencadis.core import arguments
from trencadis.core.debug import checking, fit, past
from trencadis.core.mesh import replicated
from trencadis.gemm.tensor import GroupedTensor


def check_tensor(name: str, tensor: GroupedTensor, size_names: tuple[str, str]) -> None:
    """Check at run time that traced sizes are not negative and that the data have room for all groups.

    Args:
      name: what the caller calls the tensor.
      tensor: the tensor; nothing is checked here if its sizes are known, since that is done at trace time.
      size_names: what the caller calls the sizes of its first axis, and those of its last.
    """
    given = zip(size_names, (tensor.first_dims, tensor.last_dims), strict=True)
    ragged = {label: sizes for label, sizes in given if sizes is not None}
    if not checking() or all(arguments.concrete(sizes) is not None for sizes in ragged.values()):
        return
    ragged = {label: replicated(jnp.asarray(sizes)) for label, sizes in ragged.items()}
    for label, sizes in ragged.items():
        worst = jnp.argmin(sizes)
        size = sizes[worst]
        checkify.check(size >= 0, f"{label}: group {{i}} has size {{size}}; sizes must be >= 0", i=worst, size=size)
    if len(ragged) == 2:
        label, room, places = name, tensor.shape[0], "entries"
        rows, columns = (jnp.maximum(sizes, 0) for sizes in ragged.values())
        sizes = jnp.where(rows > room // jnp.maximum(columns, 1), past(room), rows * columns)  # the product might wrap
    else:
        (label, sizes), by_rows = next(iter(ragged.items())), tensor.last_dims is None
        room, places = (tensor.shape[0], "rows") if by_rows else (tensor.shape[-1], "columns")
    fits, over = fit(sizes, room)
    message = f"{label}: group {{i}} ends past the {{room}} {places} of {name}; want room for all groups"
    checkify.check(fits, message, i=over, room=jnp.int32(room))
